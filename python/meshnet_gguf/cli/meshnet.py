"""meshnet: everything around the shard workers.

    meshnet COMMAND [ARGUMENTS] [--json]
    meshnet COMMAND --help

Exit code: 0 when the command did what it says, 1 when something was refused or failed (the reason
is on stderr, with --json as {"error": ...} on stdout), 2 for a command line that makes no sense,
130 when interrupted.

Flags may also stand in the environment (MESHNET_SERVE_LISTEN, MESHNET_LISTEN) and in a settings
file, see docs/reference.md; what is on the command line counts before both.

A command is a module with a docstring that opens with a line on what it does and holds an example,
its own absl flags (and those of the modules in its FLAG_MODULES), ACTIONS if its first argument is
one of a few words, and `run(arguments) -> exit code`, where `arguments` are those that are no
flags. It may raise MeshnetError and app.UsageError; `output.wants_json()` tells how to answer.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from types import ModuleType

from absl import app, flags
from meshnet.command_line import HELP, spell

from meshnet_gguf.cli import output, settings
from meshnet_gguf.cli.commands import COMMANDS, Command, describe, load
from meshnet_gguf.errors import MeshnetError

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """Runs a command line, argv[0] being the program's name; returns the exit code."""
    if len(argv) < 2 or argv[1] in (*HELP, "help"):
        sys.stdout.write(_overview())
        return 0 if len(argv) > 1 else 2
    name = argv[1]
    if name not in COMMANDS:
        sys.stderr.write(
            f"meshnet: expected a command of {', '.join(COMMANDS)}, got {name!r}; see --help\n"
        )
        return 2
    command = load(name)
    program = f"meshnet {name}"
    options, plain = spell(argv[2:])
    if any(option in HELP for option in options):
        sys.stdout.write(_usage(describe(name)))
        return 0
    try:
        settings.apply(name, _flags_of(command), COMMANDS, os.environ)
        arguments = flags.FLAGS([program, *options])[1:] + plain
        code = command.run(arguments)
    except (flags.Error, app.UsageError) as error:
        sys.stderr.write(f"{program}: {error}; see `{program} --help`\n")
        return 2
    except MeshnetError as error:
        output.error(program, error)
        return 1
    except KeyboardInterrupt:
        sys.stderr.write(f"\n{program}: interrupted\n")
        return 130
    return int(code)


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {summary}" for name, (_, summary) in COMMANDS.items()]
    first = (__doc__ or "").split("\n\nA command is a module")[0]
    return first + "\n\nCommands:\n\n" + "\n".join(lines) + "\n"


def _flags_of(command: ModuleType) -> list[str]:
    modules = (command.__name__, *getattr(command, "FLAG_MODULES", ()), output.__name__)
    return [flag.name for module in modules for flag in flags.FLAGS.get_flags_for_module(module)]


def _usage(command: Command) -> str:
    lines = []
    for flag in command.flags:
        value = f"={'|'.join(flag.choices) or flag.name.upper()}" if flag.takes_value else ""
        default = f" (default: {flag.default})" if flag.default else ""
        lines.append(f"  --{flag.name}{value}\n      {flag.help}{default}")
    return f"meshnet {command.name}: {command.text}\nFlags:\n\n" + "\n".join(lines) + "\n"


def run() -> None:
    """The program."""
    sys.exit(main(sys.argv))


if __name__ == "__main__":
    run()
