"""The llama engine on a real model: chains of workers give exactly what the whole model gives.

Evidence of correctness on this machine's CPU kernels, under the batch policy `exact`.
"""

import asyncio
import contextlib
import itertools
import json
import os
import pathlib
import signal
import sys
from array import array
from collections.abc import Sequence

import pytest
from meshnet_gguf.client import (
    ChatMessage,
    Finished,
    FinishReason,
    GenerationResult,
    LayerRange,
    PrefillProgress,
    Route,
    SamplingParams,
    Session,
    Token,
    open_route,
)
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.local_cluster import WorkerSpec
from meshnet_gguf.testing.cluster import FakeCluster, cluster_of

from proto.meshnet.shard.v1 import errors_pb2

LAYERS = 30
END = 240.0
# The bars: an error reaches the client within 2 s of a stage's death, and a client that goes away
# frees every stage's slot within 1 s.
ERROR_WITHIN = 2.0
FREED_WITHIN = 1.0
MIB = 1024 * 1024
# Prefill in several steps, so that a chain overlaps them and the last one is shorter.
# One thread a worker: five of them share whatever cores a test machine has.
CHUNK = 64
FLAGS = (
    f"--prefill_chunk_tokens={CHUNK}",
    "--context_tokens=1024",
    "--max_sessions=8",
    "--threads=1",
)
SENTENCE = (
    "The quick brown fox jumps over the lazy dog, and then it thinks about what it has done. "
)
PROMPTS = ["Once upon a time", SENTENCE * 9]
GREEDY = SamplingParams()
# How an answer to "Hello" begins, whichever kernels compute it.
GREETINGS = ("Hello", "Hi")
SAMPLED = SamplingParams(temperature=0.9, top_k=50, top_p=0.95, repetition_penalty=1.1, seed=11)


@pytest.fixture(scope="module")
def model() -> pathlib.Path:
    return pathlib.Path(os.environ["MESHNET_TEST_MODEL"]).absolute()


@pytest.fixture(scope="module")
def size(model: pathlib.Path) -> int:
    return model.stat().st_size


def specs(model: pathlib.Path, cuts: Sequence[int], *flags: str) -> list[WorkerSpec]:
    edges = [0, *cuts, LAYERS]
    return [
        WorkerSpec(LayerRange(begin, end), model=model, flags=(*FLAGS, *flags))
        for begin, end in itertools.pairwise(edges)
    ]


async def generate(
    route: Route, prompt: str, sampling: SamplingParams = GREEDY, tokens: int = 40
) -> GenerationResult:
    token_ids = await route.head.tokenize(prompt)
    async with asyncio.timeout(END), route.session() as session:
        return await answer(session, token_ids, sampling, tokens)


async def answer(
    session: Session,
    token_ids: Sequence[int],
    sampling: SamplingParams,
    tokens: int = 40,
    *,
    held: int = 0,
) -> GenerationResult:
    """The answer to a whole sequence of which the session holds `held` tokens already."""
    return await session.generate(
        token_ids[held:],
        sampling,
        max_tokens=tokens,
        start_position=held,
        ignore_end_of_generation=True,
        return_logits=True,
    ).result()


async def answers(route: Route) -> list[GenerationResult]:
    """Both prompts, greedy and sampled."""
    return [
        await generate(route, prompt, sampling)
        for prompt in PROMPTS
        for sampling in (GREEDY, SAMPLED)
    ]


@pytest.fixture(scope="module")
def whole(model: pathlib.Path) -> list[GenerationResult]:
    """What the whole model in one worker answers."""

    async def run() -> list[GenerationResult]:
        async with cluster_of(specs(model, ())) as cluster:
            return await answers(cluster.route)

    return asyncio.run(run())


def same(left: GenerationResult, right: GenerationResult) -> bool:
    # Equal bytes of all sampled rows' logits: a maximal difference of 0.
    return left.token_ids == right.token_ids and left.logits == right.logits


def test_the_reference_is_long_enough_and_not_trivial(whole: list[GenerationResult]) -> None:
    for result in whole:
        assert len(result.token_ids) == len(result.logits) == 40
        assert len(result.logits[0]) == 4 * 49152
        assert len(set(result.token_ids)) > 5
    assert len({result.token_ids for result in whole}) == 4


@pytest.mark.parametrize(
    "cuts",
    [(), (1,), (15,), (29,), (10, 20), (3, 27), (6, 12, 18, 24)],
    ids=lambda cuts: f"{len(cuts) + 1} stages at {','.join(map(str, cuts)) or 'no cut'}",
)
async def test_a_chain_gives_exactly_what_the_whole_model_gives(
    model: pathlib.Path, whole: list[GenerationResult], cuts: tuple[int, ...]
) -> None:
    async with cluster_of(specs(model, cuts)) as cluster:
        assert [c.layers.begin for c in cluster.route.capabilities] == [0, *cuts]
        for capability in cluster.route.capabilities:
            assert capability.engine == "llama"
            assert capability.architecture == "llama"
            assert capability.evidence == "DARK"
            assert capability.batch_policy == "EXACT"
        for index, result in enumerate(await answers(cluster.route)):
            assert same(result, whole[index]), f"answer {index}"


async def test_four_interleaved_sessions_equal_each_alone(
    model: pathlib.Path, whole: list[GenerationResult]
) -> None:
    async with cluster_of(specs(model, (15,))) as cluster:
        together = await asyncio.gather(
            *(
                generate(cluster.route, prompt, sampling)
                for prompt in PROMPTS
                for sampling in (GREEDY, SAMPLED)
            )
        )
        for index, result in enumerate(together):
            assert same(result, whole[index]), f"answer {index}"
        await cluster.wait_idle()


@pytest.mark.parametrize("cuts", [(15,), (10, 20)], ids=["2 stages", "3 stages"])
async def test_cancelled_sessions_disturb_nobody_and_go_on(
    model: pathlib.Path, whole: list[GenerationResult], cuts: tuple[int, ...]
) -> None:
    """Four sessions at once; one is cancelled in prefill, one in decoding."""
    async with asyncio.timeout(END), cluster_of(specs(model, cuts)) as cluster:
        route = cluster.route
        short, long = [await route.head.tokenize(prompt) for prompt in PROMPTS]
        all_open = asyncio.Barrier(4)

        async def undisturbed(index: int, prompt: list[int], sampling: SamplingParams) -> None:
            async with route.session() as session:
                await all_open.wait()
                assert same(await answer(session, prompt, sampling), whole[index])

        async def cancelled_in_prefill() -> None:
            async with route.session() as session:
                await all_open.wait()
                generation = session.generate(long * 5, max_tokens=20)
                async for event in generation:
                    if isinstance(event, PrefillProgress) and event.tokens_done == CHUNK:
                        await generation.request_cancel()
                assert isinstance(event, Finished)
                assert event.reason is FinishReason.CANCELLED
                assert not generation.token_ids
                # Whole chunks of what is held, and at least one row to sample after.
                held = min(event.cached_tokens, len(long) - 1) // CHUNK * CHUNK
                assert CHUNK <= held < len(long * 5)
                assert same(await answer(session, long, GREEDY, held=held), whole[2])

        async def cancelled_in_decoding() -> None:
            async with route.session() as session:
                await all_open.wait()
                generation = session.generate(short, max_tokens=500, ignore_end_of_generation=True)
                async for event in generation:
                    if isinstance(event, Token) and len(generation.token_ids) == 5:
                        await generation.request_cancel()
                assert isinstance(event, Finished)
                assert event.reason is FinishReason.CANCELLED
                done = tuple(generation.token_ids)
                assert 5 <= len(done) < 40
                assert done == whole[0].token_ids[: len(done)]
                # The last token was sampled and is not held yet.
                held = len(short) + len(done) - 1
                assert event.cached_tokens == held
                rest = await answer(session, [*short, *done], GREEDY, 40 - len(done), held=held)
                assert done + rest.token_ids == whole[0].token_ids
                assert rest.logits == whole[0].logits[len(done) :]

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(undisturbed(0, short, GREEDY))
            tasks.create_task(undisturbed(3, long, SAMPLED))
            tasks.create_task(cancelled_in_prefill())
            tasks.create_task(cancelled_in_decoding())
        await cluster.wait_idle()


async def test_a_session_that_is_cancelled_from_outside_makes_way(
    model: pathlib.Path, whole: list[GenerationResult]
) -> None:
    async with asyncio.timeout(END), cluster_of(specs(model, (10, 20))) as cluster:
        route = cluster.route
        beside = asyncio.create_task(generate(route, PROMPTS[1], SAMPLED))
        with pytest.raises(MeshnetError) as caught:
            async with route.session() as session:
                generation = session.generate([1, 2, 3], max_tokens=500)
                async for event in generation:
                    if isinstance(event, Token) and len(generation.token_ids) == 5:
                        assert await route.head.cancel_session(
                            session.route_session_id, session.route_epoch
                        )
        assert caught.value.reason == errors_pb2.REASON_CANCELLED
        assert same(await generate(route, PROMPTS[0]), whole[0])
        assert same(await beside, whole[3])
        await cluster.wait_idle()


async def test_a_text_does_not_depend_on_seven_others_nor_on_a_restart(
    model: pathlib.Path, whole: list[GenerationResult]
) -> None:
    async def among_seven(cluster: FakeCluster) -> GenerationResult:
        others = [
            asyncio.create_task(
                generate(cluster.route, f"Number {number} is", SamplingParams(1.0, seed=number), 60)
            )
            for number in range(7)
        ]
        result = await generate(cluster.route, PROMPTS[0], SAMPLED)
        await asyncio.gather(*others)
        return result

    async with cluster_of(specs(model, (15,))) as cluster:
        assert same(await among_seven(cluster), whole[1])
        for index in (0, 1):
            await cluster.cluster.restart(index)
        async with await open_route(cluster.cluster.endpoints) as route:
            assert same(await generate(route, PROMPTS[0], SAMPLED), whole[1])
            assert same(await among_seven(FakeCluster(cluster.cluster, route)), whole[1])


# What rounding may do to a logit where rows are computed in other company; another session's
# context, or a wrong position, does far more.
ROUNDING = 0.5


def logit_difference(left: bytes, right: bytes) -> float:
    """The largest one between two rows."""
    rows = array("f", left), array("f", right)
    return max(abs(a - b) for a, b in zip(*rows, strict=True))


async def test_shared_batches_serve_everybody(model: pathlib.Path) -> None:
    prompts = [f"Number {number} is" for number in range(8)]
    async with cluster_of(specs(model, ())) as cluster:
        alone = [await generate(cluster.route, prompt, tokens=20) for prompt in prompts]
    assert logit_difference(alone[0].logits[0], alone[5].logits[0]) > 2 * ROUNDING
    async with cluster_of(specs(model, (15,), "--batch_policy=shared")) as cluster:
        together = await asyncio.gather(
            *(generate(cluster.route, prompt, tokens=20) for prompt in prompts)
        )
        calls = (await cluster.route.metrics())[1].engine_calls
        await cluster.wait_idle()
    # One call for many rows: at least two tokens each on average.
    assert calls <= 8 * 20 / 2
    for result, exact in zip(together, alone, strict=True):
        assert len(result.token_ids) == len(result.logits) == 20
        # The same text with the same logits, but for rounding: from where that has decided a draw
        # between two tokens, it is another text.
        for position in range(20):
            difference = logit_difference(result.logits[position], exact.logits[position])
            assert difference < ROUNDING, f"token {position}"
            if result.token_ids[position] != exact.token_ids[position]:
                break


async def test_a_turn_goes_on_from_what_is_held(model: pathlib.Path) -> None:
    question = ChatMessage("user", "Hello")
    async with cluster_of(specs(model, (15,))) as cluster:
        async with cluster.route.session() as session:
            first = await (await session.chat([question], max_tokens=32)).result()
            # So this really is the model, and its template: it greets back.
            assert first.text.startswith(GREETINGS)
            turns = [
                question,
                ChatMessage("assistant", first.text),
                ChatMessage("user", "Who are you?"),
            ]
            second = await (await session.chat(turns, max_tokens=32)).result()
        sent = second.finished.prompt_tokens
        assert len(second.token_ids) > 1
        async with cluster.route.session() as session:
            fresh = await (await session.chat(turns, max_tokens=1)).result()
        assert sent < fresh.finished.prompt_tokens


async def test_a_range_stays_within_what_it_owns(model: pathlib.Path, size: int) -> None:
    owned = []
    for cuts in [(15,), (10, 20)]:
        async with cluster_of(specs(model, cuts)) as cluster:
            await generate(cluster.route, PROMPTS[1])
            total = 0
            for worker, metrics in zip(
                cluster.cluster.workers, await cluster.route.metrics(), strict=True
            ):
                allowed = metrics.owned_tensor_bytes + metrics.kv_budget_bytes + 64 * MIB
                assert metrics.resident_bytes <= allowed
                assert resident_bytes(worker.pid) <= allowed
                total += metrics.owned_tensor_bytes
            owned.append([m.owned_tensor_bytes for m in await cluster.route.metrics()])
            # Together they own the file's tensors; tied embeddings are owned at both ends.
            assert 0.9 * size < total < 1.4 * size
            if len(cuts) == 2:
                middle = cluster.route.capabilities[1]
                assert middle.owned_tensors < 10 * 12
    # Ten layers in the middle are about a third of all layers, and no embedding at all.
    assert owned[1][1] < 0.3 * size


@pytest.mark.parametrize(
    "flags",
    [(), ("--prefill_chunk_tokens=512", "--max_sessions=8", "--context_tokens=1024")],
    ids=["default flags", "long chunks"],
)
async def test_a_range_stays_within_what_it_owns_under_load(
    model: pathlib.Path, flags: tuple[str, ...]
) -> None:
    ranges = [LayerRange(0, 15), LayerRange(15, LAYERS)]
    stages = [WorkerSpec(owned, model=model, flags=flags) for owned in ranges]
    async with cluster_of(stages) as cluster:
        route = cluster.route
        prompt = (await route.head.tokenize(SENTENCE * 40))[:512]
        assert len(prompt) == 512
        async with asyncio.timeout(END), route.session() as session:
            assert len((await answer(session, prompt, GREEDY, 10)).token_ids) == 10
        if flags:
            assert session.prefill_chunk_tokens == 512
            assert session.context_tokens == 1024
        await asyncio.gather(*(generate(route, f"Number {n} is", SAMPLED, 10) for n in range(8)))
        for worker, metrics in zip(cluster.cluster.workers, await route.metrics(), strict=True):
            allowed = metrics.owned_tensor_bytes + metrics.kv_budget_bytes + 64 * MIB
            assert metrics.resident_bytes <= allowed
            assert resident_bytes(worker.pid) <= allowed


def resident_bytes(pid: int) -> int:
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


@pytest.mark.parametrize("moment", ["prefill", "decode"])
@pytest.mark.parametrize("killed", [0, 1, 2])
async def test_a_killed_stage_is_told_in_time_and_replaced(
    model: pathlib.Path, whole: list[GenerationResult], killed: int, moment: str
) -> None:
    async with cluster_of(specs(model, (10, 20))) as cluster:
        prompt = await cluster.route.head.tokenize(PROMPTS[1])
        loop = asyncio.get_running_loop()
        with pytest.raises(MeshnetError) as caught:
            async with asyncio.timeout(END) as deadline, cluster.route.session() as session:
                # Chunks enough that all stages are at work when one dies.
                generation = session.generate(prompt * 5, max_tokens=100)
                async for event in generation:
                    if isinstance(event, PrefillProgress):
                        reached = moment == "prefill"
                    else:
                        reached = moment == "decode" and len(generation.token_ids) == 5
                    if reached and cluster.cluster.workers[killed].exit_code is None:
                        deadline.reschedule(loop.time() + ERROR_WITHIN)
                        await cluster.cluster.workers[killed].kill()
        assert caught.value.reason == errors_pb2.REASON_PEER_LOST
        if killed > 0:
            layers = cluster.route.capabilities[killed].layers
            assert caught.value.stage == (layers.begin, layers.end)
        survivors = [index for index in range(3) if index != killed]
        await cluster.wait_idle(survivors)
        assert all(cluster.cluster.workers[index].exit_code is None for index in survivors)
        await cluster.cluster.restart(killed)
        async with await open_route(cluster.cluster.endpoints) as route:
            assert same(await generate(route, PROMPTS[0]), whole[0])


async def test_a_client_that_goes_away_frees_every_stage_and_disturbs_nobody(
    model: pathlib.Path, whole: list[GenerationResult]
) -> None:
    async with cluster_of(specs(model, (15,))) as cluster:
        staying = asyncio.create_task(generate(cluster.route, PROMPTS[0]))
        leaving = await open_route(cluster.cluster.endpoints)
        session = leaving.session()
        await session.__aenter__()
        generation = session.generate([1, 2, 3], max_tokens=500)
        async with asyncio.timeout(END):
            async for event in generation:
                if isinstance(event, Token) and len(generation.token_ids) == 5:
                    break
        async with asyncio.timeout(FREED_WITHIN):
            await leaving.close()
            while any(m.open_sessions > 1 for m in await cluster.route.metrics()):
                await asyncio.sleep(0.01)
        with contextlib.suppress(MeshnetError):
            await session.close()
        assert same(await staying, whole[0])
        await cluster.wait_idle()


async def test_a_client_that_goes_away_in_long_chunks_frees_every_stage(
    model: pathlib.Path, whole: list[GenerationResult]
) -> None:
    flags = ("--prefill_chunk_tokens=512", "--context_tokens=2048")
    async with asyncio.timeout(END), cluster_of(specs(model, (15,), *flags)) as cluster:
        route = cluster.route
        prompt = (await route.head.tokenize(SENTENCE * 100))[: 3 * 512]
        assert len(prompt) == 3 * 512
        staying = asyncio.create_task(generate(route, PROMPTS[0]))
        leaving = await open_route(cluster.cluster.endpoints)
        session = leaving.session()
        await session.__aenter__()
        reading = asyncio.create_task(session.generate(prompt, max_tokens=20).result())
        # Then the tail computes the first chunk and the head the second.
        while (await route.head.metrics()).prefill_tokens < 512:
            await asyncio.sleep(0.01)
        async with asyncio.timeout(FREED_WITHIN):
            await leaving.close()
            while any(m.open_sessions > 1 for m in await route.metrics()):
                await asyncio.sleep(0.01)
        with pytest.raises(MeshnetError):
            await reading
        # It was in the middle of its prompt.
        assert (await route.workers[1].metrics()).prefill_tokens < 2 * 512
        assert same(await staying, whole[0])
        await cluster.wait_idle()


async def demo(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the demo as a program."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "meshnet_gguf.demo",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    async with asyncio.timeout(END):
        stdout, stderr = await process.communicate()
    assert process.returncode is not None
    return process.returncode, stdout.decode(), stderr.decode()


async def test_the_demo_for_scripts(model: pathlib.Path) -> None:
    code, stdout, stderr = await demo(
        "--json", f"--model={model}", "--stages=3", "--max-tokens=40", "--threads=1"
    )
    assert code == 0, stderr
    result = json.loads(stdout)
    assert result["parity"] == "identical"
    assert result["token_ids"] == result["reference_token_ids"]
    assert len(result["token_ids"]) > 4
    assert result["max_logit_difference"] == 0
    assert [stage["layers"] for stage in result["stages"]] == [[0, 10], [10, 20], [20, 30]]
    assert result["text"]
    # 576 floats, a position and a token id, and at most 256 bytes around them.
    for stage in result["stages"][:2]:
        assert stage["seam_bytes_sent_per_token"] <= 576 * 4 + 8 + 256


async def test_the_demo_for_people(model: pathlib.Path) -> None:
    code, stdout, stderr = await demo(
        f"--model={model}", "--max_tokens=24", "--prompt=Hello", "--threads=1"
    )
    assert code == 0, stderr
    assert stdout.startswith(GREETINGS)
    assert "parity: identical (" in stdout
    assert "[15, 30)" in stdout


async def test_an_interrupted_demo_leaves_nothing_behind(model: pathlib.Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "meshnet_gguf.demo",
        f"--model={model}",
        "--max_tokens=1000",
        "--threads=1",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    async with asyncio.timeout(END):
        assert await process.stdout.read(1)  # the answer has begun
        started = children(process.pid)
        assert len(started) == 2  # the chain; the whole model is loaded after it
        process.send_signal(signal.SIGINT)
        _, stderr = await process.communicate()
    assert process.returncode == 130
    assert stderr.endswith(b"demo: interrupted\n")
    assert not any(exists(pid) for pid in started)


def exists(pid: int) -> bool:
    return pathlib.Path(f"/proc/{pid}").exists()


def children(pid: int) -> list[int]:
    text = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


async def test_the_demo_says_what_is_wrong(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    no_model = tmp_path / "model.gguf"
    no_model.write_bytes(b"not a model")
    for arguments, exit_code, said in [
        ([f"--model={tmp_path / 'missing.gguf'}"], 1, "ARTIFACT_UNREADABLE"),
        ([f"--model={no_model}"], 1, "ARTIFACT_INVALID"),
        ([f"--model={model}", "--stages=31"], 1, "expected 1 to 30 stages"),
        ([f"--model={model}", "surplus"], 2, "expected flags only"),
    ]:
        code, stdout, stderr = await demo(*arguments)
        assert code == exit_code
        assert stdout.strip() == ""
        assert said in stderr
