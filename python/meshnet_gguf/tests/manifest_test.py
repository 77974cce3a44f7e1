import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.gguf_file import read_model
from meshnet_gguf.manifest import (
    FileRole,
    Manifest,
    ManifestFile,
    Origin,
    check_headers,
    make_manifest,
    parse_manifest,
    read_manifest,
)

from proto.meshnet.shard.v1 import errors_pb2

TINY = pathlib.Path(os.environ["FIXTURE_TINY"])
SPLIT = [pathlib.Path(path) for path in os.environ["FIXTURE_TINY_SPLIT"].split()]
ORIGIN = Origin("example/tiny", "60d8d70", "abc")
CHUNK = 1 << 16


def refusal(function: Any, *arguments: Any, **named: Any) -> MeshnetError:
    with pytest.raises(MeshnetError) as caught:
        function(*arguments, **named)
    return caught.value


@pytest.fixture(scope="module")
def single() -> Manifest:
    return make_manifest([TINY], ORIGIN, chunk_bytes=CHUNK)


@pytest.fixture(scope="module")
def split() -> Manifest:
    return make_manifest(SPLIT, ORIGIN, chunk_bytes=CHUNK)


def test_a_single_file(single: Manifest) -> None:
    content = TINY.read_bytes()
    assert single.origin == ORIGIN
    assert single.tokenizer_sha256 == read_model(TINY).tokenizer_sha256
    (file,) = single.files
    assert (file.name, file.bytes, file.role) == (TINY.name, len(content), FileRole.MODEL)
    assert file.layers == (0, 9)  # 8 main layers and one for multi-token prediction
    assert file.sha256 == hashlib.sha256(content).hexdigest()
    assert file.chunks == tuple(
        hashlib.sha256(content[at : at + CHUNK]).hexdigest() for at in range(0, len(content), CHUNK)
    )
    assert file.header_bytes == read_model(TINY).files[0].data_offset


def test_a_split_set(split: Manifest, single: Manifest) -> None:
    assert [file.name for file in split.files] == [path.name for path in SPLIT]
    assert [file.role for file in split.files] == [
        FileRole.METADATA,
        FileRole.WEIGHTS,
        FileRole.WEIGHTS,
    ]
    assert split.files[0].layers is None
    for file, path in zip(split.files, SPLIT, strict=True):
        assert file.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert split.tokenizer_sha256 == single.tokenizer_sha256
    assert split.artifact_sha256 != single.artifact_sha256


def test_the_identity_is_the_hash_of_the_file(split: Manifest, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_bytes(split.to_bytes())
    assert read_manifest(path) == split
    assert hashlib.sha256(path.read_bytes()).hexdigest() == split.artifact_sha256
    again = json.dumps(json.loads(path.read_bytes()), indent=1, sort_keys=True) + "\n"
    assert again.encode() == path.read_bytes()


def test_the_golden_one() -> None:
    """The same file and hash as in cc/shard_engine/llama/manifest_test.cc."""
    golden = pathlib.Path(os.environ["GOLDEN_MANIFEST"])
    manifest = read_manifest(golden)
    identity = "a01f8b758e45934a575193b24b96f091a8e4d17a3f3ebe2d2bc79b0eaada258a"
    assert manifest.artifact_sha256 == identity
    assert manifest.to_bytes() == golden.read_bytes()
    assert manifest.origin == Origin("example/golden", "60d8d70", "v1")
    assert [file.layers for file in manifest.files] == [None, (0, 4)]


def test_everything_is_bound(split: Manifest) -> None:
    seen = {split.artifact_sha256}
    origin = split.origin
    file = split.files[1]
    changes = [
        dataclasses.replace(split, origin=dataclasses.replace(origin, repository="other")),
        dataclasses.replace(split, origin=dataclasses.replace(origin, revision="other")),
        dataclasses.replace(split, origin=dataclasses.replace(origin, tokenizer_revision="other")),
        dataclasses.replace(split, tokenizer_sha256="0" * 64),
        *(
            dataclasses.replace(
                split,
                files=(split.files[0], dataclasses.replace(file, **change), *split.files[2:]),
            )
            for change in (
                {"name": "other.gguf"},
                {"bytes": file.bytes - 1},
                {"role": FileRole.METADATA},
                {"layers": (0, 1)},
                {"header_bytes": 1},
                {"sha256": "0" * 64},
                {"chunks": ("0" * 64, *file.chunks[1:])},
            )
        ),
    ]
    for change in changes:
        identity = hashlib.sha256(change.to_bytes()).hexdigest()
        assert identity not in seen
        seen.add(identity)


@pytest.mark.parametrize(
    "given_paths",
    [[0], [2], [0, 1, 2], [2, 0, 1]],
)
def test_any_way_to_name_a_set(split: Manifest, given_paths: list[int]) -> None:
    paths = [SPLIT[index] for index in given_paths]
    assert make_manifest(paths, ORIGIN, chunk_bytes=CHUNK) == split


def copied(to: pathlib.Path) -> pathlib.Path:
    for path in SPLIT:
        shutil.copy(path, to / path.name)
    return to


def test_a_folder(split: Manifest, tmp_path: pathlib.Path) -> None:
    (copied(tmp_path) / "README.md").write_text("no part of it")
    assert make_manifest([tmp_path], ORIGIN, chunk_bytes=CHUNK) == split


def test_what_is_no_one_set_is_refused(tmp_path: pathlib.Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert refusal(make_manifest, [empty]).reason == errors_pb2.REASON_ARTIFACT_UNREADABLE

    missing = tmp_path / "missing"
    missing.mkdir()
    (copied(missing) / SPLIT[1].name).unlink()
    error = refusal(make_manifest, [missing])
    assert error.reason == errors_pb2.REASON_ARTIFACT_INCOMPLETE
    assert SPLIT[1].name in error.message

    extra = tmp_path / "extra"
    extra.mkdir()
    name = SPLIT[2].name.replace("00003-of-00003", "00004-of-00004")
    shutil.copy(SPLIT[2], copied(extra) / name)
    error = refusal(make_manifest, [extra])
    assert error.reason == errors_pb2.REASON_ARTIFACT_MISMATCH
    assert name in error.message

    two = tmp_path / "two"
    two.mkdir()
    shutil.copy(TINY, copied(two) / "another.gguf")
    assert refusal(make_manifest, [two]).reason == errors_pb2.REASON_ARTIFACT_MISMATCH
    assert refusal(make_manifest, [TINY, SPLIT[0]]).reason == errors_pb2.REASON_ARTIFACT_MISMATCH
    assert refusal(make_manifest, SPLIT[:2]).reason == errors_pb2.REASON_ARTIFACT_INCOMPLETE

    disagree = tmp_path / "disagree"
    disagree.mkdir()
    shutil.copy(SPLIT[1], copied(disagree) / SPLIT[2].name)
    error = refusal(make_manifest, [disagree])
    assert error.reason == errors_pb2.REASON_ARTIFACT_INVALID
    assert "split.no" in error.message

    odd = tmp_path / "has space.gguf"
    shutil.copy(TINY, odd)
    assert refusal(make_manifest, [odd]).reason == errors_pb2.REASON_MANIFEST_INVALID
    for chunk_bytes in (1, 1 << 30, 5000):
        error = refusal(make_manifest, [TINY], chunk_bytes=chunk_bytes)
        assert error.reason == errors_pb2.REASON_MANIFEST_INVALID


def test_headers_are_compared(single: Manifest) -> None:
    model = read_model(TINY)
    check_headers(single, model)
    (file,) = single.files
    for change in (
        dataclasses.replace(single, tokenizer_sha256="0" * 64),
        dataclasses.replace(single, files=(dataclasses.replace(file, name="other.gguf"),)),
        dataclasses.replace(single, files=(dataclasses.replace(file, layers=(0, 8)),)),
        dataclasses.replace(single, files=(dataclasses.replace(file, header_bytes=64),)),
    ):
        assert refusal(check_headers, change, model).reason == errors_pb2.REASON_ARTIFACT_MISMATCH


HASH = "ab" * 32
SMALL: dict[str, Any] = {
    "chunk_bytes": 1024,
    "files": [
        {
            "bytes": 1500,
            "chunks": [HASH, HASH],
            "header_bytes": 100,
            "layers": [0, 4],
            "name": "m.gguf",
            "role": "model",
            "sha256": HASH,
        }
    ],
    "schema": "meshnet.manifest/1",
    "source": {"repository": "", "revision": ""},
    "tokenizer": {"revision": "", "sha256": HASH},
}


def changed(path: str, value: Any) -> bytes:
    copy = json.loads(json.dumps(SMALL))
    at: Any = copy
    *steps, last = path.split("/")
    for step in steps:
        at = at[int(step)] if isinstance(at, list) else at[step]
    if value is ...:
        del at[last]
    else:
        at[int(last) if isinstance(at, list) else last] = value
    return (json.dumps(copy, indent=1, sort_keys=True) + "\n").encode()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("chunk_bytes", 1000),
        ("chunk_bytes", 512),
        ("chunk_bytes", True),
        ("chunk_bytes", "1024"),
        ("chunk_bytes", ...),
        ("extra", 1),
        ("schema", "meshnet.manifest/2"),
        ("source", "here"),
        ("source/revision", 5),
        ("source/revision", "x" * 513),
        ("source/revision", "line\nfeed"),
        ("tokenizer/sha256", "AB" * 32),
        ("files", []),
        ("files", {}),
        ("files/0/bytes", 0),
        ("files/0/bytes", 2049),
        ("files/0/bytes", 1 << 60),
        ("files/0/bytes", 1500.0),
        ("files/0/chunks", [HASH]),
        ("files/0/chunks", [HASH, HASH, HASH]),
        ("files/0/chunks/1", "zz" * 32),
        ("files/0/header_bytes", 1501),
        ("files/0/layers", [0]),
        ("files/0/layers", [4, 4]),
        ("files/0/layers", [-1, 4]),
        ("files/0/name", "../m.gguf"),
        ("files/0/name", "m.bin"),
        ("files/0/name", ".m.gguf"),
        ("files/0/name", "m-00001-of-00002.gguf"),
        ("files/0/name", "m-00001-of-99999.gguf"),
        ("files/0/role", "weights"),
        ("files/0/role", "captain"),
        ("files/0/sha256", None),
    ],
)
def test_a_malformed_manifest_is_refused(path: str, value: Any) -> None:
    parse_manifest(changed("chunk_bytes", 1024))
    error = refusal(parse_manifest, changed(path, value))
    assert error.reason == errors_pb2.REASON_MANIFEST_INVALID


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-1],
        lambda data: data + b"\n",
        lambda data: b" " + data,
        lambda data: data.replace(b"\n", b""),
        lambda data: data.replace(b'"bytes": 1500', b'"bytes": 1500, "bytes": 1500'),
        lambda data: data.replace(b'"m.gguf"', b'"\\u006d.gguf"'),
        lambda data: b"\xef\xbb\xbf" + data,
        lambda data: b"[" * 100_000,
        lambda data: b"9" * 10_000,
        lambda data: b"",
        lambda data: b"\xff",
    ],
)
def test_only_the_canonical_form_is_taken(change: Any) -> None:
    error = refusal(parse_manifest, change(changed("chunk_bytes", 1024)))
    assert error.reason == errors_pb2.REASON_MANIFEST_INVALID


digests = st.binary(min_size=32, max_size=32).map(bytes.hex)
texts = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=30)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    chunk_bytes = 1 << draw(st.integers(10, 28))
    count = draw(st.integers(1, 4))
    files = []
    for index in range(count):
        size = draw(st.integers(1, 5 * chunk_bytes))
        chunks = draw(
            st.lists(digests, min_size=-(-size // chunk_bytes), max_size=-(-size // chunk_bytes))
        )
        role = (
            FileRole.MODEL
            if count == 1
            else draw(st.sampled_from([FileRole.METADATA, FileRole.WEIGHTS]))
        )
        begin = draw(st.integers(0, 100))
        layers = draw(st.sampled_from([None, (begin, begin + 7)]))
        files.append(
            ManifestFile(
                "m.gguf" if count == 1 else f"m-{index + 1:05}-of-{count:05}.gguf",
                size,
                role,
                None if role == FileRole.METADATA else layers,
                draw(st.integers(1, size)),
                chunks[0] if len(chunks) == 1 else draw(digests),
                tuple(chunks),
            )
        )
    return Manifest(
        Origin(draw(texts), draw(texts), draw(texts)), draw(digests), chunk_bytes, tuple(files)
    )


@settings(deadline=None)
@given(manifests())
def test_every_manifest_comes_back(manifest: Manifest) -> None:
    assert parse_manifest(manifest.to_bytes()) == manifest


@settings(deadline=None)
@given(manifests(), st.data())
def test_chunks_of_a_range_hold_it_and_no_more(manifest: Manifest, data: st.DataObject) -> None:
    file = data.draw(st.sampled_from(manifest.files))
    offset = data.draw(st.integers(0, file.bytes - 1))
    length = data.draw(st.integers(1, file.bytes - offset))
    chunks = manifest.chunks_of(offset, length)
    first, _ = manifest.chunk_span(file, chunks[0])
    last, last_length = manifest.chunk_span(file, chunks[-1])
    assert 0 <= first <= offset < first + manifest.chunk_bytes
    assert last < offset + length <= last + last_length <= file.bytes
    spans = [manifest.chunk_span(file, chunk) for chunk in range(len(file.chunks))]
    assert sum(span for _, span in spans) == file.bytes


@settings(deadline=None)
@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_noise_is_refused_by_name(data: bytes) -> None:
    assert refusal(parse_manifest, data).reason == errors_pb2.REASON_MANIFEST_INVALID


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@settings(deadline=None)
@given(
    st.sampled_from(
        [
            "chunk_bytes",
            "files",
            "files/0",
            "files/0/bytes",
            "files/0/chunks",
            "files/0/chunks/0",
            "files/0/header_bytes",
            "files/0/layers",
            "files/0/layers/0",
            "files/0/name",
            "files/0/role",
            "files/0/sha256",
            "schema",
            "source",
            "source/repository",
            "tokenizer",
        ]
    ),
    json_values,
)
def test_a_strange_value_anywhere_is_refused_or_kept(path: str, value: Any) -> None:
    data = changed(path, value)
    try:
        manifest = parse_manifest(data)
    except MeshnetError as error:
        assert error.reason == errors_pb2.REASON_MANIFEST_INVALID  # noqa: PT017
    else:
        assert manifest.to_bytes() == data
