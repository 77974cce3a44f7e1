"""Where routes come from: a tracker that chooses them, or workers that somebody names.

    async with TrackerRouteSource(["127.0.0.1:7100"], "smollm2") as source:
        async with source.open() as tracked:
            async with tracked.session() as session:
                ...
                await tracked.report(session, Outcome.COMPLETED)

While the inner block runs the tracker counts the session as open, and it is touched before its
time is over; leaving the block closes it. What the tracker refuses is a ControlError (NO_ROUTE when
nobody serves the model right now), what a worker refuses a MeshnetError.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import itertools
import secrets
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from meshnet.errors import ControlError, Reason
from meshnet.fingerprints import Mixture
from meshnet.routing import sessions_at_once
from meshnet.tasks import cancel
from meshnet.tracker_client import TrackerClient
from meshnet.transport import Security

from meshnet_gguf.client import (
    Capability,
    LayerRange,
    Route,
    RouteHop,
    Session,
    StageReceipt,
    WorkerClient,
)
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.recipe import shared_fingerprint
from meshnet_gguf.status_watch import TrackedWorkers
from proto.meshnet.control.v1 import tracker_pb2
from proto.meshnet.shard.v1 import errors_pb2

if TYPE_CHECKING:
    from typing import Self

__all__ = [
    "OpenedRoute",
    "Outcome",
    "RouteSource",
    "StaticRoute",
    "TrackedRoute",
    "TrackerRouteSource",
    "lane_sessions",
    "model_sessions",
]


# So many heads are tried for a session, after these failures.
_HEADS = 3
_HEAD_FAILED = frozenset(
    {
        errors_pb2.REASON_PEER_LOST,
        errors_pb2.REASON_PEER_UNREACHABLE,
        errors_pb2.REASON_DEADLINE_EXCEEDED,
        errors_pb2.REASON_RECIPE_MISMATCH,
        errors_pb2.REASON_RANGE_MISMATCH,
    }
)


class Outcome(enum.Enum):
    """How a piece of work ended."""

    COMPLETED = tracker_pb2.OUTCOME_COMPLETED
    CANCELLED = tracker_pb2.OUTCOME_CANCELLED
    FAILED = tracker_pb2.OUTCOME_FAILED


class OpenedRoute(Protocol):
    """A route as a source gives it."""

    @property
    def route(self) -> Route:
        """The workers."""

    def session(self, **options: Any) -> Session:
        """A session on it, see Route.session; its id and epoch are the route's."""

    async def report(
        self, session: Session, outcome: Outcome, error: MeshnetError | None = None
    ) -> None:
        """Says how a session ended, for the ledger and for who is chosen next."""

    async def go_round(self, error: MeshnetError) -> bool:
        """Takes another way than the stage at which a session could not be opened.

        False when this route is the only one. Raises ControlError, MeshnetError.
        """


class RouteSource(Protocol):
    """Gives a route for each conversation."""

    def open(self) -> contextlib.AbstractAsyncContextManager[OpenedRoute]:
        """A route for one conversation, closed with the block."""


class StaticRoute:
    """A route over named workers; nobody keeps a ledger."""

    def __init__(self, route: Route) -> None:
        self.route = route

    def session(self, **options: Any) -> Session:
        """A session on it."""
        return self.route.session(**options)

    async def report(
        self, session: Session, outcome: Outcome, error: MeshnetError | None = None
    ) -> None:
        """Nobody is told."""

    async def go_round(self, error: MeshnetError) -> bool:
        """There is no other way."""
        return False


class TrackedRoute:
    """One epoch of one session of a tracker. Made by TrackerRouteSource.open()."""

    def __init__(
        self, source: TrackerRouteSource, chosen: tracker_pb2.RouteResponse, route: Route
    ) -> None:
        self.chosen = chosen
        self.route = route
        self._source = source

    @property
    def session_id(self) -> str:
        """The tracker's name for the session: 32 hexadecimal digits, the workers' 16 bytes."""
        return self.chosen.session_id

    @property
    def epoch(self) -> int:
        """The route's epoch."""
        return self.chosen.epoch

    def session(self, **options: Any) -> Session:
        """The session on the workers; one at a time for an epoch."""
        return self.route.session(
            route_session_id=bytes.fromhex(self.session_id), route_epoch=self.epoch, **options
        )

    async def report(
        self, session: Session, outcome: Outcome, error: MeshnetError | None = None
    ) -> None:
        """Puts a receipt of every stage into the ledger; to repeat it changes nothing."""
        await self._source.tracker.report_outcome(
            tracker_pb2.ReportOutcomeRequest(receipts=self.receipts(session, outcome, error))
        )

    def receipts(
        self, session: Session, outcome: Outcome, error: MeshnetError | None = None
    ) -> list[tracker_pb2.Receipt]:
        """What report() puts into the ledger.

        A failure is that of the stage that `error` names, the others' work is unverified then.
        """
        by_layers = {receipt.layers: receipt for receipt in session.receipts}
        return [
            _receipt(self.chosen, hop, outcome, error, by_layers.get(_layers(hop)), session.work_id)
            for hop in self.chosen.hops
        ]

    async def go_round(self, error: MeshnetError) -> bool:
        """Reroutes without the stage that the error names, or the head where it names none."""
        head = self.chosen.hops[0]
        try:
            await self.reroute({LayerRange(*error.stage) if error.stage else _layers(head)})
        except ControlError as refusal:
            if refusal.reason is Reason.NO_ROUTE:
                return False
            raise
        return True

    async def reroute(self, failed: Collection[LayerRange]) -> None:
        """Goes on to the session's next epoch, without the workers of these stages.

        Nothing moves with it: the conversation is read again. Raises ControlError (NO_ROUTE,
        SESSION_UNKNOWN), MeshnetError.
        """
        chosen = await self._source.next_epoch(self.chosen, failed)
        chosen, route = await self._source.reach(chosen)
        await self.route.close()
        self.chosen, self.route = chosen, route


class TrackerRouteSource:
    """Asks trackers for routes to one model. Use as an async context manager.

    `fingerprint` restricts it to one recipe; `seam_bytes` is what a step carries over a seam, which
    decides between close and fast neighbours. A tracker may take `timeout` seconds to answer, and a
    head `dial_timeout` (by default as long).
    """

    def __init__(
        self,
        trackers: Sequence[str],
        model_id: str,
        *,
        fingerprint: str = "",
        seam_bytes: int = 0,
        security: Security | None = None,
        timeout: float = 5.0,
        dial_timeout: float | None = None,
    ) -> None:
        self.tracker = TrackerClient(trackers, security=security, timeout=timeout)
        self.model_id = model_id
        self.fingerprint = fingerprint
        self.seam_bytes = seam_bytes
        self._security = security
        self._dial_timeout = timeout if dial_timeout is None else dial_timeout

    async def __aenter__(self) -> Self:
        """Itself."""
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes the connections to the trackers."""
        await self.tracker.close()

    def workers(self) -> TrackedWorkers:
        """The model's workers, for a watch (meshnet_gguf.status_watch)."""
        return TrackedWorkers(self.tracker, self.model_id, security=self._security)

    async def sessions_at_once(self) -> int:
        """How many sessions the model's workers could have together. Raises ControlError.

        Those count that may be routed and are ready, however much they have to do just now.
        """
        answer = await self.tracker.list_workers(
            tracker_pb2.ListWorkersRequest(model_id=self.model_id, fingerprint=self.fingerprint)
        )
        return sum(model_sessions(answer).values())

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[TrackedRoute]:
        """A new session's route, the tracker's word checked against the head's own."""
        session_id = secrets.token_hex(16)
        chosen = await self.select(session_id)
        tracked = None
        keeper = asyncio.create_task(self._keep(session_id, chosen.ttl_ms / 1000))
        try:
            tracked = TrackedRoute(self, *await self.reach(chosen))
            yield tracked
        finally:
            await cancel(keeper)
            if tracked is not None:
                await tracked.route.close()
            # An unreachable tracker forgets the session when its time is over.
            with contextlib.suppress(ControlError):
                await self.tracker.close_session(
                    tracker_pb2.CloseSessionRequest(session_id=session_id)
                )

    async def select(self, session_id: str) -> tracker_pb2.RouteResponse:
        """The route of a session. Raises ControlError."""
        return await self.tracker.select_route(
            tracker_pb2.SelectRouteRequest(
                session_id=session_id,
                model_id=self.model_id,
                fingerprint=self.fingerprint,
                seam_bytes=self.seam_bytes,
            )
        )

    async def next_epoch(
        self, chosen: tracker_pb2.RouteResponse, failed: Collection[LayerRange]
    ) -> tracker_pb2.RouteResponse:
        """The session's next epoch, without the workers of these stages. Raises ControlError."""
        request = tracker_pb2.RerouteRequest(
            session_id=chosen.session_id,
            epoch=chosen.epoch,
            failed_worker_ids=[hop.worker_id for hop in chosen.hops if _layers(hop) in failed],
            seam_bytes=self.seam_bytes,
        )
        try:
            return await self.tracker.reroute(request)
        except ControlError as error:
            if error.reason is not Reason.STALE_EPOCH:
                raise
            # Done by a tracker whose answer was lost: the session has its next epoch.
            return await self.select(chosen.session_id)

    async def reach(
        self, chosen: tracker_pb2.RouteResponse
    ) -> tuple[tracker_pb2.RouteResponse, Route]:
        """A route whose head answers: the tracker's, or a later epoch's without those that do not.

        Raises MeshnetError as dial() does for the last head that is left; ControlError.
        """
        for _ in range(_HEADS - 1):
            try:
                return chosen, await self.dial(chosen)
            except MeshnetError as error:
                if error.reason not in _HEAD_FAILED:
                    raise
                try:
                    chosen = await self.next_epoch(chosen, {_layers(chosen.hops[0])})
                except ControlError as refusal:
                    if refusal.reason is Reason.NO_ROUTE:
                        raise error from refusal  # it says more
                    raise
        return chosen, await self.dial(chosen)

    async def dial(self, chosen: tracker_pb2.RouteResponse) -> Route:
        """A route over the tracker's hops, after asking the head what it is.

        Raises MeshnetError: RECIPE_MISMATCH, RANGE_MISMATCH, PEER_UNREACHABLE, and the like.
        """
        # A worker that can only dial out listens at its relay under its own id.
        hops = [
            RouteHop(hop.relay, _layers(hop), hop.worker_id, hop.token.decode())
            if hop.relay and index
            else RouteHop(hop.endpoint, _layers(hop), route_token=hop.token.decode())
            for index, hop in enumerate(chosen.hops)
        ]
        head = WorkerClient(
            hops[0].endpoint,
            security=self._security,
            timeout=self._dial_timeout,
        )
        try:
            capability = await head.capability()
            said = (_fingerprint(chosen, capability), capability.layers, capability.model_layers)
            told = (chosen.fingerprint, hops[0].layers, chosen.model_units)
            if said[0] != told[0]:
                raise MeshnetError(
                    errors_pb2.REASON_RECIPE_MISMATCH,
                    f"expected recipe {told[0]} at {head.endpoint}, as the tracker says, "
                    f"got {said[0]}; ask the tracker again",
                )
            if said != told:
                raise MeshnetError(
                    errors_pb2.REASON_RANGE_MISMATCH,
                    f"expected layers {told[1]} of {told[2]} at {head.endpoint}, as the tracker "
                    f"says, got {said[1]} of {said[2]}; ask the tracker again",
                )
        except BaseException:
            await head.close()
            raise
        return Route([head], [capability], hops, chosen.fingerprint)

    async def _keep(self, session_id: str, ttl: float) -> None:
        while True:
            await asyncio.sleep(ttl / 3)
            # A tracker that is away may come back in time; one that forgot, forgot.
            with contextlib.suppress(ControlError):
                await self.tracker.touch_session(
                    tracker_pb2.TouchSessionRequest(session_id=session_id)
                )


def lane_sessions(workers: Iterable[tracker_pb2.WorkerStatus]) -> dict[tuple[str, str], int]:
    """How many sessions each lane (model, fingerprint) can have at once, however many it has."""
    lanes: dict[tuple[str, str], list[tracker_pb2.WorkerStatus]] = {}
    for worker in workers:
        one = worker.registration
        lane = lanes.setdefault((one.model_id, one.fingerprint), [])
        if worker.load.ready and worker.admission != tracker_pb2.ADMISSION_DARK:
            lane.append(worker)
    return {
        lane: sessions_at_once(members[0].registration.model_units, _rooms(members))
        if members
        else 0
        for lane, members in lanes.items()
    }


def model_sessions(answer: tracker_pb2.ListWorkersResponse) -> dict[str, int]:
    """How many sessions each model can have at once, however many it has.

    Over its lanes; where none of them is complete over the best mixture of two, changing between
    the same layers on all routes.
    """
    sessions: dict[str, int] = {}
    for (model_id, _), count in lane_sessions(answer.workers).items():
        sessions[model_id] = sessions.get(model_id, 0) + count
    mixed: dict[str, int] = {}
    for mixture in answer.mixtures:
        model_id = mixture.model_id
        if mixture.admission != tracker_pb2.ADMISSION_DARK and not sessions.get(model_id):
            mixed[model_id] = max(mixed.get(model_id, 0), _mixed_sessions(answer.workers, mixture))
    return sessions | mixed


def _mixed_sessions(
    workers: Iterable[tracker_pb2.WorkerStatus], mixture: tracker_pb2.MixtureStatus
) -> int:
    ready = [
        worker
        for worker in workers
        if worker.load.ready and worker.registration.model_id == mixture.model_id
    ]
    head, tail = (
        [worker for worker in ready if worker.registration.fingerprint == fingerprint]
        for fingerprint in (mixture.head_fingerprint, mixture.tail_fingerprint)
    )
    if not head or not tail:
        return 0
    units = head[0].registration.model_units
    most = 0
    for cut in {worker.registration.span.end for worker in head}:
        behind = [((b - cut, e - cut), room) for (b, e), room in _rooms(tail) if b >= cut]
        before = sessions_at_once(cut, _rooms(head))
        most = max(most, min(before, sessions_at_once(units - cut, behind)))
    return most


def _rooms(
    workers: Iterable[tracker_pb2.WorkerStatus],
) -> Iterator[tuple[tuple[int, int], int]]:
    """Each worker's span, and how many sessions it takes."""
    for worker in workers:
        one = worker.registration
        yield (one.span.begin, one.span.end), one.max_sessions


def _fingerprint(chosen: tracker_pb2.RouteResponse, head: Capability) -> str:
    """The fingerprint of the route's hops, as this head and the tracker's word of them make it."""
    own = head.recipe_fingerprint
    lanes = [lane for lane, _ in itertools.groupby(hop.fingerprint for hop in chosen.hops)]
    if len(lanes) == 2 and lanes[0] == own:
        return Mixture(shared_fingerprint(head.recipe), *lanes).fingerprint
    return own


def _layers(hop: tracker_pb2.RouteHop) -> LayerRange:
    return LayerRange(hop.span.begin, hop.span.end)


def _receipt(
    chosen: tracker_pb2.RouteResponse,
    hop: tracker_pb2.RouteHop,
    outcome: Outcome,
    error: MeshnetError | None,
    work: StageReceipt | None,
    work_id: str,
) -> tracker_pb2.Receipt:
    layers = _layers(hop)
    failed_here = False
    # No worker's fault is what nothing but another request helps against.
    if error is not None and error.recovery != errors_pb2.RECOVERY_FIX_REQUEST:
        # A line that broke without a stage's name is the client's own, to the head.
        lost = error.reason in (errors_pb2.REASON_PEER_LOST, errors_pb2.REASON_PEER_UNREACHABLE)
        at_head = error.stage is None and lost and layers.begin == 0
        failed_here = at_head or error.stage == (layers.begin, layers.end)
    verdict = outcome.value
    if outcome is Outcome.FAILED and not failed_here:
        verdict = tracker_pb2.OUTCOME_UNVERIFIED
    receipt = tracker_pb2.Receipt(
        session_id=chosen.session_id,
        epoch=chosen.epoch,
        work_id=work_id,
        worker_id=hop.worker_id,
        node_id=hop.node_id,
        span=hop.span,
        outcome=verdict,
        reason=error.reason_name if error is not None else "",
    )
    if work is not None:
        receipt.input_steps = work.prefill_tokens
        receipt.output_steps = work.decode_tokens
        receipt.busy_us = work.engine_us
        receipt.bytes_received = work.bytes_received
        receipt.bytes_sent = work.bytes_sent
    return receipt
