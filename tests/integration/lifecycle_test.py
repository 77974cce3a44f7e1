"""Start, health, capability, tokenizer, shutdown: one worker process and its life."""

import asyncio
import pathlib
import signal
import socket

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from meshnet_gguf.client import (
    FinishReason,
    LayerRange,
    SpecialToken,
    Token,
    WorkerClient,
    WorkerState,
)
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.local_cluster import LocalCluster, WorkerProcess, WorkerSpec, worker_binary
from meshnet_gguf.testing.cluster import fake_cluster, fake_specs

from proto.meshnet.shard.v1 import errors_pb2, shard_pb2

BOS, EOS, USER, ASSISTANT = 256, 257, 258, 259
END = 30.0  # seconds after which a test that hangs is given up


async def test_every_stage_says_what_it_has() -> None:
    flags = ("--max_sessions=3", "--context_tokens=99", "--prefill_chunk_tokens=7")
    async with fake_cluster((2, 5), *flags) as fake:
        head, middle, tail = fake.route.capabilities
        assert [c.layers for c in (head, middle, tail)] == [
            LayerRange(0, 2),
            LayerRange(2, 5),
            LayerRange(5, 8),
        ]
        residual = ("dense.residual", 1)
        assert [(c.boundary_in, c.boundary_out) for c in (head, middle, tail)] == [
            (None, residual),
            (residual, residual),
            (residual, None),
        ]
        for capability in (head, middle, tail):
            assert capability.engine == "fake"
            assert capability.evidence == "FIXTURE"
            assert capability.batch_policy == "EXACT"
            assert capability.model_layers == 8
            assert capability.max_sessions == 3
            assert capability.context_tokens == 99
            assert capability.prefill_chunk_tokens == 7
            assert capability.limits.max_step_tokens == 7
            assert capability.vocabulary_size == 320
            assert capability.artifact_sha256 == head.artifact_sha256
            assert capability.recipe_fingerprint == head.recipe_fingerprint
            assert capability.recipe == head.recipe


async def test_health_in_our_words_and_in_grpcs() -> None:
    async with fake_cluster() as fake:
        worker = fake.route.head
        health = await worker.health()
        assert (health.state, health.reason, health.message) == (WorkerState.READY, "", "")
        capability = fake.route.capabilities[0]
        assert health.layers == capability.layers
        assert health.artifact_sha256 == capability.artifact_sha256
        assert health.recipe_fingerprint == capability.recipe_fingerprint
        stub = health_pb2_grpc.HealthStub(worker.channel)
        for service in ("", "meshnet.shard.v1.ShardService"):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="ggml.Rpc"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_protocol_version_that_the_worker_does_not_speak() -> None:
    async with fake_cluster() as fake:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await fake.route.head.shard.GetCapability(
                shard_pb2.GetCapabilityRequest(schema_versions=[2, 3])
            )
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize(
    "method",
    [
        "/meshnet.shard.v1.ShardService/Execute",
        "/meshnet.shard.v1.TokenizerService/Train",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        "/ggml.Rpc/GraphCompute",
        "/nothing",
    ],
)
async def test_nothing_but_our_services_is_served(method: str) -> None:
    async with fake_cluster() as fake:
        call = fake.route.head.channel.unary_unary(method, None, None)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_every_stage_serves_its_vocabulary() -> None:
    async with fake_cluster() as fake:
        for worker in fake.route.workers:
            vocabulary = await worker.vocabulary()
            assert vocabulary.size == 320
            assert vocabulary.special_tokens == (
                SpecialToken("bos", BOS, b"<bos>"),
                SpecialToken("eos", EOS, b"<eos>"),
                SpecialToken("control", USER, b"<|user|>"),
                SpecialToken("control", USER + 1, b"<|assistant|>"),
            )
            assert vocabulary.end_of_generation_ids == {EOS}
            text = "é<|user|>"
            assert await worker.tokenize(text) == [BOS, *text.encode()]
            ids = await worker.tokenize(text, add_special=False, parse_special=True)
            assert ids == [0xC3, 0xA9, USER]
            assert await worker.detokenize(ids) == "é".encode()
            assert await worker.detokenize(ids, unparse_special=True) == text.encode()
            assert await worker.pieces([0xC3, EOS]) == [b"\xc3", b"<eos>"]
            with pytest.raises(MeshnetError) as caught:
                await worker.detokenize([320])
            assert caught.value.reason == errors_pb2.REASON_TOKEN_OUT_OF_RANGE


@pytest.mark.parametrize(
    ("flags", "reason", "exit_code"),
    [
        (("--layers=6:9",), errors_pb2.REASON_LAYER_RANGE_INVALID, 4),
        (("--layers=3:3",), errors_pb2.REASON_CONFIGURATION_INVALID, 2),
        (("--engine=gpu",), errors_pb2.REASON_CONFIGURATION_INVALID, 2),
        (("--batch_policy=some",), errors_pb2.REASON_CONFIGURATION_INVALID, 2),
        (("--mtp=on",), errors_pb2.REASON_FEATURE_UNSUPPORTED, 2),
        (("--max_frame_bytes=100",), errors_pb2.REASON_CONFIGURATION_INVALID, 2),
        (("--listen=0.0.0.0:0",), errors_pb2.REASON_INSECURE_TRANSPORT, 2),
        (("--recipe_fingerprint=" + "0" * 64,), errors_pb2.REASON_RECIPE_MISMATCH, 5),
        (("--artifact_sha256=" + "0" * 64,), errors_pb2.REASON_ARTIFACT_MISMATCH, 5),
    ],
)
async def test_a_worker_that_cannot_serve_says_why_and_ends(
    flags: tuple[str, ...], reason: int, exit_code: int
) -> None:
    cluster = LocalCluster([WorkerSpec(flags=flags)])
    with pytest.raises(MeshnetError) as caught:
        async with cluster:
            pytest.fail("the worker got ready")
    assert caught.value.reason == reason
    assert cluster.workers[0].exit_code == exit_code


async def test_sigterm_lets_running_generations_end() -> None:
    async with fake_cluster((4,), "--fake_delay=5ms") as fake:
        session = fake.route.session()
        await session.__aenter__()
        generation = session.generate([BOS, 1], max_tokens=40)
        async for event in generation:
            if isinstance(event, Token):
                break
        for worker in fake.cluster.workers:
            worker.send(signal.SIGTERM)
        await wait_state(fake.route.head, WorkerState.DRAINING)
        with pytest.raises(MeshnetError) as caught:
            async with fake.route.session():
                pytest.fail("a draining worker took a session")
        assert caught.value.reason == errors_pb2.REASON_DRAINING
        result = await generation.result()
        assert result.finished.reason is FinishReason.LENGTH
        assert len(generation.token_ids) == 40
        async with asyncio.timeout(END):
            assert [await worker.wait() for worker in fake.cluster.workers] == [0, 0]


async def test_sigterm_ends_what_does_not_end_in_time() -> None:
    flags = ("--fake_delay=5ms", "--drain_timeout=100ms", "--context_tokens=100000")
    async with fake_cluster((4,), *flags) as fake:
        with pytest.raises(MeshnetError) as caught:
            async with fake.route.session() as session:
                async for event in session.generate([BOS], max_tokens=90000):
                    if isinstance(event, Token):
                        fake.cluster.workers[0].send(signal.SIGTERM)
        assert caught.value.reason == errors_pb2.REASON_DRAINING
        async with asyncio.timeout(END):
            assert await fake.cluster.workers[0].wait() == 0
        await fake.wait_idle([1])
        assert fake.cluster.workers[1].exit_code is None


async def test_an_idle_worker_ends_at_once_and_cleanly() -> None:
    async with LocalCluster(fake_specs(())) as cluster:
        async with asyncio.timeout(END):
            assert await cluster.workers[0].stop() == 0


async def test_the_log_is_json_and_tells_the_sessions() -> None:
    async with fake_cluster(()) as fake:
        async with fake.route.session(work_id="work-1") as session:
            await session.generate([BOS], max_tokens=1).result()
        await fake.cluster.workers[0].stop()
        records = fake.cluster.workers[0].log_records()
        lines = fake.cluster.workers[0].log.read_text().splitlines()
        assert len(records) == len(lines)
        events = [record["event"] for record in records]
        for event in ("listening", "ready", "session_open", "session_end", "signal", "exit"):
            assert event in events
        (end,) = (record for record in records if record["event"] == "session_end")
        assert (end["work_id"], end["outcome"]) == ("work-1", "completed")


async def test_a_busy_port_is_said_in_json_and_is_a_failure(tmp_path: pathlib.Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        spec = WorkerSpec(flags=(f"--listen=127.0.0.1:{port}",))
        worker = await WorkerProcess.start(spec, tmp_path / "log")
        async with asyncio.timeout(END):
            assert await worker.wait() == 7
    records = worker.log_records()
    assert len(records) == len(worker.log.read_text().splitlines())
    events = [record["event"] for record in records]
    assert events[-2:] == ["listen_failed", "state"]
    states = [record["state"] for record in records if record["event"] == "state"]
    assert states == ["WORKER_STATE_FAILED"]
    assert "grpc" in events


async def test_help_is_no_failure() -> None:
    process = await asyncio.create_subprocess_exec(
        worker_binary(), "--help", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(END):
        out, errors = await process.communicate()
    assert (process.returncode, errors) == (0, b"")
    for flag in (b"--listen ", b"--layers ", b"--model "):
        assert flag in out
    assert b"Exit codes:" in out


async def wait_state(worker: WorkerClient, state: WorkerState) -> None:
    """Waits until the worker is in this state."""
    async with asyncio.timeout(END):
        while (await worker.health()).state is not state:
            await asyncio.sleep(0.005)
