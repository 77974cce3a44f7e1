"""Clusters of real worker processes with the fake engine, and what tests ask of them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass

from meshnet_gguf.client import LayerRange, Metrics, Route, WorkerClient, open_route
from meshnet_gguf.local_cluster import LocalCluster, WorkerSpec

__all__ = ["LAYERS", "FakeCluster", "cluster_of", "fake_cluster", "fake_specs", "wait_idle"]

# Layers of the model that the fake engine pretends to have.
LAYERS = 8
_POLL_SECONDS = 0.005


def fake_specs(cuts: Sequence[int] = (4,), *flags: str, layers: int = LAYERS) -> list[WorkerSpec]:
    """One spec per stage of a fake model cut before the layers `cuts`."""
    edges = [0, *cuts, layers]
    return [
        WorkerSpec(LayerRange(begin, end), flags=(f"--fake_layers={layers}", *flags))
        for begin, end in itertools.pairwise(edges)
    ]


@dataclass(frozen=True)
class FakeCluster:
    """Running workers and a route over them."""

    cluster: LocalCluster
    route: Route

    async def wait_idle(self, indexes: Iterable[int] | None = None) -> None:
        """Waits until the workers (all, or those named) hold no session and no queued step."""
        chosen = range(len(self.route.workers)) if indexes is None else indexes
        await asyncio.gather(*(wait_idle(self.route.workers[index]) for index in chosen))


async def wait_idle(worker: WorkerClient, within: float = 10.0) -> Metrics:
    """Waits until a worker holds no session, no queued step and no cached token.

    Raises TimeoutError after `within` seconds.
    """
    async with asyncio.timeout(within):
        while True:
            metrics = await worker.metrics()
            held = (
                metrics.open_sessions,
                metrics.queued_steps,
                metrics.queued_bytes,
                metrics.kv_bytes,
            )
            if held == (0, 0, 0, 0):
                return metrics
            await asyncio.sleep(_POLL_SECONDS)


@contextlib.asynccontextmanager
async def cluster_of(specs: Sequence[WorkerSpec]) -> AsyncIterator[FakeCluster]:
    """Workers for these specs and a route over them."""
    async with LocalCluster(specs) as cluster, await open_route(cluster.endpoints) as route:
        yield FakeCluster(cluster, route)


@contextlib.asynccontextmanager
async def fake_cluster(
    cuts: Sequence[int] = (4,), *flags: str, layers: int = LAYERS
) -> AsyncIterator[FakeCluster]:
    """A fake model in `len(cuts) + 1` worker processes, each started with `flags` too."""
    async with cluster_of(fake_specs(cuts, *flags, layers=layers)) as fake:
        yield fake
