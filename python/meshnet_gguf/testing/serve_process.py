"""Commands that serve until they are told to end, as processes: begun, ready, ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

__all__ = ["serving"]


@contextlib.asynccontextmanager
async def serving(
    meshnet: str, *arguments: str | os.PathLike[str], within: float = 240.0
) -> AsyncIterator[tuple[dict[str, Any], asyncio.subprocess.Process]]:
    """One that has said that it is ready, and what it said with --json; ended with the block.

    It says nothing else on stdout, and ends well unless the block has ended it.
    """
    process = await asyncio.create_subprocess_exec(
        meshnet, *arguments, "--json", stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(within):
            yield json.loads(await process.stdout.readline()), process
            told = process.returncode is None
            if told:
                process.send_signal(signal.SIGTERM)
            assert await process.stdout.read() == b""
            assert await process.wait() == 0 or not told
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        await process.wait()
