"""The status as the gateway serves it: whole, as events, with keys, and at its end."""

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncGenerator

import httpx
import pytest
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.gateway import ApiKeys, GatewayOptions
from meshnet_gguf.gateway.status_feed import StatusFeed
from meshnet_gguf.status import GatewayStatus, MeshStatus, StageState, status_from_json
from meshnet_gguf.testing.gateway import MODEL, fake_gateway

END = 60.0  # seconds after which a test that hangs is given up
OFTEN = GatewayOptions(ready_seconds=30, status_seconds=0.01)
IDLE = GatewayStatus(0.0, 0, 1, 0, 0, 0, {})


async def statuses(http: httpx.AsyncClient) -> AsyncGenerator[MeshStatus, None]:
    """What /status/events tells."""
    async with http.stream("GET", "/status/events") as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                yield status_from_json(line.removeprefix("data: "))


async def test_what_the_gateway_and_its_stages_did() -> None:
    async with (
        asyncio.timeout(END),
        fake_gateway(options=OFTEN) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=END) as http,
    ):
        await gateway.client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Hello"}],
            max_tokens=8,
            extra_body={"ignore_eos": True},
        )
        refused = await http.post("/v1/chat/completions", json={"model": "other", "messages": []})
        assert refused.status_code == 400
        status = status_from_json((await http.get("/status.json")).content)
        assert status.gateway is not None
        assert status.gateway.completion_tokens == 8
        assert status.gateway.prompt_tokens > 0
        assert (status.gateway.active_slots, status.gateway.slots) == (0, 8)
        assert status.gateway.refusals == {"FIELD_OUT_OF_BOUNDS": 1}
        (model,) = status.models
        assert (model.name, model.layers, model.problem) == (MODEL, 8, None)
        # A token that ends an answer is not computed any further.
        assert [stage.work.decode_tokens for stage in model.stages] == [7, 7]


async def test_whoever_stops_an_answer_was_not_refused() -> None:
    async with (
        asyncio.timeout(END),
        fake_gateway((4,), "--fake_delay=1ms", "--context_tokens=100000", options=OFTEN) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=END) as http,
    ):
        answer = await gateway.client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Hello"}],
            max_tokens=50_000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        await anext(aiter(answer))
        await answer.close()
        while any(stage.open_sessions for stage in await gateway.fake.route.metrics()):
            await asyncio.sleep(0.01)
        # The workers count it among the others.
        said = [stage.refusals for stage in await gateway.fake.route.metrics()]
        assert "CANCELLED" in said[0]
        status = status_from_json((await http.get("/status.json")).content)
        assert status.gateway is not None
        assert status.gateway.refusals == {}
        assert [stage.refusals for stage in status.models[0].stages] == [{}, {}]


async def test_a_killed_stage_comes_as_an_event() -> None:
    async with (
        asyncio.timeout(END),
        fake_gateway(options=OFTEN) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=END) as http,
        contextlib.aclosing(statuses(http)) as events,
    ):
        first = await anext(events)
        assert {stage.state for stage in first.models[0].stages} == {StageState.READY}
        await gateway.fake.cluster.workers[1].kill()
        async for status in events:
            if status.models[0].problem is not None:
                break
        assert [stage.state for stage in status.models[0].stages] == [
            StageState.READY,
            StageState.LOST,
        ]


async def test_keys(tmp_path: pathlib.Path) -> None:
    keys = ApiKeys(tmp_path / "keys.json")
    secret = keys.add("alice")
    options = GatewayOptions(keys=keys, status_seconds=0.01)
    async with (
        asyncio.timeout(END),
        fake_gateway((), options=options) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=END) as http,
    ):
        for path in ("/status.json", "/status/events"):
            answer = await http.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "UNAUTHENTICATED")
        http.headers["authorization"] = f"Bearer {secret}"
        assert (await http.get("/status.json")).status_code == 200
        # A key that is taken away ends what it had opened.
        async with http.stream("GET", "/status/events") as answer:
            lines = answer.aiter_lines()
            assert (await anext(lines)).startswith('data: {"taken_at"')
            keys.remove("alice")
            last = [line async for line in lines if line][-1]
        assert '"code": "UNAUTHENTICATED"' in last


async def test_whoever_follows_does_not_hold_up_the_end() -> None:
    """The gateway waits seconds for answers under way, but for no status."""
    async with asyncio.timeout(END):
        async with contextlib.AsyncExitStack() as stack:
            gateway = await stack.enter_async_context(
                fake_gateway((), options=GatewayOptions(status_seconds=3600))
            )
            http = await stack.enter_async_context(
                httpx.AsyncClient(base_url=gateway.url, timeout=END)
            )
            answer = await stack.enter_async_context(http.stream("GET", "/status/events"))
            lines = answer.aiter_lines()
            await anext(lines)
            await gateway.server.__aexit__(None, None, None)
            assert [line async for line in lines if line] == []


async def test_one_reading_serves_all_and_too_many_are_refused() -> None:
    readings = 0

    def gateway() -> GatewayStatus:
        nonlocal readings
        readings += 1
        return IDLE

    feed = StatusFeed([], gateway, interval=3600)
    async with asyncio.timeout(END), contextlib.AsyncExitStack() as stack:
        followers = [
            await stack.enter_async_context(contextlib.aclosing(feed.follow())) for _ in range(65)
        ]
        texts = [await anext(follower) for follower in followers[:64]]
        assert len(set(texts)) == readings == 1
        with pytest.raises(MeshnetError) as caught:
            await anext(followers[64])
        assert caught.value.reason_name == "QUEUE_FULL"
        await followers[0].aclose()
        assert await anext(feed.follow()) == texts[0]
        feed.end()
        with pytest.raises(StopAsyncIteration):
            await anext(followers[1])
