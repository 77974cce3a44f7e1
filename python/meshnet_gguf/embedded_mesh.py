"""A tracker and nodes inside this process; their workers are processes of their own.

    async with EmbeddedMesh(files, plan, Place("127.0.0.1:7100")) as mesh:
        TrackerRouteSource([mesh.tracker], mesh.model_id)
        await mesh.failed()                    # raises when a node ends by itself

For tests that kill a tracker or a node there is meshnet_gguf.local_mesh.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pathlib
import re
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Final

from meshnet.signing import SigningKey
from meshnet.tasks import cancel
from meshnet.tracker import TrackerOptions
from meshnet.tracker_server import TrackerServer, TrackerSettings
from meshnet.transport import Security

from meshnet_gguf import progress
from meshnet_gguf.client import LayerRange
from meshnet_gguf.local_plan import LocalPlan
from meshnet_gguf.model_files import ModelFiles
from meshnet_gguf.node import Node, NodeConfig, Supervision

if TYPE_CHECKING:
    from typing import Self

__all__ = ["EmbeddedMesh", "Place", "RunningNode", "node_config", "node_name"]

_LOG = logging.getLogger("meshnet.mesh")
# Sessions of this machine's own clients are over by then.
_DRAIN_MS: Final = 5_000
_TROUBLES: Final = frozenset({"restarting", "tracker_away", "lease_lost"})


@dataclass(frozen=True)
class Place:
    """Where a machine's part of a mesh listens, and how it shows itself there.

    The tracker takes `listen` as it is, node and workers free ports of its host.
    """

    listen: str
    security: Security = Security()  # noqa: RUF009 - immutable

    @property
    def any_port(self) -> str:
        """The host with port 0."""
        return f"{self.listen.rpartition(':')[0]}:0"


def node_name() -> str:
    """A new name for a node on this machine."""
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:60]
    return f"{host}-{secrets.token_hex(3)}"


def node_config(
    files: ModelFiles,
    layers: LayerRange,
    place: Place,
    *,
    tracker: str,
    model_id: str,
    folder: pathlib.Path,
    token_keys: pathlib.Path | None,
    worker_flags: Mapping[str, str],
    artifact_sha256: str = "",
    recipe_fingerprint: str = "",
) -> NodeConfig:
    """A node for some layers of a model."""
    name = node_name()
    flags = dict(worker_flags)
    provisions = bool(files.sources)
    if files.manifest is not None and not provisions:
        flags["manifest"] = str(files.manifest)
    return NodeConfig(
        node_id=name,
        folder=folder / name,
        trackers=(tracker,),
        model_id=model_id,
        model_file=None if provisions else files.path,
        manifest=files.manifest if provisions else None,
        sources=files.sources,
        storage=files.storage,
        sources_ca=files.sources_ca,
        layers=layers,
        artifact_sha256=artifact_sha256 or files.artifact_sha256,
        recipe_fingerprint=recipe_fingerprint,
        worker_listen=place.any_port,
        listen=place.any_port,
        route_token_keys=token_keys,
        worker_flags=flags,
        security=place.security,
        supervision=Supervision(drain_ms=_DRAIN_MS),
    )


class RunningNode:
    """A node as a task of this process: wait for ready(), stop() it in any case."""

    def __init__(self, config: NodeConfig) -> None:
        self.config = config
        self.worker = ""  # Its worker's endpoint, as registered last.
        self._registered = asyncio.Event()
        self._ended = asyncio.Event()
        self._task = asyncio.create_task(Node(config, self._log).run(self._ended))

    async def ready(self) -> None:
        """Waits until its worker is registered. Raises what the node ends with before."""
        registered = asyncio.create_task(self._registered.wait())
        try:
            await asyncio.wait({registered, self._task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel(registered)
        if self._task.done():
            await self._task

    async def failed(self) -> None:
        """Waits until the node ends by itself. Raises what it ended with."""
        await asyncio.shield(self._task)

    async def stop(self) -> None:
        """Withdraws and ends its worker, after the sessions under way."""
        self._ended.set()
        # What it ended with is raised by ready() and failed().
        await asyncio.gather(self._task, return_exceptions=True)

    def _log(self, event: str, **fields: object) -> None:
        said = " ".join(f"{name}={value}" for name, value in fields.items() if value != "")
        _LOG.info("%s %s %s", self.config.node_id, event, said)
        if event in _TROUBLES:
            progress.say(f"{event.replace('_', ' ')}: {fields.get('message', said)}")
        if event == "registered":
            self.worker = str(fields["endpoint"])
            self._registered.set()


class EmbeddedMesh:
    """A tracker that signs route tokens and admits dark lanes, and a node for each range of a plan.

    `folder` keeps the tracker's database and key; with one that was used before, the mesh goes on.

    Raises MeshnetError, ControlError on entry when something does not get ready.
    """

    def __init__(
        self,
        files: ModelFiles,
        plan: LocalPlan,
        place: Place,
        *,
        folder: pathlib.Path,
        worker_flags: Mapping[str, str] | None = None,
    ) -> None:
        self.model_id = files.name
        self.tracker = ""
        self.nodes: list[RunningNode] = []
        self._files = files
        self._plan = plan
        self._place = place
        self._folder = folder
        self._flags = {**plan.worker_flags, **(worker_flags or {})}
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Starts everything and waits until all workers are registered."""
        async with contextlib.AsyncExitStack() as stack:
            key_file = self._folder / "token.pem"
            if not key_file.exists():
                SigningKey.generate().save(key_file)
            place = self._place
            settings = TrackerSettings(
                database=f"sqlite:///{self._folder}/tracker.db",
                listen=place.listen,
                security=place.security,
                options=TrackerOptions(admit_dark=True, token_key=SigningKey.load(key_file)),
            )
            tracker = await stack.enter_async_context(TrackerServer.start(settings))
            self.tracker = tracker.endpoint
            configs = [
                node_config(
                    self._files,
                    layers,
                    place,
                    tracker=self.tracker,
                    model_id=self.model_id,
                    folder=self._folder,
                    token_keys=key_file.with_name(key_file.name + ".pub"),
                    worker_flags=self._flags,
                )
                for layers in self._plan.ranges
            ]
            self.nodes = [RunningNode(config) for config in configs]
            stack.push_async_callback(self._stop_nodes)
            await asyncio.gather(*(node.ready() for node in self.nodes))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Withdraws and stops the workers, then the tracker."""
        await self._stack.aclose()

    async def failed(self) -> None:
        """Waits until a node ends by itself. Raises MeshnetError with what it ended with."""
        tasks = [asyncio.create_task(node.failed()) for node in self.nodes]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel(*tasks)
        for task in done:
            task.result()

    async def _stop_nodes(self) -> None:
        await asyncio.gather(*(node.stop() for node in self.nodes))
