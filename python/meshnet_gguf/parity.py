"""Compares what two runs of one model gave: bit for bit, or how far apart they are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["max_logit_difference", "same_choices", "squared_error"]


def max_logit_difference(left: Sequence[bytes], right: Sequence[bytes]) -> float:
    """The largest absolute difference between two lists of float32 rows.

    Infinite when they differ in shape or in where they are not finite.
    """
    if len(left) != len(right):
        return float("inf")
    worst = 0.0
    for left_row, right_row in zip(left, right, strict=True):
        a, b = np.frombuffer(left_row, "<f4"), np.frombuffer(right_row, "<f4")
        if a.shape != b.shape:
            return float("inf")
        if not np.array_equal(a, b):
            difference = float(np.max(np.abs(a.astype(np.float64) - b)))
            worst = max(worst, difference if np.isfinite(difference) else float("inf"))
    return worst


def squared_error(left: Sequence[bytes], right: Sequence[bytes]) -> float:
    """The squares of the differences of two lists of float32 rows over the squares of `right`.

    Infinite when they differ in shape, when a number is not finite, and when there is nothing.
    """
    error = square = 0.0
    for a, b in _rows(left, right):
        if a.shape != b.shape:
            return float("inf")
        error += float(np.sum((a - b) ** 2))
        square += float(np.sum(b**2))
    return error / square if np.isfinite(error) and 0.0 < square < float("inf") else float("inf")


def same_choices(left: Sequence[bytes], right: Sequence[bytes]) -> float:
    """The share of rows in which both have the same largest logit; 0 when there are none."""
    same = [
        a.shape == b.shape and a.size > 0 and int(np.argmax(a)) == int(np.argmax(b))
        for a, b in _rows(left, right)
    ]
    return sum(same) / len(same) if same else 0.0


def _rows(
    left: Sequence[bytes], right: Sequence[bytes]
) -> Iterator[tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]]:
    """Pairs of rows; one that the other side lacks meets an empty one."""
    for pair in itertools.zip_longest(left, right, fillvalue=b""):
        a, b = (np.frombuffer(row, "<f4").astype(np.float64) for row in pair)
        yield a, b
