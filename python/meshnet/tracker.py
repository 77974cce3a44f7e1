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
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa

from meshnet import route_tokens, storage
from meshnet.certification import Certification, CertificationBook, Lane
from meshnet.clock import Clock
from meshnet.errors import ControlError, Reason
from meshnet.routing import Candidate, Demand, LaneIndex, Seam, SelectedRoute
from meshnet.signing import SigningKey, TrustedKeys
from meshnet.storage import Extend, Insert, Storage, Upsert
from proto.meshnet.control.v1 import tracker_pb2 as pb

__all__ = ["Tracker", "TrackerOptions"]

_IDENTIFIER: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_MAX_UNITS: Final = 1 << 16
_MAX_SEAMS: Final = 64
_MAX_LABELS: Final = 32
_MAX_LABEL_BYTES: Final = 256
_MAX_RECEIPTS: Final = 256
_MAX_INT64: Final = 2**63 - 1
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
        self._reliability: dict[str, float] = {}
        self._lanes: dict[str, dict[str, LaneIndex]] = {}
        self._following = asyncio.Lock()
        self._ledger = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def open(cls, store: Storage, options: TrackerOptions, clock: Clock) -> Tracker:
        """Reads what is in the database and starts to follow it."""
        tracker = cls(store, options, clock)
        await tracker.follow()
        tracker._tasks.append(asyncio.create_task(tracker._sweep_forever()))
        if not store.exclusive:
            tracker._tasks.append(asyncio.create_task(tracker._follow_forever()))
        return tracker

    async def close(self) -> None:
        """Stops; the storage stays open."""
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

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
            self._reliability.get(registration.worker_id, 1.0),
            _seams(request.load.seams or registration.seams),
        )
        self._place(worker)
        await self._storage.write([_worker_row(worker)])
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
            ]
        )
        return pb.HeartbeatResponse(
            lease_ms=self.options.lease_ms, admission=self._admission(worker.lane)[0]
        )

    async def deregister(self, request: pb.DeregisterRequest) -> pb.DeregisterResponse:
        """Withdraws a worker."""
        await self._catch_up()
        worker = self._workers.get(request.worker_id)
        if worker is None or request.generation not in (0, worker.generation):
            return pb.DeregisterResponse(found=False)
        self._forget(request.worker_id)
        withdrawn = Extend(
            storage.WORKERS,
            {"worker_id": request.worker_id},
            {"generation": worker.generation},
            {"expires_ms": 0},
        )
        await self._storage.write([withdrawn])
        return pb.DeregisterResponse(found=worker.expires_ms > self._clock.now_ms())

    def _place(self, worker: _Worker) -> None:
        """Takes a registration into memory, in place of an earlier one."""
        worker_id = worker.registration.worker_id
        old = self._workers.get(worker_id)
        if old is not None and old.lane != worker.lane:
            self._forget(worker_id)
        self._workers[worker_id] = worker
        worker.assigned = self._assigned.get(worker_id, 0)
        self._reliability[worker_id] = worker.reliability
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
        lanes = self._lanes[worker.registration.model_id]
        lane = lanes[worker.registration.fingerprint]
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
        await self._catch_up()
        session_id = request.session_id or secrets.token_hex(16)
        open_session = self._session(session_id)
        if open_session is not None:
            return self._with_tokens(open_session)
        ttl = min(request.ttl_ms or self.options.session_ttl_ms, self.options.max_session_ttl_ms)
        demand = Demand(
            self._clock.now_ms(),
            request.seam_bytes,
            frozenset(request.avoid_worker_ids),
            frozenset(request.avoid_node_ids),
        )
        route = self._choose(request.model_id, request.fingerprint, demand)
        route.session_id, route.epoch, route.ttl_ms = session_id, 1, ttl
        return await self._record(_Session(route, ttl, self._clock.now_ms() + ttl))

    async def reroute(self, request: pb.RerouteRequest) -> pb.RouteResponse:
        """The next epoch of a session."""
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
        self._count(failed, succeeded=False)
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
            if failed:
                await self._storage.write(self._reliability_rows(failed))
        route.session_id, route.epoch = request.session_id, request.epoch + 1
        route.ttl_ms = session.ttl_ms
        return await self._record(_Session(route, session.ttl_ms, now + session.ttl_ms))

    def _choose(self, model_id: str, fingerprint: str, demand: Demand) -> pb.RouteResponse:
        """The cheapest route of all admitted lanes of a model. Raises ControlError (NO_ROUTE)."""
        lanes = self._lanes.get(model_id, {})
        best: tuple[int, str, SelectedRoute] | None = None
        refusals = []
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
            elif best is None or (found.total_us, name) < best[:2]:
                best = (found.total_us, name, found)
        if best is None:
            why = "; ".join(refusals) or "no worker is registered for it"
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
                )
            )
        return pb.RouteResponse(
            model_id=model_id,
            fingerprint=name,
            model_units=lanes[name].model_units,
            hops=hops,
            total_us=total,
            admission=self._admission(Lane(model_id, name))[0],
        )

    async def _record(self, session: _Session) -> pb.RouteResponse:
        """Commits a new epoch; another tracker's, if that was first."""
        route = session.route
        self._adopt(session)
        key = {"session_id": route.session_id, "epoch": route.epoch}
        content = route.SerializeToString(deterministic=True)
        try:
            await self._storage.write(
                [
                    _session_row(session),
                    Insert(storage.EPOCHS, key | {"route": content}),
                ]
            )
        except ControlError:
            self._drop_session(route.session_id)
            raise
        if not self._storage.exclusive:
            (row,) = await self._storage.read(storage.EPOCHS, [key])
            if row["route"] != content:
                kept = pb.RouteResponse.FromString(row["route"])
                self._adopt(_Session(kept, session.ttl_ms, session.expires_ms))
        held = self._session(route.session_id)
        return self._with_tokens(held or session)

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
        session.expires_ms = self._clock.now_ms() + session.ttl_ms
        await self._storage.write([_session_row(session)])
        return pb.TouchSessionResponse(ttl_ms=session.ttl_ms)

    async def close_session(self, request: pb.CloseSessionRequest) -> pb.CloseSessionResponse:
        """Ends a session."""
        await self._catch_up()
        session = self._session(request.session_id)
        if session is None:
            return pb.CloseSessionResponse(found=False)
        self._drop_session(request.session_id)
        session.expires_ms = 0
        await self._storage.write([_session_row(session)])
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
        async with self._ledger:
            await self._catch_up()
            keys = [_receipt_row(receipt) for receipt in wanted.values()]
            before = {
                _receipt_key(receipt): receipt
                for row in await self._storage.read(storage.RECEIPTS, keys)
                for receipt in (pb.Receipt.FromString(row["receipt"]),)
            }
            for key, held in before.items():
                if held != wanted[key]:
                    raise _conflict(held)
            new = [receipt for key, receipt in wanted.items() if key not in before]
            completed = [r.worker_id for r in new if r.outcome == pb.OUTCOME_COMPLETED]
            failed = [r.worker_id for r in new if r.outcome == pb.OUTCOME_FAILED]
            self._count(completed, succeeded=True)
            self._count(failed, succeeded=False)
            writes: list[Any] = [Insert(storage.RECEIPTS, _receipt_row(r)) for r in new]
            await self._storage.write([*writes, *self._reliability_rows([*completed, *failed])])
            if new and not self._storage.exclusive:
                rows = await self._storage.read(storage.RECEIPTS, [_receipt_row(r) for r in new])
                for receipt, row in zip(new, rows, strict=True):
                    if pb.Receipt.FromString(row["receipt"]) != receipt:
                        raise _conflict(receipt)
        return pb.ReportOutcomeResponse(
            recorded=len(new), repeated_before=len(request.receipts) - len(new)
        )

    def _count(self, worker_ids: Iterable[str], *, succeeded: bool) -> None:
        """Takes outcomes into the reliability of workers."""
        for worker_id in worker_ids:
            held = self._reliability.get(worker_id, 1.0)
            self._reliability[worker_id] = held + (float(succeeded) - held) * _OUTCOME_WEIGHT
            worker = self._workers.get(worker_id)
            if worker is not None:
                worker.reliability = self._reliability[worker_id]
                self._index(worker)

    def _reliability_rows(self, worker_ids: Iterable[str]) -> list[Extend]:
        return [
            Extend(
                storage.WORKERS,
                {"worker_id": worker_id},
                {},
                {"reliability": self._reliability[worker_id]},
            )
            for worker_id in sorted(set(worker_ids))
            if worker_id in self._reliability
        ]

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
        """All workers with a lease."""
        await self._catch_up()
        now = self._clock.now_ms()
        answer = pb.ListWorkersResponse()
        for worker_id in sorted(self._workers):
            worker = self._workers[worker_id]
            if worker.expires_ms <= now:
                continue
            if request.model_id and worker.registration.model_id != request.model_id:
                continue
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
        return answer

    async def get_status(self, _request: pb.GetStatusRequest) -> pb.GetStatusResponse:
        """Counts and settings."""
        await self._catch_up()
        count = await self._storage.query(
            sa.select(sa.func.count().label("count")).select_from(storage.RECEIPTS)
        )
        workers, sessions = self.counts()
        return pb.GetStatusResponse(
            tracker_id=self._storage.tracker_id,
            workers=workers,
            open_sessions=sessions,
            receipts=count[0]["count"],
            admits_dark=self.options.admit_dark,
            trusted_keys=len(self.options.trusted),
            certifications=len(self._book),
            database=self._storage.name,
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
        """Takes up what other trackers wrote."""
        async with self._following:
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
        worker_id = row["worker_id"]
        self._reliability[worker_id] = row["reliability"]
        if row["expires_ms"] <= self._clock.now_ms():
            self._forget(worker_id)
            return
        registration = pb.Registration.FromString(row["registration"])
        load = pb.Load.FromString(row["load"])
        seams = _seams(load.seams or registration.seams)
        worker = _Worker(
            registration, row["generation"], load, row["expires_ms"], row["reliability"], seams
        )
        held = self._workers.get(worker_id)
        if held is not None and held.generation == worker.generation:
            if not _differ(held.seams, seams):
                worker.seams = held.seams
            worker.expires_ms = max(worker.expires_ms, held.expires_ms)
        self._place(worker)

    def _follow_sessions(
        self, sessions: Sequence[Mapping[str, Any]], epochs: Sequence[Mapping[str, Any]]
    ) -> None:
        routes = {row["session_id"]: pb.RouteResponse.FromString(row["route"]) for row in epochs}
        now = self._clock.now_ms()
        for row in sessions:
            session_id = row["session_id"]
            held = self._sessions.get(session_id)
            route = routes.get(session_id) or (held.route if held is not None else None)
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


def _worker_row(worker: _Worker) -> Upsert:
    return Upsert(
        storage.WORKERS,
        {
            "worker_id": worker.registration.worker_id,
            "generation": worker.generation,
            "registration": worker.registration.SerializeToString(),
            "load": worker.load.SerializeToString(),
            "expires_ms": worker.expires_ms,
            "reliability": worker.reliability,
        },
    )


def _session_row(session: _Session) -> Upsert:
    return Upsert(
        storage.SESSIONS,
        {
            "session_id": session.route.session_id,
            "ttl_ms": session.ttl_ms,
            "expires_ms": session.expires_ms,
        },
    )


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
