from __future__ import annotations

import copy
import json
import pathlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.backlog.backlog import (
    BacklogError,
    check_generated,
    load,
    parse,
    problems,
    render,
)
from tools.backlog.sample_backlog import backlog, story

OURS = pathlib.Path("docs/backlog/prd.json")


def test_ours_is_valid_and_its_rendering_is_up_to_date() -> None:
    ours = load(OURS)
    assert [s["id"] for s in ours["stories"]] == [f"DGR-{n:03}" for n in range(17, 72)]
    text = OURS.with_name("stories.md").read_text()
    assert list(check_generated(ours, "stories.md", text)) == []
    assert parse(text) == ours


# What Markdown, our own marks and careless splitting would stumble over.
LINE = (
    st.text("aB7 #->[]<!`*_\\|,:~\u00e9\u4e2d\u2028\u00a0\U0001f600", min_size=1, max_size=30)
    .map(str.strip)
    .filter(bool)
)
WORD = st.text("a0", min_size=1, max_size=4) | st.sampled_from(["none", "a-b"])


@st.composite
def backlogs(draw: st.DrawFn) -> dict[str, Any]:
    stories = []
    titles = draw(st.lists(LINE, max_size=6, unique_by=str.casefold))
    for number, title in enumerate(titles):
        depends = draw(st.lists(st.integers(0, max(0, number - 1)), unique=True)) if number else []
        item = story(
            number,
            *depends,
            title=title,
            type=draw(st.sampled_from(["AFK", "HITL"])),
            labels=draw(st.lists(WORD, max_size=3, unique=True)),
            needs=draw(st.lists(st.sampled_from(["hardware", "model", "upstream"]), unique=True)),
        )
        if draw(st.booleans()):
            item["summary"] = draw(LINE)
        if draw(st.booleans()):
            item["criteria"] = draw(st.lists(LINE, min_size=1, max_size=3))
        stories.append(item)
    return backlog(*stories) | {"project": draw(LINE)}


@given(backlogs())
def test_markdown_loses_nothing(content: dict[str, Any]) -> None:
    assert list(problems(content)) == []
    assert parse(render(content)) == content


def changed(path: list[Any], value: Any) -> dict[str, Any]:
    content = backlog(story(1), story(2, 1), story(3, 1, 2))
    at: Any = content
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return content


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        (["stories", 0, "blocks"], ["ABC-003"], "ABC-001: expected blocks to be derived as"),
        (["stories", 2, "blocks"], ["ABC-001"], "as none, got ABC-001"),
        (["stories", 1, "title"], "STORY 1", "ABC-002: another story has the title 'STORY 1'"),
        (["stories", 1, "id"], "ABC-001", "ABC-001: another story has the id 'ABC-001'"),
        (["stories", 1, "dependsOn"], ["ABC-009"], "ABC-002: depends on ABC-009, which is no"),
        (["stories", 0, "dependsOn"], ["ABC-001"], "a cycle: ABC-001 -> ABC-001"),
        (["stories", 0, "dependsOn"], ["ABC-003"], "a cycle: ABC-001 -> ABC-003 -> ABC-001"),
        (["stories", 1, "passes"], True, "$.stories[1].passes"),
        (["stories", 1, "type"], "MAYBE", "$.stories[1].type"),
        (["stories", 1, "id"], "ABC-002\n", "$.stories[1].id"),
        (["stories", 1, "title"], "two\nlines", "$.stories[1].title"),
        (["stories", 1, "title"], "line\n", "$.stories[1].title"),
        (["stories", 1, "authority"], "me", "'authority' was unexpected"),
        (["schema_version"], 2, "$.schema_version"),
    ],
)
def test_what_is_refused(
    path: list[Any], value: Any, expected: str, tmp_path: pathlib.Path
) -> None:
    file = tmp_path / "prd.json"
    file.write_text(json.dumps(changed(path, value)))
    with pytest.raises(BacklogError) as error:
        load(file)
    assert expected in str(error.value)


def test_a_long_cycle_among_others_is_found() -> None:
    content = backlog(*(story(n, n + 1) for n in range(1, 50)), story(50, 7), story(51))
    (found,) = problems(content)
    assert found.startswith("a cycle: ABC-007 -> ABC-008 -> ")
    assert found.endswith("-> ABC-050 -> ABC-007")


def test_generated_files_may_claim_nothing() -> None:
    content = backlog(story(1), story(2, 1))
    text = render(content)
    other = copy.deepcopy(content)
    other["stories"][0]["title"] = "Another"

    def found(of: dict[str, Any], rendered: str) -> str:
        (problem,) = check_generated(of, "f.md", rendered)
        return problem

    assert list(check_generated(content, "f.md", text)) == []
    assert found(other, text) == "f.md: was made from another state of prd.json; render it anew"
    assert "claims f.md as its authority" in found(content, text.replace("prd.json", "f.md", 1))
    assert "expected its first line to say" in found(content, text.partition("\n")[2])
    assert "was edited" in found(content, text.replace("Story 2", "Story two"))
    for broken in (text.replace("Story 2", "Story two"), "", "# Backlog of p", text + "x\n"):
        with pytest.raises(BacklogError):
            parse(broken)


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_what_is_no_backlog(text: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "prd.json").write_text(text)
    for name in ("prd.json", "nothing.json"):
        with pytest.raises(BacklogError):
            load(tmp_path / name)
