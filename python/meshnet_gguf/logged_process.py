"""Programs of ours as child processes whose log is a file of JSON lines: ended, killed, read.

node = await PythonProgram.start("meshnet_gguf.cli.meshnet", "node", "--config=n.yaml", log=log)
await node.wait_event("registered")
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Self

__all__ = ["LoggedProcess", "PythonProgram", "start_logged"]

_POLL_SECONDS = 0.01


async def start_logged(
    command: Sequence[str], log: pathlib.Path, environment: Mapping[str, str] | None = None
) -> asyncio.subprocess.Process:
    """Starts a program; stdout and stderr go to `log`. `environment` is added to ours."""
    with log.open("wb") as file:
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={**os.environ, **(environment or {})},
            # Ctrl-C is for whoever started the programs; they are told by stop().
            start_new_session=True,
        )


def _record(line: str) -> dict[str, object] | None:
    """A line that is an event as JSON; None for any other, such as an answer on stdout."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        return None
    return record if isinstance(record, dict) and "event" in record else None


class LoggedProcess:
    """A running program and its log."""

    def __init__(self, process: asyncio.subprocess.Process, log: pathlib.Path) -> None:
        self.log = log
        self._process = process

    @property
    def pid(self) -> int:
        """The process id, also after the process has ended."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while the process runs; -N when signal N ended it."""
        return self._process.returncode

    def log_tail(self, lines: int = 20) -> str:
        """The end of the log."""
        text = self.log.read_text("utf-8", "replace")
        return "\n".join(text.splitlines()[-lines:])

    def log_records(self) -> list[dict[str, object]]:
        """The log's JSON lines; other lines (a crash report) are left out."""
        lines = self.log.read_text("utf-8", "replace").splitlines()
        return [record for line in lines if (record := _record(line)) is not None]

    async def follow(self, *names: str) -> AsyncIterator[dict[str, object]]:
        """The records of these events, from the log's beginning on, as they come.

        Ends with the process. What was read is not read again, however long the log gets.
        """
        with self.log.open("rb") as file:
            rest = b""
            while True:
                ended = self.exit_code is not None
                *lines, rest = (rest + file.read()).split(b"\n")
                for line in lines:
                    record = _record(line.decode("utf-8", "replace"))
                    if record is not None and record.get("event") in names:
                        yield record
                if ended:
                    return
                await asyncio.sleep(_POLL_SECONDS)

    def events(self, name: str) -> list[dict[str, object]]:
        """The log's records of one event."""
        return [record for record in self.log_records() if record.get("event") == name]

    async def wait_event(self, name: str, count: int = 1) -> dict[str, object]:
        """Waits for the `count`-th record of an event and returns it.

        Raises RuntimeError with the end of the log when the process ends instead.
        """
        while True:
            ended = self.exit_code is not None
            if len(found := self.events(name)) >= count:
                return found[count - 1]
            if ended:
                raise RuntimeError(
                    f"expected {name!r}, the program ended with exit code {self.exit_code}:\n"
                    f"{self.log_tail()}"
                )
            await asyncio.sleep(_POLL_SECONDS)

    def send(self, number: signal.Signals) -> None:
        """Sends a signal, if the process still runs."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def wait(self) -> int:
        """Waits for the end of the process and returns its exit code."""
        return await self._process.wait()

    async def kill(self) -> int:
        """Ends the process as a crash would (SIGKILL)."""
        self.send(signal.SIGKILL)
        return await self.wait()

    async def stop(self, grace: float = 10.0) -> int:
        """Asks the program to end (SIGTERM); after `grace` seconds SIGKILL."""
        self.send(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                return await self.wait()
        return await self.kill()


# Ends with its parent (PR_SET_PDEATHSIG, SIGTERM), also with one that is dead already.
_START = """
import ctypes, os, runpy, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
parent, sys.argv = int(sys.argv[1]), sys.argv[2:]
if os.getppid() == parent:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


class PythonProgram(LoggedProcess):
    """A module of ours, run with the modules that this process finds. Made by start()."""

    @classmethod
    async def start(
        cls,
        module: str,
        *arguments: str,
        log: pathlib.Path,
        environment: Mapping[str, str] | None = None,
    ) -> Self:
        """Starts `python -m module`, to end with this process."""
        path = os.pathsep.join(folder for folder in sys.path if folder)
        process = await start_logged(
            [sys.executable, "-P", "-c", _START, str(os.getpid()), module, *arguments],
            log,
            {"PYTHONPATH": path, **(environment or {})},
        )
        return cls(process, log)
