"""Garbage collection without long pauses, for programs that hold much for long.

    task = asyncio.create_task(collect_in_small_steps(clock))

Python's collector looks at everything that is alive: with ten thousand registered workers, 150 ms
in which nobody is answered, several times a minute under load. So what has lived for a moment is
taken out of its sight (gc.freeze) and looked at again every few minutes only.
"""

from __future__ import annotations

import gc

from meshnet.clock import Clock

__all__ = ["collect_in_small_steps"]

_STEP_MS = 1_000
_STEPS_TO_ALL = 600


async def collect_in_small_steps(clock: Clock) -> None:
    """For ever. Of the whole process, so for a program that has it to itself."""
    try:
        while True:
            for _ in range(_STEPS_TO_ALL):
                await clock.sleep_ms(_STEP_MS)
                # What came since the last step, and is garbage already.
                gc.collect()
                gc.freeze()
            # Cycles that were still in use when they were frozen.
            gc.unfreeze()
            gc.collect()
            gc.freeze()
    finally:
        gc.unfreeze()
