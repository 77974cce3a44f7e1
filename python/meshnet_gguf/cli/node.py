"""Serves part of a model from this machine: starts a worker, watches it, registers it at a tracker.

    meshnet node --config node.yaml
    meshnet node --sample > node.yaml
    meshnet node --config node.yaml --check

Runs until SIGTERM or SIGINT: then the worker is withdrawn, its sessions may finish, and it ends.
The log goes to stderr, with --json as one JSON object a line; what it serves then goes to stdout
once it is registered. Exit code 1 with the reason when the worker is not what the configuration
says, which no restart would mend.
"""

from __future__ import annotations

import asyncio
import datetime
import importlib.resources
import json
import sys
from collections.abc import Sequence

from absl import app, flags
from meshnet.program import end_on_signals

from meshnet_gguf.cli import output
from meshnet_gguf.node import Node, NodeConfig, load_config

__all__ = ["run"]

_CONFIG = flags.DEFINE_string("config", None, "YAML file that says what to serve and how.")
_SAMPLE = flags.DEFINE_bool("sample", False, "Print a file with all keys, and end.")
_CHECK = flags.DEFINE_bool("check", False, "Check the configuration, start nothing.")


def run(arguments: Sequence[str]) -> int:
    """The command."""
    if arguments:
        raise app.UsageError(f"expected flags only, got {arguments[0]!r}")
    if _SAMPLE.value:
        folder = importlib.resources.files("meshnet_gguf.node")
        return output.print_file(folder.joinpath("node.sample.yaml").read_text("utf-8"))
    if _CONFIG.value is None:
        raise app.UsageError("expected --config FILE")
    config = load_config(output.given_path(_CONFIG.value))
    if _CHECK.value:
        if output.wants_json():
            output.print_json({"node": config.node_id, "valid": True})
        else:
            _log("configuration_valid", node_id=config.node_id)
        return 0
    with output.control_errors():
        asyncio.run(_serve(config))
    return 0


async def _serve(config: NodeConfig) -> None:
    said = False

    def tell(event: str, **fields: object) -> None:
        nonlocal said
        _log(event, **fields)
        if event == "registered" and not said:
            said = True
            output.serving(
                node=config.node_id,
                worker=fields["endpoint"],
                layers=fields["layers"],
                fingerprint=fields["fingerprint"],
            )

    await Node(config, tell).run(end_on_signals())
    _log("ended")


def _log(event: str, **fields: object) -> None:
    time = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    if output.wants_json():
        line = json.dumps({"time": time, "event": event, **fields})
    else:
        said = " ".join(f"{name}={value}" for name, value in fields.items() if value != "")
        line = f"{time} {event} {said}".rstrip()
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
