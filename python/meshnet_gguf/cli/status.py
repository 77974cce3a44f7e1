"""Shows what a mesh serves: routes, machines, load, dark lanes with their reason, refusals.

    meshnet status
    meshnet status --watch
    meshnet status --url https://llm.example/v1 --json
    meshnet status --tracker 127.0.0.1:7100

Asks the gateway at --url, which knows its own load as well, or the trackers and the workers
themselves. --watch goes on until it is interrupted, with --json one object a line. Exit code 1 when
a model has no complete route.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence

import rich.console
import rich.live
from absl import app, flags
from meshnet.tracker_client import TrackerClient

from meshnet_gguf import progress
from meshnet_gguf.cli import gateway_flags, mesh_flags, output, terminal
from meshnet_gguf.status import (
    MeshStatus,
    ModelStatus,
    StageState,
    StageStatus,
    status_from_json,
    status_to_json,
)
from meshnet_gguf.status_watch import ModelWatch, TrackedWorkers
from proto.meshnet.control.v1 import tracker_pb2

__all__ = ["FLAG_MODULES", "run"]

FLAG_MODULES = (gateway_flags.__name__, *mesh_flags.MODULES)

_WATCH = flags.DEFINE_bool("watch", False, "Show it again every second.")
_ANSWER_SECONDS = 10.0
_MIB = 1 << 20


def run(arguments: Sequence[str]) -> int:
    """The command."""
    if arguments:
        raise app.UsageError(f"expected flags only, got {arguments[0]!r}")
    if mesh_flags.trackers() and gateway_flags.is_url_given():
        raise app.UsageError("expected --url or --tracker, got both")
    with output.control_errors():
        return asyncio.run(_show_all())


async def _show_all() -> int:
    source = _of_trackers() if mesh_flags.trackers() else _of_gateway()
    async with contextlib.aclosing(source):
        with progress.working("asking the mesh"):
            status = await anext(source)
        if not _WATCH.value:
            _show(status)
            return 0 if all(model.problem is None for model in status.models) else 1
        with _shown_again() as show:
            show(status)
            async for later in source:
                show(later)
    raise AssertionError("a source goes on until it is closed")


async def _of_gateway() -> AsyncGenerator[MeshStatus]:
    where = gateway_flags.url()
    address = where.removesuffix("/v1") + "/status.json"
    async with gateway_flags.async_client(silent_seconds=_ANSWER_SECONDS) as http:
        while True:
            with gateway_flags.unreachable(where):
                answer = await http.get(address)
            gateway_flags.check(answer, where)
            yield status_from_json(answer.content)
            await asyncio.sleep(1)


async def _of_trackers() -> AsyncGenerator[MeshStatus]:
    security = mesh_flags.security()
    async with contextlib.AsyncExitStack() as stack:
        tracker = await stack.enter_async_context(
            TrackerClient(mesh_flags.trackers(), security=security)
        )
        watches: dict[str, ModelWatch] = {}
        while True:
            answer = await tracker.list_workers(tracker_pb2.ListWorkersRequest())
            for name in sorted({worker.registration.model_id for worker in answer.workers}):
                if name not in watches:
                    workers = TrackedWorkers(tracker, name, security=security)
                    watches[name] = ModelWatch(name, workers)
                    await stack.enter_async_context(contextlib.aclosing(watches[name]))
            models = [await watch.read() for watch in watches.values()]
            yield MeshStatus(time.time(), tuple(models))
            await asyncio.sleep(1)


@contextlib.contextmanager
def _shown_again() -> Iterator[Callable[[MeshStatus], None]]:
    """Shows one status in the place of the one before; below it where that is no terminal."""
    if output.wants_json() or not sys.stdout.isatty():
        yield _show
        return
    with rich.live.Live(console=terminal.console(), auto_refresh=False) as live:
        yield lambda status: live.update(rich.console.Group(*_tables(status)), refresh=True)


def _show(status: MeshStatus) -> None:
    if output.wants_json():
        sys.stdout.write(status_to_json(status).decode() + "\n")
        sys.stdout.flush()
        return
    terminal.show(*_tables(status))


def _tables(status: MeshStatus) -> list[rich.console.RenderableType]:
    parts: list[rich.console.RenderableType] = []
    if not status.models:
        parts.append(terminal.line("nothing is served: no worker is registered"))
    for model in status.models:
        parts += _of_model(model)
    gateway = status.gateway
    if gateway is not None:
        parts.append(
            terminal.line(
                f"gateway: {gateway.active_slots} of {gateway.slots} answers under way, "
                f"{gateway.queued_requests} wait, up {gateway.uptime_seconds:.0f} s"
            )
        )
        if gateway.refusals:
            parts.append(terminal.line(f"gateway refused: {_counts(gateway.refusals)}"))
    return parts


def _of_model(model: ModelStatus) -> list[rich.console.RenderableType]:
    said = "served" if model.problem is None else f"{model.problem.reason}: {model.problem.message}"
    parts: list[rich.console.RenderableType] = [
        terminal.line(f"{model.name}, {model.layers} layers: {said}")
    ]
    if model.stages:
        parts.append(_stages(model))
    parts += [terminal.line(words) for stage in model.stages for words in _troubles(stage)]
    for lane in model.lanes:
        machines = sorted({worker.machine for worker in lane.workers})
        parts.append(
            terminal.line(
                f"lane {lane.fingerprint[:12]}: {lane.admission.value}"
                + (f" ({lane.reason})" if lane.reason else "")
                + f", {len(lane.workers) + lane.unlisted_workers} workers on {', '.join(machines)}"
            )
        )
        parts += [
            terminal.line(f"  {worker.worker} is not routed: {worker.unroutable}")
            for worker in lane.workers
            if worker.unroutable
        ]
    parts += [
        terminal.line(
            f"mixture of lanes {mixture.head_fingerprint[:12]} before "
            f"{mixture.tail_fingerprint[:12]}: {mixture.admission.value}"
            + (f" ({mixture.reason})" if mixture.reason else "")
        )
        for mixture in model.mixtures
    ]
    return parts


def _stages(model: ModelStatus) -> rich.console.RenderableType:
    numbers = ("sessions", "tokens/s", "memory MiB", "next ms", "next MB/s")
    seams = {seam.source: seam for seam in model.seams}
    rows = []
    for number, stage in enumerate(model.stages):
        seam = seams.get(number)
        rows.append(
            (
                f"[{stage.begin}, {stage.end})",
                stage.machine,
                stage.worker,
                stage.state.value,
                _of(stage.work.open_sessions, stage.work.max_sessions),
                _number(stage.work.decode_tokens_per_second, 1),
                _number(stage.memory.resident_bytes, _MIB),
                _number(seam.round_trip_us if seam else None, 2000),
                _number(seam.bytes_per_second if seam else None, 1e6),
            )
        )
    titles = ("layers", "machine", "worker", "state", *numbers)
    return terminal.table(titles, rows, numbers=numbers)


def _troubles(stage: StageStatus) -> list[str]:
    where = f"layers [{stage.begin}, {stage.end})"
    lines = []
    if stage.problem is not None and stage.state is not StageState.READY:
        lines.append(f"{where}: {stage.problem.reason}: {stage.problem.message}")
    if stage.refusals:
        lines.append(f"{where} refused: {_counts(stage.refusals)}")
    return lines


def _counts(refusals: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(refusals.items()))


def _of(part: int | None, whole: int | None) -> str:
    return "" if part is None else f"{part}/{'?' if whole is None else whole}"


def _number(value: float | None, unit: float) -> str:
    return "" if value is None else f"{value / unit:.1f}"
