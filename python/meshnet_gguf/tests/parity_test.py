import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from meshnet_gguf.parity import max_logit_difference, same_choices, squared_error


def row(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def test_logits_are_compared_exactly() -> None:
    assert max_logit_difference([row(1, 2), row(3, -4)], [row(1, 2), row(3, -4)]) == 0
    assert max_logit_difference([row(1, 2), row(3, -4)], [row(1, 2), row(3, -3.5)]) == 0.5
    assert max_logit_difference([row(1)], [row(1 + 2**-23)]) == 2**-23
    assert max_logit_difference([], []) == 0


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ([row(1)], []),
        ([row(1, 2)], [row(1)]),
        ([row(float("nan"))], [row(1)]),
        ([row(float("nan"))], [row(float("nan"))]),
        ([row(float("inf"))], [row(1)]),
    ],
)
def test_logits_that_cannot_be_compared_are_infinitely_apart(
    left: list[bytes], right: list[bytes]
) -> None:
    assert max_logit_difference(left, right) == float("inf")
    assert squared_error(left, right) == float("inf")


def test_squared_error_is_that_of_all_rows_together() -> None:
    assert squared_error([row(1, 2), row(3, -4)], [row(1, 2), row(3, -4)]) == 0
    assert squared_error([row(1, 2), row(3, -5)], [row(1, 2), row(3, -4)]) == 1 / 30
    assert squared_error([], []) == float("inf")
    assert squared_error([row(0)], [row(0)]) == float("inf")


def test_choices_are_the_largest_logits() -> None:
    assert same_choices([row(1, 2), row(3, -4)], [row(0, 9), row(-1, 4)]) == 0.5
    assert same_choices([], []) == 0
    assert same_choices([row(1)], []) == 0
    assert same_choices([row()], [row()]) == 0


ROWS = st.lists(
    st.lists(st.floats(-8, 8, width=32), min_size=3, max_size=3).map(lambda v: row(*v)),
    min_size=1,
    max_size=4,
)


@given(ROWS, st.integers(1, 8))
def test_scaling_all_logits_errs_by_the_same_share_and_chooses_the_same(
    rows: list[bytes], doublings: int
) -> None:
    scaled = [row(*(v * 2**doublings for v in struct.unpack("<3f", one))) for one in rows]
    if any(any(struct.unpack("<3f", one)) for one in rows):
        assert squared_error(scaled, rows) == pytest.approx((2**doublings - 1) ** 2)
    assert same_choices(scaled, rows) == 1
