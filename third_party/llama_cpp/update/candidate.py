"""A candidate for the next pin: its source, verified, and the patch stack on top of it."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from third_party.llama_cpp.llama_source import (
    archive,
    diff,
    fetch,
    git_tree,
    patch_stack,
    regenerate,
)
from third_party.llama_cpp.llama_source.errors import LlamaSourceError, Reason
from third_party.llama_cpp.llama_source.manifest import Manifest

BRANCH = "candidate"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_ABBREVIATED = re.compile(r"[0-9a-f]{9,40}")

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Verified source: the commit's hash covers the tree, the tree's hash every file."""

    commit: str
    tree: str
    title: str
    licence_sha256: str
    source: Path
    listing: dict[str, git_tree.Entry]


class Outcome(enum.Enum):
    """What became of a patch on the candidate."""

    APPLIES = "applies"  # its hunks are where they were, or have only moved
    MERGED = "merged"  # lines beside its hunks changed; git merged them without help
    RESOLVED = "resolved"  # a person resolved a conflict in the work tree
    PORTED = "ported"  # conflicts; a ported patch was given, which applies
    CONFLICT = "conflict"  # a person has to
    NOT_TRIED = "not tried"  # comes after one that conflicts


@dataclasses.dataclass(frozen=True)
class Trial:
    """One patch on the candidate; where it conflicts, the files and their first such hunk."""

    name: str
    outcome: Outcome
    files: tuple[str, ...] = ()
    hunk: str = ""


def _unavailable(message: str, hint: str = "") -> LlamaSourceError:
    return LlamaSourceError(Reason.SOURCE_UNAVAILABLE, message, hint=hint)


def _mismatch(what: str, expected: str, found: str) -> LlamaSourceError:
    return LlamaSourceError(Reason.TREE_MISMATCH, what, expected=expected, found=found)


def obtain(commit: str, given: Path | None, upstream: str, out: Path, say: Say) -> Candidate:
    """Puts the commit's source into out/source, which must not exist unless it is that source.

    `given` is a git repository, a bundle, or an archive or folder that holds either (a source
    package with its submodule's repository, say); without it the commit is fetched from upstream.
    Raises SOURCE_UNAVAILABLE, ARCHIVE_*, TREE_MISMATCH.
    """
    if not _ABBREVIATED.fullmatch(commit):
        raise _unavailable(
            f"expected a commit of 9 to 40 hexadecimal digits, got {commit!r}",
            "a branch or a tag can move: name the commit",
        )
    source = out / "source"
    with tempfile.TemporaryDirectory(dir=out, prefix=".source-") as folder:
        work = Path(folder)
        repository = work / "objects.git"
        regenerate.git(work, "init", "--quiet", "--bare", str(repository))
        if given is None:
            say(f"fetching {commit} from {upstream}")
            _fetch(repository, upstream, commit)
        else:
            say(f"looking for {commit} in {given}")
            _borrow(repository, given, commit, work)
        full = regenerate.git(repository, "rev-parse", "--verify", f"{commit}^{{commit}}")
        commit = full.decode().strip()
        raw = regenerate.git(repository, "cat-file", "commit", commit)
        # git trusts its own files; this does not.
        found = hashlib.sha1(b"commit %d\0" % len(raw) + raw, usedforsecurity=False).hexdigest()
        if found != commit:
            raise _mismatch("the commit object", commit, found)
        tree = raw.decode("utf-8", "replace").split("\n", 1)[0].removeprefix("tree ")
        if not source.exists():
            tar = work / "source.tar"
            regenerate.git(repository, "archive", "--format=tar", f"--output={tar}", commit)
            with tar.open("rb") as stream:
                archive.extract_tar(stream, work / "source")
            (work / "source").rename(source)
    listing = git_tree.scan(source)
    found = git_tree.tree_hash(listing)
    if found != tree:
        raise _mismatch(f"the source of {commit}", f"git tree {tree}", f"git tree {found}")
    say(f"verified: commit {commit}, git tree {tree}, {len(listing)} files")
    licence = hashlib.sha256((source / "LICENSE").read_bytes()).hexdigest()
    title = raw.decode("utf-8", "replace").partition("\n\n")[2].split("\n", 1)[0]
    return Candidate(commit, tree, title, licence, source, listing)


def _fetch(repository: Path, upstream: str, commit: str) -> None:
    if not _COMMIT.fullmatch(commit):
        raise _unavailable("only all 40 digits of a commit can be fetched", "or give --from")
    try:
        regenerate.git(repository, "fetch", "--quiet", "--depth=1", upstream, commit)
    except LlamaSourceError as error:
        raise _unavailable(
            f"{upstream} did not give {commit}: {error.found}",
            "give --from with a repository, bundle or source package that holds it",
        ) from error


def _has(repository: Path, commit: str) -> bool:
    try:
        regenerate.git(repository, "cat-file", "-e", f"{commit}^{{commit}}")
    except LlamaSourceError:
        return False
    return True


def _borrow(repository: Path, given: Path, commit: str, work: Path) -> None:
    """Brings the objects of a repository or bundle found in `given` into a repository of ours."""
    if not given.exists():
        raise _unavailable(f"--from: there is no {given}")
    if given.is_file() and given.suffix != ".bundle":
        with given.open("rb") as stream:
            archive.extract_tar(stream, work / "given")
        given = work / "given"
    for objects in _object_stores(given):
        # Objects alone: a foreign repository's settings and hooks are code.
        shutil.rmtree(repository / "objects")
        shutil.copytree(objects, repository / "objects")
        if _has(repository, commit):
            return
    for number, bundle in enumerate(_bundles(given)):
        bare = work / f"bundle{number}.git"
        regenerate.git(work, "clone", "--quiet", "--bare", str(bundle.absolute()), str(bare))
        shutil.rmtree(repository / "objects")
        shutil.copytree(bare / "objects", repository / "objects")
        if _has(repository, commit):
            return
    raise _unavailable(
        f"no repository and no bundle in {given} holds the commit {commit}",
        "files without their repository cannot be verified against a commit",
    )


def _object_stores(given: Path) -> Iterator[Path]:
    if given.is_dir():
        for folder, names, files in os.walk(given):
            if "objects" in names and "HEAD" in files:
                yield Path(folder) / "objects"


def _bundles(given: Path) -> Iterator[Path]:
    if given.is_file():
        yield given
    else:
        yield from sorted(given.rglob("*.bundle"))


def pin_of(current: Manifest, candidate: Candidate, release: str) -> Manifest:
    """The manifest that the candidate would have."""
    return dataclasses.replace(
        current,
        release=release,
        build=release,
        commit=candidate.commit,
        tree=candidate.tree,
        licence_sha256=candidate.licence_sha256,
        listing=candidate.listing,
    )


def try_stack(
    current: Manifest,
    patches: Path,
    candidate: Candidate,
    repository: Path,
    say: Say,
    ported: Path | None = None,
) -> list[Trial]:
    """Applies the stack to the candidate, patch by patch, on the branch `candidate`.

    Where a patch conflicts, the one of the same name in the folder `ported` is applied instead. A
    conflict without one is left in the work tree for a person to resolve and commit (`git add` and
    `git cherry-pick --continue`); a further call goes on behind what is there.

    Raises WORK_TREE_INVALID, PATCH_INVALID and PATCH_CONFLICT (for a patch of `ported`).
    """
    if not repository.exists():
        local = os.environ.get("MESHNET_LLAMA_CPP_SOURCE")
        fetch.fetch(
            current,
            repository,
            cache=fetch.default_cache(),
            local=Path(local) if local else None,
            log=say,
        )
        regenerate.work_tree(current, patches, repository)
        _start(candidate, repository)
    git = regenerate.git
    if git(repository, "status", "--porcelain", "--untracked-files=no").strip():
        raise LlamaSourceError(
            Reason.WORK_TREE_INVALID,
            f"{repository} holds a conflict that nobody has resolved",
            hint="resolve it, then: git add --update && git cherry-pick --continue --no-edit"
            " (or begin anew in another folder)",
        )
    names = patch_stack.read_series(patches)
    commits = git(repository, "rev-list", "--reverse", f"{regenerate.BASE_TAG}..stack").decode()
    done = git(repository, "log", "--format=%s", f"{BRANCH}-base..{BRANCH}").decode().splitlines()
    trials: list[Trial] = []
    stopped = False
    for name, commit in zip(names, commits.split(), strict=True):
        subject = git(repository, "log", "-1", "--format=%s", commit).decode().strip()
        if stopped:
            trials.append(Trial(name, Outcome.NOT_TRIED))
        elif subject in done:
            trials.append(Trial(name, _read_note(repository, subject)))
        else:
            trials.append(_pick(repository, name, commit, patches, ported))
            stopped = trials[-1].outcome is Outcome.CONFLICT
        last = trials[-1]
        where = f" ({last.hunk or ', '.join(last.files)})" if last.files else ""
        say(f"  {name}: {last.outcome.value}{where}")
    return trials


def _start(candidate: Candidate, repository: Path) -> None:
    """A commit with the candidate's files behind the pinned ones, so that git can merge."""
    git = regenerate.git
    git(repository, "checkout", "--quiet", "-B", BRANCH, regenerate.BASE_TAG)
    git(repository, "rm", "--quiet", "-r", "--force", ".")
    shutil.copytree(candidate.source, repository, symlinks=True, dirs_exist_ok=True)
    git(repository, "add", "--all", "--force")
    title = f"llama.cpp {candidate.commit}"
    git(repository, "commit", "--quiet", "--allow-empty", "--message", title)
    git(repository, "tag", f"{BRANCH}-base")
    found = git(repository, "rev-parse", "HEAD^{tree}").decode().strip()
    if found != candidate.tree:
        raise _mismatch("the candidate in the work tree", candidate.tree, found)


def _pick(repository: Path, name: str, commit: str, patches: Path, ported: Path | None) -> Trial:
    git = regenerate.git
    outcome = Outcome.APPLIES
    files: tuple[str, ...] = ()
    hunk = ""
    try:
        git(repository, "apply", "--check", stdin=(patches / name).read_bytes())
    except LlamaSourceError:
        outcome = Outcome.MERGED
    try:
        git(repository, "cherry-pick", "--allow-empty", commit)
    except LlamaSourceError:
        unmerged = git(repository, "diff", "--name-only", "--diff-filter=U", "-z").decode()
        files = tuple(unmerged.split("\0")[:-1])
        patch = diff.parse(name, (patches / name).read_text("utf-8"))
        hunk = _first_hunk(repository, patch, files)
        if ported is None or not (ported / name).exists():
            return Trial(name, Outcome.CONFLICT, files, hunk)
        git(repository, "cherry-pick", "--abort")
        _apply_ported(repository, ported / name, patch.subject)
        outcome = Outcome.PORTED
    git(repository, "notes", "add", "--message", outcome.value)
    return Trial(name, outcome, files, hunk)


def _first_hunk(repository: Path, patch: diff.Patch, files: Sequence[str]) -> str:
    """'path, hunk N (@@ ...)' of the first hunk with no place in the conflicting files."""
    for change in patch.changes:
        if change.path not in files:
            continue
        try:
            old = regenerate.git(repository, "show", f"HEAD:{change.path}")
        except LlamaSourceError:
            return f"{change.path}, which is gone"
        try:
            text = old.decode("utf-8", "surrogateescape")
            diff.apply_to_text(patch.name, change, text, anywhere=True)
        except LlamaSourceError as error:
            return error.message.partition(" does not apply: ")[2]
    return ""


def _apply_ported(repository: Path, path: Path, subject: str) -> None:
    given = diff.parse(path.name, path.read_text("utf-8"))
    if given.subject != subject:
        raise LlamaSourceError(
            Reason.PATCH_INVALID,
            f"{path} is of another patch",
            expected=f"the subject {subject!r}",
            found=repr(given.subject),
        )
    git = regenerate.git
    try:
        git(repository, "-c", "core.autocrlf=false", "am", "--quiet", "--keep-cr", "--no-3way",
            stdin=path.read_bytes())  # fmt: skip
    except LlamaSourceError as error:
        git(repository, "am", "--abort")
        hunk = _first_hunk(repository, given, [change.path for change in given.changes])
        raise LlamaSourceError(
            Reason.PATCH_CONFLICT,
            f"{path} does not apply: {hunk}",
            found=error.found,
            hint="port it anew, on the candidate with the patches before it",
        ) from error


def _read_note(repository: Path, subject: str) -> Outcome:
    """What an earlier call noted at a commit; a person's commit has no note."""
    found = regenerate.git(
        repository, "log", "--format=%N", "-1", "--fixed-strings", f"--grep={subject}", BRANCH
    )
    note = found.decode().strip()
    return Outcome(note) if note else Outcome.RESOLVED
