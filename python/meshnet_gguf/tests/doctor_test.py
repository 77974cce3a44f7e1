"""What the checks of `meshnet doctor` say of what is handed to them."""

import datetime
import pathlib
import socket

import pytest
from meshnet.certificates import Authority
from meshnet.testing.tracker_process import TrackerProcess
from meshnet.transport import Security, TlsFiles
from meshnet_gguf import doctor
from meshnet_gguf.doctor import Check, Level

from proto.meshnet.control.v1 import tracker_pb2 as pb

NOW = datetime.datetime.now(datetime.UTC)


def tls_of(folder: pathlib.Path, authority: pathlib.Path, days: int = 90) -> TlsFiles:
    certificate, key = Authority.create(folder).issue("a", ["10.0.0.5"], days)
    return TlsFiles(certificate, key, authority)


def levels(checks: list[doctor.Check]) -> dict[str, Level]:
    return {check.name.removeprefix("certificates."): check.level for check in checks}


def test_good_certificates(tmp_path: pathlib.Path) -> None:
    tls = tls_of(tmp_path / "ca", tmp_path / "ca" / "authorities.pem")
    found = levels(doctor.check_certificates(tls, ["10.0.0.5", "a"], NOW))
    assert set(found.values()) == {Level.OK}
    assert set(found) == {"files", "authority", "expiry", "names"}


def test_certificates_that_end(tmp_path: pathlib.Path) -> None:
    tls = tls_of(tmp_path / "ca", tmp_path / "ca" / "authorities.pem", days=30)
    for days, level in ((15, Level.OK), (17, Level.WARN), (31, Level.FAIL)):
        later = NOW + datetime.timedelta(days=days)
        assert levels(doctor.check_certificates(tls, [], later))["expiry"] is level


def test_certificates_that_fit_nobody(tmp_path: pathlib.Path) -> None:
    Authority.create(tmp_path / "other")
    foreign = tls_of(tmp_path / "ca", tmp_path / "other" / "authorities.pem")
    found = levels(doctor.check_certificates(foreign, ["10.0.0.9"], NOW))
    assert (found["authority"], found["names"]) == (Level.FAIL, Level.FAIL)
    (tmp_path / "ca" / "a.key").write_text("no key")
    (check,) = doctor.check_certificates(foreign, [], NOW)
    assert (check.name, check.level) == ("certificates.files", Level.FAIL)


@pytest.mark.parametrize(
    ("off_ms", "level", "word"),
    [
        (4_000, Level.OK, "ahead of"),
        (-4_000, Level.OK, "behind"),
        (6_000, Level.WARN, "ahead of"),
        (-40_000, Level.FAIL, "behind"),
    ],
)
def test_clocks(off_ms: int, level: Level, word: str) -> None:
    check = doctor.check_clock(1_700_000_000_000, 1_700_000_000_000 + off_ms)
    assert (check.level, word in check.message) == (level, True)


def test_processors() -> None:
    new, old = frozenset({"sse4_2", "avx2"}), frozenset({"sse4_2"})
    assert doctor.check_cpu(new, "x86-64-v3").level is Level.OK
    assert doctor.check_cpu(old, "x86-64-v3").level is Level.FAIL
    assert doctor.check_cpu(old, "x86-64-v2").level is Level.OK
    assert doctor.check_cpu(frozenset({"fp", "asimd"}), "armv8-a").level is Level.OK
    assert doctor.check_cpu(new, "armv8-a").level is Level.FAIL
    assert doctor.check_cpu(new, "rv64gc").level is Level.WARN
    assert doctor.check_cpu(frozenset(), "armv8-a").level is Level.WARN


def test_memory_and_storage(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_memory(1).level is Level.OK
    assert doctor.check_memory(1 << 60).level is Level.FAIL
    monkeypatch.setenv("MESHNET_STORAGE", str(tmp_path))
    assert doctor.check_storage(1).level is Level.OK
    assert doctor.check_storage(1 << 60).level is Level.FAIL
    monkeypatch.setenv("MESHNET_STORAGE", "/home/nobody")
    assert doctor.check_storage().level is Level.FAIL


def test_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        addresses = [
            f"127.0.0.1:{port}",
            "127.0.0.1:0",
            "192.0.2.1:0",
            "no.invalid:1",
            "x",
            "h:99999",
        ]
        found = doctor.check_ports(addresses)
    assert [check.level for check in found] == [Level.WARN, Level.OK, *[Level.FAIL] * 4]
    assert [check.message for check in found[2:]] == [
        "cannot listen on 192.0.2.1:0: Cannot assign requested address",
        "cannot listen on no.invalid:1: Cannot assign requested address",
        "expected HOST:PORT, got 'x'",
        "expected HOST:PORT, got 'h:99999'",
    ]


def half(
    name: str, begin: int, version: str, fingerprint: str, *reached: str
) -> pb.RegisterRequest:
    """Of a model of four layers, on a node that has reached others; nobody answers there."""
    return pb.RegisterRequest(
        registration=pb.Registration(
            worker_id=f"{name}-worker",
            node_id=name,
            endpoint="127.0.0.1:1",
            model_id="m",
            fingerprint=fingerprint,
            span=pb.Span(begin=begin, end=begin + 2),
            model_units=4,
            max_sessions=1,
            step_us=100,
            labels={"worker_version": version},
            seams=[pb.SeamMeasurement(peer_node_id=peer, round_trip_us=100) for peer in reached],
        ),
        load=pb.Load(ready=True),
    )


async def findings(folder: pathlib.Path, *workers: pb.RegisterRequest) -> dict[str, Check]:
    """What is said of a mesh of these, whose tracker admits no dark lanes."""
    (database := folder / "tracker.db").unlink(missing_ok=True)
    async with await TrackerProcess.start(f"sqlite:///{database}") as tracker:
        for worker in workers:
            await tracker.stub.Register(worker)
        checks = await doctor.check_mesh([tracker.endpoint], Security())
    return {check.name: check for check in checks}


async def test_one_release_whose_workers_reach_each_other(tmp_path: pathlib.Path) -> None:
    found = await findings(tmp_path, half("a", 0, "1", "f", "b"), half("b", 2, "1", "f", "a"))
    assert found["versions.workers"] == Check("versions.workers", Level.OK, "1")
    assert found["reach.a.b"] == Check("reach.a.b", Level.OK, "a and b reach each other")


async def test_workers_of_two_releases(tmp_path: pathlib.Path) -> None:
    found = await findings(tmp_path, half("a", 0, "1", "f"), half("b", 2, "2", "g"))
    check = found["versions.workers"]
    assert (check.level, check.message) == (Level.WARN, "workers of several versions (m: 1, 2)")
    assert check.cure.startswith("install one release everywhere")


async def test_workers_of_which_one_does_not_reach_the_other(tmp_path: pathlib.Path) -> None:
    found = await findings(tmp_path, half("a", 0, "1", "f", "b"), half("b", 2, "1", "f"))
    check = found["reach.a.b"]
    assert (check.level, check.message) == (
        Level.WARN,
        "b has not reached a yet, which reaches it",
    )
    assert check.cure.endswith("open a's ports to b, or let a listen at a relay")
    neither = await findings(tmp_path, half("a", 0, "1", "f"), half("b", 2, "1", "f"))
    assert neither["reach.a.b"].message == "a and b have not measured the line between them yet"


async def test_a_dark_lane_and_workers_that_do_not_answer(tmp_path: pathlib.Path) -> None:
    found = await findings(tmp_path, half("a", 0, "1", "f"), half("b", 2, "1", "f"))
    lane = found["lane.m.f"]
    assert (lane.level, lane.message[:14]) == (Level.FAIL, "never routed: ")
    assert "certify it" in lane.cure
    worker = found["worker.a-worker"]
    assert (worker.level, "PEER_UNREACHABLE" in worker.message) == (Level.FAIL, True)
    assert "see that its node runs" in worker.cure
    # The tracker still counts on both.
    assert found["route.m"].level is Level.FAIL
