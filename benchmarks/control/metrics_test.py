from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.control.metrics import Metric, at_least, at_most, percentile


@pytest.mark.parametrize(
    ("bar", "value", "holds", "text"),
    [
        (at_least(200), 200.0, True, ">= 200"),
        (at_least(200), 199.9, False, ">= 200"),
        (at_most(1), 1.0, True, "<= 1"),
        (at_most(1), 1.1, False, "<= 1"),
        (at_most(1), float("nan"), False, "<= 1"),
    ],
)
def test_bars(bar: object, value: float, holds: bool, text: str) -> None:
    metric = Metric("m", value, "ms", bar)  # type: ignore[arg-type]
    assert (metric.holds, str(metric.bar)) == (holds, text)


def test_the_form_in_the_results_file() -> None:
    assert Metric("m", 1.23456, "ms", at_most(2)).to_json() == {
        "name": "m",
        "value": 1.2346,
        "unit": "ms",
        "bar": "<= 2",
        "holds": True,
    }
    assert Metric("n", 3, "").to_json()["bar"] is None


@given(
    st.lists(st.integers(), min_size=1, max_size=300).map(list[float]),
    st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]),
)
def test_percentile_is_the_smallest_that_covers_the_share(
    values: list[float], share: float
) -> None:
    found = percentile(values, share)
    assert sum(value <= found for value in values) >= share * len(values)
    below = [value for value in values if value < found]
    assert len(below) < share * len(values)
