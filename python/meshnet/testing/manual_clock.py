"""A clock that stands still until a test moves it."""

from __future__ import annotations

import asyncio
import heapq
import itertools

__all__ = ["ManualClock"]


class ManualClock:
    """See meshnet.clock.Clock."""

    def __init__(self, now_ms: int = 1_000_000) -> None:
        self._now = now_ms
        self._sleepers: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    def now_ms(self) -> int:
        """What time it is."""
        return self._now

    async def sleep_ms(self, milliseconds: int) -> None:
        """Returns once advance() has come that far."""
        done = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + milliseconds, next(self._order), done))
        await done

    async def advance(self, milliseconds: int) -> None:
        """Moves on, waking sleepers one after the other, each at its own time."""
        end = self._now + milliseconds
        while self._sleepers and self._sleepers[0][0] <= end:
            self._now, _, done = heapq.heappop(self._sleepers)
            if not done.done():
                done.set_result(None)
            for _ in range(5):  # let it run until it sleeps again
                await asyncio.sleep(0)
        self._now = end
