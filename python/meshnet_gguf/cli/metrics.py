"""Shows workers' metrics in Prometheus's format, or serves them for it.

    meshnet metrics 127.0.0.1:7001 127.0.0.1:7002
    meshnet metrics 127.0.0.1:7001 127.0.0.1:7002 --listen=127.0.0.1:9102

With --listen it serves /metrics until SIGINT or SIGTERM, and says on stderr where, with --json on
stdout too. A node does this
for its workers; this is for workers without one. docs/metrics.md lists the names.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
from collections.abc import Iterable, Sequence

import prometheus_client
from absl import app, flags
from meshnet.errors import ControlError
from meshnet.program import end_on_signals, log_listening
from meshnet.telemetry import serve_metrics
from prometheus_client.metrics_core import Metric

from meshnet_gguf import progress
from meshnet_gguf.cli import output, security_flags
from meshnet_gguf.client import WorkerClient
from meshnet_gguf.errors import from_control_error
from meshnet_gguf.worker_metrics import WorkerMetrics, families

__all__ = ["FLAG_MODULES", "run"]

FLAG_MODULES = (security_flags.__name__,)

_LISTEN = flags.DEFINE_string("listen", "", "Address to serve on, HOST:PORT.")


def run(arguments: Sequence[str]) -> int:
    """The command."""
    if not arguments or len(set(arguments)) != len(arguments):
        raise app.UsageError(f"expected workers as HOST:PORT, got {' '.join(arguments)!r}")
    try:
        asyncio.run(_serve(arguments) if _LISTEN.value else _show(arguments))
    except ControlError as error:
        raise from_control_error(error) from error
    return 0


async def _show(endpoints: Sequence[str]) -> None:
    async with contextlib.AsyncExitStack() as stack:
        workers = await _clients(stack, endpoints)
        with progress.working("asking the workers"):
            answers = await asyncio.gather(*(worker.metrics() for worker in workers.values()))
    found = dict(zip(workers, answers, strict=True))
    if output.wants_json():
        output.print_json({name: dataclasses.asdict(said) for name, said in found.items()})
        return
    sys.stdout.write(prometheus_client.generate_latest(_Once(families(found))).decode())


async def _serve(endpoints: Sequence[str]) -> None:
    ended = end_on_signals()
    async with contextlib.AsyncExitStack() as stack:
        workers = await _clients(stack, endpoints)
        registry = prometheus_client.CollectorRegistry()
        registry.register(WorkerMetrics(lambda: workers))
        with serve_metrics(registry, _LISTEN.value, security_flags.security()) as port:
            address = f"{_LISTEN.value.rpartition(':')[0]}:{port}"
            log_listening(output.serving, address=address, metrics_port=port)
            await ended.wait()


class _Once(prometheus_client.CollectorRegistry):
    """What was read, in the place of a registry."""

    def __init__(self, found: Iterable[Metric]) -> None:
        super().__init__()
        self._found = list(found)

    def collect(self) -> Iterable[Metric]:
        return self._found


async def _clients(
    stack: contextlib.AsyncExitStack, endpoints: Sequence[str]
) -> dict[str, WorkerClient]:
    return {
        endpoint: await stack.enter_async_context(
            WorkerClient(endpoint, security=security_flags.security())
        )
        for endpoint in endpoints
    }
