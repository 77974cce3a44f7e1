"""Provisioning from folders and from a real web server with faults."""

import asyncio
import contextlib
import dataclasses
import errno
import gzip
import hashlib
import itertools
import json
import os
import pathlib
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.gguf_file import read_model
from meshnet_gguf.inventory import take_inventory
from meshnet_gguf.manifest import Manifest, make_manifest
from meshnet_gguf.provision import Options, Provisioned, open_sources, provision
from meshnet_gguf.provisioned_set import ChunkWriter, ProvisionedSet, runs
from meshnet_gguf.testing.model_server import Answer, ModelServer, Request

from proto.meshnet.shard.v1 import errors_pb2

SPLIT = [pathlib.Path(path) for path in os.environ["FIXTURE_TINY_SPLIT"].split()]
CHUNK = 1 << 16
MAIN_LAYERS = 8


class PatientClock:
    """Notes how long somebody would have waited, and lets nobody wait."""

    def __init__(self) -> None:
        self.waited: list[int] = []

    def now_ms(self) -> int:
        return sum(self.waited)

    async def sleep_ms(self, milliseconds: int) -> None:
        self.waited.append(milliseconds)
        await asyncio.sleep(0)


@pytest.fixture(scope="module")
def split() -> Manifest:
    return make_manifest(SPLIT, chunk_bytes=CHUNK)


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder with the split set."""
    folder = tmp_path / "source"
    folder.mkdir()
    for path in SPLIT:
        shutil.copy(path, folder / path.name)
        (folder / path.name).chmod(0o644)
    return folder


@pytest.fixture
def to(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "storage"


@pytest.fixture
def server(folder: pathlib.Path) -> Iterator[ModelServer]:
    with ModelServer(folder) as server:
        yield server


async def provisioned(
    manifest: Manifest,
    places: Sequence[str | pathlib.Path],
    to: pathlib.Path,
    layers: tuple[int, int] | None = None,
    ca_file: pathlib.Path | None = None,
    silence_seconds: float = 30.0,
    **options: Any,
) -> Provisioned:
    options.setdefault("clock", PatientClock())
    async with open_sources(
        map(str, places), ca_file=ca_file, silence_seconds=silence_seconds
    ) as sources:
        return await provision(manifest, sources, to, layers=layers, options=Options(**options))


async def refusal(*arguments: Any, **named: Any) -> MeshnetError:
    with pytest.raises(MeshnetError) as caught:
        await provisioned(*arguments, **named)
    return caught.value


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.gguf")}


def make(folder: pathlib.Path) -> pathlib.Path:
    folder.mkdir()
    return folder


def names_in(folder: pathlib.Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def bytes_on_disk(folder: pathlib.Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*.gguf"))


def is_right(done: Provisioned) -> bool:
    return contents(done.folder) == {path.name: path.read_bytes() for path in SPLIT}


async def test_a_folder_becomes_a_set(
    split: Manifest, folder: pathlib.Path, to: pathlib.Path
) -> None:
    done = await provisioned(split, [folder], to)
    assert done.folder == to / split.artifact_sha256
    assert done.model == done.folder / SPLIT[0].name
    assert is_right(done)
    assert (done.fetched_bytes, done.kept_bytes) == (split.total_bytes, 0)
    assert done.rehashed == tuple(file.name for file in split.files)
    assert hashlib.sha256(done.manifest.read_bytes()).hexdigest() == done.artifact_sha256
    assert json.loads((done.folder / "provisioned.json").read_text()) == {
        "artifact_sha256": split.artifact_sha256,
        "files": [{"chunks": [0, len(file.chunks)], "name": file.name} for file in split.files],
        "schema": "meshnet.provisioned/1",
    }
    expected = [*(path.name for path in SPLIT), "manifest.json", "provisioned.json"]
    assert names_in(done.folder) == sorted(expected)
    assert names_in(to) == [f".{split.artifact_sha256}.lock", split.artifact_sha256]


async def test_a_complete_set_needs_no_source(
    split: Manifest, folder: pathlib.Path, to: pathlib.Path
) -> None:
    await provisioned(split, [folder], to)
    shutil.rmtree(folder)
    again = await provisioned(split, [folder], to)
    assert (again.fetched_bytes, again.kept_bytes) == (0, split.total_bytes)
    assert is_right(again)


@pytest.mark.parametrize(
    ("change", "reason", "said"),
    [
        (lambda f: (f / SPLIT[2].name).unlink(), "ARTIFACT_INCOMPLETE", SPLIT[2].name),
        (
            lambda f: shutil.copy(SPLIT[2], f / SPLIT[2].name.replace("00003-of", "00004-of")),
            "ARTIFACT_MISMATCH",
            "00004-of-00003",
        ),
        (
            lambda f: shutil.copy(SPLIT[2], f / SPLIT[2].name.replace("of-00003", "of-00004")),
            "ARTIFACT_MISMATCH",
            "00003-of-00004",
        ),
        (lambda f: os.truncate(f / SPLIT[1].name, 1000), "ARTIFACT_MISMATCH", "there are 1000"),
        (
            lambda f: (f / SPLIT[1].name).write_bytes(b"x" * SPLIT[1].stat().st_size),
            "ARTIFACT_MISMATCH",
            "chunk 0: expected SHA-256",
        ),
        (lambda f: shutil.rmtree(f), "ARTIFACT_UNREADABLE", "cannot read"),
        (
            lambda f: (f / SPLIT[1].name).unlink() or (f / SPLIT[1].name).mkdir(),
            "ARTIFACT_UNREADABLE",
            "not a regular file",
        ),
    ],
)
async def test_a_wrong_folder_is_refused(
    split: Manifest,
    folder: pathlib.Path,
    to: pathlib.Path,
    change: Callable[[pathlib.Path], object],
    reason: str,
    said: str,
) -> None:
    change(folder)
    error = await refusal(split, [folder], to)
    assert error.reason_name == reason
    assert said in error.message
    assert not (to / split.artifact_sha256).exists()


async def test_what_was_right_is_kept_when_something_was_wrong(
    split: Manifest, folder: pathlib.Path, to: pathlib.Path
) -> None:
    path = folder / SPLIT[1].name
    content = path.read_bytes()
    damaged = 50
    path.write_bytes(content[: damaged * CHUNK] + b"\0" + content[damaged * CHUNK + 1 :])
    error = await refusal(split, [folder], to, parallel=1)
    assert error.reason == errors_pb2.REASON_ARTIFACT_MISMATCH
    assert f"{SPLIT[1].name}, chunk {damaged}: expected SHA-256" in error.message
    path.write_bytes(content)
    done = await provisioned(split, [folder], to)
    assert is_right(done)
    assert done.kept_bytes >= damaged * CHUNK
    assert done.fetched_bytes + done.kept_bytes == split.total_bytes


async def test_another_place_steps_in(
    split: Manifest, folder: pathlib.Path, to: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    shutil.copytree(folder, tmp_path / "good")
    (folder / SPLIT[1].name).write_bytes(b"x" * SPLIT[1].stat().st_size)
    done = await provisioned(split, [tmp_path / "absent", folder, tmp_path / "good"], to)
    assert is_right(done)


async def test_splits_that_disagree(
    folder: pathlib.Path, to: pathlib.Path, split: Manifest
) -> None:
    """A manifest that binds a set whose headers contradict each other."""
    shutil.copy(SPLIT[1], folder / SPLIT[2].name)
    wrong = dataclasses.replace(split.files[1], name=SPLIT[2].name)
    manifest = dataclasses.replace(split, files=(*split.files[:2], wrong))
    error = await refusal(manifest, [folder], to)
    assert error.reason == errors_pb2.REASON_ARTIFACT_INVALID
    assert "split.no" in error.message


async def test_a_manifest_that_says_something_else_than_the_headers(
    folder: pathlib.Path, to: pathlib.Path, split: Manifest
) -> None:
    for manifest in (
        dataclasses.replace(split, tokenizer_sha256="0" * 64),
        dataclasses.replace(
            split, files=(*split.files[:2], dataclasses.replace(split.files[2], layers=(0, 3)))
        ),
    ):
        error = await refusal(manifest, [folder], to)
        assert error.reason == errors_pb2.REASON_ARTIFACT_MISMATCH
        assert "the manifest says" in error.message


async def test_a_file_hash_that_contradicts_the_chunks(
    folder: pathlib.Path, to: pathlib.Path, split: Manifest
) -> None:
    wrong = dataclasses.replace(split.files[1], sha256="0" * 64)
    manifest = dataclasses.replace(split, files=(split.files[0], wrong, split.files[2]))
    error = await refusal(manifest, [folder], to)
    assert error.reason == errors_pb2.REASON_ARTIFACT_MISMATCH
    assert "contradicts itself" in error.message
    assert not (to / manifest.artifact_sha256).exists()


async def test_disk_space_comes_first(
    split: Manifest, folder: pathlib.Path, to: pathlib.Path
) -> None:
    spare = 16 << 20
    free = split.total_bytes + spare - 1
    error = await refusal(split, [folder], to, free_bytes=lambda _: free)
    assert error.reason == errors_pb2.REASON_STORAGE_FULL
    assert str(split.total_bytes) in error.message
    assert str(free) in error.message
    assert bytes_on_disk(to) == 0
    assert is_right(await provisioned(split, [folder], to, free_bytes=lambda _: free + 1))


async def test_no_target_under_home(
    split: Manifest, folder: pathlib.Path, to: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "link").symlink_to("/home/somebody")
    (tmp_path / "far").symlink_to(tmp_path / "link")
    for target in (
        pathlib.Path("/home/somebody/models"),
        pathlib.Path("/usr/../home/somebody"),
        tmp_path / "link" / "models",
        tmp_path / "far",
    ):
        error = await refusal(split, [folder], target)
        assert error.reason == errors_pb2.REASON_CONFIGURATION_INVALID
        assert "outside /home" in error.message
    make(to)
    for name in (split.artifact_sha256, f".{split.artifact_sha256}.part"):
        (to / name).symlink_to("/home/somebody")
        error = await refusal(split, [folder], to)
        assert "outside /home" in error.message
        (to / name).unlink()
    part = to / f".{split.artifact_sha256}.part"
    part.mkdir()
    (part / SPLIT[0].name).symlink_to("/home/somebody/x.gguf")
    error = await refusal(split, [folder], to)
    assert error.reason == errors_pb2.REASON_CONFIGURATION_INVALID
    assert "expected a plain file" in error.message


async def test_damage_is_found_and_repaired_when_asked(
    split: Manifest, folder: pathlib.Path, to: pathlib.Path
) -> None:
    done = await provisioned(split, [folder], to)
    path = done.folder / SPLIT[2].name
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(7 * CHUNK)
        file.write(b"damage")
    again = await provisioned(split, [folder], to, recheck=True)
    assert is_right(again)
    assert again.fetched_bytes == CHUNK


async def test_known_damage_is_not_forgotten(
    split: Manifest, folder: pathlib.Path, to: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """A check that finds damage and cannot mend it, and a later call that checks nothing."""
    done = await provisioned(split, [folder], to)
    path = done.folder / SPLIT[2].name
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(7 * CHUNK)
        file.write(b"damage")
    error = await refusal(split, [tmp_path / "absent"], to, recheck=True)
    assert error.reason == errors_pb2.REASON_ARTIFACT_UNREADABLE
    again = await provisioned(split, [folder], to)
    assert again.fetched_bytes == CHUNK
    assert is_right(again)


async def test_a_disk_that_is_full_after_all(
    split: Manifest, server: ModelServer, to: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.pwrite

    def full(descriptor: int, data: memoryview, offset: int) -> int:
        if offset >= 3_000_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        error = await refusal(split, [server.url], to, parallel=1)
    assert error.reason == errors_pb2.REASON_STORAGE_FULL
    assert "No space left" in error.message
    done = await provisioned(split, [server.url], to)
    assert is_right(done)
    assert done.kept_bytes > 2_900_000


# Layers.


def needed_ranges(model: Any, layers: tuple[int, int]) -> Iterator[tuple[int, int, int]]:
    """File, offset and length of everything that a stage with these layers reads."""
    for index, file in enumerate(model.files):
        yield index, 0, file.data_offset
    inventory = take_inventory(model)
    for item in inventory.items:
        if inventory.owners(item, (layers,)):
            yield item.tensor.file, item.tensor.offset, item.tensor.bytes


def has_what_it_needs(done: Provisioned, layers: tuple[int, int]) -> None:
    model = read_model(SPLIT[0])
    for file, offset, length in needed_ranges(model, layers):
        expected = SPLIT[file].read_bytes()[offset : offset + length]
        found = (done.folder / SPLIT[file].name).read_bytes()[offset : offset + length]
        assert found == expected


def fewest_bytes(manifest: Manifest, layers: tuple[int, int]) -> int:
    """Bytes of the chunks that hold what these layers need."""
    chunks = {
        (file, chunk)
        for file, offset, length in needed_ranges(read_model(SPLIT[0]), layers)
        for chunk in manifest.chunks_of(offset, length)
    }
    return sum(manifest.chunk_span(manifest.files[file], chunk)[1] for file, chunk in chunks)


@pytest.mark.parametrize("layers", [(0, 3), (3, 5), (5, 8), (0, 8)])
async def test_only_what_the_layers_need(
    split: Manifest, server: ModelServer, to: pathlib.Path, layers: tuple[int, int]
) -> None:
    done = await provisioned(split, [server.url], to, layers)
    has_what_it_needs(done, layers)
    expected = fewest_bytes(split, layers)
    assert done.fetched_bytes == expected
    assert server.asked_bytes() == expected
    if layers != (0, MAIN_LAYERS):
        assert expected < 0.8 * split.total_bytes
    for path in SPLIT:
        found = done.folder / path.name
        assert found.stat().st_size == path.stat().st_size
    assert bytes_on_disk(done.folder) <= expected + (1 << 16)


async def test_more_layers_fill_the_holes(
    split: Manifest, server: ModelServer, to: pathlib.Path
) -> None:
    first = await provisioned(split, [server.url], to, (0, 3))
    second = await provisioned(split, [server.url], to, (2, 5))
    assert second.folder == first.folder
    has_what_it_needs(second, (0, 5))
    assert second.kept_bytes == first.fetched_bytes
    whole = await provisioned(split, [server.url], to)
    assert is_right(whole)
    assert server.asked_bytes() == split.total_bytes


async def test_layers_outside_the_model(
    split: Manifest, folder: pathlib.Path, to: pathlib.Path
) -> None:
    for layers in ((0, 9), (8, 9), (4, 4), (5, 3)):
        error = await refusal(split, [folder], to, layers)
        assert error.reason == errors_pb2.REASON_LAYER_RANGE_INVALID
        assert "<= 8" in error.message


# The web.


async def test_https_with_a_given_authority(
    split: Manifest, folder: pathlib.Path, to: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    with ModelServer(folder, tls=tmp_path) as server:
        error = await refusal(split, [server.url], to)
        assert error.reason == errors_pb2.REASON_SOURCE_UNAVAILABLE
        assert "certificate" in error.message.lower()
        assert not server.requests
        done = await provisioned(split, [server.url], to, ca_file=server.ca_file)
        assert is_right(done)


async def test_plaintext_is_for_loopback(
    split: Manifest, server: ModelServer, to: pathlib.Path
) -> None:
    error = await refusal(split, ["http://example.org/models"], to)
    assert error.reason == errors_pb2.REASON_INSECURE_TRANSPORT
    for place in ("ftp://example.org/x", "https://", "https://example.org/x?token=1"):
        error = await refusal(split, [place], to)
        assert error.reason == errors_pb2.REASON_CONFIGURATION_INVALID


def first_to(file: str, answer: Answer, times: int = 1) -> Callable[[Request], Answer | None]:
    """The first so many requests of a file beyond its header get this answer."""
    left = [times]

    def fault(request: Request) -> Answer | None:
        if request.file != file or (request.range and request.range[0] == 0) or not left[0]:
            return None
        left[0] -= 1
        return answer

    return fault


def hold(until: threading.Event) -> None:
    until.wait()


def always(answer: Answer) -> Callable[[Request], Answer]:
    return lambda request: answer


@pytest.mark.parametrize("has_ranges", [True, False])
@pytest.mark.parametrize(
    "answer",
    [
        Answer(status=503),
        Answer(status=429, headers={"Retry-After": "7"}),
        Answer(status=500),
        Answer(cut=100_000),
        Answer(cut=0),
    ],
)
async def test_what_may_pass_is_asked_again(
    split: Manifest, server: ModelServer, to: pathlib.Path, answer: Answer, has_ranges: bool
) -> None:
    server.has_ranges = has_ranges
    server.fault = first_to(SPLIT[2].name, answer, times=2)
    clock = PatientClock()
    done = await provisioned(split, [server.url], to, clock=clock, parallel=1)
    assert is_right(done)
    hint = 7000 if answer.status == 429 else 0
    if answer.cut:
        # What had come before the cut counts, so the next attempt is a first one again. Without
        # ranges, the header had come the first time, and nobody minded the cut.
        assert clock.waited == [250, 250][: 2 if has_ranges else 1]
    else:
        assert clock.waited == [max(250, hint), max(500, hint)]


async def test_attempts_are_bounded(split: Manifest, server: ModelServer, to: pathlib.Path) -> None:
    server.fault = lambda request: Answer(status=503) if request.range != (0, CHUNK) else None
    clock = PatientClock()
    error = await refusal(
        split, [server.url], to, clock=clock, parallel=1, attempts=5, max_backoff_ms=1000
    )
    assert error.reason == errors_pb2.REASON_SOURCE_UNAVAILABLE
    assert "gave up after 5 attempts" in error.message
    assert clock.waited == [250, 500, 1000, 1000]


async def test_a_server_that_falls_silent(
    split: Manifest, server: ModelServer, to: pathlib.Path
) -> None:
    held = threading.Event()
    server.fault = first_to(SPLIT[2].name, Answer(before_byte=lambda sent: hold(held)))
    try:
        done = await provisioned(split, [server.url], to, silence_seconds=0.5)
    finally:
        held.set()
    assert is_right(done)


async def test_nobody_there(split: Manifest, to: pathlib.Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and nobody listens
        port = unused.getsockname()[1]
        error = await refusal(split, [f"http://127.0.0.1:{port}"], to, attempts=2)
    assert error.reason == errors_pb2.REASON_SOURCE_UNAVAILABLE
    assert error.recovery == errors_pb2.RECOVERY_RETRY_CALL


@pytest.mark.parametrize(
    ("answer", "reason", "said"),
    [
        (Answer(status=404), "ARTIFACT_INCOMPLETE", "no such file"),
        (Answer(status=403), "SOURCE_ANSWER_INVALID", "got 403"),
        (Answer(status=204), "SOURCE_ANSWER_INVALID", "got 204"),
        (
            Answer(
                headers={"Content-Encoding": "gzip", "Content-Length": None}, body=gzip.compress
            ),
            "SOURCE_ANSWER_INVALID",
            "'gzip'",
        ),
        (Answer(headers={"Content-Range": "bytes 0-9/10"}), "ARTIFACT_MISMATCH", "there are 10"),
        (Answer(headers={"Content-Range": "pages 1-2/3"}), "SOURCE_ANSWER_INVALID", "in bytes"),
        (Answer(headers={"Content-Range": None}), "SOURCE_ANSWER_INVALID", "Content-Range"),
        (
            Answer(headers={"Content-Length": None}, body=lambda content: content + b"more"),
            "SOURCE_ANSWER_INVALID",
            "got more",
        ),
        (
            Answer(headers={"Content-Length": None}, body=lambda content: content[:-1]),
            "SOURCE_ANSWER_INVALID",
            "cut short, 1 of",
        ),
        (Answer(body=lambda content: bytes(len(content))), "ARTIFACT_MISMATCH", "SHA-256"),
        (Answer(headers={"ETag": '"other"'}), "SOURCE_CHANGED", "changed while"),
        (Answer(headers={"ETag": None}), "SOURCE_CHANGED", "to none"),
        (
            Answer(status=302, headers={"Location": "http://example.org/x"}),
            "INSECURE_TRANSPORT",
            "beyond loopback",
        ),
        (
            Answer(status=302, headers={"Location": f"/{SPLIT[2].name}"}),
            "SOURCE_ANSWER_INVALID",
            "redirects",
        ),
        (Answer(status=302), "SOURCE_ANSWER_INVALID", "got 302"),
        (
            Answer(status=302, headers={"Location": "file:///etc/passwd"}),
            "CONFIGURATION_INVALID",
            "expected https",
        ),
        (
            Answer(status=416, headers={"Content-Range": "bytes */77"}),
            "ARTIFACT_MISMATCH",
            "there are 77",
        ),
    ],
)
async def test_an_answer_that_cannot_be_used(
    split: Manifest,
    server: ModelServer,
    to: pathlib.Path,
    answer: Answer,
    reason: str,
    said: str,
) -> None:
    # The first file is fine: what came of it is kept, and the error does not come from it.
    server.fault = first_to(SPLIT[2].name, answer, times=1000)
    error = await refusal(split, [server.url], to, parallel=1)
    assert error.reason_name == reason
    assert said in error.message
    assert not (to / split.artifact_sha256).exists()
    before = len(server.requests)
    server.fault = lambda request: None
    done = await provisioned(split, [server.url], to)
    assert is_right(done)
    assert done.kept_bytes >= split.files[1].bytes
    assert all(request.file == SPLIT[2].name for request in server.requests[before:])


async def test_a_file_that_changes_midway(
    split: Manifest, server: ModelServer, to: pathlib.Path
) -> None:
    """A real change on the server, which If-Range answers with the whole of the other file."""
    name = SPLIT[2].name
    original = server.files[name]

    def fault(request: Request) -> Answer | None:
        if request.file == name and request.range and request.range[0] > 0:
            server.files[name] = original[:-4] + b"oops"
        return None

    server.fault = fault
    error = await refusal(split, [server.url], to, parallel=1)
    assert error.reason == errors_pb2.REASON_SOURCE_CHANGED
    assert any("If-Range" in request.headers for request in server.requests)
    server.fault = lambda request: None
    server.files[name] = original
    done = await provisioned(split, [server.url], to)
    assert is_right(done)
    assert done.kept_bytes >= split.files[1].bytes


async def test_a_wrong_size_without_ranges(
    split: Manifest, server: ModelServer, to: pathlib.Path
) -> None:
    server.has_ranges = False
    server.files[SPLIT[1].name] += b"more"
    error = await refusal(split, [server.url], to)
    assert error.reason == errors_pb2.REASON_ARTIFACT_MISMATCH


@pytest.mark.parametrize("layers", [None, (2, 4)])
async def test_a_server_without_ranges(
    split: Manifest, server: ModelServer, to: pathlib.Path, layers: tuple[int, int] | None
) -> None:
    server.has_ranges = False
    done = await provisioned(split, [server.url], to, layers)
    if layers:
        has_what_it_needs(done, layers)
        assert done.fetched_bytes == fewest_bytes(split, layers)
    else:
        assert is_right(done)
    # Once for the header and once for the rest of each file, and once to find out.
    assert len(server.requests) <= 2 * len(SPLIT) + 4


async def test_no_encoding_is_asked_for(
    split: Manifest, server: ModelServer, to: pathlib.Path
) -> None:
    await provisioned(split, [server.url], to, (2, 4))
    assert {r.headers.get("Accept-Encoding") for r in server.requests} == {"identity"}


async def test_redirects_are_followed(
    split: Manifest, server: ModelServer, folder: pathlib.Path, to: pathlib.Path
) -> None:
    with ModelServer(folder) as other:
        server.fault = lambda request: Answer(
            status=307, headers={"Location": f"{other.url}/deep/{request.file}"}
        )
        assert is_right(await provisioned(split, [server.url], to))
        assert other.asked_bytes() == split.total_bytes


async def test_no_redirect_from_https_to_a_plaintext_server_of_this_machine(
    split: Manifest,
    server: ModelServer,
    folder: pathlib.Path,
    to: pathlib.Path,
    tmp_path: pathlib.Path,
) -> None:
    with ModelServer(folder, tls=tmp_path) as outside:
        outside.fault = lambda request: Answer(
            status=302, headers={"Location": f"{server.url}/{request.file}"}
        )
        error = await refusal(split, [outside.url], to, ca_file=outside.ca_file)
        assert error.reason == errors_pb2.REASON_INSECURE_TRANSPORT
        assert not server.requests


async def test_a_lock_is_no_link(
    split: Manifest, folder: pathlib.Path, to: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("content")
    (make(to) / f".{split.artifact_sha256}.lock").symlink_to(precious)
    error = await refusal(split, [folder], to)
    assert error.reason == errors_pb2.REASON_ARTIFACT_UNREADABLE
    assert precious.read_text() == "content"


async def test_mirrors_share_the_work_and_stand_in(
    split: Manifest, server: ModelServer, folder: pathlib.Path, to: pathlib.Path
) -> None:
    with ModelServer(folder) as second, ModelServer(folder) as third:
        third.fault = always(Answer(status=503))
        del second.files[SPLIT[1].name]
        done = await provisioned(split, [server.url, second.url, third.url], to)
        assert is_right(done)
        for asked, file in ((server, SPLIT[1].name), (second, SPLIT[2].name)):
            assert any(r.file == file and r.range and r.range[0] > 0 for r in asked.requests)


async def test_two_at_once_fetch_once(
    split: Manifest, server: ModelServer, to: pathlib.Path
) -> None:
    first, second = await asyncio.gather(
        provisioned(split, [server.url], to), provisioned(split, [server.url], to)
    )
    assert is_right(first)
    assert first.fetched_bytes + second.fetched_bytes == split.total_bytes
    assert server.asked_bytes() == split.total_bytes


async def test_a_cancelled_call_keeps_what_it_has(
    split: Manifest, server: ModelServer, to: pathlib.Path
) -> None:
    loop = asyncio.get_running_loop()
    reached = asyncio.Event()

    def fault(request: Request) -> Answer | None:
        if request.file == SPLIT[2].name and request.range != (0, CHUNK):
            loop.call_soon_threadsafe(reached.set)
        return None

    server.fault = fault
    task = asyncio.create_task(provisioned(split, [server.url], to, parallel=1))
    await reached.wait()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    done = await provisioned(split, [server.url], to)
    assert is_right(done)
    assert done.kept_bytes >= split.files[1].bytes


# The journal.


@contextlib.contextmanager
def opened(manifest: Manifest, to: pathlib.Path) -> Iterator[ProvisionedSet]:
    with contextlib.closing(ProvisionedSet(manifest, to)) as kept:
        kept.open()
        yield kept


def write_chunks(manifest: Manifest, to: pathlib.Path, index: int, chunks: Sequence[int]) -> None:
    to.mkdir(exist_ok=True)
    with opened(manifest, to) as kept:
        file = manifest.files[index]
        content = SPLIT[index].read_bytes()
        for chunk in chunks:
            offset, length = manifest.chunk_span(file, chunk)
            ChunkWriter(kept, file, chunk, [chunk])(memoryview(content)[offset : offset + length])


async def resumed_kept(manifest: Manifest, to: pathlib.Path, folder: pathlib.Path) -> int:
    done = await provisioned(manifest, [folder], to)
    assert is_right(done)
    return done.kept_bytes


async def test_half_a_line_of_the_journal(
    split: Manifest, to: pathlib.Path, folder: pathlib.Path
) -> None:
    write_chunks(split, to, 1, [3, 4])
    journal = to / f".{split.artifact_sha256}.part" / ".journal"
    text = journal.read_text()
    assert text.endswith(f"{SPLIT[1].name} 3\n{SPLIT[1].name} 4\n")
    journal.write_text(text[:-2])
    assert await resumed_kept(split, to, folder) == CHUNK


async def test_after_a_power_cut_only_what_was_synced_counts(
    split: Manifest, to: pathlib.Path, folder: pathlib.Path
) -> None:
    write_chunks(split, to, 1, [3, 4])
    write_chunks(split, to, 1, [5])  # begins with a sync of 3 and 4
    journal = to / f".{split.artifact_sha256}.part" / ".journal"
    lines = journal.read_text().splitlines()
    journal.write_text("\n".join(["boot another", *lines[1:]]) + "\n")
    assert await resumed_kept(split, to, folder) == 2 * CHUNK


@pytest.mark.parametrize(
    "journal",
    [
        b"",
        b"\xff\xfe",
        b"boot ",
        b"noise\nnoise\n",
        b"boot x\nsynced 99999999999999999999\n",
        b"boot x\n" + SPLIT[1].name.encode() + b" " + b"9" * 5000 + b"\nsynced 1\n",
        b"boot x\nno-such-file.gguf 1\nsynced 1\n",
        b"boot x\n" + SPLIT[1].name.encode() + b" 99999\nsynced 1\n",
        b"boot x\n" + SPLIT[1].name.encode() + b" -1\nsynced 1\n",
    ],
)
async def test_noise_instead_of_a_journal(
    split: Manifest, to: pathlib.Path, folder: pathlib.Path, journal: bytes
) -> None:
    write_chunks(split, to, 1, [3])
    (to / f".{split.artifact_sha256}.part" / ".journal").write_bytes(journal)
    assert await resumed_kept(split, to, folder) == 0


@pytest.mark.parametrize(
    "record",
    [
        "",
        "[]",
        "{}",
        '{"artifact_sha256": 1}',
        '{"artifact_sha256": "ID", "files": [{"name": 1}]}',
        '{"artifact_sha256": "ID", "files": [{"name": "NAME", "chunks": [0]}]}',
        '{"artifact_sha256": "ID", "files": [{"name": "NAME", "chunks": [-9, 0]}]}',
        '{"artifact_sha256": "ID", "files": [{"name": "NAME", "chunks": [9999999, 99999999999]}]}',
        '{"artifact_sha256": "ID", "files": [{"name": "NAME", "chunks": ["0", "1"]}]}',
    ],
)
async def test_noise_instead_of_a_record(
    split: Manifest, to: pathlib.Path, folder: pathlib.Path, record: str
) -> None:
    done = await provisioned(split, [folder], to)
    path = done.folder / "provisioned.json"
    path.write_text(record.replace("ID", split.artifact_sha256).replace("NAME", SPLIT[1].name))
    assert await resumed_kept(split, to, folder) == 0


async def test_a_file_of_another_size_starts_anew(
    split: Manifest, to: pathlib.Path, folder: pathlib.Path
) -> None:
    write_chunks(split, to, 1, [3, 4])
    write_chunks(split, to, 2, [1])
    os.truncate(to / f".{split.artifact_sha256}.part" / SPLIT[1].name, 5)
    assert await resumed_kept(split, to, folder) == CHUNK


@given(st.sets(st.integers(0, 60)))
def test_runs_are_the_chunks(chunks: set[int]) -> None:
    found = runs(chunks)
    assert {chunk for begin, end in found for chunk in range(begin, end)} == chunks
    assert all(begin < end for begin, end in found)
    assert all(end < begin for (_, end), (begin, _) in itertools.pairwise(found))


@pytest.fixture(scope="module")
def fine() -> Manifest:
    """With chunks so small that the first file has many."""
    return make_manifest(SPLIT, chunk_bytes=1024)


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_a_writer_keeps_wanted_chunks_whatever_the_pieces(
    data: st.DataObject, fine: Manifest, tmp_path_factory: pytest.TempPathFactory
) -> None:
    manifest = fine
    file = manifest.files[0]
    content = SPLIT[0].read_bytes()
    wanted = data.draw(st.sets(st.integers(0, len(file.chunks) - 1)))
    cuts = sorted(data.draw(st.sets(st.integers(1, file.bytes - 1), max_size=12)))
    to = tmp_path_factory.mktemp("set")
    with opened(manifest, to) as kept:
        writer = ChunkWriter(kept, file, 0, wanted)
        for begin, end in zip([0, *cuts], [*cuts, file.bytes], strict=True):
            writer(memoryview(content)[begin:end])
        assert kept.verified[file.name] == wanted
        written = (kept.folder / file.name).read_bytes()
        for chunk in range(len(file.chunks)):
            offset, length = manifest.chunk_span(file, chunk)
            expected = content[offset : offset + length] if chunk in wanted else bytes(length)
            assert written[offset : offset + length] == expected
