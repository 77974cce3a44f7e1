import os
import pathlib
import struct
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.gguf_file import read_model, tensor_types

from proto.meshnet.shard.v1 import errors_pb2
from tests.fixtures import deepseek4

INVALID = errors_pb2.REASON_ARTIFACT_INVALID
UNREADABLE = errors_pb2.REASON_ARTIFACT_UNREADABLE


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


ARCHITECTURE = key("general.architecture", 8, text("llama"))


def tensor(name: str = "a.weight", ne: tuple[int, ...] = (4,), kind: int = 0, at: int = 0) -> bytes:
    dims = b"".join(struct.pack("<Q", n) for n in ne)
    return text(name) + struct.pack("<I", len(ne)) + dims + struct.pack("<IQ", kind, at)


def file_of(
    *,
    keys: tuple[bytes, ...] = (ARCHITECTURE,),
    tensors: tuple[bytes, ...] = (),
    data: int = 0,
    magic: bytes = b"GGUF",
    version: int = 3,
    key_count: int | None = None,
    tensor_count: int | None = None,
) -> bytes:
    header = magic + struct.pack(
        "<IQQ",
        version,
        len(tensors) if tensor_count is None else tensor_count,
        len(keys) if key_count is None else key_count,
    )
    header += b"".join(keys) + b"".join(tensors)
    return header + bytes(-len(header) % 32) + bytes(data)


def refusal(path: pathlib.Path, content: bytes | None = None) -> MeshnetError:
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(MeshnetError) as caught:
        read_model(path)
    return caught.value


def test_reads_what_gguf_py_reads() -> None:
    path = pathlib.Path(os.environ["FIXTURE_TINY"])
    model = read_model(path)
    reader = gguf.GGUFReader(path)
    assert {t.name: (t.ne, t.type_name, t.offset, t.bytes) for t in model.tensors} == {
        t.name: (
            tuple(int(n) for n in t.shape),
            t.tensor_type.name,
            int(t.data_offset),
            int(t.n_bytes),
        )
        for t in reader.tensors
    }
    assert {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in model.metadata.items()
    } == {
        name: field.contents()
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.")
    }


def test_types_are_those_of_the_pinned_llama_cpp() -> None:
    assert {
        number: (kind.name, kind.block_elements, kind.block_bytes)
        for number, kind in tensor_types().items()
    } == {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}


@pytest.mark.parametrize("part", [1, 2, 3])
def test_every_part_of_a_split_set_gives_the_same_model(part: int) -> None:
    whole = read_model(os.environ["FIXTURE_TINY"])
    first = pathlib.Path(os.environ["FIXTURE_TINY_SPLIT"].split()[0])
    model = read_model(first.with_name(first.name.replace("-00001-", f"-0000{part}-")))
    assert [file.path.name[-19:] for file in model.files] == [
        f"0000{number}-of-00003.gguf" for number in (1, 2, 3)
    ]
    assert {(t.name, t.ne, t.bytes) for t in model.tensors} == {
        (t.name, t.ne, t.bytes) for t in whole.tensors
    }
    assert {t.file for t in model.tensors} == {1, 2}
    assert model.integer("block_count") == 9


def test_missing_part_is_named(tmp_path: pathlib.Path) -> None:
    parts = deepseek4.write(
        deepseek4.SHAPES["tiny"], tmp_path / "m.gguf", weight_type="q4_0", parts=2
    )
    parts[1].unlink()
    error = refusal(parts[0])
    assert error.reason == UNREADABLE
    assert "m-00002-of-00002.gguf" in error.message


def test_another_part_is_refused(tmp_path: pathlib.Path) -> None:
    parts = deepseek4.write(
        deepseek4.SHAPES["tiny"], tmp_path / "m.gguf", weight_type="q4_0", parts=2
    )
    (tmp_path / "m-00001-of-00003.gguf").touch()  # of another set
    assert len(read_model(parts[0]).files) == 2
    (tmp_path / "m-00003-of-00002.gguf").touch()
    error = refusal(parts[0])
    assert error.reason == INVALID
    assert "m-00003-of-00002.gguf" in error.message
    assert "expected parts 1 to 2 of the split set and no other" in error.message


def test_parts_of_different_sets_are_refused(tmp_path: pathlib.Path) -> None:
    for number, tensors in enumerate((3, 4)):
        keys = (
            key("split.no", 2, struct.pack("<H", number)),
            key("split.count", 2, struct.pack("<H", 2)),
            key("split.tensors.count", 5, struct.pack("<i", tensors)),
        )
        (tmp_path / f"m-0000{number + 1}-of-00002.gguf").write_bytes(
            file_of(keys=(ARCHITECTURE, *keys))
        )
    error = refusal(tmp_path / "m-00001-of-00002.gguf")
    assert error.reason == INVALID
    assert "m-00002-of-00002.gguf" in error.message
    assert "its split.tensors.count is not that of" in error.message


def test_renamed_part_is_refused(tmp_path: pathlib.Path) -> None:
    parts = deepseek4.write(
        deepseek4.SHAPES["tiny"], tmp_path / "m.gguf", weight_type="q4_0", parts=2
    )
    alone = parts[0].rename(tmp_path / "alone.gguf")
    assert "found by their names" in refusal(alone).message
    parts[0].write_bytes(parts[1].read_bytes())
    assert "expected part 1 of 2" in refusal(parts[1]).message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the format's name wants 4 bytes at 0, 0 are left"),
        (file_of(magic=b"GGML"), "expected the format GGUF"),
        (file_of(version=1), "expected version 2 or 3"),
        (file_of(version=3 << 24), "expected version 2 or 3"),
        (file_of(tensor_count=2**63), "at most 131072 for the number of tensors"),
        (file_of(key_count=2**40), "at most 65536 for the number of keys"),
        (file_of(keys=()), "general.architecture is missing"),
        (file_of(keys=(key("general.architecture", 4, bytes(4)),)), "architecture is missing"),
        (file_of(keys=(ARCHITECTURE, ARCHITECTURE)), "is there twice"),
        (file_of(keys=(struct.pack("<Q", 2**62),)), "the length of a key"),
        (file_of(keys=(key("x", 8, struct.pack("<Q", 2**20)),)), "wants 1048576 bytes"),
        (file_of(keys=(key("x", 13, b""),)), "has the type 13"),
        (file_of(keys=(key("x", 9, struct.pack("<IQ", 9, 1)),)), "has the type 9"),
        (file_of(keys=(key("x", 9, struct.pack("<IQ", 0, 2**22 + 1)),)), "at most 4194304"),
        (file_of(keys=(key("x", 9, struct.pack("<IQ", 12, 2**22)),)), "wants 33554432 bytes"),
        (
            file_of(keys=(ARCHITECTURE, key("general.alignment", 4, struct.pack("<I", 24)))),
            "power of two, got 24",
        ),
        (
            file_of(keys=(ARCHITECTURE, key("split.count", 2, struct.pack("<H", 9)))),
            "one of 9 parts",
        ),
        (
            file_of(keys=(ARCHITECTURE, key("split.count", 4, struct.pack("<I", 10**9)))),
            "split.count to be 1 to 1024",
        ),
        (file_of(tensors=(tensor(ne=()),)), "1 to 4 dimensions"),
        (file_of(tensors=(tensor(ne=(1, 1, 1, 1, 1)),)), "1 to 4 dimensions"),
        (file_of(tensors=(tensor(ne=(0,)),)), "to be above 0"),
        (file_of(tensors=(tensor(ne=(2**32, 2**32)),)), "to be above 0"),
        (file_of(tensors=(tensor(ne=(31,), kind=2),), data=64), "a multiple of 32"),
        (file_of(tensors=(tensor(kind=77),), data=64), "the type 77"),
        (file_of(tensors=(tensor(at=7),), data=64), "not aligned to 32"),
        (file_of(tensors=(tensor(ne=(9,)),), data=32), "fetch it again"),
        (file_of(tensors=(tensor(), tensor("b", at=0)), data=64), "overlaps"),
        (file_of(tensors=(tensor(), tensor(at=32)), data=64), "is there twice"),
        (file_of(tensors=(tensor("n" * 64),), data=64), "at most 63"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: pathlib.Path, content: bytes, message: str) -> None:
    error = refusal(tmp_path / "model.gguf", content)
    assert error.reason == INVALID
    assert message in error.message


def test_good_file_of_these_builders_is_read(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(file_of(tensors=(tensor(), tensor("b", ne=(32, 2), kind=2, at=32)), data=68))
    model = read_model(path)
    assert [(t.name, t.bytes) for t in model.tensors] == [("a.weight", 16), ("b", 36)]
    assert model.tensors[1].offset == model.files[0].data_offset + 32


def test_what_is_no_file_is_unreadable(tmp_path: pathlib.Path) -> None:
    assert refusal(tmp_path / "nothing.gguf").reason == UNREADABLE
    assert refusal(tmp_path).reason == UNREADABLE
    assert refusal(pathlib.Path("/dev/null")).reason == UNREADABLE
    assert refusal(pathlib.Path("a\0b")).reason == UNREADABLE


_GOOD = file_of(
    keys=(
        ARCHITECTURE,
        key("a", 9, struct.pack("<IQ", 8, 2) + text("b") + text("c")),
        key("d", 9, struct.pack("<IQ3I", 4, 3, 1, 2, 3)),
        key("split.count", 2, struct.pack("<H", 1)),
    ),
    tensors=(tensor(), tensor("b", ne=(32, 2), kind=2, at=32)),
    data=68,
)


@settings(max_examples=500)
@given(data=st.data())
def test_damaged_files_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(_GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        new = data.draw(st.binary(min_size=1, max_size=8) | st.just(b"\xff" * 8))
        content[at : at + len(new)] = new
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(bytes(content[: data.draw(st.integers(1, len(content)))]))
    reason = None
    try:
        model = read_model(path)
    except MeshnetError as error:
        reason = error.reason
    if reason is None:
        size = path.stat().st_size
        assert all(t.offset + t.bytes <= size for t in model.tensors)
    else:
        assert reason in (INVALID, UNREADABLE)


_SCALARS: st.SearchStrategy[tuple[Any, Any]] = st.one_of(
    st.tuples(st.integers(0, 2**32 - 1), st.just(gguf.GGUFValueType.UINT32)),
    st.tuples(st.integers(-(2**63), 2**63 - 1), st.just(gguf.GGUFValueType.INT64)),
    st.tuples(st.booleans(), st.just(gguf.GGUFValueType.BOOL)),
    st.tuples(st.text(max_size=20), st.just(gguf.GGUFValueType.STRING)),
    st.tuples(st.floats(width=32, allow_nan=False), st.just(gguf.GGUFValueType.FLOAT32)),
)


@given(values=st.dictionaries(st.from_regex(r"[a-z]{1,9}\.[a-z]{1,9}", fullmatch=True), _SCALARS))
def test_keys_come_back_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, tuple[Any, Any]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "keys.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for name, (value, kind) in values.items():
        writer.add_key_value(name, value, kind)
    writer.add_tensor("t", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = read_model(path)
    assert {name: model.metadata[name] for name in values} == {
        name: value for name, (value, _) in values.items()
    }
