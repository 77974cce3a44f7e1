"""A manifest says exactly what an artifact is; its hash is the artifact's identity.

    manifest = make_manifest([pathlib.Path("/srv/model.gguf")], Origin("example/model", "60d8d70"))
    manifest.artifact_sha256, manifest.to_bytes()

It binds where the artifact comes from (a repository's name and revision), its tokenizer, and of
every file its name, size, role, the layers that it holds tensors of, its SHA-256 and the SHA-256 of
each of its chunks, so that any range of bytes can be checked by itself.

A manifest's file is its canonical form and nothing else: UTF-8 JSON with sorted keys, one space of
indentation and a line feed at the end, as json.dumps(value, indent=1, sort_keys=True) writes it.
Anything else is refused, so `sha256sum manifest.json` prints the artifact's identity, and a program
in another language hashes the bytes as they are.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import enum
import functools
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from meshnet_gguf import progress
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.gguf_file import Model, read_model
from proto.meshnet.shard.v1 import errors_pb2

__all__ = [
    "DEFAULT_CHUNK_BYTES",
    "FileRole",
    "Manifest",
    "ManifestFile",
    "Origin",
    "check_headers",
    "check_set",
    "make_manifest",
    "parse_manifest",
    "read_manifest",
]

_SCHEMA = "meshnet.manifest/1"
DEFAULT_CHUNK_BYTES = 8 << 20
_MIN_CHUNK_BYTES = 1 << 10
_MAX_CHUNK_BYTES = 1 << 28
_MAX_MANIFEST_BYTES = 1 << 26
_MAX_FILES = 1 << 10
_MAX_FILE_BYTES = 1 << 50
_MAX_CHUNKS = 1 << 19
_MAX_LAYERS = 1 << 16
_MAX_TEXT = 512
_PIECE_BYTES = 1 << 20

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=@-]{0,194}\.gguf")
_PART = re.compile(r"(?P<prefix>.*)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_TEXT = re.compile(r"[\x20-\x7e]*")
_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.")


class FileRole(enum.StrEnum):
    """What a file is in its set."""

    MODEL = "model"  # the only one
    METADATA = "metadata"  # one of several, without tensors
    WEIGHTS = "weights"  # one of several, with tensors


@dataclass(frozen=True)
class ManifestFile:
    """A file of an artifact. Hashes are lower-case hex.

    The first `header_bytes` hold keys and descriptions of tensors, the rest is the tensors' data.
    `layers` is the half-open range from the first to the last layer of which it has a tensor, None
    where it has none. `chunks` are the hashes of its chunks, all of the manifest's chunk size but
    the last.
    """

    name: str
    bytes: int
    role: FileRole
    layers: tuple[int, int] | None
    header_bytes: int
    sha256: str
    chunks: tuple[str, ...]


@dataclass(frozen=True)
class Origin:
    """Where an artifact comes from: names and revisions as their publisher spells them."""

    repository: str = ""
    revision: str = ""
    tokenizer_revision: str = ""


@dataclass(frozen=True)
class Manifest:
    """See the module."""

    origin: Origin
    tokenizer_sha256: str
    chunk_bytes: int
    files: tuple[ManifestFile, ...]

    @functools.cached_property
    def artifact_sha256(self) -> str:
        """The artifact's identity."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @property
    def total_bytes(self) -> int:
        """Of all files."""
        return sum(file.bytes for file in self.files)

    def chunk_span(self, file: ManifestFile, chunk: int) -> tuple[int, int]:
        """Offset and length of a chunk in its file."""
        offset = chunk * self.chunk_bytes
        return offset, min(self.chunk_bytes, file.bytes - offset)

    def chunks_of(self, offset: int, length: int) -> range:
        """The chunks that hold these bytes of a file."""
        if length == 0:
            return range(0)
        return range(offset // self.chunk_bytes, -(-(offset + length) // self.chunk_bytes))

    def to_bytes(self) -> bytes:
        """The canonical form: what a manifest's file holds."""
        value = {
            "chunk_bytes": self.chunk_bytes,
            "files": [
                {
                    "bytes": file.bytes,
                    "chunks": list(file.chunks),
                    "header_bytes": file.header_bytes,
                    "layers": list(file.layers or ()),
                    "name": file.name,
                    "role": str(file.role),
                    "sha256": file.sha256,
                }
                for file in self.files
            ],
            "schema": _SCHEMA,
            "source": {"repository": self.origin.repository, "revision": self.origin.revision},
            "tokenizer": {
                "revision": self.origin.tokenizer_revision,
                "sha256": self.tokenizer_sha256,
            },
        }
        return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode("ascii")


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """The manifest in a file.

    Raises MeshnetError: ARTIFACT_UNREADABLE, MANIFEST_INVALID.
    """
    try:
        with pathlib.Path(path).open("rb") as file:
            data = file.read(_MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        raise MeshnetError(
            errors_pb2.REASON_ARTIFACT_UNREADABLE,
            f"cannot read the manifest {path} ({error.strerror}); make one with `meshnet manifest`",
        ) from error
    return parse_manifest(data, str(path))


def parse_manifest(data: bytes, where: str = "the manifest") -> Manifest:
    """The manifest that these bytes are; `where` names them in messages.

    Raises MeshnetError (MANIFEST_INVALID).
    """
    try:
        if len(data) > _MAX_MANIFEST_BYTES:
            raise ValueError(f"expected at most {_MAX_MANIFEST_BYTES} bytes")
        manifest = _manifest(json.loads(data.decode("ascii")))
        if manifest.to_bytes() != data:
            raise ValueError(
                "it is not in its canonical form, so its hash would be no identity; "
                "write it with `meshnet manifest`, and never edit it"
            )
    except (ValueError, RecursionError) as error:
        raise MeshnetError(
            errors_pb2.REASON_MANIFEST_INVALID, f"{where} is no usable manifest: {error}"
        ) from error
    return manifest


def _manifest(value: Any) -> Manifest:
    top = _Fields(value, "the manifest", "chunk_bytes files schema source tokenizer")
    if value["schema"] != _SCHEMA:
        raise ValueError(f"expected the schema {_SCHEMA}, got {value['schema']!r}")
    source = _Fields(value["source"], "source", "repository revision")
    tokenizer = _Fields(value["tokenizer"], "tokenizer", "revision sha256")
    chunk_bytes = top.number("chunk_bytes", _MIN_CHUNK_BYTES, _MAX_CHUNK_BYTES)
    if chunk_bytes & (chunk_bytes - 1):
        raise ValueError(f"expected chunk_bytes to be a power of two, got {chunk_bytes}")
    files = top.items("files", _MAX_FILES)
    manifest = Manifest(
        Origin(source.text("repository"), source.text("revision"), tokenizer.text("revision")),
        tokenizer.sha256("sha256"),
        chunk_bytes,
        tuple(_file(file, chunk_bytes, len(files)) for file in files),
    )
    if sum(len(file.chunks) for file in manifest.files) > _MAX_CHUNKS:
        raise ValueError(f"expected at most {_MAX_CHUNKS} chunks; make them larger")
    _check_names([file.name for file in manifest.files])
    return manifest


def _file(value: Any, chunk_bytes: int, files: int) -> ManifestFile:
    fields = _Fields(value, "a file", "bytes chunks header_bytes layers name role sha256")
    name = fields.text("name")
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"expected a file's name of letters, digits and ._+=@- that ends in .gguf, got {name!r}"
        )
    fields.what = name
    size = fields.number("bytes", 1, _MAX_FILE_BYTES)
    chunks = fields.items("chunks", _MAX_CHUNKS)
    expected = -(-size // chunk_bytes)
    if len(chunks) != expected:
        raise ValueError(f"{name}: expected {expected} chunks of {size} bytes, got {len(chunks)}")
    layers = fields.items("layers", 2)
    bounds = _Fields(dict(enumerate(layers)), f"{name}'s layers", range(len(layers)))
    if len(layers) == 1:
        raise ValueError(f"{name}: expected layers as [begin, end] or [], got one number")
    file = ManifestFile(
        name=name,
        bytes=size,
        role=FileRole(fields.text("role")),
        layers=(bounds.number(0, 0, _MAX_LAYERS), bounds.number(1, 1, _MAX_LAYERS))
        if layers
        else None,
        header_bytes=fields.number("header_bytes", 1, size),
        sha256=fields.sha256("sha256"),
        chunks=tuple(map(_sha256, chunks)),
    )
    if file.layers and file.layers[0] >= file.layers[1]:
        raise ValueError(f"{name}: expected layers [begin, end) with begin < end")
    if (file.role == FileRole.MODEL) != (files == 1):
        raise ValueError(f"{name}: it cannot have the role {file.role} in a set of {files}")
    if file.role == FileRole.METADATA and file.layers:
        raise ValueError(f"{name}: its role is metadata, but it has layers")
    if expected == 1 and file.chunks[0] != file.sha256:
        raise ValueError(f"{name}: it is one chunk, but the chunk's hash is not the file's")
    return file


def _check_names(names: Sequence[str]) -> None:
    if not names:
        raise ValueError("expected at least one file")
    match = _PART.fullmatch(names[0])
    if match is None and len(names) == 1:
        return
    count = int(match["count"]) if match else len(names)
    prefix = match["prefix"] if match else "NAME"
    expected = part_names(prefix, count) if count <= _MAX_FILES else []
    if list(names) != expected:
        missing = sorted(set(expected) - set(names))
        extra = sorted(set(names) - set(expected))
        raise ValueError(
            f"expected the {count} files of a split set in their order, "
            f"{prefix}-00001-of-{count:05}.gguf and so on, got {len(names)}; "
            f"missing: {_listed(missing)}; not of the set: {_listed(extra)}"
        )


def part_names(prefix: str, count: int) -> list[str]:
    """The names of a split set's files."""
    return [f"{prefix}-{part + 1:05}-of-{count:05}.gguf" for part in range(count)]


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown or "none"


def _sha256(value: Any) -> str:
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        raise ValueError(f"expected a SHA-256 of 64 lower-case hex digits, got {str(value)[:80]!r}")
    return value


class _Fields:
    """A JSON object with exactly these keys."""

    def __init__(self, value: Any, what: str, keys: str | Iterable[Any]) -> None:
        expected = set(keys.split() if isinstance(keys, str) else keys)
        if not isinstance(value, dict) or set(value) != expected:
            got = _listed(sorted(map(str, value))) if isinstance(value, dict) else type(value)
            raise ValueError(
                f"expected {what} to have {', '.join(sorted(map(str, expected)))}, got {got}"
            )
        self.what = what
        self._value = value

    def number(self, key: Any, least: int, most: int) -> int:
        value = self._value[key]
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError(
                f"{self.what}: expected {key} of {least} to {most}, got {str(value)[:80]}"
            )
        return value

    def text(self, key: str) -> str:
        value = self._value[key]
        if not isinstance(value, str) or len(value) > _MAX_TEXT or not _TEXT.fullmatch(value):
            raise ValueError(
                f"{self.what}: expected {key} to be printable ASCII of at most {_MAX_TEXT} bytes, "
                f"got {str(value)[:80]!r}"
            )
        return value

    def sha256(self, key: str) -> str:
        return _sha256(self._value[key])

    def items(self, key: str, most: int) -> list[Any]:
        value = self._value[key]
        if not isinstance(value, list) or len(value) > most:
            raise ValueError(f"{self.what}: expected {key} to be a list of at most {most}")
        return value


def check_set(names: Iterable[str], files: Sequence[str], where: str) -> None:
    """Compares the names found at a place with a set's files.

    Raises MeshnetError: ARTIFACT_INCOMPLETE for a missing file, ARTIFACT_MISMATCH for another one
    that calls itself a part of the set.
    """
    found = set(names)
    missing = [name for name in files if name not in found]
    if missing:
        raise MeshnetError(
            errors_pb2.REASON_ARTIFACT_INCOMPLETE,
            f"{where}: expected the {len(files)} files of the set, {_listed(missing)} "
            "missing; put all of them there",
        )
    match = _PART.fullmatch(files[0])
    prefix = match["prefix"] if match else files[0].removesuffix(".gguf")
    extra = sorted(
        name
        for name in found.difference(files)
        if (other := _PART.fullmatch(name)) and other["prefix"] == prefix
    )
    if extra:
        raise MeshnetError(
            errors_pb2.REASON_ARTIFACT_MISMATCH,
            f"{where}: expected the {len(files)} files of one set, {_listed(extra)} would be of "
            "another set of the same name; remove what does not belong there",
        )


@dataclass(frozen=True)
class _Described:
    """What a file's header says of the file."""

    role: FileRole
    layers: tuple[int, int] | None
    header_bytes: int


def _describe(model: Model) -> list[_Described]:
    layers: list[set[int]] = [set() for _ in model.files]
    with_tensors = {tensor.file for tensor in model.tensors}
    for tensor in model.tensors:
        if match := _BLOCK.match(tensor.name):
            layers[tensor.file].add(int(match[1]))
    described = []
    for index, (file, own) in enumerate(zip(model.files, layers, strict=True)):
        role = FileRole.WEIGHTS if index in with_tensors else FileRole.METADATA
        described.append(
            _Described(
                FileRole.MODEL if len(model.files) == 1 else role,
                (min(own), max(own) + 1) if own else None,
                file.data_offset,
            )
        )
    return described


def check_headers(manifest: Manifest, model: Model) -> None:
    """Compares what the headers of an artifact's files say with its manifest.

    Raises MeshnetError (ARTIFACT_MISMATCH).
    """

    def differs(what: str, expected: object, found: object) -> MeshnetError:
        return MeshnetError(
            errors_pb2.REASON_ARTIFACT_MISMATCH,
            f"{what}: the manifest says {expected}, the files say {found}; "
            "make the manifest anew from the files that are meant",
        )

    names = [file.path.name for file in model.files]
    if names != [file.name for file in manifest.files]:
        raise differs("files", [file.name for file in manifest.files], names)
    if model.tokenizer_sha256 != manifest.tokenizer_sha256:
        raise differs("the tokenizer", manifest.tokenizer_sha256, model.tokenizer_sha256)
    for file, found in zip(manifest.files, _describe(model), strict=True):
        expected = _Described(file.role, file.layers, file.header_bytes)
        if expected != found:
            raise differs(file.name, dataclasses.astuple(expected), dataclasses.astuple(found))


def make_manifest(
    paths: Sequence[pathlib.Path],
    origin: Origin | None = None,
    *,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
) -> Manifest:
    """Reads files and says what they are. Shows progress on stderr.

    `paths` is one file, any part of a split set, all of its files, or a folder that holds one
    artifact and no other GGUF file. Every byte is read once.

    Raises MeshnetError: ARTIFACT_UNREADABLE, ARTIFACT_INVALID, ARTIFACT_INCOMPLETE (a split is
    missing), ARTIFACT_MISMATCH (files of more than one artifact), MANIFEST_INVALID (a name or
    number that no manifest may have).
    """
    files = _given_files(paths)
    model = read_model(files[0])
    names = [file.path.name for file in model.files]
    strangers = sorted({file.name for file in files} - set(names)) if len(files) > 1 else []
    if strangers:
        raise MeshnetError(
            errors_pb2.REASON_ARTIFACT_MISMATCH,
            f"expected the files of one artifact ({_listed(names)}), got {_listed(strangers)} too; "
            "name the files of one artifact only",
        )
    if len(files) > 1:
        check_set([file.name for file in files], names, str(files[0].parent))
    if not _MIN_CHUNK_BYTES <= chunk_bytes <= _MAX_CHUNK_BYTES:
        raise MeshnetError(
            errors_pb2.REASON_MANIFEST_INVALID,
            f"expected chunks of {_MIN_CHUNK_BYTES} to {_MAX_CHUNK_BYTES} bytes, got {chunk_bytes}",
        )
    hashed = []
    total = sum(file.bytes for file in model.files)
    with progress.bytes_bar(f"reading {names[0]}", total) as advance:
        for file in model.files:
            hashed.append(_hash_file(file.path, file.bytes, chunk_bytes, advance))
    manifest = Manifest(
        origin or Origin(),
        model.tokenizer_sha256,
        chunk_bytes,
        tuple(
            ManifestFile(
                file.path.name,
                file.bytes,
                described.role,
                described.layers,
                described.header_bytes,
                sha256,
                chunks,
            )
            for file, described, (sha256, chunks) in zip(
                model.files, _describe(model), hashed, strict=True
            )
        ),
    )
    return parse_manifest(manifest.to_bytes(), "what these files would give")


def _given_files(paths: Sequence[pathlib.Path]) -> list[pathlib.Path]:
    if len(paths) != 1 or not paths[0].is_dir():
        if len({path.parent for path in paths}) > 1:
            raise MeshnetError(
                errors_pb2.REASON_ARTIFACT_MISMATCH, "expected all files of a set in one folder"
            )
        return sorted(paths)
    folder = paths[0]
    files = sorted(path for path in folder.iterdir() if path.name.endswith(".gguf"))
    if not files:
        raise MeshnetError(
            errors_pb2.REASON_ARTIFACT_UNREADABLE, f"expected GGUF files in {folder}, found none"
        )
    match = _PART.fullmatch(files[0].name)
    if match and int(match["count"]) <= _MAX_FILES:
        expected = part_names(match["prefix"], int(match["count"]))
        check_set([file.name for file in files], expected, str(folder))
    return files


def _hash_file(
    path: pathlib.Path, size: int, chunk_bytes: int, advance: Callable[[int], None]
) -> tuple[str, tuple[str, ...]]:
    whole = hashlib.sha256()
    chunks: list[str] = []
    try:
        with path.open("rb") as file, concurrent.futures.ThreadPoolExecutor(1) as pool:
            before = os.fstat(file.fileno())
            left = size
            while left:
                chunk = hashlib.sha256()
                chunk_left = min(chunk_bytes, left)
                left -= chunk_left
                while chunk_left:
                    piece = file.read(min(_PIECE_BYTES, chunk_left))
                    if not piece:
                        raise OSError("it became shorter while it was read")
                    beside = pool.submit(whole.update, piece)
                    chunk.update(piece)
                    beside.result()
                    chunk_left -= len(piece)
                    advance(len(piece))
                chunks.append(chunk.hexdigest())
            after = os.fstat(file.fileno())
            if (before.st_mtime_ns, size) != (after.st_mtime_ns, after.st_size):
                raise OSError("it changed while it was read")
    except OSError as error:
        raise MeshnetError(
            errors_pb2.REASON_ARTIFACT_UNREADABLE, f"cannot read {path}: {error}"
        ) from error
    return whole.hexdigest(), tuple(chunks)
