"""Fingerprints of routes: opaque, equal where workers fit together."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

__all__ = ["Mixture"]


@dataclass(frozen=True)
class Mixture:
    """Routes whose first workers are of the lane `head` and whose last are of the lane `tail`.

    All three are fingerprints, `shared` that of what both lanes have in common.
    """

    shared: str
    head: str
    tail: str

    @property
    def fingerprint(self) -> str:
        """Of such routes: SHA-256 in lower-case hex over "mixed/1" and the three, a line each."""
        lines = ("mixed/1", self.shared, self.head, self.tail)
        return hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()
