"""A small upstream of our own: a pinned tree, a patch stack, and a git repository of both."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
from pathlib import Path

import pytest

from third_party.llama_cpp.llama_source import git_tree

LICENCE = b"MIT License\n\nCopyright (c) 2023 The upstream authors\n"
FILES = {
    "LICENSE": LICENCE,
    "AUTHORS": b"# authors\nA. Person\n",
    "README.md": b"upstream\n",
    "src/engine.c": b"".join(b"line %d\n" % i for i in range(1, 41)),
    "src/models/small.c": b"// Copyright (c) 2024 someone\nint small;\nint last;",
    "ggml/build.sh": b"#!/bin/sh\nexit 0\n",
    "tests/test.c": b"int main(void) { return 0; }\n",
}
HEADER = "\n\nWhy: because.\nUpstream: engine\nDrop-when: never\n"


def git(folder: Path, *arguments: str) -> str:
    """Runs git without any configuration of the machine."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    for role in ("AUTHOR", "COMMITTER"):
        environment |= {
            f"GIT_{role}_NAME": "A. Person",
            f"GIT_{role}_EMAIL": "person@example.invalid",
            f"GIT_{role}_DATE": "2026-01-02T03:04:05+0000",
        }
    done = subprocess.run(
        ["git", *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def write_files(root: Path, files: dict[str, bytes]) -> Path:
    """Writes files below root; those that end in .sh are executable."""
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        path.chmod(0o755 if name.endswith(".sh") else 0o644)
    return root


@dataclasses.dataclass
class Upstream:
    """Folders of a test: the pinned source, a work tree with its commit, and where a pin lives."""

    root: Path
    source: Path
    work_tree: Path
    pin: Path
    patches: Path
    commit: str
    tree: str

    def commit_change(self, subject: str, changes: dict[str, bytes], header: str = HEADER) -> None:
        """Adds a commit to the work tree, as a developer of a patch does."""
        write_files(self.work_tree, changes)
        git(self.work_tree, "add", "--all")
        git(self.work_tree, "commit", "--quiet", "--message", subject + header)

    def write_manifest(self, **changes: object) -> None:
        """Writes manifest.json and pinned_tree.txt, with some fields changed."""
        data: dict[str, object] = {
            "upstream": "https://example.invalid/upstream",
            "release": "v1.0.0",
            "build": "b1",
            "commit": self.commit,
            "tree": self.tree,
            "licence": {
                "spdx": "MIT",
                "file": "LICENSE",
                "sha256": hashlib.sha256(LICENCE).hexdigest(),
            },
            "methods": [{"kind": "local"}],
        }
        data.update(changes)
        self.pin.mkdir(exist_ok=True)
        (self.pin / "manifest.json").write_text(json.dumps(data))
        listing = git_tree.format_listing(git_tree.scan(self.source))
        (self.pin / "pinned_tree.txt").write_text(listing)


@pytest.fixture
def upstream(tmp_path: Path) -> Upstream:
    """A pinned upstream without patches."""
    source = write_files(tmp_path / "source", FILES)
    work_tree = write_files(tmp_path / "work_tree", FILES)
    git(work_tree, "init", "--quiet", "--initial-branch=main")
    git(work_tree, "add", "--all")
    git(work_tree, "commit", "--quiet", "--message", "upstream")
    result = Upstream(
        root=tmp_path,
        source=source,
        work_tree=work_tree,
        pin=tmp_path / "pin",
        patches=tmp_path / "patches",
        commit=git(work_tree, "rev-parse", "HEAD"),
        tree=git(work_tree, "rev-parse", "HEAD^{tree}"),
    )
    result.write_manifest()
    return result
