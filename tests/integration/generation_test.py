"""Generations over chains of worker processes with the fake engine."""

import asyncio
import itertools
import json
import math
from collections.abc import Sequence

import jsonschema
import pytest
from meshnet_gguf.client import (
    ChatMessage,
    FinishReason,
    GenerationResult,
    PrefillProgress,
    Route,
    SamplingParams,
    Session,
    Token,
)
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.testing.cluster import FakeCluster, fake_cluster

from proto.meshnet.shard.v1 import errors_pb2

BOS, EOS, USER, ASSISTANT = 256, 257, 258, 259
END = 60.0  # seconds after which a test that hangs is given up
PROMPT = [BOS, *b"What is the capital of France?"]
SAMPLED = SamplingParams(temperature=1.0, top_k=40, seed=7)


async def generate(
    route: Route, prompt: Sequence[int] = PROMPT, sampling: SamplingParams | None = None
) -> GenerationResult:
    async with asyncio.timeout(END), route.session() as session:
        return await session.generate(prompt, sampling, max_tokens=24, return_logits=True).result()


async def reason_of(session: Session, prompt: Sequence[int], **options: object) -> int:
    """Why a generation is refused; the session must survive it."""
    with pytest.raises(MeshnetError) as caught:
        await session.generate(prompt, **{"max_tokens": 1, **options}).result()  # type: ignore[arg-type]
    return caught.value.reason


async def test_the_cut_does_not_change_the_answer() -> None:
    results = []
    for cuts in [(), (1,), (4,), (7,), (2, 5), (1, 2, 3, 7)]:
        async with fake_cluster(cuts, "--prefill_chunk_tokens=8") as fake:
            assert len(fake.route.workers) == len(cuts) + 1
            results.append(
                (await generate(fake.route), await generate(fake.route, PROMPT, SAMPLED))
            )
    for greedy, sampled in results:
        assert len(greedy.token_ids) == len(greedy.logits) == 24
        assert (greedy.token_ids, greedy.logits) == (results[0][0].token_ids, results[0][0].logits)
        assert (sampled.token_ids, sampled.logits) == (
            results[0][1].token_ids,
            results[0][1].logits,
        )
        assert greedy.token_ids != sampled.token_ids


async def test_prefill_comes_in_chunks_and_boundaries_in_fragments() -> None:
    # 16 KiB a token: a chunk of 8 needs more than thirty fragments of at most 4 KiB.
    flags = ("--prefill_chunk_tokens=8", "--fake_width=4096", "--max_frame_bytes=4096")
    async with fake_cluster((4,), *flags) as fake:
        async with fake.route.session() as session:
            assert session.limits is not None
            assert session.limits.max_frame_bytes == 4096
            assert session.prefill_chunk_tokens == 8
            generation = session.generate(list(range(20)), max_tokens=4)
            events = [event async for event in generation]
        progress = [event for event in events if isinstance(event, PrefillProgress)]
        assert progress == [
            PrefillProgress(8, 20),
            PrefillProgress(16, 20),
            PrefillProgress(20, 20),
        ]
        sent = (await fake.route.metrics())[0].seam_bytes_sent
        assert sent > 23 * 4096 * 4
        chain = generation.token_ids
    async with fake_cluster((), *flags) as fake, fake.route.session() as session:
        result = await session.generate(list(range(20)), max_tokens=4).result()
    assert list(result.token_ids) == chain


async def test_events_carry_positions_text_and_logprobs() -> None:
    async with fake_cluster() as fake, fake.route.session() as session:
        sampling = SamplingParams(logprobs=True, top_logprobs=3)
        generation = session.generate(PROMPT, sampling, max_tokens=5)
        tokens = [event async for event in generation if isinstance(event, Token)]
        assert [token.position for token in tokens] == list(range(len(PROMPT), len(PROMPT) + 5))
        for token in tokens:
            assert token.logprob is not None
            assert len(token.top_logprobs) == 3
            # Greedy: the token is the most probable one.
            assert token.top_logprobs[0] == (token.token_id, token.logprob)
        pieces = await fake.route.head.pieces([token.token_id for token in tokens])
        assert [token.piece for token in tokens] == pieces


async def test_a_longer_conversation_gives_what_a_fresh_one_gives() -> None:
    async with fake_cluster((2, 5), "--prefill_chunk_tokens=8") as fake:
        async with fake.route.session() as session:
            first = await session.generate(PROMPT, max_tokens=6).result()
            longer = [*PROMPT, *first.token_ids, USER, *b"And of Spain?"]
            held = session.cached_token_ids
            assert held == tuple(longer[: len(PROMPT) + 5])
            second = await session.continue_with(longer, max_tokens=6).result()
            assert second.finished.prompt_tokens == len(longer) - len(held)
            # Back to where the first turn began, as after an edited message.
            again = await session.continue_with(PROMPT, max_tokens=6).result()
        async with fake.route.session() as session:
            fresh = await session.generate(longer, max_tokens=6).result()
    assert second.token_ids == fresh.token_ids
    assert again.token_ids == first.token_ids


async def test_chat_uses_the_models_template() -> None:
    async with fake_cluster() as fake:
        async with fake.route.session() as session:
            generation = await session.chat([ChatMessage("user", "Hi")], max_tokens=4)
            chat = await generation.result()
        async with fake.route.session() as session:
            prompt = [USER, *b"Hi", ASSISTANT]
            plain = await session.generate(prompt, max_tokens=4).result()
    assert chat.token_ids == plain.token_ids


async def test_a_generation_ends_at_stop_tokens_or_at_its_length() -> None:
    async with fake_cluster((4,), "--fake_eog_one_in=4") as fake, fake.route.session() as session:
        longest = await session.generate(
            PROMPT, max_tokens=40, ignore_end_of_generation=True
        ).result()
        assert len(longest.token_ids) == 40
        assert longest.finished.reason is FinishReason.LENGTH
        ends = longest.token_ids.index(EOS)
        ended = await session.generate(PROMPT, max_tokens=40).result()
        assert ended.token_ids == longest.token_ids[: ends + 1]
        assert ended.finished.reason is FinishReason.STOP
        stop = next(token for token in longest.token_ids if token != EOS)
        stopped = await session.generate(
            PROMPT, max_tokens=40, stop_token_ids=[stop], ignore_end_of_generation=True
        ).result()
        assert stopped.token_ids == longest.token_ids[: longest.token_ids.index(stop) + 1]
        assert stopped.finished.reason is FinishReason.STOP


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "level": {"enum": ["low", "high", None]},
        "tags": {"type": "array", "items": {"type": ["boolean", "null"]}, "maxItems": 3},
        "inner": {
            "type": "object",
            "properties": {"x": {"const": 1.5}, "y": {"$ref": "#/$defs/day"}},
            "required": ["y"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "inner", "age"],
    "additionalProperties": False,
    "$defs": {"day": {"anyOf": [{"type": "null"}, {"type": "string", "format": "date"}]}},
}


async def test_every_answer_is_a_document_of_its_schema() -> None:
    async with fake_cluster((4,), "--context_tokens=512") as fake:
        async with fake.route.session() as session:
            for seed in range(12):
                sampling = SamplingParams(
                    temperature=1.5 if seed else 0, seed=seed, json_schema=json.dumps(PERSON)
                )
                answer = await session.continue_with(PROMPT, sampling, max_tokens=400).result()
                assert answer.finished.reason is FinishReason.STOP
                document = json.loads(answer.text)
                jsonschema.validate(
                    document, PERSON, format_checker=jsonschema.FormatChecker(["date"])
                )
        # The same from one worker, and the next generation is free again.
        async with fake_cluster((), "--context_tokens=512") as whole, whole.route.session() as one:
            again = await one.generate(PROMPT, sampling, max_tokens=400).result()
            assert again.text == answer.text
            assert (await one.continue_with(PROMPT, max_tokens=8).result()).text[0] != "{"


async def test_a_grammar_ends_a_generation() -> None:
    async with fake_cluster((4,)) as fake, fake.route.session() as session:
        grammar = SamplingParams(grammar='root ::= "yes" | "no"')
        answer = await session.generate(PROMPT, grammar, max_tokens=24).result()
        assert answer.text in ("yes", "no")
        assert answer.token_ids[-1] == EOS
        assert answer.finished.reason is FinishReason.STOP
        cut = await session.continue_with(PROMPT, grammar, max_tokens=1).result()
        assert cut.finished.reason is FinishReason.LENGTH


async def test_a_grammar_without_a_way_on_ends_the_session_with_its_reason() -> None:
    async with fake_cluster((4,)) as fake:
        nothing = SamplingParams(
            grammar='root ::= "a" | "b"', logit_bias={97: -math.inf, 98: -math.inf}
        )
        with pytest.raises(MeshnetError) as caught:
            async with fake.route.session() as session:
                await session.generate(PROMPT, nothing, max_tokens=2).result()
        assert caught.value.reason == errors_pb2.REASON_GRAMMAR_DEAD_END
        await fake.wait_idle()


async def test_a_refused_generation_does_not_end_the_session() -> None:
    async with (
        fake_cluster((4,), "--context_tokens=64") as fake,
        fake.route.session() as session,
    ):
        assert await reason_of(session, []) == errors_pb2.REASON_FIELD_OUT_OF_BOUNDS
        assert await reason_of(session, [320]) == errors_pb2.REASON_TOKEN_OUT_OF_RANGE
        assert await reason_of(session, [-1]) == errors_pb2.REASON_TOKEN_OUT_OF_RANGE
        assert await reason_of(session, [1], max_tokens=64) == errors_pb2.REASON_CONTEXT_EXCEEDED
        assert await reason_of(session, [1], start_position=1) == errors_pb2.REASON_CACHE_MISS
        assert (
            await reason_of(session, [1], sampling=SamplingParams(temperature=-1.0))
            == errors_pb2.REASON_SAMPLING_INVALID
        )
        both = SamplingParams(grammar='root ::= "a"', json_schema="{}")
        assert await reason_of(session, [1], sampling=both) == errors_pb2.REASON_SAMPLING_INVALID
        for refused in (
            SamplingParams(grammar="root ::= root"),
            SamplingParams(grammar="root ::= ("),
            SamplingParams(json_schema="nonsense"),
            SamplingParams(json_schema='{"type": "string", "pattern": "^a$"}'),
        ):
            reason = await reason_of(session, [1], sampling=refused)
            assert reason == errors_pb2.REASON_GRAMMAR_INVALID
        too_long = SamplingParams(grammar="x" * 65537)
        assert (
            await reason_of(session, [1], sampling=too_long) == errors_pb2.REASON_SAMPLING_INVALID
        )
        result = await session.generate([1], max_tokens=63).result()
        assert len(result.token_ids) == 63


async def test_slots_run_out_and_come_back() -> None:
    async with fake_cluster((4,), "--max_sessions=2", "--lru_min_idle=10m") as fake:
        async with fake.route.session(), fake.route.session():
            with pytest.raises(MeshnetError) as caught:
                async with fake.route.session():
                    pytest.fail("a third session got one of two slots")
            assert caught.value.reason == errors_pb2.REASON_SESSIONS_EXHAUSTED
        await fake.wait_idle()
        assert len((await generate(fake.route)).token_ids) == 24


async def test_an_idle_session_gives_its_slot_to_a_new_one() -> None:
    async with fake_cluster((4,), "--max_sessions=1", "--lru_min_idle=0s") as fake:
        with pytest.raises(MeshnetError) as caught:
            async with fake.route.session() as session:
                await session.generate(PROMPT, max_tokens=1).result()
                assert len((await generate(fake.route)).token_ids) == 24
                await session.generate(PROMPT, max_tokens=1).result()
        assert caught.value.reason == errors_pb2.REASON_SESSION_EVICTED
        await fake.wait_idle()


async def test_a_session_without_work_is_evicted() -> None:
    async with fake_cluster() as fake:
        async with asyncio.timeout(END):
            with pytest.raises(MeshnetError) as caught:
                async with fake.route.session(idle_ttl=0.05) as session:
                    await session.generate(PROMPT, max_tokens=1).result()
                    await fake.wait_idle()
                    await session.generate(PROMPT, max_tokens=1).result()
        assert caught.value.reason == errors_pb2.REASON_SESSION_EVICTED
        await fake.wait_idle()


async def test_receipts_add_up() -> None:
    async with fake_cluster((2, 5), "--prefill_chunk_tokens=8") as fake:
        async with fake.route.session() as session:
            await session.generate(list(range(20)), max_tokens=5).result()
        assert [receipt.layers for receipt in session.receipts] == [
            capability.layers for capability in fake.route.capabilities
        ]
        for receipt in session.receipts:
            assert receipt.prefill_tokens == 20
            assert receipt.decode_tokens == 4
            assert receipt.bytes_received > 0 or receipt.layers.begin == 0
        await fake.wait_idle()
        for metrics in await fake.route.metrics():
            assert (metrics.sessions_opened, metrics.sessions_completed) == (1, 1)
            assert (metrics.prefill_tokens, metrics.decode_tokens) == (20, 4)


async def eight(fake: FakeCluster, together: bool) -> list[tuple[int, ...]]:
    """Eight different generations, one after the other or all at once."""

    async def one(number: int) -> tuple[int, ...]:
        prompt = [BOS, *range(number, number + 5 * number + 1)]
        sampling = SamplingParams(temperature=0.8, seed=number) if number % 2 else None
        return (await generate(fake.route, prompt, sampling)).token_ids

    if together:
        return list(await asyncio.gather(*(one(number) for number in range(8))))
    return [await one(number) for number in range(8)]


@pytest.mark.parametrize("policy", ["exact", "shared"])
async def test_eight_interleaved_sessions_equal_each_alone(policy: str) -> None:
    flags = (f"--batch_policy={policy}", "--prefill_chunk_tokens=8", "--max_sessions=8")
    async with fake_cluster((2, 5), *flags) as fake:
        alone = await eight(fake, together=False)
        assert await eight(fake, together=True) == alone
        await fake.wait_idle()
        for index in range(3):
            await fake.cluster.restart(index)
    assert len(set(alone)) == 8
    async with fake_cluster((2, 5), *flags) as fake:
        assert await eight(fake, together=True) == alone


async def test_one_sessions_cancellation_is_nobody_elses() -> None:
    async with fake_cluster((2, 5), "--fake_delay=2ms") as fake:
        alone = await eight(fake, together=False)
        async with fake.route.session() as session:
            generation = session.generate(PROMPT, max_tokens=500)
            others = asyncio.create_task(eight_but_one(fake))
            async for event in generation:
                if isinstance(event, Token) and len(generation.token_ids) == 5:
                    break
            await generation.cancel()
            seen = len(generation.token_ids)
            assert 5 <= seen < 500
            assert await others == alone[:7]
            # And it goes on itself, from what it holds.
            longer = [*PROMPT, *generation.token_ids[:3]]
            result = await session.continue_with(longer, max_tokens=2).result()
        async with fake.route.session() as session:
            fresh = await session.generate(longer, max_tokens=2).result()
        assert result.token_ids == fresh.token_ids
        await fake.wait_idle()


async def eight_but_one(fake: FakeCluster) -> list[tuple[int, ...]]:
    """The first seven of the eight, all at once."""

    async def one(number: int) -> tuple[int, ...]:
        prompt = [BOS, *range(number, number + 5 * number + 1)]
        sampling = SamplingParams(temperature=0.8, seed=number) if number % 2 else None
        return (await generate(fake.route, prompt, sampling)).token_ids

    return list(await asyncio.gather(*(one(number) for number in range(7))))


async def test_a_cancelled_prefill_stops_early() -> None:
    flags = ("--prefill_chunk_tokens=1", "--fake_delay=5ms", "--context_tokens=4096")
    async with fake_cluster((4,), *flags) as fake, fake.route.session() as session:
        generation = session.generate([1] * 3000, max_tokens=1)
        assert isinstance(await anext(generation), PrefillProgress)
        await generation.cancel()
        assert generation.token_ids == []
        for metrics in await fake.route.metrics():
            assert metrics.prefill_tokens < 3000


@pytest.mark.parametrize("stage", [0, 1, 2])
async def test_an_operator_ends_a_session_by_its_key_at_any_stage(stage: int) -> None:
    flags = ("--fake_delay=2ms", "--context_tokens=100000")
    async with fake_cluster((2, 5), *flags) as fake:
        session = fake.route.session()
        worker = fake.route.workers[stage]
        with pytest.raises(MeshnetError) as caught:
            async with asyncio.timeout(END), session:
                async for event in session.generate(PROMPT, max_tokens=90000):
                    if isinstance(event, Token) and event.position == len(PROMPT):
                        key = (session.route_session_id, session.route_epoch)
                        assert await worker.cancel_session(*key)
        assert caught.value.reason == errors_pb2.REASON_CANCELLED
        await fake.wait_idle()
        assert not await worker.cancel_session(*key)
        assert not await worker.release_session(*key)


async def test_a_deadline_ends_the_session_everywhere() -> None:
    flags = ("--fake_delay=2ms", "--context_tokens=100000")
    async with fake_cluster((2, 5), *flags) as fake:
        with pytest.raises(MeshnetError) as caught:
            async with asyncio.timeout(END), fake.route.session(deadline=0.3) as session:
                await session.generate(PROMPT, max_tokens=90000).result()
        assert caught.value.reason == errors_pb2.REASON_DEADLINE_EXCEEDED
        await fake.wait_idle()
        assert len((await generate(fake.route)).token_ids) == 24


async def test_a_client_that_does_not_read_stops_the_chain_and_nobody_else() -> None:
    # With logits a token is 1.3 KiB on its way to the client: more than gRPC buffers in all.
    tokens = 30000
    async with (
        asyncio.timeout(END),
        fake_cluster((4,), f"--context_tokens={tokens + 100}") as fake,
        fake.route.session() as session,
    ):
        generation = session.generate(PROMPT, max_tokens=tokens, return_logits=True)
        await anext(generation)
        before = -1
        while (now := (await fake.route.metrics())[1].decode_tokens) != before:
            before = now
            # Others are served meanwhile, long enough for this one to go on if it could.
            assert len((await generate(fake.route)).token_ids) == 24
            before += 23
        assert now < tokens
        result = await generation.result()
        assert len(result.token_ids) == tokens


async def test_chains_differ_only_in_speed_when_a_stage_is_slow() -> None:
    async with fake_cluster((2, 5), "--prefill_chunk_tokens=4", "--max_inflight_steps=1") as fake:
        narrow = await generate(fake.route)
    async with fake_cluster((2, 5), "--prefill_chunk_tokens=4", "--max_inflight_steps=8") as fake:
        wide = await generate(fake.route)
    assert narrow.token_ids == wide.token_ids
    assert list(itertools.chain(narrow.logits)) == list(itertools.chain(wide.logits))
