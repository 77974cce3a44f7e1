"""meshnet: everything around the shard workers.

    meshnet COMMAND [ARGUMENTS] [--json]
    meshnet COMMAND --help

Exit code: 0 when the command did what it says, 1 when something was refused or failed (the reason
is on stderr, with --json as {"error": ...} on stdout), 2 for a command line that makes no sense,
130 when interrupted.

A command is a module with a docstring that opens with a line on what it does and holds an example,
its own absl flags (and those of the modules in its FLAG_MODULES), and `run(arguments) -> exit
code`, where `arguments` are those that are no flags. It may raise MeshnetError and app.UsageError;
`output.wants_json()` tells how to answer.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from types import ModuleType

from absl import app, flags

from meshnet_gguf.cli import output
from meshnet_gguf.errors import MeshnetError

__all__ = ["COMMANDS", "main"]

# Command -> its module and what it is for.
COMMANDS = {
    "api-keys": (
        "meshnet_gguf.cli.api_keys",
        "make, list and remove the API keys of a gateway",
    ),
    "bench": (
        "meshnet_gguf.cli.bench",
        "measure how fast models answer, side by side",
    ),
    "certification": (
        "meshnet_gguf.cli.certification",
        "show certification records, give them to trackers, tell whether they still hold",
    ),
    "certify": (
        "meshnet_gguf.cli.certify",
        "certify a lane on the hardware at hand",
    ),
    "certs": (
        "meshnet_gguf.cli.certs",
        "make the certificates by which the programs of a mesh know each other",
    ),
    "chat": (
        "meshnet_gguf.cli.chat",
        "chat with a served model",
    ),
    "contract": (
        "meshnet_gguf.cli.contract",
        "check, lock and sign performance contracts, and hold results against them",
    ),
    "doctor": (
        "meshnet_gguf.cli.doctor",
        "say what is wrong with this machine and its mesh, and what to do",
    ),
    "evidence": (
        "meshnet_gguf.cli.evidence",
        "run a model over workers and whole, and record what the run is evidence of",
    ),
    "inspect": (
        "meshnet_gguf.cli.inspect",
        "show what a model consists of and where it may be cut",
    ),
    "keys": (
        "meshnet_gguf.cli.keys",
        "make keys that sign certification records and route tokens",
    ),
    "manifest": (
        "meshnet_gguf.cli.manifest",
        "say exactly what an artifact is: its files, tokenizer and hashes",
    ),
    "models": (
        "meshnet_gguf.cli.models",
        "list models: known, on this machine, served",
    ),
    "node": (
        "meshnet_gguf.cli.node",
        "serve part of a model: start a worker, watch it, register it",
    ),
    "plan": (
        "meshnet_gguf.cli.plan",
        "propose which machine takes which layers of a model",
    ),
    "metrics": (
        "meshnet_gguf.cli.metrics",
        "show workers' metrics, or serve them for Prometheus",
    ),
    "provision": (
        "meshnet_gguf.cli.provision",
        "fetch an artifact, or what some layers need of it, and check every byte",
    ),
    "recipe": (
        "meshnet_gguf.cli.recipe",
        "show what must be equal for workers to serve together, and where two differ",
    ),
    "relay": (
        "meshnet_gguf.cli.relay",
        "serve a relay for peers that can only dial out",
    ),
    "serve": (
        "meshnet_gguf.cli.serve",
        "serve a model to OpenAI clients, from this machine or from several",
    ),
    "status": (
        "meshnet_gguf.cli.status",
        "show routes, machines, load, dark lanes and refusals",
    ),
    "tracker": (
        "meshnet_gguf.cli.tracker",
        "serve a tracker: registrations, routes, the ledger",
    ),
}

_HELP = ("-h", "--help", "-help", "help")


def main(argv: Sequence[str]) -> int:
    """Runs a command line, argv[0] being the program's name; returns the exit code."""
    if len(argv) < 2 or argv[1] in _HELP:
        sys.stdout.write(_overview())
        return 0 if len(argv) > 1 else 2
    name = argv[1]
    if name not in COMMANDS:
        sys.stderr.write(
            f"meshnet: expected a command of {', '.join(COMMANDS)}, got {name!r}; see --help\n"
        )
        return 2
    command = importlib.import_module(COMMANDS[name][0])
    program = f"meshnet {name}"
    options, plain = _before_dashes(argv[2:])
    if any(option in _HELP[:3] for option in options):
        sys.stdout.write(_usage(name, command))
        return 0
    try:
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


def _before_dashes(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Flags, spelt with underscores, and what comes behind `--` as it is."""
    options: list[str] = []
    for index, argument in enumerate(arguments):
        if argument == "--":
            return options, list(arguments[index + 1 :])
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            argument = "--" + name[2:].replace("-", "_") + equals + value
        options.append(argument)
    return options, []


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {summary}" for name, (_, summary) in COMMANDS.items()]
    first = (__doc__ or "").split("\n\nA command is a module")[0]
    return first + "\n\nCommands:\n\n" + "\n".join(lines) + "\n"


def _usage(name: str, command: ModuleType) -> str:
    modules = (command.__name__, *getattr(command, "FLAG_MODULES", ()))
    own = [flag for module in modules for flag in flags.FLAGS.get_flags_for_module(module)]
    common = flags.FLAGS.get_flags_for_module(output.__name__)
    lines = []
    for flag in [*own, *common]:
        value = "" if flag.boolean else f"={flag.name.upper()}"
        default = "" if flag.default in (None, False, []) else f" (default: {flag.default})"
        lines.append(f"  --{flag.name.replace('_', '-')}{value}\n      {flag.help}{default}")
    return f"meshnet {name}: {command.__doc__}\nFlags:\n\n" + "\n".join(lines) + "\n"


def run() -> None:
    """The program."""
    sys.exit(main(sys.argv))


if __name__ == "__main__":
    run()
