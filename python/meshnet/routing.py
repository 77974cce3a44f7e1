"""Route selection: the cheapest complete way through one lane's workers.

    lane = LaneIndex(model_units=43)
    lane.put(Candidate("w1", "n1", (0, 20), step_us=900, ...))
    ...
    route = lane.cheapest(Demand(seam_bytes=4096, now_ms=clock.now_ms()))

A lane is what one model and one fingerprint have in common: all its workers fit together. A route
is a chain of workers whose spans cover all units without gap or overlap. Its cost is what one
step costs, in whole microseconds: over its stages, measured time x load + expected cost of
failures; over its seams, latency + bytes / bandwidth, from measurements between the two nodes
where there are any and from both nodes' own access figures otherwise; and the way back from the
last stage to the first.

The search is a shortest path over the units' boundaries, with arithmetic on whole arrays:
thousands of candidates take a few milliseconds. It is deterministic: the same candidates give the
same route, in whatever order they came; ties go to the smaller digest of the worker's id.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = [
    "Candidate",
    "Demand",
    "LaneIndex",
    "RouteStage",
    "Seam",
    "SelectedRoute",
    "cheapest_mixed",
    "sessions_at_once",
]

_Ints: TypeAlias = npt.NDArray[np.int64]

# Microseconds: a route that costs fifty days a step is none. A cost and a worker's rank in the
# order of digests make one number, so that the least number is the least cost, and of equal ones
# that of the smaller digest.
_NEVER = 1 << 42
_RANK_BITS = 20
_RANK_MASK = (1 << _RANK_BITS) - 1
_MAX_US = 1 << 40
_NO_LIMIT = 1 << 62
# What a lost step costs its session, microseconds: finding out, and reading everything again.
_FAILURE_US = 2_000_000


@dataclass(frozen=True)
class Seam:
    """Measured between two nodes: microseconds there and back; bytes a second, 0 = unknown."""

    round_trip_us: int
    bytes_per_second: int = 0


@dataclass(frozen=True)
class Candidate:
    """What routing knows of one worker. `seams` are by the other node's id."""

    worker_id: str
    node_id: str
    span: tuple[int, int]
    step_us: int
    max_sessions: int = 1
    access_latency_us: int = 0
    access_bytes_per_second: int = 0
    seams: Mapping[str, Seam] = field(default_factory=dict)
    # Sessions that it has, whoever counted more; steps that wait; share of work that succeeds.
    sessions: int = 0
    queued_steps: int = 0
    reliability: float = 1.0
    expires_ms: int = _NO_LIMIT
    # Admitted, ready.
    usable: bool = True


@dataclass(frozen=True)
class Demand:
    """What is asked of a route."""

    now_ms: int
    seam_bytes: int = 0
    avoid_workers: Set[str] = frozenset()
    avoid_nodes: Set[str] = frozenset()


@dataclass(frozen=True)
class RouteStage:
    """One stage, its cost and that of the seam behind it, microseconds a step."""

    worker_id: str
    stage_us: int
    seam_us: int


@dataclass(frozen=True)
class SelectedRoute:
    """The stages in order, and their sum."""

    stages: tuple[RouteStage, ...]
    total_us: int


def stage_cost(candidate: Candidate) -> int:
    """What one step costs at this worker, microseconds."""
    load = (1 + candidate.queued_steps) * (1 + candidate.sessions / candidate.max_sessions)
    risk = (1 - candidate.reliability) / max(candidate.reliability, 1e-3) * _FAILURE_US
    return min(int(candidate.step_us * load + risk), _MAX_US)


def _transfer(byte_count: int, bytes_per_second: int) -> int:
    taken = byte_count * 1_000_000 // bytes_per_second if bytes_per_second else 0
    return min(taken, _MAX_US)


def _transfers(byte_count: int, bytes_per_second: _Ints) -> _Ints:
    """The same for many at once."""
    taken = byte_count * 1_000_000 // np.maximum(bytes_per_second, 1)
    found: _Ints = np.where(bytes_per_second > 0, np.minimum(taken, _MAX_US), 0)
    return found


@dataclass
class _Joint:
    """A boundary: who ends and who begins there, and the measured seams between them."""

    sources: _Ints
    targets: _Ints
    # Of each seam: its source's slot, its target's place in `targets`, half a round trip, bytes/s.
    edge_source: _Ints
    edge_target: _Ints
    half: _Ints
    rate: _Ints
    _moved: tuple[int, _Ints] | None = None

    def moving(self, seam_bytes: int) -> _Ints:
        """What so many bytes take over each seam."""
        if self._moved is None or self._moved[0] != seam_bytes:
            self._moved = (seam_bytes, self.half + _transfers(seam_bytes, self.rate))
        return self._moved[1]


@dataclass(frozen=True)
class _Search:
    """What one search knows of each slot by now."""

    seam_bytes: int
    # Of leaving or entering the node without a measurement; of a step there.
    access: _Ints
    stage: _Ints
    # Of the cheapest way up to and with the worker, and the slot before it there (-1: none).
    cost: _Ints
    before: _Ints


def _keyed(cost: _Ints, rank: _Ints) -> _Ints:
    """Costs, capped, with ranks to tell equal ones apart."""
    keys: _Ints = (np.minimum(cost, _NEVER) << _RANK_BITS) | rank
    return keys


class _Edges:
    """Measured seams whose later worker begins at one boundary: columns that grow by doubling."""

    def __init__(self) -> None:
        self.rows: _Ints = np.zeros((4, 8), dtype=np.int64)  # from, to, half a round trip, bytes/s
        self.count = 0
        self.at: dict[tuple[int, int], int] = {}

    def put(self, source: int, target: int, seam: Seam) -> None:
        index = self.at.get((source, target))
        if index is None:
            if self.count == self.rows.shape[1]:
                self.rows = np.concatenate([self.rows, np.zeros_like(self.rows)], axis=1)
            index = self.count
            self.at[source, target] = index
            self.count += 1
        self.rows[:, index] = (source, target, seam.round_trip_us // 2, seam.bytes_per_second)

    def drop(self, slot: int) -> None:
        """Removes all edges of a worker."""
        kept = [index for (a, b), index in self.at.items() if slot not in (a, b)]
        if len(kept) != self.count:
            rows = self.rows[:, kept]
            self.rows = np.zeros((4, max(8, len(kept))), dtype=np.int64)
            self.rows[:, : len(kept)] = rows
            self.count = len(kept)
            self.at = {(int(a), int(b)): i for i, (a, b) in enumerate(rows[:2].T)}


class LaneIndex:
    """The workers of one lane, kept ready for searches."""

    def __init__(self, model_units: int) -> None:
        self.model_units = model_units
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._candidates: list[Candidate | None] = []
        self._by_node: dict[str, set[int]] = {}
        self._begins: dict[int, set[int]] = {}
        self._ends: dict[int, set[int]] = {}
        self._measuring: dict[str, set[int]] = {}  # slots that measured towards a node
        self._edges: dict[int, _Edges] = {}
        # Per slot: stage cost, access latency, access bytes/s, expiry (0 = unusable), tie-breaker,
        # expiry as if nobody had a session there.
        self._columns: _Ints = np.zeros((6, 8), dtype=np.int64)
        self._joints: dict[int, _Joint] = {}
        # Slots in the order of their digests, and each slot's place in it; None: to be made.
        self._order: tuple[_Ints, _Ints] | None = None

    def __len__(self) -> int:
        """The number of workers."""
        return len(self._slots)

    def put(self, candidate: Candidate) -> None:
        """Adds a worker, or replaces what is known of it."""
        slot = self._slots.get(candidate.worker_id)
        old = None if slot is None else self._candidates[slot]
        if slot is not None and old is not None:
            if (
                old.span == candidate.span
                and old.node_id == candidate.node_id
                and old.seams == candidate.seams
            ):
                self._store(slot, candidate)
                return
            self.remove(candidate.worker_id)
        slot = self._free.pop() if self._free else len(self._candidates)
        if slot == len(self._candidates):
            self._candidates.append(None)
            if slot == self._columns.shape[1]:
                self._columns = np.concatenate(
                    [self._columns, np.zeros_like(self._columns)], axis=1
                )
        assert slot <= _RANK_MASK
        self._slots[candidate.worker_id] = slot
        digest = hashlib.blake2b(candidate.worker_id.encode(), digest_size=7).digest()
        self._columns[4, slot] = int.from_bytes(digest)
        self._store(slot, candidate)
        begin, end = candidate.span
        self._by_node.setdefault(candidate.node_id, set()).add(slot)
        self._begins.setdefault(begin, set()).add(slot)
        self._ends.setdefault(end, set()).add(slot)
        self._joints.pop(begin, None)
        self._joints.pop(end, None)
        self._order = None
        for node in candidate.seams:
            self._measuring.setdefault(node, set()).add(slot)
        self._connect(slot, candidate)

    def remove(self, worker_id: str) -> None:
        """Forgets a worker; one that is not known is none."""
        slot = self._slots.pop(worker_id, None)
        if slot is None:
            return
        candidate = self._candidates[slot]
        assert candidate is not None
        begin, end = candidate.span
        self._candidates[slot] = None
        self._columns[[3, 5], slot] = 0
        self._by_node[candidate.node_id].discard(slot)
        self._begins[begin].discard(slot)
        self._ends[end].discard(slot)
        for node in candidate.seams:
            self._measuring[node].discard(slot)
        for boundary in (begin, end):
            self._joints.pop(boundary, None)
            if boundary in self._edges:
                self._edges[boundary].drop(slot)
        self._free.append(slot)

    def candidates(self) -> list[Candidate]:
        """All that is known, in no order."""
        return [found for found in self._candidates if found is not None]

    def get(self, worker_id: str) -> Candidate | None:
        """What is known of a worker."""
        slot = self._slots.get(worker_id)
        return None if slot is None else self._candidates[slot]

    def _store(self, slot: int, candidate: Candidate) -> None:
        self._candidates[slot] = candidate
        has_room = candidate.sessions < candidate.max_sessions
        expires_ms = candidate.expires_ms if candidate.usable else 0
        self._columns[:4, slot] = (
            stage_cost(candidate),
            candidate.access_latency_us,
            candidate.access_bytes_per_second,
            expires_ms if has_room else 0,
        )
        self._columns[5, slot] = expires_ms

    def _connect(self, slot: int, candidate: Candidate) -> None:
        """Enters the measured seams between a new worker and those that are there."""
        begin, end = candidate.span
        before = self._ends.get(begin, set())
        after = self._begins.get(end, set())
        if not (before or after):
            return
        near: set[int] = set(self._measuring.get(candidate.node_id, ()))
        for node in candidate.seams:
            near |= self._by_node.get(node, set())
        for other in near & before:
            seam = self._measured(other, slot)
            if seam is not None:
                self._edges.setdefault(begin, _Edges()).put(other, slot, seam)
        for other in near & after:
            seam = self._measured(slot, other)
            if seam is not None:
                self._edges.setdefault(end, _Edges()).put(slot, other, seam)

    def _measured(self, first: int, second: int) -> Seam | None:
        """The slower of what the two ends measured of each other."""
        a, b = self._candidates[first], self._candidates[second]
        assert a is not None
        assert b is not None
        found = [s for s in (a.seams.get(b.node_id), b.seams.get(a.node_id)) if s is not None]
        return max(found, key=lambda s: (s.round_trip_us, -s.bytes_per_second), default=None)

    def _joint(self, boundary: int) -> _Joint:
        joint = self._joints.get(boundary)
        if joint is None:
            sources = np.array(sorted(self._ends.get(boundary, ())), dtype=np.int64)
            targets = np.array(sorted(self._begins.get(boundary, ())), dtype=np.int64)
            edges = self._edges.get(boundary) or _Edges()
            source, target, half, rate = edges.rows[:, : edges.count]
            places = np.searchsorted(targets, target)
            joint = _Joint(sources, targets, source, places, half, rate)
            self._joints[boundary] = joint
        return joint

    def _ordered(self) -> tuple[_Ints, _Ints]:
        if self._order is None:
            by_rank = np.argsort(self._columns[4])
            ranks = np.empty_like(by_rank)
            ranks[by_rank] = np.arange(by_rank.size)
            self._order = (by_rank, ranks)
        return self._order

    def _usable(self, demand: Demand, *, were_empty: bool = False) -> npt.NDArray[np.bool_]:
        usable: npt.NDArray[np.bool_] = self._columns[5 if were_empty else 3] > demand.now_ms
        for worker in demand.avoid_workers:
            if worker in self._slots:
                usable[self._slots[worker]] = False
        for node in demand.avoid_nodes:
            usable[list(self._by_node.get(node, ()))] = False
        return usable

    def cheapest(self, demand: Demand) -> SelectedRoute | None:
        """The cheapest complete route; None when there is none."""
        usable = self._usable(demand)
        stage = np.where(usable, self._columns[0], _NEVER)
        latency = self._columns[1]
        search = _Search(
            demand.seam_bytes,
            latency + _transfers(demand.seam_bytes, self._columns[2]),
            stage,
            np.full(stage.shape, _NEVER, dtype=np.int64),
            np.full(stage.shape, -1, dtype=np.int64),
        )
        first = self._joint(0).targets
        # The sampled result goes back over the first worker's access.
        search.cost[first] = np.minimum(stage[first] + latency[first], _NEVER)
        for boundary in sorted(self._begins):
            if 0 < boundary < self.model_units:
                self._extend(self._joint(boundary), search)
        last = self._joint(self.model_units).sources
        if not last.size:
            return None
        _, ranks = self._ordered()
        total = search.cost[last] + latency[last]
        least = int(np.argmin(_keyed(total, ranks[last])))
        if total[least] >= _NEVER:
            return None
        slots = [int(last[least])]
        while search.before[slots[-1]] >= 0:
            slots.append(int(search.before[slots[-1]]))
        return self._explain(slots[::-1], demand.seam_bytes)

    def _extend(self, joint: _Joint, search: _Search) -> None:
        """Finds the best predecessor of each worker that begins at the boundary."""
        sources, targets = joint.sources, joint.targets
        if not sources.size or not targets.size:
            return
        by_rank, ranks = self._ordered()
        leaving = search.cost[sources] + search.access[sources]
        keys = _keyed(leaving, ranks[sources])
        least = int(np.argmin(keys))
        if leaving[least] >= _NEVER:
            return
        # As if nothing were measured: from the cheapest source everywhere.
        best = _keyed(leaving[least] + search.access[targets], ranks[sources[least]])
        if joint.edge_source.size:
            measured = joint.edge_target[joint.edge_source == sources[least]]
            if measured.size:
                self._replace(joint, search, measured, keys, best)
            through = search.cost[joint.edge_source] + joint.moving(search.seam_bytes)
            np.minimum.at(best, joint.edge_target, _keyed(through, ranks[joint.edge_source]))
        search.cost[targets] = np.minimum((best >> _RANK_BITS) + search.stage[targets], _NEVER)
        search.before[targets] = by_rank[best & _RANK_MASK]

    def _replace(
        self, joint: _Joint, search: _Search, measured: _Ints, keys: _Ints, best: _Ints
    ) -> None:
        """Where the seam from the cheapest source is measured: the next source in its place."""
        _, ranks = self._ordered()
        left = np.zeros(joint.targets.size, dtype=np.bool_)
        left[measured] = True
        best[left] = _NEVER << _RANK_BITS
        for position in np.argsort(keys)[1:]:
            source = joint.sources[position]
            leaving = keys[position] >> _RANK_BITS
            if leaving >= _NEVER or not left.any():
                break
            has = np.zeros(joint.targets.size, dtype=np.bool_)
            has[joint.edge_target[joint.edge_source == source]] = True
            taken = left & ~has
            reached = leaving + search.access[joint.targets[taken]]
            best[taken] = _keyed(reached, ranks[source])
            left &= has

    def _explain(self, slots: list[int], seam_bytes: int) -> SelectedRoute:
        stages = []
        for position, slot in enumerate(slots):
            candidate = self._candidates[slot]
            assert candidate is not None
            if position + 1 < len(slots):
                seam = self._seam_cost(slot, slots[position + 1], seam_bytes)
            else:
                head = self._candidates[slots[0]]
                assert head is not None
                seam = candidate.access_latency_us + head.access_latency_us
            stages.append(RouteStage(candidate.worker_id, stage_cost(candidate), seam))
        return SelectedRoute(tuple(stages), sum(s.stage_us + s.seam_us for s in stages))

    def _seam_cost(self, first: int, second: int, seam_bytes: int) -> int:
        seam = self._measured(first, second)
        if seam is not None:
            return seam.round_trip_us // 2 + _transfer(seam_bytes, seam.bytes_per_second)
        total = 0
        for slot in (first, second):
            candidate = self._candidates[slot]
            assert candidate is not None
            total += candidate.access_latency_us
            total += _transfer(seam_bytes, candidate.access_bytes_per_second)
        return total

    def coverage(self, demand: Demand) -> str:
        """For people: how far usable workers reach, when no route is found."""
        reached = max(self.reached(demand))
        return f"usable workers cover units 0 to {reached} of {self.model_units}"

    def is_full(self, demand: Demand) -> bool:
        """Whether there would be a route if workers had room for more sessions than they have."""
        return self.model_units in self.reached(demand, were_empty=True)

    def reached(
        self, demand: Demand, begins: Set[int] = frozenset({0}), *, were_empty: bool = False
    ) -> set[int]:
        """The boundaries that chains of usable workers reach from some of `begins`, with these.

        `were_empty`: as if they had room for more sessions than they have.
        """
        usable = self._usable(demand, were_empty=were_empty)
        reached = set(begins)
        for boundary in sorted(set(self._begins)):
            if boundary in reached:
                for slot in self._begins[boundary]:
                    candidate = self._candidates[slot]
                    if usable[slot] and candidate is not None:
                        reached.add(candidate.span[1])
        return reached


# Behind a worker's id: that it is the first of the second lane.
_CHANGES = "\n"


def cheapest_mixed(head: LaneIndex, tail: LaneIndex, demand: Demand) -> SelectedRoute | None:
    """The cheapest complete route over two lanes of one model: first `head`'s, then `tail`'s.

    At least one worker of each. None when there is none.
    """
    units = head.model_units
    # Behind the change everything lies one model further on, so that no way leads back.
    both = LaneIndex(2 * units)
    for candidate in head.candidates():
        both.put(candidate)
    for candidate in tail.candidates():
        begin, end = candidate.span
        if begin == 0:
            continue
        both.put(dataclasses.replace(candidate, span=(units + begin, units + end)))
        first = candidate.worker_id + _CHANGES
        both.put(dataclasses.replace(candidate, worker_id=first, span=(begin, units + end)))
    avoided = {name + _CHANGES for name in demand.avoid_workers}
    found = both.cheapest(dataclasses.replace(demand, avoid_workers=demand.avoid_workers | avoided))
    if found is None:
        return None
    stages = tuple(
        dataclasses.replace(stage, worker_id=stage.worker_id.removesuffix(_CHANGES))
        for stage in found.stages
    )
    return SelectedRoute(stages, found.total_us)


def sessions_at_once(model_units: int, rooms: Iterable[tuple[tuple[int, int], int]]) -> int:
    """How many sessions complete routes can have together over workers of one lane.

    `rooms` are their spans and how many sessions each takes. A session needs one worker for every
    unit, and workers join where one's span ends and another's begins: the greatest flow from the
    first boundary to the last (Edmonds and Karp, 1972).
    """
    # What may still flow between two boundaries, undoing earlier choices included.
    left: dict[int, Counter[int]] = {}
    for (begin, end), room in rooms:
        left.setdefault(begin, Counter())[end] += room
        left.setdefault(end, Counter())
    flow = 0
    while (path := _path(left, model_units)) is not None:
        taken = min(left[a][b] for a, b in path)
        for a, b in path:
            left[a][b] -= taken
            left[b][a] += taken
        flow += taken
    return flow


def _path(left: Mapping[int, Mapping[int, int]], goal: int) -> list[tuple[int, int]] | None:
    """The way with the fewest steps from boundary 0 on which something may still flow."""
    before = {0: 0}
    waiting = deque([0])
    while waiting and goal not in before:
        here = waiting.popleft()
        for there, room in left.get(here, {}).items():
            if room > 0 and there not in before:
                before[there] = here
                waiting.append(there)
    if goal not in before:
        return None
    path = [(before[goal], goal)]
    while path[0][0]:
        path.insert(0, (before[path[0][0]], path[0][0]))
    return path
