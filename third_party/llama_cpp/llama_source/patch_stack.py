"""The ordered patches, the rules that they obey, and applying them to a folder.

Rules: the series file names exactly the patch files, numbered in order; each patch has a header
with why it exists, what of upstream it relies on, and when it can go; it changes upstream's files
or adds files to upstream's folders, never licence or attribution files or lines; and it brings no
word of this project's network side into llama.cpp.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from third_party.llama_cpp.llama_source import diff, git_tree
from third_party.llama_cpp.llama_source.errors import LlamaSourceError, Reason
from third_party.llama_cpp.llama_source.manifest import Manifest

HEADER_FIELDS = ("Why:", "Upstream:", "Drop-when:")
_NAME = re.compile(r"(\d{4})-[a-z0-9]+(?:-[a-z0-9]+)*\.patch")
# of upstream's folders, those that are part of what is built and tested here
NEW_FILE_FOLDERS = ("ggml/", "include/", "src/", "tests/")
_PROTECTED = re.compile(r"(?:^|/)(?:LICEN[CS]E|COPYING|NOTICE|AUTHORS)[^/]*$|^licenses/", re.I)
_ATTRIBUTION = re.compile(r"copyright|\(c\)|licen[cs]e|spdx|\bauthors?\b", re.I)
# what a worker's host does with the engine is none of llama.cpp's business
_FORBIDDEN = re.compile(
    r"meshnet|tracker|gateway|relay"
    r"|\brout(?:e|es|ed|ing)\b|load.?balanc"
    r"|billing|invoice|payment|\bledger\b|\breceipt"
    r"|\bauth\b|authenticat|authori[sz]|credential|password|\btls\b|x509",
    re.I,
)
# where names that patches rely on are looked up
_CODE_FOLDERS = ("ggml/", "include/", "src/")
_CODE_FILES = (".c", ".cpp", ".cu", ".h", ".hpp")
_WORD = re.compile(r"[A-Za-z_]\w*")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*(?:::[A-Za-z_]\w*)*")
_PATH = re.compile(r"[\w.-]+(?:/[\w.-]+)+")


@dataclasses.dataclass(frozen=True)
class Stack:
    """The patches in their order, and a hash over their names and bytes."""

    patches: tuple[diff.Patch, ...]
    sha256: str


def _invalid(message: str, expected: str = "", found: str = "") -> LlamaSourceError:
    return LlamaSourceError(Reason.PATCH_INVALID, message, expected=expected, found=found)


def _forbidden(patch: diff.Patch, message: str, found: Sequence[str]) -> LlamaSourceError:
    return LlamaSourceError(Reason.PATCH_FORBIDDEN, f"{patch.name}: {message}", details=list(found))


def read_series(folder: Path) -> list[str]:
    """The declared order. Raises MANIFEST_INVALID unless it names exactly the patches in folder."""
    path = folder / "series"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise LlamaSourceError(
            Reason.MANIFEST_INVALID, f"cannot read the patch order: {error}"
        ) from error
    names = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    for number, name in enumerate(names, 1):
        match = _NAME.fullmatch(name)
        if not match or int(match[1]) != number:
            raise LlamaSourceError(
                Reason.MANIFEST_INVALID,
                f"{path}: entry {number}",
                expected=f"{number:04d}-what-it-is-about.patch",
                found=name,
            )
    present = sorted(p.name for p in folder.iterdir() if p.suffix == ".patch")
    if present != names:
        raise LlamaSourceError(
            Reason.MANIFEST_INVALID,
            f"{path} does not name exactly the patches beside it",
            expected=", ".join(names),
            found=", ".join(present),
        )
    return names


def load(folder: Path) -> Stack:
    """Reads the patches in their declared order. Raises MANIFEST_INVALID, PATCH_INVALID."""
    patches = []
    digest = hashlib.sha256()
    for name in read_series(folder):
        data = (folder / name).read_bytes()
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise _invalid(f"{name} is not UTF-8: {error}") from error
        patches.append(diff.parse(name, text))
    return Stack(tuple(patches), digest.hexdigest())


def check_headers(stack: Stack) -> None:
    """Each header field is there, once, and says something. Raises PATCH_INVALID."""
    for patch in stack.patches:
        lines = patch.message.split("\n")
        for field in HEADER_FIELDS:
            values = [line.removeprefix(field).strip() for line in lines if line.startswith(field)]
            if len(values) != 1 or not values[0]:
                raise _invalid(
                    f"{patch.name}: header field {field!r}",
                    "one line that starts with it and says something",
                    f"{len(values)} lines" if len(values) != 1 else "nothing behind it",
                )


def upstream_names(patch: diff.Patch) -> list[str]:
    """The identifiers that a patch's header says it relies on, in order.

    Prose is allowed between them: what counts is qualified (a::b) or written with an underscore.
    """
    block = patch.message[patch.message.index("Upstream:") + len("Upstream:") :]
    block = block.split("\nDrop-when:")[0]
    block = _PATH.sub(" ", block)
    return [name for name in _IDENTIFIER.findall(block) if "_" in name or "::" in name]


def check_upstream_names(stack: Stack, source: Path, entries: Mapping[str, git_tree.Entry]) -> None:
    """Everything that the headers name is still in the code. Raises PATCH_CONFLICT.

    A hunk only notices what happens beside it; what the patch calls elsewhere is in its header.
    """
    words: set[str] = set()
    for path in entries:
        if (
            path.startswith(_CODE_FOLDERS)
            and path.endswith(_CODE_FILES)
            and (source / path).exists()
        ):
            text = (source / path).read_text(encoding="utf-8", errors="replace")
            words.update(_WORD.findall(text))
    for patch in stack.patches:
        lost = [n for n in upstream_names(patch) if not words.issuperset(_WORD.findall(n))]
        if lost:
            raise LlamaSourceError(
                Reason.PATCH_CONFLICT,
                f"{patch.name} relies on names that this source does not have",
                expected="what its 'Upstream:' field names; adapt the patch to what became of it",
                found="no " + ", ".join(lost),
            )


def check_rules(stack: Stack, pinned: Mapping[str, git_tree.Entry]) -> None:
    """It touches upstream's files only, keeps attribution, stays generic. Or PATCH_FORBIDDEN."""
    known = set(pinned)
    folders = {path.rsplit("/", 1)[0] + "/" for path in pinned if "/" in path}
    for patch in stack.patches:
        for change in patch.changes:
            path = change.path
            if os.path.normpath(path) != path or path.startswith(("/", "../")):
                raise _forbidden(patch, "a path outside the tree", [path])
            if _PROTECTED.search(path):
                raise _forbidden(patch, "licence and attribution files stay as they are", [path])
            if change.old_blob is not None and path not in known:
                raise _forbidden(patch, "changes a file that upstream does not have", [path])
            if change.old_blob is None:
                folder = path.rsplit("/", 1)[0] + "/"
                if not path.startswith(NEW_FILE_FOLDERS) or folder not in folders:
                    raise _forbidden(
                        patch,
                        f"new files belong into upstream's {', '.join(NEW_FILE_FOLDERS)}",
                        [path],
                    )
                known.add(path)
            lost = [line.strip() for line in change.removed() if _ATTRIBUTION.search(line)]
            if lost:
                raise _forbidden(patch, f"removes attribution from {path}", lost)
        texts = [patch.subject, *patch.message.split("\n")]
        texts += [line for change in patch.changes for line in change.added()]
        texts += [change.path for change in patch.changes if change.old_blob is None]
        words = sorted({m[0].lower() for text in texts for m in _FORBIDDEN.finditer(text)})
        if words:
            raise _forbidden(patch, "words that do not belong into llama.cpp", words)


def memory_tree(root: Path, entries: Mapping[str, git_tree.Entry], stack: Stack) -> diff.MemoryTree:
    """The tree at root with the content of every file that the stack changes."""
    paths = {change.path for patch in stack.patches for change in patch.changes}
    content = {path: (root / path).read_bytes() for path in sorted(paths) if path in entries}
    return diff.MemoryTree(dict(entries), content)


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """What check() proved, for people and for --json."""

    pinned_tree: str
    patched_tree: str
    stack_sha256: str
    patches: tuple[str, ...]


def check(manifest: Manifest, stack: Stack, source: Path, *, patched: bool = False) -> CheckResult:
    """Proves the stack against the exact pinned tree in source, without changing it.

    Each patch applies exactly on top of its predecessors and reverses exactly to them; all of them
    reversed give the pinned tree; the rules hold before and after. With patched, source holds the
    patched tree, from which the pinned one is first taken back in memory. Raises TREE_MISMATCH,
    PATCH_*.
    """
    check_headers(stack)
    if patched:
        tree = _unpatched(manifest, stack, source)
    else:
        entries = git_tree.verify(source, manifest.tree, manifest.listing)
        tree = memory_tree(source, entries, stack)
    check_rules(stack, tree.entries)
    check_upstream_names(stack, source, tree.entries)
    licence = hashlib.sha256((source / manifest.licence_file).read_bytes()).hexdigest()
    if licence != manifest.licence_sha256:
        raise LlamaSourceError(
            Reason.TREE_MISMATCH,
            f"licence file {manifest.licence_file}",
            expected=f"sha256 {manifest.licence_sha256}",
            found=f"sha256 {licence}",
        )
    states = [tree.copy()]
    for patch in stack.patches:
        diff.apply(patch, tree)
        back = tree.copy()
        diff.apply(patch, back, reverse=True)
        if back.entries != states[-1].entries:
            raise LlamaSourceError(
                Reason.PATCH_CONFLICT,
                f"{patch.name} does not reverse to what was before it",
                details=git_tree.differences(states[-1].entries, back.entries),
            )
        states.append(tree.copy())
    patched_tree = git_tree.tree_hash(tree.entries)
    for patch in reversed(stack.patches):
        diff.apply(patch, tree, reverse=True)
    reversed_tree = git_tree.tree_hash(tree.entries)
    if reversed_tree != manifest.tree:
        raise LlamaSourceError(
            Reason.PATCH_CONFLICT,
            "the reversed stack does not give the pinned tree",
            expected=f"git tree {manifest.tree}",
            found=f"git tree {reversed_tree}",
        )
    return CheckResult(
        manifest.tree, patched_tree, stack.sha256, tuple(p.name for p in stack.patches)
    )


def check_against(stack: Stack, source: Path) -> str:
    """Tries the stack on a candidate for a new pin; returns the hash of the patched tree.

    Hunks may have moved. Raises PATCH_CONFLICT, which names the first patch that does not apply,
    and its hunk; or the first that relies on a name that is gone.
    """
    entries = git_tree.scan(source)
    check_rules(
        stack, entries | {c.path: _ANY for p in stack.patches for c in p.changes if c.old_blob}
    )
    tree = memory_tree(source, entries, stack)
    for patch in stack.patches:
        diff.apply(patch, tree, exact=False)
    check_upstream_names(stack, source, entries)
    return git_tree.tree_hash(tree.entries)


_ANY = git_tree.Entry(git_tree.FILE, "0" * 40)


def _write(root: Path, before: diff.MemoryTree, after: diff.MemoryTree) -> None:
    for path in sorted(set(before.content) | set(after.content)):
        if before.entries.get(path) == after.entries.get(path):
            continue
        target = root / path
        if path not in after.entries:
            target.unlink()
            continue
        # beside the file, then in its place: never half a file
        handle, name = tempfile.mkstemp(dir=target.parent)
        with os.fdopen(handle, "wb") as out:
            out.write(after.content[path])
        executable = after.entries[path].mode == git_tree.EXECUTABLE
        Path(name).chmod(0o755 if executable else 0o644)
        Path(name).replace(target)


def apply_to_folder(manifest: Manifest, stack: Stack, root: Path) -> str:
    """Patches the pinned tree at root in place, all or nothing; returns the patched tree's hash."""
    entries = git_tree.verify(root, manifest.tree, manifest.listing)
    before = memory_tree(root, entries, stack)
    after = before.copy()
    for patch in stack.patches:
        diff.apply(patch, after)
    _write(root, before, after)
    return git_tree.tree_hash(after.entries)


def _unpatched(manifest: Manifest, stack: Stack, root: Path) -> diff.MemoryTree:
    """The pinned tree, in memory, from the patched one at root."""
    tree = memory_tree(root, git_tree.scan(root), stack)
    for patch in reversed(stack.patches):
        diff.apply(patch, tree, reverse=True)
    found = git_tree.tree_hash(tree.entries)
    if found != manifest.tree:
        raise LlamaSourceError(
            Reason.TREE_MISMATCH,
            f"{root} without the stack is not the pinned source",
            expected=f"git tree {manifest.tree}",
            found=f"git tree {found}",
            details=git_tree.differences(manifest.listing, tree.entries),
        )
    return tree


def reverse_in_folder(manifest: Manifest, stack: Stack, root: Path) -> None:
    """Takes the stack off a patched tree at root: the pinned tree is left, or all as it was."""
    before = memory_tree(root, git_tree.scan(root), stack)
    _write(root, before, _unpatched(manifest, stack, root))
