"""What a benchmark of the control plane reports: numbers, and the bars that they are held to.

    Metric("relay_mb_per_s", 274.0, "MB/s", at_least(200))

A section is an `async def measure(settings: Settings) -> AsyncIterator[Metric]`: it yields each
number as soon as it has it.
"""

from __future__ import annotations

import pathlib
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

__all__ = ["Bar", "Metric", "Section", "Settings", "at_least", "at_most", "percentile", "say"]


@dataclass(frozen=True)
class Bar:
    """A bound, in the metric's unit."""

    value: float
    at_most: bool

    def holds(self, measured: float) -> bool:
        """Whether a measured value is on the right side."""
        return measured <= self.value if self.at_most else measured >= self.value

    def __str__(self) -> str:
        """As in `>= 200`."""
        return f"{'<=' if self.at_most else '>='} {self.value:g}"


def at_least(value: float) -> Bar:
    """A bar for what should be large."""
    return Bar(value, at_most=False)


def at_most(value: float) -> Bar:
    """A bar for what should be small."""
    return Bar(value, at_most=True)


@dataclass(frozen=True)
class Metric:
    """One number. Without a bar it only explains others."""

    name: str
    value: float
    unit: str
    bar: Bar | None = None

    @property
    def holds(self) -> bool:
        """Whether the bar is met; without one, yes."""
        return self.bar is None or self.bar.holds(self.value)

    def to_json(self) -> dict[str, Any]:
        """As it stands in the results file."""
        return {
            "name": self.name,
            "value": round(self.value, 4),
            "unit": self.unit,
            "bar": None if self.bar is None else str(self.bar),
            "holds": self.holds,
        }


@dataclass(frozen=True)
class Settings:
    """What all sections are told."""

    # A folder of the run's own, emptied afterwards.
    folder: pathlib.Path
    # The core for the process that is measured; the benchmark itself keeps off it.
    core: int
    # A short run over small numbers, to see that everything works; its values say nothing.
    quick: bool = False


Section: TypeAlias = Callable[[Settings], AsyncIterator[Metric]]


def say(message: str) -> None:
    """One line of progress."""
    print(f"[{time.strftime('%H:%M:%S')}] {message}", file=sys.stderr, flush=True)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of them does not exceed."""
    if not values:
        raise ValueError("expected at least one value")
    ordered = sorted(values)
    return ordered[max(0, min(len(ordered) - 1, -int(-share * len(ordered) // 1) - 1))]
