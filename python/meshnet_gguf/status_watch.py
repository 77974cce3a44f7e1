"""Watches a model's route: who holds which layers, how they fare, and what lies between them.

    watch = ModelWatch("smollm2", NamedWorkers(["127.0.0.1:7001", "127.0.0.1:7002"]))
    async with contextlib.aclosing(watch):
        await watch.read()              # has no rates yet
        await asyncio.sleep(1)
        status = await watch.read()     # a ModelStatus

Where routes come from a tracker, `TrackedWorkers(tracker, "smollm2")` takes the place of
`NamedWorkers`. Reading opens no session and never fails: what could not be had is in the status.
"""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from meshnet.errors import ControlError
from meshnet.routing import Candidate, Demand, LaneIndex, Seam, cheapest_mixed
from meshnet.tracker_client import TrackerClient
from meshnet.transport import Security

from meshnet_gguf.client import (
    Capability,
    Endpoint,
    Health,
    Metrics,
    WorkerClient,
    WorkerState,
    check_route,
)
from meshnet_gguf.errors import MeshnetError, reason_name
from meshnet_gguf.registration import MACHINE_MEMORY_LABEL
from meshnet_gguf.status import (
    Admission,
    LaneStatus,
    LaneWorker,
    Memory,
    MixtureStatus,
    ModelStatus,
    Problem,
    SeamStatus,
    StageState,
    StageStatus,
    Work,
)
from proto.meshnet.control.v1 import tracker_pb2
from proto.meshnet.shard.v1 import errors_pb2

__all__ = ["ModelWatch", "NamedWorkers", "TrackedWorkers", "WorkerSource"]

_ANSWER_SECONDS = 2.0
# What rates are taken over: less of it jumps, more of it is late.
_RATE_SECONDS = 4.0
# A mesh may be large; a page is not. What is left out is counted.
_MAX_LANE_WORKERS = 128
_MAX_HELD = 256
_CANCELLED = reason_name(errors_pb2.REASON_CANCELLED)
_ADMISSIONS = {
    tracker_pb2.ADMISSION_CERTIFIED: Admission.CERTIFIED,
    tracker_pb2.ADMISSION_DARK_ADMITTED: Admission.DARK_ADMITTED,
}
_STATES = {
    WorkerState.READY: StageState.READY,
    WorkerState.DRAINING: StageState.DRAINING,
    WorkerState.FAILED: StageState.FAILED,
}
_NAMED_REASON = "its workers are named by hand, and no tracker knows a record of it"
_WITHDRAWN = "its registration is gone: its node took it back, or its lease ran out"


@dataclass(frozen=True)
class _Worker:
    """A worker and what is known of it; `layers` is None as long as nobody has said.

    `ready` is the tracker's word, None without one. `seams` are by the other machine.
    """

    worker: str
    machine: str
    endpoint: str
    relay: str = ""
    layers: tuple[int, int] | None = None
    fingerprint: str = ""
    ready: bool | None = None
    unroutable: str = ""
    machine_bytes: int | None = None
    open_sessions: int = 0
    max_sessions: int = 1
    queued_steps: int = 0
    step_us: int = 0
    reliability: float = 1.0
    access_latency_us: int = 0
    access_bytes_per_second: int = 0
    seams: Mapping[str, Seam] = field(default_factory=dict)

    def candidate(self, *, is_lost: bool) -> Candidate:
        """For the choice of a route."""
        assert self.layers is not None
        return Candidate(
            self.worker,
            self.machine,
            self.layers,
            self.step_us,
            max(1, self.max_sessions),
            self.access_latency_us,
            self.access_bytes_per_second,
            self.seams,
            queued_steps=self.queued_steps,
            reliability=self.reliability,
            usable=not (self.unroutable or is_lost),
        )


@dataclass(frozen=True)
class _Survey:
    """Who there is, and what is thought of each recipe (admission and why) where anybody thinks."""

    workers: tuple[_Worker, ...]
    layers: int = 0
    trackers: tuple[str, ...] = ()
    admissions: Mapping[str, tuple[Admission, str]] = field(default_factory=dict)
    mixtures: tuple[MixtureStatus, ...] = ()

    def admission(self, fingerprint: str) -> tuple[Admission, str]:
        """What is thought of a recipe; of one that nobody judges, that it is used all the same."""
        return self.admissions.get(fingerprint, (Admission.DARK_ADMITTED, _NAMED_REASON))


class WorkerSource(Protocol):
    """Where a watch hears of workers."""

    security: Security | None

    async def survey(self) -> _Survey:
        """The workers of the model. Raises ControlError."""


class NamedWorkers:
    """Workers that somebody has named, in any order."""

    def __init__(
        self,
        endpoints: Sequence[str | Endpoint],
        *,
        security: Security | None = None,
    ) -> None:
        where = [Endpoint(item) if isinstance(item, str) else item for item in endpoints]
        self.security = security
        self._survey = _Survey(
            tuple(
                _Worker(
                    endpoint.address,
                    endpoint.address.rpartition(":")[0],
                    endpoint.address,
                    (endpoint.advertised or "") if endpoint.relay_peer_id else "",
                )
                for endpoint in where
            )
        )

    async def survey(self) -> _Survey:
        """Always the same."""
        return self._survey


class TrackedWorkers:
    """The workers of one model at a tracker."""

    def __init__(
        self,
        tracker: TrackerClient,
        model_id: str,
        *,
        security: Security | None = None,
    ) -> None:
        self.security = security
        self._tracker = tracker
        self._model_id = model_id

    async def survey(self) -> _Survey:
        """All with a lease. Raises ControlError."""
        answer = await self._tracker.list_workers(
            tracker_pb2.ListWorkersRequest(model_id=self._model_id)
        )
        admissions = {}
        for status in answer.workers:
            why = status.unroutable.removeprefix("dark: ")
            admission = _ADMISSIONS.get(status.admission, Admission.DARK)
            if admission is Admission.DARK_ADMITTED:
                why = "no valid certification record; the tracker admits dark lanes"
            elif admission is Admission.CERTIFIED:
                why = ""
            admissions[status.registration.fingerprint] = (admission, why)
        return _Survey(
            tuple(_of_tracker(status) for status in answer.workers),
            max((status.registration.model_units for status in answer.workers), default=0),
            self._tracker.endpoints,
            admissions,
            tuple(
                MixtureStatus(
                    mixture.head_fingerprint,
                    mixture.tail_fingerprint,
                    mixture.fingerprint,
                    _ADMISSIONS.get(mixture.admission, Admission.DARK),
                    mixture.admission_reason,
                )
                for mixture in answer.mixtures
            ),
        )


def _of_tracker(status: tracker_pb2.WorkerStatus) -> _Worker:
    registration, load = status.registration, status.load
    memory = registration.labels.get(MACHINE_MEMORY_LABEL, "")
    return _Worker(
        registration.worker_id,
        registration.node_id,
        registration.endpoint,
        registration.relay,
        (registration.span.begin, registration.span.end),
        registration.fingerprint,
        load.ready,
        status.unroutable,
        int(memory) if memory.isascii() and memory.isdecimal() and len(memory) < 20 else None,
        max(load.open_sessions, status.assigned_sessions),
        registration.max_sessions,
        load.queued_steps,
        load.step_us or registration.step_us,
        status.reliability,
        registration.access_latency_us,
        registration.access_bytes_per_second,
        {
            seam.peer_node_id: Seam(seam.round_trip_us, seam.bytes_per_second)
            for seam in (load.seams or registration.seams)
        },
    )


class _Probe:
    """One worker, asked again and again, and what it said."""

    def __init__(self, endpoint: str, source: WorkerSource, clock: Callable[[], float]) -> None:
        self.capability: Capability | None = None
        self.health: Health | None = None
        self.metrics: Metrics | None = None
        self.error: MeshnetError | None = None
        self._endpoint = endpoint
        self._source = source
        self._client: WorkerClient | None = None
        self._clock = clock
        self._readings: collections.deque[tuple[float, Metrics]] = collections.deque()

    async def close(self) -> None:
        """Closes the connection."""
        if self._client is not None:
            await self._client.close()

    async def ask(self) -> None:
        """A new reading, or why there is none."""
        try:
            if self._client is None:
                self._client = WorkerClient(
                    self._endpoint,
                    security=self._source.security,
                    timeout=_ANSWER_SECONDS,
                )
            if self.capability is None or self.error is not None:
                # Another worker may have taken its address.
                self.capability = await self._client.capability()
            self.health, metrics = await asyncio.gather(
                self._client.health(), self._client.metrics()
            )
        except MeshnetError as error:
            self._failed(error)
        else:
            self.error = None
            self._count(metrics)

    def _failed(self, error: MeshnetError) -> None:
        self.error, self.metrics = error, None
        self._readings.clear()

    def _count(self, metrics: Metrics) -> None:
        now = self._clock()
        if self.metrics is not None and metrics.engine_calls < self.metrics.engine_calls:
            self._readings.clear()  # it is another process
        self.metrics = metrics
        self._readings.append((now, metrics))
        while len(self._readings) > 2 and self._readings[1][0] <= now - _RATE_SECONDS:
            self._readings.popleft()

    def rate(self, counter: Callable[[Metrics], int]) -> float | None:
        """How fast a counter grows, per second; None before the second reading."""
        if len(self._readings) < 2:
            return None
        (began, first), (ended, last) = self._readings[0], self._readings[-1]
        return (counter(last) - counter(first)) / max(ended - began, 1e-3)


@dataclass(frozen=True)
class _Gap:
    """Layers that nobody holds."""

    begin: int
    end: int


class ModelWatch:
    """One model, read as often as one likes, by one reader at a time. Close it with aclose()."""

    def __init__(
        self, name: str, source: WorkerSource, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = name
        self._source = source
        self._clock = clock
        self._probes: dict[str, _Probe] = {}
        self._survey = _Survey(())
        self._layers = 0
        # The stages as they were when somebody last held them.
        self._held: dict[tuple[int, int], StageStatus] = {}
        self._route: tuple[str, ...] = ()

    async def aclose(self) -> None:
        """Closes the connections."""
        probes, self._probes = self._probes, {}
        await asyncio.gather(*(probe.close() for probe in probes.values()))

    async def read(self) -> ModelStatus:
        """The model now."""
        problem: Problem | None = None
        try:
            self._survey = await self._source.survey()
        except ControlError as error:
            problem = Problem(
                reason_name(errors_pb2.REASON_NO_ROUTE), f"the tracker does not answer: {error}"
            )
        survey = self._survey
        if not survey.trackers:
            survey = await self._named(survey)
        self._layers = survey.layers or self._layers
        chain = self._chain(survey)
        workers = [part for part in chain if isinstance(part, _Worker)]
        if survey.trackers:
            await self._ask([w for w in workers if w is chain[0] or not w.relay])
        if problem is None and workers:
            admission, why = survey.admission(workers[0].fingerprint)
            if admission is Admission.DARK:
                message = f"the lane is dark: {why}"
                problem = Problem(reason_name(errors_pb2.REASON_NO_ROUTE), message)
        stages = self._stages(chain, survey)
        status = ModelStatus(
            self.name,
            self._layers,
            survey.trackers,
            problem or self._problem(stages, survey),
            stages,
            self._seams(stages, survey),
            _lanes(survey),
            survey.mixtures,
        )
        await self._forget(survey)
        return status

    async def _ask(self, workers: Sequence[_Worker]) -> None:
        for worker in workers:
            if worker.endpoint not in self._probes:
                self._probes[worker.endpoint] = _Probe(worker.endpoint, self._source, self._clock)
        await asyncio.gather(*(self._probes[worker.endpoint].ask() for worker in workers))

    async def _forget(self, survey: _Survey) -> None:
        known = {worker.endpoint for worker in survey.workers}
        for endpoint in [endpoint for endpoint in self._probes if endpoint not in known]:
            await self._probes.pop(endpoint).close()

    async def _named(self, survey: _Survey) -> _Survey:
        """Completes what nobody but the workers themselves can tell."""
        await self._ask(survey.workers)
        found = []
        for worker in survey.workers:
            probe = self._probes[worker.endpoint]
            said, metrics = probe.capability, probe.metrics
            if said is not None and 0 <= said.layers.begin < said.layers.end <= said.model_layers:
                worker = replace(
                    worker,
                    layers=(said.layers.begin, said.layers.end),
                    fingerprint=said.recipe_fingerprint,
                    unroutable="" if probe.error is None else probe.error.reason_name,
                    open_sessions=metrics.open_sessions if metrics else 0,
                    max_sessions=said.max_sessions,
                )
            found.append(worker)
        layers = [p.capability.model_layers for p in self._probes.values() if p.capability]
        return replace(survey, workers=tuple(found), layers=max(layers, default=0))

    # ---- The route ----

    def _chain(self, survey: _Survey) -> list[_Worker | _Gap]:
        """The workers of the route that would be taken now, with gaps where it is not complete."""
        lanes: dict[str, list[_Worker]] = {}
        for worker in survey.workers:
            if worker.layers is not None:
                lanes.setdefault(worker.fingerprint, []).append(worker)
        by_id = {worker.worker: worker for worker in survey.workers}
        before = [by_id[name] for name in self._route if name in by_id]
        # A route that still stands stays: the picture does not follow every change of load.
        lost = {where for where, probe in self._probes.items() if probe.error is not None}
        stands = not any(w.unroutable or w.endpoint in lost for w in before)
        if len(before) == len(self._route) > 0 and stands:
            chain = _joined(before, self._layers)
            if not any(isinstance(part, _Gap) for part in chain):
                return chain
        best: list[_Worker | _Gap] = []
        cost: tuple[float, ...] = ()
        indexes: dict[str, LaneIndex] = {}
        for fingerprint, workers in sorted(lanes.items()):
            admission, _ = survey.admission(fingerprint)
            index = indexes[fingerprint] = LaneIndex(self._layers)
            for worker in workers:
                index.put(worker.candidate(is_lost=worker.endpoint in lost))
            chosen = index.cheapest(Demand(0))
            if chosen is not None and admission is not Admission.DARK:
                chain = [by_id[stage.worker_id] for stage in chosen.stages]
                found: tuple[float, ...] = (0, 0, chosen.total_us)
            else:
                preferred = sorted(
                    workers, key=lambda w: (w.worker not in self._route, w.unroutable != "")
                )
                chain = _joined(preferred, self._layers)
                missing = sum(part.end - part.begin for part in chain if isinstance(part, _Gap))
                found = (1, admission is Admission.DARK, missing)
            if not cost or found < cost:
                best, cost = chain, found
        for mixture in survey.mixtures:
            head = indexes.get(mixture.head_fingerprint)
            tail = indexes.get(mixture.tail_fingerprint)
            # As trackers do: only where no lane has a route of its own.
            if mixture.admission is Admission.DARK or not head or not tail or cost[:2] == (0, 0):
                continue
            chosen = cheapest_mixed(head, tail, Demand(0))
            if chosen is not None and (found := (0, 1, chosen.total_us)) < cost:
                best, cost = [by_id[stage.worker_id] for stage in chosen.stages], found
        if not best and self._layers:
            best = [_Gap(0, self._layers)]
        chosen_ids = tuple(part.worker for part in best if isinstance(part, _Worker))
        self._route = chosen_ids or self._route
        return best

    def _stages(self, chain: Sequence[_Worker | _Gap], survey: _Survey) -> tuple[StageStatus, ...]:
        stages: list[StageStatus] = []
        # Named workers that have never said what they hold.
        silent = [worker for worker in survey.workers if worker.layers is None]
        for part in chain:
            if isinstance(part, _Worker):
                stage = self._stage(part)
                if stage.state is not StageState.LOST:
                    if len(self._held) >= _MAX_HELD:
                        self._held.clear()
                    self._held[stage.begin, stage.end] = stage
                stages.append(stage)
            elif silent:
                stages.append(self._silent(silent.pop(0), part))
            else:
                stages += self._absent(part)
        return tuple(stages)

    def _stage(self, worker: _Worker) -> StageStatus:
        assert worker.layers is not None
        probe = self._probes.get(worker.endpoint)
        stage = StageStatus(
            *worker.layers,
            StageState.READY if worker.ready else StageState.LOADING,
            worker.worker,
            worker.machine,
            worker.endpoint,
            worker.relay,
            memory=Memory(machine_bytes=worker.machine_bytes),
            work=Work(worker.open_sessions, worker.max_sessions, worker.queued_steps),
        )
        said = probe.capability if probe is not None else None
        if (
            probe is None
            or said is None
            or (said.layers.begin, said.layers.end) != worker.layers
            or said.recipe_fingerprint != worker.fingerprint
        ):
            # The tracker's word is all there is: the worker cannot be dialled from here.
            return stage
        stage = replace(stage, engine=said.engine, evidence=said.evidence)
        if probe.error is not None:
            return _lost(stage, Problem(probe.error.reason_name, probe.error.message))
        health, metrics = probe.health, probe.metrics
        assert health is not None
        assert metrics is not None
        return replace(
            stage,
            state=_STATES.get(health.state, StageState.LOADING),
            problem=Problem(health.reason, health.message) if health.reason else None,
            memory=Memory(
                metrics.owned_tensor_bytes,
                metrics.kv_bytes,
                metrics.kv_budget_bytes,
                metrics.resident_bytes,
                worker.machine_bytes,
            ),
            work=Work(
                metrics.open_sessions,
                said.max_sessions,
                metrics.queued_steps,
                metrics.prefill_tokens,
                metrics.decode_tokens,
                probe.rate(lambda m: m.prefill_tokens),
                probe.rate(lambda m: m.decode_tokens),
            ),
            refusals={
                reason: times
                for reason, times in metrics.refusals.items()
                # A worker counts them all alike; who stops an answer was not refused.
                if reason != _CANCELLED
            },
        )

    def _silent(self, worker: _Worker, gap: _Gap) -> StageStatus:
        error = self._probes[worker.endpoint].error
        assert error is not None
        return StageStatus(
            gap.begin,
            gap.end,
            StageState.LOST,
            worker.worker,
            worker.machine,
            worker.endpoint,
            worker.relay,
            problem=Problem(error.reason_name, error.message),
        )

    def _absent(self, gap: _Gap) -> list[StageStatus]:
        """Who held the layers of a gap before, or that nobody is known to."""
        stages = []
        begin = gap.begin
        while begin < gap.end:
            before = [
                stage
                for (first, last), stage in self._held.items()
                if first == begin and last <= gap.end
            ]
            if not before:
                break
            problem = Problem(reason_name(errors_pb2.REASON_PEER_LOST), _WITHDRAWN)
            stages.append(_lost(before[-1], problem))
            begin = stages[-1].end
        if begin < gap.end:
            message = f"nobody is known to hold layers [{gap.begin}, {gap.end})"
            problem = Problem(reason_name(errors_pb2.REASON_NO_ROUTE), message)
            return [StageStatus(gap.begin, gap.end, StageState.MISSING, problem=problem)]
        return stages

    def _problem(self, stages: Sequence[StageStatus], survey: _Survey) -> Problem | None:
        """What keeps the route from working."""
        for stage in stages:
            if stage.state is not StageState.READY:
                where = f"layers [{stage.begin}, {stage.end}) are {stage.state}"
                if stage.problem is None:
                    return Problem(reason_name(errors_pb2.REASON_NOT_READY), where)
                return Problem(stage.problem.reason, f"{where}: {stage.problem.message}")
        if survey.trackers or not stages:
            unheard = [p.error for p in self._probes.values() if p.error is not None]
            if not stages and unheard:
                return Problem(unheard[0].reason_name, unheard[0].message)
            if not stages:
                return Problem(
                    reason_name(errors_pb2.REASON_NO_ROUTE), "no worker is known for this model"
                )
            return None
        said = [(w.endpoint, self._probes[w.endpoint].capability) for w in survey.workers]
        try:
            check_route([(endpoint, capability) for endpoint, capability in said if capability])
        except MeshnetError as error:
            return Problem(error.reason_name, error.message)
        return None

    # ---- What lies between ----

    def _seams(self, stages: Sequence[StageStatus], survey: _Survey) -> tuple[SeamStatus, ...]:
        if len(stages) < 2:
            return ()
        last = len(stages) - 1
        found = [
            self._seam(stages, at, at + 1, survey, lambda m: m.seam_bytes_sent)
            for at in range(last)
        ]
        return (*found, self._seam(stages, last, 0, survey, lambda m: m.return_bytes_sent))

    def _seam(
        self,
        stages: Sequence[StageStatus],
        source: int,
        target: int,
        survey: _Survey,
        sent: Callable[[Metrics], int],
    ) -> SeamStatus:
        ends = [
            worker
            for at in (source, target)
            for worker in survey.workers
            if worker.worker == stages[at].worker and stages[at].state is not StageState.LOST
        ]
        if len(ends) < 2:
            return SeamStatus(source, target, relay=stages[target].relay)
        one, other = ends
        measured = [
            seam
            for seam in (one.seams.get(other.machine), other.seams.get(one.machine))
            if seam is not None
        ]
        slower = max(measured, key=lambda s: (s.round_trip_us, -s.bytes_per_second), default=None)
        probe = self._probes.get(one.endpoint)
        return SeamStatus(
            source,
            target,
            slower.round_trip_us if slower else None,
            (slower.bytes_per_second or None) if slower else None,
            probe.rate(sent) if probe is not None else None,
            stages[target].relay,
        )


def _lanes(survey: _Survey) -> tuple[LaneStatus, ...]:
    lanes: dict[str, list[LaneWorker]] = {}
    for worker in survey.workers:
        if worker.layers is not None:
            lanes.setdefault(worker.fingerprint, []).append(
                LaneWorker(
                    worker.worker,
                    worker.machine,
                    *worker.layers,
                    worker.open_sessions,
                    worker.max_sessions,
                    worker.unroutable,
                )
            )
    found = []
    for fingerprint, workers in sorted(lanes.items()):
        workers.sort(key=lambda worker: (worker.begin, worker.end, worker.worker))
        shown = tuple(workers[:_MAX_LANE_WORKERS])
        unlisted = len(workers) - len(shown)
        found.append(LaneStatus(fingerprint, *survey.admission(fingerprint), shown, unlisted))
    return tuple(found)


def _joined(workers: Sequence[_Worker], layers: int) -> list[_Worker | _Gap]:
    """A chain over all layers, the earlier workers preferred, with gaps where nobody begins."""
    chain: list[_Worker | _Gap] = []
    covered = 0
    while covered < layers:
        held = [(w, w.layers) for w in workers if w.layers is not None and w.layers[1] > covered]
        here = next((w for w, (begin, _) in held if begin == covered), None)
        if here is not None and here.layers is not None:
            chain.append(here)
            covered = here.layers[1]
        else:
            following = min((b for _, (b, _) in held if b > covered), default=layers)
            chain.append(_Gap(covered, following))
            covered = following
    return chain


def _lost(stage: StageStatus, problem: Problem) -> StageStatus:
    """A stage whose worker is gone: what it did and held is gone with it."""
    return replace(
        stage,
        state=StageState.LOST,
        problem=problem,
        memory=Memory(machine_bytes=stage.memory.machine_bytes),
        work=Work(),
        refusals={},
    )
