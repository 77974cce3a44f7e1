"""Where a plan's machines come from: a YAML file, or what nodes have measured and told a tracker.

load_machines(pathlib.Path("machines.yaml"))        # in the form of machines.sample.yaml
measured_machines(shape, answer.workers)
"""

from __future__ import annotations

import importlib.resources
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.plan import Line, Machine, ModelShape
from meshnet_gguf.registration import MACHINE_MEMORY_LABEL
from meshnet_gguf.sizes import parse_size
from meshnet_gguf.strict_yaml import read_file, read_yaml
from proto.meshnet.control.v1 import tracker_pb2
from proto.meshnet.shard.v1 import errors_pb2

__all__ = ["load_machines", "measured_machines", "parse_machines", "sample_machines"]


def sample_machines() -> str:
    """A file with all keys."""
    return str(_folder().joinpath("machines.sample.yaml").read_text("utf-8"))


def load_machines(path: pathlib.Path) -> list[Machine]:
    """Reads a file. Raises MeshnetError (CONFIGURATION_INVALID)."""
    return parse_machines(read_file(path))


def parse_machines(content: bytes | str) -> list[Machine]:
    """A file's content. Raises MeshnetError (CONFIGURATION_INVALID) with the place."""
    schema = json.loads(_folder().joinpath("machines.schema.json").read_bytes())
    values = read_yaml(content, schema)
    names = [entry["name"] for entry in values["machines"]]
    lines: dict[str, dict[str, Line]] = {name: {} for name in names}
    for number, entry in enumerate(values.get("lines", [])):
        first, second = entry["between"]
        if first not in lines or second not in lines or first == second:
            raise _invalid(f"lines.{number}.between: expected two machines of {', '.join(names)}")
        line = Line(entry["latency_us"], _size(entry.get("bytes_per_second", 0)))
        lines[first][second] = lines[second][first] = line
    return [
        Machine(
            entry["name"],
            _size(entry["memory"]),
            _size(entry["weights_per_second"]),
            Line(entry.get("latency_us", 0), _size(entry.get("bytes_per_second", 0))),
            lines[entry["name"]],
        )
        for entry in values["machines"]
    ]


def measured_machines(
    shape: ModelShape, workers: Sequence[tracker_pb2.WorkerStatus]
) -> list[Machine]:
    """Nodes that serve a model, by what they measured; the best of several workers of a node.

    Raises MeshnetError (CONFIGURATION_INVALID) when nobody has measured anything.
    """
    found: dict[str, Machine] = {}
    for worker in workers:
        registration = worker.registration
        layers = (registration.span.begin, registration.span.end)
        took = worker.load.step_us or registration.step_us
        memory = registration.labels.get(MACHINE_MEMORY_LABEL, "")
        if registration.model_units != shape.layers or layers not in shape.read or not took:
            continue
        machine = Machine(
            registration.node_id,
            int(memory) if memory.isascii() and memory.isdecimal() else shape.memory[layers],
            max(1, shape.read[layers] * 1_000_000 // took),
            Line(registration.access_latency_us, registration.access_bytes_per_second),
            {
                seam.peer_node_id: Line(seam.round_trip_us // 2, seam.bytes_per_second)
                for seam in worker.load.seams or registration.seams
            },
        )
        held = found.get(machine.name)
        if held is None or held.weights_bytes_per_second < machine.weights_bytes_per_second:
            found[machine.name] = machine
    if not found:
        raise _invalid(
            f"expected nodes that serve this model of {shape.layers} layers and have measured "
            "their speed, the tracker knows none"
        )
    return [found[name] for name in sorted(found)]


def _size(value: int | str) -> int:
    size = parse_size(value)
    assert size is not None, "the schema has checked the form"
    return size


def _folder() -> Any:
    return importlib.resources.files("meshnet_gguf")


def _invalid(message: str) -> MeshnetError:
    return MeshnetError(errors_pb2.REASON_CONFIGURATION_INVALID, message)
