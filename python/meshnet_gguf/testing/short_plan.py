"""A plan for `meshnet evidence` with as little to run as one can have: for tests."""

from __future__ import annotations

import json
import pathlib

__all__ = ["write_short_plan"]

_PLAN = {
    "stages": 2,
    "context_tokens": 256,
    "prefill_chunk_tokens": 64,
    "rollback_tokens": 64,
    "prompt_tokens": [20],
    "decode_tokens": 4,
    "compared_logit_rows": 2,
    "cancellations": 1,
    "sessions": 2,
}


def write_short_plan(folder: pathlib.Path) -> pathlib.Path:
    """The file, in that folder."""
    file = folder / "plan.json"
    file.write_text(json.dumps(_PLAN), "utf-8")
    return file
