"""Stages that die, engines that fail, clients that vanish: bounded, and nobody else is hurt."""

import asyncio
import contextlib
import itertools
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable

import pytest
from meshnet_gguf.client import (
    LayerRange,
    PrefillProgress,
    Route,
    Session,
    Token,
    open_route,
)
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.local_cluster import LocalCluster, WorkerSpec
from meshnet_gguf.testing.cluster import (
    FakeCluster,
    cluster_of,
    fake_cluster,
    fake_specs,
    wait_idle,
)

from proto.meshnet.shard.v1 import errors_pb2

BOS = 256
PROMPT = [BOS, *b"a prompt of several chunks"]
CUTS = (2, 5)
# The bars: an error reaches the client within 2 s of a stage's death, and a client that goes away
# frees every stage's slot within 1 s.
ERROR_WITHIN = 2.0
FREED_WITHIN = 1.0
END = 60.0  # seconds after which a test that hangs is given up

SLOW = ("--fake_delay=3ms", "--context_tokens=100000", "--prefill_chunk_tokens=4")


async def answer(route: Route) -> tuple[int, ...]:
    """What a healthy chain answers."""
    async with asyncio.timeout(END), route.session() as session:
        return (await session.generate(PROMPT, max_tokens=8).result()).token_ids


@pytest.fixture(scope="module")
def expected() -> tuple[int, ...]:
    """What the whole model answers."""

    async def whole() -> tuple[int, ...]:
        async with fake_cluster(()) as fake:
            return await answer(fake.route)

    return asyncio.run(whole())


async def recovers(fake: FakeCluster, killed: int, expected: tuple[int, ...]) -> None:
    """The other workers live, hold nothing, and serve a new route with a new worker."""
    for index, worker in enumerate(fake.cluster.workers):
        if index != killed:
            assert worker.exit_code is None
            await wait_idle(fake.route.workers[index])
    await fake.cluster.restart(killed)
    async with await open_route(fake.cluster.endpoints) as route:
        assert await answer(route) == expected


class Clock:
    """Asserts that something happens in time."""

    def __init__(self) -> None:
        self.started = time.monotonic()

    def check(self, within: float) -> None:
        assert time.monotonic() - self.started < within


@pytest.mark.parametrize("moment", ["prefill", "first token", "decode", "between generations"])
@pytest.mark.parametrize("killed", [0, 1, 2])
async def test_a_killed_stage_is_a_structured_error_in_time(
    killed: int, moment: str, expected: tuple[int, ...]
) -> None:
    async with asyncio.timeout(END), fake_cluster(CUTS, *SLOW) as fake:
        with pytest.raises(MeshnetError) as caught:
            async with fake.route.session() as session:
                if moment == "between generations":
                    await session.generate(PROMPT, max_tokens=2).result()
                    clock = await kill(fake, killed)
                    # A message that a dead head can no longer take is not lost silently.
                    await session.generate(PROMPT, max_tokens=2).result()
                else:
                    reached = moments()[moment]
                    # Long enough to die in the middle of it, and no longer than that needs.
                    prompt = PROMPT * 50 if moment == "prefill" else PROMPT
                    generation = session.generate(prompt, max_tokens=90000)
                    async for event in generation:
                        if reached(event):
                            clock = await kill(fake, killed)
                            reached = never
        clock.check(ERROR_WITHIN)
        assert caught.value.reason == errors_pb2.REASON_PEER_LOST
        if killed > 0:
            layers = fake.route.capabilities[killed].layers
            assert caught.value.stage == (layers.begin, layers.end)
        await recovers(fake, killed, expected)


def moments() -> dict[str, Callable[[object], bool]]:
    counter = itertools.count()
    return {
        "prefill": lambda event: isinstance(event, PrefillProgress),
        "first token": lambda event: isinstance(event, Token),
        "decode": lambda event: isinstance(event, Token) and next(counter) == 10,
    }


def never(_: object) -> bool:
    return False


async def kill(fake: FakeCluster, index: int) -> Clock:
    clock = Clock()
    await fake.cluster.workers[index].kill()
    return clock


@pytest.mark.parametrize("stopped", [0, 1, 2])
async def test_a_stage_that_hangs_is_as_good_as_dead(
    stopped: int, expected: tuple[int, ...]
) -> None:
    # A shorter wait than the default, for the test's sake; the client has its own for the head.
    flags = (*SLOW, "--keepalive_timeout=2s")
    async with asyncio.timeout(END), fake_cluster(CUTS, *flags) as fake:
        with pytest.raises(MeshnetError) as caught:
            async with fake.route.session() as session:
                async for event in session.generate(PROMPT, max_tokens=90000):
                    if isinstance(event, Token) and event.position == len(PROMPT) + 3:
                        fake.cluster.workers[stopped].send(signal.SIGSTOP)
        assert caught.value.reason == errors_pb2.REASON_PEER_LOST
        await fake.cluster.workers[stopped].kill()
        await recovers(fake, stopped, expected)


async def test_a_stage_that_dies_while_a_route_is_opened(expected: tuple[int, ...]) -> None:
    async with asyncio.timeout(END), fake_cluster(CUTS) as fake:
        clock = await kill(fake, 2)
        with pytest.raises(MeshnetError) as caught:
            async with fake.route.session():
                pytest.fail("a route without a tail was opened")
        clock.check(ERROR_WITHIN)
        assert caught.value.reason == errors_pb2.REASON_PEER_UNREACHABLE
        assert caught.value.stage == (5, 8)
        await recovers(fake, 2, expected)


async def test_a_dead_stage_ends_all_its_sessions_and_no_others(expected: tuple[int, ...]) -> None:
    """Two routes share the head and the tail, each with its own middle stage."""
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(asyncio.timeout(END))
        head, middle, tail = fake_specs(CUTS, *SLOW)
        specs = [head, middle, middle, tail]
        cluster = await stack.enter_async_context(LocalCluster(specs))
        ends = cluster.endpoints
        first = await stack.enter_async_context(await open_route([ends[0], ends[1], ends[3]]))
        second = await stack.enter_async_context(await open_route([ends[0], ends[2], ends[3]]))
        started = asyncio.Event()

        async def doomed() -> int:
            with pytest.raises(MeshnetError) as caught:
                async with first.session() as session:
                    async for event in session.generate(PROMPT, max_tokens=90000):
                        if isinstance(event, Token):
                            started.set()
            return caught.value.reason

        losers = [asyncio.create_task(doomed()) for _ in range(3)]
        async with second.session() as session:
            generation = session.generate(PROMPT, max_tokens=300)
            async for event in generation:
                if isinstance(event, Token) and len(generation.token_ids) == 5:
                    await started.wait()
                    await cluster.workers[1].kill()
            survivor = generation.token_ids
        assert await asyncio.gather(*losers) == [errors_pb2.REASON_PEER_LOST] * 3
        assert tuple(survivor[:8]) == expected
        assert len(survivor) == 300
        for index in (0, 1, 2):
            await wait_idle(second.workers[index])


@pytest.mark.parametrize("stage", [0, 1, 2])
async def test_an_engine_that_crashes_is_a_dead_stage(
    stage: int, expected: tuple[int, ...]
) -> None:
    specs = fake_specs(CUTS)
    broken = WorkerSpec(specs[stage].layers, flags=(*specs[stage].flags, "--fake_crash_at_step=4"))
    specs[stage] = broken
    async with asyncio.timeout(END), cluster_of(specs) as fake:
        cluster, route = fake.cluster, fake.route
        with pytest.raises(MeshnetError) as caught:
            await answer(route)
        assert caught.value.reason == errors_pb2.REASON_PEER_LOST
        assert await cluster.workers[stage].wait() != 0
        for index, worker in enumerate(route.workers):
            if index != stage:
                await wait_idle(worker)
                assert cluster.workers[index].exit_code is None


@pytest.mark.parametrize("stage", [0, 1, 2])
async def test_an_engine_that_fails_a_step_ends_that_session_only(
    stage: int, expected: tuple[int, ...]
) -> None:
    specs = fake_specs(CUTS)
    flags = (*specs[stage].flags, "--fake_fail_from_step=4", "--fake_fail_steps=1")
    specs[stage] = WorkerSpec(specs[stage].layers, flags=flags)
    async with asyncio.timeout(END), cluster_of(specs) as fake:
        route = fake.route
        with pytest.raises(MeshnetError) as caught:
            await answer(route)
        assert caught.value.reason == errors_pb2.REASON_ENGINE_FAILURE
        layers = route.capabilities[stage].layers
        assert caught.value.stage == (layers.begin, layers.end)
        for worker in route.workers:
            await wait_idle(worker)
        assert await answer(route) == expected


@pytest.mark.parametrize(
    ("stage", "fault"), [(0, "nan"), (0, "width"), (1, "nan"), (1, "width"), (2, "token")]
)
async def test_an_engines_wrong_output_is_not_passed_on(stage: int, fault: str) -> None:
    specs = fake_specs(CUTS)
    flags = (*specs[stage].flags, f"--fake_malformed={fault}")
    specs[stage] = WorkerSpec(specs[stage].layers, flags=flags)
    async with asyncio.timeout(END), cluster_of(specs) as fake:
        cluster, route = fake.cluster, fake.route
        with pytest.raises(MeshnetError) as caught:
            await answer(route)
        assert caught.value.reason == errors_pb2.REASON_ENGINE_OUTPUT_INVALID
        layers = route.capabilities[stage].layers
        assert caught.value.stage == (layers.begin, layers.end)
        for index, worker in enumerate(route.workers):
            await wait_idle(worker)
            assert cluster.workers[index].exit_code is None


async def decoding(session: Session, tokens: int) -> None:
    """Returns when a long generation has given so many tokens."""
    generation = session.generate(PROMPT, max_tokens=90000)
    async for event in generation:
        if isinstance(event, Token) and len(generation.token_ids) == tokens:
            return


async def test_a_client_that_closes_its_connection_frees_every_stage(
    expected: tuple[int, ...],
) -> None:
    async with asyncio.timeout(END), fake_cluster(CUTS, *SLOW) as fake:
        async with await open_route(fake.cluster.endpoints) as other:
            async with other.session() as undisturbed:
                generation = undisturbed.generate(PROMPT, max_tokens=8)
                await anext(generation)
                leaving = await open_route(fake.cluster.endpoints)
                session = leaving.session()
                await session.__aenter__()
                await decoding(session, 3)
                clock = Clock()
                await leaving.close()
                while any(m.open_sessions > 1 for m in await fake.route.metrics()):
                    await asyncio.sleep(0.01)
                clock.check(FREED_WITHIN)
                assert (await generation.result()).token_ids == expected
            with contextlib.suppress(MeshnetError):
                await session.close()
        await fake.wait_idle()


CLIENT = """
import asyncio, sys
from meshnet_gguf.client import Token, open_route

async def main():
    async with await open_route(sys.argv[1:]) as route, route.session() as session:
        async for event in session.generate([256], max_tokens=90000):
            if isinstance(event, Token):
                print("token", flush=True)

asyncio.run(main())
"""


async def test_a_client_that_is_killed_frees_every_stage(expected: tuple[int, ...]) -> None:
    async with asyncio.timeout(END), fake_cluster(CUTS, *SLOW) as fake:
        client = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            CLIENT,
            *fake.cluster.endpoints,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert client.stdout is not None
        assert await client.stdout.readline() == b"token\n"
        assert [m.open_sessions for m in await fake.route.metrics()] == [1, 1, 1]
        clock = Clock()
        client.kill()
        await fake.wait_idle()
        clock.check(FREED_WITHIN)
        await client.wait()
        assert await answer(fake.route) == expected


async def test_workers_do_not_outlive_who_started_them(tmp_path: pathlib.Path) -> None:
    program = (
        "import asyncio, pathlib\n"
        "from meshnet_gguf.local_cluster import LocalCluster, WorkerSpec\n"
        "async def main():\n"
        "    async with LocalCluster([WorkerSpec()]) as cluster:\n"
        "        print(cluster.workers[0].pid, flush=True)\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    owner = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        program,
        stdout=asyncio.subprocess.PIPE,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "TMPDIR": str(tmp_path),
        },
    )
    assert owner.stdout is not None
    pid = int(await owner.stdout.readline())
    owner.kill()
    await owner.wait()
    async with asyncio.timeout(END):
        while running(pid):
            await asyncio.sleep(0.01)


def running(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for yet does not."""
    try:
        status = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")


async def test_split_ranges_of_dead_and_living_workers_are_told_apart() -> None:
    async with asyncio.timeout(END), fake_cluster((4,)) as fake:
        await fake.cluster.workers[1].kill()
        with pytest.raises(MeshnetError) as caught:
            await open_route(fake.cluster.endpoints)
        assert caught.value.reason == errors_pb2.REASON_PEER_UNREACHABLE
        assert fake.cluster.endpoints[1] in caught.value.message
        assert fake.route.capabilities[1].layers == LayerRange(4, 8)
