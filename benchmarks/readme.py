"""Runs the commands of README.md, for the tests that its blocks name."""

from __future__ import annotations

import os
import pathlib
import subprocess
from collections.abc import Sequence

from tests.docs.blocks import as_built, blocks_for_this_test, commands_of

__all__ = ["commands", "run"]

_HERE = pathlib.Path(__file__).absolute().parent


def commands() -> list[list[str]]:
    """The words of each command in this test's one block."""
    [block] = blocks_for_this_test((_HERE / "README.md").read_text("utf-8"))
    return list(commands_of(block.text))


def run(
    command: Sequence[str], folder: pathlib.Path, *short: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command, called from `folder`, with flags behind it that make it short."""
    target = os.environ["TEST_TARGET"].lstrip("@").removesuffix("_test")
    program = [str(_HERE / target.rpartition(":")[2])]
    return subprocess.run(
        [*as_built(command, target, program), *short],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment, "BUILD_WORKING_DIRECTORY": str(folder)},
    )
