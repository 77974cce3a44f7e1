"""Provisioning on local files: as fast as a plain copy that hashes, and no work done twice.

The plain copy is one thread that reads, hashes and writes a piece at a time and then syncs, which
is the least that has to be done. Provisioning does more: it hashes chunks and files, keeps a
journal, syncs as it goes and publishes in one step; and it may use what cores there are. Both read
from the page cache, and both end when the bytes are on the disk.

For the resumption a provisioning process is killed in the middle (kill -9). What the second one
reads is what the kernel counts of it, less the bytes that were still to be fetched.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hashlib
import os
import pathlib
import random
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator

from meshnet_gguf.manifest import DEFAULT_CHUNK_BYTES, Manifest, make_manifest
from meshnet_gguf.provision import Provisioned, open_sources, provision

from benchmarks.control.metrics import Metric, Settings, at_least, at_most

__all__ = ["measure"]

_PIECE_BYTES = 1 << 20
_REPEATS = 5


async def measure(settings: Settings) -> AsyncIterator[Metric]:
    """See the module."""
    size = (16 << 20) if settings.quick else (1 << 30)
    source = settings.folder / "source"
    source.mkdir()
    _write_model(source / "model.gguf", size)
    with _all_cores():
        chunk_bytes = (64 << 10) if settings.quick else DEFAULT_CHUNK_BYTES
        manifest = make_manifest([source], chunk_bytes=chunk_bytes)
        copies, provisions = [], []
        for _ in range(1 if settings.quick else _REPEATS):
            copies.append(_plain_copy(source, settings.folder / "copy"))
            provisions.append(await _provision(manifest, source, settings.folder / "storage"))
        rates = [manifest.total_bytes / 1e6 / statistics.median(t) for t in (copies, provisions)]
        yield Metric("provision_copy_mb_per_s", rates[0], "MB/s")
        yield Metric("provision_mb_per_s", rates[1], "MB/s")
        shares = [copy / own for copy, own in zip(copies, provisions, strict=True)]
        yield Metric("provision_of_plain_copy", statistics.median(shares), "", at_least(0.8))
        kept, again, read = await _resume(manifest, source, settings.folder / "resumed")
        yield Metric("provision_resume_kept_mb", kept / 1e6, "MB")
        yield Metric("provision_resume_refetched_bytes", again, "bytes", at_most(0))
        yield Metric("provision_resume_reread_mb", read / 1e6, "MB", at_most(1))


def _write_model(path: pathlib.Path, size: int) -> None:
    """A GGUF header without tensors, and random bytes behind it."""
    key, value = b"general.architecture", b"llama"
    entry = struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 8, len(value)) + value
    generator = random.Random(1)  # noqa: S311 (any bytes will do)
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry)
        for _ in range(size // _PIECE_BYTES):
            file.write(generator.randbytes(_PIECE_BYTES))


def _plain_copy(source: pathlib.Path, to: pathlib.Path) -> float:
    """Seconds."""
    to.mkdir()
    begin = time.perf_counter()
    for path in source.iterdir():
        digest = hashlib.sha256()
        with path.open("rb") as file, (to / path.name).open("wb") as copy:
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
                copy.write(piece)
            copy.flush()
            os.fsync(copy.fileno())
    seconds = time.perf_counter() - begin
    shutil.rmtree(to)
    return seconds


async def _provision(manifest: Manifest, source: pathlib.Path, to: pathlib.Path) -> float:
    """Seconds."""
    begin = time.perf_counter()
    done = await _provisioned(manifest, source, to)
    seconds = time.perf_counter() - begin
    if done.fetched_bytes != manifest.total_bytes or not done.rehashed:
        raise RuntimeError("expected everything to be fetched and every file hashed")
    shutil.rmtree(to)
    return seconds


async def _provisioned(manifest: Manifest, source: pathlib.Path, to: pathlib.Path) -> Provisioned:
    async with open_sources([str(source)]) as sources:
        return await provision(manifest, sources, to)


async def _resume(
    manifest: Manifest, source: pathlib.Path, to: pathlib.Path
) -> tuple[int, float, float]:
    """Bytes that were kept, that were fetched though they were there, and read beyond the rest."""
    kept = await asyncio.to_thread(_begin_and_kill, manifest, source, to)
    before = _read_bytes()
    done = await _provisioned(manifest, source, to)
    read = _read_bytes() - before
    shutil.rmtree(to)
    return kept, done.fetched_bytes - (manifest.total_bytes - kept), read - done.fetched_bytes


def _begin_and_kill(manifest: Manifest, source: pathlib.Path, to: pathlib.Path) -> int:
    """Bytes of the chunks that a process had noted when it was killed."""
    to.mkdir()
    (to / "manifest.json").write_bytes(manifest.to_bytes())
    arguments = ["provision", str(to / "manifest.json"), f"--from={source}", f"--to={to}"]
    part = to / f".{manifest.artifact_sha256}.part"
    # Beside two lines of the journal's own.
    enough = 2 + sum(len(file.chunks) for file in manifest.files) // 4
    with subprocess.Popen(
        [sys.executable, "-m", "meshnet_gguf.cli.meshnet", *arguments, "--parallel=1"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        stdin=subprocess.DEVNULL,
    ) as process:
        while len(_journalled(part)) <= enough and process.poll() is None:
            time.sleep(0.0005)
        process.send_signal(signal.SIGKILL)
    if process.returncode != -signal.SIGKILL:
        raise RuntimeError("expected the process to be killed before it was done")
    noted = set(_journalled(part))
    return sum(
        manifest.chunk_span(file, chunk)[1]
        for file in manifest.files
        for chunk in range(len(file.chunks))
        if f"{file.name} {chunk}" in noted
    )


def _journalled(part: pathlib.Path) -> list[str]:
    try:
        return (part / ".journal").read_text("ascii").splitlines()
    except FileNotFoundError:
        return []


def _read_bytes() -> int:
    """What this process has read so far, from wherever."""
    for line in pathlib.Path("/proc/self/io").read_text("ascii").splitlines():
        if line.startswith("rchar: "):
            return int(line.removeprefix("rchar: "))
    raise RuntimeError("expected rchar in /proc/self/io")


@contextlib.contextmanager
def _all_cores() -> Iterator[None]:
    """For what is started within: the benchmark itself keeps off a core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        asyncio.get_running_loop().set_default_executor(pool)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)
            asyncio.get_running_loop().set_default_executor(concurrent.futures.ThreadPoolExecutor())
