"""What a worker's words become at the tracker, and that the tracker's own code routes by it."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from meshnet.errors import ControlError, Reason
from meshnet.storage import Storage
from meshnet.testing.manual_clock import ManualClock
from meshnet.tracker import Tracker, TrackerOptions
from meshnet_gguf.client import Capability, Health, LayerRange, Metrics, WorkerState
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.protocol import recipe_fingerprint
from meshnet_gguf.registration import PeerMeasurement, Whereabouts, make_load, make_registration
from meshnet_gguf.testing.scripted_head import capability

from proto.meshnet.control.v1 import tracker_pb2
from proto.meshnet.shard.v1 import errors_pb2, shard_pb2

RECIPE = {"backend": "cpu", "quantization": "Q4_0", "kv_type": "f16", "batch_policy": "exact"}


def metrics(**values: int) -> Metrics:
    message = shard_pb2.Metrics(kv_budget_bytes=1000)
    for name, value in values.items():
        setattr(message, name, value)
    return Metrics.from_proto(message)


def worker(layers: tuple[int, int] = (0, 4), **recipe: str) -> Capability:
    fields = {**RECIPE, **recipe}
    return capability(
        LayerRange(*layers), recipe=fields, recipe_fingerprint=recipe_fingerprint(fields.items())
    )


def where(name: str = "w") -> Whereabouts:
    return Whereabouts(name, f"node-{name}", "m", f"127.0.0.1:1{len(name)}", access_latency_us=7)


def health(state: WorkerState = WorkerState.READY) -> Health:
    return Health(state, "", "", None, "", "")


def test_every_word_has_its_place() -> None:
    found = make_registration(
        where(),
        worker((1, 3)),
        metrics(kv_bytes=300, warm_up_step_us=250, resident_bytes=5),
        [PeerMeasurement("n2", 40, 1000)],
    )
    assert found.fingerprint == recipe_fingerprint(RECIPE.items())
    assert (found.span.begin, found.span.end, found.model_units) == (1, 3, 4)
    assert found.max_sessions == 4
    assert found.memory_bytes == 700
    assert found.step_us == 250
    assert found.access_latency_us == 7
    assert [(s.peer_node_id, s.round_trip_us, s.bytes_per_second) for s in found.seams] == [
        ("n2", 40, 1000)
    ]
    labels = {
        "backend": "cpu",
        "quantization": "Q4_0",
        "evidence": "FIXTURE",
        "cache_budget_bytes": "1000",
        "resident_bytes": "5",
        "layer_us": "125",
        "context_tokens": "128",
    }
    assert labels.items() <= dict(found.labels).items()


def test_a_fingerprint_that_the_recipe_does_not_have() -> None:
    wrong = dataclasses.replace(worker(), recipe={**RECIPE, "quantization": "Q8_0"})
    with pytest.raises(MeshnetError) as caught:
        make_registration(where(), wrong, metrics())
    assert caught.value.reason == errors_pb2.REASON_RECIPE_MISMATCH


@given(
    before=st.tuples(st.integers(0, 100), st.integers(0, 10**6)),
    tokens=st.integers(0, 1000),
    took=st.integers(0, 10**9),
)
def test_the_speed_is_that_of_recent_work(before: tuple[int, int], tokens: int, took: int) -> None:
    old = metrics(decode_tokens=before[0], decode_engine_us=before[1])
    new = metrics(decode_tokens=before[0] + tokens, decode_engine_us=before[1] + took)
    load = make_load(health(), new, old)
    assert load.step_us == (max(1, took // tokens) if tokens >= 8 else 0)


@pytest.mark.parametrize("state", WorkerState)
def test_only_a_ready_worker_is_ready(state: WorkerState) -> None:
    load = make_load(health(state), metrics(open_sessions=2, queued_steps=3))
    assert load.ready == (state is WorkerState.READY)
    assert (load.open_sessions, load.queued_steps, load.memory_bytes) == (2, 3, 1000)


async def register(tracker: Tracker, name: str, what: Capability, **numbers: Any) -> None:
    registration = make_registration(where(name), what, metrics(**numbers))
    await tracker.register(
        tracker_pb2.RegisterRequest(registration=registration, load=make_load(health(), metrics()))
    )


async def select(tracker: Tracker) -> list[str]:
    answer = await tracker.select_route(tracker_pb2.SelectRouteRequest(model_id="m"))
    return [hop.worker_id for hop in answer.hops]


@pytest.mark.parametrize("field", sorted(RECIPE))
async def test_the_tracker_joins_only_equal_recipes(field: str, tmp_path: Any) -> None:
    storage = await Storage.open(f"sqlite:///{tmp_path}/t.db", "t")
    tracker = await Tracker.open(storage, TrackerOptions(admit_dark=True), ManualClock())
    try:
        await register(tracker, "head", worker((0, 2)), warm_up_step_us=100)
        await register(tracker, "other", worker((2, 4), **{field: "x"}), warm_up_step_us=1)
        with pytest.raises(ControlError) as caught:
            await select(tracker)
        assert caught.value.reason is Reason.NO_ROUTE
        await register(tracker, "tail", worker((2, 4)), warm_up_step_us=900)
        assert await select(tracker) == ["head", "tail"]
        # Of equal ones, the faster.
        await register(tracker, "quick", worker((2, 4)), warm_up_step_us=300)
        assert await select(tracker) == ["head", "quick"]
    finally:
        await tracker.close()
        await storage.close()
