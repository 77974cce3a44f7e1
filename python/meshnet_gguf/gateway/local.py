"""A whole model on this machine: how many workers with what, within the memory that is free.

plan = plan_here(read_model(path), stages=2, free_bytes=free_memory(), cores=cores_here())
async with LocalCluster(plan.specs(path)) as cluster: ...
"""

from __future__ import annotations

import contextlib
import pathlib
from dataclasses import dataclass

from meshnet_gguf.client import LayerRange
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.gguf_file import Model
from meshnet_gguf.inventory import even_split, take_inventory
from meshnet_gguf.local_cluster import WorkerSpec, share_of_cores
from proto.meshnet.shard.v1 import errors_pb2

__all__ = ["LocalPlan", "free_memory", "plan_here"]

_MIB = 1024 * 1024
# What a worker takes beside weights and caches: the program, its compute buffers, its queues.
_WORKER_BYTES = 160 * _MIB
# Of the free memory, what is left to everything else.
_LEFT_FREE = 0.15
_MAX_SESSIONS = 8
_DEFAULT_CONTEXT = 4096
_LEAST_CONTEXT = 512
_CACHE_ELEMENT_BYTES = 2  # f16


@dataclass(frozen=True)
class LocalPlan:
    """Stages and what each of their workers is started with. Sizes are bytes."""

    ranges: tuple[LayerRange, ...]
    context_tokens: int
    max_sessions: int
    threads: int
    needed_bytes: int

    def specs(self, model: pathlib.Path) -> list[WorkerSpec]:
        """One worker a stage."""
        flags = (
            f"--context_tokens={self.context_tokens}",
            f"--max_sessions={self.max_sessions}",
            f"--threads={self.threads}",
        )
        return [WorkerSpec(layers, model, flags) for layers in self.ranges]


def free_memory() -> int:
    """Bytes that new processes may take without others being swapped out.

    Counts a container's limit as well.
    """
    free = 0
    for line in pathlib.Path("/proc/meminfo").read_text("ascii").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            free = int(rest.split()[0]) * 1024
    group = pathlib.Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):
        limit = int((group / "memory.max").read_text("ascii"))  # "max": no limit
        free = min(free, limit - int((group / "memory.current").read_text("ascii")))
    return max(0, free)


def plan_here(
    model: Model,
    *,
    stages: int,
    free_bytes: int,
    context_tokens: int = 0,
    max_sessions: int = 0,
) -> LocalPlan:
    """Stages of about equal bytes, and as many sessions as fit; 0 lets the plan choose.

    Raises MeshnetError: MEMORY_BUDGET_EXCEEDED when not even one session of the smallest context
    fits, CONFIGURATION_INVALID for a number of stages that the model does not have.
    """
    inventory = take_inventory(model)
    ranges = even_split(inventory, stages)
    token_bytes = _cache_bytes_per_token(model, inventory.main_layers)
    weights = sum(inventory.stage_bytes(layers) for layers in ranges)
    fixed = weights + stages * _WORKER_BYTES
    room = int(free_bytes * (1 - _LEFT_FREE)) - fixed
    longest = model.integer("context_length") or _DEFAULT_CONTEXT
    context = context_tokens or min(longest, _DEFAULT_CONTEXT)
    while not context_tokens and context > _LEAST_CONTEXT and room < context * token_bytes:
        context //= 2
    fitting = room // (context * token_bytes) if room > 0 else 0
    sessions = max_sessions or min(_MAX_SESSIONS, fitting)
    if sessions < 1 or sessions > fitting:
        needed = fixed + max(1, sessions) * context * token_bytes
        raise MeshnetError(
            errors_pb2.REASON_MEMORY_BUDGET_EXCEEDED,
            f"expected {_gib(needed / (1 - _LEFT_FREE))} of free memory for {stages} stages and "
            f"{max(1, sessions)} sessions of {context} tokens, this machine has "
            f"{_gib(free_bytes)}; free some, ask for less, or use several machines",
        )
    return LocalPlan(
        tuple(LayerRange(begin, end) for begin, end in ranges),
        context,
        sessions,
        share_of_cores(stages),
        fixed + sessions * context * token_bytes,
    )


def _cache_bytes_per_token(model: Model, layers: int) -> int:
    """Keys and values of one token in all layers, as dense models keep them."""
    heads = model.integer("attention.head_count") or 1
    width = (model.integer("embedding_length") or 0) // heads
    kv_heads = max(model.integers("attention.head_count_kv") or (heads,))
    key = model.integer("attention.key_length") or width
    value = model.integer("attention.value_length") or width
    return max(1, layers * kv_heads * (key + value) * _CACHE_ELEMENT_BYTES)


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
