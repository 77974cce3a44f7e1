"""One patch file: parsing it, applying it to a tree in memory, reversing it.

Only what the stack needs is understood: changed and new text files in git's format with full blob
hashes. Renames, deletions, mode changes and binary content are refused. Applying is exact where the
blob hash before the patch is the recorded one; on any other tree (a candidate for a new pin) hunks
are looked for at other lines too.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from third_party.llama_cpp.llama_source import git_tree
from third_party.llama_cpp.llama_source.errors import LlamaSourceError, Reason

_NULL = "0" * 40
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_INDEX = re.compile(r"index ([0-9a-f]{40})\.\.([0-9a-f]{40})(?: (\d{6}))?")
_NO_NEWLINE = "\\ No newline at end of file"


@dataclasses.dataclass(frozen=True)
class Hunk:
    """Signed lines (' ', '-', '+') and where they are said to stand (1-based, before and after).

    Lines keep their line ends, so that a missing last one is not lost.
    """

    number: int
    header: str
    start: int
    new_start: int
    lines: tuple[tuple[str, str], ...]

    @property
    def before(self) -> list[str]:
        """The lines to find."""
        return [text for sign, text in self.lines if sign != "+"]

    @property
    def after(self) -> list[str]:
        """What stands there afterwards."""
        return [text for sign, text in self.lines if sign != "-"]

    def reversed(self) -> Hunk:
        """The hunk that undoes this one."""
        swap = {"+": "-", "-": "+", " ": " "}
        lines = tuple((swap[sign], text) for sign, text in self.lines)
        return Hunk(self.number, self.header, self.new_start, self.start, lines)


@dataclasses.dataclass(frozen=True)
class FileChange:
    """The change of one file.

    old_blob is None for a new file, new_blob for a removed one (only when reversed).
    """

    path: str
    mode: str | None  # of a new file
    old_blob: str | None
    new_blob: str | None
    hunks: tuple[Hunk, ...]

    def reversed(self) -> FileChange:
        """The change that undoes this one."""
        return dataclasses.replace(
            self,
            old_blob=self.new_blob,
            new_blob=self.old_blob,
            hunks=tuple(h.reversed() for h in self.hunks),
        )

    def added(self) -> list[str]:
        """The lines that the change brings."""
        return [text for hunk in self.hunks for sign, text in hunk.lines if sign == "+"]

    def removed(self) -> list[str]:
        """The lines that the change takes away."""
        return [text for hunk in self.hunks for sign, text in hunk.lines if sign == "-"]


@dataclasses.dataclass(frozen=True)
class Patch:
    """A patch file: its name, subject, message (with the header fields) and changes."""

    name: str
    subject: str
    message: str
    changes: tuple[FileChange, ...]


def _bad(name: str, line: int, message: str) -> LlamaSourceError:
    return LlamaSourceError(Reason.PATCH_INVALID, f"{name}, line {line}: {message}")


class _Reader:
    """The lines of a patch file with a position."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        # not splitlines(): a form feed or a lone carriage return is content
        self.lines = text.split("\n")
        if self.lines and self.lines[-1] == "":
            self.lines.pop()
        self.at = 0

    def peek(self) -> str | None:
        return self.lines[self.at] if self.at < len(self.lines) else None

    def next(self) -> str:
        line = self.peek()
        if line is None:
            raise _bad(self.name, self.at, "ends too early")
        self.at += 1
        return line

    def error(self, message: str) -> LlamaSourceError:
        return _bad(self.name, self.at, message)


def _read_hunk(reader: _Reader, number: int) -> Hunk:
    header = reader.next()
    match = _HUNK.match(header)
    if not match:
        raise reader.error(f"not a hunk header: {header!r}")
    left = {"-": int(match[2] or "1"), "+": int(match[4] or "1")}
    lines: list[tuple[str, str]] = []
    while any(left.values()) or reader.peek() == _NO_NEWLINE:
        line = reader.next()
        if line == _NO_NEWLINE and lines:
            sign, text = lines.pop()
            lines.append((sign, text.removesuffix("\n")))
            continue
        sign, text = line[:1] or " ", line[1:] + "\n"
        if sign not in " -+":
            raise reader.error(f"a hunk line that starts with {sign!r}")
        for side in "-+" if sign == " " else sign:
            left[side] -= 1
            if left[side] < 0:
                raise reader.error("more lines than the hunk's header says")
        lines.append((sign, text))
    return Hunk(number, header, int(match[1]), int(match[3]), tuple(lines))


def _read_change(reader: _Reader) -> FileChange:
    header = reader.next()
    match = re.fullmatch(r"diff --git a/(.+) b/(.+)", header)
    if not match or match[1] != match[2]:
        raise reader.error(f"expected one path in {header!r}, renames are not supported")
    path = match[1]
    mode: str | None = None
    line = reader.next()
    if line.startswith("new file mode "):
        mode = line.removeprefix("new file mode ")
        if mode not in (git_tree.FILE, git_tree.EXECUTABLE):
            raise reader.error(f"a new file of mode {mode}")
        line = reader.next()
    index = _INDEX.fullmatch(line)
    if not index:
        raise reader.error(
            f"expected 'index' with full hashes, found {line!r}: renames, deletions, mode changes "
            "and short hashes are not supported"
        )
    is_new = mode is not None
    if is_new != (index[1] == _NULL) or index[2] == _NULL:
        raise reader.error("only changed and new files are supported")
    if (reader.peek() or "").startswith(("GIT binary", "Binary files")):
        raise reader.error("binary content is not supported")
    hunks: list[Hunk] = []
    if (reader.peek() or "").startswith("--- "):
        if reader.next() != ("--- /dev/null" if is_new else f"--- a/{path}"):
            raise reader.error(f"another path than {path}")
        if reader.next() != f"+++ b/{path}":
            raise reader.error(f"another path than {path}")
        while (reader.peek() or "").startswith("@@ "):
            hunks.append(_read_hunk(reader, len(hunks) + 1))
    if not hunks and not is_new:
        raise reader.error(f"no hunk for {path}")
    return FileChange(path, mode, None if is_new else index[1], index[2], tuple(hunks))


def parse(name: str, text: str) -> Patch:
    """Reads a patch as git format-patch writes it. Raises PATCH_INVALID."""
    head, separator, body = text.partition("\ndiff --git ")
    if not separator:
        raise LlamaSourceError(Reason.PATCH_INVALID, f"{name}: no 'diff --git' line")
    head_lines = head.split("\n")
    subject: list[str] = []
    message: list[str] = []
    in_subject = False
    blank = head_lines.index("") if "" in head_lines else len(head_lines)
    for line in head_lines[:blank]:
        if line.startswith("Subject: "):
            subject.append(re.sub(r"^\[PATCH[^]]*\] ", "", line.removeprefix("Subject: ")))
            in_subject = True
        elif in_subject and line.startswith(" "):
            subject.append(line.strip())
        else:
            in_subject = False
    for line in head_lines[blank + 1 :]:
        if line == "---":
            break
        message.append(line)
    reader = _Reader(name, "diff --git " + body)
    changes: list[FileChange] = []
    while (line_at := reader.peek()) is not None:
        if not line_at.startswith("diff --git "):
            raise reader.error(f"expected 'diff --git', found {line_at!r}")
        changes.append(_read_change(reader))
    paths = [c.path for c in changes]
    if len(set(paths)) != len(paths):
        raise LlamaSourceError(Reason.PATCH_INVALID, f"{name}: a path twice")
    return Patch(name, " ".join(subject), "\n".join(message).strip(), tuple(changes))


def _find(lines: list[str], hunk: Hunk, after: int, shift: int, anywhere: bool) -> int | None:
    """The index at which the hunk's lines stand, nearest to where they are said to be."""
    # a hunk that only adds names the line before it
    want = hunk.before
    said = hunk.start - 1 if want else hunk.start
    size = len(want)
    candidates = [said + shift]
    if anywhere:
        candidates = sorted(
            range(after, len(lines) - size + 1), key=lambda i: abs(i - said - shift)
        )
    for index in candidates:
        if after <= index <= len(lines) - size and lines[index : index + size] == want:
            return index
    return None


def apply_to_text(patch: str, change: FileChange, text: str, *, anywhere: bool) -> str:
    """The content after the change. Raises PATCH_CONFLICT, which names patch, path and hunk."""
    lines = re.findall(r"[^\n]*\n|[^\n]+", text)
    result: list[str] = []
    done = 0
    shift = 0
    for hunk in change.hunks:
        index = _find(lines, hunk, done, shift, anywhere)
        if index is None:
            at = max(hunk.start - 1, 0)
            raise LlamaSourceError(
                Reason.PATCH_CONFLICT,
                f"{patch} does not apply: {change.path}, hunk {hunk.number} ({hunk.header})",
                expected="".join(hunk.before).rstrip("\n"),
                found="".join(lines[at : at + len(hunk.before)]).rstrip("\n"),
            )
        shift = index - (hunk.start - 1 if hunk.before else hunk.start)
        result += lines[done:index]
        result += hunk.after
        done = index + len(hunk.before)
    return "".join(result + lines[done:])


@dataclasses.dataclass
class MemoryTree:
    """A tree in memory: the entries of all paths, the content of those that patches touch."""

    entries: dict[str, git_tree.Entry]
    content: dict[str, bytes]

    def copy(self) -> MemoryTree:
        """A copy that changes apart from this one."""
        return MemoryTree(dict(self.entries), dict(self.content))


def apply(patch: Patch, tree: MemoryTree, *, reverse: bool = False, exact: bool = True) -> None:
    """Applies (or reverses) a patch to tree, whose content must hold what the patch changes.

    exact: the blob hashes before and after must be the recorded ones. Raises PATCH_CONFLICT, and
    then leaves tree as it was.
    """
    changed: dict[str, tuple[str, bytes] | None] = {}
    for change in patch.changes:
        step = change.reversed() if reverse else change
        entry = tree.entries.get(step.path)
        if step.old_blob is None:
            if entry is not None:
                raise _conflict(patch, step.path, "no such file yet", f"blob {entry.blob}")
            old = b""
            mode = step.mode or git_tree.FILE
        else:
            if entry is None:
                raise _conflict(patch, step.path, f"blob {step.old_blob}", "no such file")
            if exact and entry.blob != step.old_blob:
                raise _conflict(patch, step.path, f"blob {step.old_blob}", f"blob {entry.blob}")
            old = tree.content[step.path]
            mode = entry.mode
        # surrogateescape: a file in another encoding goes through unchanged
        text = old.decode("utf-8", "surrogateescape")
        new = apply_to_text(patch.name, step, text, anywhere=not exact)
        data = new.encode("utf-8", "surrogateescape")
        if step.new_blob is None:
            if data:
                raise _conflict(patch, step.path, "nothing left", f"{len(data)} bytes")
            changed[step.path] = None
            continue
        if exact and git_tree.blob_hash(data) != step.new_blob:
            raise _conflict(
                patch, step.path, f"blob {step.new_blob}", f"blob {git_tree.blob_hash(data)}"
            )
        changed[step.path] = (mode, data)
    _store(tree, changed)


def _store(tree: MemoryTree, changed: Mapping[str, tuple[str, bytes] | None]) -> None:
    for path, value in changed.items():
        if value is None:
            del tree.entries[path]
            tree.content.pop(path, None)
        else:
            mode, data = value
            tree.entries[path] = git_tree.Entry(mode, git_tree.blob_hash(data))
            tree.content[path] = data


def _conflict(patch: Patch, path: str, expected: str, found: str) -> LlamaSourceError:
    return LlamaSourceError(
        Reason.PATCH_CONFLICT,
        f"{patch.name} does not apply: {path}",
        expected=expected,
        found=found,
    )
