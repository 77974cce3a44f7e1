"""The adapter between a shard worker and the tracker's opaque registration.

    registration = make_registration(where, capability, metrics)
    load = make_load(health, metrics, before)

The tracker compares fingerprints, joins spans and adds costs; what they stand for is decided here:
a fingerprint is that of the worker's recipe, a unit is a main layer, a step is one token through
the worker's whole range, and memory is what sessions' caches may still take. Everything else that
people want to see goes into labels, which routing never reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshnet_gguf.client import Capability, Health, Metrics, WorkerState
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.protocol import recipe_fingerprint
from proto.meshnet.control.v1 import tracker_pb2
from proto.meshnet.shard.v1 import errors_pb2

__all__ = [
    "MACHINE_MEMORY_LABEL",
    "PeerMeasurement",
    "Whereabouts",
    "make_load",
    "make_registration",
    "step_us",
]

# The label of a registration that holds the bytes of its machine's memory.
MACHINE_MEMORY_LABEL = "machine_memory_bytes"

# Longer labels are cut: they are for people.
_MAX_LABEL_BYTES = 256
_RECIPE_LABELS = ("backend", "quantization", "cpu_variant", "kv_type")
# Fewer new tokens than that say little about the speed of a step.
_ENOUGH_TOKENS = 8


@dataclass(frozen=True)
class PeerMeasurement:
    """Towards the workers of another node: microseconds there and back, bytes a second (0 = ?)."""

    node_id: str
    round_trip_us: int
    bytes_per_second: int = 0


@dataclass(frozen=True)
class Whereabouts:
    """What a worker itself does not know: its names, and how it is reached.

    `access_latency_us` and `access_bytes_per_second` hold towards nodes that nobody measured.
    """

    worker_id: str
    node_id: str
    model_id: str
    endpoint: str
    relay: str = ""
    access_latency_us: int = 0
    access_bytes_per_second: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)


def make_registration(
    where: Whereabouts,
    capability: Capability,
    metrics: Metrics,
    peers: Sequence[PeerMeasurement] = (),
) -> tracker_pb2.Registration:
    """What the tracker is told of a worker.

    Raises MeshnetError (RECIPE_MISMATCH) when the fingerprint is not that of the recipe's fields.
    """
    computed = recipe_fingerprint(capability.recipe.items())
    if computed != capability.recipe_fingerprint:
        raise MeshnetError(
            errors_pb2.REASON_RECIPE_MISMATCH,
            f"expected the fingerprint of the recipe's fields, {computed}, from worker "
            f"{where.endpoint}, got {capability.recipe_fingerprint}",
        )
    span = capability.layers.end - capability.layers.begin
    labels = {
        "architecture": capability.architecture,
        "artifact_sha256": capability.artifact_sha256,
        "batch_policy": capability.batch_policy,
        "context_tokens": str(capability.context_tokens),
        "engine": capability.engine,
        "layer_us": str(metrics.warm_up_step_us // max(1, span)),
        "evidence": capability.evidence,
        "cache_budget_bytes": str(metrics.kv_budget_bytes),
        "owned_tensor_bytes": str(capability.owned_tensor_bytes),
        "resident_bytes": str(metrics.resident_bytes),
        "worker_version": capability.worker_version,
        **{name: capability.recipe[name] for name in _RECIPE_LABELS if name in capability.recipe},
        **where.labels,
    }
    return tracker_pb2.Registration(
        worker_id=where.worker_id,
        node_id=where.node_id,
        endpoint=where.endpoint,
        relay=where.relay,
        model_id=where.model_id,
        fingerprint=capability.recipe_fingerprint,
        span=tracker_pb2.Span(begin=capability.layers.begin, end=capability.layers.end),
        model_units=capability.model_layers,
        max_sessions=capability.max_sessions,
        memory_bytes=_free_cache(metrics),
        step_us=metrics.warm_up_step_us,
        access_latency_us=where.access_latency_us,
        access_bytes_per_second=where.access_bytes_per_second,
        seams=_seams(peers),
        labels={name: _cut(value) for name, value in labels.items()},
    )


def make_load(
    health: Health,
    metrics: Metrics,
    before: Metrics | None = None,
    peers: Sequence[PeerMeasurement] = (),
) -> tracker_pb2.Load:
    """What a heartbeat says. `before` is an earlier reading of the same worker process."""
    return tracker_pb2.Load(
        ready=health.state is WorkerState.READY,
        open_sessions=metrics.open_sessions,
        queued_steps=metrics.queued_steps,
        step_us=step_us(metrics, before),
        memory_bytes=_free_cache(metrics),
        seams=_seams(peers),
    )


def step_us(metrics: Metrics, before: Metrics | None = None) -> int:
    """Microseconds that a token takes through the worker's range, lately; 0 = as registered."""
    tokens, took = metrics.decode_tokens, metrics.decode_engine_us
    if before is not None:
        tokens -= before.decode_tokens
        took -= before.decode_engine_us
    return max(1, took // tokens) if tokens >= _ENOUGH_TOKENS else 0


def _free_cache(metrics: Metrics) -> int:
    return max(0, metrics.kv_budget_bytes - metrics.kv_bytes)


def _seams(peers: Sequence[PeerMeasurement]) -> list[tracker_pb2.SeamMeasurement]:
    return [
        tracker_pb2.SeamMeasurement(
            peer_node_id=peer.node_id,
            round_trip_us=peer.round_trip_us,
            bytes_per_second=peer.bytes_per_second,
        )
        for peer in peers
    ]


def _cut(text: str) -> str:
    return text.encode()[:_MAX_LABEL_BYTES].decode(errors="ignore")
