"""Routes that a real tracker chooses, over real workers with the fake engine."""

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator

import pytest
from meshnet.errors import ControlError, Reason
from meshnet.testing.tracker_process import TrackerProcess
from meshnet_gguf.client import LayerRange, Route
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.local_cluster import LocalCluster
from meshnet_gguf.registration import Whereabouts, make_load, make_registration
from meshnet_gguf.route_source import Outcome, TrackerRouteSource
from meshnet_gguf.testing.cluster import cluster_of, fake_cluster, fake_specs

from proto.meshnet.control.v1 import tracker_pb2
from proto.meshnet.shard.v1 import errors_pb2

BOS = 256
END = 60.0


async def register(tracker: TrackerProcess, route: Route, model_id: str = "m") -> None:
    """Every worker of a route, as a node would."""
    for number, worker in enumerate(route.workers):
        capability, metrics = await worker.capability(), await worker.metrics()
        where = Whereabouts(f"w{number}", f"n{number}", model_id, worker.endpoint)
        await tracker.stub.Register(
            tracker_pb2.RegisterRequest(
                registration=make_registration(where, capability, metrics),
                load=make_load(await worker.health(), metrics),
            )
        )


@contextlib.asynccontextmanager
async def tracked(folder: pathlib.Path) -> AsyncIterator[TrackerProcess]:
    async with (
        asyncio.timeout(END),
        await TrackerProcess.start(
            f"sqlite:///{folder}/tracker.db", "--admit_dark", "--lease_ms=60000"
        ) as tracker,
    ):
        yield tracker


async def receipts(tracker: TrackerProcess) -> dict[str, tracker_pb2.Receipt]:
    answer = await tracker.stub.ListReceipts(tracker_pb2.ListReceiptsRequest())
    return {receipt.worker_id: receipt for receipt in answer.receipts}


async def open_sessions(tracker: TrackerProcess) -> int:
    status = await tracker.stub.GetStatus(tracker_pb2.GetStatusRequest())
    return int(status.open_sessions)


async def test_a_session_on_the_route_of_a_tracker(tmp_path: pathlib.Path) -> None:
    async with tracked(tmp_path) as tracker, fake_cluster((2, 5)) as fake:
        await register(tracker, fake.route)
        async with TrackerRouteSource([tracker.endpoint], "m") as source:
            async with source.open() as route:
                assert [hop.layers for hop in route.route.hops] == [
                    LayerRange(0, 2),
                    LayerRange(2, 5),
                    LayerRange(5, 8),
                ]
                assert await open_sessions(tracker) == 1
                async with route.session(work_id="work-1") as session:
                    answer = await session.generate([BOS, 1, 2], max_tokens=9).result()
                await route.report(session, Outcome.COMPLETED)
                await route.report(session, Outcome.COMPLETED)
            assert await open_sessions(tracker) == 0
        async with fake.route.session() as session:
            direct = await session.generate([BOS, 1, 2], max_tokens=9).result()
        assert answer.token_ids == direct.token_ids
        found = await receipts(tracker)
        assert sorted(found) == ["w0", "w1", "w2"]
        for number, receipt in enumerate(found.values()):
            assert receipt.work_id == "work-1"
            assert receipt.node_id == f"n{number}"
            assert receipt.outcome == tracker_pb2.OUTCOME_COMPLETED
            assert (receipt.input_steps, receipt.output_steps) == (3, 8)
        assert found["w0"].bytes_sent > 0


async def test_what_nobody_serves(tmp_path: pathlib.Path) -> None:
    async with tracked(tmp_path) as tracker:
        async with TrackerRouteSource([tracker.endpoint], "m") as source:
            with pytest.raises(ControlError) as caught:
                async with source.open():
                    pytest.fail("a route over nothing")
        assert caught.value.reason is Reason.NO_ROUTE
        assert await open_sessions(tracker) == 0


async def test_a_head_that_is_another_one_by_now(tmp_path: pathlib.Path) -> None:
    async with (
        tracked(tmp_path) as tracker,
        fake_cluster() as fake,
        LocalCluster(fake_specs((2,))) as others,
        LocalCluster(fake_specs((4,), "--fake_artifact=other")) as strangers,
    ):
        for endpoints, reason in (
            (strangers.endpoints, errors_pb2.REASON_RECIPE_MISMATCH),
            (others.endpoints, errors_pb2.REASON_RANGE_MISMATCH),
        ):
            for number, worker in enumerate(fake.route.workers):
                where = Whereabouts(f"w{number}", f"n{number}", "m", endpoints[number])
                metrics = await worker.metrics()
                message = make_registration(where, fake.route.capabilities[number], metrics)
                await tracker.stub.Register(
                    tracker_pb2.RegisterRequest(
                        registration=message, load=tracker_pb2.Load(ready=True)
                    )
                )
            async with TrackerRouteSource([tracker.endpoint], "m") as source:
                with pytest.raises(MeshnetError) as caught:
                    async with source.open():
                        pytest.fail("the head is not what the tracker says")
            assert caught.value.reason == reason
            assert await open_sessions(tracker) == 0


async def test_the_next_epoch_goes_around_a_dead_stage(tmp_path: pathlib.Path) -> None:
    specs = fake_specs()
    async with (
        tracked(tmp_path) as tracker,
        cluster_of(specs) as fake,
        cluster_of(specs) as spare,
        TrackerRouteSource([tracker.endpoint], "m") as source,
    ):
        await register(tracker, fake.route)
        async with source.open() as route:
            await fake.cluster.workers[1].kill()
            with pytest.raises(MeshnetError) as caught:
                async with route.session() as session:
                    pytest.fail("a session over a dead worker")
            session = route.session()
            await route.report(session, Outcome.FAILED, caught.value)
            found = await receipts(tracker)
            assert found["w0"].outcome == tracker_pb2.OUTCOME_UNVERIFIED
            assert found["w1"].outcome == tracker_pb2.OUTCOME_FAILED
            assert found["w1"].reason == caught.value.reason_name == "PEER_UNREACHABLE"
            with pytest.raises(ControlError) as refused:
                await route.reroute([LayerRange(4, 8)])
            assert refused.value.reason is Reason.NO_ROUTE
            # Another worker for the same layers.
            tail = spare.route.workers[1]
            metrics = await tail.metrics()
            where = Whereabouts("w2", "n2", "m", tail.endpoint)
            await tracker.stub.Register(
                tracker_pb2.RegisterRequest(
                    registration=make_registration(where, await tail.capability(), metrics),
                    load=make_load(await tail.health(), metrics),
                )
            )
            await route.reroute([LayerRange(4, 8)])
            assert route.epoch == 2
            assert [hop.worker_id for hop in route.chosen.hops] == ["w0", "w2"]
            async with route.session() as session:
                answer = await session.generate([BOS, 7], max_tokens=5).result()
            assert len(answer.token_ids) == 5


async def test_a_second_tracker_takes_over(tmp_path: pathlib.Path) -> None:
    async with tracked(tmp_path) as tracker, fake_cluster() as fake:
        await register(tracker, fake.route)
        async with await TrackerProcess.start(f"sqlite:///{tmp_path}/other.db") as dead:
            await dead.kill()
        async with (
            TrackerRouteSource([dead.endpoint, tracker.endpoint], "m") as source,
            source.open() as route,
            route.session() as session,
        ):
            assert len((await session.generate([BOS], max_tokens=3).result()).token_ids) == 3
        async with TrackerRouteSource([dead.endpoint], "m") as source:
            with pytest.raises(ControlError) as caught:
                async with source.open():
                    pytest.fail("a route from a dead tracker")
        assert caught.value.reason is Reason.PEER_UNREACHABLE
        assert dead.endpoint in caught.value.message


async def test_a_request_that_cannot_succeed_is_no_workers_failure(tmp_path: pathlib.Path) -> None:
    async with tracked(tmp_path) as tracker, fake_cluster() as fake:
        await register(tracker, fake.route)
        async with TrackerRouteSource([tracker.endpoint], "m") as source, source.open() as route:
            async with route.session() as session:
                with pytest.raises(MeshnetError) as caught:
                    await session.generate([100_000], max_tokens=3).result()
            await route.report(session, Outcome.FAILED, caught.value)
        for receipt in (await receipts(tracker)).values():
            assert receipt.outcome == tracker_pb2.OUTCOME_UNVERIFIED
            assert receipt.reason == "TOKEN_OUT_OF_RANGE"
