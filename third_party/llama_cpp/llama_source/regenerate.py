"""The other direction: a git work tree with one commit a patch, and the stack from its commits.

The result depends on the commits only, neither on git's configuration nor on its version's
defaults, so that a stack that was applied with work_tree() and not changed comes out byte for byte
the same.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from third_party.llama_cpp.llama_source import diff, git_tree, patch_stack
from third_party.llama_cpp.llama_source.errors import LlamaSourceError, Reason
from third_party.llama_cpp.llama_source.manifest import Manifest

_FORMAT = (
    "format-patch",
    "--full-index",
    "--no-signature",
    "--no-stat",
    "--zero-commit",
    "--no-numbered",
    "--no-renames",
    "--no-ext-diff",
    "--no-textconv",
    "--no-color",
    "--diff-algorithm=myers",
    "--unified=3",
    "--src-prefix=a/",
    "--dst-prefix=b/",
    "--stdout",
)
BASE_TAG = "pinned"


def git(work_tree: Path, *arguments: str, stdin: bytes | None = None) -> bytes:
    """Runs git in a folder without this machine's settings. Raises WORK_TREE_INVALID."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    environment |= {
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "LC_ALL": "C.UTF-8",
        "GIT_AUTHOR_NAME": "meshnet-gguf maintainers",
        "GIT_AUTHOR_EMAIL": "maintainers@meshnet-gguf.invalid",
        "GIT_COMMITTER_NAME": "meshnet-gguf maintainers",
        "GIT_COMMITTER_EMAIL": "maintainers@meshnet-gguf.invalid",
    }
    done = subprocess.run(
        ["git", *arguments],
        cwd=work_tree,
        env=environment,
        input=stdin,
        capture_output=True,
        check=False,
    )
    if done.returncode != 0:
        raise LlamaSourceError(
            Reason.WORK_TREE_INVALID,
            f"git {arguments[0]} ended with {done.returncode} in {work_tree}",
            found=done.stderr.decode("utf-8", "replace").strip()[-500:],
        )
    return done.stdout


def work_tree(manifest: Manifest, patches: Path, source: Path) -> None:
    """Turns verified source into a git work tree: the stack as commits on the tag 'pinned'."""
    git_tree.verify(source, manifest.tree, manifest.listing)
    git(source, "init", "--quiet", "--initial-branch=stack")
    # upstream's .gitignore hides nothing of the pinned tree, but says so only here
    git(source, "add", "--all", "--force")
    git(source, "commit", "--quiet", "--message", f"llama.cpp {manifest.release} {manifest.commit}")
    git(source, "tag", BASE_TAG)
    for name in patch_stack.read_series(patches):
        git(
            source,
            "-c",
            "core.autocrlf=false",
            "am",
            "--quiet",
            "--keep-cr",
            "--no-3way",
            stdin=(patches / name).read_bytes(),
        )


def _base(manifest: Manifest, folder: Path) -> str:
    """The newest commit of the current branch whose tree is the pinned one."""
    log = git(folder, "log", "--first-parent", "--format=%H %T").decode().split("\n")
    for line in log:
        commit, _, tree = line.partition(" ")
        if tree == manifest.tree:
            return commit
    raise LlamaSourceError(
        Reason.WORK_TREE_INVALID,
        f"no commit of {folder} has the pinned tree",
        expected=f"git tree {manifest.tree}",
        found=f"{len(log) - 1} commits with other trees",
        hint="make the work tree with: tools/llama_cpp worktree FOLDER",
    )


def patch_name(number: int, subject: str) -> str:
    """0001-range-loading.patch for a subject 'range loading: what it does'."""
    concern, colon, _ = subject.partition(": ")
    slug = re.sub(r"[^a-z0-9]+", "-", concern.lower().replace("/", "")).strip("-")
    if not colon or not slug:
        raise LlamaSourceError(
            Reason.PATCH_INVALID,
            f"subject of commit {number}",
            expected="'concern: what it does'",
            found=subject,
        )
    return f"{number:04d}-{slug}.patch"


def regenerate(manifest: Manifest, folder: Path, patches: Path) -> list[str]:
    """Writes the commits on top of the pinned tree as patches and series; returns their names.

    What is written was parsed and checked before anything in patches changes. Raises
    WORK_TREE_INVALID, PATCH_*.
    """
    if git(folder, "status", "--porcelain").strip():
        raise LlamaSourceError(
            Reason.WORK_TREE_INVALID, f"{folder} has changes that are not committed"
        )
    base = _base(manifest, folder)
    commits = git(folder, "rev-list", "--reverse", "--first-parent", f"{base}..HEAD").decode()
    written: dict[str, bytes] = {}
    parsed: list[diff.Patch] = []
    for number, commit in enumerate(commits.split(), 1):
        text = git(folder, *_FORMAT, "-1", commit)
        draft = diff.parse(f"commit {commit[:12]}", text.decode("utf-8"))
        name = patch_name(number, draft.subject)
        parsed.append(diff.parse(name, text.decode("utf-8")))
        written[name] = text
    stack = patch_stack.Stack(tuple(parsed), "")
    patch_stack.check_headers(stack)
    patch_stack.check_rules(stack, manifest.listing)
    patches.mkdir(parents=True, exist_ok=True)
    for old in patches.glob("*.patch"):
        if old.name not in written:
            old.unlink()
    for name, text in written.items():
        (patches / name).write_bytes(text)
    order = "# The patches of llama.cpp in the order in which they are applied.\n"
    (patches / "series").write_text(order + "".join(f"{n}\n" for n in written), encoding="utf-8")
    return list(written)
