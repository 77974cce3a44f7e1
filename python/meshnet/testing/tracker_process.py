"""A tracker in a process of its own, which a test may kill.

async with await TrackerProcess.start(database) as tracker: await tracker.stub.Register(...)


"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING

from meshnet.testing.server_process import ServerProcess
from meshnet.transport import dial
from proto.meshnet.control.v1 import tracker_pb2_grpc

if TYPE_CHECKING:
    from typing import Self

__all__ = ["TrackerProcess"]


class TrackerProcess(ServerProcess):
    """A running tracker and a stub for it. Made by start()."""

    def __init__(
        self, process: asyncio.subprocess.Process, endpoint: str, metrics_port: int
    ) -> None:
        super().__init__(process, endpoint, metrics_port)
        self._channel = dial(endpoint)
        self.stub = tracker_pb2_grpc.TrackerServiceStub(self._channel)

    @classmethod
    async def start(cls, database: str, *flags: str) -> Self:
        """Returns once it listens. Raises RuntimeError with its last words when it ends instead."""
        return await cls.launch("meshnet.tracker_program", f"--database={database}", *flags)

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends it, if it still runs."""
        await self._channel.close(None)
        await super().__aexit__(exc_type, exc, traceback)
