"""The tracker under ten thousand workers: heartbeats, route selection, on SQLite and PostgreSQL.

One tracker process is held to one core; everything else, PostgreSQL included, has the others. All
workers belong to one lane of 43 units, with spans, loads and measured seams from a fixed seed.

- Heartbeats: a closed loop of many workers; each heartbeat is answered after its commit.
- Selection: one route after the other, each committed as a session and closed again, while
  heartbeats go on at BACKGROUND_BEATS a second; then the same at FULL_BEATS.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import random
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import grpc.aio
from meshnet.testing.postgres import PostgresServer
from meshnet.testing.tracker_process import TrackerProcess

from benchmarks.control.cores import hold_to
from benchmarks.control.metrics import Metric, Settings, at_least, at_most, percentile, say
from proto.meshnet.control.v1 import tracker_pb2 as pb
from proto.meshnet.control.v1 import tracker_pb2_grpc

__all__ = ["measure"]

UNITS = 43
BACKGROUND_BEATS = 1000
# What a tracker is to take; selection beside it has no bar, but users would expect one.
FULL_BEATS = 2000
_CHANNELS = 16
_IN_FLIGHT = 256
_TICK_SECONDS = 0.005
_LEASE_MS = 3_600_000
_SEAM_BYTES = 32_768


async def measure(settings: Settings) -> AsyncIterator[Metric]:
    """See the module."""
    beats: dict[str, float] = {}
    with PostgresServer.start() as server:
        databases = {
            "sqlite": f"sqlite:///{settings.folder}/tracker.db",
            "postgresql": server.url("benchmark"),
        }
        for name, database in databases.items():
            async for metric in _measure(name, database, settings):
                if metric.name.startswith("tracker_heartbeats_per_s"):
                    beats[name] = metric.value
                yield metric
    yield Metric(
        "tracker_heartbeats_sqlite_by_postgresql",
        beats["sqlite"] / beats["postgresql"],
        "",
        at_most(3),
    )


async def _measure(name: str, database: str, settings: Settings) -> AsyncIterator[Metric]:
    count = 200 if settings.quick else 10_000
    seconds = 0.5 if settings.quick else 10.0
    selections = 20 if settings.quick else 1000
    tracker = await TrackerProcess.start(database, "--admit_dark", f"--lease_ms={_LEASE_MS}")
    async with tracker, _Load.open(tracker, count) as load:
        hold_to(tracker.pid, settings.core)
        started = time.perf_counter()
        await load.register()
        say(f"{name}: {count} workers registered in {time.perf_counter() - started:.1f} s")
        used = tracker.cpu_seconds()
        rate = await load.beat(seconds)
        share = (tracker.cpu_seconds() - used) / seconds
        yield Metric(f"tracker_heartbeats_per_s_{name}", rate, "1/s", at_least(2000))
        yield Metric(f"tracker_heartbeats_core_share_{name}", share, "")
        took, offered = await load.select(selections, BACKGROUND_BEATS)
        yield Metric(f"tracker_select_p50_ms_{name}", percentile(took, 0.5), "ms")
        yield Metric(f"tracker_select_p99_ms_{name}", percentile(took, 0.99), "ms", at_most(20))
        yield Metric(f"tracker_select_beats_per_s_{name}", offered, "1/s")
        took, offered = await load.select(selections // 2, FULL_BEATS)
        yield Metric(f"tracker_select_full_load_p50_ms_{name}", percentile(took, 0.5), "ms")
        yield Metric(f"tracker_select_full_load_p99_ms_{name}", percentile(took, 0.99), "ms")
        yield Metric(f"tracker_select_full_load_beats_per_s_{name}", offered, "1/s")


class _Load:
    """All the workers' side. Made by open()."""

    def __init__(self, stubs: Sequence[Any], count: int) -> None:
        self._stubs = stubs
        self._random = random.Random(43)  # noqa: S311
        self._requests = [self._registration(index, count) for index in range(count)]
        self._beats: list[pb.HeartbeatRequest] = []
        self.beaten = 0

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, tracker: TrackerProcess, count: int) -> AsyncIterator[_Load]:
        """Connects while the block runs."""
        options = (("grpc.use_local_subchannel_pool", 1),)  # connections of their own
        channels = [
            grpc.aio.insecure_channel(tracker.endpoint, options=options) for _ in range(_CHANNELS)
        ]
        try:
            yield cls([tracker_pb2_grpc.TrackerServiceStub(channel) for channel in channels], count)
        finally:
            for channel in channels:
                await channel.close(None)

    def _registration(self, index: int, count: int) -> pb.RegisterRequest:
        noise = self._random
        begin = noise.choice([0, *range(UNITS)])  # heads are needed more often
        length = noise.randint(3, 20)
        node = index // 2
        return pb.RegisterRequest(
            registration=pb.Registration(
                worker_id=f"worker-{index}",
                node_id=f"node-{node}",
                endpoint=f"10.0.{node >> 8}.{node & 255}:{7000 + index % 2}",
                model_id="model",
                fingerprint="f" * 64,
                span=pb.Span(begin=begin, end=min(begin + length, UNITS)),
                model_units=UNITS,
                max_sessions=64,
                step_us=length * noise.randint(300, 3000),
                access_latency_us=noise.randint(200, 40_000),
                access_bytes_per_second=noise.randint(1, 100) * 1_000_000,
                seams=self._seams(count),
            ),
            load=pb.Load(ready=True),
        )

    def _seams(self, count: int) -> list[pb.SeamMeasurement]:
        return [
            pb.SeamMeasurement(
                peer_node_id=f"node-{peer}",
                round_trip_us=self._random.randint(100, 60_000),
                bytes_per_second=self._random.randint(1, 100) * 1_000_000,
            )
            for peer in self._random.sample(range(count // 2), 8)
        ]

    async def register(self) -> None:
        """All of them."""
        generations: dict[int, int] = {}
        waiting = iter(range(len(self._requests)))

        async def one(stub: Any) -> None:
            for index in waiting:
                answer = await stub.Register(self._requests[index])
                generations[index] = answer.generation

        await asyncio.gather(*(one(stub) for stub in self._in_flight()))
        for index, request in enumerate(self._requests):
            load = pb.Load(
                ready=True,
                open_sessions=self._random.randint(0, 8),
                queued_steps=self._random.choice([0, 0, 0, 1, 2]),
                step_us=request.registration.step_us + self._random.randint(-200, 200),
            )
            if index % 10 == 0:  # measured anew now and then
                load.seams.extend(request.registration.seams)
            name = request.registration.worker_id
            self._beats.append(
                pb.HeartbeatRequest(worker_id=name, generation=generations[index], load=load)
            )
        self._random.shuffle(self._beats)
        # This process's own pauses are not the tracker's.
        gc.collect()
        gc.freeze()

    def _in_flight(self) -> Iterator[Any]:
        return itertools.islice(itertools.cycle(self._stubs), _IN_FLIGHT)

    async def beat(self, seconds: float) -> float:
        """Heartbeats a second over that time, each worker waiting for its answer."""
        started = time.perf_counter()
        before = self.beaten

        async def one(stub: Any) -> None:
            while time.perf_counter() - started < seconds:
                await self._beat(stub)

        await asyncio.gather(*(one(stub) for stub in self._in_flight()))
        return (self.beaten - before) / (time.perf_counter() - started)

    async def _beat(self, stub: Any) -> None:
        self.beaten += 1
        await stub.Heartbeat(self._beats[self.beaten % len(self._beats)])

    async def _beat_steadily(self, rate: float, ended: asyncio.Event) -> None:
        """Heartbeats at a rate, until the end, whether or not they are answered in time."""
        started, sent = time.perf_counter(), 0
        async with asyncio.TaskGroup() as group:
            while not ended.is_set():
                await asyncio.sleep(_TICK_SECONDS)
                due = int((time.perf_counter() - started) * rate)
                for stub in itertools.islice(self._in_flight(), due - sent):
                    group.create_task(self._beat(stub))
                sent = due

    async def select(self, times: int, beats_per_s: float) -> tuple[list[float], float]:
        """Milliseconds of each selection, and how many heartbeats a second there were."""
        ended = asyncio.Event()
        background = asyncio.create_task(self._beat_steadily(beats_per_s, ended))
        begun, before = time.perf_counter(), self.beaten
        took = []
        for number in range(times):
            request = pb.SelectRouteRequest(
                session_id=f"session-{number}", model_id="model", seam_bytes=_SEAM_BYTES
            )
            stub = self._stubs[number % _CHANNELS]
            started = time.perf_counter()
            await stub.SelectRoute(request)
            took.append(1000 * (time.perf_counter() - started))
            await stub.CloseSession(pb.CloseSessionRequest(session_id=request.session_id))
        offered = (self.beaten - before) / (time.perf_counter() - begun)
        ended.set()
        await background
        return took, offered
