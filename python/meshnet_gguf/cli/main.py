"""meshnet: everything around the shard workers.

    meshnet serve smollm2             # serve a model to OpenAI clients; then, in another terminal:
    meshnet chat                      # talk to it
    meshnet status                    # see what goes on; `meshnet doctor` says what is wrong

    meshnet COMMAND [ARGUMENTS] [FLAGS]
    meshnet COMMAND --help
    meshnet --version

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

import difflib
import errno
import importlib.metadata
import os
import re
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

from absl import app, flags
from meshnet.command_line import HELP, spell

from meshnet_gguf.cli import output, settings
from meshnet_gguf.cli.commands import COMMANDS, Command, describe, load
from meshnet_gguf.errors import MeshnetError
from proto.meshnet.shard.v1 import errors_pb2

__all__ = ["main"]


def main(argv: Sequence[str], loaded: Callable[[], None] = lambda: None) -> int:
    """Runs a command line, argv[0] being the program's name; returns the exit code.

    `loaded` is called once all modules are there that it needs.
    """
    try:
        code = _main(argv, loaded)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Who read what we say has gone, as `head` does; Python would complain when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _main(argv: Sequence[str], loaded: Callable[[], None]) -> int:
    words = list(argv[1:])
    if words[:1] == ["help"] and words[1:]:
        words = [words[1], "--help"]
    if not words or words[0] in (*HELP, "help"):
        sys.stdout.write(_overview())
        return 0 if words else 2
    name = words[0]
    if name == "--version":
        sys.stdout.write(f"meshnet {_version()}\n")
        return 0
    if name not in COMMANDS:
        return _unknown(name)
    command = load(name)
    loaded()
    program = f"meshnet {name}"
    options, plain = spell(words[1:])
    if any(option in HELP for option in options):
        sys.stdout.write(_usage(describe(name)))
        return 0
    try:
        settings.apply(name, _flags_of(command), COMMANDS, os.environ)
        return int(command.run(flags.FLAGS([program, *options])[1:] + plain))
    except (flags.Error, app.UsageError) as error:
        sys.stderr.write(f"{program}: {_in_words(error)}; see `{program} --help`\n")
        return 2
    except MeshnetError as error:
        output.error(program, error)
        return 1
    except OSError as error:
        # What a command reads or writes by a name that it was given.
        if error.filename is None:
            raise
        output.error(program, _of_file(error))
        return 1
    except KeyboardInterrupt:
        sys.stderr.write(f"\n{program}: interrupted\n")
        return 130


def _in_words(error: Exception) -> str:
    """What is wrong with a command line, without the words of Python's own conversions."""
    said = re.sub(
        r"invalid literal for int\(\) with base 10: ", "expected a whole number, got ", str(error)
    )
    return said.replace("could not convert string to float: ", "expected a number, got ")


def _unknown(name: str) -> int:
    meant = difflib.get_close_matches(name, COMMANDS, 1)
    hint = f" (did you mean {meant[0]}?)" if meant else ""
    sys.stderr.write(
        f"meshnet: expected a command of {', '.join(COMMANDS)}, got {name!r}{hint}; "
        "see `meshnet --help`\n"
    )
    return 2


def _version() -> str:
    try:
        return importlib.metadata.version("meshnet_gguf")
    except importlib.metadata.PackageNotFoundError:
        return "of a work tree: no release is installed"


def _of_file(error: OSError) -> MeshnetError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    reason = errors_pb2.REASON_STORAGE_FULL if full else errors_pb2.REASON_CONFIGURATION_INVALID
    return MeshnetError(reason, f"cannot use {error.filename}: {error.strerror}")


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
