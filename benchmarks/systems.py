"""The systems under comparison as processes: started, asked, watched, stopped.

Each system answers the same two questions, `prefill` and `decode`, through a small program that
speaks lines of JSON over its pipes (llama_driver and chain_client; see their --help). They differ
only in where the model is.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import pathlib
import signal
import socket
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

__all__ = [
    "BenchmarkError",
    "Binaries",
    "Interference",
    "Proxy",
    "System",
    "Tool",
    "resident_mib",
    "settle",
]

_HERE = pathlib.Path(__file__).absolute().parent
_START_SECONDS = 120.0
_ANSWER_SECONDS = 300.0
_MIB = 1024.0
_SETTLE_SECONDS = 10.0
_QUIET_SECONDS = 0.1


class BenchmarkError(Exception):
    """A system could not be started or gave no answer; the message says which and what it said."""


@dataclass(frozen=True)
class Binaries:
    """Where the programs are: beside this file, as Bazel lays them out, unless told otherwise."""

    llama_driver: pathlib.Path = _HERE / "llama_driver" / "llama_driver"
    rpc_server: pathlib.Path = _HERE.parent / "third_party" / "llama_cpp" / "rpc_server"
    chain_client: pathlib.Path = _HERE / "chain_client" / "chain_client"
    proxy: pathlib.Path = _HERE / "proxy" / "proxy"

    @classmethod
    def in_folder(cls, folder: pathlib.Path) -> Binaries:
        """All in one folder, for builds without Bazel."""
        return cls(*(folder / name for name in cls.__dataclass_fields__))


def resident_mib(pid: int) -> float:
    """Resident memory of a process in MiB, shared file pages included."""
    for line in pathlib.Path(f"/proc/{pid}/status").read_text("ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / _MIB
    raise BenchmarkError(f"expected VmRSS of process {pid}, it has ended")


async def settle(pids: Iterable[int]) -> None:
    """Waits until these processes leave the cores alone.

    ggml's threads go on spinning for a good tenth of a second after their last graph, and would
    take a core from whoever is measured next. Raises BenchmarkError for processes that never rest.
    """
    pids = list(pids)
    rests_s = 0.0
    used = _cpu_ticks(pids)
    for _ in range(int(_SETTLE_SECONDS / _QUIET_SECONDS)):
        await asyncio.sleep(_QUIET_SECONDS)
        now = _cpu_ticks(pids)
        # Pings and timers may cost a tick (10 ms) once in a while. Who waits for a core has used
        # none, and does not rest.
        rests = now - used <= 1 and not any(map(_wants_a_core, pids))
        rests_s = rests_s + _QUIET_SECONDS if rests else 0.0
        used = now
        if rests_s >= 2 * _QUIET_SECONDS:
            return
    raise BenchmarkError(
        f"expected processes {pids} to rest between measurements, they computed for "
        f"{_SETTLE_SECONDS:g} s"
    )


def _wants_a_core(pid: int) -> bool:
    """Whether a thread of this process runs or could."""
    for stat in pathlib.Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            if stat.read_text("utf-8", "replace").rpartition(")")[2].split()[0] == "R":
                return True
    return False


def _cpu_ticks(pids: Iterable[int]) -> int:
    """User and system time of all threads of these processes, in clock ticks."""
    total = 0
    for pid in pids:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
        # The second field is the name, in parentheses, and may hold blanks.
        fields = stat.rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total


class Interference:
    """How much of the cores others take while something is measured.

    Others are all but `pids`, the host of a virtual machine included as far as it tells.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = list(pids)
        self._total, self._busy = _machine_ticks()
        self._own = _cpu_ticks(self._pids)

    def share(self) -> float:
        """Since the start, of all cores, 0 to 1. A tick is 10 ms: nothing for short times."""
        total, busy = _machine_ticks()
        own = _cpu_ticks(self._pids) - self._own
        return max(0.0, (busy - self._busy - own) / max(1, total - self._total))


def _machine_ticks() -> tuple[int, int]:
    """Of all cores since boot: all time, and what was neither idle nor waiting for a disk."""
    first = pathlib.Path("/proc/stat").read_text("ascii").split("\n", 1)[0]
    user, nice, system, idle, wait, irq, softirq, steal = (int(x) for x in first.split()[1:9])
    busy = user + nice + system + irq + softirq + steal
    return busy + idle + wait, busy


class Tool:
    """A program that answers each line on stdin with a line of JSON on stdout."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: IO[bytes]) -> None:
        self.name = name
        self.hello: dict[str, Any] = {}
        self._process = process
        self._log = log

    @classmethod
    async def start(cls, name: str, command: Sequence[str]) -> Tool:
        """Starts it and waits for its first line, which becomes `hello`."""
        log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by stop)
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            limit=1 << 24,
            start_new_session=True,
        )
        tool = cls(name, process, log)
        try:
            tool.hello = await tool._line(_START_SECONDS)
        except BaseException:
            await tool.stop()
            raise
        return tool

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    async def ask(self, line: str) -> dict[str, Any]:
        """One command, one answer. Raises BenchmarkError for an error or silence."""
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        await self._process.stdin.drain()
        answer = await self._line(_ANSWER_SECONDS)
        if "error" in answer:
            raise BenchmarkError(f"{self.name}: {answer['error']}")
        return answer

    async def _line(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(seconds):
                line = await self._process.stdout.readline()
        except TimeoutError as error:
            raise BenchmarkError(f"{self.name}: no answer within {seconds:g} s") from error
        if not line:
            self._log.seek(0)
            said = self._log.read().decode("utf-8", "replace").strip()
            raise BenchmarkError(f"{self.name} ended ({await self._process.wait()}):\n{said}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def stop(self) -> None:
        """Closes its stdin, and kills it when that does not end it."""
        if self._process.returncode is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                async with asyncio.timeout(5):
                    await self._process.communicate()
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        self._log.close()


class RpcServer:
    """llama.cpp's rpc-server on a loopback port. `flags` go after the port's."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.port = port
        self._process = process

    @classmethod
    async def start(cls, binary: pathlib.Path, flags: Sequence[str]) -> RpcServer:
        """Starts it and waits until it listens."""
        # It cannot be asked for just any port: take one that is free now, and another one if
        # somebody else was faster.
        for _ in range(5):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port: int = probe.getsockname()[1]
            process = await asyncio.create_subprocess_exec(
                str(binary),
                "-p",
                str(port),
                *flags,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
            server = cls(process, port)
            if await server._listens():
                return server
            await server.stop()
        raise BenchmarkError(f"{binary} does not listen")

    async def _listens(self) -> bool:
        for _ in range(1000):
            if self._process.returncode is not None:
                return False
            if _somebody_listens(self.port):
                return True
            await asyncio.sleep(0.01)
        return False

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    async def stop(self) -> None:
        """Kills it: it knows no other end."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


class Proxy:
    """benchmarks/proxy in front of some endpoints; links are transparent until shaped."""

    def __init__(self, tool: Tool) -> None:
        self._tool = tool

    @classmethod
    async def start(cls, binary: pathlib.Path, targets: Sequence[str]) -> Proxy:
        """One link for each of `targets` (host:port)."""
        return cls(await Tool.start("proxy", [str(binary), f"--target={','.join(targets)}"]))

    @property
    def endpoints(self) -> list[str]:
        """host:port of each link, in the order of the targets."""
        return [f"127.0.0.1:{port}" for port in self._tool.hello["ports"]]

    @property
    def pid(self) -> int:
        """The process id."""
        return self._tool.pid

    async def shape(self, rtt_ms: float, mbit: float) -> None:
        """Zero for no delay, no limit."""
        await self._tool.ask(f"shape {rtt_ms:g} {mbit:g}")

    async def bytes_carried(self) -> int:
        """Both ways, over all links, since the start."""
        links = (await self._tool.ask("stats"))["links"]
        return sum(link["bytes_up"] + link["bytes_down"] for link in links)

    async def stop(self) -> None:
        """Ends it."""
        await self._tool.stop()


@dataclass
class System:
    """One system, running. `name` and `stages` as in the results' rows."""

    name: str
    stages: int
    tool: Tool
    # Processes whose memory counts, by role.
    pids: Mapping[str, int]
    proxy: Proxy | None = None
    servers: list[RpcServer] = field(default_factory=list)

    @classmethod
    async def whole(cls, binaries: Binaries, model: pathlib.Path, threads: int) -> System:
        """The whole model in one process."""
        tool = await Tool.start(
            "whole", [str(binaries.llama_driver), f"--model={model}", f"--threads={threads}"]
        )
        return cls("whole", 1, tool, {"whole": tool.pid})

    @classmethod
    async def rpc(
        cls,
        name: str,
        binaries: Binaries,
        model: pathlib.Path,
        flags: Sequence[str],
        *,
        through_proxy: bool,
    ) -> System:
        """llama.cpp's RPC backend with two servers."""
        servers: list[RpcServer] = []
        proxy: Proxy | None = None
        try:
            for _ in range(2):
                servers.append(await RpcServer.start(binaries.rpc_server, flags))
            endpoints = [f"127.0.0.1:{server.port}" for server in servers]
            if through_proxy:
                proxy = await Proxy.start(binaries.proxy, endpoints)
                endpoints = proxy.endpoints
            tool = await Tool.start(
                name,
                [str(binaries.llama_driver), f"--model={model}", f"--rpc={','.join(endpoints)}"],
            )
        except BaseException:
            await _stop_all(proxy, servers)
            raise
        pids = {"client": tool.pid}
        pids.update({f"server-{i}": server.pid for i, server in enumerate(servers)})
        return cls(name, 2, tool, pids, proxy, servers)

    @classmethod
    async def meshnet(
        cls,
        binaries: Binaries,
        workers: Sequence[tuple[str, int]],
        *,
        through_proxy: bool,
    ) -> System:
        """A chain of running workers, (endpoint, pid) of each; every seam and the return cross
        the proxy, the client sits beside the head."""
        endpoints = [endpoint for endpoint, _ in workers]
        hops = list(endpoints)
        proxy: Proxy | None = None
        try:
            if through_proxy:
                proxy = await Proxy.start(binaries.proxy, endpoints[1:])
                hops[1:] = proxy.endpoints
            tool = await Tool.start(
                "meshnet",
                [
                    str(binaries.chain_client),
                    f"--workers={','.join(endpoints)}",
                    f"--hops={','.join(hops)}",
                ],
            )
        except BaseException:
            await _stop_all(proxy, [])
            raise
        pids = {f"stage-{i}": pid for i, (_, pid) in enumerate(workers)}
        return cls("meshnet", len(workers), tool, {**pids, "client": tool.pid}, proxy)

    async def prefill(self, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        """All prompts at once, up to the first token of each."""
        return await self.tool.ask(" ".join(["prefill", *(_ids(prompt) for prompt in prompts)]))

    async def decode(self, rounds: int) -> dict[str, Any]:
        """`rounds` further tokens of every session that prefill() began."""
        return await self.tool.ask(f"decode {rounds}")

    def all_pids(self) -> list[int]:
        """Of everything that runs for it, its proxy included."""
        return [*self.pids.values(), *([self.proxy.pid] if self.proxy is not None else [])]

    def resident_mib(self) -> dict[str, float]:
        """Of every process, by role."""
        return {role: resident_mib(pid) for role, pid in self.pids.items()}

    async def stop(self) -> None:
        """Ends all its processes, except the workers of a chain."""
        await self.tool.stop()
        await _stop_all(self.proxy, self.servers)


def _die_with_parent() -> None:
    # The other programs notice the end of their stdin; this one would stay.
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _somebody_listens(port: int) -> bool:
    # Connecting would make it serve us; the kernel's table tells as well.
    entry = f"0100007F:{port:04X} 00000000:0000 0A"
    return entry in pathlib.Path("/proc/net/tcp").read_text("ascii")


def _ids(token_ids: Sequence[int]) -> str:
    return ",".join(map(str, token_ids))


async def _stop_all(proxy: Proxy | None, servers: Sequence[RpcServer]) -> None:
    if proxy is not None:
        await proxy.stop()
    await asyncio.gather(*(server.stop() for server in servers))
