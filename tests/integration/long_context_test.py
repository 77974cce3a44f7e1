"""Limits of a DeepSeek V4 session over two workers: refused by name, alike each time, for good."""

import asyncio
import os
import pathlib
from collections.abc import AsyncIterator

import pytest
from meshnet_gguf.caches import session_bytes
from meshnet_gguf.client import LayerRange, Route, open_route
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.gguf_file import read_model
from meshnet_gguf.inventory import take_inventory
from meshnet_gguf.local_cluster import LocalCluster, WorkerSpec

from proto.meshnet.shard.v1 import errors_pb2

END = 60.0
MODEL = pathlib.Path(os.environ["DEEPSEEK4_MODEL"]).absolute()
CONTEXT = 600
FLAGS = (
    "--max_sessions=1",
    f"--context_tokens={CONTEXT}",
    "--prefill_chunk_tokens=64",
    "--rollback_tokens=16",
    "--threads=1",
)


@pytest.fixture
async def route() -> AsyncIterator[Route]:
    specs = [WorkerSpec(LayerRange(0, 3), MODEL, FLAGS), WorkerSpec(LayerRange(3, 8), MODEL, FLAGS)]
    async with LocalCluster(specs) as cluster, await open_route(cluster.endpoints) as opened:
        yield opened


def prompt(length: int) -> list[int]:
    return [300 + (7919 * i) % 200 for i in range(length)]


async def all_free(route: Route) -> None:
    """Waits for the end of sessions that were left by an exception."""
    async with asyncio.timeout(END):
        while any(metrics.open_sessions for metrics in await route.metrics()):
            pass


async def refusal(route: Route, start_position: int, length: int, max_tokens: int) -> str:
    """Of a second generation, in a session that holds 300 tokens of a first one."""
    async with asyncio.timeout(END):
        with pytest.raises(MeshnetError) as refused:
            async with route.session() as session:
                await session.generate(
                    prompt(299), max_tokens=2, ignore_end_of_generation=True
                ).result()
                await session.generate(
                    prompt(length),
                    max_tokens=max_tokens,
                    start_position=start_position,
                    ignore_end_of_generation=True,
                ).result()
    await all_free(route)
    return errors_pb2.Reason.Name(refused.value.reason)


@pytest.mark.parametrize(
    ("start_position", "length", "max_tokens", "reason"),
    [
        # Beyond the context.
        (300, CONTEXT - 300 + 1, 1, "REASON_CONTEXT_EXCEEDED"),
        # Further back than the rings hold.
        (283, 1, 1, "REASON_CACHE_MISS"),
        # Behind what the session holds.
        (301, 1, 1, "REASON_CACHE_MISS"),
    ],
)
async def test_limits_are_refused_alike_and_leave_nothing_behind(
    route: Route, start_position: int, length: int, max_tokens: int, reason: str
) -> None:
    for _ in range(2):
        assert await refusal(route, start_position, length, max_tokens) == reason
    # The one slot is free again and holds nothing of before.
    answers = []
    for _ in range(2):
        async with asyncio.timeout(END), route.session() as session:
            answers.append((await session.generate(prompt(40), max_tokens=20).result()).token_ids)
        await all_free(route)
    assert answers[0] == answers[1]


async def test_what_a_session_holds_is_what_a_plan_reckons_with(route: Route) -> None:
    model = read_model(MODEL)
    async with asyncio.timeout(END), route.session() as session:
        finished = await session.generate(
            prompt(CONTEXT - 10), max_tokens=10, ignore_end_of_generation=True
        ).result()
        held = [metrics.kv_bytes for metrics in await route.metrics()]
    assert finished.finished.cached_tokens == CONTEXT - 1
    caches = session_bytes(
        model, take_inventory(model), CONTEXT - 1, chunk_tokens=64, rollback_tokens=16
    )
    assert caches is not None
    assert held == [sum(caches[0:3]), sum(caches[3:8])]


async def test_going_back_within_the_rings_gives_the_same_text_again(route: Route) -> None:
    async with asyncio.timeout(END), route.session() as session:
        first = await session.generate(
            prompt(290), max_tokens=17, ignore_end_of_generation=True
        ).result()
        again = await session.generate(
            first.token_ids[:1], max_tokens=16, start_position=290, ignore_end_of_generation=True
        ).result()
    assert again.token_ids == first.token_ids[1:]
