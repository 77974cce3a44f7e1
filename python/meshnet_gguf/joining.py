"""Joining a mesh that runs: what it serves, what it lacks, and which layers help it most.

    mesh = await look(["10.0.0.5:7100"], security=security)
    proposal = propose(shape, mesh.spans, memory_bytes=budget)

A machine that joins takes layers between boundaries that others already have, so that routes go
through it. Where layers are missing it takes those, as far as they fit; where none are, it takes
those of which the mesh can serve the fewest sessions at once.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from meshnet.tracker_client import TrackerClient
from meshnet.transport import Security

from meshnet_gguf.client import Capability, LayerRange, WorkerClient
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.machine import cores
from meshnet_gguf.plan import Line, Machine, ModelShape, evaluate
from meshnet_gguf.plan_inputs import measured_machines
from proto.meshnet.control.v1 import tracker_pb2
from proto.meshnet.shard.v1 import errors_pb2

__all__ = [
    "MeshView",
    "Proposal",
    "Span",
    "gaps",
    "look",
    "memory_speed",
    "propose",
    "reckon",
    "this_machine",
    "worker_flags_of",
]

_COPIED_BYTES: Final = 32 << 20
_COPIES: Final = 4
# So many draw what the memory gives.
_MAX_COPIERS: Final = 8


@dataclass(frozen=True)
class Span:
    """Layers that a worker of the mesh serves, and how many sessions at once."""

    layers: LayerRange
    max_sessions: int


@dataclass(frozen=True)
class MeshView:
    """A model of a mesh, as its tracker knows it; without workers, none is served yet.

    `round_trip_us` is the tracker's, from here.
    """

    model_id: str
    token_public_key: str
    workers: tuple[tracker_pb2.WorkerStatus, ...]
    capability: Capability | None
    round_trip_us: int

    @property
    def spans(self) -> list[Span]:
        """What its workers serve."""
        return [
            Span(
                LayerRange(worker.registration.span.begin, worker.registration.span.end),
                worker.registration.max_sessions,
            )
            for worker in self.workers
        ]


@dataclass(frozen=True)
class Proposal:
    """What a machine should take, and why. `missing` is what nobody serves even then."""

    layers: LayerRange
    memory_bytes: int
    reason: str
    missing: tuple[LayerRange, ...]


async def look(
    trackers: Sequence[str],
    *,
    model_id: str = "",
    security: Security | None = None,
) -> MeshView:
    """Asks a tracker, and one of the workers what exactly it runs.

    Raises ControlError; MeshnetError: NOT_SERVED when the mesh serves several models and none of
    this name, and what the worker says.
    """
    async with TrackerClient(trackers, security=security) as tracker:
        status = await tracker.get_status()
        began = time.perf_counter()
        answer = await tracker.list_workers(tracker_pb2.ListWorkersRequest())
        round_trip_us = round((time.perf_counter() - began) * 1e6)
    models = sorted({worker.registration.model_id for worker in answer.workers})
    if model_id not in models and len(models) > 1:
        raise MeshnetError(
            errors_pb2.REASON_NOT_SERVED,
            f"expected --model-id with one of this mesh's models ({', '.join(models)}), "
            f"got {model_id!r}",
        )
    if models and model_id not in models:
        model_id = models[0]
    lanes: dict[str, list[tracker_pb2.WorkerStatus]] = {}
    for worker in answer.workers:
        if worker.registration.model_id == model_id:
            lanes.setdefault(worker.registration.fingerprint, []).append(worker)
    # Of several recipes, the one with the most workers.
    workers = max(lanes.values(), key=len, default=[])
    capability = None
    dialled = [worker.registration for worker in workers if not worker.registration.relay]
    if dialled:
        async with WorkerClient(dialled[0].endpoint, security=security) as client:
            capability = await client.capability()
    return MeshView(model_id, status.token_public_key, tuple(workers), capability, round_trip_us)


def worker_flags_of(capability: Capability) -> dict[str, str]:
    """The flags with which a worker runs another's recipe, whatever is this machine's default."""
    recipe = capability.recipe
    flags = {
        "batch_policy": capability.batch_policy.lower(),
        "context_tokens": str(capability.context_tokens),
        "max_sessions": str(capability.max_sessions),
        "prefill_chunk_tokens": str(capability.prefill_chunk_tokens),
    }
    for name, flag in (
        ("cpu_variant", "cpu_variant"),
        ("flash_attention_threads", "threads"),
        ("kv_type", "kv_type"),
        ("rollback_tokens", "rollback_tokens"),
    ):
        if recipe.get(name, "any") != "any":
            flags[flag] = recipe[name]
    return flags


# ---- Which layers ----


def _reached(bounds: Iterable[int], spans: Iterable[Span]) -> tuple[set[int], set[int]]:
    """Boundaries that a route from the first layer reaches, and that one to the end leaves."""
    *_, last = sorted(bounds)
    edges = [(span.layers.begin, span.layers.end) for span in spans]
    from_start, to_end = {0}, {last}
    for begin, end in sorted(edges):
        if begin in from_start:
            from_start.add(end)
    for begin, end in sorted(edges, key=lambda edge: -edge[1]):
        if end in to_end:
            to_end.add(begin)
    return from_start, to_end


def gaps(bounds: Sequence[int], spans: Sequence[Span]) -> list[LayerRange]:
    """Layers that nobody serves."""
    served: set[int] = set()
    for span in spans:
        served.update(range(span.layers.begin, span.layers.end))
    found: list[LayerRange] = []
    for layer in range(max(bounds)):
        if layer in served:
            continue
        if found and found[-1].end == layer:
            found[-1] = LayerRange(found[-1].begin, layer + 1)
        else:
            found.append(LayerRange(layer, layer + 1))
    return found


def propose(shape: ModelShape, spans: Sequence[Span], memory_bytes: int) -> Proposal:
    """Which layers a machine with so much memory should take. Deterministic.

    Raises MeshnetError: MEMORY_BUDGET_EXCEEDED when nothing that would help fits.
    """
    bounds = shape.bounds
    from_start, to_end = _reached(bounds, spans)
    fitting = [layers for layers, size in shape.memory.items() if size <= memory_bytes]
    if shape.layers in from_start:
        chosen = _strengthen(
            [(b, e) for b, e in fitting if b in from_start and e in to_end], spans, shape.layers
        )
        reason = "the mesh serves all layers; it could serve the fewest sessions with these"
    else:
        # The least that closes the route; or as much as fits, from where it breaks off.
        closing = [(b, e) for b, e in fitting if b in from_start and e in to_end]
        first = max(bound for bound in from_start if bound in bounds)
        chosen = min(closing, key=lambda layers: (layers[1] - layers[0], layers), default=None)
        reason = "these are the layers that no other machine serves"
        if chosen is None:
            started = [(b, e) for b, e in fitting if b == first]
            chosen = max(started, key=lambda layers: layers[1], default=None)
            reason = "of the layers that no other machine serves, these fit here"
    if chosen is None:
        wanted = min(
            (
                size
                for (b, e), size in shape.memory.items()
                if b in from_start and (e in to_end or shape.layers not in from_start)
            ),
            default=0,
        )
        raise MeshnetError(
            errors_pb2.REASON_MEMORY_BUDGET_EXCEEDED,
            f"expected at least {wanted} bytes for layers that would help this mesh, workers may "
            f"take {memory_bytes} here; free some memory, or start the mesh with smaller --stages",
        )
    layers = LayerRange(*chosen)
    left = gaps(bounds, [*spans, Span(layers, 1)])
    return Proposal(layers, shape.memory[chosen], reason, tuple(left))


def _strengthen(
    candidates: Sequence[tuple[int, int]], spans: Sequence[Span], layers: int
) -> tuple[int, int] | None:
    """Of the ranges, the one that most of the weakest layers are in; then the longest."""
    sessions = [
        sum(span.max_sessions for span in spans if span.layers.begin <= layer < span.layers.end)
        for layer in range(layers)
    ]
    weakest = {layer for layer in range(layers) if sessions[layer] == min(sessions)}

    def worth(candidate: tuple[int, int]) -> tuple[int, int, int]:
        begin, end = candidate
        return len(weakest & set(range(begin, end))), end - begin, -begin

    return max(candidates, key=worth, default=None)


def reckon(shape: ModelShape, mesh: MeshView, proposal: Proposal, machine: Machine) -> int | None:
    """What a token would take over a route through it, microseconds; None when that is unknown."""
    try:
        others = measured_machines(shape, mesh.workers)
        chain = _chain(shape.layers, mesh.workers, proposal.layers, machine.name)
        if chain is None:
            return None
        plan = evaluate(shape, [*others, machine], chain, accept_slower=True)
    except MeshnetError:
        return None
    return plan.total_us


def _chain(
    last: int, workers: Sequence[tracker_pb2.WorkerStatus], layers: LayerRange, name: str
) -> list[tuple[str, tuple[int, int]]] | None:
    """A route with a machine's layers in it: others before and behind, the longest spans first."""
    spans = sorted(
        {
            (w.registration.span.begin, w.registration.span.end, w.registration.node_id)
            for w in workers
        }
    )

    def walk(begin: int, end: int) -> list[tuple[str, tuple[int, int]]] | None:
        if begin == end:
            return []
        for first, then, node in sorted(spans, key=lambda span: -span[1]):
            if first == begin and then <= end:
                rest = walk(then, end)
                if rest is not None:
                    return [(node, (first, then)), *rest]
        return None

    before, behind = walk(0, layers.begin), walk(layers.end, last)
    if before is None or behind is None:
        return None
    return [*before, (name, (layers.begin, layers.end)), *behind]


def memory_speed() -> int:
    """Bytes a second that this machine's memory gives to all cores together, by copying.

    Generating reads all weights for every token, so this bounds its speed.
    """
    threads = min(cores(), _MAX_COPIERS)
    blocks = [(bytearray(_COPIED_BYTES), bytearray(_COPIED_BYTES)) for _ in range(threads)]

    def copy(source: bytearray, target: bytearray) -> None:
        pointer = ctypes.c_char * _COPIED_BYTES
        for _ in range(_COPIES):
            # Without the interpreter's lock: the threads copy at once.
            ctypes.memmove(pointer.from_buffer(target), pointer.from_buffer(source), _COPIED_BYTES)

    copy(*blocks[0])  # pages in
    working = [threading.Thread(target=copy, args=pair) for pair in blocks]
    began = time.perf_counter()
    for thread in working:
        thread.start()
    for thread in working:
        thread.join()
    took = time.perf_counter() - began
    # A copy reads and writes.
    return max(1, int(2 * _COPIES * threads * _COPIED_BYTES / took))


def this_machine(name: str, memory_bytes: int, round_trip_us: int) -> Machine:
    """This machine as the planner sees it."""
    return Machine(name, memory_bytes, memory_speed(), Line(round_trip_us // 2))
