"""Reads the header of a GGUF model: its keys and what tensors it holds where. Never the weights.

    model = read_model("model-00001-of-00003.gguf")
    model.metadata["general.architecture"], model.tensors[0].bytes

A file comes from strangers. Every length is checked against what is left of the file before
anything is read or allocated for it, counts are bounded, and the first thing that does not fit
refuses the file with ARTIFACT_INVALID (ARTIFACT_UNREADABLE where the system does not let us read).
A split set is one model: give any of its parts, all must be there, and the first may hold no
tensor.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import json
import math
import os
import pathlib
import re
import stat
import struct
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO

from meshnet_gguf.errors import MeshnetError
from proto.meshnet.shard.v1 import errors_pb2

__all__ = ["Model", "ModelFile", "Tensor", "TensorType", "Value", "read_model", "tensor_types"]

Scalar = bool | int | float | str
Value = Scalar | tuple[Scalar, ...]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_KEYS = 1 << 16
_MAX_TENSORS = 1 << 17
_MAX_NAME_BYTES = 63  # GGML_MAX_NAME less its end
_MAX_KEY_BYTES = 1 << 12
_MAX_STRING_BYTES = 1 << 24
_MAX_ELEMENTS = 1 << 22
_MAX_PARTS = 1 << 10
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32
_MAX_ALIGNMENT = 1 << 20
_INT64_MAX = 2**63 - 1

_STRING, _ARRAY = 8, 9
# Value types of the format, as struct's letters.
_SCALARS = types.MappingProxyType(
    {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
)
_PART = re.compile(r"(?P<prefix>.*)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True)
class TensorType:
    """How a tensor's numbers are stored: `block_bytes` hold `block_elements` of them."""

    name: str
    block_elements: int
    block_bytes: int


@dataclass(frozen=True)
class Tensor:
    """Where a tensor lies: `bytes` from `offset` on in the file `file` of the model's files.

    `ne` are its dimensions in ggml's order, the one that runs fastest first.
    """

    name: str
    ne: tuple[int, ...]
    type_name: str
    file: int
    offset: int
    bytes: int


@dataclass(frozen=True)
class ModelFile:
    """One file of a model. `data_offset` is where its tensors' bytes begin."""

    path: pathlib.Path
    bytes: int
    data_offset: int


@dataclass(frozen=True)
class Model:
    """A model's keys, tensors and files; the keys are those of the first file.

    `tokenizer_sha256` is over every tokenizer.* entry as it stands in the first file (key, type and
    value, with their lengths), in the order of the keys: what workers call the tokenizer, too. It
    is empty for a model that was not read from files.
    """

    metadata: Mapping[str, Value]
    tensors: tuple[Tensor, ...]
    files: tuple[ModelFile, ...]
    tokenizer_sha256: str = ""

    @property
    def architecture(self) -> str:
        """The model's general.architecture."""
        return str(self.metadata["general.architecture"])

    def integer(self, key: str) -> int | None:
        """A whole number under `<architecture>.<key>`; None when it is absent.

        Raises MeshnetError when something else stands there.
        """
        name = f"{self.architecture}.{key}"
        value = self.metadata.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise _invalid(self.files[0].path, f"expected {name} to be a whole number")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """Whole numbers under `<architecture>.<key>`; empty when it is absent."""
        name = f"{self.architecture}.{key}"
        values = self.metadata.get(name, ())
        found = []
        for value in values if isinstance(values, tuple) else (values,):
            if isinstance(value, bool) or not isinstance(value, int):
                raise _invalid(self.files[0].path, f"expected {name} to hold whole numbers")
            found.append(value)
        return tuple(found)


@functools.cache
def tensor_types() -> Mapping[int, TensorType]:
    """The types that the pinned llama.cpp knows, by their number."""
    text = importlib.resources.files("meshnet_gguf").joinpath("tensor_types.json").read_text()
    return types.MappingProxyType(
        {int(number): TensorType(*row) for number, row in json.loads(text).items()}
    )


def read_model(path: str | os.PathLike[str]) -> Model:
    """The model that a file, or a split set of which it is a part, holds.

    Raises MeshnetError: ARTIFACT_UNREADABLE, ARTIFACT_INVALID.
    """
    given = pathlib.Path(path)
    found = _read_file(given, 0)
    count = found.metadata.get("split.count", 1)
    if count in (0, 1):
        return _model(given, found, found.tensors, (found.file,))
    paths = _parts(given, count)
    first = found
    everything: list[Tensor] = []
    files: list[ModelFile] = []
    for index, part in enumerate(paths):
        found = _read_file(part, index)
        metadata = found.metadata
        if metadata.get("split.no") != index or metadata.get("split.count") != count:
            raise _invalid(
                part,
                f"expected part {index + 1} of {count}, its keys split.no and split.count say "
                f"{metadata.get('split.no')} and {metadata.get('split.count')}",
            )
        if index == 0:
            first = found
        for key in first.metadata.keys() & metadata.keys() - {"split.no"}:
            if metadata[key] != first.metadata[key]:
                raise _invalid(
                    part, f"its {key} is not that of {paths[0]}; the parts are of different sets"
                )
        everything += found.tensors
        files.append(found.file)
    declared = first.metadata.get("split.tensors.count", len(everything))
    if declared != len(everything):
        raise _invalid(paths[0], f"expected {declared} tensors in all parts, got {len(everything)}")
    return _model(paths[0], first, everything, tuple(files))


@dataclass(frozen=True)
class _Found:
    """What one file's header says."""

    metadata: dict[str, Value]
    tensors: list[Tensor]
    file: ModelFile
    tokenizer_sha256: str


def _model(
    path: pathlib.Path,
    first: _Found,
    tensors: list[Tensor],
    files: tuple[ModelFile, ...],
) -> Model:
    architecture = first.metadata.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise _invalid(path, "general.architecture is missing")
    names: set[str] = set()
    for tensor in tensors:
        if tensor.name in names:
            raise _invalid(path, f"the tensor {tensor.name!r} is there twice")
        names.add(tensor.name)
    return Model(
        types.MappingProxyType(first.metadata), tuple(tensors), files, first.tokenizer_sha256
    )


def _parts(path: pathlib.Path, count: Value) -> list[pathlib.Path]:
    if isinstance(count, bool) or not isinstance(count, int) or not 1 < count <= _MAX_PARTS:
        raise _invalid(path, f"expected split.count to be 1 to {_MAX_PARTS}, got {count!r}")
    match = _PART.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise _invalid(
            path,
            f"it is one of {count} parts, which are found by their names; "
            f"expected NAME-00001-of-{count:05}.gguf",
        )
    parts = [
        path.with_name(f"{match['prefix']}-{part + 1:05}-of-{count:05}.gguf")
        for part in range(count)
    ]
    for other in path.parent.iterdir():
        named = _PART.fullmatch(other.name)
        if named is None or other.name in {part.name for part in parts}:
            continue
        if named["prefix"] == match["prefix"] and named["count"] == match["count"]:
            raise _invalid(
                other,
                f"expected parts 1 to {count} of the split set and no other; "
                "remove the file or fetch the set again",
            )
    return parts


def _invalid(path: pathlib.Path, what: str) -> MeshnetError:
    return MeshnetError(
        errors_pb2.REASON_ARTIFACT_INVALID, f"{path} is no usable GGUF model: {what}"
    )


class _Header:
    """Reads a file from its start; nothing longer than what is left."""

    def __init__(self, path: pathlib.Path, stream: BinaryIO, size: int) -> None:
        self.path = path
        self.position = 0
        self._taken: list[bytes] = []
        self._stream = stream
        self._size = size

    def invalid(self, what: str) -> MeshnetError:
        return _invalid(self.path, what)

    def take(self, size: int, what: str) -> bytes:
        left = self._size - self.position
        if size > left:
            raise self.invalid(f"{what} wants {size} bytes at {self.position}, {left} are left")
        data = self._stream.read(size)
        if len(data) != size:
            raise self.invalid(f"it became shorter while it was read, at {self.position}")
        self.position += size
        self._taken.append(data)
        return data

    def taken(self) -> bytes:
        """What was read since this was last called."""
        data = b"".join(self._taken)
        self._taken.clear()
        return data

    def number(self, letter: str, what: str) -> int:
        size = struct.calcsize(f"<{letter}")
        return int(struct.unpack(f"<{letter}", self.take(size, what))[0])

    def count(self, limit: int, what: str) -> int:
        value = self.number("Q", what)
        if value > limit:
            raise self.invalid(f"expected at most {limit} for {what}, got {value}")
        return value

    def text(self, limit: int, what: str) -> str:
        data = self.take(self.count(limit, f"the length of {what}"), what)
        # Vocabularies hold pieces of characters, so bytes that are no UTF-8 are kept as such.
        return data.decode("utf-8", "surrogateescape")

    def value(self, key: str) -> Value:
        kind = self.number("I", f"the type of {key!r}")
        if kind != _ARRAY:
            return self._scalars(kind, 1, key)[0]
        kind = self.number("I", f"the element type of {key!r}")
        return self._scalars(kind, self.count(_MAX_ELEMENTS, f"the elements of {key!r}"), key)

    def _scalars(self, kind: int, count: int, key: str) -> tuple[Scalar, ...]:
        what = f"the value of {key!r}"
        if kind == _STRING:
            return tuple(self.text(_MAX_STRING_BYTES, what) for _ in range(count))
        letter = _SCALARS.get(kind)
        if letter is None:
            raise self.invalid(f"{key!r} has the type {kind}, which the format does not have")
        layout = f"<{count}{letter}"
        return struct.unpack(layout, self.take(struct.calcsize(layout), what))


def _read_file(path: pathlib.Path, index: int) -> _Found:
    try:
        with path.open("rb") as stream:
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise OSError("not a regular file")
            return _read_header(_Header(path, stream, status.st_size), status.st_size, index)
    except (OSError, ValueError) as error:
        raise MeshnetError(
            errors_pb2.REASON_ARTIFACT_UNREADABLE,
            f"cannot read {path}: {error}; give a readable GGUF file and all parts of a split set",
        ) from error


def _read_header(header: _Header, size: int, index: int) -> _Found:
    if header.take(len(_MAGIC), "the format's name") != _MAGIC:
        raise header.invalid("expected the format GGUF, the file begins otherwise")
    version = header.number("I", "the version")
    if version not in _VERSIONS:
        raise header.invalid(f"expected version 2 or 3 in little-endian order, got {version}")
    tensor_count = header.count(_MAX_TENSORS, "the number of tensors")
    key_count = header.count(_MAX_KEYS, "the number of keys")
    metadata: dict[str, Value] = {}
    tokenizer: dict[str, bytes] = {}
    for _ in range(key_count):
        header.taken()
        key = header.text(_MAX_KEY_BYTES, "a key")
        if key in metadata:
            raise header.invalid(f"the key {key!r} is there twice")
        metadata[key] = header.value(key)
        if key.startswith("tokenizer."):
            tokenizer[key] = header.taken()
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if (
        isinstance(alignment, bool)
        or not isinstance(alignment, int)
        or not 0 < alignment <= _MAX_ALIGNMENT
        or alignment & (alignment - 1)
    ):
        raise header.invalid(f"expected general.alignment to be a power of two, got {alignment!r}")
    described = [_describe(header, alignment) for _ in range(tensor_count)]
    # A part without tensors may end with its header.
    data_offset = -(-header.position // alignment) * alignment if described else header.position
    tensors = []
    end_before = 0
    for name, ne, kind, offset, length in sorted(described, key=lambda entry: entry[3]):
        if offset < end_before:
            raise header.invalid(f"the tensor {name!r} overlaps the one before it")
        end_before = offset + length
        if data_offset + end_before > size:
            raise header.invalid(
                f"the tensor {name!r} ends at {data_offset + end_before}, the file at {size}; "
                "fetch it again"
            )
        tensors.append(Tensor(name, ne, kind, index, data_offset + offset, length))
    # In the order of the keys' bytes, which is that of the texts that they were read as.
    digest = hashlib.sha256(b"".join(tokenizer[key] for key in sorted(tokenizer)))
    file = ModelFile(header.path, size, data_offset)
    return _Found(metadata, tensors, file, digest.hexdigest())


def _describe(header: _Header, alignment: int) -> tuple[str, tuple[int, ...], str, int, int]:
    name = header.text(_MAX_NAME_BYTES, "a tensor's name")
    dimensions = header.number("I", f"the dimensions of {name!r}")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise header.invalid(
            f"expected 1 to {_MAX_DIMENSIONS} dimensions of {name!r}, got {dimensions}"
        )
    ne = tuple(header.number("Q", f"a dimension of {name!r}") for _ in range(dimensions))
    number = header.number("I", f"the type of {name!r}")
    kind = tensor_types().get(number)
    if kind is None:
        raise header.invalid(
            f"the tensor {name!r} has the type {number}, which the pinned llama.cpp does not know"
        )
    elements = math.prod(ne)
    if not 0 < elements <= _INT64_MAX or ne[0] % kind.block_elements:
        raise header.invalid(
            f"expected the dimensions of {name!r} to be above 0, the first a multiple of "
            f"{kind.block_elements} for its type, got {list(ne)}"
        )
    offset = header.number("Q", f"the offset of {name!r}")
    if offset % alignment:
        raise header.invalid(f"the tensor {name!r} is not aligned to {alignment} bytes")
    return name, ne, kind.name, offset, elements // kind.block_elements * kind.block_bytes
