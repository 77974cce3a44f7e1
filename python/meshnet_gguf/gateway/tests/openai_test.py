"""OpenAI's own client, unchanged, against a gateway over real workers with the fake engine."""

import asyncio
import codecs
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import openai
import pytest
from meshnet_gguf.client import ChatMessage, SamplingParams, Token
from meshnet_gguf.testing.gateway import MODEL, FakeGateway, fake_gateway
from openai.types.chat import ChatCompletionMessageParam

END = 60.0  # seconds after which a test that hangs is given up
HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]
SAMPLING = SamplingParams(temperature=0.8, top_k=40, seed=5)
OPTIONS: dict[str, Any] = {
    "model": MODEL,
    "temperature": 0.8,
    "seed": 5,
    "max_tokens": 24,
    "extra_body": {"top_k": 40},
}


@pytest.fixture
async def gateway() -> AsyncIterator[FakeGateway]:
    async with asyncio.timeout(END), fake_gateway() as running:
        yield running


async def expected_tokens(gateway: FakeGateway, sampling: SamplingParams = SAMPLING) -> list[Token]:
    """What the bare client gets for the same conversation."""
    async with gateway.fake.route.session() as session:
        answer = await session.chat([ChatMessage("user", "Hello")], sampling, max_tokens=24)
        return [event async for event in answer if isinstance(event, Token)]


def text_of(tokens: Sequence[Token]) -> str:
    # The gateway hides special tokens, ids from 256 to 259 in the fake vocabulary, and what there
    # is of a character that the end of the answer has cut.
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return decoder.decode(b"".join(t.piece for t in tokens if not 256 <= t.token_id < 260))


async def test_models(gateway: FakeGateway) -> None:
    models = [model async for model in gateway.client.models.list()]
    assert [(model.id, model.object, model.owned_by) for model in models] == [
        (MODEL, "model", "meshnet")
    ]
    assert await gateway.client.models.retrieve(MODEL) == models[0]
    with pytest.raises(openai.NotFoundError) as unknown:
        await gateway.client.models.retrieve("another/model")
    assert (unknown.value.code, unknown.value.param) == ("NOT_SERVED", "model")


async def test_a_chat_is_what_the_bare_client_gets(gateway: FakeGateway) -> None:
    tokens = await expected_tokens(gateway)
    answer = await gateway.client.chat.completions.create(messages=HELLO, **OPTIONS)
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == text_of(tokens)
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    # <|user|>, five letters, <|assistant|>.
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 24)
    assert answer.usage.total_tokens == 31


async def test_a_streamed_chat_is_the_same(gateway: FakeGateway) -> None:
    tokens = await expected_tokens(gateway)
    stream = await gateway.client.chat.completions.create(
        messages=HELLO, stream=True, stream_options={"include_usage": True}, **OPTIONS
    )
    chunks = [chunk async for chunk in stream]
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    first, *texts, end, usage = chunks
    assert first.choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in texts) == text_of(tokens)
    assert len(texts) > 10
    assert [chunk.choices[0].finish_reason for chunk in (*texts[-1:], end)] == [None, "length"]
    assert usage.choices == []
    assert usage.usage is not None
    assert (usage.usage.prompt_tokens, usage.usage.completion_tokens) == (7, 24)


async def test_workers_are_free_afterwards(gateway: FakeGateway) -> None:
    await gateway.client.chat.completions.create(messages=HELLO, **OPTIONS)
    stream = await gateway.client.chat.completions.create(messages=HELLO, stream=True, **OPTIONS)
    assert [chunk async for chunk in stream]
    await gateway.fake.wait_idle()
    metrics = await gateway.fake.route.metrics()
    assert [stage.sessions_completed for stage in metrics] == [2, 2]


async def test_an_unknown_model_is_an_error_in_openais_form(gateway: FakeGateway) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await gateway.client.chat.completions.create(model="other", messages=HELLO)
    assert caught.value.code == "NOT_SERVED"
    assert caught.value.param == "model"
    assert "fake" in caught.value.message


async def test_health(gateway: FakeGateway) -> None:
    async with httpx.AsyncClient(base_url=gateway.url) as http:
        assert (await http.get("/healthz")).json() == {"alive": True}
        ready = await http.get("/readyz")
        assert (ready.status_code, ready.json()) == (
            200,
            {"ready": True, "reasons": [], "models": {MODEL: "ready"}},
        )
        await gateway.fake.cluster.workers[1].kill()
        # What is known of the workers is a second old.
        while (await http.get("/readyz")).status_code != 503:
            await asyncio.sleep(0.05)
        assert (await http.get("/healthz")).status_code == 200
        metrics = (await http.get("/metrics")).text
        assert "meshnet_gateway_slots 8.0" in metrics
