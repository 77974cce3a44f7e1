"""The projection, over HTTP, to a local server that answers as Gitea does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tools.backlog.backlog import Backlog, BacklogError, derive_blocks
from tools.backlog.gitea import GiteaClient, plan
from tools.backlog.local_gitea import LocalGitea
from tools.backlog.sample_backlog import backlog, story

REPOSITORY = "owner/name"


@pytest.fixture
def server() -> Iterator[LocalGitea]:
    with LocalGitea.start(REPOSITORY, "secret", page_size=2) as server:
        yield server


def client(server: LocalGitea) -> GiteaClient:
    return GiteaClient(server.url, REPOSITORY, "secret")


def project(server: LocalGitea, content: Backlog) -> list[str]:
    found = client(server)
    return [step.what for step in found.apply(plan(content, found.snapshot()))]


def content() -> dict[str, Any]:
    return backlog(
        story(1),
        story(2, 1, milestone="M1", type="HITL", needs=["hardware"], triage="needs-human"),
        story(3, 1, 2),
    )


def issue_of(server: LocalGitea, name: str) -> Any:
    (found,) = (i for i in server.issues.values() if i.title.startswith(f"{name}: "))
    return found


def labels_of(server: LocalGitea, name: str) -> set[str]:
    return {server.labels[key] for key in issue_of(server, name).labels}


def test_an_empty_server_gets_everything(server: LocalGitea) -> None:
    steps = plan(content(), client(server).snapshot())
    assert server.writes == 0  # planning is the dry run
    assert project(server, content()) == [step.what for step in steps]
    assert server.writes == len(steps)
    assert [issue.title for issue in server.issues.values()] == [
        "ABC-001: Story 1",
        "ABC-002: Story 2",
        "ABC-003: Story 3",
    ]
    second = issue_of(server, "ABC-002")
    assert server.milestones[second.milestone] == "M1"
    assert second.body.startswith("<!-- backlog story ABC-002 of prd.json -->\n")
    assert labels_of(server, "ABC-002") == {
        "backlog/type-hitl",
        "backlog/triage-needs-human",
        "backlog/evidence-tests",
        "backlog/needs-hardware",
        "backlog/a",
    }
    assert issue_of(server, "ABC-003").dependencies == [1, 2]


def test_a_second_time_there_is_nothing_to_do(server: LocalGitea) -> None:
    project(server, content())
    before = server.writes
    assert plan(content(), client(server).snapshot()) == []
    assert project(server, content()) == []
    assert server.writes == before


def test_changes_on_either_side_are_set_right_and_the_rest_is_left(server: LocalGitea) -> None:
    project(server, content())
    foreign = max(server.labels) + 1
    server.labels[foreign] = "urgent"
    second = issue_of(server, "ABC-002")
    second.labels.append(foreign)
    second.state = "closed"
    second.title = "ABC-002: edited by hand"
    issue_of(server, "ABC-003").dependencies = [2]
    issue_of(server, "ABC-003").labels = [foreign]

    new = content()
    new["stories"][1] |= {"dependsOn": [], "triage": "deferred"}
    for item, blocks in zip(new["stories"], derive_blocks(new["stories"]), strict=True):
        item["blocks"] = blocks
    done = project(server, new)
    assert "edit #2 of ABC-002: title, body" in done
    assert "ABC-002 no longer depends on ABC-001" in done
    assert "ABC-003 depends on ABC-001" in done
    assert (second.title, second.state, second.dependencies) == ("ABC-002: Story 2", "closed", [])
    assert "urgent" in labels_of(server, "ABC-002")
    assert "backlog/triage-deferred" in labels_of(server, "ABC-002")
    assert "backlog/triage-needs-human" not in labels_of(server, "ABC-002")
    assert labels_of(server, "ABC-003") >= {"urgent", "backlog/type-afk"}
    assert plan(new, client(server).snapshot()) == []


def test_other_issues_are_left_alone(server: LocalGitea) -> None:
    project(server, content())
    own = client(server)
    own._call("POST", "/issues", {"title": "ABC-001: looks like it", "body": "no marker"})
    before = server.writes
    shorter = backlog(story(1), story(2, 1, **{k: content()["stories"][1][k] for k in _KEPT}))
    steps = plan(shorter, own.snapshot())
    assert [step.what for step in steps if step.kind == "leave"] == [
        "leave #3: the backlog has no ABC-003"
    ]
    done = [step.kind for step in own.apply(steps)]
    assert "leave" not in done
    assert server.issues[3].state == "open"
    assert server.issues[4].body == "no marker"
    assert server.writes == before + len(done)


_KEPT = ("milestone", "type", "needs", "triage")


def test_two_issues_of_one_story_are_refused(server: LocalGitea) -> None:
    project(server, content())
    copy = {"title": "copy", "body": issue_of(server, "ABC-001").body}
    client(server)._call("POST", "/issues", copy)
    with pytest.raises(BacklogError, match="both claim to be ABC-001"):
        client(server).snapshot()


def test_what_the_server_refuses_is_told(server: LocalGitea) -> None:
    for wrong, code in (
        (GiteaClient(server.url, REPOSITORY, "wrong"), 401),
        (GiteaClient(server.url, "owner/other", "secret"), 404),
    ):
        with pytest.raises(BacklogError, match=f"the server refused with {code}"):
            wrong.snapshot()
    with pytest.raises(BacklogError, match="Connection refused"):
        GiteaClient("http://127.0.0.1:9", REPOSITORY, "secret").snapshot()


@pytest.mark.parametrize(
    ("url", "repository"),
    [("file:///etc", "a/b"), ("gitea.example", "a/b"), ("http://x", "a"), ("http://x", "a/../b")],
)
def test_nonsense_is_no_server(url: str, repository: str) -> None:
    with pytest.raises(BacklogError, match="expected a"):
        GiteaClient(url, repository, "t")
