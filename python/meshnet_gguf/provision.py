"""Brings an artifact, or the part of it that some layers need, onto this machine's storage.

    manifest = read_manifest("manifest.json")
    async with open_sources(["https://example.org/models/v4", "/mnt/models"]) as sources:
        done = await provision(manifest, sources, pathlib.Path("/srv/models"), layers=(0, 12))
    done.model, done.manifest        # what a worker takes as --model and --manifest

Every chunk is compared with the manifest before it counts; what counts is never fetched or read
again, also after a kill. Sources share the work, and one that fails is left for the others.
Whatever fails for good raises a MeshnetError; what was verified by then is kept.

With `layers` only the chunks that hold headers or tensors of these layers are fetched; the rest of
the files are holes. Provisioning more layers later fills the holes in place.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import hashlib
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from meshnet.clock import Clock, SystemClock

from meshnet_gguf import progress, storage
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.gguf_file import Model, read_model
from meshnet_gguf.inventory import take_inventory
from meshnet_gguf.manifest import Manifest, ManifestFile, check_headers
from meshnet_gguf.provisioned_set import MANIFEST_NAME, ChunkWriter, ProvisionedSet, runs
from meshnet_gguf.sources import Source, SourceError, open_sources
from meshnet_gguf.threads import in_thread
from proto.meshnet.shard.v1 import errors_pb2

__all__ = ["Options", "Provisioned", "open_sources", "provision"]

_JOB_BYTES = 16 << 20
# What a file system needs beside the files' own bytes.
_SPARE_BYTES = 16 << 20


@dataclass(frozen=True)
class Options:
    """How to fetch.

    `parallel` fetches run at once. A fetch that fails is tried again, on another source where there
    is one; after `attempts` in a row without a new verified chunk it fails for good. Before attempt
    n a fetch waits `backoff_ms` x 2^(n - 1), at most `max_backoff_ms`, or as long as a server asks.
    With `recheck`, what is already there is read and compared first. `free_bytes` and `clock` are
    for tests.
    """

    parallel: int = 4
    attempts: int = 6
    backoff_ms: int = 250
    max_backoff_ms: int = 15_000
    recheck: bool = False
    free_bytes: Callable[[pathlib.Path], int] = storage.free_bytes
    clock: Clock = field(default_factory=SystemClock)


@dataclass(frozen=True)
class Provisioned:
    """What is on storage now.

    `model` is the set's first file. `layers` are those asked for, None for the whole artifact.
    `fetched_bytes` are those of chunks that came now, `kept_bytes` of those that were there before.
    `rehashed` names the whole files whose own SHA-256 was compared as well, which takes that all of
    their chunks came now: of others the chunks' hashes vouch for them.
    """

    artifact_sha256: str
    folder: pathlib.Path
    model: pathlib.Path
    manifest: pathlib.Path
    layers: tuple[int, int] | None
    fetched_bytes: int
    kept_bytes: int
    rehashed: tuple[str, ...]


async def provision(
    manifest: Manifest,
    sources: Sequence[Source],
    to: pathlib.Path,
    *,
    layers: tuple[int, int] | None = None,
    options: Options | None = None,
) -> Provisioned:
    """See the module. `to` is a folder outside /home; the set becomes a folder in it.

    `layers` are half-open main layers. Shows progress on stderr. Several calls for one artifact, in
    whatever processes, wait for each other.

    Raises MeshnetError: CONFIGURATION_INVALID, STORAGE_FULL, LAYER_RANGE_INVALID, ARTIFACT_INVALID
    (headers that contradict each other), ARTIFACT_MISMATCH (other bytes or sizes than the
    manifest's), ARTIFACT_INCOMPLETE (a file that no source has), SOURCE_UNAVAILABLE,
    SOURCE_CHANGED, SOURCE_ANSWER_INVALID, INSECURE_TRANSPORT, ARTIFACT_UNREADABLE.
    """
    options = options or Options()
    folder = storage.make_folder(to)
    lock = folder / f".{manifest.artifact_sha256}.lock"
    storage.refuse_home(lock)
    try:
        async with storage.locked(lock):
            kept = ProvisionedSet(manifest, folder)
            with contextlib.closing(kept):
                await in_thread(kept.open)
                return await _Run(kept, sources, options).provision(layers)
    except OSError as error:
        raise MeshnetError(
            errors_pb2.REASON_ARTIFACT_UNREADABLE,
            f"cannot store the artifact in {folder}: {error}",
        ) from error


@dataclass(frozen=True)
class _Job:
    """A run of chunks of one file that nobody else fetches."""

    file: ManifestFile
    begin: int
    end: int


class _Run:
    """One call of provision()."""

    def __init__(self, kept: ProvisionedSet, sources: Sequence[Source], options: Options) -> None:
        self._set = kept
        self._manifest = kept.manifest
        self._options = options
        self._pool = _SourcePool(sources)
        self._streams: Mapping[str, asyncio.Lock] = collections.defaultdict(asyncio.Lock)
        self._changed: Mapping[str, asyncio.Event] = {
            file.name: asyncio.Event() for file in self._manifest.files
        }
        self._fetched = 0
        self._rehashed: list[str] = []

    async def provision(self, layers: tuple[int, int] | None) -> Provisioned:
        files = self._manifest.files
        if self._options.recheck:
            await self._recheck()
        kept_bytes = self._verified_bytes()
        fresh = [file for file in files if not self._set.verified[file.name]]
        wanted = {file: self._manifest.chunks_of(0, file.header_bytes) for file in files}
        everything = {file: range(len(file.chunks)) for file in files}
        self._check_space(everything if layers is None else wanted)
        if self._is_missing(everything if layers is None else wanted):
            await self._pool.check(files)
        await self._fetch_all(wanted, "the headers", [])
        model = await in_thread(read_model, self._set.folder / files[0].name)
        check_headers(self._manifest, model)
        parts: Mapping[ManifestFile, Sequence[int]] = everything
        if layers is not None:
            parts = _chunks_of_layers(self._manifest, model, layers)
        self._check_space(parts)
        whole = [file for file in fresh if len(parts[file]) == len(file.chunks)]
        await self._fetch_all(parts, files[0].name, whole)
        await in_thread(self._set.publish)
        return Provisioned(
            artifact_sha256=self._manifest.artifact_sha256,
            folder=self._set.folder,
            model=self._set.folder / files[0].name,
            manifest=self._set.folder / MANIFEST_NAME,
            layers=layers,
            fetched_bytes=self._fetched,
            kept_bytes=kept_bytes,
            rehashed=tuple(sorted(self._rehashed)),
        )

    def _verified_bytes(self) -> int:
        return sum(
            self._manifest.chunk_span(file, chunk)[1]
            for file in self._manifest.files
            for chunk in self._set.verified[file.name]
        )

    def _missing_bytes(self, wanted: Mapping[ManifestFile, Sequence[int]]) -> int:
        return sum(
            self._manifest.chunk_span(file, chunk)[1]
            for file, chunks in wanted.items()
            for chunk in self._set.missing(file, chunks)
        )

    def _is_missing(self, wanted: Mapping[ManifestFile, Sequence[int]]) -> bool:
        return any(self._set.missing(file, chunks) for file, chunks in wanted.items())

    def _check_space(self, wanted: Mapping[ManifestFile, Sequence[int]]) -> None:
        needed = self._missing_bytes(wanted)
        if not needed:
            return
        free = self._options.free_bytes(self._set.folder)
        if free < needed + _SPARE_BYTES:
            raise MeshnetError(
                errors_pb2.REASON_STORAGE_FULL,
                f"{needed} bytes are to be stored in {self._set.folder.parent} and "
                f"{_SPARE_BYTES} left over, {free} are free; make room or choose another folder",
            )

    async def _recheck(self) -> None:
        """Forgets the chunks that are not what they were."""
        work = iter(
            [
                (file, chunk)
                for file in self._manifest.files
                for chunk in sorted(self._set.verified[file.name])
            ]
        )
        damaged: dict[ManifestFile, list[int]] = {}

        async def check() -> None:
            for file, chunk in work:
                if await in_thread(self._set.read_chunk, file, chunk) != file.chunks[chunk]:
                    damaged.setdefault(file, []).append(chunk)
                advance(self._manifest.chunk_span(file, chunk)[1])

        with progress.bytes_bar("checking what is there", self._verified_bytes()) as advance:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(self._options.parallel):
                    tasks.create_task(check())
        for file, chunks in damaged.items():
            progress.say(f"{file.name}: {len(chunks)} chunks are damaged; fetching them again")
            await in_thread(self._set.forget, file, chunks)

    async def _fetch_all(
        self,
        wanted: Mapping[ManifestFile, Sequence[int]],
        what: str,
        rehash: Sequence[ManifestFile],
    ) -> None:
        """Has all the chunks verified, and the files' own hashes on the way."""
        jobs: collections.deque[_Job] = collections.deque()
        longest = max(1, _JOB_BYTES // self._manifest.chunk_bytes)
        for file, chunks in wanted.items():
            for begin, end in runs(self._set.missing(file, chunks)):
                jobs.extend(
                    _Job(file, first, min(first + longest, end))
                    for first in range(begin, end, longest)
                )
        total = self._missing_bytes(wanted)
        with progress.bytes_bar(f"fetching {what}", total) as advance:

            async def work() -> None:
                while jobs:
                    await self._do(jobs.popleft(), wanted, advance)

            try:
                async with asyncio.TaskGroup() as tasks:
                    for file in rehash:
                        tasks.create_task(self._rehash(file))
                    for _ in range(min(self._options.parallel, len(jobs))):
                        tasks.create_task(work())
            except ExceptionGroup as errors:
                raise _first(errors) from errors

    async def _do(
        self,
        job: _Job,
        wanted: Mapping[ManifestFile, Sequence[int]],
        advance: Callable[[int], None],
    ) -> None:
        """Has one job's chunks verified, whatever sources it takes."""
        failures = 0
        while missing := self._set.missing(job.file, range(job.begin, job.end)):
            source = self._pool.take(job.file)
            had_ranges = source.has_ranges
            before = len(missing)
            try:
                if had_ranges:
                    begin, end = runs(missing)[0]
                    await self._fetch(source, job.file, begin, end, range(begin, end), advance)
                else:
                    await self._stream(source, job, wanted[job.file], advance)
                self._pool.praise(source)
            except MeshnetError as error:
                if had_ranges and not source.has_ranges:
                    continue  # as a stream, then
                if len(self._set.missing(job.file, missing)) < before:
                    failures = 0
                if error.reason in (
                    errors_pb2.REASON_STORAGE_FULL,
                    errors_pb2.REASON_CONFIGURATION_INVALID,
                ):
                    raise
                failures += 1
                await self._after_failure(source, job.file, error, failures)
            finally:
                self._pool.give_back(source)

    async def _after_failure(
        self, source: Source, file: ManifestFile, error: MeshnetError, failures: int
    ) -> None:
        may_pass = isinstance(error, SourceError) and error.may_pass
        if not may_pass:
            self._pool.exclude(source, file, error)
            return  # another source need not be waited for
        self._pool.blame(source)
        if failures >= self._options.attempts:
            raise MeshnetError(
                error.reason, f"{error.message}; gave up after {failures} attempts in a row"
            ) from error
        wait = min(self._options.backoff_ms << (failures - 1), self._options.max_backoff_ms)
        await self._options.clock.sleep_ms(max(wait, error.retry_after_ms))

    async def _stream(
        self,
        source: Source,
        job: _Job,
        wanted: Sequence[int],
        advance: Callable[[int], None],
    ) -> None:
        """From a source without ranges: everything that is missing of the file, in one go."""
        async with self._streams[job.file.name]:
            missing = self._set.missing(job.file, wanted)
            if self._set.missing(job.file, range(job.begin, job.end)):
                await self._fetch(source, job.file, 0, missing[-1] + 1, missing, advance)

    async def _fetch(
        self,
        source: Source,
        file: ManifestFile,
        begin: int,
        end: int,
        wanted: Sequence[int],
        advance: Callable[[int], None],
    ) -> None:
        offset = self._manifest.chunk_span(file, begin)[0]
        last, length = self._manifest.chunk_span(file, end - 1)
        writer = ChunkWriter(self._set, file, begin, wanted)
        shown = 0

        def sink(piece: memoryview) -> None:
            nonlocal shown
            writer(piece)
            if writer.verified_bytes > shown:
                advance(writer.verified_bytes - shown)
                shown = writer.verified_bytes
                loop.call_soon_threadsafe(self._changed[file.name].set)

        loop = asyncio.get_running_loop()
        try:
            await source.fetch(file, offset, last + length - offset, sink)
        except MeshnetError as error:
            if isinstance(error, SourceError):
                raise
            raise MeshnetError(error.reason, f"{source.name}: {error.message}") from error
        finally:
            self._fetched += writer.verified_bytes

    async def _rehash(self, file: ManifestFile) -> None:
        """The file's own hash, of what lies on the disk, while the later chunks still come."""
        digest = hashlib.sha256()
        descriptor = self._set.descriptor(file)
        done = 0
        while done < len(file.chunks):
            self._changed[file.name].clear()
            end = done
            while end < len(file.chunks) and end in self._set.verified[file.name]:
                end += 1
            if end == done:
                await self._changed[file.name].wait()
                continue
            first, _ = self._manifest.chunk_span(file, done)
            last, length = self._manifest.chunk_span(file, end - 1)
            await in_thread(_hash_range, descriptor, digest, first, last + length)
            done = end
        if digest.hexdigest() != file.sha256:
            raise MeshnetError(
                errors_pb2.REASON_ARTIFACT_MISMATCH,
                f"{file.name}: expected SHA-256 {file.sha256}, got {digest.hexdigest()}, "
                "though every chunk agrees; the manifest contradicts itself: make it anew",
            )
        self._rehashed.append(file.name)


def _hash_range(descriptor: int, digest: hashlib._Hash, offset: int, end: int) -> None:
    buffer = memoryview(bytearray(min(1 << 20, end - offset)))
    while offset < end:
        got = os.preadv(descriptor, [buffer[: end - offset]], offset)
        if got == 0:
            raise OSError("a file on storage became shorter while it was written")
        digest.update(buffer[:got])
        offset += got


def _chunks_of_layers(
    manifest: Manifest, model: Model, layers: tuple[int, int]
) -> dict[ManifestFile, list[int]]:
    inventory = take_inventory(model)
    begin, end = layers
    if not 0 <= begin < end <= inventory.main_layers:
        raise MeshnetError(
            errors_pb2.REASON_LAYER_RANGE_INVALID,
            f"expected 0 <= begin < end <= {inventory.main_layers} (the model's layers), "
            f"got [{begin}, {end})",
        )
    chunks: dict[ManifestFile, set[int]] = {
        file: set(manifest.chunks_of(0, file.header_bytes)) for file in manifest.files
    }
    for item in inventory.items:
        if inventory.owners(item, (layers,)):
            file = manifest.files[item.tensor.file]
            chunks[file].update(manifest.chunks_of(item.tensor.offset, item.tensor.bytes))
    return {file: sorted(own) for file, own in chunks.items()}


class _SourcePool:
    """Which source to ask next: the least busy of those that can still have the file."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = list(sources)
        self._busy = [0] * len(self._sources)
        self._strikes = [0] * len(self._sources)
        self._failed: dict[tuple[int, str], MeshnetError] = {}

    async def check(self, files: tuple[ManifestFile, ...]) -> None:
        """Leaves out the places that cannot be the artifact's."""
        for index, source in enumerate(self._sources):
            try:
                await source.check(files)
            except MeshnetError as error:
                for file in files:
                    self._failed[index, file.name] = error
        self._usable(files[0])

    def _usable(self, file: ManifestFile) -> list[int]:
        usable = [
            index for index in range(len(self._sources)) if (index, file.name) not in self._failed
        ]
        if usable:
            return usable
        errors = [self._failed[index, file.name] for index in range(len(self._sources))]
        if len(errors) == 1:
            raise errors[0]
        told = "; ".join(f"{error.reason_name}: {error.message}" for error in errors)
        raise MeshnetError(errors[0].reason, f"no source can give {file.name}: {told}")

    def take(self, file: ManifestFile) -> Source:
        """A source for a fetch. Raises MeshnetError when none is left."""
        index = min(
            self._usable(file),
            key=lambda index: (
                not self._sources[index].has_ranges,
                self._strikes[index],
                self._busy[index],
                index,
            ),
        )
        self._busy[index] += 1
        return self._sources[index]

    def give_back(self, source: Source) -> None:
        """The fetch is over."""
        self._busy[self._sources.index(source)] -= 1

    def blame(self, source: Source) -> None:
        """It failed, and may come back: the others go first."""
        self._strikes[self._sources.index(source)] += 1

    def praise(self, source: Source) -> None:
        """It gave what it was asked for."""
        self._strikes[self._sources.index(source)] = 0

    def exclude(self, source: Source, file: ManifestFile, error: MeshnetError) -> None:
        """The source cannot give this file."""
        self._failed[self._sources.index(source), file.name] = error
        if len(self._sources) > 1:
            progress.say(f"leaving {source.name} out for {file.name}: {error}")
        self._usable(file)


def _first(errors: ExceptionGroup[Exception]) -> Exception:
    error: Exception = errors
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
