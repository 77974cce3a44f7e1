"""The real model, whose embedding doubles as its output, on parts of its artifact."""

import asyncio
import os
import pathlib

from meshnet_gguf.client import ChatMessage, LayerRange, SamplingParams, open_route
from meshnet_gguf.local_cluster import LocalCluster, WorkerSpec
from meshnet_gguf.models import pinned_models
from meshnet_gguf.provision import open_sources, provision

END = 120.0
MODEL = pathlib.Path(os.environ["MESHNET_TEST_MODEL"]).absolute()
FLAGS = ("--max_sessions=1", "--context_tokens=256", "--threads=1")


async def answer(specs: list[WorkerSpec]) -> str:
    async with (
        LocalCluster(specs) as cluster,
        await open_route(cluster.endpoints) as route,
        asyncio.timeout(END),
        route.session() as session,
    ):
        generation = await session.chat(
            [ChatMessage("user", "Name a planet.")], SamplingParams(), max_tokens=8
        )
        return (await generation.result()).text


async def test_stages_on_parts_are_the_pinned_model(tmp_path: pathlib.Path) -> None:
    manifest = pinned_models()["smollm2"].manifest
    specs = []
    for begin, end in ((0, 10), (10, 20), (20, 30)):
        async with open_sources([str(MODEL.parent)]) as sources:
            done = await provision(manifest, sources, tmp_path / str(begin), layers=(begin, end))
        assert done.fetched_bytes < manifest.total_bytes
        flags = (*FLAGS, f"--manifest={done.manifest}")
        specs.append(WorkerSpec(LayerRange(begin, end), done.model, flags))
    expected = await answer([WorkerSpec(None, MODEL, FLAGS)])
    assert expected
    assert await answer(specs) == expected
