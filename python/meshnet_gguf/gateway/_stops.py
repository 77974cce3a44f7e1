"""Text held back while it may be the beginning of a stop string.

filter = StopFilter(["\\nUser:"])
shown, stopped = filter.push("Hello\\nUs")   # ("Hello", False)
shown, stopped = filter.push("er: more")    # ("", True)
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopFilter"]


class StopFilter:
    """Passes text on up to the first stop string, which is never shown, not even a part of it."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """The text that may be shown now, and whether a stop string has come."""
        if not self._stops:
            return text, False
        if self.stopped:
            return "", True
        held = self._held + text
        found = [place for stop in self._stops if (place := held.find(stop)) >= 0]
        if found:
            self._held = ""
            self.stopped = True
            return held[: min(found)], True
        keep = self._beginning(held)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], False

    def finish(self) -> str:
        """What was held back and has turned out to be no stop string."""
        held, self._held = self._held, ""
        return held

    def _beginning(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string begins."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
