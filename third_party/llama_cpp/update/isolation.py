"""A clone of this repository with the candidate as its pin: built and tested there, never here."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from third_party.llama_cpp.llama_source import git_tree, regenerate
from third_party.llama_cpp.llama_source.errors import LlamaSourceError, Reason
from third_party.llama_cpp.llama_source.manifest import Manifest

PIN = "third_party/llama_cpp"
STACK = "patches/llama_cpp"
_PASSED = ("PASSED", "FLAKY")
# A line now and then, as in a log.
_PROGRESS = ("--color=no", "--curses=no", "--show_progress_rate_limit=20")


def fingerprint(repo: Path) -> str:
    """A hash over the production pin: manifest, listing and patches."""
    digest = hashlib.sha256()
    files = [repo / PIN / "manifest.json", repo / PIN / "pinned_tree.txt"]
    for path in [*files, *sorted((repo / STACK).iterdir())]:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(repo)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def clone(repo: Path, tree: Path, edits: Path | None = None) -> None:
    """What is committed here, in a folder of its own, with the patch `edits` on top.

    A clone of the same commit that is there already stays as it is. Raises WORK_TREE_INVALID.
    """
    git = regenerate.git
    if tree.exists():
        ours, found = (git(folder, "rev-parse", "HEAD").decode().strip() for folder in (repo, tree))
        if found != ours:
            raise LlamaSourceError(
                Reason.WORK_TREE_INVALID,
                f"{tree} is a clone of another commit of this repository",
                expected=ours,
                found=found,
                hint=f"remove {tree}, or give another --out",
            )
        return
    git(repo, "clone", "--quiet", "--no-hardlinks", str(repo), str(tree))
    if edits is not None:
        try:
            git(tree, "apply", str(edits))
        except LlamaSourceError:
            shutil.rmtree(tree)
            raise


def set_pin(tree: Path, pin: Manifest, stack: Path, release: str) -> list[str]:
    """Writes the candidate as the clone's pin; returns the names of its patches."""
    path = tree / PIN / "manifest.json"
    data = json.loads(path.read_text("utf-8"))
    data["release"], data["build"] = release, release
    data["commit"], data["tree"] = pin.commit, pin.tree
    data["licence"]["sha256"] = pin.licence_sha256
    # Where others get it from is for whoever adopts it to say.
    data["methods"] = [{"kind": "local"}]
    path.write_text(json.dumps(data, indent=2) + "\n", "utf-8")
    (tree / PIN / "pinned_tree.txt").write_text(git_tree.format_listing(pin.listing), "utf-8")
    return regenerate.regenerate(pin, stack, tree / STACK)


@dataclasses.dataclass(frozen=True)
class Bazel:
    """tools/bazel of a work tree, with an output base of its own when one is named."""

    tree: Path
    source: Path | None = None
    base: Path | None = None

    def run(self, command: str, *arguments: str) -> int:
        """Runs a command; its output goes where ours goes. Returns the exit code."""
        entry = [str(self.tree / "tools/bazel")]
        if self.base is not None:
            entry.append(f"--output_base={self.base}")
        environment = {k: v for k, v in os.environ.items() if not k.startswith("BUILD_")}
        if self.source is not None:
            environment["MESHNET_LLAMA_CPP_SOURCE"] = str(self.source)
        # Our own output is the report alone.
        return subprocess.run(
            [*entry, command, *arguments],
            cwd=self.tree,
            env=environment,
            stdout=sys.stderr,
            check=False,
        ).returncode

    def build(self, targets: Sequence[str]) -> bool:
        """Whether the targets build."""
        return self.run("build", *_PROGRESS, "--", *targets) == 0

    def test(self, targets: Sequence[str], events: Path, flags: Sequence[str]) -> dict[str, bool]:
        """Which tests pass, by label. Empty when there was nothing to run."""
        self.run("test", "--keep_going", *_PROGRESS,
                 f"--build_event_json_file={events}", *flags, "--", *targets)  # fmt: skip
        return read_tests(events.read_text("utf-8").splitlines())

    def shutdown(self) -> None:
        """Ends the server; with an output base of its own, that goes too."""
        self.run("shutdown")
        if self.base is not None:
            shutil.rmtree(self.base, ignore_errors=True)


def read_tests(events: Sequence[str]) -> dict[str, bool]:
    """Which tests passed, from Bazel's events; one that did not get to run has not passed.

    One that is of another lane, and so incompatible, is none of them.
    """
    tests: dict[str, bool] = {}
    for line in events:
        event: Mapping[str, object] = json.loads(line)
        identity = event.get("id")
        if not isinstance(identity, dict):
            continue
        if "targetConfigured" in identity and "configured" in event:
            configured = event["configured"]
            if isinstance(configured, dict) and configured.get("testSize"):
                tests.setdefault(identity["targetConfigured"]["label"], False)
        aborted = event.get("aborted")
        if isinstance(aborted, dict) and aborted.get("reason") == "SKIPPED":
            tests.pop(str(identity.get("targetCompleted", {}).get("label")), None)
        if "testSummary" in identity and isinstance(summary := event.get("testSummary"), dict):
            passed = summary.get("overallStatus") in _PASSED
            tests[identity["testSummary"]["label"]] = passed
    return tests


def adoption(tree: Path, target: Path) -> None:
    """Writes the difference between the clone, with what a person changed in it, and HEAD."""
    regenerate.git(tree, "add", "--all")
    target.write_bytes(regenerate.git(tree, "diff", "--cached", "--binary", "HEAD"))


def check_rollback(repo: Path, patch: Path, folder: Path) -> str:
    """Adopts the candidate in a further clone and takes it back; the production pin is left.

    Returns the pin's fingerprint after it. Raises WORK_TREE_INVALID when anything differs.
    """
    shutil.rmtree(folder, ignore_errors=True)
    git = regenerate.git
    git(repo, "clone", "--quiet", str(repo), str(folder))
    before = fingerprint(folder)
    git(folder, "apply", "--index", str(patch))
    git(folder, "commit", "--quiet", "--message", "Move the pin of llama.cpp")
    if fingerprint(folder) == before:
        raise LlamaSourceError(Reason.WORK_TREE_INVALID, "the candidate changes nothing")
    git(folder, "revert", "--no-edit", "HEAD")
    after = fingerprint(folder)
    if after != before or git(folder, "diff", "HEAD~2", "--stat"):
        raise LlamaSourceError(
            Reason.WORK_TREE_INVALID,
            "git revert did not give the pin back",
            expected=before,
            found=after,
        )
    shutil.rmtree(folder)
    return after
