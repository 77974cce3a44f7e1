"""Clients that vanish and stages that die: bounded, said aloud, and nothing is left behind."""

import asyncio
import json
import signal
from typing import Any

import httpx
import openai
import pytest
from meshnet_gguf.gateway._failures import names_machine
from meshnet_gguf.testing.gateway import MODEL, FakeGateway, fake_gateway

END = 60.0  # seconds after which a test that hangs is given up
# By itself an answer of BODY takes longer than that: whatever ends before was ended.
SLOW = ("--fake_delay=3ms", "--context_tokens=100000")
CUTS = (2, 5)
BODY: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 50000,
}


@pytest.mark.parametrize(
    ("message", "names"),
    [
        ("expected a direct endpoint, got the relay attic.example:7200 for worker-b", True),
        ("the line to [fe80::1]:7001 broke", True),
        ("failed to connect to 10.0.0.5; ask again", True),
        ("worker-b:7001 refuses it", True),
        ("expected at most 4096 tokens, got 5000 (3 of them in [0, 4))", False),
        ('expected a schema of JSON, got {"minimum":50} at properties.age', False),
        ("usable workers cover units 0 to 20 of 30", False),
    ],
)
def test_what_names_a_machine(message: str, names: bool) -> None:
    assert names_machine(message) is names


async def open_sessions(gateway: FakeGateway) -> list[int]:
    return [stage.open_sessions for stage in await gateway.fake.route.metrics()]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_vanishes_frees_every_stage(stream: bool) -> None:
    async with asyncio.timeout(END), fake_gateway(CUTS, *SLOW) as gateway:
        asked = asyncio.create_task(post(gateway, {**BODY, "stream": stream}))
        while await open_sessions(gateway) != [1, 1, 1]:
            await asyncio.sleep(0.01)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await gateway.fake.wait_idle()
        while gateway.admission.active:
            await asyncio.sleep(0.01)
        metrics = await gateway.fake.route.metrics()
        assert [stage.sessions_completed for stage in metrics] == [0, 0, 0]


async def post(gateway: FakeGateway, body: dict[str, Any]) -> str:
    async with httpx.AsyncClient(timeout=END) as http:
        answer = await http.post(f"{gateway.url}/v1/chat/completions", json=body)
        return answer.text


async def test_a_client_that_vanishes_while_it_waits_leaves_the_line() -> None:
    async with asyncio.timeout(END), fake_gateway((), *SLOW) as gateway:
        gateway.admission.max_active = 1
        first = asyncio.create_task(post(gateway, BODY))
        while not gateway.admission.active:
            await asyncio.sleep(0.01)
        second = asyncio.create_task(post(gateway, BODY))
        while not gateway.admission.queued:
            await asyncio.sleep(0.01)
        second.cancel()
        while gateway.admission.queued:
            await asyncio.sleep(0.01)
        assert gateway.admission.active == 1
        first.cancel()
        while gateway.admission.active:
            await asyncio.sleep(0.01)
        await asyncio.gather(first, second, return_exceptions=True)


@pytest.mark.parametrize("killed", [0, 1, 2])
async def test_a_lost_stage_ends_a_stream_with_its_reason(killed: int) -> None:
    async with asyncio.timeout(END), fake_gateway(CUTS, *SLOW) as gateway:
        stream = await gateway.client.chat.completions.create(**BODY, stream=True)
        with pytest.raises(openai.APIError) as caught:
            count = 0
            async for _ in stream:
                count += 1
                if count == 5:
                    await gateway.fake.cluster.workers[killed].kill()
        assert caught.value.code == "PEER_LOST"
        assert caught.value.type == "server_error"

        with pytest.raises(openai.APIStatusError) as refused:
            await gateway.client.chat.completions.create(**BODY)
        assert refused.value.status_code == 503
        assert refused.value.code == "PEER_UNREACHABLE"
        assert "a machine that the answer needs cannot be reached" in refused.value.message
        assert "127.0.0.1" not in refused.value.message
        assert "retry-after" in refused.value.response.headers
        assert gateway.admission.active == 0
        alive = [index for index in range(3) if index != killed]
        await gateway.fake.wait_idle(alive)


async def test_a_stage_that_hangs_is_waited_for_as_long_as_a_route_may_take() -> None:
    async with asyncio.timeout(END), fake_gateway(CUTS, open_within=0.2) as gateway:
        gateway.fake.cluster.workers[1].send(signal.SIGSTOP)
        with pytest.raises(openai.APIStatusError) as refused:
            await gateway.client.chat.completions.create(**BODY)
        assert (refused.value.status_code, refused.value.code) == (504, "DEADLINE_EXCEEDED")
        assert gateway.admission.active == 0


async def test_a_stream_of_a_lost_stage_has_no_good_end(caplog: pytest.LogCaptureFixture) -> None:
    async with asyncio.timeout(END), fake_gateway(CUTS, *SLOW) as gateway:
        lines = []
        async with (
            httpx.AsyncClient(timeout=END) as http,
            http.stream(
                "POST", f"{gateway.url}/v1/chat/completions", json={**BODY, "stream": True}
            ) as answer,
        ):
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            async for line in answer.aiter_lines():
                if line:
                    lines.append(line.removeprefix("data: "))
                if len(lines) == 5:
                    await gateway.fake.cluster.workers[1].kill()
        # What gRPC says names machines: it is in the log, beside what the client is told.
        assert json.loads(lines[-1])["error"] == {
            "message": "a machine that took part in the answer went away; ask again, what was said "
            "so far is not the whole answer (stage [2, 5))",
            "type": "server_error",
            "param": None,
            "code": "PEER_LOST",
        }
        assert "[DONE]" not in lines
    (logged,) = [line for line in caplog.messages if "PEER_LOST (stage [2, 5))" in line]
    assert answer.headers["x-request-id"] in logged


async def test_an_engine_that_fails_is_an_error_before_the_answer_begins() -> None:
    async with asyncio.timeout(END), fake_gateway((), "--fake_fail_from_step=1") as gateway:
        short = {**BODY, "max_tokens": 4}
        with pytest.raises(openai.InternalServerError) as caught:
            await gateway.client.chat.completions.create(**short, stream=True)
        assert caught.value.code == "ENGINE_FAILURE"
        # The next one is served.
        answer = await gateway.client.chat.completions.create(**short)
        assert answer.choices[0].finish_reason == "length"
