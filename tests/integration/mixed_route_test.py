"""A route over two lanes: refused without evidence, computed by a record for the mixture.

On the cpu lane the two are the plainest kernels and the best; with the config of an accelerator's
lane they are the CPU and the accelerator, or Mesa's lavapipe, which is fixture evidence.
"""

import asyncio
import contextlib
import os
import pathlib
import subprocess
import time
from collections.abc import Iterator, Sequence

import pytest
from meshnet.certification import Lane, issue
from meshnet.errors import ControlError, Reason
from meshnet.fingerprints import Mixture
from meshnet.signing import SigningKey
from meshnet.testing.tracker_process import TrackerProcess
from meshnet_gguf.client import Capability, LayerRange, Route, RouteHop, WorkerClient, open_route
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.local_cluster import LocalCluster, WorkerSpec
from meshnet_gguf.parity import same_choices, squared_error
from meshnet_gguf.recipe import mixture_of
from meshnet_gguf.registration import Whereabouts, make_load, make_registration
from meshnet_gguf.route_source import TrackerRouteSource
from meshnet_gguf.status import Admission
from meshnet_gguf.status_watch import ModelWatch
from meshnet_gguf.testing.lane_driver import use_lane_driver

from proto.meshnet.control.v1 import tracker_pb2
from proto.meshnet.shard.v1 import errors_pb2

WRITE_MODEL = pathlib.Path(os.environ["WRITE_TINY_LLAMA"]).absolute()
HEAD_LANE = tuple(os.environ["MIXED_HEAD"].split())
TAIL_LANE = tuple(os.environ["MIXED_TAIL"].split())
HEAD, TAIL = LayerRange(0, 3), LayerRange(3, 6)
FLAGS = ("--context_tokens=128", "--max_sessions=2", "--threads=1", "--prefill_chunk_tokens=16")
PROMPT = [300 + (7919 * i) % 200 for i in range(40)]
# Squared error of all logits over their squares: ADR 0026 says where this follows from.
TOLERANCE = 1.6e-3
# A software driver compiles every kernel for the CPU first.
READY = 200.0
END = 280.0
KEY = SigningKey.generate()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    subprocess.run([WRITE_MODEL, path], check=True)
    return path


@pytest.fixture(autouse=True, scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        use_lane_driver(patch, tmp_path_factory.mktemp("shaders"))
        yield


@pytest.fixture(scope="module")
def both(model: pathlib.Path, driver: None) -> Mixture:
    """What the workers of the two lanes are together."""

    async def asked() -> Mixture:
        async with asyncio.timeout(END), LocalCluster(chain(model), ready_within=READY) as cluster:
            return mixture(await capabilities_of(cluster.endpoints))

    return asyncio.run(asked())


def chain(model: pathlib.Path, *more: str) -> list[WorkerSpec]:
    return [
        WorkerSpec(layers, model, (*FLAGS, *lane, *more))
        for layers, lane in ((HEAD, HEAD_LANE), (TAIL, TAIL_LANE))
    ]


async def capabilities_of(endpoints: Sequence[str]) -> list[Capability]:
    found = []
    for endpoint in endpoints:
        async with WorkerClient(endpoint) as worker:
            found.append(await worker.capability())
    return found


def mixture(capabilities: Sequence[Capability]) -> Mixture:
    found = mixture_of(*(capability.recipe for capability in capabilities))
    assert found is not None
    return found


def record(fingerprint: str | Mixture, key: SigningKey = KEY) -> bytes:
    two = fingerprint if isinstance(fingerprint, Mixture) else None
    name = two.fingerprint if two else str(fingerprint)
    now = time.time_ns() // 1_000_000
    signed = issue(key, Lane("m", name), issued_ms=now, evidence_sha256="0" * 64, mixture=two)
    return signed.encode()


def evidence(folder: pathlib.Path, *records: bytes) -> tuple[str, str]:
    """Flags of a worker that believes these records."""
    (folder / "records").write_bytes(b"\n".join(records) + b"\n")
    (folder / "key.pub").write_text(KEY.public_pem(), "utf-8")
    return f"--mixtures={folder / 'records'}", f"--mixture_keys={folder / 'key.pub'}"


async def logits(route: Route) -> list[bytes]:
    """Behind the prompt and behind tokens that are given, whatever the model would choose."""
    found: list[bytes] = []
    async with route.session() as session:
        for begin, end in ((0, 32), *((i, i + 1) for i in range(32, len(PROMPT)))):
            step = session.generate(
                PROMPT[begin:end],
                max_tokens=1,
                start_position=begin,
                ignore_end_of_generation=True,
                return_logits=True,
            )
            found += (await step.result()).logits
    return found


async def test_without_evidence_client_and_workers_refuse_and_say_what_is_missing(
    model: pathlib.Path, both: Mixture
) -> None:
    async with (
        asyncio.timeout(END),
        LocalCluster(chain(model), ready_within=READY) as cluster,
    ):
        first, last = await capabilities_of(cluster.endpoints)
        with pytest.raises(MeshnetError) as caught:
            await open_route(cluster.endpoints)
        assert caught.value.reason == errors_pb2.REASON_RECIPE_MISMATCH
        assert f"name the evidence for the mixture {both.fingerprint}" in caught.value.message

        # Who names it meets workers that have none.
        async with await open_route(cluster.endpoints, mixture=both.fingerprint) as route:
            with pytest.raises(MeshnetError) as refused:
                async with route.session():
                    pytest.fail("a route over two lanes was opened")
        assert refused.value.reason == errors_pb2.REASON_RECIPE_MISMATCH
        assert refused.value.stage == (HEAD.begin, HEAD.end)
        lane = f"expected recipe {first.recipe_fingerprint} (lane {first.recipe['backend']})"
        assert lane in refused.value.message
        assert both.fingerprint in refused.value.message
        assert "certification record (--mixtures)" in refused.value.message

        # And who calls it the head's recipe meets the tail.
        head, tail = (WorkerClient(endpoint) for endpoint in cluster.endpoints)
        async with head, tail:
            hops = [
                RouteHop(endpoint, layers)
                for endpoint, layers in zip(cluster.endpoints, (HEAD, TAIL), strict=True)
            ]
            forged = Route([head, tail], [first, last], hops)
            with pytest.raises(MeshnetError) as answered:
                async with forged.session():
                    pytest.fail("a route over two lanes was opened")
        assert answered.value.reason == errors_pb2.REASON_RECIPE_MISMATCH
        assert answered.value.stage == (TAIL.begin, TAIL.end)
        lane = f"expected recipe {last.recipe_fingerprint} (lane {last.recipe['backend']})"
        assert lane in answered.value.message


async def test_with_a_record_it_computes_what_either_lane_does_up_to_rounding(
    model: pathlib.Path, both: Mixture, tmp_path: pathlib.Path
) -> None:
    whole = []
    async with asyncio.timeout(END):
        for lane in (HEAD_LANE, TAIL_LANE):
            spec = WorkerSpec(None, model, (*FLAGS, *lane))
            async with (
                LocalCluster([spec], ready_within=READY) as cluster,
                await open_route(cluster.endpoints) as route,
            ):
                whole.append(await logits(route))
        flags = evidence(tmp_path, record(both))
        async with (
            LocalCluster(chain(model, *flags), ready_within=READY) as cluster,
            await open_route(cluster.endpoints, mixture=both.fingerprint) as route,
        ):
            found = await logits(route)
            assert await logits(route) == found
            if "VK_DRIVER_FILES" in os.environ:
                assert [c.recipe["backend"] for c in route.capabilities] == ["cpu", "vulkan"]
                assert route.capabilities[1].evidence == "FIXTURE"
    for name, reference in zip(("head", "tail"), whole, strict=True):
        error = squared_error(found, reference)
        print(f"from the whole model on the {name}'s lane: {error:.3g}")
        assert error <= TOLERANCE
        assert same_choices(found, reference) >= 0.75
    print(f"the lanes from each other: {squared_error(*whole):.3g}")


async def test_a_record_of_an_unknown_key_is_none(
    model: pathlib.Path, both: Mixture, tmp_path: pathlib.Path
) -> None:
    foreign = evidence(tmp_path, record(both, SigningKey.generate()))
    async with asyncio.timeout(END):
        with pytest.raises(MeshnetError) as caught:
            async with LocalCluster(chain(model, *foreign), ready_within=READY):
                pytest.fail("a worker believed a record of an unknown key")
    assert caught.value.reason == errors_pb2.REASON_CONFIGURATION_INVALID
    assert "none of --mixture_keys made the signature" in caught.value.message


async def test_a_tracker_routes_over_both_by_the_record_alone(
    model: pathlib.Path, both: Mixture, tmp_path: pathlib.Path
) -> None:
    KEY.save(tmp_path / "key.pem")
    async with asyncio.timeout(END):
        flags = evidence(tmp_path, record(both))
        async with (
            LocalCluster(chain(model, *flags), ready_within=READY) as cluster,
            await TrackerProcess.start(
                f"sqlite:///{tmp_path}/t.db",
                f"--trusted_key={tmp_path / 'key.pem.pub'}",
                "--lease_ms=300000",
            ) as tracker,
            TrackerRouteSource([tracker.endpoint], "m") as source,
            contextlib.aclosing(ModelWatch("m", source.workers())) as watch,
        ):
            await register(tracker, cluster.endpoints)
            for lane in (both.head, both.tail):
                await put(tracker, record(lane))
            with pytest.raises(ControlError) as caught:
                async with source.open():
                    pytest.fail("a route without evidence")
            assert caught.value.reason is Reason.NO_ROUTE
            assert f"{both.head[:16]} before {both.tail[:16]} are dark" in caught.value.message
            (shown,) = (await watch.read()).mixtures
            assert (shown.head_fingerprint, shown.tail_fingerprint) == (both.head, both.tail)
            assert shown.admission is Admission.DARK
            assert shown.reason.startswith("no certification record says that these two lanes fit")
            assert await source.sessions_at_once() == 0

            await put(tracker, record(both))
            status = await watch.read()
            assert status.problem is None
            assert [str(stage.state) for stage in status.stages] == ["READY", "READY"]
            assert [m.admission for m in status.mixtures] == [Admission.CERTIFIED]
            assert await source.sessions_at_once() == 2
            async with source.open() as tracked, tracked.route.session() as session:
                assert tracked.route.recipe_fingerprint == both.fingerprint
                answer = await session.generate(PROMPT, max_tokens=4).result()
                assert len(answer.token_ids) > 0


async def register(tracker: TrackerProcess, endpoints: Sequence[str]) -> None:
    for number, endpoint in enumerate(endpoints):
        where = Whereabouts(f"w{number}", f"n{number}", "m", endpoint)
        async with WorkerClient(endpoint) as worker:
            metrics = await worker.metrics()
            await tracker.stub.Register(
                tracker_pb2.RegisterRequest(
                    registration=make_registration(where, await worker.capability(), metrics),
                    load=make_load(await worker.health(), metrics),
                )
            )


async def put(tracker: TrackerProcess, record: bytes) -> None:
    await tracker.stub.PutCertification(tracker_pb2.PutCertificationRequest(record=record))
