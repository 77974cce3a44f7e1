"""`meshnet serve` as a process, for tests: begun, ready, ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator
from typing import Any

__all__ = ["serving"]


@contextlib.asynccontextmanager
async def serving(
    meshnet: str, *arguments: str, within: float = 240.0
) -> AsyncIterator[tuple[dict[str, Any], asyncio.subprocess.Process]]:
    """One that has said that it is ready, and what it said; ended with the block."""
    process = await asyncio.create_subprocess_exec(
        meshnet, "serve", *arguments, "--json", stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(within):
            yield json.loads(await process.stdout.readline()), process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        await process.wait()
