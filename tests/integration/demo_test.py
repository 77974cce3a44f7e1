"""The demo's way from workers to verdict, on the fake engine and on a small DeepSeek V4."""

import asyncio
import os
import pathlib

import pytest
from meshnet_gguf.demo import run_demo

END = 60.0
MODEL = pathlib.Path(os.environ["DEEPSEEK4_MODEL"]).absolute()
SPLIT_SET = pathlib.Path(os.environ["DEEPSEEK4_SPLIT_SET"].split()[0]).absolute()


@pytest.mark.parametrize("stages", [1, 2, 3, 8])
async def test_the_chain_agrees_with_the_whole_model(stages: int) -> None:
    shown: list[str] = []
    async with asyncio.timeout(END):
        result = await run_demo(
            None, stages=stages, prompt="Hello", max_tokens=40, show_text=shown.append
        )
    assert result.identical
    assert result.parity == "identical"
    assert result.text == "".join(shown)
    assert result.token_ids == result.reference_token_ids
    assert len(result.token_ids) == 40
    assert result.compared_logit_rows == 32
    assert result.max_logit_difference == 0
    assert result.prompt_tokens == len("Hello") + 2  # <|user|>, <|assistant|>
    assert result.ttft_ms > 0
    assert result.decode_tokens_per_s > 0
    assert result.stages[0].layers[0] == 0
    assert result.stages[-1].layers[1] == 8
    for index, stage in enumerate(result.stages):
        assert stage.stage == index
        assert stage.resident_bytes > 1024 * 1024
        if index < stages - 1:
            # A boundary of 16 floats, a position and a token id for each of 7 + 39 tokens.
            assert stage.seam_bytes_sent > 46 * (16 * 4 + 8)
            assert stage.seam_bytes_sent_per_token <= 16 * 4 + 8 + 256
            # What is sampled goes from the tail to the head, past all between them.
            assert stage.return_bytes_sent == 0
        else:
            assert stage.return_bytes_sent > 0 or stages == 1


@pytest.mark.parametrize("model", [MODEL, SPLIT_SET], ids=["one file", "split set"])
async def test_deepseek4_over_four_stages_is_the_whole_model(model: pathlib.Path) -> None:
    shown: list[str] = []
    async with asyncio.timeout(END):
        result = await run_demo(
            model,
            stages=4,
            prompt="Rivers and mills. " * 30,
            max_tokens=40,
            show_text=shown.append,
            threads=1,
        )
    assert result.identical
    assert result.max_logit_difference == 0
    assert result.text == "".join(shown)
    assert len(result.token_ids) == 40
    assert result.prompt_tokens > 128, "more than the window"
    assert [stage.layers for stage in result.stages] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    for stage in result.stages[:-1]:
        # Four streams of 128 floats, a position and a token id for each token.
        assert 4 * 128 * 4 + 8 <= stage.seam_bytes_sent_per_token <= 4 * 128 * 4 + 8 + 256


@pytest.mark.parametrize("model", [None, MODEL], ids=["fake", "deepseek4"])
async def test_the_main_job_through_tracker_and_nodes(model: pathlib.Path | None) -> None:
    async with asyncio.timeout(END):
        result = await run_demo(
            model,
            stages=3,
            prompt="Hello",
            max_tokens=20,
            show_text=lambda _: None,
            threads=1,
            tracker=True,
        )
    assert result.identical
    assert len(result.token_ids) == 20
    assert [stage.layers for stage in result.stages] == [(0, 3), (3, 6), (6, 8)]
    assert all(stage.seam_bytes_sent > 0 for stage in result.stages[:-1])
    assert result.mesh is not None
    assert result.mesh.admission == "ADMISSION_DARK_ADMITTED"
    assert result.mesh.nodes == ("node-0", "node-1", "node-2")
    assert result.mesh.reckoned_us > 0
    assert result.mesh.relayed == ("node-1",)
    # Every boundary of the first seam, there and in no other way.
    assert result.mesh.relayed_bytes > result.stages[0].seam_bytes_sent
    assert result.mesh.sessions == 2
    assert result.mesh.receipts == result.mesh.completed == 6
