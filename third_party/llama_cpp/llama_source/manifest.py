"""What is pinned: manifest.json, pinned_tree.txt and the order of the patches."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from third_party.llama_cpp.llama_source import git_tree
from third_party.llama_cpp.llama_source.errors import LlamaSourceError, Reason

_SHA1 = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SRI = re.compile(r"sha512-[A-Za-z0-9+/]{86}==")


@dataclasses.dataclass(frozen=True)
class ArchiveMethod:
    """An archive of the release, by URL."""

    url: str
    sha256: str
    size: int
    prefix: str  # the folder within the archive that holds the tree, with a slash at its end


@dataclasses.dataclass(frozen=True)
class NpmBundleMethod:
    """A git bundle inside an npm package, fetched by the npm client."""

    package: str
    version: str
    integrity: str  # of the package's tarball, as in package-lock.json
    path: str  # of the bundle within the tarball
    commit: str  # in the bundle; another one than upstream's, with the same tree
    size: int  # of the package's tarball


@dataclasses.dataclass(frozen=True)
class LocalMethod:
    """A folder or an archive that the user names."""


Method = ArchiveMethod | NpmBundleMethod | LocalMethod


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The pin. tree decides what is accepted; commit and release say where it comes from."""

    upstream: str
    release: str
    build: str
    commit: str
    tree: str
    licence: str
    licence_file: str
    licence_sha256: str
    methods: tuple[Method, ...]
    listing: Mapping[str, git_tree.Entry]


def _invalid(message: str, expected: str, found: object) -> LlamaSourceError:
    return LlamaSourceError(
        Reason.MANIFEST_INVALID,
        message,
        expected=expected,
        found=repr(found),
        hint="a branch or a tag can move: pin the commit and its tree",
    )


def _field(data: Mapping[str, Any], key: str, pattern: re.Pattern[str], what: str) -> str:
    value = data.get(key)
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise _invalid(f"manifest field {key!r}", what, value)
    return value


def _text(data: Mapping[str, Any], key: str) -> str:
    value = data.get(key)
    if not isinstance(value, str) or not value:
        raise _invalid(f"manifest field {key!r}", "a text that is not empty", value)
    return value


def _size(data: Mapping[str, Any]) -> int:
    value = data.get("size")
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise _invalid("manifest field 'size'", "a number of bytes", value)
    return value


def _method(data: Mapping[str, Any]) -> Method:
    kind = data.get("kind")
    if kind == "archive":
        url = _text(data, "url")
        if not url.startswith("https://"):
            raise _invalid("manifest field 'url'", "an https:// address", url)
        return ArchiveMethod(
            url=url,
            sha256=_field(data, "sha256", _SHA256, "64 hexadecimal digits"),
            size=_size(data),
            prefix=_text(data, "prefix"),
        )
    if kind == "npm_bundle":
        return NpmBundleMethod(
            package=_text(data, "package"),
            version=_text(data, "version"),
            integrity=_field(data, "integrity", _SRI, "sha512- and 88 base64 digits"),
            path=_text(data, "path"),
            commit=_field(data, "commit", _SHA1, "a commit of 40 hexadecimal digits"),
            size=_size(data),
        )
    if kind == "local":
        return LocalMethod()
    raise _invalid("manifest field 'kind'", "archive, npm_bundle or local", kind)


def load(folder: Path) -> Manifest:
    """Reads manifest.json and pinned_tree.txt in folder. Raises MANIFEST_INVALID."""
    path = folder / "manifest.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        listing = git_tree.parse_listing((folder / "pinned_tree.txt").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LlamaSourceError(
            Reason.MANIFEST_INVALID, f"cannot read the manifest in {folder}: {error}"
        ) from error
    if not isinstance(data, dict):
        raise _invalid("manifest", "a JSON object", data)
    methods = data.get("methods")
    if not isinstance(methods, list) or not methods:
        raise _invalid("manifest field 'methods'", "a list of retrieval methods", methods)
    licence = data.get("licence")
    if not isinstance(licence, dict):
        raise _invalid("manifest field 'licence'", "an object", licence)
    manifest = Manifest(
        upstream=_text(data, "upstream"),
        release=_text(data, "release"),
        build=_text(data, "build"),
        commit=_field(data, "commit", _SHA1, "a commit of 40 hexadecimal digits"),
        tree=_field(data, "tree", _SHA1, "a git tree of 40 hexadecimal digits"),
        licence=_text(licence, "spdx"),
        licence_file=_text(licence, "file"),
        licence_sha256=_field(licence, "sha256", _SHA256, "64 hexadecimal digits"),
        methods=tuple(_method(m) for m in methods),
        listing=listing,
    )
    listed = git_tree.tree_hash(listing)
    if listed != manifest.tree:
        raise LlamaSourceError(
            Reason.MANIFEST_INVALID,
            "pinned_tree.txt does not list the pinned tree",
            expected=f"git tree {manifest.tree}",
            found=f"git tree {listed}",
            hint="write it again with: tools/llama_cpp listing SOURCE_FOLDER",
        )
    return manifest
