"""Stop strings, log-probabilities, seeds, choices, prompts of all kinds: what answers look like."""

import asyncio
import codecs
import dataclasses
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pydantic
import pytest
import pytest_asyncio
from llm.default_plugins import openai_models
from meshnet_gguf.client import (
    ChatMessage,
    SamplingParams,
    SpecialToken,
    Token,
    Vocabulary,
    WorkerClient,
)
from meshnet_gguf.testing.gateway import MODEL, FakeGateway, fake_gateway
from openai.types import CompletionUsage

pytestmark = pytest.mark.asyncio(loop_scope="module")

HELLO: Any = [{"role": "user", "content": "Hello"}]
# The fake engine's text is random bytes; these keep it to letters, so that answers can be compared.
LETTERS = {str(byte): 100.0 for byte in b"abcdefgh"}
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": HELLO,
    "temperature": 1.0,
    "seed": 3,
    "max_tokens": 40,
    "logit_bias": LETTERS,
}
SAMPLING = SamplingParams(temperature=1.0, seed=3, logit_bias=dict.fromkeys(b"abcdefgh", 100.0))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[FakeGateway]:
    async with fake_gateway() as running:
        yield running


async def chat(gateway: FakeGateway, **changes: Any) -> Any:
    return await gateway.client.chat.completions.create(**{**CHAT, **changes})


async def text_of(gateway: FakeGateway, **changes: Any) -> str:
    return str((await chat(gateway, **changes)).choices[0].message.content)


async def bare_tokens(gateway: FakeGateway, sampling: SamplingParams, count: int) -> list[Token]:
    async with gateway.fake.route.session() as session:
        answer = await session.chat([ChatMessage("user", "Hello")], sampling, max_tokens=count)
        return [event async for event in answer if isinstance(event, Token)]


async def test_a_seed_repeats_and_another_one_does_not(gateway: FakeGateway) -> None:
    first = await text_of(gateway)
    assert len(first) == 40
    assert await text_of(gateway) == first
    assert await text_of(gateway, seed=4) != first
    unseeded = {await text_of(gateway, seed=None) for _ in range(3)}
    assert len(unseeded) == 3


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("length", [1, 2, 5])
async def test_a_stop_string_ends_the_answer_and_is_not_shown(
    gateway: FakeGateway, stream: bool, length: int
) -> None:
    whole = await text_of(gateway)
    stop = whole[20 : 20 + length]
    expected = whole[: whole.find(stop)]
    answer = await chat(gateway, stream=stream, stop=["never so", stop])
    if stream:
        chunks = [chunk async for chunk in answer]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert (text, reason) == (expected, "stop")
    await gateway.fake.wait_idle()


async def test_what_only_begins_like_a_stop_string_is_shown(gateway: FakeGateway) -> None:
    whole = await text_of(gateway)
    assert await text_of(gateway, stop=whole[-3:] + "x") == whole


async def test_the_end_of_generation_is_a_stop() -> None:
    async with fake_gateway((4,), "--fake_eog_one_in=5") as gateway:
        answer = await chat(gateway, temperature=0, logit_bias=None, max_tokens=500)
        assert answer.choices[0].finish_reason == "stop"
        assert "<eos>" not in answer.choices[0].message.content
        ignoring = await chat(
            gateway,
            temperature=0,
            logit_bias=None,
            max_tokens=200,
            extra_body={"ignore_eos": True},
        )
        assert ignoring.choices[0].finish_reason == "length"
        assert ignoring.usage.completion_tokens == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_log_probabilities_are_those_of_the_route(gateway: FakeGateway, stream: bool) -> None:
    sampling = SamplingParams(
        temperature=1.0,
        seed=3,
        logit_bias=SAMPLING.logit_bias,
        logprobs=True,
        top_logprobs=2,
    )
    tokens = await bare_tokens(gateway, sampling, 8)
    answer = await chat(gateway, max_tokens=8, logprobs=True, top_logprobs=2, stream=stream)
    if stream:
        entries = [
            entry
            async for chunk in answer
            if chunk.choices[0].logprobs
            for entry in chunk.choices[0].logprobs.content
        ]
    else:
        entries = answer.choices[0].logprobs.content
    assert [entry.bytes for entry in entries] == [list(token.piece) for token in tokens]
    assert [entry.token for entry in entries] == [token.piece.decode() for token in tokens]
    assert [entry.logprob for entry in entries] == [token.logprob for token in tokens]
    for entry, token in zip(entries, tokens, strict=True):
        assert [top.logprob for top in entry.top_logprobs] == [p for _, p in token.top_logprobs]
        for top, (token_id, _) in zip(entry.top_logprobs, token.top_logprobs, strict=True):
            if token_id < 256:
                assert top.bytes == [token_id]


@pytest.mark.parametrize("stream", [True, False])
async def test_choices_differ_and_each_is_whole(gateway: FakeGateway, stream: bool) -> None:
    expected = [await text_of(gateway, seed=seed) for seed in (3, 4, 5)]
    answer = await chat(
        gateway,
        n=3,
        stream=stream,
        **({"stream_options": {"include_usage": True}} if stream else {}),
    )
    usage: CompletionUsage | None
    if stream:
        texts, usage = ["", "", ""], None
        async for chunk in answer:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
            usage = chunk.usage or usage
    else:
        texts = [choice.message.content for choice in answer.choices]
        usage = answer.usage
    assert texts == expected
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (7, 120)


async def test_characters_that_tokens_split_never_show_as_broken_text(gateway: FakeGateway) -> None:
    # Only the bytes of one character of four bytes, in whatever order they come.
    biases = {str(byte): 100.0 for byte in "😀".encode()}
    whole = await text_of(gateway, logit_bias=biases, max_tokens=60)
    stream = await chat(gateway, logit_bias=biases, max_tokens=60, stream=True)
    parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(parts) == whole
    tokens = await bare_tokens(
        gateway,
        SamplingParams(temperature=1.0, seed=3, logit_bias=dict.fromkeys("😀".encode(), 100.0)),
        60,
    )
    text = b"".join(token.piece for token in tokens)
    assert whole == codecs.getincrementaldecoder("utf-8")("replace").decode(text)


async def test_a_character_that_the_last_token_begins_is_not_shown(gateway: FakeGateway) -> None:
    """Its tokens count, and their log-probabilities are there."""
    first = {str("é".encode()[0]): 100.0}
    answer = await chat(gateway, logit_bias=first, max_tokens=1, logprobs=True)
    assert (answer.choices[0].message.content, answer.usage.completion_tokens) == ("", 1)
    assert [entry.bytes for entry in answer.choices[0].logprobs.content] == [[0xC3]]
    stream = await chat(gateway, logit_bias=first, max_tokens=1, stream=True)
    assert "".join([c.choices[0].delta.content or "" async for c in stream]) == ""


async def test_the_line_feed_is_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vocabularies tell which token it is; that does not make it one that nobody may see."""
    known = WorkerClient.vocabulary

    async def vocabulary(self: WorkerClient) -> Vocabulary:
        found = await known(self)
        # The fake engine says no control characters: another byte has the role here.
        feed = SpecialToken("nl", ord("b"), b"b")
        return dataclasses.replace(found, special_tokens=(*found.special_tokens, feed))

    monkeypatch.setattr(WorkerClient, "vocabulary", vocabulary)
    async with fake_gateway(()) as gateway:
        text = await text_of(gateway)
        assert (len(text), set(text)) == (40, set("abcdefgh"))
        assert await text_of(gateway, stop="b") == text[: text.index("b")]


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("Hi", [[256, 72, 105]]),
        ([72, 105], [[72, 105]]),
        (["a", "b"], [[256, 97], [256, 98]]),
        ([[97], [98]], [[97], [98]]),
        ("<|user|>", [[256, *b"<|user|>"]]),
    ],
)
async def test_plain_completions(gateway: FakeGateway, prompt: Any, ids: list[list[int]]) -> None:
    options = {key: value for key, value in CHAT.items() if key != "messages"}
    answer = await gateway.client.completions.create(prompt=prompt, **options)
    assert answer.object == "text_completion"
    expected = []
    for index, token_ids in enumerate(ids):
        sampling = SamplingParams(temperature=1.0, seed=3 + index, logit_bias=SAMPLING.logit_bias)
        async with gateway.fake.route.session() as session:
            result = await session.generate(token_ids, sampling, max_tokens=40).result()
            expected.append(result.text)
    assert [choice.text for choice in answer.choices] == expected
    stream = await gateway.client.completions.create(prompt=prompt, stream=True, **options)
    texts = ["" for _ in ids]
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == expected


async def test_a_completion_echoes_its_prompt_and_tells_log_probabilities(
    gateway: FakeGateway,
) -> None:
    options = {key: value for key, value in CHAT.items() if key != "messages"}
    options["max_tokens"] = 4
    plain = await gateway.client.completions.create(prompt="Hi", **options, logprobs=2)
    echoed = await gateway.client.completions.create(prompt="Hi", **options, echo=True)
    assert echoed.choices[0].text == "Hi" + plain.choices[0].text
    logprobs = plain.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == list(plain.choices[0].text)
    assert logprobs.text_offset == [0, 1, 2, 3]
    assert all(len(top) == 2 for top in logprobs.top_logprobs or ())


async def test_a_users_special_token_is_read_as_text(gateway: FakeGateway) -> None:
    for content, count in (("Hi", 2), ("<|user|>", 8), ("a<|assistant|>", 14), ("<bos>", 5)):
        answer = await chat(gateway, messages=[{"role": "user", "content": content}], max_tokens=1)
        assert answer.usage.prompt_tokens == 1 + count + 1, content


async def test_the_second_client_works_too(gateway: FakeGateway) -> None:
    model = openai_models.Chat(  # type: ignore[no-untyped-call]
        "fake", model_name=MODEL, api_base=f"{gateway.url}/v1", key="unused"
    )

    def ask() -> str:
        return str(model.prompt("Hello", stream=True, max_tokens=4, seed=3).text())

    assert await asyncio.to_thread(ask)


@pytest.mark.parametrize(
    ("asked", "sampling"),
    [
        ({"temperature": 0.2}, {"temperature": 0.2}),
        ({"top_p": 0.2}, {"top_p": 0.2}),
        ({"top_p": 0}, {"temperature": 0.0}),
        ({"frequency_penalty": 2.0}, {"frequency_penalty": 2.0}),
        ({"presence_penalty": 2.0}, {"presence_penalty": 2.0}),
        ({"logit_bias": {"97": 100, "98": 100}}, {"logit_bias": {97: 100.0, 98: 100.0}}),
        ({"seed": 12}, {"seed": 12}),
        ({"extra_body": {"top_k": 2}}, {"top_k": 2}),
        ({"extra_body": {"min_p": 0.9}}, {"min_p": 0.9}),
        ({"extra_body": {"repetition_penalty": 9.0}}, {"repetition_penalty": 9.0}),
    ],
)
async def test_what_is_asked_of_the_sampler_reaches_it(
    gateway: FakeGateway, asked: dict[str, Any], sampling: dict[str, Any]
) -> None:
    """The answer is another one than without it, and the one that the bare client gets with it."""
    same = dataclasses.replace(SAMPLING, penalty_last_n=4096, **sampling)
    tokens = await bare_tokens(gateway, same, 40)
    answer = await text_of(gateway, **asked)
    assert answer == b"".join(token.piece for token in tokens).decode()
    assert answer != await text_of(gateway)


def schema_form(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


@pytest.mark.parametrize("seed", range(3))
async def test_answers_have_the_form_that_is_asked_for(gateway: FakeGateway, seed: int) -> None:
    schema = {
        "type": "object",
        "properties": {
            "colour": {"enum": ["rot", "grün", "赤"]},
            "counts": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        },
        "required": ["colour", "counts"],
        "additionalProperties": False,
    }
    answer = await chat(
        gateway, response_format=schema_form(schema), seed=seed, max_tokens=200, logit_bias={}
    )
    document = json.loads(answer.choices[0].message.content)
    assert answer.choices[0].finish_reason == "stop"
    assert set(document) == {"colour", "counts"}
    assert document["colour"] in ("rot", "grün", "赤")
    assert all(isinstance(count, bool) for count in document["counts"])
    assert len(document["counts"]) <= 3


async def test_any_object_and_any_text(gateway: FakeGateway) -> None:
    form: dict[str, Any] = {"type": "json_object"}
    text = await text_of(gateway, response_format=form, max_tokens=8, logit_bias={})
    assert text.startswith("{")
    assert await text_of(gateway, response_format={"type": "text"}) == await text_of(gateway)


async def test_forms_that_cannot_be_kept_to_are_refused(gateway: FakeGateway) -> None:
    for form, code in (
        (schema_form({"not": {"type": "string"}}), "GRAMMAR_INVALID"),
        ({**schema_form({}), "type": "json_object"}, "FIELD_OUT_OF_BOUNDS"),
        ({"type": "json_schema"}, "FIELD_OUT_OF_BOUNDS"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            await chat(gateway, response_format=form)
        assert caught.value.code == code
    assert await text_of(gateway) == await text_of(gateway)


async def test_an_answer_may_come_back_as_it_is(gateway: FakeGateway) -> None:
    """With all its fields, also those that it has no value for."""
    answer = (await chat(gateway)).choices[0].message
    talk = [*HELLO, answer.model_dump(), *HELLO]
    assert talk[1]["function_call"] is None
    named = [*HELLO, {"role": "assistant", "content": answer.content}, *HELLO]
    assert await text_of(gateway, messages=talk) == await text_of(gateway, messages=named)


# The client's own, about the type of `parsed`.
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
async def test_an_answer_that_the_client_has_parsed_may_come_back(gateway: FakeGateway) -> None:
    class Colour(pydantic.BaseModel):
        red: bool

    answer = await gateway.client.chat.completions.parse(
        model=MODEL, messages=HELLO, response_format=Colour, seed=1
    )
    message = answer.choices[0].message
    assert isinstance(message.parsed, Colour)
    talk = [*HELLO, message, *HELLO]
    named = [*HELLO, {"role": "assistant", "content": message.content}, *HELLO]
    assert await text_of(gateway, messages=talk) == await text_of(gateway, messages=named)


async def test_what_nobody_reads_may_have_any_form(gateway: FakeGateway) -> None:
    deep: dict[str, Any] = {}
    for _ in range(900):
        deep = {"a": deep}
    answer = {"role": "assistant", "content": "a", "annotations": deep, "parsed": deep}
    talk = [*HELLO, answer, *HELLO]
    assert await text_of(gateway, messages=talk, extra_body={"prediction": deep})


async def test_fields_that_change_nothing_are_taken(gateway: FakeGateway) -> None:
    ignored: dict[str, Any] = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "prediction": {"type": "content", "content": "abc"},
        "modalities": ["text"],
        "parallel_tool_calls": True,
        "extra_body": {"functions": None, "audio": None, "stream_options": None},
    }
    assert await text_of(gateway, **ignored) == await text_of(gateway)


async def test_what_is_not_supported_says_so(gateway: FakeGateway) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await gateway.client.completions.create(model=MODEL, prompt="a", suffix="b")
    assert (caught.value.code, caught.value.param) == ("FEATURE_UNSUPPORTED", "suffix")
