"""Workers' metrics for Prometheus: what a node exports for the workers that it supervises.

    telemetry = Telemetry("node")
    telemetry.registry.register(WorkerMetrics(lambda: {"w1": client}))
    with telemetry.serve("127.0.0.1:9102"):
        ...

A worker serves gRPC and nothing else (docs/adr/0017-metrics.md); whoever scrapes this asks it. All
names are in docs/metrics.md.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from meshnet_gguf.client import Histogram, Metrics, WorkerClient
from meshnet_gguf.errors import MeshnetError

__all__ = ["WorkerMetrics", "families"]

_PREFIX = "meshnet_worker_"
# Name, what it is, how to read it.
_GAUGES: tuple[tuple[str, str, Callable[[Metrics], float]], ...] = (
    ("resident_bytes", "Memory of the process.", lambda m: m.resident_bytes),
    ("owned_tensor_bytes", "Weights of its layers.", lambda m: m.owned_tensor_bytes),
    ("cache_bytes", "Cached tokens of its sessions.", lambda m: m.kv_bytes),
    ("cache_budget_bytes", "What the cache may take.", lambda m: m.kv_budget_bytes),
    ("open_sessions", "Sessions now.", lambda m: m.open_sessions),
    ("queued_steps", "Steps that wait for the engine.", lambda m: m.queued_steps),
    ("queued_bytes", "What those steps hold.", lambda m: m.queued_bytes),
)
# Name, what it is, its label, how to read it.
_COUNTERS: tuple[tuple[str, str, str, Callable[[Metrics], Mapping[str, float]]], ...] = (
    (
        "tokens",
        "Tokens computed.",
        "phase",
        lambda m: {"prefill": m.prefill_tokens, "decode": m.decode_tokens},
    ),
    (
        "engine_seconds",
        "Time in the engine.",
        "phase",
        lambda m: {"prefill": m.prefill_engine_us / 1e6, "decode": m.decode_engine_us / 1e6},
    ),
    ("engine_calls", "Calls of the engine.", "", lambda m: {"": m.engine_calls}),
    (
        "bytes",
        "Bytes on seams and return streams.",
        "way",
        lambda m: {
            "seam_received": m.seam_bytes_received,
            "seam_sent": m.seam_bytes_sent,
            "return_sent": m.return_bytes_sent,
        },
    ),
    (
        "sessions",
        "Sessions opened, and how they ended.",
        "event",
        lambda m: {
            "opened": m.sessions_opened,
            "completed": m.sessions_completed,
            "cancelled": m.sessions_cancelled,
            "failed": m.sessions_failed,
            "evicted": m.sessions_evicted,
        },
    ),
    ("refusals", "Refused calls and messages.", "reason", lambda m: m.refusals),
)
# Name, what it is, its label, how to read it.
_HISTOGRAMS: tuple[tuple[str, str, str, Callable[[Metrics], Mapping[str, Histogram]]], ...] = (
    (
        "hop_seconds",
        "A step's stay at this stage: queue, engine, encoding.",
        "phase",
        lambda m: {"prefill": m.prefill_stay, "decode": m.decode_stay},
    ),
    (
        "seam_connect_seconds",
        "Until the next stage took a call.",
        "",
        lambda m: {"": m.seam_connect},
    ),
    (
        "decode_round_trip_seconds",
        "At the head: from a step's departure to its token.",
        "",
        lambda m: {"": m.decode_round_trip},
    ),
)


def families(found: Mapping[str, Metrics | None]) -> Iterable[Metric]:
    """Prometheus's form of workers' metrics, by their names; None: it does not answer."""
    up = GaugeMetricFamily(f"{_PREFIX}up", "Whether the worker answers.", labels=["worker"])
    for name, metrics in found.items():
        up.add_metric([name], float(metrics is not None))
    yield up
    known = {name: metrics for name, metrics in found.items() if metrics is not None}
    for metric, text, read in _GAUGES:
        gauge = GaugeMetricFamily(_PREFIX + metric, text, labels=["worker"])
        for name, metrics in known.items():
            gauge.add_metric([name], read(metrics))
        yield gauge
    for metric, text, label, parts in _COUNTERS:
        counter = CounterMetricFamily(
            _PREFIX + metric, text, labels=["worker", *([label] if label else [])]
        )
        for name, metrics in known.items():
            for part, value in parts(metrics).items():
                counter.add_metric([name, *([part] if label else [])], value)
        yield counter
    for metric, text, label, spans in _HISTOGRAMS:
        family = HistogramMetricFamily(
            _PREFIX + metric, text, labels=["worker", *([label] if label else [])]
        )
        for name, metrics in known.items():
            for part, times in spans(metrics).items():
                _add_times(family, [name, *([part] if label else [])], times)
        yield family


def _add_times(family: HistogramMetricFamily, labels: list[str], times: Histogram) -> None:
    bounds = [str(bound / 1e6) for bound in times.bounds_us] + ["+Inf"]
    # Prometheus counts what is below a bound, all the way down. An older worker has none.
    below = list(itertools.accumulate(times.counts or (0,)))
    family.add_metric(labels, list(zip(bounds, below, strict=True)), times.sum_us / 1e6)


class WorkerMetrics(Collector):
    """Asks the workers when somebody scrapes.

    To be made in the event loop that the clients belong to, which has to run while others scrape.
    """

    def __init__(
        self, workers: Callable[[], Mapping[str, WorkerClient]], timeout: float = 5.0
    ) -> None:
        self._workers = workers
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()

    def describe(self) -> Iterable[Metric]:
        """Nothing: a registry that only wants to know the names must not ask the workers."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Called on the thread of whoever scrapes."""
        asking = asyncio.run_coroutine_threadsafe(self._ask_all(), self._loop)
        return families(asking.result())

    async def _ask_all(self) -> dict[str, Metrics | None]:
        workers = dict(self._workers())
        answers = await asyncio.gather(*(self._ask(worker) for worker in workers.values()))
        return dict(zip(workers, answers, strict=True))

    async def _ask(self, worker: WorkerClient) -> Metrics | None:
        try:
            async with asyncio.timeout(self._timeout):
                return await worker.metrics()
        except (MeshnetError, TimeoutError):
            return None
