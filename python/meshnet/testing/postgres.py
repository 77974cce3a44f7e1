"""A real PostgreSQL server for tests.

    with PostgresServer.start() as server:
        server.url("tests")   # postgresql://..., a database of that name, made if need be

The programs are those of $MESHNET_POSTGRES (a bin folder) or of Debian's package. The server
listens on a socket in its folder only, trusts whoever reaches that, and does not sync its files.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator

__all__ = ["PostgresServer"]

_USER = "meshnet"
_START_SECONDS = 60.0


def _programs() -> pathlib.Path:
    chosen = os.environ.get("MESHNET_POSTGRES")
    if chosen:
        return pathlib.Path(chosen)
    found = sorted(pathlib.Path("/usr/lib/postgresql").glob("*/bin"), key=lambda p: p.parent.name)
    if not found:
        raise FileNotFoundError("no PostgreSQL: install the Debian package postgresql")
    return found[-1]


def _as_somebody() -> list[str]:
    """PostgreSQL refuses to run as root; in a user namespace we are somebody else."""
    if os.geteuid() != 0:
        return []
    return ["unshare", "--user", "--map-user=1000", "--map-group=1000"]


class PostgresServer:
    """A running server. Made by start()."""

    def __init__(self, programs: pathlib.Path, socket: pathlib.Path, superuser: str) -> None:
        self.programs = programs  # the folder of psql and the like
        self.socket = socket  # the folder to be given as a host
        self._superuser = superuser

    @classmethod
    @contextlib.contextmanager
    def start(cls, superuser: str = _USER) -> Iterator[PostgresServer]:
        """Runs a new, empty server while the block runs."""
        programs = _programs()
        # A socket's path is at most 107 bytes long, which a test's own folder may exceed.
        folder = pathlib.Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))
        try:
            data = folder / "data"
            subprocess.run(
                [
                    *_as_somebody(),
                    programs / "initdb",
                    f"--pgdata={data}",
                    f"--username={superuser}",
                    "--auth=trust",
                    "--encoding=UTF8",
                    "--no-locale",
                    "--no-sync",
                ],
                check=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            with (folder / "log").open("wb") as log:
                process = subprocess.Popen(
                    [
                        *_as_somebody(),
                        programs / "postgres",
                        "-D",
                        data,
                        "-k",
                        folder,
                        "-c",
                        "listen_addresses=",
                        "-c",
                        "fsync=off",
                    ],
                    stdout=log,
                    stderr=log,
                )
            try:
                server = cls(programs, folder, superuser)
                server._wait(process, folder / "log")
                yield server
            finally:
                process.send_signal(signal.SIGINT)  # fast shutdown
                process.wait()
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _wait(self, process: subprocess.Popen[bytes], log: pathlib.Path) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and process.poll() is None:
            answer = subprocess.run(
                [self.programs / "pg_isready", "-q", "-h", self.socket], check=False
            )
            if answer.returncode == 0:
                return
            time.sleep(0.05)
        raise RuntimeError(f"PostgreSQL did not start:\n{log.read_text()}")

    def url(self, database: str) -> str:
        """A URL of SQLAlchemy for a database of that name, which is made when it is not there."""
        name = "--dbname=postgres"
        base = [
            f"{self.programs}/psql",
            "-qAt",
            f"--host={self.socket}",
            f"--username={self._superuser}",
            name,
        ]
        query = f"SELECT 1 FROM pg_database WHERE datname = '{database}'"  # noqa: S608
        found = subprocess.run([*base, "-c", query], check=True, stdout=subprocess.PIPE).stdout
        if not found:
            subprocess.run([*base, "-c", f'CREATE DATABASE "{database}"'], check=True)
        return f"postgresql://{self._superuser}@/{database}?host={self.socket}"
