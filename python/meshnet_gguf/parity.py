"""Compares what two runs of one model gave, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["max_logit_difference"]


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
