"""Ends of asyncio tasks.

await cancel(reader, writer)
"""

from __future__ import annotations

import asyncio
from typing import Any

__all__ = ["cancel"]


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancels tasks, those that have ended too, and waits until all have.

    What they end with, an exception too, is taken for seen.
    """
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
