"""Random kill -9 of everything that serves, under load, and what must hold nevertheless.

    found = await run_chaos(ChaosOptions(kills=100, seed=1))
    found.violations()      # [] when it held

Two nodes serve each half of a fake model, one of them through a relay. Clients ask without a pause;
meanwhile workers, nodes, the tracker and the relay are killed, one at a time, and started again as
an operator's init system would. Then:

- every request ended within its deadline, in the right answer or in an error with a reason;
- no registration outlives its lease, and no worker its node;
- no session stays open, neither at a worker nor at the tracker;
- the ledger holds every receipt that was acknowledged, once, and says of it what was reported.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import pathlib
import random
import secrets
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from meshnet.errors import ControlError
from meshnet_gguf.client import LayerRange, WorkerClient
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.local_mesh import LocalMesh
from meshnet_gguf.route_source import Outcome, TrackerRouteSource

from proto.meshnet.control.v1 import tracker_pb2

__all__ = ["ChaosOptions", "ChaosResult", "run_chaos"]

_BOS: Final = 256
_LAYERS: Final = 8
_TOKENS: Final = 16
_LEASE_MS: Final = 1_500
_SESSION_TTL_MS: Final = 3_000
_KINDS: Final = ("worker", "node", "tracker", "relay")
_SETTLE_SECONDS: Final = 60.0
_SUPERVISION: Final = {
    "backoff_first_ms": 20,
    "backoff_most_ms": 200,
    "stable_after_ms": 100,
    "probe_every_ms": 250,
    "probe_timeout_ms": 2_000,
    "drain_ms": 1_000,
}


@dataclass(frozen=True)
class ChaosOptions:
    """How much. `deadline` bounds each request, `pause` lies between two kills at most, seconds."""

    kills: int
    seed: int
    clients: int = 4
    deadline: float = 20.0
    pause: float = 0.5


@dataclass
class ChaosResult:
    """What happened, and what should not have (each with a word on what)."""

    kills: collections.Counter[str] = field(default_factory=collections.Counter)
    answers: int = 0
    errors: collections.Counter[str] = field(default_factory=collections.Counter)
    slowest: float = 0.0
    broken_requests: list[str] = field(default_factory=list)
    ghosts: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    leaked_sessions: list[str] = field(default_factory=list)
    ledger: list[str] = field(default_factory=list)
    receipts: int = 0

    @property
    def requests(self) -> int:
        """All of them."""
        return self.answers + self.errors.total() + len(self.broken_requests)

    def violations(self) -> list[str]:
        """All that should not have happened."""
        return [
            *self.broken_requests,
            *self.ghosts,
            *self.orphans,
            *self.leaked_sessions,
            *self.ledger,
        ]


async def run_chaos(
    options: ChaosOptions, say: Callable[[str], None] = lambda _: None
) -> ChaosResult:
    """See the module. Raises MeshnetError when not even the start succeeds."""
    result = ChaosResult()
    halves = [LayerRange(0, _LAYERS // 2), LayerRange(_LAYERS // 2, _LAYERS)]
    mesh = LocalMesh(
        [*halves, *halves],
        worker_flags={"fake_layers": _LAYERS, "fake_delay": "2ms", "idle_ttl": "5s"},
        supervision=_SUPERVISION,
        lease_ms=_LEASE_MS,
        session_ttl_ms=_SESSION_TTL_MS,
        relayed=[1],
    )
    async with mesh:
        run = _Run(mesh, options, result)
        await run.learn()
        stopped = asyncio.Event()
        clients = [
            asyncio.create_task(run.ask(number, stopped)) for number in range(options.clients)
        ]
        try:
            await run.kill_all(say)
        finally:
            stopped.set()
            await asyncio.gather(*clients)
        say("settling")
        await run.settle()
    return result


@dataclass
class _Reported:
    """Receipts of one session: as sent, and whether the tracker acknowledged them."""

    receipts: list[tracker_pb2.Receipt]
    acknowledged: bool


class _Run:
    def __init__(self, mesh: LocalMesh, options: ChaosOptions, result: ChaosResult) -> None:
        self._mesh = mesh
        self._options = options
        self._result = result
        self._random = random.Random(options.seed)  # noqa: S311 - to repeat a run
        self._expected: dict[int, tuple[int, ...]] = {}
        self._reported: dict[str, _Reported] = {}
        self._pids: set[int] = set()
        self._deck: list[str] = []

    # ---- Load ----

    async def learn(self) -> None:
        """The right answers, from before anything is killed.

        On a busy machine leases this short may run out meanwhile: then once more.
        """
        async with self._source() as source, asyncio.timeout(_SETTLE_SECONDS):
            while len(self._expected) < self._options.clients:
                prompt = len(self._expected)
                with contextlib.suppress(ControlError, MeshnetError):
                    async with source.open() as tracked, tracked.session() as session:
                        answer = await session.generate([_BOS, prompt], max_tokens=_TOKENS).result()
                    self._expected[prompt] = answer.token_ids
                await asyncio.sleep(0.01)

    def _source(self, timeout: float = 2.0) -> TrackerRouteSource:
        return TrackerRouteSource(self._mesh.trackers, self._mesh.model_id, timeout=timeout)

    async def ask(self, prompt: int, stopped: asyncio.Event) -> None:
        """One client: request after request, each once."""
        async with self._source() as source:
            while not stopped.is_set():
                began = time.monotonic()
                try:
                    async with asyncio.timeout(self._options.deadline):
                        token_ids = await self._request(source, prompt)
                    if token_ids == self._expected[prompt]:
                        self._result.answers += 1
                    else:
                        self._result.broken_requests.append(f"prompt {prompt}: got {token_ids}")
                except MeshnetError as error:
                    self._result.errors[error.reason_name] += 1
                except ControlError as error:
                    self._result.errors[error.reason.name] += 1
                except TimeoutError:
                    self._result.broken_requests.append("a request went over its deadline")
                except Exception as error:
                    self._result.broken_requests.append(f"an error without a reason: {error!r}")
                took = time.monotonic() - began
                self._result.slowest = max(self._result.slowest, took)
                await asyncio.sleep(0.01)

    async def _request(self, source: TrackerRouteSource, prompt: int) -> tuple[int, ...]:
        async with source.open() as tracked:
            session = tracked.session(
                work_id=f"work-{secrets.token_hex(8)}", deadline=self._options.deadline
            )
            try:
                async with session:
                    answer = await session.generate([_BOS, prompt], max_tokens=_TOKENS).result()
            except MeshnetError as error:
                await self._report(tracked.receipts(session, Outcome.FAILED, error), source)
                raise
            await self._report(tracked.receipts(session, Outcome.COMPLETED), source)
            return answer.token_ids

    async def _report(
        self, receipts: list[tracker_pb2.Receipt], source: TrackerRouteSource
    ) -> None:
        reported = _Reported(receipts, acknowledged=False)
        self._reported[receipts[0].session_id] = reported
        # A tracker that is away is told in the end.
        with contextlib.suppress(ControlError):
            await source.tracker.report_outcome(tracker_pb2.ReportOutcomeRequest(receipts=receipts))
            reported.acknowledged = True

    # ---- Kills ----

    async def kill_all(self, say: Callable[[str], None]) -> None:
        """One kill after the other; what has no supervisor is started again at once."""
        for number in range(self._options.kills):
            await asyncio.sleep(self._random.uniform(0, self._options.pause))
            kind = self._kind()
            index = self._random.randrange(len(self._mesh.nodes))
            node = self._mesh.nodes[index]
            self._note_workers()
            if kind == "worker":
                # A node that has just begun has no worker yet.
                if not node.events("worker_started"):
                    await node.wait_event("worker_started")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._mesh.worker_pid(index), signal.SIGKILL)
            elif kind == "node":
                await node.kill()
                await self._mesh.restart_node(index)
            elif kind == "relay":
                assert self._mesh.relay is not None
                await self._mesh.relay.kill()
                await self._mesh.start_relay()
            else:
                assert self._mesh.tracker is not None
                await self._mesh.tracker.kill()
                await self._mesh.start_tracker()
            self._result.kills[kind] += 1
            if (number + 1) % 10 == 0:
                say(f"{number + 1} kills, {self._result.requests} requests")

    def _kind(self) -> str:
        """Random, but everything has its share."""
        if not self._deck:
            self._deck = self._random.sample(_KINDS, len(_KINDS))
        return self._deck.pop()

    def _note_workers(self) -> None:
        for node in self._mesh.nodes:
            self._pids |= {int(str(record["pid"])) for record in node.events("worker_started")}

    # ---- What must hold in the end ----

    async def settle(self) -> None:
        """Waits for what is allowed to take a while, then looks."""
        async with self._source(timeout=_SETTLE_SECONDS) as source:
            await self._wait_registered(source)
            # Whatever was alive by a lease or a session's time before is not any more.
            await asyncio.sleep(max(_LEASE_MS, _SESSION_TTL_MS) / 1000 + 0.5)
            await self._look_for_ghosts(source)
            await self._look_for_sessions(source)
            await self._compare_ledger(source)
        self._look_for_orphans()

    async def _wait_registered(self, source: TrackerRouteSource) -> None:
        nodes = {f"node-{number}" for number in range(len(self._mesh.nodes))}
        found: set[str] = set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SETTLE_SECONDS):
                # Its lease may show a node that was killed; each has to have said so itself.
                while found != nodes or not all(n.events("registered") for n in self._mesh.nodes):
                    with contextlib.suppress(ControlError):
                        found = set(await self._workers(source))
                    await asyncio.sleep(0.05)
        self._result.ghosts += [f"{name} did not come back" for name in sorted(nodes - found)]

    @staticmethod
    async def _workers(source: TrackerRouteSource) -> dict[str, tracker_pb2.Registration]:
        answer = await source.tracker.list_workers(tracker_pb2.ListWorkersRequest())
        return {worker.registration.node_id: worker.registration for worker in answer.workers}

    async def _look_for_ghosts(self, source: TrackerRouteSource) -> None:
        found = await self._workers(source)
        for number, node in enumerate(self._mesh.nodes):
            registration = found.pop(f"node-{number}", None)
            said = node.events("registered")
            if registration is None:
                self._result.ghosts.append(f"node-{number} lost its registration")
            elif not said or registration.endpoint != said[-1]["endpoint"]:
                self._result.ghosts.append(
                    f"node-{number} is registered at {registration.endpoint}, where it is not"
                )
        self._result.ghosts += [f"{name} is registered and is nobody" for name in sorted(found)]

    async def _look_for_sessions(self, source: TrackerRouteSource) -> None:
        status = await source.tracker.get_status()
        if status.open_sessions:
            self._result.leaked_sessions.append(f"the tracker has {status.open_sessions} sessions")
        for endpoint in self._mesh.worker_endpoints():
            async with WorkerClient(endpoint) as worker:
                metrics = await worker.metrics()
            held = (metrics.open_sessions, metrics.queued_steps, metrics.kv_bytes)
            if held != (0, 0, 0):
                self._result.leaked_sessions.append(
                    f"worker {endpoint} has {held[0]} sessions, {held[1]} steps, {held[2]} bytes"
                )

    async def _compare_ledger(self, source: TrackerRouteSource) -> None:
        ledger: dict[str, list[tracker_pb2.Receipt]] = collections.defaultdict(list)
        for session_id, reported in self._reported.items():
            ledger[session_id] = await self._receipts(source, session_id)
            if reported.acknowledged and not _same(ledger[session_id], reported.receipts):
                self._result.ledger.append(f"the ledger lacks receipts of session {session_id}")
            # All or nothing, whether or not the answer came; and once, however often it is told.
            if ledger[session_id] and not _same(ledger[session_id], reported.receipts):
                self._result.ledger.append(f"the ledger has other receipts of {session_id}")
            await source.tracker.report_outcome(
                tracker_pb2.ReportOutcomeRequest(receipts=reported.receipts)
            )
            if not _same(await self._receipts(source, session_id), reported.receipts):
                self._result.ledger.append(f"told again, session {session_id} is another one")
        status = await source.tracker.get_status()
        expected = sum(len(reported.receipts) for reported in self._reported.values())
        self._result.receipts = status.receipts
        if status.receipts != expected:
            self._result.ledger.append(
                f"expected {expected} receipts in all, the ledger has {status.receipts}"
            )

    @staticmethod
    async def _receipts(source: TrackerRouteSource, session_id: str) -> list[tracker_pb2.Receipt]:
        request = tracker_pb2.ListReceiptsRequest(session_id=session_id)
        return list((await source.tracker.list_receipts(request)).receipts)

    def _look_for_orphans(self) -> None:
        self._note_workers()
        running = {self._mesh.worker_pid(number) for number in range(len(self._mesh.nodes))}
        for pid in sorted(self._pids - running):
            with contextlib.suppress(OSError):
                if "worker" in pathlib.Path(f"/proc/{pid}/cmdline").read_text("utf-8", "replace"):
                    self._result.orphans.append(f"worker {pid} outlived its node")


def _same(left: Sequence[tracker_pb2.Receipt], right: Sequence[tracker_pb2.Receipt]) -> bool:
    def content(receipts: Sequence[tracker_pb2.Receipt]) -> list[bytes]:
        return sorted(receipt.SerializeToString(deterministic=True) for receipt in receipts)

    return content(left) == content(right)
