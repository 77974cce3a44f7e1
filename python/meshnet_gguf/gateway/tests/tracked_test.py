"""A gateway whose routes a real tracker chooses, over real workers with the fake engine."""

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
from meshnet.testing.tracker_process import TrackerProcess
from meshnet_gguf.client import WorkerClient
from meshnet_gguf.gateway import (
    Admission,
    GatewayOptions,
    KeptRouteSource,
    TrackedModelSource,
)
from meshnet_gguf.local_cluster import LocalCluster
from meshnet_gguf.registration import Whereabouts, make_load, make_registration
from meshnet_gguf.route_source import TrackerRouteSource
from meshnet_gguf.testing.cluster import FakeCluster, fake_cluster, fake_specs
from meshnet_gguf.testing.gateway import RunningGateway, gateway_over
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam

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
        another_gateway(tracker, keep_seconds=keep_seconds) as gateway,
    ):
        yield Tracked(tracker, fake, gateway.url, gateway.client)


@contextlib.asynccontextmanager
async def another_gateway(
    tracker: TrackerProcess, *, admission: Admission | None = None, keep_seconds: float = 0.0
) -> AsyncIterator[RunningGateway]:
    async with (
        TrackerRouteSource([tracker.endpoint], "m") as source,
        gateway_over(
            TrackedModelSource(source),
            model="m",
            admission=admission,
            options=GatewayOptions(ready_seconds=30, status_seconds=0),
            keep_seconds=keep_seconds,
        ) as gateway,
    ):
        yield gateway


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
        ready = await http.get("/readyz")
        assert (ready.status_code, ready.json()["ready"]) == (200, True)
        await stream.close()


@pytest.mark.parametrize("by_tracker", [True, False])
async def test_what_other_gateways_have_taken_is_waited_for(
    tmp_path: pathlib.Path, by_tracker: bool
) -> None:
    """As a gateway's own slots are: in its line, within the line's bounds."""
    slow = ("--max_sessions=2", "--fake_delay=3ms", "--context_tokens=100000")
    admission = Admission(max_active=2)
    async with contextlib.AsyncExitStack() as stack:
        mesh = await stack.enter_async_context(tracked(tmp_path, *slow))
        await mesh.register()
        if by_tracker:
            ours = another_gateway(mesh.tracker, admission=admission)
        else:
            source = KeptRouteSource(mesh.fake.cluster.endpoints, answer_within=30)
            await stack.enter_async_context(contextlib.aclosing(source))
            ours = gateway_over(source, model="m", admission=admission)
        gateway = await stack.enter_async_context(ours)
        theirs = [
            await mesh.client.chat.completions.create(
                model="m", messages=HELLO, max_tokens=50000, stream=True
            )
            for _ in range(2)
        ]
        for stream in theirs:
            await anext(aiter(stream))

        def ask() -> Coroutine[Any, Any, ChatCompletion]:
            return gateway.client.chat.completions.create(model="m", messages=HELLO, max_tokens=2)

        for bound in ("max_queued", "queue_seconds"):
            before = getattr(admission, bound)
            setattr(admission, bound, 0)
            with pytest.raises(openai.RateLimitError) as refused:
                await ask()
            setattr(admission, bound, before)
            assert refused.value.code == "QUEUE_FULL"
            assert refused.value.response.headers["retry-after"] == "1"
            assert (admission.active, admission.queued) == (0, 0)
        waiting = asyncio.create_task(ask())
        while not admission.queued:
            await asyncio.sleep(0.01)
        await theirs[0].close()
        assert (await waiting).choices[0].finish_reason == "length"
        await theirs[1].close()


async def test_sessions_that_wait_make_room_on_a_full_mesh(tmp_path: pathlib.Path) -> None:
    """The gateway reckons with eight slots, the workers have two: the tracker sees them full."""
    async with tracked(tmp_path, "--max_sessions=2", keep_seconds=60) as mesh:
        await mesh.register()
        for text in ("one", "two", "three"):
            answer = await mesh.client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": text * 9}], max_tokens=4
            )
            assert answer.choices[0].finish_reason == "length"


async def test_a_refusal_names_no_machine(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A machine that the head cannot make out is not the client's fault, or business."""
    async with tracked(tmp_path) as mesh:
        await mesh.register()
        tail = mesh.fake.route.workers[1]
        where = Whereabouts("w1", "n1", "m", "attic.example")
        registration = make_registration(where, await tail.capability(), await tail.metrics())
        load = make_load(await tail.health(), await tail.metrics())
        await mesh.tracker.stub.Register(
            tracker_pb2.RegisterRequest(registration=registration, load=load)
        )
        with pytest.raises(openai.APIStatusError) as refused:
            await mesh.client.chat.completions.create(model="m", messages=HELLO)
    assert (refused.value.status_code, refused.value.code) == (400, "FIELD_OUT_OF_BOUNDS")
    said = (
        "the machines that serve the model refuse this request; if nothing is wrong with it, tell"
    )
    assert said in refused.value.message
    assert "attic" not in refused.value.response.text
    (logged,) = [line for line in caplog.messages if "got 'attic.example'" in line]
    assert refused.value.response.headers["x-request-id"] in logged


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
