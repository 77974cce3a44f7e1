"""A tracker, nodes and a relay as processes here. For the demo and for tests that kill them.

    async with LocalMesh(ranges, model=path, worker_flags={"threads": 1}) as mesh:
        async with TrackerRouteSource(mesh.trackers, mesh.model_id) as source:
            ...

Every process listens on loopback, writes its log to a file, and ends with this one.
"""

from __future__ import annotations

import asyncio
import pathlib
import shutil
import tempfile
from collections.abc import Collection, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import yaml
from meshnet.signing import SigningKey

from meshnet_gguf.client import LayerRange
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.logged_process import PythonProgram
from proto.meshnet.shard.v1 import errors_pb2

if TYPE_CHECKING:
    from typing import Self

__all__ = ["LocalMesh"]

_COMMANDS: Final = "meshnet_gguf.cli.meshnet"
_STOP_SECONDS: Final = 15.0


class LocalMesh:
    """One tracker that admits dark lanes, and a node for each range; ranges may come repeatedly.

    Workers serve only who has a route token of the tracker.

    Ready when the async context is entered: every node has registered its worker. Without `model`
    the workers run the fake engine. `supervision` as in a node's configuration. The workers of the
    ranges that `relayed` counts (from 0) are reached through a relay alone.

    Raises MeshnetError on entry when one does not get ready; the others are stopped then.
    """

    def __init__(
        self,
        ranges: Sequence[LayerRange],
        *,
        model: pathlib.Path | None = None,
        model_id: str = "model",
        worker_flags: Mapping[str, str | int | bool] | None = None,
        supervision: Mapping[str, int] | None = None,
        lease_ms: int = 10_000,
        session_ttl_ms: int = 300_000,
        relayed: Collection[int] = (),
        ready_within: float = 120.0,
    ) -> None:
        self.model_id = model_id
        self.ranges = tuple(ranges)
        self.nodes: list[PythonProgram] = []
        self.tracker: PythonProgram | None = None
        self.trackers: list[str] = []
        self.relay: PythonProgram | None = None
        self._model = model
        self._worker_flags = dict(worker_flags or {})
        self._supervision = dict(supervision or {})
        self._lease_ms = lease_ms
        self._session_ttl_ms = session_ttl_ms
        self._relayed = frozenset(relayed)
        self._relay_endpoint = ""
        self._ready_within = ready_within
        self._folder = pathlib.Path()

    async def __aenter__(self) -> Self:
        """Starts everything and waits until all workers are registered."""
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="meshnet-mesh-"))
        try:
            SigningKey.generate().save(self._token_key)
            async with asyncio.timeout(self._ready_within):
                await self.start_tracker()
                if self._relayed:
                    await self.start_relay()
                for number in range(len(self.ranges)):
                    self.nodes.append(await self._node(number))
                await asyncio.gather(*(self._registered(node) for node in self.nodes))
        except TimeoutError as error:
            logs = "\n".join(node.log_tail(3) for node in self.nodes)
            await self._stop(0.0)
            raise MeshnetError(
                errors_pb2.REASON_NOT_READY,
                f"expected all nodes to register within {self._ready_within:g} s; logs:\n{logs}",
            ) from error
        except BaseException:
            await self._stop(0.0)
            raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stops all processes and removes their files."""
        await self._stop(_STOP_SECONDS if exc_type is None else 1.0)

    async def start_tracker(self) -> None:
        """Starts the tracker, again at the same address and with the same database."""
        listen = self.trackers[0] if self.trackers else "127.0.0.1:0"
        self.tracker = await PythonProgram.start(
            _COMMANDS,
            "tracker",
            f"--listen={listen}",
            f"--database=sqlite:///{self._folder}/tracker.db",
            f"--lease_ms={self._lease_ms}",
            f"--session_ttl_ms={self._session_ttl_ms}",
            f"--token_key={self._token_key}",
            "--admit_dark",
            log=self._log("tracker"),
        )
        self.trackers = [await self._listening(self.tracker)]

    async def start_relay(self) -> None:
        """Starts the relay, again at the same address."""
        self.relay = await PythonProgram.start(
            _COMMANDS,
            "relay",
            f"--listen={self._relay_endpoint or '127.0.0.1:0'}",
            log=self._log("relay"),
        )
        self._relay_endpoint = await self._listening(self.relay)

    @staticmethod
    async def _listening(server: PythonProgram) -> str:
        try:
            return str((await server.wait_event("listening"))["address"])
        except RuntimeError as error:
            raise MeshnetError(errors_pb2.REASON_ENGINE_FAILURE, str(error)) from error

    async def restart_node(self, number: int) -> None:
        """A new process for a node that has ended; it has not registered yet."""
        self.nodes[number] = await self._node(number)

    def worker_endpoints(self) -> list[str]:
        """Where the workers are, in the order of the ranges, as their nodes said last."""
        return [str(node.events("registered")[-1]["endpoint"]) for node in self.nodes]

    def worker_pid(self, number: int) -> int:
        """The process id of a node's newest worker."""
        pid = self.nodes[number].events("worker_started")[-1]["pid"]
        assert isinstance(pid, int)
        return pid

    @property
    def _token_key(self) -> pathlib.Path:
        return self._folder / "token.pem"

    async def _node(self, number: int) -> PythonProgram:
        layers = self.ranges[number]
        name = f"node-{number}"
        model: dict[str, Any] = {"id": self.model_id, "layers": [layers.begin, layers.end]}
        if self._model is not None:
            model["file"] = str(self._model)
        values: dict[str, Any] = {
            "node": {"id": name, "folder": name},
            "tracker": {"endpoints": self.trackers, "timeout_ms": 2000},
            "model": model,
            "worker": {
                "engine": "llama" if self._model is not None else "fake",
                "flags": self._worker_flags,
                "route_token_keys": f"{self._token_key}.pub",
            },
            "supervision": self._supervision,
        }
        if number in self._relayed:
            values["worker"]["relay"] = self._relay_endpoint
        path = self._folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(values))
        return await PythonProgram.start(
            _COMMANDS, "node", f"--config={path}", "--json", log=self._log(name)
        )

    @staticmethod
    async def _registered(node: PythonProgram) -> None:
        try:
            await node.wait_event("registered")
        except RuntimeError as error:
            given_up = node.events("given_up")
            reason: int = errors_pb2.REASON_ENGINE_FAILURE
            message = str(error)
            if given_up:
                reason = errors_pb2.Reason.Value(f"REASON_{given_up[-1]['reason']}")
                message = str(given_up[-1]["message"])
            raise MeshnetError(reason, message) from error

    def _log(self, name: str) -> pathlib.Path:
        number = len(list(self._folder.glob(f"{name}-*.log")))
        return self._folder / f"{name}-{number}.log"

    async def _stop(self, grace: float) -> None:
        await asyncio.gather(*(node.stop(grace) for node in self.nodes))
        for server in (self.tracker, self.relay):
            if server is not None:
                await server.stop(grace)
        shutil.rmtree(self._folder, ignore_errors=True)
