"""A gateway whose routes a real tracker chooses, over real workers with the fake engine."""

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
import openai
import pytest
from meshnet.testing.tracker_process import TrackerProcess
from meshnet_gguf.client import WorkerClient
from meshnet_gguf.gateway import (
    Admission,
    GatewayOptions,
    GatewayServer,
    KeptSessions,
    Listener,
    ServedModel,
    Serving,
    TemplateRenderer,
    TrackedModelSource,
    make_app,
)
from meshnet_gguf.local_cluster import LocalCluster
from meshnet_gguf.registration import Whereabouts, make_load, make_registration
from meshnet_gguf.route_source import TrackerRouteSource
from meshnet_gguf.testing.cluster import FakeCluster, fake_cluster, fake_specs
from openai.types.chat import ChatCompletionMessageParam

from proto.meshnet.control.v1 import tracker_pb2

END = 60.0
HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]


@dataclass(frozen=True)
class Tracked:
    tracker: TrackerProcess
    fake: FakeCluster
    url: str
    client: openai.AsyncOpenAI

    async def register(self, *more: WorkerClient) -> None:
        """All workers and `more`, as their nodes would."""
        for number, worker in enumerate([*self.fake.route.workers, *more]):
            capability, metrics = await worker.capability(), await worker.metrics()
            where = Whereabouts(f"w{number}", f"n{number}", "m", worker.endpoint)
            await self.tracker.stub.Register(
                tracker_pb2.RegisterRequest(
                    registration=make_registration(where, capability, metrics),
                    load=make_load(await worker.health(), metrics),
                )
            )

    async def outcomes(self, count: int) -> list[int]:
        """How the work of all workers ended, once the ledger has that many receipts."""
        while True:
            answer = await self.tracker.stub.ListReceipts(tracker_pb2.ListReceiptsRequest())
            if len(answer.receipts) >= count:
                return sorted(receipt.outcome for receipt in answer.receipts)
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def tracked(
    folder: pathlib.Path, *flags: str, keep_seconds: float = 0.0
) -> AsyncIterator[Tracked]:
    async with (
        asyncio.timeout(END),
        await TrackerProcess.start(
            f"sqlite:///{folder}/tracker.db", "--admit_dark", "--lease_ms=60000"
        ) as tracker,
        fake_cluster((4,), *flags) as fake,
        TrackerRouteSource([tracker.endpoint], "m") as source,
        TemplateRenderer() as renderer,
    ):
        model = ServedModel("m", TrackedModelSource(source))
        admission = Admission(max_active=8)
        serving = Serving(
            [model],
            admission,
            renderer,
            open_within=30,
            kept=KeptSessions(admission, seconds=keep_seconds),
        )
        with Listener("127.0.0.1:0") as listener:
            async with (
                GatewayServer(
                    make_app(serving, GatewayOptions(ready_seconds=30, status_seconds=0)), listener
                ) as server,
                openai.AsyncOpenAI(
                    base_url=f"{server.url}/v1", api_key="x", max_retries=0
                ) as client,
            ):
                yield Tracked(tracker, fake, server.url, client)


async def test_answers_over_the_trackers_route(tmp_path: pathlib.Path) -> None:
    async with tracked(tmp_path) as mesh:
        await mesh.register()
        answer = await mesh.client.chat.completions.create(
            model="m", messages=HELLO, max_tokens=4, n=2, seed=1
        )
        assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
        completed = tracker_pb2.OUTCOME_COMPLETED
        assert await mesh.outcomes(4) == [completed] * 4
        # Receipts come before the end of the session.
        while (await mesh.tracker.stub.GetStatus(tracker_pb2.GetStatusRequest())).open_sessions:
            await asyncio.sleep(0.01)


async def test_a_model_that_nobody_serves_is_not_ready_and_refused(tmp_path: pathlib.Path) -> None:
    async with tracked(tmp_path) as mesh:
        with pytest.raises(openai.InternalServerError) as caught:
            await mesh.client.chat.completions.create(model="m", messages=HELLO)
        assert (caught.value.status_code, caught.value.code) == (503, "NO_ROUTE")
        async with httpx.AsyncClient(base_url=mesh.url, timeout=END) as http:
            ready = await http.get("/readyz")
            assert ready.status_code == 503
            assert "NO_ROUTE" in ready.json()["models"]["m"]
            await mesh.register()
            assert (await http.get("/readyz")).status_code == 200


async def test_a_mesh_that_is_full_is_ready(tmp_path: pathlib.Path) -> None:
    """To look whether it is takes no session."""
    slow = ("--max_sessions=1", "--fake_delay=3ms", "--context_tokens=100000")
    async with (
        tracked(tmp_path, *slow) as mesh,
        httpx.AsyncClient(base_url=mesh.url, timeout=END) as http,
    ):
        await mesh.register()
        stream = await mesh.client.chat.completions.create(
            model="m", messages=HELLO, max_tokens=50000, stream=True
        )
        await anext(aiter(stream))
        await mesh.register()  # as heartbeats say it: one session, of one
        with pytest.raises(openai.InternalServerError) as full:
            await mesh.client.chat.completions.create(model="m", messages=HELLO, max_tokens=1)
        assert full.value.code == "NO_ROUTE"
        ready = await http.get("/readyz")
        assert (ready.status_code, ready.json()["ready"]) == (200, True)
        await stream.close()


async def test_sessions_that_wait_make_room_on_a_full_mesh(tmp_path: pathlib.Path) -> None:
    """The gateway reckons with eight slots, the workers have two: the tracker sees them full."""
    async with tracked(tmp_path, "--max_sessions=2", keep_seconds=60) as mesh:
        await mesh.register()
        for text in ("one", "two", "three"):
            answer = await mesh.client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": text * 9}], max_tokens=4
            )
            assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("stage", [0, 1])
async def test_a_request_after_a_death_takes_another_way(
    tmp_path: pathlib.Path, stage: int
) -> None:
    """The tracker does not know yet that a worker is dead: its lease is a minute."""
    other = fake_specs()[stage]
    async with (
        tracked(tmp_path) as mesh,
        LocalCluster([other]) as spare,
        WorkerClient(spare.endpoints[0]) as worker,
    ):
        await mesh.register(worker)
        await mesh.fake.cluster.workers[stage].kill()
        # Either may be chosen first; by the third session both have been.
        for _ in range(3):
            answer = await mesh.client.chat.completions.create(
                model="m", messages=HELLO, max_tokens=4
            )
            assert answer.choices[0].finish_reason == "length"
        await spare.workers[0].kill()
        with pytest.raises(openai.InternalServerError) as caught:
            await mesh.client.chat.completions.create(model="m", messages=HELLO)
        assert caught.value.code in ("NO_ROUTE", "PEER_UNREACHABLE", "PEER_LOST")


async def test_a_lost_stage_is_in_the_ledger(tmp_path: pathlib.Path) -> None:
    async with tracked(tmp_path, "--fake_delay=3ms", "--context_tokens=100000") as mesh:
        await mesh.register()
        stream = await mesh.client.chat.completions.create(
            model="m", messages=HELLO, max_tokens=50000, stream=True
        )
        with pytest.raises(openai.APIError) as caught:
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    await mesh.fake.cluster.workers[1].kill()
        assert caught.value.code == "PEER_LOST"
        assert await mesh.outcomes(2) == sorted(
            [tracker_pb2.OUTCOME_FAILED, tracker_pb2.OUTCOME_UNVERIFIED]
        )
