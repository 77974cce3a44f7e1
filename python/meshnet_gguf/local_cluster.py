"""Worker processes on this machine: started, watched, stopped. For the demo, tests, benchmarks.

    specs = [WorkerSpec(LayerRange(0, 15), model=path), WorkerSpec(LayerRange(15, 30), model=path)]
    async with LocalCluster(specs) as cluster:
        async with await open_route(cluster.endpoints) as route:
            ...

Every worker listens on a loopback port that the kernel picks, and writes its log to a file.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pathlib
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from meshnet.tasks import cancel
from meshnet.transport import Security

from meshnet_gguf.client import LayerRange, WorkerClient
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.logged_process import LoggedProcess, start_logged
from meshnet_gguf.machine import cores
from proto.meshnet.shard.v1 import errors_pb2

if TYPE_CHECKING:
    from typing import Self

__all__ = [
    "LocalCluster",
    "WorkerProcess",
    "WorkerSpec",
    "share_of_cores",
    "split_layers",
    "worker_binary",
]

_POLL_SECONDS = 0.01
_FAREWELL_SECONDS = 2.0
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104 - names, not a binding
_WORKER_VARIABLE = "MESHNET_WORKER"


def worker_binary() -> pathlib.Path:
    """The worker: $MESHNET_WORKER, or the one built beside this module, or an installed one.

    Raises MeshnetError (CONFIGURATION_INVALID) when there is none.
    """
    chosen = os.environ.get(_WORKER_VARIABLE)
    path = (
        pathlib.Path(chosen)
        if chosen
        else pathlib.Path(__file__).parents[2] / "cc" / "worker" / "worker"
    )
    installed = shutil.which("meshnet-worker")
    if not chosen and not path.exists() and installed:
        return pathlib.Path(installed)
    if not os.access(path, os.X_OK):
        raise MeshnetError(
            errors_pb2.REASON_CONFIGURATION_INVALID,
            f"expected the worker program at {path} or meshnet-worker on the PATH; install a"
            f" release, or build //cc/worker and set {_WORKER_VARIABLE}",
        )
    return path.absolute()


def split_layers(layers: int, stages: int) -> list[LayerRange]:
    """`layers` in `stages` ranges whose lengths differ by at most one, the longer ones first.

    Raises MeshnetError (CONFIGURATION_INVALID) unless 1 <= stages <= layers.
    """
    if not 1 <= stages <= layers:
        raise MeshnetError(
            errors_pb2.REASON_CONFIGURATION_INVALID,
            f"expected 1 to {layers} stages for {layers} layers, got {stages}",
        )
    length, longer = divmod(layers, stages)
    cuts = [index * length + min(index, longer) for index in range(stages + 1)]
    return [LayerRange(begin, end) for begin, end in itertools.pairwise(cuts)]


def share_of_cores(workers: int) -> int:
    """Compute threads for each of `workers` that run on this machine at once, at least 1.

    More threads than cores would wait for each other at every step, in the middle of computing.
    """
    return max(1, cores() // workers)


@dataclass(frozen=True)
class WorkerSpec:
    """What one worker process serves.

    Without `layers` it is the whole model. With `model` it runs the llama engine on that file,
    otherwise the fake engine. `flags` are handed to the program as they are; `program` is another
    one than the cluster's.
    """

    layers: LayerRange | None = None
    model: pathlib.Path | None = None
    flags: tuple[str, ...] = ()
    program: pathlib.Path | None = None

    def command(self, binary: pathlib.Path) -> list[str]:
        """The command line."""
        command = [str(binary), "--listen=127.0.0.1:0"]
        command += ["--die_with_parent", f"--parent_pid={os.getpid()}"]
        if self.model is None:
            command.append("--engine=fake")
        else:
            command += ["--engine=llama", f"--model={self.model}"]
        if self.layers is not None:
            command.append(f"--layers={self.layers.begin}:{self.layers.end}")
        return [*command, *self.flags]


class WorkerProcess(LoggedProcess):
    """One running worker. Made by start()."""

    def __init__(
        self, spec: WorkerSpec, process: asyncio.subprocess.Process, log: pathlib.Path
    ) -> None:
        super().__init__(process, log)
        self.spec = spec
        self.endpoint = ""

    @classmethod
    async def start(
        cls,
        spec: WorkerSpec,
        log: pathlib.Path,
        *,
        binary: pathlib.Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Self:
        """Starts the process; it is not ready yet. `environment` is added to this process's."""
        command = spec.command(spec.program or binary or worker_binary())
        process = await start_logged(command, log, environment)
        return cls(spec, process, log)

    async def wait_listening(self) -> str:
        """Waits until the worker has bound its port and returns its endpoint on this machine.

        Raises MeshnetError (ENGINE_FAILURE, or the reason that the worker logged) with the end of
        the log when the process ends instead.
        """
        while not self.endpoint:
            for record in self.log_records():
                if record.get("event") == "listening":
                    self.endpoint = _from_here(str(record["address"]))
                    return self.endpoint
            if self.exit_code is not None:
                raise self._died()
            await asyncio.sleep(_POLL_SECONDS)
        return self.endpoint

    async def wait_ready(
        self,
        within: float,
        *,
        security: Security | None = None,
    ) -> None:
        """Waits until the worker serves.

        Raises MeshnetError: the worker's own reason when it ends or says that it has failed,
        NOT_READY after `within` seconds.
        """
        try:
            async with asyncio.timeout(within):
                endpoint = await self.wait_listening()
        except TimeoutError as error:
            raise MeshnetError(
                errors_pb2.REASON_NOT_READY,
                f"expected worker {self.pid} to listen within {within:g} s; its log ends with\n"
                f"{self.log_tail()}",
            ) from error
        async with WorkerClient(endpoint, security=security) as client:
            ready = asyncio.create_task(client.wait_ready(within))
            ended = asyncio.create_task(self.wait())
            try:
                await asyncio.wait({ready, ended}, return_when=asyncio.FIRST_COMPLETED)
                if not ended.done() and ready.exception() is not None:
                    # A worker that has failed ends by itself and logs why.
                    await asyncio.wait({ended}, timeout=_FAREWELL_SECONDS)
                if ended.done():
                    raise self._died()
                await ready
            finally:
                await cancel(ready, ended)

    def _died(self) -> MeshnetError:
        reason: int = errors_pb2.REASON_ENGINE_FAILURE
        message = ""
        for record in self.log_records():
            name = f"REASON_{record.get('reason')}"
            if name in errors_pb2.Reason.DESCRIPTOR.values_by_name:
                reason = errors_pb2.Reason.Value(name)
                message = str(record.get("message", ""))
        return MeshnetError(
            reason,
            message
            or f"worker {self.pid} ended with exit code {self.exit_code}; its log ends with\n"
            f"{self.log_tail()}",
        )


def _from_here(endpoint: str) -> str:
    """Where a server that listens on all addresses is dialled on its own machine."""
    host, _, port = endpoint.rpartition(":")
    return f"{_WILDCARDS.get(host, host)}:{port}"


class LocalCluster:
    """Several workers, ready when the async context is entered, stopped when it is left.

    Raises MeshnetError on entry when one does not get ready; the others are stopped then.
    """

    def __init__(
        self,
        specs: Sequence[WorkerSpec],
        *,
        ready_within: float = 120.0,
        binary: pathlib.Path | None = None,
        environment: Mapping[str, str] | None = None,
        security: Security | None = None,
    ) -> None:
        self.workers: list[WorkerProcess] = []
        self._specs = tuple(specs)
        self._ready_within = ready_within
        self._binary = binary
        self._environment = environment
        self._security = security
        self._logs: pathlib.Path | None = None

    @property
    def endpoints(self) -> list[str]:
        """host:port of each worker, in the order of the specs."""
        return [worker.endpoint for worker in self.workers]

    async def __aenter__(self) -> Self:
        """Starts the workers and waits until all are ready."""
        self._logs = pathlib.Path(tempfile.mkdtemp(prefix="meshnet-workers-"))
        try:
            for spec in self._specs:
                await self._start(spec)
            await asyncio.gather(*(self._ready(worker) for worker in self.workers))
        except BaseException:
            await self._stop(grace=0.0)
            raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stops the workers and removes their logs."""
        await self._stop(grace=10.0 if exc_type is None else 1.0)

    async def restart(self, index: int) -> WorkerProcess:
        """A new process for one spec, on another port; the old one is stopped if it still runs."""
        await self.workers[index].stop()
        worker = await self._start(self._specs[index], at=index)
        await self._ready(worker)
        return worker

    async def _start(self, spec: WorkerSpec, at: int | None = None) -> WorkerProcess:
        assert self._logs is not None
        number = len(list(self._logs.iterdir()))
        worker = await WorkerProcess.start(
            spec,
            self._logs / f"worker-{number}.log",
            binary=self._binary,
            environment=self._environment,
        )
        if at is None:
            self.workers.append(worker)
        else:
            self.workers[at] = worker
        return worker

    async def _ready(self, worker: WorkerProcess) -> None:
        await worker.wait_ready(self._ready_within, security=self._security)

    async def _stop(self, grace: float) -> None:
        await asyncio.gather(*(worker.stop(grace) for worker in self.workers))
        if self._logs is not None:
            shutil.rmtree(self._logs, ignore_errors=True)
