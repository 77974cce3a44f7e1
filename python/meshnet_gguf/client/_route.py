"""Routes: an ordered list of workers that hold all layers of one model under one recipe."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from meshnet.transport import Security

from meshnet_gguf.client._session import Session
from meshnet_gguf.client._values import SCHEMA_VERSION, Capability, LayerRange, Limits, Metrics
from meshnet_gguf.client._worker import WorkerClient
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.recipe import mixture_of
from proto.meshnet.shard.v1 import errors_pb2, shard_pb2

if TYPE_CHECKING:
    from typing import Self


@dataclass(frozen=True)
class Endpoint:
    """A worker's host:port as this client reaches it.

    `advertised` is how the other stages reach it, where that is something else. With
    `relay_peer_id` it is a relay's address, at which the worker listens under that id.
    """

    address: str
    advertised: str | None = None
    relay_peer_id: str = ""
    # What a tracker has issued for this worker's hop of the session that is to be opened.
    route_token: str = ""

    def hop(self, layers: LayerRange) -> RouteHop:
        """The worker as its peers on a route see it."""
        return RouteHop(
            self.advertised or self.address, layers, self.relay_peer_id, self.route_token
        )


@dataclass(frozen=True)
class RouteHop:
    """A stage of a route: where the other stages reach it, and what it holds.

    With `relay_peer_id` the endpoint is a relay's, at which the worker listens under that id.
    """

    endpoint: str
    layers: LayerRange
    relay_peer_id: str = ""
    # What a tracker has issued for this hop of the session.
    route_token: str = ""

    def to_proto(self) -> shard_pb2.Hop:
        """The hop as OpenSession carries it."""
        return shard_pb2.Hop(
            endpoint=self.endpoint,
            range=self.layers.to_proto(),
            relay_peer_id=self.relay_peer_id,
            route_token=self.route_token,
        )


def check_route(stages: Sequence[tuple[str, Capability]], mixture: str = "") -> list[int]:
    """The order in which workers (endpoint, capability) form a route: indexes by layer.

    All run one recipe; or first ones run one and last ones another that differs in its lane alone,
    and `mixture` is their fingerprint together, for which somebody has evidence.

    Raises MeshnetError, naming both sides: ARTIFACT_MISMATCH, RECIPE_MISMATCH (with the lines that
    differ), BOUNDARY_SCHEMA_MISMATCH, ROUTE_INVALID (gaps, overlaps, layers that nobody has),
    FEATURE_UNSUPPORTED for a recipe with multi-token prediction.
    """
    if not stages:
        raise MeshnetError(
            errors_pb2.REASON_ROUTE_INVALID, "expected at least one worker, got none"
        )
    for endpoint, capability in stages:
        mtp = capability.recipe.get("mtp", "off")
        if mtp != "off":
            raise MeshnetError(
                errors_pb2.REASON_FEATURE_UNSUPPORTED,
                f"expected no multi-token prediction (MTP), {endpoint} has a recipe with "
                f"mtp={mtp}; it is reserved for a later version: run workers with mtp=off",
            )
    first_endpoint, first = stages[0]
    found = _mixture([capability for _, capability in stages])
    for endpoint, capability in stages[1:]:
        if capability.artifact_sha256 != first.artifact_sha256:
            raise MeshnetError(
                errors_pb2.REASON_ARTIFACT_MISMATCH,
                f"expected one artifact, {first_endpoint} has {first.artifact_sha256} and "
                f"{endpoint} has {capability.artifact_sha256}; load the same file everywhere, and "
                "by the same manifest or by none: a manifest's hash is an artifact of its own",
            )
        one = capability.recipe_fingerprint == first.recipe_fingerprint
        if not one and (found is None or found != mixture):
            raise MeshnetError(
                errors_pb2.REASON_RECIPE_MISMATCH,
                f"expected one recipe, {first_endpoint} runs {first.recipe_fingerprint} and "
                f"{endpoint} runs {capability.recipe_fingerprint}; {_cure(found, mixture)}; they "
                # The longest, and last: a message may be cut.
                f"differ in {_recipe_difference(first.recipe, capability.recipe)}",
            )
        if capability.model_layers != first.model_layers:
            raise MeshnetError(
                errors_pb2.REASON_ROUTE_INVALID,
                f"expected one model, {first_endpoint} says {first.model_layers} layers and "
                f"{endpoint} says {capability.model_layers}",
            )
    order = sorted(range(len(stages)), key=lambda index: stages[index][1].layers)
    covered = 0
    before = "the start"
    for index in order:
        endpoint, capability = stages[index]
        begin, end = capability.layers.begin, capability.layers.end
        if begin != covered or end <= begin:
            if begin > covered:
                problem = f"nobody has {LayerRange(covered, begin)}"
            elif begin < covered:
                problem = f"both have {LayerRange(begin, min(covered, end))}"
            else:
                problem = "which is empty"
            raise MeshnetError(
                errors_pb2.REASON_ROUTE_INVALID,
                f"expected a range that begins at layer {covered} after {before}, {endpoint} has "
                f"{capability.layers}: {problem}",
            )
        covered = capability.layers.end
        before = f"{endpoint} with {capability.layers}"
    if covered != first.model_layers:
        raise MeshnetError(
            errors_pb2.REASON_ROUTE_INVALID,
            f"expected all {first.model_layers} layers, {before} is the last and nobody has "
            f"{LayerRange(covered, first.model_layers)}",
        )
    for left, right in itertools.pairwise(order):
        (left_endpoint, left_side), (right_endpoint, right_side) = stages[left], stages[right]
        if left_side.boundary_out != right_side.boundary_in:
            raise MeshnetError(
                errors_pb2.REASON_BOUNDARY_SCHEMA_MISMATCH,
                f"{left_endpoint} gives {left_side.boundary_out}, {right_endpoint} expects "
                f"{right_side.boundary_in}",
            )
    return order


def _mixture(capabilities: Sequence[Capability]) -> str | None:
    """The fingerprint of routes over these, where they are two lanes, one behind the other."""
    ordered = sorted(capabilities, key=lambda capability: capability.layers)
    changes = [
        (left.recipe, right.recipe)
        for left, right in itertools.pairwise(ordered)
        if left.recipe_fingerprint != right.recipe_fingerprint
    ]
    mixture = mixture_of(*changes[0]) if len(changes) == 1 else None
    return None if mixture is None else mixture.fingerprint


def _cure(found: str | None, given: str) -> str:
    if found is None:
        return "run one recipe, or two that differ in their lane alone, one behind the other"
    named = f"that of {given}" if given else "none"
    return f"run one recipe, or name the evidence for the mixture {found}, got {named}"


def _recipe_difference(left: Mapping[str, str], right: Mapping[str, str]) -> str:
    lines = [
        f"{name} ({left.get(name, 'absent')!r} against {right.get(name, 'absent')!r})"
        for name in sorted({*left, *right})
        if left.get(name) != right.get(name)
    ]
    return ", ".join(lines) or "nothing that they report (one of the fingerprints is wrong)"


class Route:
    """Workers that have been checked to form one whole model. Use as an async context manager.

    `workers` and `capabilities` are in layer order: those of all hops, or of the head alone where
    somebody else has chosen the hops. Every worker checks its own identity when a session opens.
    """

    def __init__(
        self,
        workers: Sequence[WorkerClient],
        capabilities: Sequence[Capability],
        hops: Sequence[RouteHop],
        recipe_fingerprint: str = "",
    ) -> None:
        self.workers = tuple(workers)
        self.capabilities = tuple(capabilities)
        self.hops = tuple(hops)
        # Of the workers' recipe, or of the mixture of two.
        self.recipe_fingerprint = recipe_fingerprint or self.capabilities[0].recipe_fingerprint

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections; sessions still open end as if the client had gone away."""
        await asyncio.gather(*(worker.close() for worker in self.workers))

    @property
    def head(self) -> WorkerClient:
        """The worker that holds the first layers and the decode loop."""
        return self.workers[0]

    @property
    def identity(self) -> tuple[str, str]:
        """Artifact and recipe: what must be the same for tokens to mean the same."""
        return self.capabilities[0].artifact_sha256, self.capabilities[0].recipe_fingerprint

    async def metrics(self) -> list[Metrics]:
        """The metrics of `workers`."""
        return list(await asyncio.gather(*(worker.metrics() for worker in self.workers)))

    def to_proto(self, route_session_id: bytes, route_epoch: int) -> shard_pb2.Route:
        """The route as OpenSession carries it."""
        first = self.capabilities[0]
        return shard_pb2.Route(
            route_session_id=route_session_id,
            route_epoch=route_epoch,
            recipe_fingerprint=self.recipe_fingerprint,
            artifact_sha256=first.artifact_sha256,
            model_layers=first.model_layers,
            hops=[hop.to_proto() for hop in self.hops],
        )

    def session(
        self,
        *,
        route_session_id: bytes | None = None,
        route_epoch: int = 1,
        work_id: str | None = None,
        limits: Limits | None = None,
        idle_ttl: float | None = None,
        deadline: float | None = None,
        mtp: bool = False,
        open_timeout: float = 10.0,
    ) -> Session:
        """A session on this route, opened by `async with`.

        Times are seconds. Without `route_session_id` (16 bytes) a random one is taken. `limits`
        default to the head's own offer. `idle_ttl`, `deadline` and `mtp` (which every worker of
        this version refuses with FEATURE_UNSUPPORTED) as in OpenSession.
        """
        session_id = route_session_id if route_session_id is not None else os.urandom(16)
        message = shard_pb2.OpenSession(
            schema_version=SCHEMA_VERSION,
            work_id=work_id or f"client.{session_id.hex()[:16]}.{route_epoch}",
            route=self.to_proto(session_id, route_epoch),
            limits=(limits or self.capabilities[0].limits).to_proto(),
            idle_ttl_ms=_milliseconds(idle_ttl),
            deadline_ms=_milliseconds(deadline),
            mtp=mtp,
        )
        return Session(self.head, message, open_timeout=open_timeout)


def _milliseconds(seconds: float | None) -> int:
    return 0 if seconds is None else max(1, round(seconds * 1000))


async def open_route(
    endpoints: Sequence[str | Endpoint],
    *,
    security: Security | None = None,
    answer_within: float = 10.0,
    mixture: str = "",
) -> Route:
    """A route over workers given in any order, after asking each what it has.

    Workers of two lanes are refused unless `mixture` is the fingerprint of their mixture, for which
    there is a certification record; each worker must have it as well (--mixtures).

    Raises MeshnetError: PEER_UNREACHABLE for a worker that does not answer within
    `answer_within` seconds, INSECURE_TRANSPORT, and what check_route() raises.
    """
    where = [Endpoint(item) if isinstance(item, str) else item for item in endpoints]
    workers: list[WorkerClient] = []
    try:
        for endpoint in where:
            workers.append(
                WorkerClient(
                    endpoint.address,
                    security=security,
                    timeout=answer_within,
                )
            )
        capabilities = await asyncio.gather(*(worker.capability() for worker in workers))
        order = check_route(
            [
                (endpoint.address, capability)
                for endpoint, capability in zip(where, capabilities, strict=True)
            ],
            mixture,
        )
    except BaseException:
        await asyncio.gather(*(worker.close() for worker in workers))
        raise
    return Route(
        [workers[index] for index in order],
        [capabilities[index] for index in order],
        [where[index].hop(capabilities[index].layers) for index in order],
        mixture if len({c.recipe_fingerprint for c in capabilities}) == 2 else "",
    )
