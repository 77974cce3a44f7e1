"""A tracker in this process, without a server, under a clock of the test's.

async with running("sqlite:///t.db", ManualClock()) as tracker: await tracker.register(...)


"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from meshnet.clock import Clock
from meshnet.storage import Storage
from meshnet.tracker import Tracker, TrackerOptions

__all__ = ["running"]

_OPTIONS = TrackerOptions(admit_dark=True)


@contextlib.asynccontextmanager
async def running(
    database: str, clock: Clock, options: TrackerOptions = _OPTIONS, name: str = "t1"
) -> AsyncIterator[Tracker]:
    """Works on the database while the block runs."""
    async with contextlib.AsyncExitStack() as stack:
        storage = await Storage.open(database, name)
        stack.push_async_callback(storage.close)
        tracker = await Tracker.open(storage, options, clock)
        stack.push_async_callback(tracker.close)
        yield tracker
