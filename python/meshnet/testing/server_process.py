"""A server of ours in a process of its own, which a test may kill.

async with await ServerProcess.launch("meshnet.relay_server") as relay: dial(relay.endpoint)


"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import os
import pathlib
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import Self

__all__ = ["ServerProcess"]

_LAST_WORDS = 100


class ServerProcess:
    """A running server. Made by launch()."""

    def __init__(
        self, process: asyncio.subprocess.Process, endpoint: str, metrics_port: int
    ) -> None:
        self.endpoint = endpoint
        self.metrics_port = metrics_port
        # The last lines of its log.
        self.said: collections.deque[str] = collections.deque(maxlen=_LAST_WORDS)
        # What it has logged since it listens, as it comes.
        self.events: list[dict[str, Any]] = []
        self._news = asyncio.Condition()
        self._process = process
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def launch(cls, module: str, *flags: str) -> Self:
        """Returns once it listens. Raises RuntimeError with its last words when it ends instead."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
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
        raise RuntimeError(f"{module} ended:\n" + "".join(said))

    async def _read(self) -> None:
        assert self._process.stderr is not None
        while line := await self._process.stderr.readline():
            self.said.append(line.decode())
            with contextlib.suppress(ValueError):
                self.events.append(json.loads(line))
            async with self._news:
                self._news.notify_all()

    async def wait_event(self, name: str, **fields: object) -> dict[str, Any]:
        """The first event of this name with these fields, waited for."""
        wanted = {"event": name, **fields}
        async with self._news:
            while True:
                for event in self.events:
                    if wanted.items() <= event.items():
                        return event
                await self._news.wait()

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
        if self._process.returncode is None:
            await self.kill()
        await self._reading

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def cpu_seconds(self) -> float:
        """What it has computed by now, all threads together."""
        # Behind the name in brackets: state is field 3, utime 14, stime 15.
        stat = pathlib.Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")

    async def kill(self) -> None:
        """kill -9."""
        self._process.kill()
        await self._process.wait()

    async def stop(self) -> int:
        """SIGTERM; its exit code."""
        self._process.terminate()
        return await self._process.wait()


def _environment() -> dict[str, str]:
    """This process's, with its import path."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
