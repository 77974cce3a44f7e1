"""Turns of a conversation that go on in the session of the turn before, over real workers."""

import asyncio
import pathlib
from typing import Any

import openai
import pytest
from meshnet_gguf.gateway import Admission, ApiKeys, GatewayOptions, KeyLimits
from meshnet_gguf.testing.gateway import MODEL, FakeGateway, fake_gateway
from openai.types.chat import ChatCompletionMessageParam

END = 60.0
SYSTEM: ChatCompletionMessageParam = {
    "role": "system",
    "content": "You are a careful assistant of a very long kind.",
}
Messages = list[ChatCompletionMessageParam]


async def ask(client: openai.AsyncOpenAI, messages: Messages, **options: Any) -> tuple[str, int]:
    """The answer, and how many of the prompt's tokens were not read again."""
    values: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "logit_bias": ASCII, **options}
    create: Any = client.chat.completions.create
    answer = await create(model=MODEL, messages=messages, **values)
    content = answer.choices[0].message.content
    assert content is not None
    return content, answer.usage.prompt_tokens_details.cached_tokens


# Letters only: what the model says becomes the same tokens when it comes back.
ASCII = {str(token): -100 for token in range(320) if not 97 <= token < 123}


def turn(messages: Messages, answer: str, more: str) -> Messages:
    said: Messages = [{"role": "assistant", "content": answer}, {"role": "user", "content": more}]
    return [*messages, *said]


async def prefilled(gateway: FakeGateway) -> int:
    return (await gateway.fake.route.metrics())[0].prefill_tokens


async def test_a_following_turn_reads_only_what_is_new() -> None:
    async with asyncio.timeout(END), fake_gateway(keep_seconds=60) as gateway:
        messages: Messages = [SYSTEM, {"role": "user", "content": "Hello"}]
        first, cached = await ask(gateway.client, messages)
        assert cached == 0
        read = await prefilled(gateway)
        following = turn(messages, first, "And then?")
        second, cached = await ask(gateway.client, following)
        # All but what ends the first answer, and the tokens after it.
        whole = sum(len(str(message["content"])) + 1 for message in messages)
        assert cached == whole + 1 + 7
        assert await prefilled(gateway) - read == (1 + len("And then?")) + 1 + 1
        assert len(gateway.kept) == 1
        # What was said is what a session of its own says.
        fresh, cached = await ask(gateway.client, following, seed=1)
        assert (fresh, cached) == (second, 0)
        metrics = await gateway.fake.route.metrics()
        assert [stage.open_sessions for stage in metrics] == [2, 2]
    assert len(gateway.kept) == 0


async def test_another_conversation_gets_a_session_of_its_own() -> None:
    async with asyncio.timeout(END), fake_gateway(keep_seconds=60) as gateway:
        one: Messages = [SYSTEM, {"role": "user", "content": "Hello " * 20}]
        other: Messages = [SYSTEM, {"role": "user", "content": "Something else " * 20}]
        first, _ = await ask(gateway.client, one)
        assert (await ask(gateway.client, other))[1] == 0
        assert len(gateway.kept) == 2
        assert (await ask(gateway.client, turn(one, first, "b")))[1] > 100
        # An edited turn goes on from where it was edited.
        edited: Messages = [SYSTEM, {"role": "user", "content": "Hello " * 19 + "Bye"}]
        assert (await ask(gateway.client, edited))[1] > 100


async def test_nothing_is_shared_between_keys(tmp_path: pathlib.Path) -> None:
    keys = ApiKeys(tmp_path / "keys.json")
    secrets = [keys.add(name, KeyLimits()) for name in ("a", "b")]
    options = GatewayOptions(ready_seconds=30, keys=keys)
    messages: Messages = [SYSTEM, {"role": "user", "content": "Hello"}]
    async with (
        asyncio.timeout(END),
        fake_gateway(keep_seconds=60, options=options, api_key=secrets[0]) as gateway,
    ):
        first, _ = await ask(gateway.client, messages)
        following = turn(messages, first, "And then?")
        other = gateway.client.with_options(api_key=secrets[1])
        assert (await ask(other, following))[1] == 0
        assert (await ask(gateway.client, following))[1] > 0


async def test_a_kept_session_gives_way() -> None:
    """Slots are for those who ask: two of them, and never more sessions than that."""
    admission = Admission(max_active=2)
    async with (
        asyncio.timeout(END),
        fake_gateway((4,), "--max_sessions=2", keep_seconds=60, admission=admission) as gateway,
    ):
        for text in ("one", "two", "three"):
            await ask(gateway.client, [{"role": "user", "content": text * 9}])
        assert len(gateway.kept) == 1
        answer = await gateway.client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "four"}], n=2, max_tokens=2
        )
        assert len(answer.choices) == 2
        assert len(gateway.kept) == 0


async def test_a_lost_session_is_begun_anew() -> None:
    async with asyncio.timeout(END), fake_gateway(keep_seconds=60) as gateway:
        messages: Messages = [SYSTEM, {"role": "user", "content": "Hello"}]
        first, _ = await ask(gateway.client, messages)
        following = turn(messages, first, "And then?")
        expected, cached = await ask(gateway.client, following)
        assert cached > 0
        [lease] = gateway.kept._waiting
        head = gateway.fake.route.head
        assert await head.cancel_session(lease.session.route_session_id, lease.session.route_epoch)
        # Known to be lost or not, by then: the answer is the same.
        assert (await ask(gateway.client, following))[0] == expected


async def test_a_session_that_ends_under_a_request_is_begun_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with asyncio.timeout(END), fake_gateway(keep_seconds=60) as gateway:
        messages: Messages = [SYSTEM, {"role": "user", "content": "Hello"}]
        first, _ = await ask(gateway.client, messages)
        following = turn(messages, first, "And then?")
        head = gateway.fake.route.head
        take = gateway.kept.take

        def taken(*arguments: Any) -> Any:
            lease = take(*arguments)
            assert lease is not None
            # The stages have not heard of it yet: the request is on its way to a lost session.
            assert lease.session._call is not None
            lease.session._call.cancel()
            return lease

        monkeypatch.setattr(gateway.kept, "take", taken)
        answer, cached = await ask(gateway.client, following)
        assert (len(answer), cached) == (8, 0)
        await gateway.kept.end_all()
        await gateway.fake.wait_idle()
        assert (await head.health()).state.name == "READY"


async def test_it_waits_no_longer_than_it_may() -> None:
    async with asyncio.timeout(END), fake_gateway(keep_seconds=0.2) as gateway:
        await ask(gateway.client, [SYSTEM])
        await gateway.fake.wait_idle()
        assert len(gateway.kept) == 0


async def test_answers_that_fail_leave_nothing() -> None:
    async with (
        asyncio.timeout(END),
        fake_gateway(
            (4,), "--fake_delay=3ms", "--context_tokens=99999", keep_seconds=60
        ) as gateway,
    ):
        stream = await gateway.client.chat.completions.create(
            model=MODEL, messages=[SYSTEM], max_tokens=50000, stream=True
        )
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()
        await gateway.fake.wait_idle()
        assert len(gateway.kept) == 0
