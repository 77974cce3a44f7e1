"""Tracker and routing serve two fake backends that have nothing in common, and mix neither."""

from __future__ import annotations

import asyncio
import itertools
import pathlib
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from meshnet.errors import ControlError, Reason
from meshnet.testing.manual_clock import ManualClock
from meshnet.testing.running_tracker import running
from meshnet.tests.fake_backends import FakeBackend, FakeGgufBackend, FakeTransformersBackend
from meshnet.tracker import Tracker

from proto.meshnet.control.v1 import tracker_pb2 as pb

BACKENDS: list[FakeBackend] = [FakeGgufBackend(), FakeTransformersBackend()]


async def register(tracker: Tracker, requests: Iterable[pb.RegisterRequest]) -> dict[str, int]:
    """The generations by worker."""
    waiting = list(requests)
    answers = await asyncio.gather(*(tracker.register(request) for request in waiting))
    return {
        request.registration.worker_id: answer.generation
        for request, answer in zip(waiting, answers, strict=True)
    }


async def select(tracker: Tracker, **fields: Any) -> pb.RouteResponse:
    return await tracker.select_route(pb.SelectRouteRequest(**({"model_id": "model"} | fields)))


def names(route: pb.RouteResponse) -> list[str]:
    return [hop.worker_id for hop in route.hops]


def assert_complete(route: pb.RouteResponse, units: int) -> None:
    """Every unit once, in order, no worker twice."""
    spans = [(hop.span.begin, hop.span.end) for hop in route.hops]
    assert [begin for begin, _ in spans] == [0, *(end for _, end in spans[:-1])]
    assert spans[-1][1] == units == route.model_units
    assert len(set(names(route))) == len(spans)
    assert route.total_us == sum(hop.stage_us + hop.seam_us for hop in route.hops)


@pytest.fixture
def database(tmp_path: pathlib.Path) -> str:
    return f"sqlite:///{tmp_path}/t.db"


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: type(backend).__name__)
@pytest.mark.parametrize("parts", [1, 2, 3, 6])
async def test_each_backend_is_routed_in_its_own_units(
    backend: FakeBackend, parts: int, database: str
) -> None:
    async with running(database, ManualClock()) as tracker:
        workers = backend.workers(parts)
        await register(tracker, workers)
        route = await select(tracker)
        assert_complete(route, backend.units)
        assert names(route) == [worker.registration.worker_id for worker in workers]


async def test_backends_of_one_model_are_never_mixed(database: str) -> None:
    gguf, eager = (backend.workers(3) for backend in BACKENDS)
    async with running(database, ManualClock()) as tracker:
        await register(tracker, [*gguf[:2], *eager[1:]])
        with pytest.raises(ControlError) as error:
            await select(tracker)
        assert error.value.reason is Reason.NO_ROUTE
        # Units of 12 are as complete as those of 45, each by its own count.
        await register(tracker, eager[:1])
        assert names(await select(tracker)) == ["eager-0", "eager-15", "eager-29"]
        await register(tracker, gguf[2:])
        assert names(await select(tracker)) == ["gguf-0", "gguf-4", "gguf-8"]  # the cheaper one
        other = eager[0].registration.fingerprint
        assert names(await select(tracker, fingerprint=other)) == names(
            await select(tracker, avoid_worker_ids=["gguf-4"])
        )


async def test_load_and_failure_move_sessions_between_backends(database: str) -> None:
    gguf, eager = (backend.workers(2) for backend in BACKENDS)
    async with running(database, ManualClock()) as tracker:
        generations = await register(tracker, [*gguf, *eager])
        assert names(await select(tracker, session_id="s")) == ["gguf-0", "gguf-6"]
        busy = pb.HeartbeatRequest(
            worker_id="gguf-6",
            generation=generations["gguf-6"],
            load=pb.Load(ready=True, queued_steps=3),
        )
        await tracker.heartbeat(busy)
        assert names(await select(tracker)) == ["eager-0", "eager-22"]
        await tracker.deregister(pb.DeregisterRequest(worker_id="eager-22"))
        assert names(await select(tracker)) == ["gguf-0", "gguf-6"]
        # A session stays with its fingerprint: nothing of its state means anything elsewhere.
        await register(tracker, eager)
        lost = pb.RerouteRequest(session_id="s", epoch=1, failed_worker_ids=["gguf-6"])
        with pytest.raises(ControlError) as error:
            await tracker.reroute(lost)
        assert error.value.reason is Reason.NO_ROUTE


WORDS = st.text("abcdefghijklmnopqrstuvwxyz-", min_size=1, max_size=12)


@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(fingerprint=WORDS, model=WORDS, labels=st.dictionaries(WORDS, WORDS, max_size=3))
async def test_no_name_means_anything(
    fingerprint: str, model: str, labels: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The same workers under other words get the same route."""
    folder = tmp_path_factory.mktemp("names")
    async with running(f"sqlite:///{folder}/t.db", ManualClock()) as tracker:
        fields = {"fingerprint": fingerprint, "model_id": model, "labels": labels}
        await register(
            tracker,
            (
                pb.RegisterRequest(
                    registration=_renamed(worker.registration, fields), load=worker.load
                )
                for worker in [*POOL.best, *POOL.worse]
            ),
        )
        found = await select(tracker, model_id=model, fingerprint=fingerprint)
        assert names(found) == [f"re-{w.registration.worker_id}" for w in POOL.best]


def _renamed(registration: pb.Registration, fields: dict[str, Any]) -> pb.Registration:
    found = pb.Registration()
    found.CopyFrom(registration)
    found.worker_id = f"re-{found.worker_id}"
    other = found.fingerprint != POOL.best[0].registration.fingerprint
    found.fingerprint = fields["fingerprint"] + ("-other" if other else "")
    found.model_id = fields["model_id"]
    found.labels.clear()
    found.labels.update(fields["labels"])
    return found


class Pool:
    """Twelve stages that fit, beside workers that are slower, busy, unready, dark or other."""

    UNITS = 36

    def __init__(self, stages: int = 12, seed: int = 1) -> None:
        noise = random.Random(seed)
        inner = sorted(noise.sample(range(1, self.UNITS), stages - 1))
        self.spans = list(itertools.pairwise([0, *inner, self.UNITS]))
        self.best = [self._worker(f"best-{i}", span, 100) for i, span in enumerate(self.spans)]
        self.worse = [
            *(self._worker(f"slow-{i}", s, noise.randint(150, 900)) for i, s in self._some(noise)),
            *(self._worker(f"busy-{i}", s, 60, queued_steps=5) for i, s in self._some(noise)),
            *(self._worker(f"full-{i}", s, 1, open_sessions=8) for i, s in self._some(noise)),
            *(self._worker(f"unready-{i}", s, 1, ready=False) for i, s in self._some(noise)),
            *(self._worker(f"other-{i}", s, 1, fingerprint="g") for i, s in self._some(noise)),
            # Spans that fit nothing beside them.
            *(
                self._worker(f"odd-{i}", (a, b - 1), 1)
                for i, (a, b) in self._some(noise)
                if b > a + 1
            ),
        ]

    def _some(self, noise: random.Random) -> Sequence[tuple[int, tuple[int, int]]]:
        # Not all: other fingerprints and unready workers alone must never be complete.
        return noise.sample(list(enumerate(self.spans)), len(self.spans) - 1)

    def _worker(
        self, name: str, span: tuple[int, int], step_us: int, fingerprint: str = "f", **load: Any
    ) -> pb.RegisterRequest:
        return pb.RegisterRequest(
            registration=pb.Registration(
                worker_id=name,
                node_id=f"node-{name}",
                endpoint=f"{name}:1",
                model_id="model",
                fingerprint=fingerprint,
                span=pb.Span(begin=span[0], end=span[1]),
                model_units=self.UNITS,
                max_sessions=8,
                step_us=step_us,
                access_latency_us=10,
            ),
            load=pb.Load(**({"ready": True} | load)),
        )


POOL = Pool()


@pytest.mark.parametrize(("stages", "seed"), [(10, 1), (12, 2), (24, 3)])
async def test_many_stages_beside_worse_candidates(stages: int, seed: int, database: str) -> None:
    pool = Pool(stages, seed)
    clock = ManualClock()
    everybody = [*pool.best, *pool.worse]
    random.Random(seed).shuffle(everybody)
    best = [worker.registration.worker_id for worker in pool.best]
    async with running(database, clock) as tracker:
        generations = await register(tracker, everybody)
        route = await select(tracker, session_id="s")
        assert_complete(route, pool.UNITS)
        assert names(route) == best

        # Load reported by a heartbeat moves exactly that stage; its end moves it back.
        slow = next(w.registration for w in pool.worse if w.registration.worker_id[:5] == "slow-")
        victim = best[int(slow.worker_id[5:])]

        async def report(queued: int) -> list[str]:
            load = pb.Load(ready=True, queued_steps=queued)
            beat = pb.HeartbeatRequest(worker_id=victim, generation=generations[victim], load=load)
            await tracker.heartbeat(beat)
            other = await select(tracker)
            assert_complete(other, pool.UNITS)
            await tracker.close_session(pb.CloseSessionRequest(session_id=other.session_id))
            return names(other)

        moved = await report(50)
        assert [(a, b) for a, b in zip(best, moved, strict=True) if a != b] == [
            (victim, moved[best.index(victim)])
        ]
        assert moved[best.index(victim)].startswith(("slow-", "busy-"))
        assert await report(0) == best

        # So does a failure, in the session that had it and in those after it.
        lost = pb.RerouteRequest(session_id="s", epoch=1, failed_worker_ids=[victim])
        rerouted = await tracker.reroute(lost)
        assert_complete(rerouted, pool.UNITS)
        assert victim not in names(rerouted)
        assert rerouted.epoch == 2
        assert victim not in names(await select(tracker))

        # Without anybody for a stage there is no route, and the gap is named.
        begin = pool.spans[best.index(victim)][0]
        for worker in everybody:
            if worker.registration.span.begin == begin:
                gone = pb.DeregisterRequest(worker_id=worker.registration.worker_id)
                await tracker.deregister(gone)
        with pytest.raises(ControlError) as error:
            await select(tracker)
        assert error.value.reason is Reason.NO_ROUTE
        assert f"cover units 0 to {begin} of {pool.UNITS}" in error.value.message


ARRIVED_FIRST: dict[str, list[str]] = {}


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(order=st.randoms(use_true_random=False))
async def test_the_order_of_arrival_does_not_matter(
    order: random.Random, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Ties included: equal workers are told apart by their ids alone."""
    twins = [
        POOL._worker(f"twin-{i}-{n}", s, 100) for i, s in enumerate(POOL.spans) for n in (1, 2)
    ]
    everybody = [*POOL.best, *POOL.worse, *twins]
    order.shuffle(everybody)
    folder = tmp_path_factory.mktemp("order")
    async with running(f"sqlite:///{folder}/t.db", ManualClock()) as tracker:
        await register(tracker, everybody)
        found = names(await select(tracker))
    assert found == ARRIVED_FIRST.setdefault("route", found)
