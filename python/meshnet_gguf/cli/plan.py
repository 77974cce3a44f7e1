"""Proposes which machine takes which layers of a model, and says why.

    meshnet plan model.gguf --machines machines.yaml
    meshnet plan model.gguf --machines machines.yaml --stages 2 --accept-slower
    meshnet plan model.gguf --machines machines.yaml --split berlin=0:12,paris=12:30 --accept-slower
    meshnet plan model.gguf --tracker 127.0.0.1:7100 --model-id smollm2
    meshnet plan --sample > machines.yaml

The measure is the time of one token. A cut helps where a machine lacks the memory for more, or
where the next machine is so much faster that the seam is worth it; a split that fewer stages beat
is refused. --machines says what the machines are like; --tracker takes what nodes that already
serve the model have measured.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Sequence

from absl import app, flags
from meshnet.tracker_client import TrackerClient

from meshnet_gguf import progress
from meshnet_gguf.cli import mesh_flags, output, terminal
from meshnet_gguf.gguf_file import read_model
from meshnet_gguf.inventory import take_inventory
from meshnet_gguf.plan import Machine, ModelShape, Plan, evaluate, make_plan, shape_of
from meshnet_gguf.plan_inputs import load_machines, measured_machines, sample_machines
from proto.meshnet.control.v1 import tracker_pb2

__all__ = ["FLAG_MODULES", "run"]

FLAG_MODULES = mesh_flags.MODULES

_MACHINES = flags.DEFINE_string("machines", None, "YAML file with the machines, see --sample.")
_SAMPLE = flags.DEFINE_bool("sample", False, "Print a file with all keys, and end.")
_MODEL_ID = flags.DEFINE_string("model_id", None, "The model's id at the tracker.")
_STAGES = flags.DEFINE_integer("stages", None, "Number of stages; exactly so many.", lower_bound=1)
_SPLIT = flags.DEFINE_list("split", [], "Check this split instead: MACHINE=BEGIN:END,...")
_ACCEPT = flags.DEFINE_bool(
    "accept_slower", False, "Also give a split that fewer stages would beat."
)
_CONTEXT = flags.DEFINE_integer(
    "context_tokens",
    4096,
    "Tokens that a session may hold; the plan leaves room for them.",
    lower_bound=0,
)
_SESSIONS = flags.DEFINE_integer(
    "max_sessions", 8, "Sessions at once; the plan leaves room for them.", lower_bound=1
)
_CACHE = flags.DEFINE_integer(
    "cache_bytes_per_layer",
    None,
    "What all sessions' caches take on each layer, where it is not known from the model.",
    lower_bound=0,
)

_PART = re.compile(r"([A-Za-z0-9._:-]{1,128})=([0-9]{1,6}):([0-9]{1,6})")
_GIB = 1 << 30


def run(arguments: Sequence[str]) -> int:
    """The command."""
    if _SAMPLE.value:
        return output.print_file(sample_machines())
    if len(arguments) != 1:
        raise app.UsageError(f"expected one GGUF file, got {len(arguments)}")
    if bool(_MACHINES.value) == bool(mesh_flags.trackers()):
        raise app.UsageError("expected one of --machines and --tracker")
    if mesh_flags.trackers() and not _MODEL_ID.value:
        raise app.UsageError("expected --model-id with --tracker")
    if _SPLIT.value and _STAGES.value:
        raise app.UsageError("expected --split or --stages, got both")
    model = read_model(output.given_path(arguments[0]))
    shape = shape_of(
        model,
        take_inventory(model),
        context_tokens=_CONTEXT.value,
        sessions=_SESSIONS.value,
        cache_bytes_per_layer=_CACHE.value,
    )
    machines = _machines(shape)
    if _SPLIT.value:
        plan = evaluate(shape, machines, _split(), accept_slower=_ACCEPT.value)
    else:
        plan = make_plan(shape, machines, stages=_STAGES.value, accept_slower=_ACCEPT.value)
    if output.wants_json():
        output.print_json(dataclasses.asdict(plan))
    else:
        _show(plan)
    return 0


def _machines(shape: ModelShape) -> list[Machine]:
    if _MACHINES.value:
        return load_machines(output.given_path(_MACHINES.value))
    with output.control_errors(), progress.working("asking the mesh"):
        return asyncio.run(_ask(shape))


async def _ask(shape: ModelShape) -> list[Machine]:
    async with TrackerClient(mesh_flags.trackers(), security=mesh_flags.security()) as tracker:
        answer = await tracker.list_workers(
            tracker_pb2.ListWorkersRequest(model_id=_MODEL_ID.value or "")
        )
    return measured_machines(shape, answer.workers)


def _split() -> list[tuple[str, tuple[int, int]]]:
    parts = []
    for part in _SPLIT.value:
        match = _PART.fullmatch(part)
        if match is None:
            raise app.UsageError(f"expected MACHINE=BEGIN:END in --split, got {part!r}")
        parts.append((match[1], (int(match[2]), int(match[3]))))
    return parts


def _show(plan: Plan) -> None:
    numbers = ("takes GiB", "leaves GiB", "compute ms", "seam ms")
    rows = []
    for index, stage in enumerate(plan.stages):
        seam = f"{stage.seam_us / 1000:.3f}" + (" (back)" if index + 1 == len(plan.stages) else "")
        rows.append(
            (
                stage.machine,
                f"[{stage.layers[0]}, {stage.layers[1]})",
                f"{stage.memory_bytes / _GIB:.2f}",
                f"{stage.memory_free_bytes / _GIB:.2f}",
                f"{stage.compute_us / 1000:.3f}",
                seam if len(plan.stages) > 1 else "",
            )
        )
    rate = 1e6 / plan.total_us if plan.total_us else 0.0
    terminal.show(
        terminal.table(("machine", "layers", *numbers), rows, numbers=numbers),
        f"a token takes {plan.total_us / 1000:.3f} ms: {rate:.1f} tokens/s",
        *(f"- {reason}" for reason in plan.reasons),
    )
