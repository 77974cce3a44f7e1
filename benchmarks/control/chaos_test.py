"""A few kills of everything, as a test; //benchmarks:control_plane does a hundred."""

import asyncio

from benchmarks.control.chaos import ChaosOptions, run_chaos


async def test_what_holds_under_kills() -> None:
    async with asyncio.timeout(200):
        found = await run_chaos(ChaosOptions(kills=8, seed=7, clients=2))
    assert found.violations() == []
    assert found.kills == {"worker": 2, "node": 2, "tracker": 2, "relay": 2}
    assert found.answers > 0
    assert found.receipts > 0
