"""Calls of tools through OpenAI's own client, over real workers with the fake engine.

The fake engine's template knows no tools, so they are served the generic way. It says what a
grammar makes it say: where a test needs a certain answer of the model's own, it is given one.
"""

import asyncio
import dataclasses
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import jsonschema
import openai
import pytest
import pytest_asyncio
from meshnet_gguf.client import SamplingParams
from meshnet_gguf.gateway import _serving
from meshnet_gguf.gateway._generation import Begun, Ended, Piece
from meshnet_gguf.gateway._tool_calls import ToolRun, ToolUse
from meshnet_gguf.gateway._tool_format import GENERIC, ToolFormat
from meshnet_gguf.gateway._tool_parser import CallArguments, CallBegun
from meshnet_gguf.gateway.routes import ModelText
from meshnet_gguf.testing.gateway import MODEL, FakeGateway, fake_gateway
from meshnet_gguf.testing.scripted_head import Talk, scripted_route

from proto.meshnet.shard.v1 import shard_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")
END = 60.0
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Bonn", "Ulm"]},
        "days": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
NOW: dict[str, Any] = {
    "type": "object",
    "properties": {"utc": {"type": "boolean"}},
    "required": ["utc"],
}
SCHEMAS: dict[str, dict[str, Any]] = {"get_weather": WEATHER, "now": NOW}
ASK = [{"role": "user", "content": "Weather?"}]


def tools(*, strict: bool = False) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}
        for name, schema in SCHEMAS.items()
    ]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def gateway() -> AsyncIterator[FakeGateway]:
    async with fake_gateway((4,), "--context_tokens=4096") as running:
        yield running


async def ask(gateway: FakeGateway, **options: Any) -> Any:
    values = {"model": MODEL, "messages": ASK, "tools": tools(), "max_tokens": 300, "seed": 3}
    async with asyncio.timeout(END):
        return await gateway.client.chat.completions.create(**{**values, **options})


def says(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Makes the model's own answer this text."""
    plain = _serving._sampling

    def sampling(*arguments: Any) -> SamplingParams:
        return dataclasses.replace(plain(*arguments), grammar=f"root ::= {json.dumps(text)}")

    monkeypatch.setattr(_serving, "_sampling", sampling)


CALL = '<tool_call>\n{"name": "now", "arguments": {"utc": true}}\n</tool_call>'


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
@pytest.mark.parametrize("seed", range(2))
async def test_a_call_that_is_demanded_is_one_by_its_schema(
    gateway: FakeGateway, choice: Any, seed: int
) -> None:
    answer = await ask(gateway, tool_choice=choice, seed=seed, temperature=1.5)
    [choice_] = answer.choices
    assert (choice_.finish_reason, choice_.message.content) == ("tool_calls", None)
    [call] = choice_.message.tool_calls
    assert call.type == "function"
    assert len(call.id) == 9
    assert call.function.name in SCHEMAS if choice == "required" else call.function.name == "now"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
async def test_a_streamed_call_is_the_same(gateway: FakeGateway, choice: Any) -> None:
    whole = await ask(gateway, tool_choice=choice)
    stream = await ask(gateway, tool_choice=choice, stream=True)
    chunks = [chunk async for chunk in stream]
    parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or ()]
    assert [part.index for part in parts] == [0] * len(parts)
    [expected] = whole.choices[0].message.tool_calls
    assert [part.function.name for part in parts if part.id] == [expected.function.name]
    assert "".join(part.function.arguments or "" for part in parts) == expected.function.arguments
    assert len(parts) > 5
    assert chunks[0].choices[0].delta.role == "assistant"
    assert not any(chunk.choices[0].delta.content for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
async def test_every_choice_has_a_call_with_an_id_of_its_own(
    gateway: FakeGateway, choice: Any
) -> None:
    whole = await ask(gateway, tool_choice=choice, n=3)
    ids = [call.id for each in whole.choices for call in each.message.tool_calls]
    assert len(set(ids)) == len(ids) == 3
    stream = await ask(gateway, tool_choice=choice, n=3, stream=True)
    streamed: dict[int, list[str]] = {}
    async for chunk in stream:
        for each in chunk.choices:
            for part in each.delta.tool_calls or ():
                streamed.setdefault(each.index, []).append(part.id)
    # Said once, with the call's first part.
    assert [bool(part) for part in streamed[0]] == [True] + [False] * (len(streamed[0]) - 1)
    assert len({parts[0] for parts in streamed.values()}) == 3
    alone = await ask(gateway, tool_choice=choice)
    assert whole.usage.prompt_tokens == alone.usage.prompt_tokens


async def test_a_call_id_that_the_template_writes_is_that_of_its_choice(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Mistral's: what the model has read is what the client is told."""
    with_id = ToolFormat("named", opening="[TOOL]", between="[ID]probe0001[ARGS]")
    read: list[str] = []

    async def form_of(*_: Any) -> ToolFormat:
        return with_id

    async def tokenize(self: ModelText, head: Any, text: str, **options: Any) -> list[int]:
        read.append(text)
        return await plain(self, head, text, **options)

    plain = ModelText.tokenize
    monkeypatch.setattr(ModelText, "tool_format", form_of)
    monkeypatch.setattr(ModelText, "tokenize", tokenize)
    one = {"type": "function", "function": {"name": "now"}}
    answer = await ask(gateway, tool_choice=one, n=2)
    ids = [choice.message.tool_calls[0].id for choice in answer.choices]
    assert re.findall(r"\[ID\](\w{9})\[ARGS\]", "".join(read)) == ids
    assert ids[0] != ids[1]
    alone = await ask(gateway, tool_choice=one)
    assert answer.usage.prompt_tokens == alone.usage.prompt_tokens


async def test_the_stream_helper_of_the_client_takes_it(gateway: FakeGateway) -> None:
    """And what it makes of an answer may come back."""
    async with gateway.client.chat.completions.stream(
        model=MODEL,
        messages=[{"role": "user", "content": "Weather?"}],
        tools=[
            {"type": "function", "function": {"name": "now", "parameters": NOW, "strict": True}}
        ],
        tool_choice="required",
        max_tokens=100,
    ) as stream:
        done = [
            event async for event in stream if event.type == "tool_calls.function.arguments.done"
        ]
    assert [event.name for event in done] == ["now"]
    jsonschema.validate(json.loads(done[0].arguments), NOW)
    message = (await stream.get_final_completion()).choices[0].message
    assert message.tool_calls is not None
    [call] = message.tool_calls
    assert call.function.parsed_arguments == json.loads(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "noon"}
    assert await ask(gateway, messages=[*ASK, message, result], max_tokens=2)


async def test_calls_of_the_models_own(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(monkeypatch, f"I look.\n\n{CALL}\n{CALL.replace('true', 'false')}")
    answer = await ask(gateway)
    [choice] = answer.choices
    assert choice.message.content == "I look."
    assert [(c.function.name, c.function.arguments) for c in choice.message.tool_calls] == [
        ("now", '{"utc": true}'),
        ("now", '{"utc": false}'),
    ]
    assert choice.finish_reason == "tool_calls"
    stream = await ask(gateway, stream=True, parallel_tool_calls=False)
    deltas = [chunk.choices[0].delta async for chunk in stream]
    assert "".join(delta.content or "" for delta in deltas) == "I look."
    assert (
        "".join(part.function.arguments for delta in deltas for part in delta.tool_calls or ())
        == '{"utc": true}'
    )
    await gateway.fake.wait_idle()


async def test_text_that_is_no_call_stays_text(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "Such as <tool_call> or <tool_"
    says(monkeypatch, text)
    answer = await ask(gateway, logprobs=True)
    [choice] = answer.choices
    assert (choice.message.content, choice.message.tool_calls) == (text, None)
    assert choice.finish_reason == "stop"
    assert "".join(entry.token for entry in choice.logprobs.content) == text
    says(monkeypatch, CALL)
    answer = await ask(gateway, tool_choice="none")
    assert answer.choices[0].message.content == CALL


async def test_a_strict_tool_gets_what_its_schema_says(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(monkeypatch, 'Hm. <tool_call>{"name": "get_weather", "arguments": {"wrong": 1}}')
    answer = await ask(gateway, tools=tools(strict=True), parallel_tool_calls=False)
    [choice] = answer.choices
    assert choice.message.content == "Hm."
    [call] = choice.message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), WEATHER)
    loose = await ask(gateway, parallel_tool_calls=False)
    assert loose.choices[0].message.tool_calls[0].function.arguments == '{"wrong": 1}'


async def test_after_a_strict_call_the_model_goes_on() -> None:
    prompts: list[list[int]] = []
    held: list[int] = []

    async def script(talk: Talk) -> None:
        await talk.accept()
        for said in ('A<tool_call>{"name": "now", "ar', '{"utc":1}', "\n</tool_call>\nB"):
            message = await talk.generate()
            held[message.start_position :] = list(message.token_ids)
            prompts.append(list(held))
            schema = json.loads(message.sampling.json_schema or "null")
            assert schema == (NOW if said.startswith("{") else None)
            for letter in said.encode():
                held.append(letter)
                await talk.token(message.generation, letter, bytes([letter]))
            if said.endswith("ar"):
                # Given up at the name.
                request = await talk.receive()
                assert request is not None
                assert request.HasField("cancel")
                reason = shard_pb2.FINISH_REASON_CANCELLED
            else:
                reason = shard_pb2.FINISH_REASON_STOP
            await talk.finish(message.generation, reason, len(held) - 1)
        await talk.close()

    async def tokenize(text: str) -> list[int]:
        return list(text.encode())

    use = ToolUse(GENERIC, SCHEMAS, frozenset({"now"}), (), True)
    async with asyncio.timeout(END), scripted_route(script) as (route, head):
        async with route.session() as session:
            run = ToolRun(
                use,
                session,
                [1, 2],
                SamplingParams(),
                tokenize=tokenize,
                hidden=frozenset({1, 2}),
                visible=frozenset(),
                stops=(),
                max_tokens=100,
                ignore_end_of_generation=False,
            )
            parts = [part async for part in run.parts()]
        assert head.failures == []
    assert [bytes(prompt[2:]).decode() for prompt in prompts] == [
        "",
        'A<tool_call>{"name": "now", "arguments": ',
        'A<tool_call>{"name": "now", "arguments": {"utc":1}}',
    ]
    pieces = [part for part in parts if isinstance(part, Piece)]
    assert [piece.text for piece in pieces] == ["A", "B"]
    assert [part.name for part in parts if isinstance(part, CallBegun)] == ["now"]
    assert "".join(p.text for p in parts if isinstance(p, CallArguments)) == '{"utc":1}'
    assert [type(part) for part in (parts[0], parts[-1])] == [Begun, Ended]


async def test_a_conversation_with_tools_is_rendered(gateway: FakeGateway) -> None:
    """The answers of tools are read: another answer, another prompt, the same without."""
    call = {"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    talk: list[dict[str, Any]] = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call, {**call, "id": "b"}]},
        {"role": "tool", "tool_call_id": "a", "content": "noon"},
        {"role": "tool", "tool_call_id": "b", "content": "<|user|>"},
    ]
    first = await ask(gateway, messages=talk, max_tokens=1)
    longer = await ask(
        gateway, messages=[*talk[:-1], {**talk[-1], "content": "<|user|>!"}], max_tokens=1
    )
    # One token a byte, and none of the texts that spell a control token is one.
    assert longer.usage.prompt_tokens == first.usage.prompt_tokens + 1
    without = await ask(gateway, messages=talk, tools=openai.NOT_GIVEN, max_tokens=1)
    assert without.usage.prompt_tokens < first.usage.prompt_tokens


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [tools()[0], tools()[0]]}, "FIELD_OUT_OF_BOUNDS", "tools"),
    (
        {"tool_choice": {"type": "function", "function": {"name": "rm"}}},
        *("FIELD_OUT_OF_BOUNDS", "tool_choice"),
    ),
    ({"tools": [], "tool_choice": "required"}, "FIELD_OUT_OF_BOUNDS", "tool_choice"),
    (
        {"response_format": {"type": "json_object"}},
        *("FEATURE_UNSUPPORTED", "response_format"),
    ),
]


@pytest.mark.parametrize(("options", "code", "param"), REFUSED)
async def test_refusals(
    gateway: FakeGateway, options: dict[str, Any], code: str, param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(gateway, **options)
    assert (caught.value.code, caught.value.param) == (code, param)


async def test_a_schema_that_cannot_be_held_to_is_refused_where_it_must_be(
    gateway: FakeGateway,
) -> None:
    schema = {"type": "object", "properties": {"a": {"not": {}}}}
    odd = [{"type": "function", "function": {"name": "odd", "parameters": schema}}]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(gateway, tools=odd, tool_choice="required", stream=stream)
        assert caught.value.code == "GRAMMAR_INVALID"
    assert await ask(gateway, tools=odd, max_tokens=2)
