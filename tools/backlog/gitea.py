"""The backlog in a Gitea server: one issue a story, kept as the backlog says.

    client = GiteaClient("https://gitea.example.org", "owner/repository", token)
    steps = plan(backlog, client.snapshot())     # what is to be done; nothing is, yet
    client.apply(steps)                          # afterwards plan() is empty

A story's issue is known by the marker in its body, never by its title or number. Title, body,
milestone, labels of the backlog's own and dependencies are the projection's; state, comments,
assignees and all other labels belong to whoever uses the server. Issues without a marker are left
alone, and so are those of stories that the backlog no longer has: they are reported.
"""

from __future__ import annotations

import dataclasses
import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tools.backlog.backlog import AUTHORITY, Backlog, BacklogError, story_body

__all__ = ["GiteaClient", "Issue", "Snapshot", "Step", "plan"]

_PAGE: Final = 50
_TIMEOUT_SECONDS: Final = 30.0
_COLOUR: Final = "#1f6fb2"
# Labels that the projection sets and takes away; others on an issue stay.
_PREFIX: Final = "backlog/"
_MARKER: Final = re.compile(r"<!-- backlog story (?P<id>[A-Z]+-[0-9]+) of (?P<authority>\S+) -->")


@dataclass(frozen=True)
class Issue:
    """What the projection looks at in an issue."""

    number: int
    title: str
    body: str
    milestone: str | None
    labels: frozenset[str]
    dependencies: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Snapshot:
    """The server's side: ids of labels and milestones by name, issues by story."""

    labels: Mapping[str, int]
    milestones: Mapping[str, int]
    issues: Mapping[str, Issue]


@dataclass(frozen=True)
class Step:
    """One change. `what` is for people; the rest says what apply() has to do."""

    what: str
    kind: str
    story: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)


def _wanted(story: Mapping[str, Any]) -> dict[str, Any]:
    labels = [f"type-{story['type'].lower()}", f"triage-{story['triage']}"]
    labels += [f"evidence-{story['evidence']}", *(f"needs-{need}" for need in story["needs"])]
    return {
        "title": f"{story['id']}: {story['title']}",
        "body": f"<!-- backlog story {story['id']} of {AUTHORITY} -->\n\n{story_body(story)}\n",
        "milestone": story["milestone"],
        "labels": frozenset(_PREFIX + label for label in [*labels, *story["labels"]]),
    }


def plan(backlog: Backlog, found: Snapshot) -> list[Step]:
    """The changes that make the server's issues those of the backlog, in a good order."""
    stories = {story["id"]: _wanted(story) for story in backlog["stories"]}
    return [
        *_missing(stories, found),
        *(step for name in stories for step in _issue_steps(name, stories[name], found)),
        *(step for story in backlog["stories"] for step in _dependency_steps(story, found)),
        *(
            Step(f"leave #{issue.number}: the backlog has no {name}", "leave", name)
            for name, issue in found.issues.items()
            if name not in stories
        ),
    ]


def _missing(stories: Mapping[str, Mapping[str, Any]], found: Snapshot) -> Iterator[Step]:
    labels = sorted({label for wanted in stories.values() for label in wanted["labels"]})
    for label in labels:
        if label not in found.labels:
            yield Step(f"make label {label}", "label", values={"name": label})
    for milestone in sorted({wanted["milestone"] for wanted in stories.values()}):
        if milestone not in found.milestones:
            yield Step(f"make milestone {milestone}", "milestone", values={"title": milestone})


def _issue_steps(name: str, wanted: Mapping[str, Any], found: Snapshot) -> Iterator[Step]:
    issue = found.issues.get(name)
    if issue is None:
        yield Step(f"open an issue for {name}", "open", name, wanted)
        return
    changes = {
        key: wanted[key]
        for key in ("title", "body", "milestone")
        if getattr(issue, key) != wanted[key]
    }
    if changes:
        yield Step(f"edit #{issue.number} of {name}: {', '.join(changes)}", "edit", name, changes)
    foreign = {label for label in issue.labels if not label.startswith(_PREFIX)}
    labels = wanted["labels"] | foreign
    if labels != issue.labels:
        change = sorted(labels ^ issue.labels)
        yield Step(
            f"relabel #{issue.number} of {name}: {', '.join(change)}",
            "relabel",
            name,
            {"labels": labels},
        )


def _dependency_steps(story: Mapping[str, Any], found: Snapshot) -> Iterator[Step]:
    name = story["id"]
    issue = found.issues.get(name)
    numbers = {other.number: other_name for other_name, other in found.issues.items()}
    have = {numbers[n] for n in issue.dependencies if n in numbers} if issue else set()
    for other in story["dependsOn"]:
        if other not in have:
            yield Step(f"{name} depends on {other}", "depend", name, {"on": other})
    for other in sorted(have - set(story["dependsOn"])):
        yield Step(f"{name} no longer depends on {other}", "release", name, {"on": other})


class GiteaClient:
    """A repository's issues through Gitea's REST API (v1)."""

    def __init__(self, server: str, repository: str, token: str) -> None:
        if not re.fullmatch(r"https?://[^/\s]+(/[^\s]*)?", server):
            raise BacklogError(f"expected a server like https://gitea.example.org, got {server!r}")
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
            raise BacklogError(f"expected a repository like owner/name, got {repository!r}")
        self._base = f"{server.rstrip('/')}/api/v1/repos/{repository}"
        self._owner, self._name = repository.split("/")
        self._token = token

    def snapshot(self) -> Snapshot:
        """What is there now. Raises BacklogError: refused, unreachable, a story with two issues."""
        issues: dict[str, Issue] = {}
        for found in self._pages("/issues?state=all&type=issues"):
            named = _MARKER.match(found["body"] or "")
            if named is None:
                continue
            if named["id"] in issues:
                raise BacklogError(
                    f"#{issues[named['id']].number} and #{found['number']} both claim to be "
                    f"{named['id']}; take the marker out of one"
                )
            issues[named["id"]] = Issue(
                found["number"],
                found["title"],
                found["body"],
                found["milestone"]["title"] if found["milestone"] else None,
                frozenset(label["name"] for label in found["labels"]),
            )
        for name, issue in issues.items():
            others = self._pages(f"/issues/{issue.number}/dependencies?")
            numbers = frozenset(other["number"] for other in others)
            issues[name] = dataclasses.replace(issue, dependencies=numbers)
        return Snapshot(
            {label["name"]: label["id"] for label in self._pages("/labels?")},
            {item["title"]: item["id"] for item in self._pages("/milestones?state=all")},
            issues,
        )

    def apply(self, steps: Sequence[Step]) -> Iterator[Step]:
        """Does one step after the other, and gives each that is done. Raises BacklogError."""
        now = self.snapshot()
        labels, milestones = dict(now.labels), dict(now.milestones)
        numbers = {name: issue.number for name, issue in now.issues.items()}
        for step in steps:
            values = dict(step.values)
            if "milestone" in values:
                values["milestone"] = milestones[values["milestone"]]
            if "labels" in values:
                values["labels"] = sorted(labels[label] for label in values["labels"])
            if step.kind == "label":
                made = self._call("POST", "/labels", values | {"color": _COLOUR})
                labels[made["name"]] = made["id"]
            elif step.kind == "milestone":
                made = self._call("POST", "/milestones", values)
                milestones[made["title"]] = made["id"]
            elif step.kind == "open":
                numbers[step.story] = self._call("POST", "/issues", values)["number"]
            elif step.kind == "edit":
                self._call("PATCH", f"/issues/{numbers[step.story]}", values)
            elif step.kind == "relabel":
                self._call("PUT", f"/issues/{numbers[step.story]}/labels", values)
            elif step.kind in ("depend", "release"):
                method = "POST" if step.kind == "depend" else "DELETE"
                other = {"owner": self._owner, "repo": self._name, "index": numbers[values["on"]]}
                self._call(method, f"/issues/{numbers[step.story]}/dependencies", other)
            else:
                continue
            yield step

    def _pages(self, path: str) -> Iterator[Any]:
        page = 1
        while True:
            found = self._call("GET", f"{path}&page={page}&limit={_PAGE}")
            if not found:  # a server may give less than asked for on any page
                return
            yield from found
            page += 1

    def _call(self, method: str, path: str, content: Any = None) -> Any:
        request = urllib.request.Request(  # noqa: S310 - http or https, as checked
            self._base + path,
            method=method,
            data=None if content is None else json.dumps(content).encode(),
            headers={
                "Accept": "application/json",
                "Authorization": f"token {self._token}",
                "Content-Type": "application/json",
            },
        )
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as answer:  # noqa: S310
                return json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            with error:
                text = error.read(500).decode("utf-8", "replace")
            raise BacklogError(
                f"{method} {path.partition('?')[0]}: the server refused with {error.code}: {text}"
            ) from error
        except (OSError, ValueError) as error:
            raise BacklogError(f"{method} {self._base}: {error}") from error
