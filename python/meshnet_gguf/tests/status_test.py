"""What a watch sees of real workers, named by hand or known to a real tracker."""

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from meshnet.testing.tracker_process import TrackerProcess
from meshnet.tracker_client import TrackerClient
from meshnet_gguf.client import SamplingParams
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.registration import (
    MACHINE_MEMORY_LABEL,
    PeerMeasurement,
    Whereabouts,
    make_load,
    make_registration,
)
from meshnet_gguf.status import (
    Admission,
    GatewayStatus,
    LaneStatus,
    LaneWorker,
    Memory,
    MeshStatus,
    MixtureStatus,
    ModelStatus,
    Problem,
    SeamStatus,
    StageState,
    StageStatus,
    Work,
    status_from_json,
    status_to_json,
)
from meshnet_gguf.status_watch import ModelWatch, NamedWorkers, TrackedWorkers
from meshnet_gguf.testing.cluster import FakeCluster, fake_cluster

from proto.meshnet.control.v1 import tracker_pb2

END = 60.0  # seconds after which a test that hangs is given up


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@given(st.text(), st.integers(0, 2**63), st.floats(0, 1e12))
def test_json_gives_back_what_was_written(text: str, count: int, rate: float) -> None:
    problem = Problem(text, text)
    stage = StageStatus(
        0,
        count,
        StageState.LOST,
        text,
        problem=problem,
        memory=Memory(count, machine_bytes=count),
        work=Work(decode_tokens_per_second=rate),
        refusals={text: count},
    )
    lane = LaneStatus(text, Admission.DARK, text, (LaneWorker(text, text, 0, 1, 0, 1, text),), 3)
    seams = (SeamStatus(0, 1, count, sent_bytes_per_second=rate), SeamStatus(1, 0))
    mixture = MixtureStatus(text, text, text, Admission.DARK, text)
    parts = (problem, (stage, stage), seams, (lane,), (mixture,))
    models = (ModelStatus(text, count, (text,), *parts),)
    gateway = GatewayStatus(rate, 1, 2, 3, count, count, {text: count})
    status = MeshStatus(rate, models, gateway)
    assert status_from_json(status_to_json(status)) == status


@pytest.mark.parametrize(
    "text", [b"", b"[]", b'{"taken_at": 1}', b'{"taken_at": "x", "models": []}', b"\xff"]
)
def test_what_is_no_status_is_malformed(text: bytes) -> None:
    with pytest.raises(MeshnetError) as caught:
        status_from_json(text)
    assert caught.value.reason_name == "MALFORMED_MESSAGE"


def test_a_later_versions_names_are_passed_over() -> None:
    text = b'{"taken_at": 1, "models": [], "gateway": null, "weather": "fine"}'
    assert status_from_json(text) == MeshStatus(1.0, ())


async def generate(fake: FakeCluster, tokens: int) -> None:
    """Puts a prompt of three tokens and so many decode steps through all stages."""
    async with fake.route.session() as session:
        async for _ in session.generate(
            [1, 2, 3], SamplingParams(), max_tokens=tokens + 1, ignore_end_of_generation=True
        ):
            pass
    await fake.wait_idle()


def states(model: ModelStatus) -> list[tuple[int, int, str]]:
    return [(stage.begin, stage.end, str(stage.state)) for stage in model.stages]


async def test_named_workers_and_their_rates() -> None:
    clock = Clock()
    async with asyncio.timeout(END), fake_cluster((3, 5)) as fake:
        last, head, middle = (fake.cluster.endpoints[index] for index in (2, 0, 1))
        watch = ModelWatch("m", NamedWorkers([last, head, middle]), clock=clock)
        async with contextlib.aclosing(watch):
            first = await watch.read()
            assert first.problem is None
            assert (first.name, first.layers, first.trackers) == ("m", 8, ())
            assert states(first) == [(0, 3, "READY"), (3, 5, "READY"), (5, 8, "READY")]
            assert [stage.worker for stage in first.stages] == [head, middle, last]
            assert {(stage.engine, stage.evidence) for stage in first.stages} == {
                ("fake", "FIXTURE")
            }
            assert first.stages[0].work.decode_tokens_per_second is None
            await generate(fake, 20)
            clock.now += 2
            second = await watch.read()
            for stage in second.stages:
                assert (stage.work.prefill_tokens, stage.work.decode_tokens) == (3, 20)
                assert stage.work.prefill_tokens_per_second == 1.5
                assert stage.work.decode_tokens_per_second == 10.0
                assert (stage.work.open_sessions, stage.work.queued_steps) == (0, 0)
                assert stage.memory.resident_bytes
            pairs = [(seam.source, seam.target) for seam in second.seams]
            assert pairs == [(0, 1), (1, 2), (2, 0)]
            for seam in second.seams:
                assert (seam.round_trip_us, seam.bytes_per_second) == (None, None)
                assert seam.sent_bytes_per_second
            (lane,) = second.lanes
            assert lane.admission is Admission.DARK_ADMITTED
            assert "named by hand" in lane.reason
            assert [worker.worker for worker in lane.workers] == [head, middle, last]
            # A rate is that of the last seconds, not of all time.
            for _ in range(3):
                clock.now += 2
                third = await watch.read()
            assert third.stages[0].work.decode_tokens_per_second == 0.0
            assert third.stages[0].work.decode_tokens == 20


async def test_a_killed_stage_is_lost_in_its_place_and_comes_back() -> None:
    async with asyncio.timeout(END), fake_cluster((3, 5)) as fake:
        watch = ModelWatch("m", NamedWorkers(fake.cluster.endpoints))
        async with contextlib.aclosing(watch):
            await watch.read()
            await fake.cluster.workers[1].kill()
            lost = await watch.read()
            assert states(lost) == [(0, 3, "READY"), (3, 5, "LOST"), (5, 8, "READY")]
            stage = lost.stages[1]
            assert stage.problem is not None
            assert stage.problem.reason == "PEER_UNREACHABLE"
            assert stage.work.decode_tokens is None
            assert lost.problem is not None
            assert lost.problem.reason == "PEER_UNREACHABLE"
            assert "layers [3, 5) are LOST" in lost.problem.message
            assert [(s.source, s.target) for s in lost.seams] == [(0, 1), (1, 2), (2, 0)]


async def test_workers_that_never_answered() -> None:
    async with asyncio.timeout(END), fake_cluster((4,)) as fake:
        gone = fake.cluster.endpoints[1]
        await fake.cluster.workers[1].kill()
        async with contextlib.aclosing(
            ModelWatch("m", NamedWorkers(fake.cluster.endpoints))
        ) as watch:
            status = await watch.read()
            assert states(status) == [(0, 4, "READY"), (4, 8, "LOST")]
            assert status.stages[1].worker == gone
        async with contextlib.aclosing(ModelWatch("m", NamedWorkers([gone]))) as watch:
            status = await watch.read()
            assert (status.layers, status.stages) == (0, ())
            assert status.problem is not None
            assert status.problem.reason == "PEER_UNREACHABLE"
        async with contextlib.aclosing(
            ModelWatch("m", NamedWorkers(["192.0.2.1:7", "no address"]))
        ) as watch:
            status = await watch.read()
            assert status.problem is not None
            assert status.problem.reason == "INSECURE_TRANSPORT"


async def test_workers_that_do_not_fit_say_so() -> None:
    async with (
        asyncio.timeout(END),
        fake_cluster((4,)) as one,
        fake_cluster((4,), "--batch_policy=shared") as other,
    ):
        names = [one.cluster.endpoints[0], other.cluster.endpoints[1]]
        async with contextlib.aclosing(ModelWatch("m", NamedWorkers(names))) as watch:
            status = await watch.read()
            assert status.problem is not None
            assert {stage.state for stage in status.stages} == {
                StageState.READY,
                StageState.MISSING,
            }
            assert status.problem.reason == "NO_ROUTE"
            assert len(status.lanes) == 2


# ---- With a tracker ----


@contextlib.asynccontextmanager
async def tracked(
    folder: pathlib.Path, *flags: str
) -> AsyncIterator[tuple[TrackerProcess, TrackerClient]]:
    async with (
        asyncio.timeout(END),
        await TrackerProcess.start(f"sqlite:///{folder}/tracker.db", *flags) as tracker,
        TrackerClient([tracker.endpoint]) as client,
    ):
        yield tracker, client


async def register(
    client: TrackerClient, fake: FakeCluster, peers: Sequence[PeerMeasurement] = ()
) -> None:
    """All workers, as their nodes would."""
    for number, worker in enumerate(fake.route.workers):
        capability, metrics = await worker.capability(), await worker.metrics()
        where = Whereabouts(
            f"w{number}",
            f"n{number}",
            "m",
            worker.endpoint,
            labels={MACHINE_MEMORY_LABEL: str(8 << 30)},
        )
        registration = make_registration(where, capability, metrics, peers)
        await client.register(
            tracker_pb2.RegisterRequest(
                registration=registration, load=make_load(await worker.health(), metrics)
            )
        )


async def test_a_trackers_workers_with_what_their_nodes_measured(tmp_path: pathlib.Path) -> None:
    async with (
        tracked(tmp_path, "--admit_dark") as (tracker, client),
        fake_cluster((4,)) as fake,
        contextlib.aclosing(ModelWatch("m", TrackedWorkers(client, "m"))) as watch,
    ):
        empty = await watch.read()
        assert empty.problem is not None
        assert (empty.problem.reason, empty.stages) == ("NO_ROUTE", ())
        await register(client, fake, [PeerMeasurement("n1", 900, 10**8)])
        status = await watch.read()
        assert status.problem is None
        assert status.trackers == (tracker.endpoint,)
        assert [(s.worker, s.machine, s.state) for s in status.stages] == [
            ("w0", "n0", StageState.READY),
            ("w1", "n1", StageState.READY),
        ]
        assert status.stages[0].memory.machine_bytes == 8 << 30
        assert status.stages[1].engine == "fake"  # asked of the worker itself
        for seam in status.seams:
            assert (seam.round_trip_us, seam.bytes_per_second) == (900, 10**8)
        (lane,) = status.lanes
        assert lane.admission is Admission.DARK_ADMITTED
        assert "admits dark lanes" in lane.reason

        # A node withdraws the worker that it has lost.
        await fake.cluster.workers[1].kill()
        await client.deregister(tracker_pb2.DeregisterRequest(worker_id="w1"))
        lost = await watch.read()
        assert states(lost) == [(0, 4, "READY"), (4, 8, "LOST")]
        assert (lost.stages[1].worker, lost.stages[1].machine) == ("w1", "n1")
        assert lost.problem is not None
        assert lost.problem.reason == "PEER_LOST"
        await client.deregister(tracker_pb2.DeregisterRequest(worker_id="w0"))
        assert states(await watch.read()) == [(0, 4, "LOST"), (4, 8, "LOST")]

        # What was seen last is shown while the tracker is away.
        await tracker.kill()
        away = await watch.read()
        assert away.problem is not None
        assert away.problem.message.startswith("the tracker does not answer")


async def test_a_dark_lane_and_its_reason(tmp_path: pathlib.Path) -> None:
    async with tracked(tmp_path) as (_, client), fake_cluster((4,)) as fake:
        await register(client, fake)
        async with contextlib.aclosing(ModelWatch("m", TrackedWorkers(client, "m"))) as watch:
            status = await watch.read()
        assert states(status) == [(0, 4, "READY"), (4, 8, "READY")]
        (lane,) = status.lanes
        assert lane.admission is Admission.DARK
        assert "record" in lane.reason
        assert {worker.unroutable for worker in lane.workers} == {f"dark: {lane.reason}"}
        assert status.problem is not None
        assert status.problem.reason == "NO_ROUTE"
        assert lane.reason in status.problem.message
