"""Sizes as people write them: 4096, "250MB", "3 GiB"."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["parse_size"]

_SIZE: Final = re.compile(r"([0-9]{1,15})(?:\s*([kMGT])(i?)B)?")
_POWERS: Final = {"k": 1, "M": 2, "G": 3, "T": 4}


def parse_size(value: int | str) -> int | None:
    """Bytes: a number, or one with kB, MiB, GB and so on; None for anything else."""
    match = _SIZE.fullmatch(str(value))
    if match is None:
        return None
    base = 1024 if match[3] else 1000
    return int(match[1]) * int(base ** _POWERS.get(match[2], 0))
