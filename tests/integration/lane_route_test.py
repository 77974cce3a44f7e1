"""Workers of an accelerator's lane as processes in one route, and in none with one of the CPU.

SmolLM2, whole and cut in two. On Mesa's lavapipe it is fixture evidence and says so.
"""

import asyncio
import json
import os
import pathlib

import pytest
from meshnet_gguf.client import (
    ChatMessage,
    Finished,
    LayerRange,
    Route,
    RouteHop,
    Token,
    WorkerClient,
    open_route,
)
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.local_cluster import LocalCluster, WorkerSpec, worker_binary
from meshnet_gguf.testing.lane_driver import use_lane_driver

from proto.meshnet.shard.v1 import errors_pb2

MODEL = pathlib.Path(os.environ["MESHNET_TEST_MODEL"]).absolute()
HEAD, TAIL = LayerRange(0, 15), LayerRange(15, 30)
# A short chunk: the warm-up computes a whole one, and a software driver takes its time.
FLAGS = ("--context_tokens=256", "--max_sessions=1", "--threads=1", "--prefill_chunk_tokens=16")
TOKENS = 8
# How an answer to "Hello" begins, whichever kernels compute it.
GREETINGS = ("Hello", "Hi")
END = 600.0
# A software driver compiles every kernel for the CPU first.
READY = 400.0


@pytest.fixture(scope="module")
def shaders(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("shaders")


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch, shaders: pathlib.Path) -> None:
    use_lane_driver(monkeypatch, shaders)


def spec(layers: LayerRange | None, *flags: str) -> WorkerSpec:
    return WorkerSpec(layers, model=MODEL, flags=(*FLAGS, *flags))


async def streamed(route: Route) -> tuple[list[Token], str]:
    """The answer as it came, token by token."""
    tokens = []
    async with route.session() as session:
        generation = await session.chat([ChatMessage("user", "Hello")], max_tokens=TOKENS)
        async for event in generation:
            if isinstance(event, Token):
                tokens.append(event)
    assert isinstance(event, Finished)
    assert len(tokens) == event.completion_tokens > 1
    return tokens, "".join(token.text for token in tokens)


async def test_two_workers_stream_what_one_does_and_say_what_they_compute_with() -> None:
    async with asyncio.timeout(END):
        async with (
            LocalCluster([spec(HEAD), spec(TAIL)], ready_within=READY) as cluster,
            await open_route(cluster.endpoints) as route,
        ):
            split, text = await streamed(route)
            for capability in route.capabilities:
                recipe = dict(capability.recipe)
                assert recipe["backend"] != "cpu"
                assert recipe["accelerator"]
                assert recipe["accelerator_driver"]
                is_software = "llvmpipe" in recipe["accelerator"]
                assert capability.evidence == ("FIXTURE" if is_software else "DARK")
                if "VK_DRIVER_FILES" in os.environ:
                    assert is_software
                    assert recipe["backend"] == "vulkan"
                    assert recipe["accelerator_driver"].startswith("llvmpipe Mesa ")
        assert text.startswith(GREETINGS)
        async with (
            LocalCluster([spec(None)], ready_within=READY) as cluster,
            await open_route(cluster.endpoints) as route,
        ):
            whole, _ = await streamed(route)
        assert [token.token_id for token in split] == [token.token_id for token in whole]


async def test_a_worker_of_the_cpu_is_refused_by_the_client_and_by_the_worker() -> None:
    async with (
        asyncio.timeout(END),
        LocalCluster([spec(HEAD), spec(TAIL, "--device=cpu")], ready_within=READY) as cluster,
    ):
        with pytest.raises(MeshnetError) as caught:
            await open_route(cluster.endpoints)
        assert caught.value.reason == errors_pb2.REASON_RECIPE_MISMATCH
        assert "backend" in caught.value.message
        assert "'cpu'" in caught.value.message

        # A client that does not look: the second worker refuses.
        first, second = (WorkerClient(endpoint) for endpoint in cluster.endpoints)
        async with first, second:
            capabilities = [await first.capability(), await second.capability()]
            hops = [
                RouteHop(endpoint, capability.layers)
                for endpoint, capability in zip(cluster.endpoints, capabilities, strict=True)
            ]
            forged = Route([first, second], capabilities, hops)
            with pytest.raises(MeshnetError) as refused:
                async with forged.session():
                    pytest.fail("a route over two lanes was opened")
            assert refused.value.reason == errors_pb2.REASON_RECIPE_MISMATCH
            assert capabilities[0].recipe_fingerprint in refused.value.message
            assert capabilities[1].recipe_fingerprint in refused.value.message


async def test_without_a_device_the_worker_refuses_and_says_what_to_look_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VK_DRIVER_FILES", "/nonexistent")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "-1")
    worker = await asyncio.create_subprocess_exec(
        *spec(HEAD).command(worker_binary()), stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(END):
        _, log = await worker.communicate()
    assert worker.returncode == 2
    (failure,) = (line for line in map(json.loads, log.splitlines()) if "reason" in line)
    assert failure["reason"] == "CONFIGURATION_INVALID"
    assert "driver" in failure["message"]
