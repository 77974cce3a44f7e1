"""Git's tree hash, recomputed from files on disk or from a listing.

A git tree object is a sorted list of (mode, name, hash); a file's hash is SHA-1 over "blob SIZE\\0"
and its bytes. So the root tree's hash covers every path, every byte, every executable bit and every
link target, and nothing else (no owner, no time). That is what the manifest pins, because it is the
same whatever archive the files came in.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import posixpath
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from third_party.llama_cpp.llama_source.errors import LlamaSourceError, Reason

FILE = "100644"
EXECUTABLE = "100755"
LINK = "120000"
_TREE = "40000"
_MAX_DETAILS = 20


@dataclasses.dataclass(frozen=True)
class Entry:
    """A file or link of a tree: git's mode and the hash of its blob."""

    mode: str
    blob: str


def blob_hash(data: bytes) -> str:
    """The hash git gives to a file with these bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _hash_file(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def scan(root: Path) -> dict[str, Entry]:
    """All files and links under root, by path relative to it with forward slashes.

    Links are never followed. An empty folder is an error (git cannot record it, so it cannot be
    part of a pinned tree), and so is anything that is neither file, link nor folder.
    """
    entries: dict[str, Entry] = {}

    def visit(folder: Path, prefix: str) -> None:
        names = sorted(path.name for path in folder.iterdir())
        if not names and prefix:
            raise LlamaSourceError(
                Reason.TREE_MISMATCH,
                f"{prefix.rstrip('/')} is an empty folder",
                expected="files and links only",
                found="an empty folder",
                hint="remove it",
            )
        for name in names:
            path = folder / name
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode):
                visit(path, f"{prefix}{name}/")
            elif stat.S_ISLNK(status.st_mode):
                entries[prefix + name] = Entry(LINK, blob_hash(os.fsencode(path.readlink())))
            elif stat.S_ISREG(status.st_mode):
                mode = EXECUTABLE if status.st_mode & stat.S_IXUSR else FILE
                entries[prefix + name] = Entry(mode, _hash_file(path))
            else:
                raise LlamaSourceError(
                    Reason.TREE_MISMATCH,
                    f"{prefix}{name} is neither a file, a link nor a folder",
                    expected="files and links only",
                    found=f"file type {stat.S_IFMT(status.st_mode):o}",
                )

    visit(root, "")
    return entries


def tree_hash(entries: Mapping[str, Entry]) -> str:
    """The hash of the root tree that holds these entries."""
    files: dict[str, Entry] = {}
    folders: dict[str, dict[str, Entry]] = {}
    for path, entry in entries.items():
        head, slash, rest = path.partition("/")
        if slash:
            folders.setdefault(head, {})[rest] = entry
        else:
            files[head] = entry
    # git sorts a folder as if its name ended in a slash
    items: list[tuple[bytes, bytes]] = []
    for name, entry in files.items():
        raw = os.fsencode(name)
        items.append((raw, f"{entry.mode} ".encode() + raw + b"\0" + bytes.fromhex(entry.blob)))
    for name, children in folders.items():
        raw = os.fsencode(name)
        child = bytes.fromhex(tree_hash(children))
        items.append((raw + b"/", f"{_TREE} ".encode() + raw + b"\0" + child))
    body = b"".join(record for _, record in sorted(items))
    return hashlib.sha1(b"tree %d\0" % len(body) + body, usedforsecurity=False).hexdigest()


def parse_listing(text: str) -> dict[str, Entry]:
    """Reads a listing as format_listing() writes it."""
    entries: dict[str, Entry] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        mode, blob, path = line.split(" ", 2)
        entries[path] = Entry(mode, blob)
    return entries


def format_listing(entries: Mapping[str, Entry]) -> str:
    """One line a path: mode, blob hash, path."""
    return "".join(f"{e.mode} {e.blob} {path}\n" for path, e in sorted(entries.items()))


def differences(expected: Mapping[str, Entry], found: Mapping[str, Entry]) -> list[str]:
    """What differs between two trees, one line each, bounded in number."""
    lines: list[str] = []
    for path in sorted(set(expected) | set(found)):
        want, have = expected.get(path), found.get(path)
        if want == have:
            continue
        if have is None:
            lines.append(f"missing: {path}")
        elif want is None:
            lines.append(f"extra: {path}")
        elif want.mode != have.mode:
            lines.append(f"mode of {path}: expected {want.mode}, found {have.mode}")
        else:
            lines.append(f"content of {path}: expected blob {want.blob}, found {have.blob}")
    if len(lines) > _MAX_DETAILS:
        lines[_MAX_DETAILS:] = [f"and {len(lines) - _MAX_DETAILS} more"]
    return lines


def escaping_links(root: Path, paths: Iterable[str]) -> list[str]:
    """The links among paths whose target is absolute or lies outside root."""
    result = []
    for path in paths:
        full = root / path
        if not full.is_symlink():
            continue
        target = str(full.readlink())
        resolved = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        if target.startswith("/") or resolved.split("/")[0] == "..":
            result.append(f"link {path} -> {target}")
    return result


def verify(root: Path, expected_tree: str, listing: Mapping[str, Entry]) -> dict[str, Entry]:
    """Checks that root holds exactly the tree, and returns its entries.

    listing only serves to name what differs; the hash decides. Raises TREE_MISMATCH.
    """
    if not root.is_dir():
        raise LlamaSourceError(
            Reason.TREE_MISMATCH,
            f"{root} is not a folder",
            expected=f"git tree {expected_tree}",
            found="nothing",
        )
    entries = scan(root)
    escaping = escaping_links(root, (p for p, e in entries.items() if e.mode == LINK))
    if escaping:
        raise LlamaSourceError(
            Reason.TREE_MISMATCH,
            f"{root} has links that lead outside",
            expected="links within the tree",
            found=f"{len(escaping)} that escape",
            details=escaping,
        )
    found = tree_hash(entries)
    if found != expected_tree:
        raise LlamaSourceError(
            Reason.TREE_MISMATCH,
            f"{root} is not the pinned source",
            expected=f"git tree {expected_tree}",
            found=f"git tree {found}",
            details=differences(listing, entries),
            hint="delete it and fetch again; to move the pin see third_party/llama_cpp/README.md",
        )
    return entries
