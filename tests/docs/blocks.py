"""Command blocks of our documents, and what a test does with each.

A comment stands before every block:

    <!-- run -->                              it runs, in the document's folder
    <!-- run: says "identical" -->            the same; that has to be among what it says
    <!-- run: until "is served on" -->        it runs on, beside what follows, once it has said that
    <!-- run: on b, until "layers" -->        the same, in the folder of the second machine
    <!-- run: on both -->                     on one machine after the other
    <!-- run: fails, says "MISMATCH" -->      it ends with another exit code than 0
    <!-- run: alone -->                       what still runs is ended first
    <!-- run by //a:b_test: says "x" -->      that test runs it, not the document's reader
    <!-- output -->                           what the block before it says, numbers aside
    <!-- unit: NAME.service -->               a systemd unit
    <!-- yaml -->                             a file of somebody else's program
    <!-- bazelrc -->                          lines of a .bazelrc
    <!-- shown: WHY -->                       no command

Blocks are fenced or indented. Pictures (mermaid) need no comment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = [
    "TREATMENTS",
    "Block",
    "as_built",
    "blocks_for_this_test",
    "blocks_of",
    "commands_of",
    "lines_of",
    "targets_of",
]

TREATMENTS = ("run", "run by", "output", "unit", "yaml", "bazelrc", "shown")
_COMMENT = re.compile(rf"<!-- ({'|'.join(TREATMENTS)})(?: (//[\w/]*:\w+))?(?:: (.*))? -->")


@dataclass(frozen=True)
class Block:
    """One block; `line` is where it begins, `language` what its fence says."""

    line: int
    language: str
    text: str
    treatment: str  # one of TREATMENTS; empty: nobody has said
    detail: str = ""
    test: str = ""  # the target after `run by`

    @property
    def until(self) -> str:
        """What a command that goes on says when it is ready; empty for one that ends."""
        found = re.search(r'until "([^"]+)"', self.detail)
        return found.group(1) if found else ""

    @property
    def says(self) -> tuple[str, ...]:
        """What has to be in its output."""
        return tuple(re.findall(r'says "([^"]+)"', self.detail))

    @property
    def machines(self) -> str:
        """Of a and b those that it runs on."""
        found = re.match(r"on (both|b)\b", self.detail)
        return {"both": "ab", "b": "b"}[found.group(1)] if found else "a"

    @property
    def fails(self) -> bool:
        """Whether it is a refusal that it shows."""
        return "fails" in self._words

    @property
    def alone(self) -> bool:
        """Whether what the document has started before is ended first."""
        return "alone" in self._words

    @property
    def _words(self) -> list[str]:
        return [word.strip() for word in re.sub(r'"[^"]*"', "", self.detail).split(",")]


def blocks_of(document: str) -> Iterator[Block]:
    """The blocks of a document, in their order."""
    treatment = detail = test = ""
    lines = document.split("\n")
    number = 0
    while number < len(lines):
        line = lines[number]
        comment = _COMMENT.fullmatch(line)
        if comment is not None:
            treatment, test, detail = (group or "" for group in comment.groups())
        elif line.startswith("```"):
            end = lines.index("```", number + 1)
            text = "\n".join(lines[number + 1 : end]) + "\n"
            if treatment or line != "```mermaid":
                yield Block(number + 1, line[3:], text, treatment, detail, test)
            treatment, detail, test, number = "", "", "", end
        elif line.startswith("    ") and not (number and _in_a_list(lines[:number])):
            end = number
            while end < len(lines) and lines[end].startswith("    "):
                end += 1
            text = "".join(f"{each[4:]}\n" for each in lines[number:end])
            yield Block(number + 1, "sh", text, treatment, detail, test)
            treatment, detail, test, number = "", "", "", end - 1
        elif line.strip():
            treatment = detail = test = ""
        number += 1


def blocks_for_this_test(document: str) -> list[Block]:
    """The blocks that a document leaves to the running test: at least one."""
    test = os.environ["TEST_TARGET"].lstrip("@")
    found = [block for block in blocks_of(document) if block.test == test]
    assert found, f"no block of the document says: run by {test}"
    return found


def _in_a_list(above: list[str]) -> bool:
    """Whether an indented line goes on with an item of a list, or with a paragraph."""
    if above[-1].strip() and not _COMMENT.fullmatch(above[-1]):
        return True
    for line in reversed(above):
        if line.strip() and not line.startswith(" "):
            return re.match(r"([-*]|\d+\.) ", line) is not None
    return False


def lines_of(text: str) -> Iterator[str]:
    """The command lines of a block, each on one line and without its comment."""
    for line in text.replace("\\\n", " ").splitlines():
        bare = re.sub(r"(^|\s+)#.*$", "", line)
        if bare.strip():
            yield re.sub(r"\s+", " ", bare).strip()


def commands_of(text: str) -> Iterator[list[str]]:
    """The words of each command in a block: continued lines are one; comments and settings none."""
    for line in lines_of(text):
        for command in re.split(r"\s+(?:&&|\|)\s+", line):
            if command and not re.fullmatch(r"[A-Z]=\S+", command):
                yield command.split()


def as_built(words: Sequence[str], target: str, program: Sequence[str]) -> list[str]:
    """A command with the program that it lets Bazel build and run, and what goes to that."""
    start = ["tools/bazel", "run", target, "--"]
    assert list(words[:4]) == start, f"expected {' '.join(start)}, got {' '.join(words)}"
    return [*program, *words[4:]]


def targets_of(words: list[str]) -> list[str]:
    """The Bazel targets that a command names, without what goes to the program that it runs."""
    if words[:1] != ["tools/bazel"]:
        return []
    ours = words[: words.index("--")] if "--" in words else words
    return [word for word in ours if word.startswith("//")]
