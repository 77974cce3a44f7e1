"""Nodes as real processes: the worker dies, hangs, is another one; trackers come and go."""

import asyncio
import contextlib
import os
import pathlib
import signal
import stat
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from meshnet.testing.server_process import ServerProcess
from meshnet.testing.tracker_process import TrackerProcess
from meshnet_gguf.local_cluster import worker_binary
from meshnet_gguf.logged_process import PythonProgram
from meshnet_gguf.manifest import Origin, make_manifest
from meshnet_gguf.route_source import TrackerRouteSource
from meshnet_gguf.testing.node_process import node_values, running_node, start_node, wait_gone

from proto.meshnet.control.v1 import tracker_pb2

END = 60.0
MODEL = pathlib.Path(os.environ["DEEPSEEK4_MODEL"]).resolve()
CHUNK_BYTES = 1 << 16
BOS = 256


@contextlib.asynccontextmanager
async def tracked(folder: pathlib.Path, *flags: str) -> AsyncIterator[TrackerProcess]:
    async with (
        asyncio.timeout(END),
        await TrackerProcess.start(
            f"sqlite:///{folder}/tracker.db", "--admit_dark", *flags
        ) as tracker,
    ):
        yield tracker


async def workers(tracker: TrackerProcess) -> dict[str, tracker_pb2.WorkerStatus]:
    answer = await tracker.stub.ListWorkers(tracker_pb2.ListWorkersRequest())
    return {worker.registration.node_id: worker for worker in answer.workers}


async def wait_workers(
    tracker: TrackerProcess, holds: Callable[[dict[str, tracker_pb2.WorkerStatus]], bool]
) -> dict[str, tracker_pb2.WorkerStatus]:
    while not holds(found := await workers(tracker)):
        await asyncio.sleep(0.01)
    return found


def worker_pid(node: PythonProgram) -> int:
    pid = node.events("worker_started")[-1]["pid"]
    assert isinstance(pid, int)
    return pid


async def test_two_nodes_serve_a_route_and_measure_each_other(tmp_path: pathlib.Path) -> None:
    quick = {"measurement": {"every_ms": 200, "payload_bytes": 100_000}}
    async with (
        tracked(tmp_path, "--lease_ms=3000") as tracker,
        running_node(node_values("n1", tracker.endpoint, (0, 3), **quick), tmp_path) as first,
        running_node(node_values("n2", tracker.endpoint, (3, 8), **quick), tmp_path),
    ):
        found = await workers(tracker)
        assert sorted(found) == ["n1", "n2"]
        one = found["n1"].registration
        assert (one.span.begin, one.span.end, one.model_units) == (0, 3, 8)
        assert one.model_id == "m"
        assert one.fingerprint == found["n2"].registration.fingerprint
        assert one.worker_id == "n1.worker"
        assert one.max_sessions == 8
        assert one.step_us >= 1
        assert one.memory_bytes > 0
        assert one.access_latency_us >= 1
        assert one.labels["engine"] == "fake"
        assert one.labels["evidence"] == "FIXTURE"
        assert one.labels["incarnation"] == "1"
        assert int(one.labels["machine_memory_bytes"]) > 1 << 28
        async with (
            TrackerRouteSource([tracker.endpoint], "m") as source,
            source.open() as route,
            route.session() as session,
        ):
            answer = await session.generate([BOS, 1], max_tokens=20).result()
            assert len(answer.token_ids) == 20
            # Load and neighbours arrive with a heartbeat.
            found = await wait_workers(
                tracker,
                lambda now: all(
                    status.load.open_sessions == 1 and len(status.load.seams) == 1
                    for status in now.values()
                ),
            )
        for name, other in (("n1", "n2"), ("n2", "n1")):
            (seam,) = found[name].load.seams
            assert seam.peer_node_id == other
            assert seam.round_trip_us > 0
            assert seam.bytes_per_second > 0
        first.send(signal.SIGTERM)
        assert await first.wait() == 0
        assert [record["event"] for record in first.log_records()][-3:] == [
            "withdrawn",
            "worker_ended",
            "ended",
        ]
        assert first.events("worker_ended")[-1]["exit_code"] == 0
        assert sorted(await workers(tracker)) == ["n2"]


async def test_a_killed_worker_is_withdrawn_at_once_and_comes_back(tmp_path: pathlib.Path) -> None:
    # Nothing but the node's word can end the registration while the test runs.
    async with (
        tracked(tmp_path, "--lease_ms=600000") as tracker,
        running_node(node_values("n1", tracker.endpoint, (0, 8)), tmp_path) as node,
    ):
        os.kill(worker_pid(node), signal.SIGKILL)
        await node.wait_event("withdrawn")
        await node.wait_event("registered", 2)
        again = (await workers(tracker))["n1"].registration
        assert again.labels["incarnation"] == "2"
        (loss,) = node.events("restarting")
        assert loss["reason"] == "PEER_LOST"
        assert "exit code -9" in str(loss["message"])
        assert [record["event"] for record in node.log_records()].index("withdrawn") < [
            record["event"] for record in node.log_records()
        ].index("restarting")
        async with (
            TrackerRouteSource([tracker.endpoint], "m") as source,
            source.open() as route,
            route.session() as session,
        ):
            answer = await session.generate([BOS, 1], max_tokens=3).result()
        assert len(answer.token_ids) == 3


async def test_a_worker_that_hangs_is_withdrawn_and_replaced(tmp_path: pathlib.Path) -> None:
    async with (
        tracked(tmp_path, "--lease_ms=600000") as tracker,
        running_node(node_values("n1", tracker.endpoint, (0, 8)), tmp_path) as node,
    ):
        hung = worker_pid(node)
        os.kill(hung, signal.SIGSTOP)
        await node.wait_event("withdrawn")
        await wait_gone(hung)
        await node.wait_event("registered", 2)
        assert "expected an answer to 2 probes" in str(node.events("restarting")[0]["message"])
        assert worker_pid(node) != hung


async def test_a_stopped_worker_does_not_outlive_its_node(tmp_path: pathlib.Path) -> None:
    patient = {"supervision": {"probe_timeout_ms": 60_000}}
    async with (
        tracked(tmp_path) as tracker,
        running_node(node_values("n1", tracker.endpoint, (0, 8), **patient), tmp_path) as node,
    ):
        worker = worker_pid(node)
        os.kill(worker, signal.SIGSTOP)
        await node.kill()
        await wait_gone(worker)


async def test_a_worker_is_registered_while_its_relay_is_there(tmp_path: pathlib.Path) -> None:
    # Nothing but the node's word can end the registration while the test runs.
    async with (
        tracked(tmp_path, "--lease_ms=600000") as tracker,
        await ServerProcess.launch("meshnet.relay_server") as relay,
    ):
        values = node_values("n1", tracker.endpoint, (0, 8), worker={"relay": relay.endpoint})
        async with running_node(values, tmp_path) as node:
            assert (await workers(tracker))["n1"].registration.relay == relay.endpoint
            for again in (1, 2):
                await relay.kill()
                lost = await node.wait_event("relay_lost", again)
                assert lost["relay"] == relay.endpoint
                assert lost["reason"] == "PEER_LOST"
                await wait_workers(tracker, lambda found: not found)
                relay = await ServerProcess.launch(
                    "meshnet.relay_server", f"--listen={relay.endpoint}"
                )
                await node.wait_event("registered", 1 + again)
                assert list(await workers(tracker)) == ["n1"]
            # The worker is the same all the time.
            assert len(node.events("worker_started")) == 1
        await relay.kill()


def script(folder: pathlib.Path, text: str) -> str:
    path = folder / "program"
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


async def test_a_program_that_ends_at_once_is_tried_again_with_growing_pauses(
    tmp_path: pathlib.Path,
) -> None:
    program = script(tmp_path, "echo no luck; exit 3")
    async with tracked(tmp_path) as tracker:
        values = node_values("n1", tracker.endpoint, (0, 8), worker={"binary": program})
        node = await start_node(values, tmp_path)
        try:
            await node.wait_event("restarting", 5)
            pauses = [record["pause_ms"] for record in node.events("restarting")]
            assert pauses[:5] == [50, 100, 200, 200, 200]
            assert "no luck" in str(node.events("restarting")[0]["message"])
            assert node.events("registered") == []
            assert await workers(tracker) == {}
        finally:
            assert await node.stop() == 0


@pytest.mark.parametrize(
    ("instead", "changes", "reason", "said"),
    [
        # The last of two equal flags counts.
        ("--layers=0:3", {}, "RANGE_MISMATCH", "expected layers [0, 8), the worker has [0, 3)"),
        ("--fake_layers=9 --layers=0:9", {}, "RANGE_MISMATCH", "the worker has [0, 9)"),
        (
            "--recipe_fingerprint=",
            {"model": {"recipe_fingerprint": "0" * 64}},
            "RECIPE_MISMATCH",
            "expected recipe 0000",
        ),
        (
            "--artifact_sha256=",
            {"model": {"artifact_sha256": "0" * 64}},
            "ARTIFACT_MISMATCH",
            "expected artifact 0000",
        ),
        # Its own refusal, when it is told.
        ("", {"model": {"recipe_fingerprint": "0" * 64}}, "RECIPE_MISMATCH", "expected"),
        ("", {"worker": {"binary_sha256": "0" * 64}}, "CONFIGURATION_INVALID", "SHA-256 0000"),
    ],
)
async def test_a_worker_that_is_another_one_is_never_registered(
    instead: str, changes: dict[str, Any], reason: str, said: str, tmp_path: pathlib.Path
) -> None:
    program = script(tmp_path, f'exec {worker_binary()} "$@" {instead}')
    async with tracked(tmp_path) as tracker:
        values = node_values("n1", tracker.endpoint, (0, 8), **changes)
        values["worker"]["binary"] = program
        node = await start_node(values, tmp_path)
        assert await node.wait() == 1
        (given_up,) = node.events("given_up")
        assert given_up["reason"] == reason
        assert said in str(given_up["message"])
        assert node.events("registered") == []
        assert await workers(tracker) == {}


async def test_the_next_incarnation_must_be_what_the_first_was(tmp_path: pathlib.Path) -> None:
    flag = tmp_path / "other"
    program = script(
        tmp_path,
        f'test -e {flag} && set -- "$@" --fake_artifact=other\nexec {worker_binary()} "$@"',
    )
    async with tracked(tmp_path) as tracker:
        values = node_values("n1", tracker.endpoint, (0, 8), worker={"binary": program})
        node = await start_node(values, tmp_path)
        await node.wait_event("registered")
        flag.touch()
        os.kill(worker_pid(node), signal.SIGKILL)
        assert await node.wait() == 1
        assert node.events("given_up")[0]["reason"] == "ARTIFACT_MISMATCH"
        assert await workers(tracker) == {}


async def test_a_tracker_that_goes_and_comes_back(tmp_path: pathlib.Path) -> None:
    async with asyncio.timeout(END):
        database = f"sqlite:///{tmp_path}/tracker.db"
        async with await TrackerProcess.start(database, "--admit_dark") as probe:
            endpoint = probe.endpoint
        # Nobody is there when the node starts.
        node = await start_node(node_values("n1", endpoint, (0, 8)), tmp_path)
        try:
            await node.wait_event("tracker_away")
            flags = ("--admit_dark", "--lease_ms=600", f"--listen={endpoint}")
            async with await TrackerProcess.start(database, *flags) as tracker:
                await node.wait_event("registered")
                await tracker.kill()
            await asyncio.sleep(1)  # longer than the lease
            async with await TrackerProcess.start(database, *flags) as tracker:
                await node.wait_event("registered", 2)
                assert sorted(await workers(tracker)) == ["n1"]
            # A tracker whose database is gone hears of it as well.
            async with await TrackerProcess.start(
                f"sqlite:///{tmp_path}/new.db", *flags
            ) as tracker:
                await wait_workers(tracker, lambda found: sorted(found) == ["n1"])
            assert len(node.events("worker_started")) == 1, "the worker has nothing to do with it"
        finally:
            await node.kill()


async def test_a_killed_node_leaves_no_worker_and_no_registration(tmp_path: pathlib.Path) -> None:
    async with tracked(tmp_path, "--lease_ms=1500") as tracker:
        async with running_node(node_values("n1", tracker.endpoint, (0, 8)), tmp_path) as node:
            orphan = worker_pid(node)
            await node.kill()
            await wait_gone(orphan)
            await wait_workers(tracker, lambda found: not found)
        # The same node again, at once.
        async with running_node(node_values("n1", tracker.endpoint, (0, 8)), tmp_path):
            assert sorted(await workers(tracker)) == ["n1"]


async def test_a_lane_without_a_record_is_visible_and_not_routed(tmp_path: pathlib.Path) -> None:
    async with (
        asyncio.timeout(END),
        await TrackerProcess.start(f"sqlite:///{tmp_path}/tracker.db") as tracker,
        running_node(node_values("n1", tracker.endpoint, (0, 8)), tmp_path) as node,
    ):
        assert node.events("registered")[0]["admission"] == "ADMISSION_DARK"
        assert (await workers(tracker))["n1"].unroutable.startswith("dark: ")


async def test_a_node_provisions_what_its_layers_need_and_serves_it(tmp_path: pathlib.Path) -> None:
    origin = tmp_path / "origin"
    origin.mkdir()
    (origin / MODEL.name).symlink_to(MODEL)
    manifest = make_manifest([origin / MODEL.name], Origin(), chunk_bytes=CHUNK_BYTES)
    (tmp_path / "manifest.json").write_bytes(manifest.to_bytes())
    async with tracked(tmp_path) as tracker:
        values = node_values(
            "n1",
            tracker.endpoint,
            (2, 4),
            model={
                "manifest": "manifest.json",
                "sources": ["origin"],
                "storage": "storage",
            },
            worker={"engine": "llama"},
        )
        values["worker"]["flags"] = {"threads": 1, "context_tokens": 64, "max_sessions": 1}
        async with running_node(values, tmp_path) as node:
            (done,) = node.events("provisioned")
            assert done["artifact_sha256"] == manifest.artifact_sha256
            assert 0 < int(str(done["fetched_bytes"])) < MODEL.stat().st_size
            found = (await workers(tracker))["n1"].registration
            assert found.labels["artifact_sha256"] == manifest.artifact_sha256
            assert (found.span.begin, found.span.end, found.model_units) == (2, 4, 8)
            assert found.step_us > 1
            # The next incarnation reads nothing again.
            os.kill(worker_pid(node), signal.SIGKILL)
            await node.wait_event("registered", 2)
            again = node.events("provisioned")[1]
            assert (again["fetched_bytes"], again["kept_bytes"]) == (0, done["fetched_bytes"])
