import asyncio

import pytest
from meshnet_gguf.client import (
    Event,
    Finished,
    FinishReason,
    LayerRange,
    PrefillProgress,
    SamplingParams,
    Token,
    open_route,
)
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.testing.scripted_head import Talk, scripted_route

from proto.meshnet.shard.v1 import errors_pb2, shard_pb2

STOP = shard_pb2.FINISH_REASON_STOP
LENGTH = shard_pb2.FINISH_REASON_LENGTH
CANCELLED = shard_pb2.FINISH_REASON_CANCELLED


async def test_a_generation_from_opening_to_receipts() -> None:
    seen: list[shard_pb2.OpenSession | shard_pb2.Generate] = []

    async def script(talk: Talk) -> None:
        seen.append(await talk.accept())
        generate = await talk.generate()
        seen.append(generate)
        await talk.send(
            prefill=shard_pb2.PrefillProgress(generation=1, tokens_done=2, tokens_total=2)
        )
        for token_id, piece in [(5, b"a\xf0\x9f"), (6, b"\x98\x80")]:
            await talk.token(1, token_id, piece, logprob=-0.5)
        await talk.token(1, 7, b"<eos>", end_of_generation=True)
        await talk.finish(1, STOP, cached=4)
        await talk.close()

    async with scripted_route(script) as (route, head):
        session = route.session(route_session_id=b"s" * 16, route_epoch=3, deadline=1.5)
        async with session:
            assert (session.context_tokens, session.prefill_chunk_tokens) == (128, 32)
            events: list[Event] = [
                event
                async for event in session.generate(
                    [1, 2], SamplingParams(top_k=4, logit_bias={9: -1.0}), max_tokens=8
                )
            ]
            assert session.cached_token_ids == (1, 2, 5, 6)
        assert head.failures == []
    opened, generate = seen
    assert isinstance(opened, shard_pb2.OpenSession)
    assert opened.route.route_session_id == b"s" * 16
    assert opened.route.route_epoch == 3
    assert opened.route.hops[0].range.end == 4
    assert opened.deadline_ms == 1500
    assert opened.idle_ttl_ms == 0
    assert isinstance(generate, shard_pb2.Generate)
    assert list(generate.token_ids) == [1, 2]
    assert generate.sampling.top_k == 4
    assert generate.sampling.logit_bias[0].token_id == 9
    assert events[0] == PrefillProgress(2, 2)
    tokens = [event for event in events if isinstance(event, Token)]
    assert [(token.token_id, token.text) for token in tokens] == [(5, "a"), (6, "😀"), (7, "")]
    assert tokens[0].logprob == -0.5
    assert tokens[2].logprob is None
    assert tokens[2].end_of_generation
    assert isinstance(events[-1], Finished)
    assert events[-1].reason is FinishReason.STOP
    assert session.receipts[0].layers == LayerRange(0, 4)
    assert session.receipts[0].decode_tokens == 2


async def test_a_cut_character_becomes_visible_only_at_the_end() -> None:
    async def script(talk: Talk) -> None:
        await talk.accept()
        await talk.generate()
        await talk.token(1, 5, b"a\xf0\x9f")
        await talk.finish(1, LENGTH, cached=2)
        await talk.close()

    async with scripted_route(script) as (route, _), route.session() as session:
        result = await session.generate([1], max_tokens=1).result()
    assert result.text == "a\ufffd"
    assert result.finished.reason is FinishReason.LENGTH


@pytest.mark.parametrize("in_stream", [True, False])
async def test_a_refusal_to_open_carries_its_reason(in_stream: bool) -> None:
    async def script(talk: Talk) -> None:
        await talk.receive()
        reason = errors_pb2.REASON_SESSIONS_EXHAUSTED
        if in_stream:
            error = errors_pb2.Error(
                reason=reason, message="full", stage_begin=1, stage_end=4, retry_after_ms=50
            )
            await talk.send(error=shard_pb2.SessionError(error=error))
        else:
            await talk.fail(reason, "full")

    async with scripted_route(script) as (route, _):
        with pytest.raises(MeshnetError, match="full") as caught:
            async with route.session():
                pytest.fail("the session was opened")
    assert caught.value.reason == errors_pb2.REASON_SESSIONS_EXHAUSTED
    if in_stream:
        assert caught.value.retry_after_ms == 50


async def test_a_refused_generation_leaves_the_session_usable() -> None:
    async def script(talk: Talk) -> None:
        await talk.accept()
        await talk.generate()
        error = errors_pb2.Error(reason=errors_pb2.REASON_SAMPLING_INVALID, message="top_k")
        await talk.send(error=shard_pb2.SessionError(generation=1, error=error))
        assert (await talk.generate()).generation == 2
        await talk.token(2, 5, b"x")
        await talk.finish(2, LENGTH, cached=1)
        await talk.close()

    async with scripted_route(script) as (route, head):
        async with route.session() as session:
            with pytest.raises(MeshnetError) as caught:
                await session.generate([1], SamplingParams(top_k=-1), max_tokens=1).result()
            assert caught.value.reason == errors_pb2.REASON_SAMPLING_INVALID
            assert (await session.generate([1], max_tokens=1).result()).text == "x"
        assert head.failures == []


@pytest.mark.parametrize("in_stream", [True, False])
async def test_what_ends_the_session_ends_the_generation(in_stream: bool) -> None:
    async def script(talk: Talk) -> None:
        await talk.accept()
        await talk.generate()
        await talk.token(1, 5, b"x")
        if in_stream:
            error = errors_pb2.Error(
                reason=errors_pb2.REASON_PEER_LOST, message="stage gone", stage_begin=2, stage_end=4
            )
            await talk.send(error=shard_pb2.SessionError(error=error))
        else:
            await talk.fail(errors_pb2.REASON_PEER_LOST, "stage gone")

    async with scripted_route(script) as (route, _), route.session() as session:
        generation = session.generate([1], max_tokens=9)
        with pytest.raises(MeshnetError, match="stage gone") as caught:
            await generation.result()
        assert caught.value.reason == errors_pb2.REASON_PEER_LOST
        assert generation.token_ids == [5]
        with pytest.raises(MeshnetError, match="stage gone"):
            await session.generate([1], max_tokens=1).result()


async def test_a_stream_that_just_ends_is_a_lost_peer() -> None:
    async def script(talk: Talk) -> None:
        await talk.accept()
        await talk.generate()

    async with scripted_route(script) as (route, _), route.session() as session:
        with pytest.raises(MeshnetError) as caught:
            await session.generate([1], max_tokens=9).result()
        assert caught.value.reason == errors_pb2.REASON_PEER_LOST


async def cancellable(talk: Talk) -> None:
    """Sends one token, then waits for the cancellation; then a whole second generation."""
    await talk.accept()
    await talk.generate()
    await talk.token(1, 5, b"x")
    request = await talk.receive()
    assert request is not None
    assert request.cancel.generation == 1
    await talk.token(1, 6, b"y")
    await talk.finish(1, CANCELLED, cached=2)
    request = await talk.receive()
    if request is not None:
        await talk.token(2, 7, b"z")
        await talk.finish(2, LENGTH, cached=1)
        request = await talk.receive()
    assert request is None
    await talk.send(closed=shard_pb2.SessionClosed())


async def test_cancelling_a_generation_keeps_the_session() -> None:
    async with scripted_route(cancellable) as (route, head):
        async with route.session() as session:
            generation = session.generate([1], max_tokens=9)
            await anext(generation)
            await generation.cancel()
            assert generation.token_ids == [5, 6]
            assert (await session.generate([1], max_tokens=1).result()).text == "z"
        assert head.failures == []


async def test_a_generation_that_nobody_reads_on_is_cancelled_by_the_next() -> None:
    async with scripted_route(cancellable) as (route, head):
        async with route.session() as session:
            async for _ in session.generate([1], max_tokens=9):
                break
            assert (await session.generate([1], max_tokens=1).result()).text == "z"
        assert head.failures == []


async def test_a_generation_that_nobody_reads_on_is_cancelled_at_the_end() -> None:
    async with scripted_route(cancellable) as (route, head):
        async with route.session() as session:
            async for _ in session.generate([1], max_tokens=9):
                break
        assert head.failures == []


async def test_giving_up_one_wait_does_not_lose_the_session() -> None:
    go_on = asyncio.Event()

    async def script(talk: Talk) -> None:
        await talk.accept()
        await talk.generate()
        await go_on.wait()
        await talk.token(1, 5, b"x")
        await talk.finish(1, LENGTH, cached=1)
        await talk.close()

    async with scripted_route(script) as (route, head):
        async with route.session() as session:
            generation = session.generate([1], max_tokens=1)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(generation), 0.05)
            go_on.set()
            assert (await generation.result()).text == "x"
        assert head.failures == []


async def test_an_exception_in_the_block_cancels_the_call() -> None:
    ended = asyncio.Event()

    async def script(talk: Talk) -> None:
        await talk.accept()
        try:
            await talk.receive()
        finally:
            ended.set()

    async with scripted_route(script) as (route, _):
        with pytest.raises(ZeroDivisionError):
            async with route.session():
                raise ZeroDivisionError
        await asyncio.wait_for(ended.wait(), 10)


async def test_a_head_that_never_answers_is_given_up() -> None:
    async def script(talk: Talk) -> None:
        await talk.receive()
        await talk.receive()

    async with scripted_route(script) as (route, _):
        with pytest.raises(MeshnetError, match=r"within 0\.05 s") as caught:
            async with route.session(open_timeout=0.05):
                pytest.fail("the session was opened")
    assert caught.value.reason == errors_pb2.REASON_DEADLINE_EXCEEDED


async def test_a_longer_conversation_sends_only_what_is_new() -> None:
    sent: list[tuple[int, list[int]]] = []

    async def script(talk: Talk) -> None:
        await talk.accept()
        for number, cached in [(1, 4), (2, 6), (3, 3), (4, 3)]:
            generate = await talk.generate()
            sent.append((generate.start_position, list(generate.token_ids)))
            await talk.token(number, 50 + number, b"x")
            await talk.token(number, 60 + number, b"x")
            await talk.finish(number, LENGTH, cached=cached)
        await talk.close()

    async with scripted_route(script) as (route, head):
        async with route.session() as session:
            for token_ids in [[1, 2, 3], [1, 2, 3, 51, 61, 7], [1, 9], [1, 9]]:
                await session.continue_with(token_ids, max_tokens=2).result()
        assert head.failures == []
    # The last token of a generation (61) is not held, and one row at least is always computed.
    assert sent == [(0, [1, 2, 3]), (4, [61, 7]), (1, [9]), (1, [9])]


@pytest.mark.parametrize("version", [0, 2])
async def test_another_protocol_version_is_refused(version: int) -> None:
    async def script(talk: Talk) -> None:
        await talk.accept()

    async with scripted_route(script) as (route, head):
        head.capability = shard_pb2.Capability(schema_version=version)
        with pytest.raises(MeshnetError, match="expected protocol version 1") as caught:
            await open_route([route.head.endpoint])
    assert caught.value.reason == errors_pb2.REASON_SCHEMA_VERSION_UNSUPPORTED


async def test_a_reason_to_finish_that_nobody_knows_is_refused() -> None:
    async def script(talk: Talk) -> None:
        await talk.accept()
        await talk.generate()
        finished = shard_pb2.GenerationFinished.FromString(b"\x08\x01\x10\x63")  # reason 99
        await talk.send(finished=finished)
        await talk.close()

    async with scripted_route(script) as (route, _), route.session() as session:
        with pytest.raises(MeshnetError, match="got 99") as caught:
            await session.generate([1], max_tokens=1).result()
        assert caught.value.reason == errors_pb2.REASON_UNKNOWN_ENUM_VALUE


async def test_a_session_outside_its_block_is_refused() -> None:
    async def script(talk: Talk) -> None:
        await talk.accept()

    async with scripted_route(script) as (route, _):
        with pytest.raises(MeshnetError) as caught:
            await route.session().generate([1], max_tokens=1).result()
    assert caught.value.reason == errors_pb2.REASON_LIFECYCLE_VIOLATION
