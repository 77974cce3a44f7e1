"""The commands of meshnet, and what each of them takes.

    describe("serve").flags

What is said here of a command is all that its help, the completions and the reference page know.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Final

from absl import flags

from meshnet_gguf.cli import output

__all__ = ["COMMANDS", "Command", "Flag", "describe", "load"]

# Command -> its module and what it is for.
COMMANDS: Final = {
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
    "completion": (
        "meshnet_gguf.cli.completion",
        "print what makes a shell complete the command line",
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

# Flags by the module that defines them. Two commands may define a flag of one name; they are never
# in one process but to be described, one after the other.
_SEEN: Final[dict[str, list[Flag]]] = {}


@dataclass(frozen=True)
class Flag:
    """A flag as it is written, with dashes. `default` is empty where there is none."""

    name: str
    help: str
    default: str
    takes_value: bool
    choices: tuple[str, ...] = ()
    repeats: bool = False

    @property
    def kind(self) -> str:
        """What it takes, for comparing flags of one name."""
        return f"{'value' if self.takes_value else 'switch'}{' repeated' * self.repeats}"


@dataclass(frozen=True)
class Command:
    """A command: a line on it, its docstring, and its flags, the common ones last.

    `actions` are what its first argument may be, where that is one of a few words.
    """

    name: str
    summary: str
    text: str
    flags: tuple[Flag, ...]
    actions: tuple[str, ...] = ()


def load(name: str) -> ModuleType:
    """The module of a command."""
    return importlib.import_module(COMMANDS[name][0])


def describe(name: str) -> Command:
    """What a command is and takes. In any order, for any number of commands of one process."""
    module = load(name)
    found: list[Flag] = []
    for part in (module.__name__, *getattr(module, "FLAG_MODULES", ())):
        if part not in _SEEN:
            _SEEN[part] = _take(part)
        found += _SEEN[part]
    if output.__name__ not in _SEEN:
        _SEEN[output.__name__] = [
            _flag(flag) for flag in flags.FLAGS.get_flags_for_module(output.__name__)
        ]
    return Command(
        name,
        COMMANDS[name][1],
        module.__doc__ or "",
        (*found, *_SEEN[output.__name__]),
        tuple(getattr(module, "ACTIONS", ())),
    )


def _take(module: str) -> list[Flag]:
    """The flags that a module has defined, whose names are free again afterwards."""
    defined = flags.FLAGS.get_flags_for_module(module)
    found = [_flag(flag) for flag in defined]
    for flag in defined:
        delattr(flags.FLAGS, flag.name)
    return found


def _flag(flag: flags.Flag[object]) -> Flag:
    default = "" if flag.default in (None, False, []) else str(flag.default)
    if isinstance(flag.default, list) and flag.default:
        default = ",".join(map(str, flag.default))
    values = getattr(flag.parser, "enum_values", None) or ()
    return Flag(
        flag.name.replace("_", "-"),
        # absl says of a repeated flag that it is one.
        (flag.help or "").partition(";\n    repeat this option")[0],
        default,
        not flag.boolean,
        tuple(values),
        isinstance(flag, flags.MultiFlag),
    )
