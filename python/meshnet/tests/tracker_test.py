"""The tracker by its methods, on SQLite and PostgreSQL, under a clock that stands still."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import pathlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from meshnet import route_tokens
from meshnet.certification import Lane, issue
from meshnet.errors import ControlError, Reason
from meshnet.signing import SigningKey
from meshnet.storage import Storage
from meshnet.testing.manual_clock import ManualClock
from meshnet.tracker import Tracker, TrackerOptions

from proto.meshnet.control.v1 import tracker_pb2 as pb

KEY = SigningKey.generate()
OPTIONS = TrackerOptions(admit_dark=True, trusted=KEY.trust())


@contextlib.asynccontextmanager
async def running(
    database: str, clock: ManualClock, options: TrackerOptions = OPTIONS, name: str = "t1"
) -> AsyncIterator[Tracker]:
    storage = await Storage.open(database, name)
    try:
        tracker = await Tracker.open(storage, options, clock)
        try:
            yield tracker
        finally:
            await tracker.close()
    finally:
        await storage.close()


def registration(name: str, begin: int, end: int, **fields: Any) -> pb.Registration:
    base: dict[str, Any] = {
        "worker_id": name,
        "node_id": f"node-{name}",
        "endpoint": f"{name}.example:7000",
        "model_id": "m",
        "fingerprint": "f",
        "span": pb.Span(begin=begin, end=end),
        "model_units": 4,
        "max_sessions": 4,
        "step_us": 100,
    }
    return pb.Registration(**(base | fields))


async def register(
    tracker: Tracker, name: str, begin: int, end: int, **fields: Any
) -> pb.RegisterResponse:
    return await tracker.register(
        pb.RegisterRequest(
            registration=registration(name, begin, end, **fields), load=pb.Load(ready=True)
        )
    )


async def beat(tracker: Tracker, name: str, generation: int, **load: Any) -> pb.HeartbeatResponse:
    return await tracker.heartbeat(
        pb.HeartbeatRequest(
            worker_id=name, generation=generation, load=pb.Load(**({"ready": True} | load))
        )
    )


async def route(tracker: Tracker, **fields: Any) -> list[str]:
    answer = await tracker.select_route(pb.SelectRouteRequest(**({"model_id": "m"} | fields)))
    return [hop.worker_id for hop in answer.hops]


async def refused(call: Any) -> Reason:
    with pytest.raises(ControlError) as error:
        await call
    return error.value.reason


async def visible(tracker: Tracker) -> dict[str, str]:
    answer = await tracker.list_workers(pb.ListWorkersRequest())
    return {worker.registration.worker_id: worker.unroutable for worker in answer.workers}


async def test_routes_and_leases(database: str) -> None:
    clock = ManualClock()
    async with running(database, clock) as tracker:
        a = await register(tracker, "a", 0, 2)
        await register(tracker, "b", 2, 4)
        assert a.lease_ms == 10_000
        assert await route(tracker) == ["a", "b"]
        await clock.advance(9_999)
        await beat(tracker, "a", a.generation)
        await clock.advance(1)
        assert await visible(tracker) == {"a": ""}
        assert await refused(route(tracker)) is Reason.NO_ROUTE
        await register(tracker, "b", 2, 4)
        assert await route(tracker) == ["a", "b"]
        await clock.advance(9_998)
        assert await route(tracker) == ["a", "b"]
    # What was promised holds on after the tracker's end, and no longer.
    async with running(database, clock) as tracker:
        assert await visible(tracker) == {"a": "", "b": ""}
        await clock.advance(1)
        assert await visible(tracker) == {"b": ""}
        assert await refused(route(tracker)) is Reason.NO_ROUTE
    await clock.advance(1)
    async with running(database, clock) as tracker:
        assert await visible(tracker) == {}


async def test_a_new_registration_replaces_the_old_one(database: str) -> None:
    async with running(database, ManualClock()) as tracker:
        old = await register(tracker, "a", 0, 2)
        new = await register(tracker, "a", 0, 4, fingerprint="g")
        assert await refused(beat(tracker, "a", old.generation)) is Reason.WORKER_UNKNOWN
        await beat(tracker, "a", new.generation)
        answer = await tracker.deregister(
            pb.DeregisterRequest(worker_id="a", generation=old.generation)
        )
        assert not answer.found
        assert await route(tracker) == ["a"]
        assert (await tracker.deregister(pb.DeregisterRequest(worker_id="a"))).found
        assert not (await tracker.deregister(pb.DeregisterRequest(worker_id="a"))).found
        assert await refused(beat(tracker, "a", new.generation)) is Reason.WORKER_UNKNOWN
        assert await visible(tracker) == {}


async def test_only_equal_fingerprints_share_a_route(database: str) -> None:
    async with running(database, ManualClock()) as tracker:
        await register(tracker, "a", 0, 2, fingerprint="f")
        await register(tracker, "b", 2, 4, fingerprint="g")
        assert await refused(route(tracker)) is Reason.NO_ROUTE
        await register(tracker, "c", 2, 4, fingerprint="f", step_us=900)
        assert await route(tracker) == ["a", "c"]
        await register(tracker, "d", 0, 2, fingerprint="g")
        assert await route(tracker) == ["d", "b"]
        assert await route(tracker, fingerprint="f") == ["a", "c"]


async def test_dark_lanes_are_visible_but_not_routed(database: str) -> None:
    clock = ManualClock()
    options = dataclasses.replace(OPTIONS, admit_dark=False)
    async with running(database, clock, options) as tracker:
        answer = await register(tracker, "a", 0, 4)
        assert answer.admission == pb.ADMISSION_DARK
        why = "no certification record for this model and fingerprint"
        assert answer.admission_reason == why
        assert await visible(tracker) == {"a": f"dark: {why}"}
        assert await refused(route(tracker)) is Reason.NO_ROUTE

        def record(key: SigningKey, **fields: Any) -> bytes:
            base: dict[str, Any] = {"issued_ms": 1, "evidence_sha256": "0" * 64}
            return issue(key, Lane("m", "f"), **(base | fields)).encode()

        foreign = pb.PutCertificationRequest(record=record(SigningKey.generate()))
        assert await refused(tracker.put_certification(foreign)) is Reason.CERTIFICATION_UNTRUSTED
        expiring = record(KEY, expires_ms=clock.now_ms() + 5000)
        for _ in range(2):
            await tracker.put_certification(pb.PutCertificationRequest(record=expiring))
        assert (await tracker.get_status(pb.GetStatusRequest())).certifications == 1
        assert await route(tracker) == ["a"]
        await clock.advance(5000)
        assert await refused(route(tracker)) is Reason.NO_ROUTE
        again = record(KEY, issued_ms=2)
        await tracker.put_certification(pb.PutCertificationRequest(record=again))
        assert await route(tracker) == ["a"]
    async with running(database, clock, options) as tracker:
        assert await route(tracker) == ["a"]
        revoked = record(KEY, issued_ms=3, status="revoked")
        await tracker.put_certification(pb.PutCertificationRequest(record=revoked))
        assert await refused(route(tracker)) is Reason.NO_ROUTE


async def test_an_operator_may_admit_dark_lanes_visibly(database: str) -> None:
    async with running(database, ManualClock()) as tracker:
        answer = await register(tracker, "a", 0, 4)
        assert answer.admission == pb.ADMISSION_DARK_ADMITTED
        assert "admits dark lanes" in answer.admission_reason
        chosen = await tracker.select_route(pb.SelectRouteRequest(model_id="m"))
        assert chosen.admission == pb.ADMISSION_DARK_ADMITTED
        assert (await tracker.get_status(pb.GetStatusRequest())).admits_dark


async def test_sessions_and_epochs_survive_the_tracker(database: str) -> None:
    clock = ManualClock()
    async with running(database, clock) as tracker:
        await register(tracker, "a", 0, 2)
        await register(tracker, "b", 2, 4)
        await register(tracker, "c", 2, 4, step_us=200)
        first = await tracker.select_route(pb.SelectRouteRequest(model_id="m", session_id="s"))
        assert [hop.worker_id for hop in first.hops] == ["a", "b"]
        assert (first.epoch, first.total_us) == (1, 200)
    async with running(database, clock) as tracker:
        same = await tracker.select_route(pb.SelectRouteRequest(model_id="m", session_id="s"))
        assert same == first
        failed = pb.RerouteRequest(session_id="s", epoch=1, failed_worker_ids=["b"])
        second = await tracker.reroute(failed)
        assert [hop.worker_id for hop in second.hops] == ["a", "c"]
        assert second.epoch == 2
        assert await refused(tracker.reroute(failed)) is Reason.STALE_EPOCH
        # Its failure counts against b everywhere.
        assert await route(tracker) == ["a", "c"]
    async with running(database, clock) as tracker:
        same = await tracker.select_route(pb.SelectRouteRequest(model_id="m", session_id="s"))
        assert same == second
        listed = await tracker.list_workers(pb.ListWorkersRequest())
        assert [w.reliability for w in listed.workers] == [1.0, 0.875, 1.0]
        assert [w.assigned_sessions for w in listed.workers] == [2, 0, 2]
        assert (await tracker.close_session(pb.CloseSessionRequest(session_id="s"))).found
        assert not (await tracker.close_session(pb.CloseSessionRequest(session_id="s"))).found
        touch = pb.TouchSessionRequest(session_id="s")
        assert await refused(tracker.touch_session(touch)) is Reason.SESSION_UNKNOWN
    async with running(database, clock) as tracker:
        assert await refused(tracker.touch_session(touch)) is Reason.SESSION_UNKNOWN


async def test_an_untouched_session_frees_its_workers(database: str) -> None:
    clock = ManualClock()
    async with running(database, clock) as tracker:
        await register(tracker, "a", 0, 4, max_sessions=1)
        request = pb.SelectRouteRequest(model_id="m", session_id="s", ttl_ms=2000)
        await tracker.select_route(request)
        assert await visible(tracker) == {"a": "full"}
        assert await refused(route(tracker)) is Reason.NO_ROUTE
        await clock.advance(1999)
        await tracker.touch_session(pb.TouchSessionRequest(session_id="s"))
        await clock.advance(1999)
        assert await refused(route(tracker)) is Reason.NO_ROUTE
        await clock.advance(1000)  # the sweep comes once a second
        assert await route(tracker) == ["a"]


async def test_receipts_are_recorded_once(database: str) -> None:
    clock = ManualClock()
    receipt = pb.Receipt(
        session_id="s",
        epoch=1,
        work_id="w",
        worker_id="a",
        node_id="n",
        span=pb.Span(begin=0, end=4),
        outcome=pb.OUTCOME_COMPLETED,
        input_steps=3,
        output_steps=5,
    )
    others = [
        pb.Receipt(session_id="s", epoch=1, work_id=name, worker_id="a", node_id="n", outcome=value)
        for name, value in (
            ("x", pb.OUTCOME_CANCELLED),
            ("y", pb.OUTCOME_FAILED),
            ("z", pb.OUTCOME_UNVERIFIED),
        )
    ]
    async with running(database, clock) as tracker:
        await register(tracker, "a", 0, 4)
        reports = [
            tracker.report_outcome(pb.ReportOutcomeRequest(receipts=[receipt])) for _ in range(4)
        ]
        answers = await asyncio.gather(*reports)
        assert sorted((a.recorded, a.repeated_before) for a in answers) == [
            (0, 1),
            (0, 1),
            (0, 1),
            (1, 0),
        ]
        answer = await tracker.report_outcome(pb.ReportOutcomeRequest(receipts=[receipt, *others]))
        assert (answer.recorded, answer.repeated_before) == (3, 1)
        changed = pb.Receipt()
        changed.CopyFrom(receipt)
        changed.output_steps = 6
        new = pb.Receipt(session_id="s", epoch=2, work_id="w", worker_id="a", node_id="n")
        new.outcome = pb.OUTCOME_COMPLETED
        conflict = tracker.report_outcome(pb.ReportOutcomeRequest(receipts=[new, changed]))
        assert await refused(conflict) is Reason.RECEIPT_CONFLICT
    async with running(database, clock) as tracker:
        page = await tracker.list_receipts(pb.ListReceiptsRequest(page_size=3))
        rest = await tracker.list_receipts(
            pb.ListReceiptsRequest(page_size=3, page_token=page.next_page_token)
        )
        assert [*page.receipts, *rest.receipts] == [receipt, *others]
        assert rest.next_page_token == ""
        # One failure among two outcomes that count.
        listed = await tracker.list_workers(pb.ListWorkersRequest())
        assert [w.reliability for w in listed.workers] == [0.875]


async def test_route_tokens_are_bound_and_short_lived(database: str) -> None:
    clock = ManualClock()
    options = dataclasses.replace(OPTIONS, token_key=KEY, token_ttl_ms=1000)
    async with running(database, clock, options) as tracker:
        await register(tracker, "a", 0, 2)
        await register(tracker, "b", 2, 4)
        answer = await tracker.select_route(pb.SelectRouteRequest(model_id="m", session_id="s"))
    trusted, now = KEY.trust(), clock.now_ms()
    claims = [route_tokens.check(trusted, hop.token, now + 999) for hop in answer.hops]
    assert claims == [
        route_tokens.RouteClaim("s", 1, 0, "a", now + 1000),
        route_tokens.RouteClaim("s", 1, 1, "b", now + 1000),
    ]
    token = answer.hops[0].token
    content, signature, key_id = token.split(b".")
    bad: list[tuple[bytes, int]] = [
        (token, now + 1000),
        (b"", now),
        (token[:-4], now),
        (b".".join([answer.hops[1].token.split(b".")[0], signature, key_id]), now),
        (b".".join([content, b"A" * 86 + b"==", key_id]), now),
    ]
    for forged, when in bad:
        with pytest.raises(ControlError) as error:
            route_tokens.check(trusted, forged, when)
        assert error.value.reason is Reason.UNAUTHENTICATED
    with pytest.raises(ControlError):
        route_tokens.check(SigningKey.generate().trust(), token, now)


async def test_two_trackers_share_one_database(shared_database: str) -> None:
    clock = ManualClock()
    async with (
        running(shared_database, clock, name="t1") as one,
        running(shared_database, clock, name="t2") as two,
    ):
        a = await register(one, "a", 0, 2)
        b = await register(two, "b", 2, 4)
        assert await route(one, session_id="s") == ["a", "b"]
        # Either tracker serves what the other began.
        await beat(two, "a", a.generation, queued_steps=3)
        await beat(one, "b", b.generation)
        listed = await one.list_workers(pb.ListWorkersRequest())
        assert [w.load.queued_steps for w in listed.workers] == [3, 0]
        assert [w.assigned_sessions for w in listed.workers] == [1, 1]
        assert await route(two, session_id="s") == ["a", "b"]
        # Two at once make one epoch.
        await register(one, "c", 2, 4)
        answers = await asyncio.gather(
            *(
                tracker.reroute(pb.RerouteRequest(session_id="s", epoch=1, failed_worker_ids=["b"]))
                for tracker in (one, two)
            )
        )
        assert answers[0] == answers[1]
        assert answers[0].epoch == 2
        assert (await two.deregister(pb.DeregisterRequest(worker_id="a"))).found
        assert await refused(route(one)) is Reason.NO_ROUTE
        assert await refused(beat(one, "a", a.generation)) is Reason.WORKER_UNKNOWN
        await two.close_session(pb.CloseSessionRequest(session_id="s"))
        touch = one.touch_session(pb.TouchSessionRequest(session_id="s"))
        assert await refused(touch) is Reason.SESSION_UNKNOWN


async def test_a_sqlite_file_has_one_tracker(tmp_path: pathlib.Path) -> None:
    database = f"sqlite:///{tmp_path}/tracker.db"
    async with running(database, ManualClock()):
        again = Storage.open(database, "t2")
        assert await refused(again) is Reason.CONFIGURATION_INVALID


@pytest.mark.parametrize(
    "url", ["nonsense", "mysql://x/y", "sqlite://", "postgresql://@/x?host=/no"]
)
async def test_unusable_databases_are_refused(url: str) -> None:
    reason = await refused(Storage.open(url, "t"))
    assert reason in (Reason.CONFIGURATION_INVALID, Reason.STORAGE_UNAVAILABLE)


_BAD: list[Callable[[pb.Registration], Any]] = [
    lambda r: setattr(r, "worker_id", "a b"),
    lambda r: setattr(r, "node_id", ""),
    lambda r: setattr(r, "fingerprint", "x" * 129),
    lambda r: setattr(r, "endpoint", ""),
    lambda r: setattr(r, "max_sessions", 0),
    lambda r: setattr(r.span, "end", 5),
    lambda r: setattr(r.span, "end", 0),
    lambda r: r.labels.update({str(n): "" for n in range(33)}),
    lambda r: r.labels.update({"x": "y" * 257}),
    lambda r: r.seams.extend([pb.SeamMeasurement(peer_node_id="n")] * 65),
]


@pytest.mark.parametrize("spoil", _BAD)
async def test_malformed_registrations_are_refused(
    spoil: Callable[[pb.Registration], Any], tmp_path: pathlib.Path
) -> None:
    async with running(f"sqlite:///{tmp_path}/t.db", ManualClock()) as tracker:
        message = registration("a", 0, 4)
        spoil(message)
        reason = await refused(tracker.register(pb.RegisterRequest(registration=message)))
        assert reason in (Reason.FIELD_OUT_OF_BOUNDS, Reason.SPAN_INVALID)
        assert await visible(tracker) == {}


async def test_a_fingerprint_has_one_number_of_units(tmp_path: pathlib.Path) -> None:
    async with running(f"sqlite:///{tmp_path}/t.db", ManualClock()) as tracker:
        await register(tracker, "a", 0, 4)
        other = register(tracker, "b", 0, 4, model_units=5)
        assert await refused(other) is Reason.SPAN_INVALID
