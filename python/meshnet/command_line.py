"""A program with absl's flags whose help and refusals are the same everywhere.

    def main(argv: Sequence[str]) -> int: ...

    if __name__ == "__main__":
        run(main)

Flags are spelt with hyphens or with underscores. Exit code: main's own; 0 for --help; 2 for a
command line that makes no sense (main may raise app.UsageError).
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from absl import app, flags

__all__ = ["HELP", "parse_flags", "run", "spell"]

HELP = ("-h", "-help", "--help")
_USAGE_ERROR = 2


def spell(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Arguments with flags as absl spells them; and what comes behind `--`, as it is."""
    options: list[str] = []
    for index, argument in enumerate(arguments):
        if argument == "--":
            return options, list(arguments[index + 1 :])
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            argument = "--" + name[2:].replace("-", "_") + equals + value
        options.append(argument)
    return options, []


def run(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Ends the process with main's exit code; main gets argv without flags."""

    def guarded(argv: Sequence[str]) -> int:
        try:
            return main(argv)
        except app.UsageError as error:
            _refuse(str(error))

    app.run(guarded, flags_parser=parse_flags)
    raise AssertionError("app.run does not return")


def parse_flags(argv: Sequence[str]) -> list[str]:
    """argv without flags, which are set now. Ends the process for --help, and with 2 for others."""
    options, plain = spell(argv[1:])
    if any(option in HELP for option in options):
        app.usage(shorthelp=True, writeto_stdout=True)
        sys.exit(0)
    try:
        return flags.FLAGS([argv[0], *options]) + plain
    except flags.Error as error:
        _refuse(str(error))


def _refuse(message: str) -> NoReturn:
    sys.stderr.write(f"{pathlib.Path(sys.argv[0]).name}: {message}; see --help\n")
    sys.exit(_USAGE_ERROR)
