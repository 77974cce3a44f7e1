"""The tracker by its methods, on SQLite and PostgreSQL, under a clock that stands still."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from meshnet import route_tokens
from meshnet.certification import Lane, issue
from meshnet.errors import ControlError, Reason
from meshnet.fingerprints import Mixture
from meshnet.signing import SigningKey
from meshnet.storage import (
    CERTIFICATIONS,
    EPOCHS,
    RECEIPTS,
    SESSIONS,
    WORKERS,
    Decided,
    Insert,
    Storage,
)
from meshnet.testing import running_tracker
from meshnet.testing.manual_clock import ManualClock
from meshnet.tracker import Tracker, TrackerOptions
from sqlalchemy.ext.asyncio import create_async_engine

from proto.meshnet.control.v1 import tracker_pb2 as pb

KEY = SigningKey.generate()
OPTIONS = TrackerOptions(admit_dark=True, trusted=KEY.trust())


def running(
    database: str, clock: ManualClock, options: TrackerOptions = OPTIONS, name: str = "t1"
) -> contextlib.AbstractAsyncContextManager[Tracker]:
    return running_tracker.running(database, clock, options, name)


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


MIXTURE = Mixture("s", "f", "g")


def certified(fingerprint: str | Mixture, **fields: Any) -> pb.PutCertificationRequest:
    base: dict[str, Any] = {"issued_ms": 1, "evidence_sha256": "0" * 64}
    if isinstance(fingerprint, Mixture):
        base["mixture"] = fingerprint
        fingerprint = fingerprint.fingerprint
    signed = issue(fields.pop("key", KEY), Lane("m", fingerprint), **(base | fields))
    return pb.PutCertificationRequest(record=signed.encode())


async def mixtures(tracker: Tracker) -> list[tuple[str, str, str, int, str]]:
    answer = await tracker.list_workers(pb.ListWorkersRequest())
    return [
        (m.fingerprint, m.head_fingerprint, m.tail_fingerprint, m.admission, m.admission_reason)
        for m in answer.mixtures
    ]


async def test_two_lanes_share_a_route_by_a_record_for_both_alone(database: str) -> None:
    clock = ManualClock()
    name = MIXTURE.fingerprint
    strict = dataclasses.replace(OPTIONS, admit_dark=False)
    nobody = (
        "no certification record says that these two lanes fit together in this order; "
        "`meshnet certify --mixed` measures it"
    )
    async with running(database, clock, strict) as tracker:
        await register(tracker, "a", 0, 2, fingerprint="f")
        await register(tracker, "b", 2, 4, fingerprint="g")
        await tracker.put_certification(certified("f"))
        await tracker.put_certification(certified("g"))
        # Both are certified, and nothing says that they fit together.
        with pytest.raises(ControlError) as error:
            await route(tracker)
        assert error.value.reason is Reason.NO_ROUTE
        assert f"fingerprints f before g are dark ({nobody})" in error.value.message
        assert await mixtures(tracker) == [("", "f", "g", pb.ADMISSION_DARK, nobody)]
        # Another pair, and the same one in the other order.
        await tracker.put_certification(certified(Mixture("s", "f", "h")))
        await tracker.put_certification(certified(Mixture("s", "g", "f")))
        assert await refused(route(tracker)) is Reason.NO_ROUTE
        # A key that this tracker does not trust.
        forged = certified(MIXTURE, key=SigningKey.generate())
        assert await refused(tracker.put_certification(forged)) is (Reason.CERTIFICATION_UNTRUSTED)
        assert await refused(route(tracker)) is Reason.NO_ROUTE
        # A record for its fingerprint that does not say of which two it is.
        await tracker.put_certification(certified(name, issued_ms=0))
        assert await refused(route(tracker)) is Reason.NO_ROUTE

        await tracker.put_certification(certified(MIXTURE))
        assert (name, "f", "g", pb.ADMISSION_CERTIFIED, "") in await mixtures(tracker)
        chosen = await tracker.select_route(pb.SelectRouteRequest(model_id="m", session_id="s"))
        assert [(hop.worker_id, hop.fingerprint) for hop in chosen.hops] == [("a", "f"), ("b", "g")]
        assert (chosen.fingerprint, chosen.model_units) == (name, 4)
        assert chosen.admission == pb.ADMISSION_CERTIFIED
        # Its only session is taken.
        await register(tracker, "a", 0, 2, fingerprint="f", max_sessions=1)
        assert await refused(route(tracker)) is Reason.SESSIONS_EXHAUSTED
        await register(tracker, "a", 0, 2, fingerprint="f")
        # Who asks for one lane gets no mixture.
        assert await refused(route(tracker, fingerprint="f")) is Reason.NO_ROUTE
        assert await route(tracker, fingerprint=name) == ["a", "b"]
        # The session stays with the mixture; a lane of its own goes first.
        await register(tracker, "c", 2, 4, fingerprint="g")
        again = await tracker.reroute(
            pb.RerouteRequest(session_id="s", epoch=1, failed_worker_ids=["b"])
        )
        assert [hop.worker_id for hop in again.hops] == ["a", "c"]
        await register(tracker, "d", 2, 4, fingerprint="f", step_us=90_000)
        assert await route(tracker) == ["a", "d"]
        await tracker.deregister(pb.DeregisterRequest(worker_id="d"))
        # One of the two is revoked, or the mixture.
        await tracker.put_certification(certified("g", issued_ms=2, status="revoked"))
        assert await refused(route(tracker)) is Reason.NO_ROUTE
        await tracker.put_certification(certified("g", issued_ms=3))
        assert await route(tracker) == ["a", "c"]
        revoked = certified(MIXTURE, issued_ms=2, status="revoked")
        await tracker.put_certification(revoked)
        assert await refused(route(tracker)) is Reason.NO_ROUTE
        (entry,) = (entry for entry in await mixtures(tracker) if entry[0] == name)
        assert entry[3] == pb.ADMISSION_DARK
        assert entry[4].startswith("revoked by record ")


async def test_admitting_dark_lanes_admits_no_mixture_without_its_record(database: str) -> None:
    async with running(database, ManualClock()) as tracker:
        await register(tracker, "a", 0, 2, fingerprint="f")
        await register(tracker, "b", 2, 4, fingerprint="g")
        assert await refused(route(tracker)) is Reason.NO_ROUTE
        await tracker.put_certification(certified(MIXTURE))
        chosen = await tracker.select_route(pb.SelectRouteRequest(model_id="m", session_id="s"))
        # That both lanes are dark is still told.
        assert chosen.admission == pb.ADMISSION_DARK_ADMITTED


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
        assert await refused(route(tracker)) is Reason.SESSIONS_EXHAUSTED
        await clock.advance(1999)
        await tracker.touch_session(pb.TouchSessionRequest(session_id="s"))
        await clock.advance(1999)
        assert await refused(route(tracker)) is Reason.SESSIONS_EXHAUSTED
        await clock.advance(1000)  # the sweep comes once a second
        assert await route(tracker) == ["a"]


async def test_full_is_said_of_what_only_lacks_room(database: str) -> None:
    async with running(database, ManualClock()) as tracker:
        await register(tracker, "a", 0, 2, max_sessions=1)
        await register(tracker, "b", 2, 4)
        first = await tracker.select_route(pb.SelectRouteRequest(model_id="m", session_id="s"))
        assert await refused(route(tracker)) is Reason.SESSIONS_EXHAUSTED
        assert await refused(route(tracker, fingerprint="g")) is Reason.NO_ROUTE
        # A way round b is none, however much room a has.
        around = pb.RerouteRequest(session_id="s", epoch=first.epoch, failed_worker_ids=["b"])
        assert await refused(tracker.reroute(around)) is Reason.NO_ROUTE
        await tracker.deregister(pb.DeregisterRequest(worker_id="b"))
        assert await refused(route(tracker)) is Reason.NO_ROUTE


async def test_a_closed_session_frees_its_worker_before_the_next_heartbeat(database: str) -> None:
    async with running(database, ManualClock()) as tracker:
        generation = (await register(tracker, "a", 0, 4, max_sessions=1)).generation
        await tracker.select_route(pb.SelectRouteRequest(model_id="m", session_id="s"))
        await beat(tracker, "a", generation, open_sessions=1)
        assert await refused(route(tracker)) is Reason.SESSIONS_EXHAUSTED
        await tracker.close_session(pb.CloseSessionRequest(session_id="s"))
        assert await route(tracker) == ["a"]


async def test_status_tells_the_clock_and_who_signs_tokens(database: str) -> None:
    clock = ManualClock()
    async with running(database, clock) as tracker:
        status = await tracker.get_status(pb.GetStatusRequest())
        assert (status.time_ms, status.token_public_key) == (clock.now_ms(), "")
    async with running(database, clock, dataclasses.replace(OPTIONS, token_key=KEY)) as tracker:
        status = await tracker.get_status(pb.GetStatusRequest())
        assert status.token_public_key == KEY.public_pem()


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


async def executed(database: str, statement: str) -> set[str]:
    """The tables of a database after a statement that no tracker makes."""

    def execute(connection: sa.Connection) -> set[str]:
        connection.execute(sa.text(statement))
        return set(sa.inspect(connection).get_table_names())

    url = sa.make_url(database)
    if url.drivername == "sqlite":
        file = sa.create_engine(url)
        with file.begin() as connection:
            tables = execute(connection)
        file.dispose()
        return tables
    engine = create_async_engine(url.set(drivername="postgresql+asyncpg"))
    async with engine.begin() as shared:
        tables = await shared.run_sync(execute)
    await engine.dispose()
    return tables


@pytest.mark.parametrize("version", [1, 3])
async def test_another_releases_tables_are_refused_and_left(database: str, version: int) -> None:
    await (await Storage.open(database, "t1")).close()
    all_tables = await executed(database, f"UPDATE revisions SET schema_version = {version}")
    # The former tables may lack one, which is not to be made.
    tables = await executed(database, "DROP TABLE receipts")
    assert len(tables) == len(all_tables) - 1
    with pytest.raises(ControlError, match=rf"version 2, the database has {version};") as refusal:
        await Storage.open(database, "t1")
    assert refusal.value.reason is Reason.CONFIGURATION_INVALID
    assert await executed(database, "SELECT 1") == tables
    # The release that they are of opens it again, and makes what is missing.
    await executed(database, "UPDATE revisions SET schema_version = 2")
    await (await Storage.open(database, "t1")).close()
    assert await executed(database, "SELECT 1") == all_tables


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


async def test_a_conflicting_report_is_recorded_by_neither_tracker_in_part(
    shared_database: str,
) -> None:
    """Two trackers at once: whichever is second keeps nothing of its call."""
    clock = ManualClock()

    def receipt(work: str, steps: int) -> pb.Receipt:
        return pb.Receipt(
            session_id="s",
            epoch=1,
            work_id=work,
            worker_id="a",
            node_id="n",
            outcome=pb.OUTCOME_COMPLETED,
            output_steps=steps,
        )

    async with (
        running(shared_database, clock, name="t1") as one,
        running(shared_database, clock, name="t2") as two,
    ):
        for number in range(20):
            ours = [receipt(f"both-{number}", 1), receipt(f"one-{number}", 1)]
            theirs = [receipt(f"two-{number}", 2), receipt(f"both-{number}", 2)]
            answers = await asyncio.gather(
                one.report_outcome(pb.ReportOutcomeRequest(receipts=ours)),
                two.report_outcome(pb.ReportOutcomeRequest(receipts=theirs)),
                return_exceptions=True,
            )
            (lost,) = (a for a in answers if isinstance(a, BaseException))
            assert isinstance(lost, ControlError)
            assert lost.reason is Reason.RECEIPT_CONFLICT
            (kept,) = (a for a in answers if not isinstance(a, BaseException))
            assert (kept.recorded, kept.repeated_before) == (2, 0)
            page = await one.list_receipts(pb.ListReceiptsRequest(session_id="s"))
            found = [r for r in page.receipts if r.work_id.endswith(f"-{number}")]
            recorded = ours if answers[0] is kept else theirs
            assert sorted(found, key=str) == sorted(recorded, key=str)


async def test_outcomes_at_two_trackers_count_once_each(shared_database: str) -> None:
    clock = ManualClock()
    async with (
        running(shared_database, clock, name="t1") as one,
        running(shared_database, clock, name="t2") as two,
    ):
        await register(one, "a", 0, 4)

        def report(tracker: Tracker, work: str) -> Any:
            receipt = pb.Receipt(session_id="s", epoch=1, work_id=work, worker_id="a", node_id="n")
            receipt.outcome = pb.OUTCOME_FAILED
            return tracker.report_outcome(pb.ReportOutcomeRequest(receipts=[receipt]))

        # The same one twice, another one besides.
        await asyncio.gather(report(one, "x"), report(two, "x"), report(two, "y"))
        for tracker in (one, two):
            listed = await tracker.list_workers(pb.ListWorkersRequest())
            assert [w.reliability for w in listed.workers] == [0.875 * 0.875]


async def test_a_withdrawn_worker_stays_withdrawn(shared_database: str) -> None:
    """A heartbeat that another tracker takes at the same moment does not bring it back."""
    clock = ManualClock()
    async with (
        running(shared_database, clock, name="t1") as one,
        running(shared_database, clock, name="t2") as two,
    ):
        for _ in range(20):
            generation = (await register(one, "a", 0, 4)).generation
            await visible(two)
            beating = beat(two, "a", generation)
            leaving = one.deregister(pb.DeregisterRequest(worker_id="a"))
            await asyncio.gather(beating, leaving, return_exceptions=True)
            assert await visible(one) == {}
            assert await visible(two) == {}
            assert await refused(beat(two, "a", generation)) is Reason.WORKER_UNKNOWN


async def test_a_closed_session_is_not_touched_open_again(shared_database: str) -> None:
    clock = ManualClock()
    async with (
        running(shared_database, clock, name="t1") as one,
        running(shared_database, clock, name="t2") as two,
    ):
        await register(one, "a", 0, 4, max_sessions=99)
        for number in range(20):
            name = f"s{number}"
            await route(one, session_id=name)
            await route(two, session_id=name)
            await asyncio.gather(
                one.touch_session(pb.TouchSessionRequest(session_id=name)),
                two.close_session(pb.CloseSessionRequest(session_id=name)),
                return_exceptions=True,
            )
            for tracker in (one, two):
                touch = tracker.touch_session(pb.TouchSessionRequest(session_id=name))
                assert await refused(touch) is Reason.SESSION_UNKNOWN


async def test_two_trackers_open_one_session_once(shared_database: str) -> None:
    clock = ManualClock()
    async with (
        running(shared_database, clock, name="t1") as one,
        running(shared_database, clock, name="t2") as two,
    ):
        await register(one, "a", 0, 4, max_sessions=99)
        await register(one, "b", 0, 4, max_sessions=99)
        for number in range(20):
            request = pb.SelectRouteRequest(model_id="m", session_id=f"s{number}")
            answers = await asyncio.gather(*(t.select_route(request) for t in (one, two, one)))
            assert answers[0] == answers[1] == answers[2]
        for tracker in (one, two):
            listed = await tracker.list_workers(pb.ListWorkersRequest())
            assert sum(w.assigned_sessions for w in listed.workers) == 20


async def test_a_session_id_used_again_goes_on_counting(database: str) -> None:
    """So that nothing of its earlier life passes for the new one's."""
    clock = ManualClock()
    request = pb.SelectRouteRequest(model_id="m", session_id="s")
    async with running(database, clock) as tracker:
        await register(tracker, "a", 0, 4)
        assert (await tracker.select_route(request)).epoch == 1
        await tracker.close_session(pb.CloseSessionRequest(session_id="s"))
        assert (await tracker.select_route(request)).epoch == 2
    async with running(database, clock) as tracker:
        assert (await tracker.select_route(request)).epoch == 2


async def test_what_is_over_is_purged_but_the_ledger(database: str) -> None:
    clock = ManualClock()
    options = dataclasses.replace(OPTIONS, keep_ms=50_000, session_ttl_ms=5_000)

    async def rows(table: Any) -> int:
        return len(await storage.query(sa.select(table)))

    storage = await Storage.open(database, "t1")
    tracker = await Tracker.open(storage, options, clock)
    receipt = pb.Receipt(session_id="run-out", epoch=1, work_id="w", worker_id="a", node_id="n")
    receipt.outcome = pb.OUTCOME_FAILED
    try:
        for name in ("run-out", "withdrawn", "alive"):
            await register(tracker, name, 0, 4, max_sessions=9)
        for name in ("run-out", "closed"):
            await route(tracker, session_id=name)
        await tracker.report_outcome(pb.ReportOutcomeRequest(receipts=[receipt]))
        await tracker.deregister(pb.DeregisterRequest(worker_id="withdrawn"))
        await tracker.close_session(pb.CloseSessionRequest(session_id="closed"))

        async def live_on(milliseconds: int) -> None:
            for _ in range(milliseconds // 5_000):
                await clock.advance(5_000)
                await register(tracker, "alive", 0, 4, max_sessions=9)
                await storage.write([])  # whatever the clock set off is committed

        await live_on(45_000)
        assert (await rows(WORKERS), await rows(SESSIONS), await rows(EPOCHS)) == (3, 2, 2)
        await live_on(80_000)
        assert (await rows(WORKERS), await rows(SESSIONS), await rows(EPOCHS)) == (1, 0, 0)
        assert await rows(RECEIPTS) == 1
        assert await route(tracker) == ["alive"]
    finally:
        await tracker.close()
        await storage.close()


async def test_a_rule_that_fails_fails_alone(database: str) -> None:
    """Writes that share its transaction are committed."""
    storage = await Storage.open(database, "t1")

    def broken(_: Any) -> Any:
        raise ValueError("not a refusal")

    def refusing(_: Any) -> Any:
        raise ControlError(Reason.RECEIPT_CONFLICT, "no")

    def row(name: str) -> Insert:
        return Insert(CERTIFICATIONS, {"record_id": name, "record": b"r"})

    try:
        found = await asyncio.gather(
            storage.write([row("a")]),
            storage.decide(broken),
            storage.decide(refusing),
            storage.decide(lambda reading: Decided(reading.revision, [row("b")])),
            return_exceptions=True,
        )
        assert [type(answer) for answer in found] == [type(None), ValueError, ControlError, int]
        records = await storage.query(sa.select(CERTIFICATIONS))
        assert sorted(record["record_id"] for record in records) == ["a", "b"]
        assert {record["revision"] for record in records} == {found[3]}
    finally:
        await storage.close()


async def test_who_is_beside_a_span_is_asked_for_alone(tmp_path: pathlib.Path) -> None:
    async with running(f"sqlite:///{tmp_path / 'db'}", ManualClock()) as tracker:
        for name, begin, end, fields in (
            ("head", 0, 1, {}),
            ("before", 0, 2, {}),
            ("itself", 2, 3, {}),
            ("after", 3, 4, {}),
            ("far", 1, 2, {"fingerprint": "g"}),
            ("elsewhere", 3, 4, {"model_id": "other"}),
        ):
            await register(tracker, name, begin, end, **fields)

        async def listed(**fields: Any) -> list[str]:
            answer = await tracker.list_workers(pb.ListWorkersRequest(**fields))
            return [worker.registration.worker_id for worker in answer.workers]

        lane = {"model_id": "m", "fingerprint": "f"}
        assert await listed(**lane) == ["after", "before", "head", "itself"]
        assert await listed(fingerprint="g") == ["far"]
        beside = {**lane, "beside": pb.Span(begin=2, end=3)}
        assert await listed(**beside) == ["after", "before"]
        assert await listed(**beside, other_than_node_id="node-after") == ["before"]
        # The two ends of a model are next to each other, for the way back.
        assert await listed(**lane, beside=pb.Span(begin=0, end=1)) == ["after"]
        assert await listed(**lane, beside=pb.Span(begin=3, end=4)) == ["before", "head", "itself"]


async def test_neighbours_are_bounded_and_everybody_is_somebodys(tmp_path: pathlib.Path) -> None:
    async with running(f"sqlite:///{tmp_path / 'db'}", ManualClock()) as tracker:
        for number in range(30):
            await register(tracker, f"a{number}", 0, 2, node_id=f"n{number // 2}")
            await register(tracker, f"b{number}", 2, 4, node_id=f"m{number}")
        chosen: set[str] = set()
        for number in range(30):
            request = pb.ListWorkersRequest(
                beside=pb.Span(begin=2, end=4), other_than_node_id=f"m{number}", max_nodes=4
            )
            answer = await tracker.list_workers(request)
            nodes = [worker.registration.node_id for worker in answer.workers]
            assert len(set(nodes)) == len(nodes) == 4
            # The same as before, so that measurements stay.
            assert await tracker.list_workers(request) == answer
            chosen.update(nodes)
        assert chosen == {f"n{number}" for number in range(15)}
        everyone = await tracker.list_workers(pb.ListWorkersRequest(max_nodes=1000))
        assert len(everyone.workers) == 45  # one a node


async def test_nonsense_in_a_demand_is_refused(tmp_path: pathlib.Path) -> None:
    async with running(f"sqlite:///{tmp_path}/t.db", ManualClock()) as tracker:
        await register(tracker, "a", 0, 4, access_bytes_per_second=1, access_latency_us=2**32 - 1)
        assert await route(tracker, seam_bytes=2**40, session_id="s") == ["a"]
        for call in (
            route(tracker, seam_bytes=2**64 - 1),
            tracker.reroute(pb.RerouteRequest(session_id="s", epoch=1, seam_bytes=2**63)),
        ):
            assert await refused(call) is Reason.FIELD_OUT_OF_BOUNDS
