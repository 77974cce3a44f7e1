"""Checks the backlog, renders it, and brings it to a Gitea server.

    tools/bazel run //tools/backlog -- check
    tools/bazel run //tools/backlog -- render
    export GITEA_TOKEN=...
    tools/bazel run //tools/backlog -- --dry_run project https://gitea.example.org owner/name

The backlog is docs/backlog/prd.json. `check` validates it and what was generated from it, `render`
writes docs/backlog/stories.md, `project` makes a repository's issues those of the backlog, saying
what it does; with --dry_run it only says what it would.
Exit status: 0; 1 when something is wrong or was refused.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
from collections.abc import Sequence

from absl import app, flags
from meshnet import command_line

from tools.backlog.backlog import BacklogError, check_generated, load, render
from tools.backlog.gitea import GiteaClient, plan

_JSON = flags.DEFINE_bool("json", False, "Print one JSON object on stdout")
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Only say what would be done")
_FILE = flags.DEFINE_string("file", None, "Another backlog than docs/backlog/prd.json")


def _folder() -> pathlib.Path:
    """docs/backlog of the work tree in which `bazel run` was called."""
    return pathlib.Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY", ".")) / "docs" / "backlog"


def _run(arguments: Sequence[str]) -> list[str]:
    """What to tell."""
    file = pathlib.Path(_FILE.value) if _FILE.value else _folder() / "prd.json"
    backlog = load(file)
    generated = file.with_name("stories.md")
    if arguments == ["render"]:
        generated.write_text(render(backlog), "utf-8")
        return [f"wrote {generated}"]
    if arguments == ["check"]:
        text = generated.read_text("utf-8") if generated.exists() else ""
        found = list(check_generated(backlog, generated.name, text))
        if found:
            raise BacklogError("\n".join(found))
        return [f"{len(backlog['stories'])} stories, in order"]
    if len(arguments) == 3 and arguments[0] == "project":
        token = os.environ.get("GITEA_TOKEN", "")
        if not token:
            raise BacklogError("expected a token in the environment as GITEA_TOKEN")
        client = GiteaClient(arguments[1], arguments[2], token)
        steps = plan(backlog, client.snapshot())
        if _DRY_RUN.value:
            return [step.what for step in steps]
        done = []
        for number, step in enumerate(client.apply(steps), 1):
            print(f"[{number}/{len(steps)}] {step.what}", file=sys.stderr, flush=True)
            done.append(step.what)
        return [*done, *(step.what for step in steps if step.kind == "leave")]
    raise app.UsageError("expected check, render, or project SERVER OWNER/NAME")


def main(argv: Sequence[str]) -> int:
    """The command."""
    try:
        told = _run(argv[1:])
    except BacklogError as error:
        print(error, file=sys.stderr)
        if _JSON.value:
            print(json.dumps({"problems": str(error).split("\n")}))
        return 1
    print(json.dumps({"done": told}) if _JSON.value else "\n".join(told))
    return 0


if __name__ == "__main__":
    command_line.run(main)
