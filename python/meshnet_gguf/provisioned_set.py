"""An artifact's files on storage, whole or in part, and what is known to be right in them.

A set is a folder named by the artifact's identity that holds the files under their own names, each
in its full size, with holes where nothing was fetched; `manifest.json`; and `provisioned.json`,
which says of each file which chunks were compared with the manifest:

    {"artifact_sha256": "...", "files": [{"chunks": [0, 3, 7, 9], "name": "..."}],
     "schema": "meshnet.provisioned/1"}

`chunks` are pairs of begin and end. It is replaced in one step, after the bytes that it speaks of
have reached the disk. While chunks come they are noted in `.journal`, a line each, right after
their bytes were written: a process that is killed loses none of them. What a power cut leaves of
them is another matter, so after a restart of the machine only what was synced counts.

The folder gets its name in one step, once everything that was asked for is in it; until then it is
`.<identity>.part`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import pathlib
import re
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.manifest import Manifest, ManifestFile, read_manifest
from meshnet_gguf.storage import refuse_home, sync_folder
from proto.meshnet.shard.v1 import errors_pb2

__all__ = [
    "MANIFEST_NAME",
    "RECORD_NAME",
    "ChunkWriter",
    "InstalledSet",
    "ProvisionedSet",
    "installed_sets",
    "runs",
]

MANIFEST_NAME = "manifest.json"
RECORD_NAME = "provisioned.json"
_JOURNAL_NAME = ".journal"
_SCHEMA = "meshnet.provisioned/1"
_BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")
_JOURNAL_NUMBER = re.compile(r"[0-9]{1,9}\n")
_SYNC_BYTES = 256 << 20
_PIECE_BYTES = 1 << 20


def runs(chunks: Iterable[int]) -> list[tuple[int, int]]:
    """Half-open runs of neighbours, ascending."""
    found: list[tuple[int, int]] = []
    for chunk in sorted(chunks):
        if found and found[-1][1] == chunk:
            found[-1] = (found[-1][0], chunk + 1)
        else:
            found.append((chunk, chunk + 1))
    return found


class ProvisionedSet:
    """The files of one artifact below `parent`. One process at a time: the caller holds a lock.

    open() makes what is missing, and may wait for the disk. Safe to use from several threads.
    """

    def __init__(self, manifest: Manifest, parent: pathlib.Path) -> None:
        self.manifest = manifest
        self.final = parent / manifest.artifact_sha256
        part = parent / f".{manifest.artifact_sha256}.part"
        for folder in (self.final, part):
            refuse_home(folder)
        self.folder = self.final if self.final.is_dir() else part
        self._lock = threading.Lock()
        self._unsynced = 0
        self._noted = 0
        self._journal = -1
        self.verified: dict[str, set[int]] = {file.name: set() for file in manifest.files}
        self._descriptors: dict[str, int] = {}

    def open(self) -> None:
        """Opens the files, finds out what is verified, and begins a journal."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        kept = set()
        for file in self.manifest.files:
            if self._open_file(file):
                kept.add(file.name)
        for name, chunks in self._recorded() | self._journalled():
            if name in kept and name in self.verified:
                file = next(f for f in self.manifest.files if f.name == name)
                self.verified[name].update(c for c in chunks if 0 <= c < len(file.chunks))
        self._begin_journal()

    def _open_file(self, file: ManifestFile) -> bool:
        """Whether the file was there already in its right size."""
        path = self.folder / file.name
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with contextlib.suppress(FileNotFoundError):
            if not path.is_symlink() and path.stat().st_mode & 0o200 == 0:
                path.chmod(0o600)
        try:
            descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            raise MeshnetError(
                errors_pb2.REASON_CONFIGURATION_INVALID,
                f"cannot write {path} ({error.strerror}); expected a plain file or none there",
            ) from error
        self._descriptors[file.name] = descriptor
        if os.fstat(descriptor).st_size == file.bytes:
            return True
        os.ftruncate(descriptor, 0)
        os.ftruncate(descriptor, file.bytes)
        return False

    def recorded(self) -> dict[str, set[int]]:
        """The verified chunks of each file, by the record; reads no content."""
        chunks: dict[str, set[int]] = {}
        for name, some in self._recorded():
            chunks.setdefault(name, set()).update(some)
        return chunks

    def _recorded(self) -> set[tuple[str, tuple[int, ...]]]:
        """What the record says; nothing where it is not one of this artifact."""
        found: set[tuple[str, tuple[int, ...]]] = set()
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            record: Any = json.loads((self.folder / RECORD_NAME).read_bytes())
            if record["artifact_sha256"] != self.manifest.artifact_sha256:
                return found
            limit = max(len(file.chunks) for file in self.manifest.files)
            for file in record["files"]:
                bounds = file["chunks"]
                for begin, end in zip(bounds[::2], bounds[1::2], strict=True):
                    found.add((file["name"], tuple(range(begin, min(end, limit)))))
        return found

    def _journalled(self) -> set[tuple[str, tuple[int, ...]]]:
        path = self.folder / _JOURNAL_NAME
        try:
            lines = path.read_text("ascii").splitlines(keepends=True)
        except (OSError, ValueError):
            return set()
        if not lines or not lines[0].startswith("boot "):
            return set()
        is_same_boot = lines[0] == f"boot {_boot_id()}\n"
        noted: list[tuple[str, tuple[int, ...]]] = []
        synced = 0
        for line in lines[1:]:
            name, _, number = line.rpartition(" ")
            if not _JOURNAL_NUMBER.fullmatch(number):
                break  # half a line, or no journal of ours
            if name == "synced":
                synced = int(number)
            else:
                noted.append((name, (int(number),)))
        return set(noted if is_same_boot else noted[:synced])

    def _begin_journal(self) -> None:
        # Written anew, so that what it says is from this start of the machine.
        path = self.folder / _JOURNAL_NAME
        part = self.folder / f"{_JOURNAL_NAME}.part"
        known = [f"{name} {chunk}\n" for name in self.verified for chunk in self.verified[name]]
        part.unlink(missing_ok=True)
        self._journal = os.open(
            part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600
        )
        # What was known before may not have been synced by the process that wrote it.
        self._sync_files()
        self._noted = len(known)
        head = f"boot {_boot_id()}\n{''.join(known)}synced {self._noted}\n"
        _write_all(self._journal, head.encode("ascii"))
        os.fsync(self._journal)
        part.replace(path)

    def missing(self, file: ManifestFile, chunks: Iterable[int]) -> list[int]:
        """Those of the chunks that are not verified, ascending."""
        with self._lock:
            return sorted(set(chunks) - self.verified[file.name])

    def note(self, file: ManifestFile, chunk: int) -> None:
        """A chunk's bytes are written and right."""
        with self._lock:
            _write_all(self._journal, f"{file.name} {chunk}\n".encode("ascii"))
            self._noted += 1
            self.verified[file.name].add(chunk)
            self._unsynced += self.manifest.chunk_span(file, chunk)[1]
            is_due = self._unsynced >= _SYNC_BYTES
            if is_due:
                self._unsynced = 0
        if is_due:
            self._sync()

    def forget(self, file: ManifestFile, chunks: Iterable[int]) -> None:
        """Chunks turned out to be wrong after all."""
        with self._lock:
            self.verified[file.name].difference_update(chunks)
        self._close_journal()
        if (self.folder / RECORD_NAME).exists():  # it says otherwise
            self._write_record()
        self._begin_journal()

    def _sync(self) -> None:
        with self._lock:
            noted = self._noted  # their bytes were written before them
        self._sync_files()
        with self._lock:
            _write_all(self._journal, f"synced {noted}\n".encode("ascii"))

    def _sync_files(self) -> None:
        for descriptor in self._descriptors.values():
            os.fdatasync(descriptor)

    def descriptor(self, file: ManifestFile) -> int:
        """The open file."""
        return self._descriptors[file.name]

    def read_chunk(self, file: ManifestFile, chunk: int) -> str:
        """The hash of a chunk as it stands on the disk."""
        offset, length = self.manifest.chunk_span(file, chunk)
        digest = hashlib.sha256()
        buffer = memoryview(bytearray(min(_PIECE_BYTES, length)))
        end = offset + length
        while offset < end:
            got = os.preadv(self._descriptors[file.name], [buffer[: end - offset]], offset)
            if got == 0:
                break
            digest.update(buffer[:got])
            offset += got
        return digest.hexdigest()

    def is_whole(self, file: ManifestFile) -> bool:
        """Whether every chunk of a file is verified."""
        return len(self.verified[file.name]) == len(file.chunks)

    def publish(self) -> None:
        """Makes what is verified the set's state, and the set appear under its name."""
        self._sync_files()
        for file in self.manifest.files:
            os.fchmod(self._descriptors[file.name], 0o444 if self.is_whole(file) else 0o644)
        self._replace(MANIFEST_NAME, self.manifest.to_bytes())
        self._write_record()
        self._close_journal()
        (self.folder / _JOURNAL_NAME).unlink(missing_ok=True)
        sync_folder(self.folder)
        if self.folder != self.final:
            self.folder.rename(self.final)
            self.folder = self.final
            sync_folder(self.final.parent)

    def _write_record(self) -> None:
        record = {
            "artifact_sha256": self.manifest.artifact_sha256,
            "files": [
                {
                    "chunks": [bound for run in runs(self.verified[file.name]) for bound in run],
                    "name": file.name,
                }
                for file in self.manifest.files
            ],
            "schema": _SCHEMA,
        }
        self._replace(RECORD_NAME, (json.dumps(record, indent=1, sort_keys=True) + "\n").encode())

    def _replace(self, name: str, content: bytes) -> None:
        path = self.folder / name
        part = self.folder / f".{name}.part"
        part.unlink(missing_ok=True)
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            _write_all(descriptor, content)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        part.replace(path)

    def _close_journal(self) -> None:
        if self._journal >= 0:
            os.close(self._journal)
            self._journal = -1

    def close(self) -> None:
        """Closes the files; what was verified stays noted."""
        self._close_journal()
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


@dataclass(frozen=True)
class InstalledSet:
    """An artifact as it lies on storage, by its own record. `model` is its first file."""

    artifact_sha256: str
    folder: pathlib.Path
    model: pathlib.Path
    total_bytes: int
    chunks: int
    verified_chunks: int


def installed_sets(parent: pathlib.Path) -> list[InstalledSet]:
    """The artifacts below a folder, by their names there; what is none is passed over."""
    found = []
    for folder in sorted(parent.iterdir()) if parent.is_dir() else []:
        try:
            manifest = read_manifest(folder / MANIFEST_NAME)
        except MeshnetError:
            continue
        if manifest.artifact_sha256 != folder.name:
            continue
        kept = ProvisionedSet(manifest, parent)
        recorded = kept.recorded()
        found.append(
            InstalledSet(
                manifest.artifact_sha256,
                folder,
                folder / manifest.files[0].name,
                manifest.total_bytes,
                sum(len(file.chunks) for file in manifest.files),
                sum(len(chunks) for chunks in recorded.values()),
            )
        )
    return found


class ChunkWriter:
    """Takes a file's bytes from an offset on, and keeps of them the chunks that are wanted.

    Each is written where it belongs, hashed on the way, and noted in the set once its hash is the
    manifest's.
    """

    def __init__(
        self, kept: ProvisionedSet, file: ManifestFile, begin: int, wanted: Iterable[int]
    ) -> None:
        self._set = kept
        self._file = file
        self._wanted = set(wanted)
        self._chunk = begin
        self._at, self._left = kept.manifest.chunk_span(file, begin)
        self._digest = hashlib.sha256()
        self.verified_bytes = 0

    def __call__(self, piece: memoryview) -> None:
        """The next bytes. Raises MeshnetError: ARTIFACT_MISMATCH, STORAGE_FULL."""
        for part in self._parts(piece):
            if self._chunk in self._wanted:
                self._digest.update(part)
                _write_at(self._set.descriptor(self._file), part, self._at)
            self._at += len(part)
            self._left -= len(part)
            if self._left == 0:
                self._end_chunk()

    def _parts(self, piece: memoryview) -> Iterator[memoryview]:
        while piece:
            assert self._left, "a source gave more than it was asked for"
            part = piece[: self._left]
            piece = piece[len(part) :]
            yield part

    def _end_chunk(self) -> None:
        if self._chunk in self._wanted:
            expected, found = self._file.chunks[self._chunk], self._digest.hexdigest()
            if found != expected:
                raise MeshnetError(
                    errors_pb2.REASON_ARTIFACT_MISMATCH,
                    f"{self._file.name}, chunk {self._chunk}: expected SHA-256 {expected}, "
                    f"got {found}",
                )
            self._set.note(self._file, self._chunk)
            self.verified_bytes += self._set.manifest.chunk_span(self._file, self._chunk)[1]
            self._digest = hashlib.sha256()
        self._chunk += 1
        if self._chunk < len(self._file.chunks):
            self._at, self._left = self._set.manifest.chunk_span(self._file, self._chunk)


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    with _full_disk_named():
        while data:
            written = os.pwrite(descriptor, data, offset)
            data = data[written:]
            offset += written


def _write_all(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    with _full_disk_named():
        while left:
            left = left[os.write(descriptor, left) :]


@contextlib.contextmanager
def _full_disk_named() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise MeshnetError(
            errors_pb2.REASON_STORAGE_FULL,
            f"cannot write to storage ({error.strerror}); what was verified so far is kept",
        ) from error


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text("ascii").strip()
    except OSError:
        return "unknown"
