"""How much of a model goes onto this machine, in how many workers, within its memory.

    plan = plan_here(read_model(path), budget=memory_budget(free_memory()))
    plan.ranges, plan.worker_flags, plan.missing

A split never makes one machine faster, so without a wish it is one worker with as much of the model
as fits: all of it, or its first layers, and other machines may join with the rest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from meshnet_gguf.caches import session_bytes
from meshnet_gguf.client import LayerRange
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.gguf_file import Model
from meshnet_gguf.inventory import Inventory, even_split, take_inventory
from meshnet_gguf.local_cluster import share_of_cores
from proto.meshnet.shard.v1 import errors_pb2

__all__ = [
    "WORKER_BYTES",
    "LocalPlan",
    "memory_budget",
    "plan_here",
]

_MIB = 1024 * 1024
# What a worker takes beside weights and caches: the program, its compute buffers, its queues.
WORKER_BYTES = 160 * _MIB
# Of the free memory, what is left to everything else.
_LEFT_FREE = 0.15
_MAX_SESSIONS = 8
_DEFAULT_CONTEXT = 4096
_LEAST_CONTEXT = 512


@dataclass(frozen=True)
class LocalPlan:
    """Stages and what each of their workers is started with. Sizes are bytes.

    `missing` are the layers that did not fit; None when the model is whole.
    """

    ranges: tuple[LayerRange, ...]
    context_tokens: int
    max_sessions: int
    threads: int
    needed_bytes: int
    missing: LayerRange | None = None

    @property
    def worker_flags(self) -> dict[str, str]:
        """What every worker is told."""
        return {
            "context_tokens": str(self.context_tokens),
            "max_sessions": str(self.max_sessions),
            "threads": str(self.threads),
        }


def memory_budget(free_bytes: int) -> int:
    """What workers may take of so much free memory."""
    return int(free_bytes * (1 - _LEFT_FREE))


def plan_here(
    model: Model,
    *,
    budget: int,
    stages: int = 0,
    layers: LayerRange | None = None,
    context_tokens: int = 0,
    max_sessions: int = 0,
) -> LocalPlan:
    """What runs here; 0 lets the plan choose. As many sessions as fit, then as much context.

    With `stages` the whole model in so many stages of about equal bytes, with `layers` those in one
    stage, otherwise one stage with all that fits.

    Raises MeshnetError: MEMORY_BUDGET_EXCEEDED when not even one session of the smallest context
    fits, LAYER_RANGE_INVALID for layers that the model cannot be cut at, CONFIGURATION_INVALID for
    a number of stages that the model does not have.
    """
    inventory = take_inventory(model)
    whole = (0, inventory.main_layers)

    def fit(ranges: Sequence[tuple[int, int]]) -> LocalPlan:
        return _fit(model, inventory, ranges, budget, context_tokens, max_sessions)

    if stages:
        return fit(even_split(inventory, stages))
    ends = [0, *sorted(cut.at for cut in inventory.cuts if cut.allowed), inventory.main_layers]
    if layers is not None:
        if layers.begin not in ends or layers.end not in ends or layers.begin >= layers.end:
            raise MeshnetError(
                errors_pb2.REASON_LAYER_RANGE_INVALID,
                f"expected layers between allowed cuts ({', '.join(map(str, ends))}), got "
                f"{layers}; `meshnet inspect MODEL --cuts` lists them",
            )
        return fit([(layers.begin, layers.end)])
    try:
        return fit([whole])
    except MeshnetError as error:
        if error.reason != errors_pb2.REASON_MEMORY_BUDGET_EXCEEDED:
            raise
        for end in reversed(ends[1:-1]):
            with contextlib.suppress(MeshnetError):
                return fit([(0, end)])
        raise


def _fit(
    model: Model,
    inventory: Inventory,
    ranges: Sequence[tuple[int, int]],
    budget: int,
    context_tokens: int,
    max_sessions: int,
) -> LocalPlan:

    def held(tokens: int) -> int:
        """By one session of so many tokens, in all ranges."""
        layers = session_bytes(model, inventory, tokens) or [1] * inventory.main_layers
        return sum(sum(layers[begin:end]) for begin, end in ranges)

    weights = sum(inventory.stage_bytes(layers) for layers in ranges)
    fixed = weights + len(ranges) * WORKER_BYTES
    room = budget - fixed
    longest = model.integer("context_length") or _DEFAULT_CONTEXT
    context = context_tokens or min(longest, _DEFAULT_CONTEXT)
    while not context_tokens and context > _LEAST_CONTEXT and room < held(context):
        context //= 2
    fitting = room // held(context) if room > 0 else 0
    sessions = max_sessions or min(_MAX_SESSIONS, fitting)
    if sessions < 1 or sessions > fitting:
        needed = fixed + max(1, sessions) * held(context)
        raise MeshnetError(
            errors_pb2.REASON_MEMORY_BUDGET_EXCEEDED,
            f"expected {_gib(needed)} of memory for {len(ranges)} workers and "
            f"{max(1, sessions)} sessions of {context} tokens, workers may take {_gib(budget)} "
            "here; free some, ask for less, or use several machines",
        )
    begin, end = ranges[0][0], ranges[-1][1]
    missing = None
    if begin == 0 and end < inventory.main_layers:
        missing = LayerRange(end, inventory.main_layers)
    return LocalPlan(
        tuple(LayerRange(*layers) for layers in ranges),
        context,
        sessions,
        share_of_cores(len(ranges)),
        fixed + sessions * held(context),
        missing,
    )


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
