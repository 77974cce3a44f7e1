"""Which layers a machine takes that joins a mesh, and how much of a model goes onto one machine."""

import itertools
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from meshnet_gguf.client import LayerRange
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.gguf_file import read_model
from meshnet_gguf.joining import Span, gaps, propose
from meshnet_gguf.local_plan import plan_here
from meshnet_gguf.plan import ModelShape
from meshnet_gguf.sizes import parse_size

MODEL = read_model(os.environ["DEEPSEEK4_MODEL"])
GIB = 1 << 30


def shape(layers: int = 8, cuts: tuple[int, ...] = (2, 4, 6)) -> ModelShape:
    """A layer takes 10 bytes."""
    ranges = list(itertools.combinations([0, *cuts, layers], 2))
    sizes = {(begin, end): 10 * (end - begin) for begin, end in ranges}
    return ModelShape(layers, frozenset(cuts), sizes, sizes, 1)


def span(begin: int, end: int, sessions: int = 4) -> Span:
    return Span(LayerRange(begin, end), sessions)


@pytest.mark.parametrize(
    ("spans", "memory", "layers", "missing"),
    [
        # Nobody is there yet.
        ([], 80, (0, 8), []),
        ([], 50, (0, 4), [(4, 8)]),
        # The gap, no more than it, and as much of it as fits.
        ([span(0, 4)], 80, (4, 8), []),
        ([span(0, 4)], 20, (4, 6), [(6, 8)]),
        ([span(0, 2), span(6, 8)], 80, (2, 6), []),
        ([span(0, 2), span(6, 8)], 20, (2, 4), [(4, 6)]),
        ([span(4, 8)], 80, (0, 4), []),
        # Two lanes that do not meet: the shortest bridge.
        ([span(0, 4), span(2, 8)], 80, (0, 2), []),
        # Whole: where the fewest sessions fit, between boundaries that others have.
        ([span(0, 4, 8), span(4, 8, 2)], 80, (0, 8), []),
        ([span(0, 4, 8), span(4, 8, 2)], 40, (4, 8), []),
        ([span(0, 4, 2), span(4, 8, 8)], 40, (0, 4), []),
    ],
)
def test_proposals(
    spans: list[Span], memory: int, layers: tuple[int, int], missing: list[tuple[int, int]]
) -> None:
    found = propose(shape(), spans, memory)
    assert (found.layers.begin, found.layers.end) == layers
    assert [(left.begin, left.end) for left in found.missing] == missing


def test_what_would_not_help_is_refused() -> None:
    # Half of what is there would fit, but nobody else begins or ends in its middle.
    with pytest.raises(MeshnetError, match="MEMORY_BUDGET_EXCEEDED: expected at least 80 bytes"):
        propose(shape(), [span(0, 8)], 79)
    with pytest.raises(MeshnetError, match="expected at least 20 bytes"):
        propose(shape(), [span(0, 4)], 19)


BOUNDS = st.sampled_from([0, 2, 4, 6, 8])
SPANS = st.lists(
    st.tuples(BOUNDS, BOUNDS).filter(lambda pair: pair[0] < pair[1]).map(lambda p: span(*p)),
    max_size=5,
)


@given(SPANS)
def test_machines_that_go_on_joining_make_a_route(spans: list[Span]) -> None:
    for _ in range(4):
        spans = [*spans, Span(propose(shape(), spans, 20 if not spans else 80).layers, 1)]
    assert gaps([8], spans) == []
    reached = {0}
    for one in sorted(spans, key=lambda one: one.layers.begin):
        if one.layers.begin in reached:
            reached.add(one.layers.end)
    assert 8 in reached


def test_a_plan_for_one_machine() -> None:
    whole = plan_here(MODEL, budget=4 * GIB)
    assert (whole.ranges, whole.missing) == ((LayerRange(0, 8),), None)
    assert whole.max_sessions == 8
    two = plan_here(MODEL, budget=4 * GIB, stages=2, max_sessions=3, context_tokens=600)
    assert [str(layers) for layers in two.ranges] == ["[0, 4)", "[4, 8)"]
    assert (two.max_sessions, two.context_tokens) == (3, 600)
    some = plan_here(MODEL, budget=4 * GIB, layers=LayerRange(0, 3))
    assert (some.ranges, some.missing) == ((LayerRange(0, 3),), LayerRange(3, 8))
    assert plan_here(MODEL, budget=4 * GIB, layers=LayerRange(3, 8)).missing is None


def test_what_does_not_fit_is_left_to_others() -> None:
    full = plan_here(MODEL, budget=4 * GIB, max_sessions=1, context_tokens=600)
    less = full.needed_bytes - 1
    part = plan_here(MODEL, budget=less, max_sessions=1, context_tokens=600)
    assert part.missing is not None
    assert part.ranges[0].begin == 0
    assert part.ranges[0].end == part.missing.begin < part.missing.end == 8
    assert part.needed_bytes < full.needed_bytes
    with pytest.raises(MeshnetError, match="MEMORY_BUDGET_EXCEEDED"):
        plan_here(MODEL, budget=1000)
    with pytest.raises(MeshnetError, match="MEMORY_BUDGET_EXCEEDED"):
        plan_here(MODEL, budget=less, context_tokens=600, layers=LayerRange(0, 8))
    with pytest.raises(MeshnetError, match="LAYER_RANGE_INVALID"):
        plan_here(MODEL, budget=4 * GIB, layers=LayerRange(0, 9))


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("3GiB", 3 << 30), ("250 MB", 250_000_000), ("1.5GiB", None), ("x", None)],
)
def test_sizes(text: str, size: int | None) -> None:
    assert parse_size(text) == size
