"""Stages on CPUs of two architectures are no route: their numbers differ."""

import asyncio
import os
import pathlib

import pytest
from meshnet_gguf.client import LayerRange, open_route
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.local_cluster import LocalCluster, WorkerSpec

from proto.meshnet.shard.v1 import errors_pb2

END = 300.0
MODEL = pathlib.Path(os.environ["DEEPSEEK4_MODEL"]).absolute()
AARCH64_WORKER = pathlib.Path(os.environ["AARCH64_WORKER"]).absolute()
# A short chunk: the warm-up computes a whole one, and an emulator takes its time.
FLAGS = (
    "--max_sessions=1",
    "--context_tokens=256",
    "--threads=1",
    "--prefill_chunk_tokens=16",
)


async def test_the_refusal_names_what_differs() -> None:
    async with (
        asyncio.timeout(END),
        LocalCluster([WorkerSpec(LayerRange(0, 3), MODEL, FLAGS)]) as head,
        LocalCluster([WorkerSpec(LayerRange(3, 8), MODEL, FLAGS)], binary=AARCH64_WORKER) as tail,
    ):
        with pytest.raises(MeshnetError) as refusal:
            await open_route([*head.endpoints, *tail.endpoints])
    assert refusal.value.reason == errors_pb2.REASON_RECIPE_MISMATCH
    for text in ("build_options", "-march=x86-64-v2", "-march=armv8-a", "cpu_variant"):
        assert text in refusal.value.message
