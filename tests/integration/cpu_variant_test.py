"""Every CPU variant that this machine runs, forced, from the baseline on.

Two stages of each give the answer that one stage of the plainest gives, up to rounding. What the
variants make of quantised weights is tested in //third_party/llama_cpp:cpu_variant_*_test.

$OTHER_WORKER is one for another architecture: its answer is the same up to rounding.
"""

import asyncio
import itertools
import json
import os
import pathlib
import subprocess
import sys

import pytest
from meshnet_gguf.client import GenerationResult, LayerRange, open_route
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.local_cluster import LocalCluster, WorkerSpec, worker_binary
from meshnet_gguf.parity import max_logit_difference

from proto.meshnet.shard.v1 import errors_pb2

END = 300.0
TOKENS = 6
# Of the logits' range: sums in another order, and what 16-bit caches make of that.
ROUNDING = 0.01
MODEL = pathlib.Path(os.environ["DEEPSEEK4_MODEL"]).absolute()
LAYERS = 8
PROMPT = [300 + (7919 * i) % 200 for i in range(40)]
# A short chunk: the warm-up computes a whole one, and an emulator takes its time.
FLAGS = (
    "--max_sessions=1",
    "--context_tokens=256",
    "--threads=1",
    "--prefill_chunk_tokens=16",
)
OTHER_WORKER = pathlib.Path(os.environ.get("OTHER_WORKER", ".")).absolute()


def all_variants() -> list[str]:
    said = subprocess.run([worker_binary(), "--version", "--json"], capture_output=True, check=True)
    names = json.loads(said.stdout)["toolchain"]["cpu_variants"]
    assert isinstance(names, str)
    return names.split()


async def answer(
    variant: str, *cuts: int, binary: pathlib.Path | None = None
) -> tuple[str, GenerationResult]:
    """The variant that ran, and what the model answered in these stages."""
    specs = [
        WorkerSpec(LayerRange(begin, end), MODEL, (f"--cpu_variant={variant}", *FLAGS))
        for begin, end in itertools.pairwise([0, *cuts, LAYERS])
    ]
    async with (
        asyncio.timeout(END),
        LocalCluster(specs, binary=binary) as cluster,
        await open_route(cluster.endpoints) as route,
        route.session() as session,
    ):
        result = await session.generate(
            PROMPT, max_tokens=TOKENS, ignore_end_of_generation=True, return_logits=True
        ).result()
        return route.capabilities[0].recipe["cpu_variant"], result


async def test_each_variant_computes_the_answer_of_the_plainest() -> None:
    plainest = all_variants()[0]
    ran, reference = await answer(plainest)
    assert ran == plainest
    assert len(reference.logits) == TOKENS
    differences: dict[str, float] = {}
    refused: dict[str, MeshnetError] = {}
    for variant in all_variants():
        try:
            ran, stages = await answer(variant, 3)
        except MeshnetError as error:
            refused[variant] = error
            continue
        assert ran == variant
        assert stages.token_ids == reference.token_ids
        differences[variant] = max_logit_difference(stages.logits, reference.logits)
    for variant, refusal in refused.items():
        # A CPU that lacks a variant says so, whatever else it could say.
        assert refusal.reason == errors_pb2.REASON_CPU_UNSUPPORTED
        assert f"expected a CPU that can run the variant {variant}" in refusal.message
    assert differences[plainest] == 0.0
    # Without a wish the best runs.
    best, _ = await answer("")
    assert best == list(differences)[-1]
    if "OTHER_WORKER" in os.environ:
        other, foreign = await answer("", binary=OTHER_WORKER)
        assert other not in all_variants()
        assert foreign.token_ids == reference.token_ids
        differences[other] = max_logit_difference(foreign.logits, reference.logits)
    sys.stdout.write(f"differences: {differences}; refused: {' '.join(refused)}\n")
    rows = [memoryview(row).cast("f") for row in reference.logits]
    assert max(differences.values()) < ROUNDING * min(max(row) - min(row) for row in rows)


async def test_an_unknown_variant_is_refused_with_the_names_of_all() -> None:
    with pytest.raises(MeshnetError) as refusal:
        await answer("pentium")
    assert refusal.value.reason == errors_pb2.REASON_CONFIGURATION_INVALID
    assert " ".join(all_variants()).replace(" ", ", ") in refusal.value.message
