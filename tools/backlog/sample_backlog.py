"""Small backlogs for tests."""

from __future__ import annotations

from typing import Any

from tools.backlog.backlog import derive_blocks

__all__ = ["backlog", "story"]


def story(number: int, *depends: int, **fields: Any) -> dict[str, Any]:
    """A story that depends on those with these numbers."""
    base = {
        "id": f"ABC-{number:03}",
        "title": f"Story {number}",
        "milestone": "M0",
        "type": "AFK",
        "labels": ["a"],
        "dependsOn": [f"ABC-{other:03}" for other in depends],
        "blocks": [],
        "triage": "ready",
        "evidence": "tests",
        "needs": [],
        "passes": False,
    }
    return base | fields


def backlog(*stories: dict[str, Any]) -> dict[str, Any]:
    """A backlog of these, whose `blocks` it derives."""
    for item, blocks in zip(stories, derive_blocks(stories), strict=True):
        item["blocks"] = blocks
    return {"schema_version": 1, "project": "p", "stories": list(stories)}
