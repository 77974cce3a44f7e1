"""How commands answer: for people, or with --json one JSON object on stdout and nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

from absl import flags
from meshnet.errors import ControlError

from meshnet_gguf.cures import CURES
from meshnet_gguf.errors import MeshnetError
from proto.meshnet.shard.v1 import errors_pb2

__all__ = [
    "control_errors",
    "error",
    "given_path",
    "print_file",
    "print_json",
    "serving",
    "wants_json",
]

_JSON = flags.DEFINE_bool("json", False, "Print one JSON object and nothing else on stdout.")


def wants_json() -> bool:
    """Whether --json was given."""
    return bool(_JSON.value)


def print_json(value: Any) -> None:
    """The command's one answer."""
    sys.stdout.write(json.dumps(value) + "\n")
    # Who serves on after it is waited for.
    sys.stdout.flush()


def serving(**said: Any) -> None:
    """What one that serves until a signal says once it does; people read it in its log."""
    if wants_json():
        print_json(said)


def print_file(text: str) -> int:
    """A file as the command's answer, in one string of JSON when that is wanted; exit code 0."""
    if wants_json():
        print_json({"file": text})
    else:
        sys.stdout.write(text)
    return 0


def error(program: str, failure: MeshnetError) -> None:
    """Says why a command failed and what helps, on stderr, and with --json on stdout as well."""
    cure = CURES[failure.reason_name]
    sys.stderr.write(f"{program}: {failure}\n  -> {cure}\n")
    if flags.FLAGS.is_parsed() and wants_json():
        said = {"reason": failure.reason_name, "message": failure.message, "cure": cure}
        print_json({"error": said})


@contextlib.contextmanager
def control_errors() -> Iterator[None]:
    """Makes errors of the control plane the command's own, by name or as CONFIGURATION_INVALID."""
    try:
        yield
    except ControlError as failure:
        named = errors_pb2.Reason.DESCRIPTOR.values_by_name.get(f"REASON_{failure.reason.name}")
        reason = errors_pb2.REASON_CONFIGURATION_INVALID if named is None else named.number
        raise MeshnetError(reason, failure.message) from failure


def given_path(name: str) -> pathlib.Path:
    """A path as the user meant it: `bazel run` starts programs elsewhere."""
    called_in = pathlib.Path(os.environ.get("BUILD_WORKING_DIRECTORY", ""))
    return (called_in / pathlib.Path(name).expanduser()).absolute()
