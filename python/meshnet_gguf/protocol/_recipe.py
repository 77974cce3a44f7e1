"""The fingerprint of a recipe, as C++'s RecipeFingerprint makes it."""

from __future__ import annotations

import hashlib
import string
from collections.abc import Iterable
from typing import Final

__all__ = ["recipe_fingerprint"]

_PLAIN: Final = frozenset((string.ascii_letters + string.digits + "._:/+,-").encode())


def recipe_fingerprint(fields: Iterable[tuple[str, str]]) -> str:
    """SHA-256 in lower-case hex over the canonical "name=value" lines; fields in any order."""
    encoded = sorted((name.encode(), value.encode()) for name, value in fields)
    digest = hashlib.sha256()
    for name, value in encoded:
        digest.update(name + b"=" + b"".join(_escape(byte) for byte in value) + b"\n")
    return digest.hexdigest()


def _escape(byte: int) -> bytes:
    return bytes([byte]) if byte in _PLAIN else b"%%%02X" % byte
