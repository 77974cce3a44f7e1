"""Plans: complete, within memory, deterministic, and the best there is."""

import itertools
import os
import pathlib
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from meshnet_gguf.caches import session_bytes
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.gguf_file import read_model
from meshnet_gguf.inventory import take_inventory
from meshnet_gguf.plan import Line, Machine, ModelShape, Plan, evaluate, make_plan, shape_of
from meshnet_gguf.plan_inputs import measured_machines, parse_machines, sample_machines

from proto.meshnet.control.v1 import tracker_pb2
from proto.meshnet.shard.v1 import errors_pb2

MODEL = pathlib.Path(os.environ["FIXTURE_TINY"])


def shape(
    weights: list[int], cuts: list[int] | None = None, head: int = 0, tail: int = 0, seam: int = 8
) -> ModelShape:
    """Layers of these bytes, all of them read; `head` is held only, `tail` read as well."""
    count = len(weights)
    allowed = frozenset(range(1, count) if cuts is None else cuts)
    memory, read = {}, {}
    for begin, end in itertools.combinations(sorted({0, *allowed, count}), 2):
        own = sum(weights[begin:end])
        at_tail = tail if end == count else 0
        memory[begin, end] = own + at_tail + (head if begin == 0 else 0)
        read[begin, end] = own + at_tail
    return ModelShape(count, allowed, memory, read, seam)


def brute_force(
    model: ModelShape, machines: list[Machine], stages: int | None = None
) -> int | None:
    """The least time of all splits over all orders of machines, microseconds."""
    best: int | None = None
    for count in range(1, len(machines) + 1):
        if stages not in (None, count):
            continue
        for order in itertools.permutations(machines, count):
            for cuts in itertools.combinations(sorted(model.cuts), count - 1):
                ranges = list(itertools.pairwise((0, *cuts, model.layers)))
                if any(
                    model.memory[layers] > machine.memory_bytes
                    for machine, layers in zip(order, ranges, strict=True)
                ):
                    continue
                total = 0
                for machine, layers in zip(order, ranges, strict=True):
                    rate = machine.weights_bytes_per_second
                    total += -(-model.read[layers] * 1_000_000 // rate)
                for left, right in itertools.pairwise(order):
                    line = left.line_to(right)
                    total += line.latency_us
                    if line.bytes_per_second:
                        total += -(-model.boundary_bytes * 1_000_000 // line.bytes_per_second)
                if count > 1:
                    total += order[-1].line_to(order[0]).latency_us
                best = total if best is None else min(best, total)
    return best


_LINES = st.builds(Line, st.integers(0, 50), st.sampled_from([0, 1_000_000, 10_000_000]))


@st.composite
def _cases(draw: st.DrawFn) -> tuple[ModelShape, list[Machine]]:
    layers = draw(st.integers(1, 5))
    weights = draw(st.lists(st.integers(1, 100), min_size=layers, max_size=layers))
    cuts = draw(st.lists(st.integers(1, max(1, layers - 1)), unique=True))
    model = shape(
        weights,
        [cut for cut in cuts if cut < layers],
        draw(st.integers(0, 50)),
        draw(st.integers(0, 50)),
        draw(st.integers(1, 2000)),
    )
    names = [f"m{number}" for number in range(draw(st.integers(1, 4)))]
    machines = [
        Machine(
            name,
            draw(st.integers(0, 300)),
            draw(st.sampled_from([1_000_000, 2_000_000, 5_000_000])),
            draw(_LINES),
            draw(st.dictionaries(st.sampled_from(names), _LINES, max_size=2)),
        )
        for name in names
    ]
    return model, machines


def check(model: ModelShape, machines: list[Machine], plan: Plan) -> None:
    """Whatever is proposed can be done, and costs what it says."""
    bounds = [plan.stages[0].layers[0], *(stage.layers[1] for stage in plan.stages)]
    assert bounds[0] == 0
    assert bounds[-1] == model.layers
    assert bounds == sorted(set(bounds))
    assert [stage.layers[0] for stage in plan.stages] == bounds[:-1]
    assert set(bounds[1:-1]) <= model.cuts
    by_name = {machine.name: machine for machine in machines}
    assert len({stage.machine for stage in plan.stages}) == len(plan.stages)
    for stage in plan.stages:
        assert stage.memory_bytes == model.memory[stage.layers]
        assert stage.memory_bytes + stage.memory_free_bytes == by_name[stage.machine].memory_bytes
        assert stage.memory_free_bytes >= 0
    assert plan.total_us == sum(stage.compute_us + stage.seam_us for stage in plan.stages)


@given(_cases())
def test_a_plan_is_the_best_of_all(case: tuple[ModelShape, list[Machine]]) -> None:
    model, machines = case
    best = brute_force(model, machines)
    if best is None:
        with pytest.raises(MeshnetError) as caught:
            make_plan(model, machines)
        assert caught.value.reason == errors_pb2.REASON_MEMORY_BUDGET_EXCEEDED
        return
    plan = make_plan(model, machines)
    check(model, machines, plan)
    assert plan.proven
    assert plan.total_us == best
    assert len(plan.reasons) >= max(1, len(plan.stages) - 1)


@given(_cases(), st.integers(1, 4), st.randoms(use_true_random=False))
def test_a_number_of_stages_and_what_is_useless(
    case: tuple[ModelShape, list[Machine]], stages: int, rng: random.Random
) -> None:
    model, machines = case
    best = brute_force(model, machines, stages)
    if stages > min(len(machines), len(model.cuts) + 1):
        with pytest.raises(MeshnetError) as caught:
            make_plan(model, machines, stages=stages)
        assert caught.value.reason == errors_pb2.REASON_LAYER_RANGE_INVALID
        return
    if best is None:
        with pytest.raises(MeshnetError):
            make_plan(model, machines, stages=stages, accept_slower=True)
        return
    plan = make_plan(model, machines, stages=stages, accept_slower=True)
    check(model, machines, plan)
    assert len(plan.stages) == stages
    assert plan.total_us == best
    shuffled = rng.sample(machines, len(machines))
    assert make_plan(model, shuffled, stages=stages, accept_slower=True) == plan
    fewer = [brute_force(model, machines, count) for count in range(1, stages)]
    split = [(stage.machine, stage.layers) for stage in plan.stages]
    if any(other is not None and other <= plan.total_us for other in fewer):
        with pytest.raises(MeshnetError) as caught:
            make_plan(model, machines, stages=stages)
        assert caught.value.reason == errors_pb2.REASON_SPLIT_USELESS
        with pytest.raises(MeshnetError) as caught:
            evaluate(model, machines, split)
        assert caught.value.reason == errors_pb2.REASON_SPLIT_USELESS
    else:
        assert make_plan(model, machines, stages=stages) == plan
        assert evaluate(model, machines, split) == plan


FAST = Machine("fast", 1000, 10_000_000, Line(5))
SLOW = Machine("slow", 1000, 1_000_000, Line(5))


def test_one_machine_with_room_takes_all() -> None:
    plan = make_plan(shape([100] * 4), [SLOW, FAST])
    assert [(stage.machine, stage.layers) for stage in plan.stages] == [("fast", (0, 4))]
    assert plan.total_us == 40
    assert plan.stages[0].seam_us == 0


def test_a_fast_machine_without_room_gets_what_it_can_hold() -> None:
    plan = make_plan(shape([100] * 4), [SLOW, replace(FAST, memory_bytes=300)])
    assert sorted((stage.machine, stage.layers[1] - stage.layers[0]) for stage in plan.stages) == [
        ("fast", 3),
        ("slow", 1),
    ]
    assert "saves 270 us of compute against slow alone" in plan.reasons[0]


def test_a_seam_that_costs_more_than_it_saves() -> None:
    far = replace(FAST, memory_bytes=300, access=Line(10_000))
    plan = make_plan(shape([100] * 4), [SLOW, far])
    assert [stage.machine for stage in plan.stages] == ["slow"]
    with pytest.raises(MeshnetError) as caught:
        make_plan(shape([100] * 4), [SLOW, far], stages=2)
    assert caught.value.reason == errors_pb2.REASON_SPLIT_USELESS
    assert "2 stages take" in caught.value.message
    assert "1 take 400 us (slow [0, 4))" in caught.value.message
    assert len(make_plan(shape([100] * 4), [SLOW, far], stages=2, accept_slower=True).stages) == 2


def test_a_cut_that_memory_needs_says_so() -> None:
    small = [Machine(name, 250, 1_000_000, Line(5)) for name in ("a", "b")]
    plan = make_plan(shape([100] * 4), small)
    assert [stage.layers for stage in plan.stages] == [(0, 2), (2, 4)]
    assert plan.reasons[0].startswith("cut at 2, a to b, 10 us a token: needed")


def test_what_cannot_fit_says_how_much_is_there() -> None:
    with pytest.raises(MeshnetError) as caught:
        make_plan(shape([100] * 4), [Machine("a", 250, 1)])
    assert caught.value.reason == errors_pb2.REASON_MEMORY_BUDGET_EXCEEDED
    assert "at least 400 bytes, the machines have 250" in caught.value.message


@pytest.mark.parametrize(
    ("split", "said"),
    [
        ([("fast", (0, 2))], "nobody has [2, 4)"),
        ([("fast", (0, 2)), ("fast", (2, 4))], "each once"),
        ([("fast", (0, 2)), ("slow", (3, 4))], "expected layers [2, "),
        ([("fast", (0, 1)), ("slow", (1, 4))], "one of 0, 2, 4"),
        ([("none", (0, 4))], "a machine of fast, slow"),
    ],
)
def test_splits_that_are_none(split: list[tuple[str, tuple[int, int]]], said: str) -> None:
    with pytest.raises(MeshnetError) as caught:
        evaluate(shape([100] * 4, [2]), [FAST, SLOW], split, accept_slower=True)
    assert caught.value.reason == errors_pb2.REASON_LAYER_RANGE_INVALID
    assert said in caught.value.message


def test_many_different_machines_get_a_plan_that_says_that_it_is_not_proven(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("meshnet_gguf.plan._MAX_STATES", 100)
    machines = [
        Machine(f"m{number:02}", 90 + number, 1_000_000 + 1000 * number, Line(5 + number))
        for number in range(12)
    ]
    model = shape([20] * 40)
    plan = make_plan(model, machines)
    check(model, machines, plan)
    assert not plan.proven
    assert "cut short" in plan.reasons[-1]


def test_forty_equal_machines_are_no_more_work_than_the_needed_few() -> None:
    machines = [Machine(f"m{number:02}", 100, 1_000_000, Line(5)) for number in range(40)]
    plan = make_plan(shape([20] * 43), machines)
    assert plan.proven
    assert len(plan.stages) == 9
    assert plan.stages[0].machine == "m00"


def test_a_real_inventory() -> None:
    model = read_model(MODEL)
    inventory = take_inventory(model)
    found = shape_of(model, inventory, cache_bytes_per_layer=1000)
    assert found.layers == inventory.main_layers == 8
    assert found.boundary_bytes == 4 * 128 * 4 + 8
    assert found.memory[0, 8] == inventory.stage_bytes((0, 8)) + 8 * 1000
    assert found.memory[2, 5] == inventory.stage_bytes((2, 5)) + 3 * 1000
    # Of experts only those in use are read, the embedding is looked up.
    assert 0 < found.read[0, 8] < inventory.total_bytes
    assert found.read[0, 4] + found.read[4, 8] == found.read[0, 8]
    assert found.notes == ()
    # Two sessions' caches, which differ from layer to layer.
    caches = session_bytes(model, inventory, 4096)
    assert caches is not None
    assert len(set(caches)) > 1
    full = shape_of(model, inventory, context_tokens=4096, sessions=2)
    assert full.memory[2, 5] == inventory.stage_bytes((2, 5)) + 2 * sum(caches[2:5])
    assert full.notes == ()
    metadata = {
        key.replace("deepseek4.", "another."): "another" if value == "deepseek4" else value
        for key, value in model.metadata.items()
    }
    strange = replace(model, metadata=metadata)
    assert "not known" in shape_of(strange, inventory).notes[0]


def test_machines_from_a_file() -> None:
    content = sample_machines()
    berlin, paris = parse_machines(content)
    line = Line(6000, 4_000_000)
    assert berlin == Machine(
        "berlin", 16 << 30, 20_000_000_000, Line(5000, 5_000_000), {"paris": line}
    )
    assert paris == Machine("paris", 8 << 30, 40_000_000_000, Line(0, 0), {"berlin": line})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("machines: []", "machines: [] should be non-empty"),
        ("machines: [{name: a, memory: 1, weights_per_second: 2 PB}]", "weights_per_second: "),
        ("machines: [{name: a, memory: -1, weights_per_second: 2}]", "machines.0.memory: "),
        ("machines: [{name: a, memory: 1, weights_per_second: 2, gpu: 3}]", "'gpu' was unexpected"),
        (
            "machines: [{name: a, memory: 1, weights_per_second: 2}]\n"
            "lines: [{between: [a, b], latency_us: 1}]",
            "lines.0.between: expected two machines of a",
        ),
    ],
)
def test_files_of_machines_that_are_refused(content: str, said: str) -> None:
    with pytest.raises(MeshnetError) as caught:
        parse_machines(content)
    assert caught.value.reason == errors_pb2.REASON_CONFIGURATION_INVALID
    assert said in caught.value.message


def worker(
    node: str, span: tuple[int, int], step_us: int, **labels: str
) -> tracker_pb2.WorkerStatus:
    return tracker_pb2.WorkerStatus(
        registration=tracker_pb2.Registration(
            node_id=node,
            span=tracker_pb2.Span(begin=span[0], end=span[1]),
            model_units=4,
            step_us=step_us,
            access_latency_us=7,
            labels=labels,
        ),
        load=tracker_pb2.Load(
            seams=[
                tracker_pb2.SeamMeasurement(
                    peer_node_id="other", round_trip_us=30, bytes_per_second=9
                )
            ]
        ),
    )


def test_machines_by_what_they_measured() -> None:
    model = shape([100] * 4)
    found = measured_machines(
        model,
        [
            worker("b", (0, 2), 100, machine_memory_bytes="1234"),
            worker("b", (2, 4), 400),
            worker("a", (0, 4), 100),
            worker("silent", (0, 4), 0),
        ],
    )
    line = {"other": Line(15, 9)}
    assert found == [
        Machine("a", 400, 4_000_000, Line(7), line),
        Machine("b", 1234, 2_000_000, Line(7), line),
    ]
    with pytest.raises(MeshnetError, match="the tracker knows none"):
        measured_machines(shape([1] * 5), [worker("a", (0, 4), 100)])
