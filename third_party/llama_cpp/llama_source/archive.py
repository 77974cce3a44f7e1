"""Unpacking archives that are not trusted.

An archive comes from the network before its content is checked, so it must not be able to write
outside its folder, fill the disk, or leave anything but files and links. Python's own data filter
is not used: it silently changes modes, and the tree's hash covers the executable bit.
"""

from __future__ import annotations

import os
import posixpath
import tarfile
from pathlib import Path
from typing import IO

from third_party.llama_cpp.llama_source.errors import LlamaSourceError, Reason

# llama.cpp b11146 has 3,619 files and 171 MB
MAX_MEMBERS = 50_000
MAX_BYTES = 2 << 30


def _unsafe(name: str, expected: str, found: str) -> LlamaSourceError:
    return LlamaSourceError(
        Reason.ARCHIVE_UNSAFE, f"archive member {name!r}", expected=expected, found=found
    )


def _relative_name(name: str, prefix: str) -> str | None:
    """The path of a member below prefix, None for prefix itself and the folders above it."""
    if name.startswith("/") or "\\" in name or "\0" in name:
        raise _unsafe(name, "a relative path", "an absolute or odd one")
    parts = name.rstrip("/").split("/")
    if ".." in parts or "" in parts:
        raise _unsafe(name, "a path without empty or '..' parts", name)
    clean = "/".join(part for part in parts if part != ".")
    if not clean or (prefix + "/").startswith(clean + "/"):
        return None
    if prefix and not clean.startswith(prefix + "/"):
        raise _unsafe(name, f"everything below {prefix}/", name)
    return clean[len(prefix) + 1 :] if prefix else clean


def extract_tar(stream: IO[bytes], destination: Path, prefix: str = "") -> None:
    """Unpacks the folder prefix of a tar archive (compressed or not) into a new destination.

    Raises ARCHIVE_UNSAFE for: absolute paths and '..', paths outside prefix, links that escape or
    that another member would be written through, hard links, devices and pipes, duplicates, and
    archives beyond MAX_MEMBERS or MAX_BYTES.
    """
    prefix = prefix.strip("/")
    destination.mkdir(parents=True)
    links: dict[str, str] = {}
    files: set[str] = set()
    folders: set[str] = set()
    total = 0
    try:
        with tarfile.open(fileobj=stream, mode="r|*") as archive:
            for count, member in enumerate(archive):
                if count >= MAX_MEMBERS:
                    raise _unsafe(member.name, f"at most {MAX_MEMBERS} members", "more")
                name = _relative_name(member.name, prefix)
                if name is None:
                    continue
                if name in files or name in links:
                    raise _unsafe(member.name, "one member of this name", "a second one")
                parents = list(_parents(name))
                if any(parent in links or parent in files for parent in parents):
                    raise _unsafe(
                        member.name, "a path through folders", "one through a file or link"
                    )
                folders.update(parents)
                if member.isdir():
                    folders.add(name)
                    (destination / name).mkdir(parents=True, exist_ok=True)
                    continue
                if name in folders:
                    raise _unsafe(member.name, "a folder, as before", "a file or link")
                if member.issym():
                    resolved = posixpath.normpath(
                        posixpath.join(posixpath.dirname(name), member.linkname)
                    )
                    if member.linkname.startswith("/") or resolved.split("/")[0] == "..":
                        raise _unsafe(member.name, "a link within the tree", member.linkname)
                    links[name] = member.linkname
                elif member.isreg():
                    total += member.size
                    if total > MAX_BYTES:
                        raise _unsafe(member.name, f"at most {MAX_BYTES} bytes", "more")
                    content = archive.extractfile(member)
                    assert content is not None  # a regular file has content
                    _write(destination / name, content, executable=bool(member.mode & 0o100))
                    files.add(name)
                else:
                    raise _unsafe(member.name, "files, folders and links", f"type {member.type!r}")
    except tarfile.TarError as error:
        raise LlamaSourceError(
            Reason.ARCHIVE_UNSAFE, f"not a readable tar archive: {error}"
        ) from error
    # at last, so that nothing can be written through them
    for name, target in links.items():
        (destination / name).parent.mkdir(parents=True, exist_ok=True)
        (destination / name).symlink_to(target)


def _parents(name: str) -> list[str]:
    parts = name.split("/")[:-1]
    return ["/".join(parts[: i + 1]) for i in range(len(parts))]


def _write(path: Path, content: IO[bytes], *, executable: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    with os.fdopen(os.open(path, flags, 0o755 if executable else 0o644), "wb") as out:
        while chunk := content.read(1 << 20):
            out.write(chunk)
    # whatever the umask says: the executable bit is part of the tree's hash
    path.chmod(0o755 if executable else 0o644)


def create_tar(root: Path, stream: IO[bytes]) -> None:
    """Packs root into a gzip-compressed tar archive without owners and times."""

    def neutral(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        info.mtime = 0
        return info

    with tarfile.open(fileobj=stream, mode="w:gz", compresslevel=1) as archive:
        for path in sorted(root.iterdir()):
            archive.add(path, arcname=path.name, filter=neutral)
