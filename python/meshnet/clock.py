"""The one clock of the control plane.

Everything that waits or compares times takes a Clock, so that a test can drive it
(meshnet.testing.ManualClock). Times are whole milliseconds since the Unix epoch, which trackers
that share a database also share.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

__all__ = ["Clock", "SystemClock"]


class Clock(Protocol):
    """What time it is, and waiting."""

    def now_ms(self) -> int:
        """Milliseconds since the Unix epoch."""

    async def sleep_ms(self, milliseconds: int) -> None:
        """Returns once that much time has passed."""


class SystemClock:
    """The machine's own."""

    def now_ms(self) -> int:
        """Milliseconds since the Unix epoch."""
        return time.time_ns() // 1_000_000

    async def sleep_ms(self, milliseconds: int) -> None:
        """Returns once that much time has passed."""
        await asyncio.sleep(milliseconds / 1000)
