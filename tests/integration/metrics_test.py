"""/metrics of a real process of each kind, against the table in docs/metrics.md."""

import asyncio
import json
import os
import pathlib
import re
import urllib.request

import openai
import pytest
from meshnet.errors import ControlError
from meshnet.relay_client import Listener, connect
from meshnet.testing.server_process import ServerProcess
from meshnet.testing.tracker_process import TrackerProcess
from meshnet.transport import dial
from meshnet_gguf.client import open_route
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.logged_process import PythonProgram
from meshnet_gguf.testing.cluster import fake_cluster
from meshnet_gguf.testing.gateway import MODEL, fake_gateway
from meshnet_gguf.testing.node_process import node_values, running_node
from prometheus_client.parser import text_string_to_metric_families

from proto.meshnet.control.v1 import tracker_pb2

BOS = 256
END = 60.0  # seconds after which a test that hangs is given up
DASHBOARD = pathlib.Path(os.environ["DASHBOARD"])
DOCUMENT = pathlib.Path(os.environ["METRICS_DOCUMENT"])

Sample = tuple[str, frozenset[tuple[str, str]]]


def documented() -> dict[str, tuple[str, frozenset[str]]]:
    """Type and labels by name."""
    rows = re.findall(r"^\| `(meshnet_\w+)` \| (\w+) \| ([\w, ]*) ?\|", DOCUMENT.read_text(), re.M)
    return {
        name: (kind, frozenset(filter(None, (label.strip() for label in labels.split(",")))))
        for name, kind, labels in rows
    }


async def scrape(port: object) -> dict[Sample, float]:
    """All samples of a process, whose names and labels have been found in the table."""

    def read() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=END) as answer:
            return str(answer.read().decode())

    table = documented()
    found: dict[Sample, float] = {}
    for family in text_string_to_metric_families(await asyncio.to_thread(read)):
        # _created: when a series began, which the text format has as series of their own.
        if family.name.startswith("process_") or family.name.endswith("_created"):
            continue
        name = family.name + ("_total" if family.type == "counter" else "")
        kind, labels = table[name]
        assert family.type == kind
        for sample in family.samples:
            assert frozenset(sample.labels) - {"le"} == labels, sample.name
            found[sample.name, frozenset(sample.labels.items())] = sample.value
    return found


def value(samples: dict[Sample, float], name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


def program_names(program: str) -> set[str]:
    return {name for name in documented() if name.startswith(f"meshnet_{program}_")}


def served_names(samples: dict[Sample, float]) -> set[str]:
    return {re.sub(r"_(bucket|count|sum)$", "", name) for name, _ in samples}


async def test_a_tracker(tmp_path: pathlib.Path) -> None:
    async with await TrackerProcess.start(
        f"sqlite:///{tmp_path / 'db'}", "--metrics_listen=127.0.0.1:0", "--admit_dark"
    ) as tracker:
        with pytest.raises(Exception, match="no complete route"):
            await tracker.stub.SelectRoute(tracker_pb2.SelectRouteRequest(model_id="m"))
        samples = await scrape(tracker.metrics_port)
    assert value(samples, "meshnet_tracker_workers") == 0
    assert value(samples, "meshnet_tracker_admits_dark") == 1
    assert value(samples, "meshnet_tracker_calls_total", method="select_route") == 1
    refused = {"method": "select_route", "reason": "NO_ROUTE"}
    assert value(samples, "meshnet_tracker_refusals_total", **refused) == 1
    assert value(samples, "meshnet_tracker_call_seconds_count", method="select_route") == 1
    # The others have no series before the first receipt.
    assert program_names("tracker") - served_names(samples) <= {
        "meshnet_tracker_receipts_total",
        "meshnet_tracker_work_total",
    }


async def test_a_gateway() -> None:
    async with asyncio.timeout(END), fake_gateway() as gateway:
        await gateway.client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hello"}], max_tokens=4
        )
        with pytest.raises(openai.NotFoundError):
            await gateway.client.chat.completions.create(
                model="other", messages=[{"role": "user", "content": "Hello"}]
            )
        samples: dict[Sample, float] = {}
        # A request is counted when its answer is out, which its client may know first.
        while samples.get(("meshnet_gateway_request_seconds_count", frozenset())) != 2:
            samples = await scrape(gateway.url.rpartition(":")[2])
    assert program_names("gateway") == served_names(samples)
    answered = {"endpoint": "/v1/chat/completions", "status": "200"}
    assert value(samples, "meshnet_gateway_requests_total", **answered) == 1
    assert value(samples, "meshnet_gateway_refusals_total", reason="NOT_SERVED") == 1
    assert value(samples, "meshnet_gateway_completion_tokens_total") == 4


def test_the_dashboard_asks_for_what_there_is() -> None:
    table = documented()
    dashboard = json.loads(DASHBOARD.read_text())
    titles = [panel["title"] for panel in dashboard["panels"]]
    assert len(set(titles)) == len(titles) > 10
    programs = set()
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            query = target["expr"]
            assert query.count("(") == query.count(")")
            found = re.findall(r"\b(meshnet_\w+?)(?:_bucket|_sum|_count)?\b(?!\w)", query)
            assert found, query
            for name in found:
                assert name in table, f"{panel['title']}: {name}"
                programs.add(name.split("_")[1])
            labels = frozenset().union(*(table[name][1] for name in found)) | {"le"}
            grouped = re.findall(r"by \(([\w, ]+)\)", query)
            selected = re.findall(r"(\w+)=~?\"", query)
            asked = {*selected, *(label for group in grouped for label in group.split(", "))}
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert asked | shown <= labels, query
            if grouped:
                assert shown <= {label for group in grouped for label in group.split(", ")}
    assert programs == {"gateway", "tracker", "node", "worker", "relay"}


async def test_a_relay() -> None:
    async with await ServerProcess.launch(
        "meshnet.relay_server", "--metrics_listen=127.0.0.1:0"
    ) as relay:
        channel = dial(relay.endpoint)
        with pytest.raises(ControlError):
            await connect(channel, caller_id="a", callee_id="b", method="Seam")
        await channel.close(None)
        samples = await scrape(relay.metrics_port)
    assert value(samples, "meshnet_relay_listeners") == 0
    refused = {"method": "Connect", "reason": "PEER_UNREACHABLE"}
    assert value(samples, "meshnet_relay_refusals_total", **refused) == 1
    assert value(samples, "meshnet_relay_take_up_seconds_count") == 0


async def test_a_relays_calls_are_timed() -> None:
    async with (
        asyncio.timeout(END),
        await ServerProcess.launch("meshnet.relay_server", "--metrics_listen=127.0.0.1:0") as relay,
    ):
        channel = dial(relay.endpoint)
        async with Listener(channel, "b") as listener:
            calling = asyncio.create_task(
                connect(channel, caller_id="a", callee_id="b", method="Seam")
            )
            stream = await listener.accept(await anext(listener.calls()))
            (await calling).cancel()
            await relay.wait_event("call")
            stream.cancel()
        await channel.close(None)
        samples = await scrape(relay.metrics_port)
    assert value(samples, "meshnet_relay_take_up_seconds_count") == 1
    assert value(samples, "meshnet_relay_stream_seconds_count", outcome="CANCELLED") == 1


async def test_workers_without_a_node(tmp_path: pathlib.Path) -> None:
    async with asyncio.timeout(END), fake_cluster((4,)) as fake:
        head, tail = fake.cluster.endpoints
        program = await PythonProgram.start(
            "meshnet_gguf.cli.meshnet",
            "metrics",
            head,
            tail,
            "--listen=127.0.0.1:0",
            log=tmp_path / "log",
        )
        try:
            port = (await program.wait_event("listening"))["metrics_port"]
            async with fake.route.session() as session:
                await session.generate([BOS, 1, 2], max_tokens=4).result()
                samples = await scrape(port)
            await fake.cluster.workers[1].kill()
            later = await scrape(port)
        finally:
            await program.kill()
    assert served_names(samples) >= program_names("worker") - {"meshnet_worker_refusals_total"}
    for worker in (head, tail):
        assert value(samples, "meshnet_worker_up", worker=worker) == 1
        assert value(samples, "meshnet_worker_open_sessions", worker=worker) == 1
        assert value(samples, "meshnet_worker_resident_bytes", worker=worker) > 0
        tokens = {phase: {"worker": worker, "phase": phase} for phase in ("prefill", "decode")}
        assert value(samples, "meshnet_worker_tokens_total", **tokens["prefill"]) == 3
        assert value(samples, "meshnet_worker_tokens_total", **tokens["decode"]) == 3
        opened = {"worker": worker, "event": "opened"}
        assert value(samples, "meshnet_worker_sessions_total", **opened) == 1
        # One chunk of the prompt, and three tokens behind the first.
        hop = "meshnet_worker_hop_seconds"
        assert value(samples, f"{hop}_count", **tokens["prefill"]) == 1
        assert value(samples, f"{hop}_bucket", le="+Inf", **tokens["decode"]) == 3
        assert value(samples, f"{hop}_sum", **tokens["decode"]) > 0
    for name, counts in (("seam_connect", (1, 0)), ("decode_round_trip", (3, 0))):
        found = [
            value(samples, f"meshnet_worker_{name}_seconds_count", worker=worker)
            for worker in (head, tail)
        ]
        assert tuple(found) == counts
    sent = value(samples, "meshnet_worker_bytes_total", worker=head, way="seam_sent")
    assert sent == value(samples, "meshnet_worker_bytes_total", worker=tail, way="seam_received")
    assert value(later, "meshnet_worker_up", worker=tail) == 0
    assert not any(
        ("worker", tail) in labels for name, labels in later if name != "meshnet_worker_up"
    )


async def test_a_node_exports_its_worker(tmp_path: pathlib.Path) -> None:
    async with (
        asyncio.timeout(END),
        await TrackerProcess.start(f"sqlite:///{tmp_path / 'db'}") as tracker,
    ):
        values = node_values("n1", tracker.endpoint, (0, 8))
        values["node"]["metrics_listen"] = "127.0.0.1:0"
        async with running_node(values, tmp_path) as node:
            samples = await scrape((await node.wait_event("node"))["metrics"])
    assert value(samples, "meshnet_node_registered") == 1
    assert value(samples, "meshnet_node_worker_starts_total") == 1
    assert value(samples, "meshnet_worker_up", worker="n1.worker") == 1
    assert value(samples, "meshnet_worker_owned_tensor_bytes", worker="n1.worker") > 0


async def test_a_route_that_is_refused_is_counted_by_reason(tmp_path: pathlib.Path) -> None:
    async with asyncio.timeout(END), fake_cluster(()) as fake:
        (worker,) = fake.cluster.endpoints
        async with await open_route([worker]) as route:
            session = route.session()
            session._open_message.route.recipe_fingerprint = "f" * 64
            with pytest.raises(MeshnetError):
                async with session:
                    pass
        program = await PythonProgram.start(
            "meshnet_gguf.cli.meshnet",
            "metrics",
            worker,
            "--listen=127.0.0.1:0",
            log=tmp_path / "log",
        )
        try:
            samples = await scrape((await program.wait_event("listening"))["metrics_port"])
        finally:
            await program.kill()
    refused = {"worker": worker, "reason": "RECIPE_MISMATCH"}
    assert value(samples, "meshnet_worker_refusals_total", **refused) == 1
