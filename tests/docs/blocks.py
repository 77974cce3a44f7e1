"""Command blocks of our documents, and what a test does with each.

A comment stands before every block:

    <!-- run -->                              it runs, in the document's folder
    <!-- run: until "is served on" -->        it runs on, beside what follows, once it has said that
    <!-- run: on b, until "layers" -->        the same, in the folder of the second machine
    <!-- checked: WHY -->                     no test can run it: its commands and flags must exist
    <!-- unit: NAME.service -->               a systemd unit
    <!-- yaml -->                             a file of somebody else's program
    <!-- shown -->                            no command

Blocks are fenced; one that is indented is output, unless a comment stands before it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Block", "blocks_of", "commands_of"]

_COMMANDS = ("tools/", "meshnet", "worker ", "bash ", "sudo ", "curl ", "python3 ")


@dataclass(frozen=True)
class Block:
    """One block; `line` is where it begins, `language` what its fence says."""

    line: int
    language: str
    text: str
    treatment: str  # run, checked, unit, yaml, shown; empty: nobody has said
    detail: str = ""

    @property
    def until(self) -> str:
        """What a command that goes on says when it is ready; empty for one that ends."""
        found = re.search(r'until "([^"]+)"', self.detail)
        return found.group(1) if found else ""

    @property
    def machine(self) -> str:
        """a or b."""
        return "b" if self.detail.startswith("on b") else "a"


def blocks_of(document: str) -> Iterator[Block]:
    """The blocks of a document that hold commands, and those that a comment names."""
    treatment = detail = ""
    lines = document.split("\n")
    number = 0
    while number < len(lines):
        line = lines[number]
        comment = re.fullmatch(r"<!-- (run|checked|unit|yaml|shown)(?:: (.*))? -->", line)
        if comment is not None:
            treatment, detail = comment.group(1), comment.group(2) or ""
        elif line.startswith("```"):
            end = lines.index("```", number + 1)
            text = "\n".join(lines[number + 1 : end]) + "\n"
            if treatment or line != "```mermaid":
                yield Block(number + 1, line[3:], text, treatment, detail)
            treatment, number = "", end
        elif line.startswith("    ") and not re.match(r"\s+([-*]|\d+\.) ", line):
            end = number
            while end < len(lines) and lines[end].startswith("    "):
                end += 1
            text = "".join(f"{each[4:]}\n" for each in lines[number:end])
            if treatment or text.startswith(_COMMANDS):
                yield Block(number + 1, "sh", text, treatment, detail)
            treatment, number = "", end
        elif line.strip():
            treatment = ""
        number += 1


def commands_of(text: str) -> Iterator[list[str]]:
    """The words of each command in a block: continued lines are one, comments are none."""
    for line in text.replace("\\\n", " ").splitlines():
        bare = re.sub(r"\s+#.*$", "", line).strip()
        if bare.startswith("#"):
            continue
        for command in re.split(r"\s+(?:&&|\|)\s+", bare):
            if command:
                yield command.split()
