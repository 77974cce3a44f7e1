"""Which cores a benchmark and the process that it measures may use."""

from __future__ import annotations

import os
import pathlib

__all__ = ["hold_to", "reserve_core"]


def reserve_core() -> int:
    """A core that this process, and what it starts from now on, keeps off if it has others."""
    cores = os.sched_getaffinity(0)
    reserved = max(cores)
    if cores - {reserved}:
        os.sched_setaffinity(0, cores - {reserved})
    return reserved


def hold_to(pid: int, core: int) -> None:
    """Lets all threads of a process, and those to come, run on that core only."""
    for thread in pathlib.Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})
