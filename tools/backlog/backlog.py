"""The backlog as data: reading and validating it, and its Markdown, which reads back as the same.

    backlog = load(path)                      # docs/backlog/prd.json; raises BacklogError
    text = render(backlog)
    assert parse(text) == backlog

prd.json is the authority. Whatever is generated from it says so in its first line, with the hash
of what it was made from; check_generated() refuses anything that claims more, or is out of date.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import jsonschema

__all__ = [
    "AUTHORITY",
    "Backlog",
    "BacklogError",
    "check_generated",
    "derive_blocks",
    "digest",
    "load",
    "marker",
    "parse",
    "problems",
    "render",
    "story_body",
]

Story: TypeAlias = Mapping[str, Any]
# {"schema_version": 1, "project": ..., "stories": [...]}, as in backlog.schema.json.
Backlog: TypeAlias = Mapping[str, Any]

AUTHORITY: Final = "prd.json"
_MARKER: Final = re.compile(
    r"<!-- generated from (?P<authority>\S+), sha256 (?P<sha256>[0-9a-f]{64}); "
    r"edit that instead -->"
)
_SCHEMA: Final = pathlib.Path(__file__).with_name("backlog.schema.json")


class BacklogError(Exception):
    """What is wrong, one problem a line."""


def load(path: pathlib.Path) -> Backlog:
    """The backlog of a file. Raises BacklogError with all its problems."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise BacklogError(f"expected a backlog at {path}: {error}") from error
    found = list(problems(content))
    if found:
        raise BacklogError("\n".join(found))
    backlog: Backlog = content
    return backlog


def problems(content: Any) -> Iterator[str]:
    """Everything that is wrong with a backlog; form first, and alone if it is."""
    schema = json.loads(_SCHEMA.read_bytes())
    errors = list(jsonschema.Draft202012Validator(schema).iter_errors(content))
    if errors:
        yield from (f"{error.json_path}: {error.message}" for error in errors)
        return
    stories: Sequence[Story] = content["stories"]
    ids = {story["id"] for story in stories}
    for kind in ("id", "title"):
        seen: set[str] = set()
        for story in stories:
            if story[kind].casefold() in seen:
                yield f"{story['id']}: another story has the {kind} {story[kind]!r}"
            seen.add(story[kind].casefold())
    for story in stories:
        for other in story["dependsOn"]:
            if other not in ids:
                yield f"{story['id']}: depends on {other}, which is no story"
    cycle = _cycle(stories)
    if cycle:
        yield f"a cycle: {' -> '.join(cycle)}"
    for story, blocks in zip(stories, derive_blocks(stories), strict=True):
        if story["blocks"] != blocks:
            yield (
                f"{story['id']}: expected blocks to be derived as {', '.join(blocks) or 'none'}, "
                f"got {', '.join(story['blocks']) or 'none'}"
            )


def derive_blocks(stories: Sequence[Story]) -> list[list[str]]:
    """Of each story, those that depend on it, in the file's order."""
    return [[s["id"] for s in stories if story["id"] in s["dependsOn"]] for story in stories]


def _cycle(stories: Sequence[Story]) -> list[str]:
    """The first cycle of dependencies, from a story back to it; empty when there is none."""
    edges = {story["id"]: story["dependsOn"] for story in stories}
    done: set[str] = set()
    for start in edges:
        path, waiting = [start], [iter(edges[start])]
        while waiting and start not in done:
            following = next((n for n in waiting[-1] if n in edges and n not in done), None)
            if following is None:
                done.add(path.pop())
                waiting.pop()
            elif following in path:
                return [*path[path.index(following) :], following]
            else:
                path.append(following)
                waiting.append(iter(edges[following]))
    return []


# ---- Markdown ----


def digest(backlog: Backlog) -> str:
    """SHA-256 of the content, whatever its layout."""
    text = json.dumps(backlog, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def marker(backlog: Backlog) -> str:
    """The first line of whatever is generated."""
    return f"<!-- generated from {AUTHORITY}, sha256 {digest(backlog)}; edit that instead -->"


def render(backlog: Backlog) -> str:
    """The backlog for people."""
    parts = [marker(backlog), f"# Backlog of {backlog['project']}"]
    for story in backlog["stories"]:
        parts += [f"## {story['id']} {story['title']}", story_body(story)]
    return "\n\n".join(parts) + "\n"


_LISTS: Final = ("labels", "dependsOn", "blocks", "needs")
_FIELDS: Final = ("milestone", "type", *_LISTS, "triage", "evidence")


def story_body(story: Story) -> str:
    """A story without its heading."""
    lines = [
        f"- {name}: {', '.join(story[name]) or '-' if name in _LISTS else story[name]}"
        for name in _FIELDS
    ]
    parts = ["\n".join(lines)]
    if "summary" in story:
        parts.append(f"> {story['summary']}")
    if "criteria" in story:
        parts.append("\n".join(f"- [ ] {line}" for line in story["criteria"]))
    return "\n\n".join(parts)


def parse(text: str) -> Backlog:
    """The backlog that was rendered. Raises BacklogError for any other text."""
    lines = iter([line for line in text.split("\n") if line])
    named = _MARKER.fullmatch(next(lines, ""))
    title = re.fullmatch("# Backlog of (.+)", next(lines, ""))
    if named is None or title is None:
        raise BacklogError("expected the text that render() makes")
    stories: list[dict[str, Any]] = []
    for line in lines:
        if heading := re.fullmatch(r"## (\S+) (.+)", line):
            stories.append({"id": heading[1], "title": heading[2]})
        elif not stories:
            raise BacklogError(f"expected a story, got {line!r}")
        elif line.startswith("- [ ] "):
            stories[-1].setdefault("criteria", []).append(line.removeprefix("- [ ] "))
        elif line.startswith("> "):
            stories[-1]["summary"] = line.removeprefix("> ")
        elif field := re.fullmatch(r"- (\w+): (.+)", line):
            name, value = field[1], field[2]
            if name in _LISTS:
                stories[-1][name] = [] if value == "-" else value.split(", ")
            else:
                stories[-1][name] = value
        else:
            raise BacklogError(f"expected a story's field, got {line!r}")
    for story in stories:
        story["passes"] = False
    backlog = {"schema_version": 1, "project": title[1], "stories": stories}
    found = list(problems(backlog))
    if digest(backlog) != named["sha256"]:
        found.append(f"expected the content with the hash {named['sha256']}; it was edited")
    if found:
        raise BacklogError("\n".join(found))
    return backlog


def check_generated(backlog: Backlog, name: str, text: str) -> Iterator[str]:
    """What is wrong with a generated file: no or another authority, or out of date."""
    found = _MARKER.match(text)
    if found is None:
        yield f"{name}: expected its first line to say that {AUTHORITY} is the authority"
    elif found["authority"] != AUTHORITY:
        yield f"{name}: claims {found['authority']} as its authority, which is {AUTHORITY}"
    elif found["sha256"] != digest(backlog):
        yield f"{name}: was made from another state of {AUTHORITY}; render it anew"
    elif text != render(backlog):
        yield f"{name}: was edited; edit {AUTHORITY} and render it anew"
