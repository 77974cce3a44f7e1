"""How commands answer: for people, or with --json one JSON object on stdout and nothing else."""

from __future__ import annotations

import json
import os
import pathlib
import sys
from typing import Any

from absl import flags

from meshnet_gguf.errors import MeshnetError

__all__ = ["error", "given_path", "print_json", "wants_json"]

_JSON = flags.DEFINE_bool("json", False, "Print one JSON object and nothing else on stdout.")


def wants_json() -> bool:
    """Whether --json was given."""
    return bool(_JSON.value)


def print_json(value: Any) -> None:
    """The command's one answer."""
    sys.stdout.write(json.dumps(value) + "\n")


def error(program: str, failure: MeshnetError) -> None:
    """Says why a command failed, on stderr, and with --json on stdout as well."""
    sys.stderr.write(f"{program}: {failure}\n")
    if flags.FLAGS.is_parsed() and wants_json():
        print_json({"error": {"reason": failure.reason_name, "message": failure.message}})


def given_path(name: str) -> pathlib.Path:
    """A path as the user meant it: `bazel run` starts programs elsewhere."""
    called_in = pathlib.Path(os.environ.get("BUILD_WORKING_DIRECTORY", ""))
    return (called_in / pathlib.Path(name).expanduser()).absolute()
