"""What goes on in a mesh, as one value: for the gateway's status page and for `meshnet status`.

    status = MeshStatus(time.time(), (await watch.read(),), gateway=None)
    text = status_to_json(status)
    assert status_from_json(text) == status

It is made by meshnet_gguf.status_watch, and served by a gateway as /status.json. Sizes are bytes,
rates are per second, None is what nobody knows. A layer range is half-open, [begin, end). Names,
reasons and messages come from other machines: whoever shows them has to escape them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import pydantic

from meshnet_gguf.errors import MeshnetError
from proto.meshnet.shard.v1 import errors_pb2

__all__ = [
    "Admission",
    "GatewayStatus",
    "LaneStatus",
    "LaneWorker",
    "Memory",
    "MeshStatus",
    "ModelStatus",
    "Problem",
    "SeamStatus",
    "StageState",
    "StageStatus",
    "Work",
    "status_from_json",
    "status_to_json",
]


class StageState(enum.StrEnum):
    """Where a stage stands. Work goes over READY ones alone."""

    READY = "READY"
    LOADING = "LOADING"
    DRAINING = "DRAINING"
    FAILED = "FAILED"
    LOST = "LOST"
    """A worker was there, and does not answer any more."""
    MISSING = "MISSING"
    """Nobody is known for these layers."""


class Admission(enum.StrEnum):
    """Whether a lane, a model under one recipe, may be routed."""

    CERTIFIED = "CERTIFIED"
    DARK = "DARK"
    """Without a certification record, and so never routed."""
    DARK_ADMITTED = "DARK_ADMITTED"
    """Without one, and routed because somebody said so."""


@dataclass(frozen=True)
class Problem:
    """Why something is not as it should be: a name of the one table of reasons, and words."""

    reason: str
    message: str


@dataclass(frozen=True)
class Memory:
    """Of one worker. `machine_bytes` is the memory of the whole machine."""

    weights_bytes: int | None = None
    cache_bytes: int | None = None
    cache_budget_bytes: int | None = None
    resident_bytes: int | None = None
    machine_bytes: int | None = None


@dataclass(frozen=True)
class Work:
    """What one worker does. Totals are since its start, rates over the last few seconds."""

    open_sessions: int | None = None
    max_sessions: int | None = None
    queued_steps: int | None = None
    prefill_tokens: int | None = None
    decode_tokens: int | None = None
    prefill_tokens_per_second: float | None = None
    decode_tokens_per_second: float | None = None


@dataclass(frozen=True)
class StageStatus:
    """A stage of a route: who holds these layers.

    `worker` is the id at the tracker, the endpoint where there is none; empty when MISSING.
    `machine` is the node's id, or the host.
    """

    begin: int
    end: int
    state: StageState
    worker: str = ""
    machine: str = ""
    endpoint: str = ""
    relay: str = ""
    engine: str = ""
    evidence: str = ""
    problem: Problem | None = None
    memory: Memory = Memory()
    work: Work = Work()
    refusals: Mapping[str, int] = field(default_factory=dict)
    """Refused calls and messages since the worker's start, by reason, without CANCELLED."""


@dataclass(frozen=True)
class SeamStatus:
    """The line from one stage to the next, by their places in the route; the last is the way back.

    `round_trip_us` and `bytes_per_second` are what the nodes measured of it, the slower of the two
    ends; `sent_bytes_per_second` is what goes over it right now.
    """

    source: int
    target: int
    round_trip_us: int | None = None
    bytes_per_second: int | None = None
    sent_bytes_per_second: float | None = None
    relay: str = ""


@dataclass(frozen=True)
class LaneWorker:
    """A worker of a lane. `unroutable` says why no route goes over it, empty when one may."""

    worker: str
    machine: str
    begin: int
    end: int
    open_sessions: int
    max_sessions: int
    unroutable: str = ""


@dataclass(frozen=True)
class LaneStatus:
    """The workers of a model that share one recipe. `reason`: why it is not certified."""

    fingerprint: str
    admission: Admission
    reason: str
    workers: tuple[LaneWorker, ...]
    unlisted_workers: int = 0
    """So many more are there."""


@dataclass(frozen=True)
class MixtureStatus:
    """Routes whose first stages are of one lane and whose last are of another.

    `reason`: why it is not certified. `fingerprint` is empty for one that there is no record of.
    """

    head_fingerprint: str
    tail_fingerprint: str
    fingerprint: str
    admission: Admission
    reason: str


@dataclass(frozen=True)
class ModelStatus:
    """A model and its route: the stages by layers, with LOST and MISSING ones in their places.

    `problem` is None when the route is complete and every stage is READY.
    """

    name: str
    layers: int
    trackers: tuple[str, ...] = ()
    problem: Problem | None = None
    stages: tuple[StageStatus, ...] = ()
    seams: tuple[SeamStatus, ...] = ()
    lanes: tuple[LaneStatus, ...] = ()
    mixtures: tuple[MixtureStatus, ...] = ()


@dataclass(frozen=True)
class GatewayStatus:
    """What the gateway itself does, since its start where it is counted."""

    uptime_seconds: float
    active_slots: int
    slots: int
    queued_requests: int
    prompt_tokens: int
    completion_tokens: int
    refusals: Mapping[str, int]


@dataclass(frozen=True)
class MeshStatus:
    """Everything. `taken_at` is in seconds since 1970; `gateway` is None where none was asked."""

    taken_at: float
    models: tuple[ModelStatus, ...]
    gateway: GatewayStatus | None = None


_ADAPTER = pydantic.TypeAdapter(MeshStatus)


def status_to_json(status: MeshStatus) -> bytes:
    """In the form of /status.json: one object with the names of the fields."""
    return _ADAPTER.dump_json(status)


def status_from_json(text: str | bytes) -> MeshStatus:
    """What status_to_json() wrote; names that this version does not know are passed over.

    Raises MeshnetError (MALFORMED_MESSAGE).
    """
    try:
        return _ADAPTER.validate_json(text)
    except pydantic.ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise MeshnetError(
            errors_pb2.REASON_MALFORMED_MESSAGE,
            f"expected the status of a mesh, got something else at {where!r}: {first['msg']}",
        ) from error
