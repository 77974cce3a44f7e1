"""Results under a contract that show nothing: for tests."""

from __future__ import annotations

import json
import pathlib

__all__ = ["write_empty_results"]


def write_empty_results(folder: pathlib.Path, sha256: str) -> pathlib.Path:
    """The file, in that folder, under the terms of alpha.v1 with that hash, whenever locked."""
    file = folder / "results.json"
    results = {
        "schema_version": 1,
        "contract": {"name": "alpha", "version": 1, "sha256": sha256},
        "begun_at": "2999-01-01T00:00:00+00:00",
        "evidence": "fixture",
        "machine": "none",
        "rows": [],
    }
    file.write_text(json.dumps(results), "utf-8")
    return file
