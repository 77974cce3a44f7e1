"""Route selection against an exhaustive search, and what it must never do."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshnet.routing import (
    Candidate,
    Demand,
    LaneIndex,
    Seam,
    cheapest_mixed,
    sessions_at_once,
    stage_cost,
)

UNITS = 6
NOW = 1000


def lane_of(candidates: list[Candidate], units: int = UNITS) -> LaneIndex:
    lane = LaneIndex(units)
    for candidate in candidates:
        lane.put(candidate)
    return lane


def chains(candidates: list[Candidate], position: int = 0) -> Iterator[tuple[Candidate, ...]]:
    for candidate in candidates:
        begin, end = candidate.span
        if begin != position:
            continue
        if end == UNITS:
            yield (candidate,)
        else:
            yield from ((candidate, *rest) for rest in chains(candidates, end))


def seam_cost(first: Candidate, second: Candidate, seam_bytes: int) -> int:
    found = [
        (seam.round_trip_us, -seam.bytes_per_second)
        for seam in (first.seams.get(second.node_id), second.seams.get(first.node_id))
        if seam is not None
    ]
    if found:
        round_trip, rate = max(found)
        return round_trip // 2 + (seam_bytes * 1_000_000 // -rate if rate else 0)
    cost = 0
    for end in (first, second):
        rate = end.access_bytes_per_second
        cost += end.access_latency_us + (seam_bytes * 1_000_000 // rate if rate else 0)
    return cost


def cost_of(chain: tuple[Candidate, ...], seam_bytes: int) -> int:
    total = sum(stage_cost(candidate) for candidate in chain)
    total += sum(seam_cost(a, b, seam_bytes) for a, b in itertools.pairwise(chain))
    return total + chain[-1].access_latency_us + chain[0].access_latency_us


def usable(candidate: Candidate, demand: Demand) -> bool:
    return (
        candidate.usable
        and candidate.expires_ms > demand.now_ms
        and candidate.sessions < candidate.max_sessions
        and candidate.worker_id not in demand.avoid_workers
        and candidate.node_id not in demand.avoid_nodes
    )


NODES = ["n0", "n1", "n2", "n3"]
SEAMS = st.builds(Seam, st.integers(0, 500), st.sampled_from([0, 1000, 10**6]))


@st.composite
def some_candidates(draw: st.DrawFn) -> list[Candidate]:
    found = []
    for index in range(draw(st.integers(0, 9))):
        begin = draw(st.integers(0, UNITS - 1))
        found.append(
            Candidate(
                f"w{index}",
                draw(st.sampled_from(NODES)),
                (begin, draw(st.integers(begin + 1, UNITS))),
                step_us=draw(st.integers(0, 300)),
                max_sessions=draw(st.integers(1, 4)),
                access_latency_us=draw(st.integers(0, 300)),
                access_bytes_per_second=draw(st.sampled_from([0, 1000, 10**6])),
                seams=draw(st.dictionaries(st.sampled_from(NODES), SEAMS, max_size=3)),
                sessions=draw(st.integers(0, 4)),
                queued_steps=draw(st.integers(0, 3)),
                reliability=draw(st.sampled_from([1.0, 0.9, 0.5, 0.0])),
                expires_ms=draw(st.sampled_from([NOW, NOW + 1])),
                usable=draw(st.sampled_from([True, True, True, False])),
            )
        )
    return found


@settings(max_examples=400, deadline=None)
@given(some_candidates(), st.sampled_from([0, 64]), st.randoms(use_true_random=False))
def test_cheapest_of_all_chains(
    candidates: list[Candidate], seam_bytes: int, order: random.Random
) -> None:
    demand = Demand(NOW, seam_bytes, frozenset({"w7"}), frozenset({"n3"}))
    costs = [
        cost_of(chain, seam_bytes) for chain in chains([c for c in candidates if usable(c, demand)])
    ]
    route = lane_of(candidates).cheapest(demand)
    assert (route.total_us if route else None) == min(costs, default=None)
    if route is not None:
        by_id = {candidate.worker_id: candidate for candidate in candidates}
        chain = tuple(by_id[stage.worker_id] for stage in route.stages)
        assert [c.span[0] for c in chain] == [0, *(c.span[1] for c in chain[:-1])]
        assert chain[-1].span[1] == UNITS
        assert cost_of(chain, seam_bytes) == route.total_us
    # Neither the order of arrival nor what was there before matters.
    shuffled = list(candidates)
    order.shuffle(shuffled)
    again = LaneIndex(UNITS)
    for candidate in shuffled:
        again.put(dataclasses.replace(candidate, span=(0, UNITS), node_id="n9", seams={}))
    for candidate in shuffled[::2]:
        again.remove(candidate.worker_id)
    for candidate in reversed(shuffled):
        again.put(candidate)
    assert again.cheapest(demand) == route


def candidate(name: str, begin: int, end: int, **fields: object) -> Candidate:
    base = Candidate(name, f"node-{name}", (begin, end), step_us=100, max_sessions=8)
    return dataclasses.replace(base, **fields)  # type: ignore[arg-type]


def workers(lane: LaneIndex, **demand: object) -> list[str] | None:
    route = lane.cheapest(Demand(NOW, **demand))  # type: ignore[arg-type]
    return None if route is None else [stage.worker_id for stage in route.stages]


def test_a_seam_that_costs_more_than_it_saves_is_not_taken() -> None:
    lane = lane_of(
        [
            candidate("whole", 0, 6, step_us=1000),
            candidate("front", 0, 3, access_latency_us=300),
            candidate("back", 3, 6, access_latency_us=300),
        ]
    )
    # 100 + 600 + 100 + 600 back again, against 1000.
    assert workers(lane) == ["whole"]
    lane.put(candidate("whole", 0, 6, step_us=1401))
    assert workers(lane) == ["front", "back"]


def test_load_moves_sessions_elsewhere() -> None:
    lane = lane_of([candidate("a", 0, 6), candidate("b", 0, 6, step_us=150)])
    assert workers(lane) == ["a"]
    lane.put(candidate("a", 0, 6, sessions=5))
    assert workers(lane) == ["b"]
    lane.put(candidate("a", 0, 6, queued_steps=1))
    assert workers(lane) == ["b"]


def test_unreliable_workers_are_expensive() -> None:
    lane = lane_of([candidate("a", 0, 6, reliability=0.999), candidate("b", 0, 6, step_us=1000)])
    assert workers(lane) == ["b"]


@pytest.mark.parametrize(
    "change",
    [{"usable": False}, {"expires_ms": NOW}, {"sessions": 8}],
    ids=["not usable", "lease over", "full"],
)
def test_unusable_workers_are_never_chosen(change: dict[str, object]) -> None:
    lane = lane_of([candidate("a", 0, 3), candidate("b", 3, 6)])
    assert workers(lane) == ["a", "b"]
    lane.put(candidate("b", 3, 6, **change))
    assert workers(lane) is None
    assert lane.coverage(Demand(NOW)) == "usable workers cover units 0 to 3 of 6"
    assert lane.is_full(Demand(NOW)) == ("sessions" in change)
    assert not lane.is_full(Demand(NOW, avoid_workers={"a"}))
    lane.remove("b")
    assert not lane.is_full(Demand(NOW))


def test_a_removed_worker_is_gone() -> None:
    lane = lane_of([candidate("a", 0, 6), candidate("b", 0, 6)])
    lane.remove("a")
    lane.remove("a")
    assert len(lane) == 1
    assert workers(lane) == ["b"]


def test_overlaps_and_gaps_are_no_route() -> None:
    assert workers(lane_of([candidate("a", 0, 4), candidate("b", 3, 6)])) is None
    assert workers(lane_of([candidate("a", 0, 3), candidate("b", 4, 6)])) is None
    assert workers(lane_of([candidate("a", 1, 6)])) is None
    assert workers(LaneIndex(UNITS)) is None


def test_sessions_of_one_chain_are_those_of_its_weakest_stage() -> None:
    assert sessions_at_once(8, [((0, 4), 3), ((4, 8), 5)]) == 3
    assert sessions_at_once(8, [((0, 4), 3), ((4, 8), 5), ((0, 4), 4), ((0, 8), 1)]) == 6
    assert sessions_at_once(8, [((0, 4), 3), ((5, 8), 5)]) == 0
    assert sessions_at_once(8, []) == 0


def test_sessions_over_ways_that_share_stages() -> None:
    """The first way that is found is not one of the two best: it has to be taken back."""
    rooms = [((0, 1), 1), ((0, 2), 1), ((1, 2), 1), ((1, 4), 1), ((2, 4), 1)]
    assert sessions_at_once(4, rooms) == 2
    assert sessions_at_once(2, [((0, 1), 2), ((0, 2), 1 << 20), ((1, 2), 1)]) == (1 << 20) + 1


@given(
    st.lists(
        st.tuples(st.tuples(st.integers(0, 4), st.integers(1, 5)), st.integers(1, 3)), max_size=7
    )
)
def test_sessions_are_what_the_narrowest_cut_lets_through(
    rooms: list[tuple[tuple[int, int], int]],
) -> None:
    """Ford and Fulkerson's theorem, with every cut tried."""
    rooms = [((begin, end), room) for (begin, end), room in rooms if begin < end]
    cuts = itertools.chain.from_iterable(
        itertools.combinations(range(1, 5), size) for size in range(5)
    )
    narrowest = min(
        sum(room for (begin, end), room in rooms if begin in side and end not in side)
        for side in ({0, *cut} for cut in cuts)
    )
    assert sessions_at_once(5, rooms) == narrowest


@settings(max_examples=100, deadline=None)
@given(some_candidates(), some_candidates(), st.sampled_from([0, 64]))
def test_a_mixture_is_the_cheapest_chain_that_changes_lanes_once(
    head: list[Candidate], tail: list[Candidate], seam_bytes: int
) -> None:
    head = [dataclasses.replace(c, worker_id=f"h{i}") for i, c in enumerate(head[:5])]
    tail = [dataclasses.replace(c, worker_id=f"t{i}") for i, c in enumerate(tail[:5])]
    demand = Demand(NOW, seam_bytes, frozenset({"h0", "t1"}), frozenset({"n3"}))
    found = cheapest_mixed(lane_of(head), lane_of(tail), demand)
    allowed = [
        chain
        for chain in chains([c for c in (*head, *tail) if usable(c, demand)])
        if re.fullmatch("h+t+", "".join(candidate.worker_id[0] for candidate in chain))
    ]
    if not allowed:
        assert found is None
        return
    assert found is not None
    assert found.total_us == min(cost_of(chain, seam_bytes) for chain in allowed)
    ids = tuple(stage.worker_id for stage in found.stages)
    (chosen,) = (c for c in allowed if tuple(worker.worker_id for worker in c) == ids)
    assert cost_of(chosen, seam_bytes) == found.total_us
