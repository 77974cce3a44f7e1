"""A node: one worker process, watched, and its capability at the trackers for as long as it holds.

    await Node(config).run(ended)       # until `ended` is set, or what no restart can mend

Each start of the worker is an incarnation:

1. what its layers need of the artifact is provisioned, the program's hash compared with the
   configured one, the process started, and awaited;
2. what it says of itself (artifact, recipe, range) is compared with the configuration and with the
   node's first incarnation, and only then registered;
3. it is probed, and its load reported, until it ends, stops answering, or the node is to end: then
   the registration is withdrawn at once, before anything else;
4. a process that still runs is stopped: asked to drain when the node ends, killed when it hangs;
5. after a pause that doubles with each failure in a row, the next incarnation begins. One that is
   not what the configuration says ends the node: no restart would mend that.

The worker is told to die with its node, so a node that is killed leaves none behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import os
import pathlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from meshnet.clock import Clock, SystemClock
from meshnet.errors import ControlError, Reason
from meshnet.tasks import cancel
from meshnet.telemetry import Telemetry
from meshnet.tracker_client import TrackerClient
from meshnet.transport import Security, bind, make_server

from meshnet_gguf.client import (
    Capability,
    Health,
    LayerRange,
    Metrics,
    WorkerClient,
    WorkerState,
)
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.local_cluster import WorkerProcess, WorkerSpec, worker_binary
from meshnet_gguf.manifest import read_manifest
from meshnet_gguf.node.config import NodeConfig, Supervision
from meshnet_gguf.node.measure import (
    NODE_LABEL,
    NodeService,
    machine_memory_bytes,
    measure_peers,
    neighbours,
)
from meshnet_gguf.provision import Provisioned, open_sources, provision
from meshnet_gguf.registration import (
    MACHINE_MEMORY_LABEL,
    PeerMeasurement,
    Whereabouts,
    make_load,
    make_registration,
)
from meshnet_gguf.worker_metrics import WorkerMetrics
from proto.meshnet.control.v1 import node_pb2_grpc, tracker_pb2
from proto.meshnet.shard.v1 import errors_pb2

__all__ = ["Backoff", "Log", "Node"]

_Result = TypeVar("_Result")

# Called with an event's name and its fields.
Log = Callable[..., None]

# The worker's exit code for a port that is taken: it may be free again after a while.
_EXIT_BIND: Final = 7
_KILL_SECONDS: Final = 5.0
_FAREWELL_MS: Final = 500


class Backoff:
    """Pauses between restarts: the first, doubled with each failure in a row, up to the most."""

    def __init__(self, supervision: Supervision) -> None:
        self._supervision = supervision
        self._next = supervision.backoff_first_ms

    def pause_ms(self, served_ms: int) -> int:
        """The pause after an incarnation that served for so long."""
        if served_ms >= self._supervision.stable_after_ms:
            self._next = self._supervision.backoff_first_ms
        pause = self._next
        self._next = min(pause * 2, self._supervision.backoff_most_ms)
        return pause


@dataclass(frozen=True)
class _Start:
    """A program that was checked, and what it is started with."""

    binary: pathlib.Path
    binary_sha256: str
    spec: WorkerSpec


@dataclass(frozen=True)
class _Identity:
    """What must not change from one incarnation to the next."""

    artifact_sha256: str
    recipe_fingerprint: str
    model_layers: int


class Node:
    """One node. `log` gets every event; `clock` times all waiting."""

    def __init__(self, config: NodeConfig, log: Log, clock: Clock | None = None) -> None:
        self.config = config
        self.incarnation = 0
        self._log = log
        self._clock = clock or SystemClock()
        self._backoff = Backoff(config.supervision)
        self._identity: _Identity | None = None
        self._peers: list[PeerMeasurement] = []
        self._endpoint = ""
        self._registered = False
        # Who is asked for metrics.
        self._scraped: dict[str, WorkerClient] = {}
        self._telemetry = Telemetry("node")
        self._starts = self._telemetry.counter("worker_starts_total", "Worker processes started.")
        self._losses = self._telemetry.counter(
            "worker_losses_total", "Workers that ended or were given up.", ("reason",)
        )
        self._relay_losses = self._telemetry.counter(
            "relay_losses_total", "How often the worker's relay was lost."
        )
        self._telemetry.gauge(
            "registered",
            "1 while the worker is registered at a tracker.",
            lambda: float(self._registered),
        )

    async def run(self, ended: asyncio.Event) -> None:
        """Serves until `ended` is set.

        Raises MeshnetError for what no restart can mend, ControlError for addresses that cannot be
        served on.
        """
        async with self._serving() as tracker:
            failure: MeshnetError | None = None
            while not ended.is_set():
                self.incarnation += 1
                began = self._clock.now_ms()
                served_ms = 0
                try:
                    served_ms = await self._incarnation(tracker, ended)
                except MeshnetError as error:
                    failure = error
                    self._losses.labels(error.reason_name).inc()
                    if error.recovery == errors_pb2.RECOVERY_FIX_REQUEST:
                        self._log("given_up", reason=error.reason_name, message=error.message)
                        raise
                    served_ms = self._clock.now_ms() - began
                if ended.is_set():
                    break
                pause = self._backoff.pause_ms(served_ms)
                self._log(
                    "restarting",
                    incarnation=self.incarnation,
                    pause_ms=pause,
                    reason=failure.reason_name if failure else "",
                    message=failure.message if failure else "",
                )
                await self._until(ended, pause)

    @contextlib.asynccontextmanager
    async def _serving(self) -> AsyncIterator[TrackerClient]:
        config = self.config
        config.folder.mkdir(parents=True, exist_ok=True)
        async with contextlib.AsyncExitStack() as stack:
            tracker = await stack.enter_async_context(
                TrackerClient(
                    config.trackers,
                    security=config.security,
                    timeout=config.tracker_timeout_ms / 1000,
                )
            )
            server = make_server()
            node_pb2_grpc.add_NodeServiceServicer_to_server(NodeService(config.node_id), server)
            port = bind(server, config.listen, config.security)
            self._endpoint = config.advertise or f"{config.listen.rpartition(':')[0]}:{port}"
            self._telemetry.registry.register(WorkerMetrics(lambda: self._scraped))
            metrics_port = 0
            if config.metrics_listen:
                metrics_port = stack.enter_context(
                    self._telemetry.serve(config.metrics_listen, config.security)
                )
            await server.start()
            stack.push_async_callback(server.stop, _FAREWELL_MS / 1000)
            self._log("node", node_id=config.node_id, address=self._endpoint, metrics=metrics_port)
            yield tracker

    # ---- One incarnation ----

    async def _incarnation(self, tracker: TrackerClient, ended: asyncio.Event) -> int:
        """One worker process from start to end; how long it served, milliseconds."""
        start = await _first(self._prepare(), ended)
        if start is None:
            return 0
        worker = await self._start(start)
        grace = 0.0
        try:
            if not await self._ready(worker, ended):
                return 0
            began = self._clock.now_ms()
            async with self._client(worker) as client:
                self._scraped = {self._worker_id: client}
                try:
                    capability = await client.capability()
                    self._check(capability)
                    await self._serve(worker, client, capability, tracker, ended)
                finally:
                    self._scraped = {}
            grace = self.config.supervision.drain_ms / 1000  # told to end: sessions may finish
            return self._clock.now_ms() - began
        finally:
            code = await worker.stop(grace) if grace else await worker.kill()
            self._log("worker_ended", incarnation=self.incarnation, pid=worker.pid, exit_code=code)

    async def _prepare(self) -> _Start:
        """Everything that has to be here before the worker starts."""
        config = self.config
        binary = config.binary or worker_binary()
        found = await asyncio.to_thread(_sha256, binary)
        if config.binary_sha256 and found != config.binary_sha256:
            raise MeshnetError(
                errors_pb2.REASON_CONFIGURATION_INVALID,
                f"expected the worker program {binary} with SHA-256 {config.binary_sha256}, "
                f"got {found}; install the release that the configuration names",
            )
        return _Start(binary, found, self._spec(await self._provision()))

    async def _start(self, start: _Start) -> WorkerProcess:
        config = self.config
        logs = config.folder / "logs"
        logs.mkdir(exist_ok=True)
        log = logs / f"worker-{time.time_ns() // 1_000_000}-{self.incarnation}.log"
        for old in sorted(logs.glob("worker-*.log"))[: -config.keep_logs + 1 or None]:
            old.unlink(missing_ok=True)
        try:
            worker = await WorkerProcess.start(start.spec, log, binary=start.binary)
        except OSError as error:
            raise MeshnetError(
                errors_pb2.REASON_CONFIGURATION_INVALID,
                f"expected a program at {start.binary}: {error}",
            ) from error
        self._starts.inc()
        self._log(
            "worker_started",
            incarnation=self.incarnation,
            pid=worker.pid,
            binary_sha256=start.binary_sha256,
            log=str(log),
        )
        return worker

    async def _provision(self) -> Provisioned | None:
        """Brings the artifact here, if the configuration says how. What is here is not read again.

        Raises MeshnetError as provision() does.
        """
        config = self.config
        if config.manifest is None:
            return None
        assert config.storage is not None
        manifest = await asyncio.to_thread(read_manifest, config.manifest)
        if config.artifact_sha256 and manifest.artifact_sha256 != config.artifact_sha256:
            raise MeshnetError(
                errors_pb2.REASON_ARTIFACT_MISMATCH,
                f"expected artifact {config.artifact_sha256}, the manifest is of "
                f"{manifest.artifact_sha256}",
            )
        layers = config.layers
        async with open_sources(config.sources, ca_file=config.sources_ca) as sources:
            done = await provision(
                manifest,
                sources,
                config.storage,
                layers=None if layers is None else (layers.begin, layers.end),
            )
        self._log(
            "provisioned",
            artifact_sha256=done.artifact_sha256,
            folder=str(done.folder),
            fetched_bytes=done.fetched_bytes,
            kept_bytes=done.kept_bytes,
        )
        return done

    def _spec(self, provisioned: Provisioned | None) -> WorkerSpec:
        config = self.config
        model = config.model_file
        flags = [f"--listen={config.worker_listen}"]
        # Its name at relays: where it listens, and where it calls others.
        flags.append(f"--relay_peer_id={self._worker_id}")
        if config.worker_relay:
            flags.append(f"--relay={config.worker_relay}")
        if config.route_token_keys is not None:
            flags += [
                f"--route_token_keys={config.route_token_keys}",
                f"--worker_id={self._worker_id}",
            ]
        flags.append(f"--drain_timeout={config.supervision.drain_ms}ms")
        artifact = config.artifact_sha256
        if provisioned is not None:
            model = provisioned.model
            artifact = provisioned.artifact_sha256
            flags.append(f"--manifest={provisioned.manifest}")
        if artifact:
            flags.append(f"--artifact_sha256={artifact}")
        if config.recipe_fingerprint:
            flags.append(f"--recipe_fingerprint={config.recipe_fingerprint}")
        if (tls := config.security.tls) is not None:
            flags += [
                f"--tls_cert={tls.certificate}",
                f"--tls_key={tls.key}",
                f"--tls_ca={tls.authority}",
            ]
        if config.security.insecure:
            flags.append("--insecure")
        flags += [f"--{name}={value}" for name, value in config.worker_flags.items()]
        return WorkerSpec(config.layers, model, tuple(flags))

    async def _ready(self, worker: WorkerProcess, ended: asyncio.Event) -> bool:
        """Waits until the worker serves; False when the node is to end first."""
        within = self.config.supervision.ready_within_ms / 1000
        ready = worker.wait_ready(within, security=self._worker_security())
        try:
            if await _first(_then_true(ready), ended) is None:
                return False
            return await _first(self._reachable(worker, within), ended) is not None
        except MeshnetError as error:
            if worker.exit_code == _EXIT_BIND:
                raise MeshnetError(errors_pb2.REASON_NOT_READY, error.message) from error
            raise

    async def _reachable(self, worker: WorkerProcess, within: float) -> bool:
        """Waits until a worker that is called through a relay listens there.

        Raises MeshnetError (NOT_READY, PEER_LOST).
        """
        relay = self.config.worker_relay
        if not relay:
            return True
        try:
            async with asyncio.timeout(within):
                await worker.wait_event("relay_listening")
        except TimeoutError as error:
            raise MeshnetError(
                errors_pb2.REASON_NOT_READY,
                f"expected the worker to listen at relay {relay} within {within:g} s",
            ) from error
        except RuntimeError as error:
            raise MeshnetError(errors_pb2.REASON_PEER_LOST, str(error)) from error
        return True

    def _check(self, capability: Capability) -> None:
        """Compares what the worker is with what it is meant to be.

        Raises MeshnetError: ARTIFACT_MISMATCH, RECIPE_MISMATCH, RANGE_MISMATCH.
        """
        config = self.config
        layers = config.layers or LayerRange(0, capability.model_layers)
        held = self._identity
        for reason, what, expected, found in (
            (
                errors_pb2.REASON_ARTIFACT_MISMATCH,
                "artifact",
                config.artifact_sha256 or (held and held.artifact_sha256),
                capability.artifact_sha256,
            ),
            (
                errors_pb2.REASON_RECIPE_MISMATCH,
                "recipe",
                config.recipe_fingerprint or (held and held.recipe_fingerprint),
                capability.recipe_fingerprint,
            ),
            (errors_pb2.REASON_RANGE_MISMATCH, "layers", layers, capability.layers),
            (
                errors_pb2.REASON_RANGE_MISMATCH,
                "layers of the whole model",
                held and held.model_layers,
                capability.model_layers,
            ),
        ):
            if expected and expected != found:
                raise MeshnetError(
                    reason,
                    f"expected {what} {expected}, the worker has {found}; it is not registered",
                )
        self._identity = _Identity(
            capability.artifact_sha256,
            capability.recipe_fingerprint,
            capability.model_layers,
        )

    async def _serve(
        self,
        worker: WorkerProcess,
        client: WorkerClient,
        capability: Capability,
        tracker: TrackerClient,
        ended: asyncio.Event,
    ) -> None:
        """Registers the worker and keeps it so until the node is to end.

        Raises MeshnetError when the worker is lost. The registration is withdrawn in any case.
        """
        watch = _Watch(await client.health(), await client.metrics())
        where = self._whereabouts(worker, await self._withdraw(tracker))
        # Refuses before the first registration what no tracker should hear of.
        make_registration(where, capability, watch.metrics)
        tasks: set[asyncio.Task[None]] = {
            _task(self._watch_end(worker)),
            _task(self._probe(client, watch)),
            _task(self._keep_reachable(worker, where, capability, watch, tracker)),
            _task(self._measure(capability, tracker)),
        }
        ending = asyncio.create_task(ended.wait())
        try:
            done, _ = await asyncio.wait({*tasks, ending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel(*tasks, ending)
            await self._withdraw(tracker)
        for task in done - {ending}:
            await task  # raises what it ended with

    async def _watch_end(self, worker: WorkerProcess) -> None:
        code = await worker.wait()
        raise MeshnetError(
            errors_pb2.REASON_PEER_LOST,
            f"worker {worker.pid} ended with exit code {code}; its log ends with\n"
            f"{worker.log_tail(5)}",
        )

    async def _probe(self, client: WorkerClient, watch: _Watch) -> None:
        """Keeps `watch` fresh. Raises MeshnetError once the worker does not answer any more."""
        supervision = self.config.supervision
        failures = 0
        while True:
            await self._clock.sleep_ms(supervision.probe_every_ms)
            try:
                watch.see(await client.health(), await client.metrics())
            except MeshnetError as error:
                failures += 1
                if failures >= supervision.probe_failures:
                    raise MeshnetError(
                        errors_pb2.REASON_PEER_LOST,
                        f"expected an answer to {failures} probes, got {error}",
                    ) from error
                continue
            failures = 0
            if watch.health.state in (WorkerState.FAILED, WorkerState.DRAINING):
                raise MeshnetError(
                    errors_pb2.REASON_PEER_LOST,
                    f"expected a worker that serves, it is {watch.health.state.name} "
                    f"({watch.health.message})",
                )

    # ---- At the trackers ----

    async def _keep_reachable(
        self,
        worker: WorkerProcess,
        where: Whereabouts,
        capability: Capability,
        watch: _Watch,
        tracker: TrackerClient,
    ) -> None:
        """Keeps the worker registered for as long as others can reach it, for ever.

        Who is called through a relay is gone for all others when the relay is, however well it is.
        """
        if not where.relay:
            await self._keep_registered(where, capability, watch, tracker)
        records = worker.follow("relay_listening", "relay_lost")
        coming: asyncio.Task[dict[str, object] | None] = asyncio.create_task(_next(records))
        keeping: asyncio.Task[None] | None = None
        try:
            while True:
                waited: set[asyncio.Task[Any]] = {coming, keeping} if keeping else {coming}
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                if keeping is not None and keeping.done():
                    await keeping
                if not coming.done():
                    continue
                record = coming.result()
                if record is None:
                    await asyncio.Event().wait()  # its end is told by _watch_end
                    return
                coming = asyncio.create_task(_next(records))
                if record["event"] == "relay_listening" and keeping is None:
                    keeping = _task(self._keep_registered(where, capability, watch, tracker))
                elif record["event"] == "relay_lost" and keeping is not None:
                    self._relay_losses.inc()
                    self._log(
                        "relay_lost",
                        relay=where.relay,
                        reason=record.get("reason"),
                        message=record.get("message"),
                    )
                    await cancel(keeping)
                    keeping = None
                    await self._withdraw(tracker)
        finally:
            await cancel(coming, *([keeping] if keeping else []))

    async def _keep_registered(
        self,
        where: Whereabouts,
        capability: Capability,
        watch: _Watch,
        tracker: TrackerClient,
    ) -> None:
        """Registers and sends heartbeats, for ever; a tracker that is away is tried again."""
        generation = 0
        interval = 0
        retry = self.config.supervision.backoff_first_ms
        while True:
            try:
                if not generation:
                    registered = await tracker.register(
                        tracker_pb2.RegisterRequest(
                            registration=make_registration(
                                where, capability, watch.metrics, self._peers
                            ),
                            load=watch.load(self._peers),
                        )
                    )
                    generation, interval = registered.generation, registered.lease_ms // 3
                    self._registered = True
                    self._log(
                        "registered",
                        incarnation=self.incarnation,
                        worker_id=where.worker_id,
                        endpoint=where.endpoint,
                        layers=[capability.layers.begin, capability.layers.end],
                        fingerprint=capability.recipe_fingerprint,
                        admission=tracker_pb2.Admission.Name(registered.admission),
                        why=registered.admission_reason,
                    )
                else:
                    beaten = await tracker.heartbeat(
                        tracker_pb2.HeartbeatRequest(
                            worker_id=where.worker_id,
                            generation=generation,
                            load=watch.load(self._peers),
                        )
                    )
                    interval = beaten.lease_ms // 3
            except ControlError as error:
                if error.reason is Reason.WORKER_UNKNOWN and generation:
                    # The lease ran out, or the database was lost.
                    self._log("lease_lost", message=error.message)
                    generation = 0
                    self._registered = False
                    continue
                if error.reason.code.name in ("INVALID_ARGUMENT", "FAILED_PRECONDITION"):
                    raise MeshnetError(
                        errors_pb2.REASON_CONFIGURATION_INVALID, f"the tracker refuses: {error}"
                    ) from error
                self._log("tracker_away", reason=error.reason.name, message=error.message)
                await self._clock.sleep_ms(min(interval, retry) if interval else retry)
                continue
            await self._clock.sleep_ms(max(1, interval))

    async def _withdraw(self, tracker: TrackerClient) -> int:
        """Takes the registration back; how long the tracker took, microseconds (0 = no answer)."""
        began = time.perf_counter()
        was, self._registered = self._registered, False
        try:
            answer = await tracker.deregister(
                tracker_pb2.DeregisterRequest(worker_id=self._worker_id)
            )
        except ControlError as error:
            # Then the lease ends it.
            self._log("tracker_away", reason=error.reason.name, message=error.message)
            return 0
        if was or answer.found:
            self._log("withdrawn", incarnation=self.incarnation, worker_id=self._worker_id)
        return max(1, round((time.perf_counter() - began) * 1e6))

    async def _measure(self, capability: Capability, tracker: TrackerClient) -> None:
        """Keeps the measurements of the lines to the neighbours fresh, for ever."""
        config = self.config
        while True:
            with contextlib.suppress(ControlError):
                peers = await neighbours(
                    tracker,
                    config.node_id,
                    config.model_id,
                    capability.recipe_fingerprint,
                    capability.layers,
                )
                self._peers = await measure_peers(
                    peers,
                    config.measure_bytes,
                    security=config.security,
                    answer_within=config.tracker_timeout_ms / 1000,
                )
                self._log("measured", peers=[vars(peer) for peer in self._peers])
            await self._clock.sleep_ms(config.measure_every_ms)

    # ---- Small things ----

    @property
    def _worker_id(self) -> str:
        return f"{self.config.node_id[:121]}.worker"

    def _whereabouts(self, worker: WorkerProcess, round_trip_us: int) -> Whereabouts:
        config = self.config
        return Whereabouts(
            worker_id=self._worker_id,
            node_id=config.node_id,
            model_id=config.model_id,
            endpoint=config.worker_advertise or worker.endpoint,
            relay=config.worker_relay,
            access_latency_us=round_trip_us // 2,
            access_bytes_per_second=config.uplink_bytes_per_second,
            labels={
                NODE_LABEL: self._endpoint,
                MACHINE_MEMORY_LABEL: str(machine_memory_bytes()),
                "incarnation": str(self.incarnation),
            },
        )

    def _worker_security(self) -> Security:
        """For the worker, which is dialed here and known elsewhere."""
        host = self.config.worker_advertise.rpartition(":")[0].strip("[]")
        return dataclasses.replace(self.config.security, server_name=host)

    def _client(self, worker: WorkerProcess) -> WorkerClient:
        return WorkerClient(
            worker.endpoint,
            security=self._worker_security(),
            timeout=self.config.supervision.probe_timeout_ms / 1000,
        )

    async def _until(self, ended: asyncio.Event, milliseconds: int) -> None:
        """Waits that long, or until the node is to end."""
        await _first(_then_true(self._clock.sleep_ms(milliseconds)), ended)


class _Watch:
    """The worker as it was seen last, and its recent speed."""

    def __init__(self, health: Health, metrics: Metrics) -> None:
        self.health = health
        self.metrics = metrics
        self._before = metrics

    def see(self, health: Health, metrics: Metrics) -> None:
        """A new reading."""
        self.health = health
        self.metrics = metrics

    def load(self, peers: list[PeerMeasurement]) -> tracker_pb2.Load:
        """For a heartbeat: what the worker does, and its speed since the last one."""
        load = make_load(self.health, self.metrics, self._before, peers)
        if load.step_us:
            self._before = self.metrics
        return load


async def _next(records: AsyncIterator[_Result]) -> _Result | None:
    """The next one; None after the last."""
    return await anext(records, None)


def _task(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    return asyncio.create_task(work)


async def _then_true(work: Awaitable[None]) -> bool:
    await work
    return True


async def _first(work: Coroutine[Any, Any, _Result], ended: asyncio.Event) -> _Result | None:
    """What `work` gives or raises; None, and the work cancelled, when `ended` is set first."""
    working = asyncio.create_task(work)
    ending = asyncio.create_task(ended.wait())
    try:
        await asyncio.wait({working, ending}, return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        await cancel(working, ending)


def _sha256(path: pathlib.Path) -> str:
    """Raises MeshnetError (CONFIGURATION_INVALID)."""
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if not os.access(path, os.X_OK):
            raise PermissionError(f"{path} is not executable")
    except OSError as error:
        raise MeshnetError(
            errors_pb2.REASON_CONFIGURATION_INVALID, f"expected the worker program: {error}"
        ) from error
    return digest
