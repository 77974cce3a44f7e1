"""A tracker in a process of its own, which a test may kill.

async with await TrackerProcess.start(database) as tracker: await tracker.stub.Register(...) await
tracker.kill()


"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from types import TracebackType
from typing import TYPE_CHECKING

from meshnet.transport import dial
from proto.meshnet.control.v1 import tracker_pb2_grpc

if TYPE_CHECKING:
    from typing import Self

__all__ = ["TrackerProcess"]


class TrackerProcess:
    """A running tracker. Made by start()."""

    def __init__(
        self, process: asyncio.subprocess.Process, endpoint: str, metrics_port: int
    ) -> None:
        self.endpoint = endpoint
        self.metrics_port = metrics_port
        self._process = process
        self._channel = dial(endpoint)
        self.stub = tracker_pb2_grpc.TrackerServiceStub(self._channel)

    @classmethod
    async def start(cls, database: str, *flags: str) -> Self:
        """Returns once it listens. Raises RuntimeError with its last words when it ends instead."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "meshnet.tracker_server",
            f"--database={database}",
            "--listen=127.0.0.1:0",
            *flags,
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env=_environment(),
        )
        assert process.stderr is not None
        said = []
        while line := await process.stderr.readline():
            said.append(line.decode())
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if event["event"] == "listening":
                    return cls(process, event["address"], event["metrics_port"])
        await process.wait()
        raise RuntimeError("the tracker ended:\n" + "".join(said))

    async def __aenter__(self) -> Self:
        """Itself."""
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends it, if it still runs."""
        await self._channel.close(None)
        if self._process.returncode is None:
            await self.kill()

    async def kill(self) -> None:
        """kill -9."""
        self._process.kill()
        await self._process.communicate()

    async def stop(self) -> int:
        """SIGTERM; its exit code."""
        self._process.terminate()
        await self._process.communicate()
        assert self._process.returncode is not None
        return self._process.returncode


def _environment() -> dict[str, str]:
    """This process's, with its import path."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
