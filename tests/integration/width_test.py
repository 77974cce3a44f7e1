"""The real width of the residual, four streams of 4096 numbers, over the seams of real workers."""

import asyncio
import os
import pathlib

from meshnet_gguf.demo import run_demo

END = 120.0
MODEL = pathlib.Path(os.environ["DEEPSEEK4_WIDTH_MODEL"]).absolute()


async def test_boundaries_of_the_real_width_cross_seams_whole() -> None:
    async with asyncio.timeout(END):
        result = await run_demo(
            MODEL,
            stages=5,
            # More than the window, and chunks of many fragments.
            prompt="Rivers and mills. " * 20,
            max_tokens=24,
            show_text=lambda _: None,
            threads=1,
        )
    assert result.identical
    assert result.max_logit_difference == 0
    assert result.prompt_tokens > 128
    assert [stage.layers for stage in result.stages] == [(n, n + 1) for n in range(5)]
    for stage in result.stages[:-1]:
        boundary = 4 * 4096 * 4 + 8
        assert boundary <= stage.seam_bytes_sent_per_token <= boundary + 512
