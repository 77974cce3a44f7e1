"""The chain's side of the benchmark and its proxy, on workers with the fake engine."""

from __future__ import annotations

import asyncio
import os
import pathlib
import sys
from collections.abc import AsyncIterator

import pytest
from meshnet_gguf.client import LayerRange
from meshnet_gguf.local_cluster import LocalCluster, WorkerSpec

from benchmarks.systems import (
    BenchmarkError,
    Binaries,
    Interference,
    Proxy,
    System,
    Tool,
    resident_mib,
    settle,
)

PROMPTS = [[65, 66, 67], [70, 71]]


@pytest.fixture
def binaries() -> Binaries:
    folder = os.environ.get("MESHNET_BENCHMARK_BINARIES")
    return Binaries.in_folder(pathlib.Path(folder)) if folder else Binaries()


@pytest.fixture
async def workers() -> AsyncIterator[list[tuple[str, int]]]:
    flags = ("--batch_policy=exact",)
    specs = [WorkerSpec(LayerRange(*cut), None, flags) for cut in ((0, 3), (3, 8))]
    async with LocalCluster(specs) as cluster:
        yield [(worker.endpoint, worker.pid) for worker in cluster.workers]


async def test_a_chain_generates_and_counts(
    binaries: Binaries, workers: list[tuple[str, int]]
) -> None:
    system = await System.meshnet(binaries, workers, through_proxy=False)
    try:
        first = await system.prefill(PROMPTS)
        assert [len(ids) for ids in first["token_ids"]] == [1, 1]
        assert len(first["ttft_ms"]) == 2
        assert first["prefill_s"] * 1000 == pytest.approx(max(first["ttft_ms"]), rel=1e-3)
        decoded = await system.decode(5)
        assert [len(ids) for ids in decoded["token_ids"]] == [6, 6]
        for stage in decoded["stages"]:
            assert stage["queued_steps"] >= 0
            assert stage["sessions_failed"] == 0
        assert decoded["computed_tokens"] == 12
        assert 1 <= decoded["decode_tokens"] <= 11
        head, tail = decoded["stages"]
        # One session's rows at a time, under the policy `exact`.
        assert head["engine_calls"] == tail["engine_calls"] == 12
        boundary = system.tool.hello["boundary_bytes_per_token"]
        assert head["seam_bytes_sent"] > 12 * boundary
        assert tail["return_bytes_sent"] > 0
        assert head["return_bytes_sent"] == 0
        assert set(system.resident_mib()) == {"stage-0", "stage-1", "client"}
        # The same again: the earlier sessions are gone, and nothing is left of them.
        assert (await system.prefill(PROMPTS))["token_ids"] == first["token_ids"]
        assert (await system.decode(5))["token_ids"] == decoded["token_ids"]
    finally:
        await system.stop()


async def test_the_proxy_carries_every_seam_and_changes_no_token(
    binaries: Binaries, workers: list[tuple[str, int]]
) -> None:
    direct = await System.meshnet(binaries, workers, through_proxy=False)
    far = await System.meshnet(binaries, workers, through_proxy=True)
    try:
        assert far.proxy is not None
        await far.proxy.shape(4, 100)
        expected = await direct.prefill(PROMPTS[:1])
        assert (await far.prefill(PROMPTS[:1]))["token_ids"] == expected["token_ids"]
        expected = await direct.decode(5)
        before = await far.proxy.bytes_carried()
        decoded = await far.decode(5)
        carried = await far.proxy.bytes_carried() - before
        assert decoded["token_ids"] == expected["token_ids"]
        counted = sum(
            stage["seam_bytes_sent"] + stage["return_bytes_sent"] for stage in decoded["stages"]
        )
        # What the workers count is in what crossed the proxy, which sees gRPC's framing, too.
        assert counted < carried
        # Five steps, each over the seam and back.
        assert decoded["decode_s"] >= 5 * 0.004
    finally:
        await direct.stop()
        await far.stop()


async def test_a_refused_command_is_an_error(
    binaries: Binaries, workers: list[tuple[str, int]]
) -> None:
    system = await System.meshnet(binaries, workers, through_proxy=False)
    try:
        with pytest.raises(BenchmarkError, match="expected: prefill IDS"):
            await system.decode(3)
        with pytest.raises(BenchmarkError, match="meshnet: "):
            await system.prefill([[1_000_000]])
        # A failed session leaves the client usable.
        assert len((await system.prefill(PROMPTS))["token_ids"]) == 2
    finally:
        await system.stop()


async def test_a_program_that_cannot_start_says_why(binaries: Binaries) -> None:
    with pytest.raises(BenchmarkError, match="expected --workers=HOST:PORT"):
        await Tool.start("client", [str(binaries.chain_client)])


async def test_the_proxys_command_line(binaries: Binaries) -> None:
    proxy = await Proxy.start(binaries.proxy, ["127.0.0.1:9", "127.0.0.1:10"])
    try:
        assert len(set(proxy.endpoints)) == 2
        assert await proxy.bytes_carried() == 0
    finally:
        await proxy.stop()
    with pytest.raises(BenchmarkError, match="expected HOST:PORT"):
        await Proxy.start(binaries.proxy, ["nowhere"])


# Spins until told to stop, then waits for its end.
SPIN = (
    "import select, sys; print('{}', flush=True)\n"
    "while not select.select([sys.stdin], [], [], 0)[0]: pass\n"
    "sys.stdin.readline(); print('{}', flush=True); sys.stdin.read()"
)


async def test_interference_is_what_others_compute() -> None:
    tool = await Tool.start("spinner", [sys.executable, "-c", SPIN])
    try:
        ours = Interference([tool.pid])
        theirs = Interference([])
        # The spinner is one of those others to the second, and nobody else differs between them:
        # sooner or later it shows.
        while theirs.share() <= ours.share():
            await asyncio.sleep(0.05)
        assert 0.0 <= ours.share() <= 1.0
        assert 0.0 < theirs.share() <= 1.0
    finally:
        await tool.stop()


async def test_measuring_waits_for_others_to_rest() -> None:
    tool = await Tool.start("spinner", [sys.executable, "-c", SPIN])
    try:
        settled = asyncio.create_task(settle([tool.pid]))
        done, _ = await asyncio.wait([settled], timeout=1)
        assert not done
        await tool.ask("rest")
        await settled
    finally:
        await tool.stop()


def test_resident_memory_of_this_process() -> None:
    assert resident_mib(os.getpid()) > 5
