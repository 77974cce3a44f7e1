"""API keys: a file of their hashes, so that reading the file gives nobody a key.

    keys = ApiKeys(path)
    secret = keys.add("alice", KeyLimits(requests_per_minute=60))   # shown once, never again
    keys.find(secret)                                               # ApiKey(name="alice", ...)

A secret has 256 random bits, so a plain SHA-256 of it cannot be guessed backwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import re
import secrets
import tempfile
from collections.abc import Iterator

from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.gateway.admission import KeyLimits
from proto.meshnet.shard.v1 import errors_pb2

__all__ = ["ApiKey", "ApiKeys"]

_PREFIX = "sk-meshnet-"
_NAME = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclasses.dataclass(frozen=True)
class ApiKey:
    """A key's name and limits, and the SHA-256 of its secret in hex."""

    name: str
    sha256: str
    limits: KeyLimits


def _invalid(message: str) -> MeshnetError:
    return MeshnetError(errors_pb2.REASON_CONFIGURATION_INVALID, message)


class ApiKeys:
    """The keys of a file, read again whenever it has changed. A missing file holds none."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._keys: dict[str, ApiKey] = {}
        self._load()

    def find(self, secret: str) -> ApiKey | None:
        """The key with this secret."""
        self._load()
        # Looking up a hash tells nothing about how much of the secret is right.
        return self._keys.get(hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest())

    def all(self) -> list[ApiKey]:
        """All keys by name."""
        self._load()
        return sorted(self._keys.values(), key=lambda key: key.name)

    def add(self, name: str, limits: KeyLimits | None = None) -> str:
        """Makes a key and returns its secret. Raises MeshnetError (CONFIGURATION_INVALID)."""
        if not _NAME.fullmatch(name):
            raise _invalid(f"expected 1 to 64 of A-Z a-z 0-9 . _ : - as a key's name, got {name!r}")
        if any(key.name == name for key in self.all()):
            raise _invalid(f"expected a new name, {name!r} is in {self._path} already")
        secret = _PREFIX + secrets.token_urlsafe(32)
        key = ApiKey(name, hashlib.sha256(secret.encode()).hexdigest(), limits or KeyLimits())
        self._save([*self.all(), key])
        return secret

    def remove(self, name: str) -> None:
        """Takes a key away. Raises MeshnetError (CONFIGURATION_INVALID) when there is none."""
        left = [key for key in self.all() if key.name != name]
        if len(left) == len(self._keys):
            raise _invalid(f"expected the name of a key in {self._path}, got {name!r}")
        self._save(left)

    def _save(self, keys: list[ApiKey]) -> None:
        value = {"keys": [dataclasses.asdict(key) for key in keys]}
        try:
            with _replacing(self._path) as file:
                file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise _invalid(f"cannot write {self._path} ({error.strerror})") from error
        self._load()

    def _load(self) -> None:
        try:
            status = self._path.stat()
        except FileNotFoundError:
            self._seen, self._keys = None, {}
            return
        except OSError as error:
            raise _invalid(f"cannot read {self._path} ({error.strerror})") from error
        seen = (status.st_mtime_ns, status.st_size, status.st_ino)
        if seen == self._seen:
            return
        try:
            keys = [_key(item) for item in json.loads(self._path.read_text("utf-8"))["keys"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _invalid(
                f"expected a file of API keys at {self._path}, got something else ({error}); "
                "make it anew with meshnet api-keys"
            ) from error
        self._seen, self._keys = seen, {key.sha256: key for key in keys}


def _key(item: dict[str, object]) -> ApiKey:
    name, sha256, limits = item["name"], item["sha256"], item.get("limits", {})
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise ValueError(f"{name!r} is no name")
    if not (isinstance(sha256, str) and _HASH.fullmatch(sha256)):
        raise ValueError(f"the hash of {name} is none")
    if not isinstance(limits, dict) or not all(
        isinstance(value, int) and not isinstance(value, bool) and value >= 0
        for value in limits.values()
    ):
        raise ValueError(f"the limits of {name} are none")
    return ApiKey(name, sha256, KeyLimits(**limits))


@contextlib.contextmanager
def _replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A file beside `path` that only its owner may read, and that takes its place at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    os.close(handle)
    temporary = pathlib.Path(name)
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
