"""Proposes which machine takes which layers of a model, and says why.

    plan = make_plan(shape_of(model, take_inventory(model)), machines)
    for stage in plan.stages: ...
    for line in plan.reasons: ...

The measure is the time of one token: every stage computes in turn, every seam costs its latency and
the boundary's bytes over its bandwidth, and the sampled token goes back from the last stage to the
first. Generating reads every weight that takes part once a token, so a machine's speed is bytes of
weights a second; the embedding is only looked up, and of experts only those in use are read.

So a cut never makes one token faster by itself: it helps where a machine lacks the memory, or where
the next one is so much faster that the seam is worth it. A split that somebody asks for and that a
plan with fewer stages beats is refused, unless accepted explicitly.

The search is exact (best first, with a lower bound from the fastest machine) until it has looked at
_MAX_STATES states; beyond, it keeps the best of each number of stages, and the plan says so. It is
deterministic, whatever the order of the machines.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from meshnet_gguf.caches import session_bytes
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.gguf_file import Model
from meshnet_gguf.inventory import Inventory, TensorClass
from proto.meshnet.shard.v1 import errors_pb2

__all__ = [
    "Line",
    "Machine",
    "ModelShape",
    "Plan",
    "PlannedStage",
    "evaluate",
    "make_plan",
    "shape_of",
]

_MAX_STATES = 200_000
# That many partial plans for each bound that they have come to.
_BEAM = 100
_FLOAT_BYTES = 4
# A position and a token id travel with every row.
_ROW_EXTRA_BYTES = 8

_Range = tuple[int, int]


@dataclass(frozen=True)
class Line:
    """From one machine to another: microseconds one way, bytes a second (0 = no limit known)."""

    latency_us: int
    bytes_per_second: int = 0


@dataclass(frozen=True)
class Machine:
    """What a plan may use. `access` is its line to machines that `lines` does not name."""

    name: str
    memory_bytes: int
    weights_bytes_per_second: int
    access: Line = Line(0)
    lines: Mapping[str, Line] = field(default_factory=dict)

    def line_to(self, other: Machine) -> Line:
        """The line between two machines, by either's measurement, or by both's access."""
        known = self.lines.get(other.name) or other.lines.get(self.name)
        if known is not None:
            return known
        rates = [
            line.bytes_per_second for line in (self.access, other.access) if line.bytes_per_second
        ]
        return Line(self.access.latency_us + other.access.latency_us, min(rates, default=0))


@dataclass(frozen=True)
class ModelShape:
    """What a plan needs of a model; layers are main layers, ranges half-open.

    `memory` is what a stage with a range holds: weights, and the caches of its sessions. `read` is
    what a token reads there. Both have every range that `cuts` (and the two ends) bound.
    """

    layers: int
    cuts: frozenset[int]
    memory: Mapping[_Range, int]
    read: Mapping[_Range, int]
    boundary_bytes: int
    notes: tuple[str, ...] = ()

    @property
    def bounds(self) -> list[int]:
        """Where a stage may begin or end."""
        return [0, *sorted(self.cuts), self.layers]


@dataclass(frozen=True)
class PlannedStage:
    """One stage; times are microseconds a token, `seam_us` to the next stage or back to the first.

    With a single stage there is no seam.
    """

    machine: str
    layers: _Range
    memory_bytes: int
    memory_free_bytes: int
    compute_us: int
    seam_us: int


@dataclass(frozen=True)
class Plan:
    """Stages in order, their sum, and why. `proven` is False when the search was cut short."""

    stages: tuple[PlannedStage, ...]
    total_us: int
    proven: bool
    reasons: tuple[str, ...]


def shape_of(
    model: Model,
    inventory: Inventory,
    *,
    context_tokens: int = 0,
    sessions: int = 1,
    cache_bytes_per_layer: int | None = None,
) -> ModelShape:
    """A model's shape, with room for the caches of `sessions` of `context_tokens` each.

    Raises MeshnetError (ARTIFACT_INVALID) for a model without an embedding length.
    """
    width = model.integer("embedding_length") or 0
    if width <= 0:
        raise MeshnetError(
            errors_pb2.REASON_ARTIFACT_INVALID,
            f"expected {model.architecture}.embedding_length, got {width}",
        )
    streams = model.integer("hyper_connection.count") or 1
    notes = []
    if cache_bytes_per_layer is not None:
        caches = [cache_bytes_per_layer] * inventory.main_layers
    else:
        held = session_bytes(model, inventory, context_tokens)
        caches = [sessions * size for size in held or [0] * inventory.main_layers]
        if held is None:
            notes.append(
                f"caches are not reckoned with: how {model.architecture} keeps its tokens is not "
                "known here; say how many bytes a layer"
            )
    cuts = frozenset(cut.at for cut in inventory.cuts if cut.allowed)
    bounds = [0, *sorted(cuts), inventory.main_layers]
    ranges = list(itertools.combinations(bounds, 2))
    read = _read_bytes(model, inventory)
    return ModelShape(
        layers=inventory.main_layers,
        cuts=cuts,
        memory={
            (begin, end): inventory.stage_bytes((begin, end)) + sum(caches[begin:end])
            for begin, end in ranges
        },
        read={
            (begin, end): sum(read[begin:end]) + (read[-1] if end == inventory.main_layers else 0)
            for begin, end in ranges
        },
        boundary_bytes=width * streams * _FLOAT_BYTES + _ROW_EXTRA_BYTES,
        notes=tuple(notes),
    )


def _read_bytes(model: Model, inventory: Inventory) -> list[int]:
    """What a token reads of each main layer's weights; last, of those behind them all."""
    experts, used = model.integer("expert_count") or 0, model.integer("expert_used_count") or 0
    share = used / experts if experts else 1.0
    read = [0.0] * (inventory.main_layers + 1)
    for item in inventory.items:
        size = item.tensor.bytes
        if item.layer is None:
            looked_up = item.kind is TensorClass.EMBEDDING and not inventory.has_tied_output
            read[-1] += 0 if looked_up else size
        elif item.layer < inventory.main_layers:
            read[item.layer] += size * share if item.kind is TensorClass.EXPERT else size
    return [math.ceil(value) for value in read]


def make_plan(
    shape: ModelShape,
    machines: Sequence[Machine],
    *,
    stages: int | None = None,
    accept_slower: bool = False,
) -> Plan:
    """The plan with the least time a token; with `stages`, of those with exactly so many.

    Raises MeshnetError: MEMORY_BUDGET_EXCEEDED when the machines cannot hold the model,
    LAYER_RANGE_INVALID for a number of stages that is impossible, SPLIT_USELESS for one that fewer
    stages beat, unless `accept_slower`.
    """
    ordered = _checked(machines)
    if stages is not None and not 1 <= stages <= min(len(ordered), len(shape.cuts) + 1):
        raise MeshnetError(
            errors_pb2.REASON_LAYER_RANGE_INVALID,
            f"expected 1 to {min(len(ordered), len(shape.cuts) + 1)} stages, as there are "
            f"{len(ordered)} machines and {len(shape.cuts)} cut points, got {stages}",
        )
    found = _Search(shape, ordered, stages, stages).run()
    if found is None:
        raise _does_not_fit(shape, ordered, stages)
    plan = _describe(shape, ordered, *found)
    if not accept_slower:
        _refuse_useless(shape, ordered, plan)
    return plan


def evaluate(
    shape: ModelShape,
    machines: Sequence[Machine],
    split: Sequence[tuple[str, _Range]],
    *,
    accept_slower: bool = False,
) -> Plan:
    """The plan that somebody has in mind: machines with their layers, in order.

    Raises MeshnetError: LAYER_RANGE_INVALID, MEMORY_BUDGET_EXCEEDED, SPLIT_USELESS as make_plan().
    """
    ordered = _checked(machines)
    index = {machine.name: number for number, machine in enumerate(ordered)}
    bounds = [0]
    chosen = []
    for name, layers in split:
        if name not in index or index[name] in chosen:
            raise _no_split(f"a machine of {', '.join(index)}, each once, got {name!r}")
        if layers not in shape.memory or layers[0] != bounds[-1]:
            raise _no_split(
                f"layers [{bounds[-1]}, one of {', '.join(map(str, shape.bounds))}), got "
                f"[{layers[0]}, {layers[1]}) for {name}"
            )
        free = ordered[index[name]].memory_bytes - shape.memory[layers]
        if free < 0:
            raise MeshnetError(
                errors_pb2.REASON_MEMORY_BUDGET_EXCEEDED,
                f"expected at most {ordered[index[name]].memory_bytes} bytes on {name}, layers "
                f"[{layers[0]}, {layers[1]}) take {shape.memory[layers]}",
            )
        chosen.append(index[name])
        bounds.append(layers[1])
    if bounds[-1] != shape.layers:
        raise _no_split(f"all {shape.layers} layers, nobody has [{bounds[-1]}, {shape.layers})")
    plan = _describe(shape, ordered, tuple(chosen), tuple(bounds), True)
    if not accept_slower:
        _refuse_useless(shape, ordered, plan)
    return plan


def _checked(machines: Sequence[Machine]) -> list[Machine]:
    ordered = sorted(machines, key=lambda machine: machine.name)
    names = [machine.name for machine in ordered]
    if not names or len(set(names)) != len(names):
        raise MeshnetError(
            errors_pb2.REASON_CONFIGURATION_INVALID,
            f"expected machines with different names, got {', '.join(names) or 'none'}",
        )
    for machine in ordered:
        if machine.memory_bytes < 0 or machine.weights_bytes_per_second <= 0:
            raise MeshnetError(
                errors_pb2.REASON_CONFIGURATION_INVALID,
                f"expected memory and a speed of {machine.name}, got {machine.memory_bytes} bytes "
                f"and {machine.weights_bytes_per_second} bytes/s",
            )
    return ordered


def _no_split(expected: str) -> MeshnetError:
    return MeshnetError(errors_pb2.REASON_LAYER_RANGE_INVALID, f"expected {expected}")


# ---- Costs ----


def _per_second(amount: int, rate: int) -> int:
    """Microseconds, rounded up, so that nothing is free."""
    return -(-amount * 1_000_000 // rate)


def _compute_us(shape: ModelShape, machine: Machine, layers: _Range) -> int:
    return _per_second(shape.read[layers], machine.weights_bytes_per_second)


def _seam_us(shape: ModelShape, source: Machine, target: Machine) -> int:
    line = source.line_to(target)
    carried = shape.boundary_bytes
    return line.latency_us + (
        _per_second(carried, line.bytes_per_second) if line.bytes_per_second else 0
    )


def _back_us(last: Machine, first: Machine) -> int:
    """A token's id is a few bytes: only the latency counts."""
    return 0 if last is first else last.line_to(first).latency_us


# ---- Search ----

_Chosen = tuple[tuple[int, ...], tuple[int, ...], bool]
# Lower bound of the whole, number of stages, their machines, their bounds, cost so far.
_Partial = tuple[int, int, tuple[int, ...], tuple[int, ...], int]


class _Search:
    """Best first over partial plans: machines so far, and where their layers end."""

    def __init__(
        self,
        shape: ModelShape,
        machines: Sequence[Machine],
        least_stages: int | None = None,
        most_stages: int | None = None,
    ) -> None:
        self._shape = shape
        self._machines = machines
        self._least = least_stages or 1
        self._most = min(most_stages or len(machines), len(machines))
        self._bounds = shape.bounds
        self._seams = [[_seam_us(shape, a, b) for b in machines] for a in machines]
        self._back = [[_back_us(a, b) for b in machines] for a in machines]
        fastest = max(machine.weights_bytes_per_second for machine in machines)
        # At least that long for the layers from a bound on, and at least that much memory.
        rest = {bound: (bound, shape.layers) for bound in self._bounds[:-1]}
        self._rest_us = {b: _per_second(shape.read[r], fastest) for b, r in rest.items()}
        self._rest_us[shape.layers] = 0
        self._rest_bytes = {b: self._least_memory(b) for b in rest}
        self._rest_bytes[shape.layers] = 0
        self._add_seams(machines)
        self._twins = self._find_twins()

    def _least_memory(self, bound: int) -> int:
        """No split of the layers from `bound` on takes less."""
        edges = [b for b in self._bounds if b >= bound]
        best = {self._shape.layers: 0}
        for begin in reversed(edges[:-1]):
            best[begin] = min(
                self._shape.memory[begin, end] + best[end] for end in edges if end > begin
            )
        return best[bound]

    def _add_seams(self, machines: Sequence[Machine]) -> None:
        """The rest takes at least as many more seams as even the largest machines would."""
        pairs = itertools.permutations(range(len(machines)), 2)
        cheapest = min((self._seams[a][b] for a, b in pairs), default=0)
        largest = sorted((machine.memory_bytes for machine in machines), reverse=True)
        reach = list(itertools.accumulate(largest))
        for bound, needed in self._rest_bytes.items():
            count = sum(1 for held in reach if held < needed) + (1 if needed else 0)
            # At the start, one of them needs no seam.
            self._rest_us[bound] += cheapest * max(0, count - (bound == 0))

    def _find_twins(self) -> list[int | None]:
        """For each machine the one before it that is exactly like it: it would go first."""
        found: list[int | None] = []
        plain = not any(machine.lines for machine in self._machines)
        for number, machine in enumerate(self._machines):
            twin = None
            for other in range(number - 1, -1, -1):
                candidate = self._machines[other]
                if plain and (
                    machine.memory_bytes,
                    machine.weights_bytes_per_second,
                    machine.access,
                ) == (
                    candidate.memory_bytes,
                    candidate.weights_bytes_per_second,
                    candidate.access,
                ):
                    twin = other
                    break
            found.append(twin)
        return found

    def run(self) -> _Chosen | None:
        """The best plan; None when there is none."""
        # By the lower bound of the whole, then fewest stages; the rest makes the order certain.
        start: _Partial = (self._rest_us[0], 0, (), (0,), 0)
        heap = [start]
        seen: set[tuple[int, ...]] = set()
        states = 0
        while heap:
            _, _, chosen, bounds, cost = heapq.heappop(heap)
            if bounds[-1] == self._shape.layers:
                return chosen, bounds, True
            if chosen:
                key = (bounds[-1], chosen[0], chosen[-1], *sorted(chosen))
                if key in seen:
                    continue
                seen.add(key)
            states += 1
            if states > _MAX_STATES:
                return self._beam()
            for item in self._next(chosen, bounds, cost):
                heapq.heappush(heap, item)
        return None

    def _next(
        self, chosen: tuple[int, ...], bounds: tuple[int, ...], cost: int
    ) -> Iterator[_Partial]:
        begin = bounds[-1]
        if len(chosen) == self._most:
            return
        for number, machine in enumerate(self._machines):
            twin = self._twins[number]
            if number in chosen or (twin is not None and twin not in chosen):
                continue
            with_it = (*chosen, number)
            left = sum(
                other.memory_bytes
                for index, other in enumerate(self._machines)
                if index not in with_it
            )
            before = cost + (self._seams[chosen[-1]][number] if chosen else 0)
            for end in self._bounds:
                if end <= begin:
                    continue
                layers = (begin, end)
                if self._shape.memory[layers] > machine.memory_bytes:
                    break
                if self._rest_bytes[end] > left:
                    continue
                is_last = end == self._shape.layers
                if (is_last and len(with_it) < self._least) or (
                    not is_last and len(with_it) == self._most
                ):
                    continue
                total = before + _compute_us(self._shape, machine, layers)
                if is_last:
                    total += self._back[number][with_it[0]]
                yield total + self._rest_us[end], len(with_it), with_it, (*bounds, end), total

    def _beam(self) -> _Chosen | None:
        """The most promising plans of each number of stages."""
        level: list[_Partial] = [(0, 0, (), (0,), 0)]
        best: _Partial | None = None
        while level:
            following = []
            for _, _, chosen, bounds, cost in level:
                for item in self._next(chosen, bounds, cost):
                    if item[3][-1] == self._shape.layers:
                        best = item if best is None else min(best, item)
                    else:
                        following.append(item)
            by_bound: dict[int, list[_Partial]] = {}
            for item in following:
                by_bound.setdefault(item[3][-1], []).append(item)
            level = [item for group in by_bound.values() for item in heapq.nsmallest(_BEAM, group)]
        return None if best is None else (best[2], best[3], False)


def _does_not_fit(
    shape: ModelShape, machines: Sequence[Machine], stages: int | None
) -> MeshnetError:
    have = sum(machine.memory_bytes for machine in machines)
    search = _Search(shape, machines)
    needed = search._least_memory(0)
    most = max(machine.memory_bytes for machine in machines)
    within = f" in {stages} stages" if stages else ""
    return MeshnetError(
        errors_pb2.REASON_MEMORY_BUDGET_EXCEEDED,
        f"the model does not fit{within}: it takes at least {needed} bytes, the machines have "
        f"{have} in all, the largest {most}; stages are whole layers between allowed cuts",
    )


# ---- Why ----


def _describe(
    shape: ModelShape,
    machines: Sequence[Machine],
    chosen: tuple[int, ...],
    bounds: tuple[int, ...],
    proven: bool,
) -> Plan:
    parts = [machines[number] for number in chosen]
    ranges = list(itertools.pairwise(bounds))
    stages = []
    for index, (machine, layers) in enumerate(zip(parts, ranges, strict=True)):
        is_last = index + 1 == len(parts)
        seam = (
            _back_us(machine, parts[0]) if is_last else _seam_us(shape, machine, parts[index + 1])
        )
        memory = shape.memory[layers]
        stages.append(
            PlannedStage(
                machine.name,
                layers,
                memory,
                machine.memory_bytes - memory,
                _compute_us(shape, machine, layers),
                seam,
            )
        )
    total = sum(stage.compute_us + stage.seam_us for stage in stages)
    reasons = [
        _why(shape, parts[index], parts[index + 1], stages[index], stages[index + 1])
        for index in range(len(stages) - 1)
    ]
    if len(stages) == 1:
        reasons.append(
            f"{stages[0].machine} has memory for the whole model, and no other machine would save "
            "more than a seam costs"
        )
    if not proven:
        reasons.append("the search was cut short: a better plan may exist")
    return Plan(tuple(stages), total, proven, (*reasons, *shape.notes))


def _why(
    shape: ModelShape, left: Machine, right: Machine, first: PlannedStage, second: PlannedStage
) -> str:
    """Why there is a cut between two stages."""
    joined = (first.layers[0], second.layers[1])
    needed = shape.memory[joined]
    alone = [
        (_compute_us(shape, machine, joined), machine.name)
        for machine in (left, right)
        if needed <= machine.memory_bytes
    ]
    where = f"cut at {second.layers[0]}, {left.name} to {right.name}, {first.seam_us} us a token"
    if not alone:
        return (
            f"{where}: needed, layers [{joined[0]}, {joined[1]}) take {needed} bytes, more than "
            f"{left.name} ({left.memory_bytes}) or {right.name} ({right.memory_bytes}) has"
        )
    took, name = min(alone)
    saved = took - first.compute_us - second.compute_us
    return f"{where}: saves {saved} us of compute against {name} alone"


def _refuse_useless(shape: ModelShape, machines: Sequence[Machine], plan: Plan) -> None:
    """Raises MeshnetError (SPLIT_USELESS) when fewer stages take no longer."""
    count = len(plan.stages)
    if count == 1:
        return
    found = _Search(shape, machines, 1, count - 1).run()
    if found is None:
        return
    better = _describe(shape, machines, *found)
    if better.total_us > plan.total_us:
        return
    seams = sum(stage.seam_us for stage in plan.stages)
    compute = sum(stage.compute_us for stage in plan.stages)
    fewer = ", ".join(
        f"{stage.machine} [{stage.layers[0]}, {stage.layers[1]})" for stage in better.stages
    )
    saved = sum(stage.compute_us for stage in better.stages) - compute
    raise MeshnetError(
        errors_pb2.REASON_SPLIT_USELESS,
        f"{count} stages take {plan.total_us} us a token, of which {seams} for seams that save "
        f"{max(0, saved)} us of compute; {len(better.stages)} take {better.total_us} us ({fewer}). "
        "Use fewer, or accept the slower split explicitly",
    )
