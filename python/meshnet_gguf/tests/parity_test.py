import struct

import pytest
from meshnet_gguf.parity import max_logit_difference


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
