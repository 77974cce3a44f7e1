"""Command lines of meshnet as processes that start at once, for tests that run many.

    async with Commands() as commands:
        done = await commands.run("status", "--json", f"--url={url}")

One process has loaded what commands have in common; each command line is a fork of it, with its own
files as stdin, stdout and stderr, as main() of the program sees them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import pathlib
import signal
import sys
import tempfile
import traceback
from collections.abc import Mapping
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from meshnet.tasks import cancel

from meshnet_gguf import progress

if TYPE_CHECKING:
    from typing import Self

__all__ = ["Commands", "Done"]

_AT_ONCE = 16
_SERVE = "from meshnet_gguf.testing.commands import serve; serve()"


class Done(NamedTuple):
    """A command line that has ended."""

    code: int
    out: str
    err: str


class Commands:
    """Runs command lines, so many at once as one machine may bear."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._numbers = itertools.count()
        self._running: dict[int, asyncio.Future[int]] = {}
        self._room = asyncio.Semaphore(_AT_ONCE)

    async def __aenter__(self) -> Self:
        """Starts the process that forks."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            _SERVE,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
        )
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()
        await cancel(self._reading)
        self._folder.cleanup()

    async def run(
        self,
        *arguments: str | os.PathLike[str],
        stdin: str = "",
        impatient: bool = False,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> Done:
        """Runs `meshnet ARGUMENTS`, with `environment` beside ours, and waits for its end.

        An `impatient` one shows its progress at once, not only after a moment.
        """
        number = next(self._numbers)
        folder = self._folder_of(number, stdin)
        asked = {
            "number": number,
            "folder": str(folder),
            "arguments": [os.fspath(argument) for argument in arguments],
            "impatient": impatient,
            "environment": dict(environment),
        }
        async with self._room:
            assert self._process.stdin is not None
            self._running[number] = ended = asyncio.get_running_loop().create_future()
            self._process.stdin.write(json.dumps(asked).encode() + b"\n")
            code = await ended
        out, err = ((folder / name).read_text() for name in ("out", "err"))
        return Done(code, out, err)

    def _folder_of(self, number: int, stdin: str) -> pathlib.Path:
        folder = pathlib.Path(self._folder.name, str(number))
        folder.mkdir()
        (folder / "in").write_text(stdin)
        return folder

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            number, code = json.loads(line)
            self._running.pop(number).set_result(code)
        for waiting in self._running.values():
            waiting.set_exception(RuntimeError("the process that runs commands has ended"))


def serve() -> None:
    """The process: forks for each line on stdin, and says on stdout how it ended."""
    # Most of the time that a command takes to start.
    import httpx  # noqa: F401
    import meshnet.tracker_client  # noqa: F401
    import rich.progress
    import rich.table  # noqa: F401

    import meshnet_gguf.client
    import meshnet_gguf.provision  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            asked = json.loads(line)
            child = os.fork()
            if not child:
                os._exit(_run(asked))
            _, status = os.waitpid(child, 0)
            answer = [asked["number"], os.waitstatus_to_exitcode(status)]
            os.write(sys.stdout.fileno(), json.dumps(answer).encode() + b"\n")
            os._exit(0)


def _run(asked: dict[str, Any]) -> int:
    # As a new process would find things.
    folder = pathlib.Path(asked["folder"])
    with (folder / "in").open("rb") as given:
        os.dup2(given.fileno(), 0)
    for number, name in ((1, "out"), (2, "err")):
        with (folder / name).open("wb") as file:
            os.dup2(file.fileno(), number)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    os.environ.update(asked["environment"])
    if asked["impatient"]:
        progress._PATIENCE_SECONDS = 0
    try:
        from meshnet_gguf.cli.main import main

        code = main(["meshnet", *asked["arguments"]])
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code
