"""The tracker: registrations with leases, routes with epochs, a ledger of receipts.

    tracker = await Tracker.open(storage, TrackerOptions(), clock=SystemClock())
    await tracker.register(request)

Methods take and return the messages of proto/meshnet/control/v1/tracker.proto and raise
ControlError; meshnet.tracker_server puts them behind gRPC. What a method acknowledges is
committed. All that routing needs is also held in memory; where trackers share a database, each
follows the others' commits.

A worker's lease ends at the time that its last acknowledged heartbeat was promised, whether or
not the tracker lived through it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import secrets
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa

from meshnet import route_tokens, storage
from meshnet.certification import Certification, CertificationBook, Lane
from meshnet.clock import Clock
from meshnet.errors import ControlError, Reason
from meshnet.routing import (
    Candidate,
    Demand,
    LaneIndex,
    Seam,
    SelectedRoute,
    cheapest_mixed,
)
from meshnet.signing import SigningKey, TrustedKeys
from meshnet.storage import Decided, Extend, Insert, Purge, Reading, Storage, Upsert, Write
from meshnet.tasks import cancel
from proto.meshnet.control.v1 import tracker_pb2 as pb

__all__ = ["Tracker", "TrackerOptions"]

_IDENTIFIER: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_MAX_UNITS: Final = 1 << 16
_MAX_SEAMS: Final = 64
_MAX_LABELS: Final = 32
_MAX_LABEL_BYTES: Final = 256
_MAX_RECEIPTS: Final = 256
_MAX_SEAM_BYTES: Final = 1 << 40
_MAX_INT64: Final = 2**63 - 1
# Of so many lanes of a model that are not complete, each pair without a record is looked at.
_MAX_UNPROVEN: Final = 8
# The share of a new outcome in a worker's reliability.
_OUTCOME_WEIGHT: Final = 1 / 8
# A measurement that differs less from the one in use is noise.
_NOISE: Final = 1 / 8


@dataclass(frozen=True)
class TrackerOptions:
    """What the operator decides."""

    lease_ms: int = 10_000
    session_ttl_ms: int = 300_000
    max_session_ttl_ms: int = 3_600_000
    token_ttl_ms: int = 60_000
    # How often to look for what other trackers wrote, and for what ran out.
    follow_ms: int = 100
    sweep_ms: int = 1_000
    # How long the database keeps workers and sessions that are over. Receipts stay for good.
    keep_ms: int = 86_400_000
    purge_ms: int = 60_000
    # Routes lanes without a certification record. Shown in every answer that it affects.
    admit_dark: bool = False
    trusted: TrustedKeys = TrustedKeys({})  # noqa: RUF009 - immutable
    token_key: SigningKey | None = None


@dataclass
class _Worker:
    """A registration in memory."""

    registration: pb.Registration
    generation: int
    load: pb.Load
    expires_ms: int
    reliability: float
    seams: Mapping[str, Seam]
    # Of the database, when it was registered or last followed.
    revision: int = 0
    assigned: int = 0

    @property
    def lane(self) -> Lane:
        return Lane(self.registration.model_id, self.registration.fingerprint)


@dataclass
class _Session:
    """An open route session in memory."""

    route: pb.RouteResponse
    ttl_ms: int
    expires_ms: int


class Tracker:
    """One tracker. Made by open()."""

    def __init__(self, store: Storage, options: TrackerOptions, clock: Clock) -> None:
        self.options = options
        self._storage = store
        self._clock = clock
        self._book = CertificationBook(options.trusted)
        self._workers: dict[str, _Worker] = {}
        self._sessions: dict[str, _Session] = {}
        self._assigned: dict[str, int] = {}
        self._lanes: dict[str, dict[str, LaneIndex]] = {}
        self._following = asyncio.Lock()
        self._next_follow: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def open(cls, store: Storage, options: TrackerOptions, clock: Clock) -> Tracker:
        """Reads what is in the database and starts to follow it."""
        tracker = cls(store, options, clock)
        await tracker.follow()
        tracker._tasks.append(asyncio.create_task(tracker._sweep_forever()))
        tracker._tasks.append(asyncio.create_task(tracker._purge_forever()))
        if not store.exclusive:
            tracker._tasks.append(asyncio.create_task(tracker._follow_forever()))
        return tracker

    async def close(self) -> None:
        """Stops; the storage stays open."""
        await cancel(*self._tasks)

    # ---- Workers ----

    async def register(self, request: pb.RegisterRequest) -> pb.RegisterResponse:
        """Adds a worker or replaces its earlier registration."""
        registration = request.registration
        _check_registration(registration)
        _check_load(request.load)
        await self._catch_up()
        lane = self._lanes.get(registration.model_id, {}).get(registration.fingerprint)
        if lane is not None and lane.model_units != registration.model_units:
            raise ControlError(
                Reason.SPAN_INVALID,
                f"expected {lane.model_units} units in all, as the others of this fingerprint say, "
                f"got {registration.model_units}",
            )
        worker = _Worker(
            registration,
            secrets.randbits(62) + 1,
            request.load,
            self._clock.now_ms() + self.options.lease_ms,
            1.0,
            _seams(request.load.seams or registration.seams),
        )
        worker.revision, worker.reliability = await self._storage.decide(
            lambda reading: _register(reading, worker)
        )
        self._place(worker)
        admission, reason = self._admission(worker.lane)
        return pb.RegisterResponse(
            generation=worker.generation,
            lease_ms=self.options.lease_ms,
            admission=admission,
            admission_reason=reason,
        )

    async def heartbeat(self, request: pb.HeartbeatRequest) -> pb.HeartbeatResponse:
        """Prolongs a lease."""
        _check_load(request.load)
        now = self._clock.now_ms()
        worker = self._workers.get(request.worker_id)
        if worker is None or worker.generation != request.generation:
            await self._catch_up()
            worker = self._workers.get(request.worker_id)
        if worker is None or worker.generation != request.generation or worker.expires_ms <= now:
            raise ControlError(
                Reason.WORKER_UNKNOWN,
                f"no lease for worker {request.worker_id} under this generation; register it anew",
            )
        worker.load = request.load
        worker.expires_ms = now + self.options.lease_ms
        if request.load.seams:
            measured = _seams(request.load.seams)
            if _differ(worker.seams, measured):
                worker.seams = measured
        self._index(worker)
        await self._storage.write(
            [
                Extend(
                    storage.WORKERS,
                    {"worker_id": request.worker_id},
                    {"generation": request.generation},
                    {
                        "load": request.load.SerializeToString(),
                        "expires_ms": worker.expires_ms,
                    },
                )
            ],
            patient=True,
        )
        return pb.HeartbeatResponse(
            lease_ms=self.options.lease_ms, admission=self._admission(worker.lane)[0]
        )

    async def deregister(self, request: pb.DeregisterRequest) -> pb.DeregisterResponse:
        """Withdraws a worker."""
        await self._catch_up()
        now = self._clock.now_ms()
        worker = self._workers.get(request.worker_id)
        if (
            worker is None
            or worker.expires_ms <= now
            or request.generation not in (0, worker.generation)
        ):
            return pb.DeregisterResponse(found=False)
        self._forget(request.worker_id)
        withdrawn = Extend(
            storage.WORKERS,
            {"worker_id": request.worker_id},
            {"generation": worker.generation},
            # No heartbeat that another tracker takes at this moment finds this generation.
            {"generation": 0, "expires_ms": -now},
        )
        await self._storage.write([withdrawn])
        held = self._workers.get(request.worker_id)
        if held is not None and held.generation == worker.generation:  # followed meanwhile
            self._forget(request.worker_id)
        return pb.DeregisterResponse(found=True)

    def _place(self, worker: _Worker) -> None:
        """Takes a registration into memory, in place of an earlier one.

        One that is over is kept as well until the next sweep, so that nothing older follows it.
        """
        worker_id = worker.registration.worker_id
        held = self._workers.get(worker_id)
        if held is not None and held.revision > worker.revision:
            return
        over = worker.expires_ms <= self._clock.now_ms()
        if held is not None and (over or held.lane != worker.lane):
            self._forget(worker_id)
        self._workers[worker_id] = worker
        worker.assigned = self._assigned.get(worker_id, 0)
        if not over:
            self._index(worker)

    def _index(self, worker: _Worker) -> None:
        """Tells routing what is known of a worker."""
        registration, load = worker.registration, worker.load
        lanes = self._lanes.setdefault(registration.model_id, {})
        lane = lanes.get(registration.fingerprint)
        if lane is None:
            lane = lanes[registration.fingerprint] = LaneIndex(registration.model_units)
        lane.put(
            Candidate(
                registration.worker_id,
                registration.node_id,
                (registration.span.begin, registration.span.end),
                load.step_us or registration.step_us,
                registration.max_sessions,
                registration.access_latency_us,
                registration.access_bytes_per_second,
                worker.seams,
                max(load.open_sessions, worker.assigned),
                load.queued_steps,
                worker.reliability,
                worker.expires_ms,
                load.ready,
            )
        )

    def _forget(self, worker_id: str) -> None:
        worker = self._workers.pop(worker_id, None)
        if worker is None:
            return
        lanes = self._lanes.get(worker.registration.model_id, {})
        lane = lanes.get(worker.registration.fingerprint)
        if lane is None:  # was over when it came
            return
        lane.remove(worker_id)
        if not len(lane):
            del lanes[worker.registration.fingerprint]
            if not lanes:
                del self._lanes[worker.registration.model_id]

    def _admission(self, lane: Lane) -> tuple[pb.Admission, str]:
        refusal = self._book.refusal(lane, self._clock.now_ms())
        if not refusal:
            return pb.ADMISSION_CERTIFIED, ""
        if self.options.admit_dark:
            return pb.ADMISSION_DARK_ADMITTED, f"{refusal}; this tracker admits dark lanes"
        return pb.ADMISSION_DARK, refusal

    # ---- Routes ----

    async def select_route(self, request: pb.SelectRouteRequest) -> pb.RouteResponse:
        """The cheapest route now, as a session's first epoch."""
        _check_identifier("model_id", request.model_id)
        _check_identifier("fingerprint", request.fingerprint, empty=True)
        _check_identifier("session_id", request.session_id, empty=True)
        _check_range("seam_bytes", request.seam_bytes, 0, _MAX_SEAM_BYTES)
        await self._catch_up()
        session_id = request.session_id or secrets.token_hex(16)
        if self._session(session_id) is not None:
            await self._storage.write([])  # whoever opens it right now has committed before that
            open_session = self._session(session_id)
            if open_session is not None:
                return self._with_tokens(open_session)
        ttl = min(request.ttl_ms or self.options.session_ttl_ms, self.options.max_session_ttl_ms)
        now = self._clock.now_ms()
        demand = Demand(
            now,
            request.seam_bytes,
            frozenset(request.avoid_worker_ids),
            frozenset(request.avoid_node_ids),
        )
        route = self._choose(request.model_id, request.fingerprint, demand)
        route.session_id, route.ttl_ms = session_id, ttl
        return await self._record(_Session(route, ttl, now + ttl), 0)

    async def reroute(self, request: pb.RerouteRequest) -> pb.RouteResponse:
        """The next epoch of a session."""
        _check_range("seam_bytes", request.seam_bytes, 0, _MAX_SEAM_BYTES)
        await self._catch_up()
        session = self._session(request.session_id)
        if session is None:
            raise _no_session(request.session_id)
        if session.route.epoch != request.epoch:
            raise ControlError(
                Reason.STALE_EPOCH,
                f"expected epoch {session.route.epoch} of session {request.session_id}, "
                f"got {request.epoch}; ask for its route",
            )
        known = {hop.worker_id for hop in session.route.hops}
        failed = sorted(known & set(request.failed_worker_ids))
        if failed:
            await self._count([(worker_id, False) for worker_id in failed])
        now = self._clock.now_ms()
        self._assign(session.route, -1)  # its own load is no reason against a worker
        try:
            route = self._choose(
                session.route.model_id,
                session.route.fingerprint,
                Demand(now, request.seam_bytes, frozenset(request.failed_worker_ids)),
            )
        finally:
            self._assign(session.route, 1)
        route.session_id, route.ttl_ms = request.session_id, session.ttl_ms
        following = _Session(route, session.ttl_ms, now + session.ttl_ms)
        return await self._record(following, request.epoch)

    def _choose(self, model_id: str, fingerprint: str, demand: Demand) -> pb.RouteResponse:
        """The cheapest route of all admitted lanes of a model; over two only if no lane has one.

        Raises ControlError: SESSIONS_EXHAUSTED where there is one once others have ended, NO_ROUTE.
        """
        lanes = self._lanes.get(model_id, {})
        best: tuple[int, str, SelectedRoute] | None = None
        refusals = []
        full = False
        for name, lane in sorted(lanes.items()):
            if fingerprint and name != fingerprint:
                continue
            admission, reason = self._admission(Lane(model_id, name))
            if admission == pb.ADMISSION_DARK:
                refusals.append(f"fingerprint {name[:16]} is dark ({reason})")
                continue
            found = lane.cheapest(demand)
            if found is None:
                refusals.append(f"fingerprint {name[:16]}: {lane.coverage(demand)}")
                full = full or lane.is_full(demand)
            elif best is None or (found.total_us, name) < best[:2]:
                best = (found.total_us, name, found)
        if best is None:
            best, full_mixture = self._choose_mixed(model_id, fingerprint, demand, refusals)
            full = full or full_mixture
        if best is None:
            why = "; ".join(refusals) or "no worker is registered for it"
            if full:
                raise ControlError(
                    Reason.SESSIONS_EXHAUSTED,
                    f"expected workers of model {model_id} with room for a session, others have "
                    f"taken it all: {why}; ask again later",
                )
            raise ControlError(Reason.NO_ROUTE, f"no complete route for model {model_id}: {why}")
        total, name, selected = best
        hops = []
        for stage in selected.stages:
            registration = self._workers[stage.worker_id].registration
            hops.append(
                pb.RouteHop(
                    worker_id=stage.worker_id,
                    node_id=registration.node_id,
                    endpoint=registration.endpoint,
                    relay=registration.relay,
                    span=registration.span,
                    stage_us=stage.stage_us,
                    seam_us=stage.seam_us,
                    fingerprint=registration.fingerprint,
                )
            )
        return pb.RouteResponse(
            model_id=model_id,
            fingerprint=name,
            model_units=hops[-1].span.end,
            hops=hops,
            total_us=total,
            # The worst of a mixture's; none is dark.
            admission=max(
                self._admission(Lane(model_id, one))[0]
                for one in {name, *(hop.fingerprint for hop in hops)}
            ),
        )

    def _choose_mixed(
        self, model_id: str, fingerprint: str, demand: Demand, refusals: list[str]
    ) -> tuple[tuple[int, str, SelectedRoute] | None, bool]:
        """The cheapest route over two lanes that a record says fit together.

        And whether there is one once others have ended. To `refusals` it adds why not, for lanes
        that would make one together.
        """
        lanes = self._lanes.get(model_id, {})
        best: tuple[int, str, SelectedRoute] | None = None
        full = False
        for mixture in self._mixtures(model_id):
            if fingerprint not in ("", mixture.fingerprint):
                continue
            head, tail = lanes[mixture.head_fingerprint], lanes[mixture.tail_fingerprint]
            name = f"{mixture.head_fingerprint[:16]} before {mixture.tail_fingerprint[:16]}"
            if mixture.admission == pb.ADMISSION_DARK:
                refusals.append(f"fingerprints {name} are dark ({mixture.admission_reason})")
                continue
            found = cheapest_mixed(head, tail, demand)
            if found is None:
                refusals.append(f"fingerprints {name}: usable workers of both do not cover it")
                full = full or _completes(head, tail, demand)
            elif best is None or (found.total_us, mixture.fingerprint) < best[:2]:
                best = (found.total_us, mixture.fingerprint, found)
        return best, full

    def _mixtures(self, model_id: str) -> list[pb.MixtureStatus]:
        """Mixtures of lanes that have workers, in order; see ListWorkersResponse."""
        lanes = self._lanes.get(model_id, {})
        recorded = {
            (mixture.head, mixture.tail): mixture.fingerprint
            for mixture in self._book.mixtures(model_id)
            if mixture.head in lanes and mixture.tail in lanes
        }
        anybody = Demand(self._clock.now_ms())
        partial = [name for name, lane in sorted(lanes.items()) if not lane.is_full(anybody)]
        # What nobody has vouched for is only told of, and of many lanes not all.
        for pair in itertools.permutations(partial[:_MAX_UNPROVEN], 2):
            if _completes(lanes[pair[0]], lanes[pair[1]], anybody):
                recorded.setdefault(pair, "")
        return [
            self._mixture_status(model_id, *pair, fingerprint)
            for pair, fingerprint in sorted(recorded.items())
        ]

    def _mixture_status(
        self, model_id: str, head: str, tail: str, fingerprint: str
    ) -> pb.MixtureStatus:
        """What a mixture is admitted as: its record must hold, and so must both lanes'.

        Admitting dark lanes admits no mixture: that two fit is evidence of its own.
        """
        found = pb.MixtureStatus(
            model_id=model_id,
            fingerprint=fingerprint,
            head_fingerprint=head,
            tail_fingerprint=tail,
        )
        reason = (
            self._book.refusal(Lane(model_id, fingerprint), self._clock.now_ms())
            if fingerprint
            else "no certification record says that these two lanes fit together in this order; "
            "`meshnet certify --mixed` measures it"
        )
        admissions = [pb.ADMISSION_DARK if reason else pb.ADMISSION_CERTIFIED]
        reasons = [reason]
        for part in (head, tail):
            admission, why = self._admission(Lane(model_id, part))
            admissions.append(admission)
            reasons.append(f"fingerprint {part[:16]}: {why}" if why else "")
        # The worst of all, and the reasons for that.
        order = (pb.ADMISSION_DARK, pb.ADMISSION_DARK_ADMITTED, pb.ADMISSION_CERTIFIED)
        found.admission = min(admissions, key=order.index)
        found.admission_reason = "; ".join(
            reason
            for reason, admission in zip(reasons, admissions, strict=True)
            if reason and admission == found.admission
        )
        return found

    async def _record(self, session: _Session, before: int) -> pb.RouteResponse:
        """Commits the epoch behind `before`; another's, if that was first."""
        session_id = session.route.session_id
        self._adopt(session)
        now = self._clock.now_ms()
        try:
            kept = await self._storage.decide(
                lambda reading: _record(reading, session, before, now)
            )
        except ControlError:
            if self._sessions.get(session_id) is session:
                self._drop_session(session_id)
            raise
        if self._sessions.get(session_id) is session:
            self._adopt(kept)
        return self._with_tokens(kept)

    def _with_tokens(self, session: _Session) -> pb.RouteResponse:
        route = pb.RouteResponse()
        route.CopyFrom(session.route)
        if self.options.token_key is not None:
            until = self._clock.now_ms() + self.options.token_ttl_ms
            for index, hop in enumerate(route.hops):
                claim = route_tokens.RouteClaim(
                    route.session_id, route.epoch, index, hop.worker_id, until
                )
                hop.token = route_tokens.issue(self.options.token_key, claim)
        return route

    async def touch_session(self, request: pb.TouchSessionRequest) -> pb.TouchSessionResponse:
        """Prolongs a session."""
        await self._catch_up()
        session = self._session(request.session_id)
        if session is None:
            raise _no_session(request.session_id)
        now = self._clock.now_ms()
        session.expires_ms = now + session.ttl_ms
        await self._storage.decide(
            lambda reading: _prolong(reading, request.session_id, now, session.ttl_ms)
        )
        return pb.TouchSessionResponse(ttl_ms=session.ttl_ms)

    async def close_session(self, request: pb.CloseSessionRequest) -> pb.CloseSessionResponse:
        """Ends a session."""
        await self._catch_up()
        if self._session(request.session_id) is None:
            return pb.CloseSessionResponse(found=False)
        self._drop_session(request.session_id)
        closed = {"expires_ms": -self._clock.now_ms()}
        key = {"session_id": request.session_id}
        await self._storage.write([Extend(storage.SESSIONS, key, {}, closed)])
        return pb.CloseSessionResponse(found=True)

    def _session(self, session_id: str) -> _Session | None:
        session = self._sessions.get(session_id)
        if session is None or session.expires_ms <= self._clock.now_ms():
            return None
        return session

    def _adopt(self, session: _Session) -> None:
        self._drop_session(session.route.session_id)
        self._sessions[session.route.session_id] = session
        self._assign(session.route, 1)

    def _drop_session(self, session_id: str) -> None:
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._assign(session.route, -1)

    def _assign(self, route: pb.RouteResponse, sessions: int) -> None:
        """Counts a route's session among its workers' load."""
        for hop in route.hops:
            count = self._assigned.get(hop.worker_id, 0) + sessions
            if count:
                self._assigned[hop.worker_id] = count
            else:
                self._assigned.pop(hop.worker_id, None)
            worker = self._workers.get(hop.worker_id)
            if worker is not None:
                worker.assigned = count
                # The worker says so itself with its next heartbeat; it is not full until then.
                worker.load.open_sessions -= min(worker.load.open_sessions, max(0, -sessions))
                self._index(worker)

    # ---- Ledger ----

    async def report_outcome(self, request: pb.ReportOutcomeRequest) -> pb.ReportOutcomeResponse:
        """Records receipts, each once."""
        if len(request.receipts) > _MAX_RECEIPTS:
            raise ControlError(
                Reason.FIELD_OUT_OF_BOUNDS,
                f"expected at most {_MAX_RECEIPTS} receipts a call, got {len(request.receipts)}",
            )
        wanted: dict[tuple[Any, ...], pb.Receipt] = {}
        for receipt in request.receipts:
            _check_receipt(receipt)
            if wanted.setdefault(_receipt_key(receipt), receipt) != receipt:
                raise _conflict(receipt)
        await self._catch_up()
        recorded, reliability = await self._storage.decide(
            lambda reading: _add_receipts(reading, wanted)
        )
        self._rely(reliability)
        return pb.ReportOutcomeResponse(
            recorded=recorded, repeated_before=len(request.receipts) - recorded
        )

    async def _count(self, outcomes: Sequence[tuple[str, bool]]) -> None:
        """Takes outcomes into the reliability of workers."""

        def rule(reading: Reading) -> Decided[Mapping[str, float]]:
            return _count(reading, outcomes)

        self._rely(await self._storage.decide(rule))

    def _rely(self, reliability: Mapping[str, float]) -> None:
        """Tells routing what outcomes made of workers."""
        for worker_id, value in reliability.items():
            worker = self._workers.get(worker_id)
            if worker is not None and worker.expires_ms > self._clock.now_ms():
                worker.reliability = value
                self._index(worker)

    async def list_receipts(self, request: pb.ListReceiptsRequest) -> pb.ListReceiptsResponse:
        """A page of the ledger, in the order of the keys."""
        size = request.page_size or 1000
        if not 1 <= size <= 1000:
            raise ControlError(
                Reason.FIELD_OUT_OF_BOUNDS, f"expected a page size of 1 to 1000, got {size}"
            )
        table = storage.RECEIPTS
        columns = (table.c.session_id, table.c.epoch, table.c.work_id, table.c.worker_id)
        query = sa.select(table.c.receipt).order_by(*columns).limit(size)
        if request.session_id:
            query = query.where(table.c.session_id == request.session_id)
        if request.page_token:
            query = query.where(sa.tuple_(*columns) > _decode_page(request.page_token))
        rows = await self._storage.query(query)
        receipts = [pb.Receipt.FromString(row["receipt"]) for row in rows]
        following = ""
        if len(receipts) == size:
            following = "/".join(str(part) for part in _receipt_key(receipts[-1]))
        return pb.ListReceiptsResponse(receipts=receipts, next_page_token=following)

    # ---- Certification, status ----

    async def put_certification(
        self, request: pb.PutCertificationRequest
    ) -> pb.PutCertificationResponse:
        """Takes up a certification record."""
        found = self._book.check(request.record)
        row = {"record_id": found.record_id, "record": request.record}
        await self._storage.write([Insert(storage.CERTIFICATIONS, row)])
        self._book.add(found)
        return pb.PutCertificationResponse(record_id=found.record_id)

    async def list_workers(self, request: pb.ListWorkersRequest) -> pb.ListWorkersResponse:
        """Workers with a lease: all, or those that are asked for."""
        _check_range("max_nodes", request.max_nodes, 0, _MAX_UNITS)
        await self._catch_up()
        now = self._clock.now_ms()
        answer = pb.ListWorkersResponse()
        for worker in self._wanted(request, now):
            admission, reason = self._admission(worker.lane)
            sessions = max(worker.load.open_sessions, worker.assigned)
            unroutable = ""
            if admission == pb.ADMISSION_DARK:
                unroutable = f"dark: {reason}"
            elif not worker.load.ready:
                unroutable = "not ready"
            elif sessions >= worker.registration.max_sessions:
                unroutable = "full"
            answer.workers.add(
                registration=worker.registration,
                load=worker.load,
                admission=admission,
                lease_left_ms=worker.expires_ms - now,
                assigned_sessions=worker.assigned,
                reliability=worker.reliability,
                unroutable=unroutable,
            )
        for model_id in sorted({worker.registration.model_id for worker in answer.workers}):
            answer.mixtures.extend(self._mixtures(model_id))
        return answer

    def _wanted(self, request: pb.ListWorkersRequest, now: int) -> list[_Worker]:
        """The workers that a request asks for, by their ids."""
        beside = request.beside if request.HasField("beside") else None
        found = [
            worker
            for worker_id, worker in sorted(self._workers.items())
            if worker.expires_ms > now
            and request.model_id in ("", worker.registration.model_id)
            and request.fingerprint in ("", worker.registration.fingerprint)
            and (
                not request.other_than_node_id
                or worker.registration.node_id != request.other_than_node_id
            )
            and (beside is None or _is_beside(worker.registration, beside))
        ]
        if not request.max_nodes:
            return found
        first_of_node = {worker.registration.node_id: worker for worker in reversed(found)}
        nodes = sorted(first_of_node)
        count = min(request.max_nodes, len(nodes))
        # Spread over all, so that no node is left out by all for its name.
        begin = zlib.crc32(request.other_than_node_id.encode()) % max(len(nodes), 1)
        chosen = [nodes[(begin + i * len(nodes) // count) % len(nodes)] for i in range(count)]
        return [first_of_node[node] for node in sorted(chosen)]

    async def get_status(self, _request: pb.GetStatusRequest) -> pb.GetStatusResponse:
        """Counts and settings."""
        await self._catch_up()
        count = await self._storage.query(
            sa.select(sa.func.count().label("count")).select_from(storage.RECEIPTS)
        )
        workers, sessions = self.counts()
        token_key = self.options.token_key
        return pb.GetStatusResponse(
            tracker_id=self._storage.tracker_id,
            workers=workers,
            open_sessions=sessions,
            receipts=count[0]["count"],
            admits_dark=self.options.admit_dark,
            trusted_keys=len(self.options.trusted),
            certifications=len(self._book),
            database=self._storage.name,
            time_ms=self._clock.now_ms(),
            token_public_key="" if token_key is None else token_key.public_pem(),
        )

    def counts(self) -> tuple[int, int]:
        """Workers with a lease, and open sessions."""
        now = self._clock.now_ms()
        return (
            sum(worker.expires_ms > now for worker in self._workers.values()),
            sum(session.expires_ms > now for session in self._sessions.values()),
        )

    # ---- Following the database, and time ----

    async def _catch_up(self) -> None:
        """What others have committed until now; nobody else writes an exclusive database."""
        if not self._storage.exclusive:
            await self.follow()

    async def follow(self) -> None:
        """Takes up what other trackers have committed by now."""
        # One run serves all that wait for it to begin.
        if self._next_follow is None:
            self._next_follow = asyncio.create_task(self._follow())
        await asyncio.shield(self._next_follow)

    async def _follow(self) -> None:
        async with self._following:
            self._next_follow = None
            changes = await self._storage.changes()
            for row in changes.certifications:
                try:
                    found: Certification = self._book.check(row["record"])
                except ControlError:
                    continue  # of a key that this tracker does not trust
                self._book.add(found)
            for row in changes.workers:
                self._follow_worker(row)
            self._follow_sessions(changes.sessions, changes.epochs)

    def _follow_worker(self, row: Mapping[str, Any]) -> None:
        load = pb.Load.FromString(row["load"])
        held = self._workers.get(row["worker_id"])
        if held is not None and held.generation == row["generation"]:
            registration = held.registration
        else:
            registration = pb.Registration.FromString(row["registration"])
        seams = _seams(load.seams or registration.seams)
        worker = _Worker(
            registration,
            row["generation"],
            load,
            row["expires_ms"],
            row["reliability"],
            seams,
            row["revision"],
        )
        if held is not None and held.generation == worker.generation:
            if not _differ(held.seams, seams):
                worker.seams = held.seams
            worker.expires_ms = max(worker.expires_ms, held.expires_ms)
        self._place(worker)

    def _follow_sessions(
        self, sessions: Sequence[Mapping[str, Any]], epochs: Sequence[Mapping[str, Any]]
    ) -> None:
        routes = {
            (row["session_id"], row["epoch"]): pb.RouteResponse.FromString(row["route"])
            for row in epochs
        }
        now = self._clock.now_ms()
        for row in sessions:
            session_id = row["session_id"]
            held = self._sessions.get(session_id)
            route = routes.get((session_id, row["epoch"]))
            if route is None and held is not None and held.route.epoch == row["epoch"]:
                route = held.route
            if row["expires_ms"] <= now or route is None:
                self._drop_session(session_id)
            else:
                self._adopt(_Session(route, row["ttl_ms"], row["expires_ms"]))

    async def _follow_forever(self) -> None:
        while True:
            await self._clock.sleep_ms(self.options.follow_ms)
            with contextlib.suppress(ControlError):  # the database may come back
                await self.follow()

    async def _sweep_forever(self) -> None:
        while True:
            await self._clock.sleep_ms(self.options.sweep_ms)
            now = self._clock.now_ms()
            for worker_id in [w for w, s in self._workers.items() if s.expires_ms <= now]:
                self._forget(worker_id)
            for session_id in [k for k, s in self._sessions.items() if s.expires_ms <= now]:
                self._drop_session(session_id)

    async def _purge_forever(self) -> None:
        while True:
            await self._clock.sleep_ms(self.options.purge_ms)
            since = self._clock.now_ms() - self.options.keep_ms
            with contextlib.suppress(ControlError):  # the database may come back
                await self._storage.write(
                    [Purge(storage.WORKERS, since), Purge(storage.SESSIONS, since)]
                )


# ---- Rules: what is decided inside of a transaction ----


def _register(reading: Reading, worker: _Worker) -> Decided[tuple[int, float]]:
    """Revision and reliability of the new registration: earlier work counts on."""
    worker_id = worker.registration.worker_id
    held = reading.rows(storage.WORKERS, [{"worker_id": worker_id}])
    reliability = held[0]["reliability"] if held else 1.0
    row = {
        "worker_id": worker_id,
        "generation": worker.generation,
        "registration": worker.registration.SerializeToString(),
        "load": worker.load.SerializeToString(),
        "expires_ms": worker.expires_ms,
        "reliability": reliability,
    }
    return Decided((reading.revision, reliability), [Upsert(storage.WORKERS, row)])


def _record(reading: Reading, session: _Session, before: int, now: int) -> Decided[_Session]:
    """The session with its new epoch; with that which another opened first.

    `before` is the epoch that the new one follows; 0: the session is to be opened, and goes on
    counting where an earlier one of the same id ended.
    """
    session_id = session.route.session_id
    held = reading.rows(storage.SESSIONS, [{"session_id": session_id}])
    newest = held[0]["epoch"] if held else 0
    is_open = bool(held) and held[0]["expires_ms"] > now
    if before and not is_open:
        raise _no_session(session_id)
    if is_open and newest != before:
        (row,) = reading.rows(storage.EPOCHS, [{"session_id": session_id, "epoch": newest}])
        kept = pb.RouteResponse.FromString(row["route"])
        return Decided(_Session(kept, held[0]["ttl_ms"], held[0]["expires_ms"]))
    route = pb.RouteResponse()
    route.CopyFrom(session.route)
    route.epoch = newest + 1
    lasting = {"ttl_ms": session.ttl_ms, "expires_ms": session.expires_ms}
    key = {"session_id": session_id, "epoch": route.epoch}
    return Decided(
        _Session(route, session.ttl_ms, session.expires_ms),
        [
            Upsert(storage.SESSIONS, key | lasting),
            Upsert(storage.EPOCHS, key | {"route": route.SerializeToString(deterministic=True)}),
        ],
    )


def _prolong(reading: Reading, session_id: str, now: int, ttl_ms: int) -> Decided[None]:
    key = {"session_id": session_id}
    held = reading.rows(storage.SESSIONS, [key])
    if not held or held[0]["expires_ms"] <= now:
        raise _no_session(session_id)
    return Decided(None, [Extend(storage.SESSIONS, key, {}, {"expires_ms": now + ttl_ms})])


def _add_receipts(
    reading: Reading, wanted: Mapping[tuple[Any, ...], pb.Receipt]
) -> Decided[tuple[int, Mapping[str, float]]]:
    """How many are new, and what that makes of their workers. Raises ControlError: a conflict."""
    rows = {key: _receipt_row(receipt) for key, receipt in wanted.items()}
    for row in reading.rows(storage.RECEIPTS, list(rows.values())):
        held = pb.Receipt.FromString(row["receipt"])
        if held != wanted[_receipt_key(held)]:
            raise _conflict(held)
        del rows[_receipt_key(held)]
    counted = _count(
        reading,
        [
            (wanted[key].worker_id, wanted[key].outcome == pb.OUTCOME_COMPLETED)
            for key in rows
            if wanted[key].outcome in (pb.OUTCOME_COMPLETED, pb.OUTCOME_FAILED)
        ],
    )
    added = [Insert(storage.RECEIPTS, row) for row in rows.values()]
    return Decided((len(rows), counted.answer), [*added, *counted.writes])


def _count(reading: Reading, outcomes: Sequence[tuple[str, bool]]) -> Decided[Mapping[str, float]]:
    """Reliability of the workers with these outcomes, one after the other."""
    keys = [{"worker_id": worker_id} for worker_id, _ in outcomes]
    found = {
        row["worker_id"]: row["reliability"]
        for row in (reading.rows(storage.WORKERS, keys) if keys else ())
    }
    for worker_id, succeeded in outcomes:
        if worker_id in found:
            found[worker_id] += (float(succeeded) - found[worker_id]) * _OUTCOME_WEIGHT
    writes: list[Write] = [
        Extend(storage.WORKERS, {"worker_id": worker_id}, {}, {"reliability": value})
        for worker_id, value in sorted(found.items())
    ]
    return Decided(found, writes)


def _receipt_key(receipt: pb.Receipt) -> tuple[str, int, str, str]:
    return (receipt.session_id, receipt.epoch, receipt.work_id, receipt.worker_id)


def _receipt_row(receipt: pb.Receipt) -> dict[str, Any]:
    return {
        "session_id": receipt.session_id,
        "epoch": receipt.epoch,
        "work_id": receipt.work_id,
        "worker_id": receipt.worker_id,
        "outcome": int(receipt.outcome),
        "receipt": receipt.SerializeToString(deterministic=True),
    }


def _decode_page(token: str) -> tuple[str, int, str, str]:
    parts = token.split("/")
    if len(parts) != 4 or not parts[1].isdecimal():
        raise ControlError(
            Reason.FIELD_OUT_OF_BOUNDS, f"expected the page token of an answer, got {token!r}"
        )
    return (parts[0], int(parts[1]), parts[2], parts[3])


def _conflict(receipt: pb.Receipt) -> ControlError:
    return ControlError(
        Reason.RECEIPT_CONFLICT,
        "another receipt is recorded for session, epoch, work and worker "
        + "/".join(str(part) for part in _receipt_key(receipt)),
    )


def _no_session(session_id: str) -> ControlError:
    return ControlError(
        Reason.SESSION_UNKNOWN,
        f"no open session {session_id}: it was closed or ran out; select a route anew",
    )


def _completes(head: LaneIndex, tail: LaneIndex, demand: Demand) -> bool:
    """Whether workers of both, first the one's and then the other's, cover all units.

    As if they had room for more sessions than they have.
    """
    units = head.model_units
    changes = head.reached(demand, were_empty=True) - {0, units}
    return tail.model_units == units and units in tail.reached(demand, changes, were_empty=True)


def _is_beside(registration: pb.Registration, span: pb.Span) -> bool:
    """Whether a worker could be next to a span of its model on a route, at the way back, too."""
    begin, end, units = registration.span.begin, registration.span.end, registration.model_units
    closes = (span.begin == 0 and end == units) or (span.end == units and begin == 0)
    return end == span.begin or begin == span.end or closes


def _seams(measurements: Iterable[pb.SeamMeasurement]) -> Mapping[str, Seam]:
    return {
        measurement.peer_node_id: Seam(measurement.round_trip_us, measurement.bytes_per_second)
        for measurement in measurements
    }


def _differ(held: Mapping[str, Seam], measured: Mapping[str, Seam]) -> bool:
    """Whether a new set of measurements says more than noise."""
    if held.keys() != measured.keys():
        return True
    for node, seam in measured.items():
        old = held[node]
        if abs(seam.round_trip_us - old.round_trip_us) > old.round_trip_us * _NOISE:
            return True
        if abs(seam.bytes_per_second - old.bytes_per_second) > old.bytes_per_second * _NOISE:
            return True
    return False


# ---- What messages must be like ----


def _check_identifier(name: str, value: str, *, empty: bool = False) -> None:
    if not (empty and not value) and not _IDENTIFIER.fullmatch(value):
        raise ControlError(
            Reason.FIELD_OUT_OF_BOUNDS,
            f"expected {name} of 1 to 128 characters [A-Za-z0-9._:-], got {value[:140]!r}",
        )


def _check_range(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ControlError(
            Reason.FIELD_OUT_OF_BOUNDS, f"expected {name} of {least} to {most}, got {value}"
        )


def _check_span(span: pb.Span, units: int) -> None:
    if not 0 <= span.begin < span.end <= units:
        raise ControlError(
            Reason.SPAN_INVALID,
            f"expected a span that is not empty within 0 to {units}, "
            f"got [{span.begin}, {span.end})",
        )


def _check_registration(registration: pb.Registration) -> None:
    for name in ("worker_id", "node_id", "model_id", "fingerprint"):
        _check_identifier(name, getattr(registration, name))
    _check_range("endpoint's length", len(registration.endpoint), 1, 255)
    _check_range("relay's length", len(registration.relay), 0, 255)
    _check_range("model_units", registration.model_units, 1, _MAX_UNITS)
    _check_span(registration.span, registration.model_units)
    _check_range("max_sessions", registration.max_sessions, 1, 1 << 20)
    _check_range("step_us", registration.step_us, 0, 1 << 40)
    _check_range("access_bytes_per_second", registration.access_bytes_per_second, 0, _MAX_INT64)
    _check_range("the number of labels", len(registration.labels), 0, _MAX_LABELS)
    for pair in registration.labels.items():
        for text in pair:
            _check_range("a label's length", len(text.encode()), 0, _MAX_LABEL_BYTES)
    _check_seams(registration.seams)


def _check_load(load: pb.Load) -> None:
    _check_range("queued_steps", load.queued_steps, 0, 1 << 20)
    _check_range("step_us", load.step_us, 0, 1 << 40)
    _check_seams(load.seams)


def _check_seams(seams: Sequence[pb.SeamMeasurement]) -> None:
    _check_range("the number of seams", len(seams), 0, _MAX_SEAMS)
    for seam in seams:
        _check_identifier("peer_node_id", seam.peer_node_id)
        _check_range("bytes_per_second", seam.bytes_per_second, 0, _MAX_INT64)


def _check_receipt(receipt: pb.Receipt) -> None:
    for name in ("session_id", "work_id", "worker_id", "node_id"):
        _check_identifier(name, getattr(receipt, name))
    _check_range("epoch", receipt.epoch, 1, _MAX_INT64)
    if receipt.outcome == pb.OUTCOME_UNSPECIFIED or receipt.outcome not in pb.Outcome.values():
        raise ControlError(
            Reason.FIELD_OUT_OF_BOUNDS, f"expected a known outcome, got {receipt.outcome}"
        )
    _check_range("reason's length", len(receipt.reason), 0, 256)
