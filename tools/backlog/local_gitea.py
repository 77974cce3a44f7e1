"""A local server that answers as Gitea's REST API does, as far as issues go; for tests.

    with LocalGitea.start("owner/name", token="secret") as server:
        server.url, server.issues

It keeps what Gitea keeps and refuses what Gitea refuses: requests without the token (401), other
repositories and numbers (404), malformed or incomplete bodies (422), unknown label ids, a second
time the same dependency, circular ones. Lists come in pages of at most `page_size`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

__all__ = ["LocalGitea"]


class _RefusalError(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass
class _Issue:
    number: int
    title: str
    body: str
    milestone: int | None
    labels: list[int]
    state: str = "open"
    dependencies: list[int] = field(default_factory=list)


class LocalGitea:
    """A running server. Made by start()."""

    def __init__(self, repository: str, token: str, page_size: int) -> None:
        self.url = ""
        self.issues: dict[int, _Issue] = {}
        self.labels: dict[int, str] = {}
        self.milestones: dict[int, str] = {}
        self.writes = 0
        self._repository = repository
        self._token = token
        self._page_size = page_size

    @classmethod
    @contextlib.contextmanager
    def start(cls, repository: str, token: str, page_size: int = 50) -> Iterator[LocalGitea]:
        """Serves on a port of its own while the block runs."""
        gitea = cls(repository, token, page_size)

        class Handler(http.server.BaseHTTPRequestHandler):
            def _answer(self) -> None:
                code, content = gitea._handle(self)
                text = b"" if content is None else json.dumps(content).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json;charset=utf-8")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = _answer  # noqa: N815

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        gitea.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield gitea
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    def _handle(self, request: http.server.BaseHTTPRequestHandler) -> tuple[int, Any]:
        length = int(request.headers.get("Content-Length") or 0)
        body = request.rfile.read(length)
        try:
            if request.headers.get("Authorization") != f"token {self._token}":
                raise _RefusalError(401, "user does not exist or token is invalid")
            path = urllib.parse.urlsplit(request.path)
            prefix = f"/api/v1/repos/{self._repository}/"
            if not path.path.startswith(prefix):
                raise _RefusalError(404, "not found")
            query = dict(urllib.parse.parse_qsl(path.query))
            content = self._body(body)
            if request.command != "GET":
                self.writes += 1
            route = f"{request.command} {path.path.removeprefix(prefix)}"
            return self._route(route, query, content)
        except _RefusalError as refusal:
            return refusal.code, {"message": refusal.message, "url": f"{self.url}/api/swagger"}

    def _body(self, body: bytes) -> dict[str, Any]:
        try:
            content = json.loads(body or b"{}")
        except ValueError as error:
            raise _RefusalError(422, f"cannot read the body: {error}") from error
        if not isinstance(content, dict):
            raise _RefusalError(422, "expected an object")
        return content

    def _route(self, route: str, query: dict[str, str], content: dict[str, Any]) -> tuple[int, Any]:
        if route == "GET labels":
            return 200, self._page([self._label(key) for key in self.labels], query)
        if route == "POST labels":
            if not re.fullmatch("#?[0-9a-fA-F]{6}", str(content.get("color"))):
                raise _RefusalError(422, "color is required")
            key = self._add(self.labels, content.get("name"))
            return 201, self._label(key)
        if route == "GET milestones":
            return 200, self._page([self._milestone(key) for key in self.milestones], query)
        if route == "POST milestones":
            return 201, self._milestone(self._add(self.milestones, content.get("title")))
        if route == "GET issues":
            wanted = query.get("state", "open")
            found = [i for i in self.issues.values() if wanted in ("all", i.state)]
            return 200, self._page([self._shown(i) for i in reversed(found)], query)
        if route == "POST issues":
            return 201, self._shown(self._open(content))
        named = re.fullmatch(r"(\w+) issues/(\d+)(/labels|/dependencies)?", route)
        if named is None:
            raise _RefusalError(404, "not found")
        return self._one(named[1] + (named[3] or ""), self._find(int(named[2])), query, content)

    def _one(
        self, action: str, issue: _Issue, query: dict[str, str], content: dict[str, Any]
    ) -> tuple[int, Any]:
        if action == "PATCH":
            known = {f.name for f in dataclasses.fields(issue)} - {"number", "labels"}
            for name in content.keys() & known:  # Gitea ignores the rest, labels among it
                setattr(issue, name, content[name])
            if issue.milestone is not None and issue.milestone not in self.milestones:
                raise _RefusalError(404, "no such milestone")
            return 201, self._shown(issue)
        if action == "PUT/labels":
            issue.labels = self._known_labels(content)
            return 200, [self._label(key) for key in issue.labels]
        if action == "GET/dependencies":
            found = [self._shown(self._find(number)) for number in issue.dependencies]
            return 200, self._page(found, query)
        if action in ("POST/dependencies", "DELETE/dependencies"):
            if f"{content.get('owner')}/{content.get('repo')}" != self._repository:
                raise _RefusalError(404, "no such repository")
            other = self._find(content.get("index"))
            if action.startswith("DELETE"):
                if other.number not in issue.dependencies:
                    raise _RefusalError(404, "no such dependency")
                issue.dependencies.remove(other.number)
                return 200, self._shown(issue)
            if other.number in issue.dependencies or other.number == issue.number:
                raise _RefusalError(422, "the dependency exists already")
            if issue.number in self._reachable(other):
                raise _RefusalError(422, "circular dependency")
            issue.dependencies.append(other.number)
            return 201, self._shown(issue)
        raise _RefusalError(405, "method not allowed")

    def _reachable(self, issue: _Issue) -> set[int]:
        found: set[int] = set()
        waiting = [issue.number]
        while waiting:
            number = waiting.pop()
            if number not in found:
                found.add(number)
                waiting += self.issues[number].dependencies
        return found

    def _open(self, content: dict[str, Any]) -> _Issue:
        if not content.get("title"):
            raise _RefusalError(422, "[Title]: Required")
        milestone = content.get("milestone")
        if milestone is not None and milestone not in self.milestones:
            raise _RefusalError(404, "no such milestone")
        labels = self._known_labels(content)
        number = len(self.issues) + 1
        issue = _Issue(number, content["title"], content.get("body", ""), milestone, labels)
        self.issues[number] = issue
        return issue

    def _known_labels(self, content: dict[str, Any]) -> list[int]:
        labels = content.get("labels", [])
        if not all(label in self.labels for label in labels):
            raise _RefusalError(422, "no such label")
        return list(labels)

    def _find(self, number: Any) -> _Issue:
        if number not in self.issues:
            raise _RefusalError(404, "issue does not exist")
        return self.issues[number]

    def _add(self, to: dict[int, str], name: Any) -> int:
        if not isinstance(name, str) or not name:
            raise _RefusalError(422, "[Name]: Required")
        key = 100 + len(to)
        to[key] = name
        return key

    def _page(self, items: list[Any], query: dict[str, str]) -> list[Any]:
        size = min(int(query.get("limit", self._page_size)), self._page_size)
        start = (int(query.get("page", 1)) - 1) * size
        return items[start : start + size]

    def _label(self, key: int) -> dict[str, Any]:
        return {"id": key, "name": self.labels[key]}

    def _milestone(self, key: int) -> dict[str, Any]:
        return {"id": key, "title": self.milestones[key], "state": "open"}

    def _shown(self, issue: _Issue) -> dict[str, Any]:
        milestone = None if issue.milestone is None else self._milestone(issue.milestone)
        return {
            "number": issue.number,
            "title": issue.title,
            "body": issue.body,
            "state": issue.state,
            "milestone": milestone,
            "labels": [self._label(key) for key in issue.labels],
        }
