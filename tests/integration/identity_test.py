"""Workers that do not fit together are refused, by the client and by themselves."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable

import grpc.aio
import pytest
from meshnet_gguf.client import LayerRange, Route, Session, open_route
from meshnet_gguf.errors import MeshnetError, from_rpc_error
from meshnet_gguf.local_cluster import LocalCluster, WorkerSpec
from meshnet_gguf.testing.cluster import FakeCluster, fake_cluster

from proto.meshnet.shard.v1 import boundary_pb2, errors_pb2, shard_pb2

BOS = 256
END = 60.0


@contextlib.asynccontextmanager
async def workers(*specs: WorkerSpec) -> AsyncIterator[LocalCluster]:
    async with asyncio.timeout(END), LocalCluster(specs) as cluster:
        yield cluster


async def refused_route(cluster: LocalCluster) -> MeshnetError:
    with pytest.raises(MeshnetError) as caught:
        await open_route(cluster.endpoints)
    for endpoint in cluster.endpoints:
        assert endpoint in caught.value.message
    return caught.value


def other(layers: LayerRange, *flags: str) -> WorkerSpec:
    return WorkerSpec(layers, flags=flags)


@pytest.mark.parametrize(
    ("flag", "reason", "said"),
    [
        ("--fake_artifact=another", errors_pb2.REASON_ARTIFACT_MISMATCH, "load the same file"),
        ("--fake_width=32", errors_pb2.REASON_ARTIFACT_MISMATCH, ""),
        ("--prefill_chunk_tokens=8", errors_pb2.REASON_RECIPE_MISMATCH, "'8'"),
        ("--batch_policy=shared", errors_pb2.REASON_RECIPE_MISMATCH, "'shared'"),
    ],
)
async def test_the_client_refuses_workers_of_two_kinds(flag: str, reason: int, said: str) -> None:
    head = other(LayerRange(0, 4))
    async with workers(head, other(LayerRange(4, 8), flag)) as cluster:
        error = await refused_route(cluster)
        if flag == "--fake_width=32":
            # Another width is another pretended model: whatever differs first is named.
            assert error.reason in (reason, errors_pb2.REASON_RECIPE_MISMATCH)
        else:
            assert error.reason == reason
        assert said in error.message


async def test_asking_for_multi_token_prediction_is_refused_by_name() -> None:
    async with fake_cluster((4,)) as fake:
        with pytest.raises(MeshnetError) as caught:
            async with fake.route.session(mtp=True):
                pytest.fail("a session with MTP opened")
        assert caught.value.reason == errors_pb2.REASON_FEATURE_UNSUPPORTED
        assert "multi-token prediction (MTP) is reserved" in caught.value.message
        await fake.wait_idle()


@pytest.mark.parametrize(("begin", "said"), [(5, "nobody has [4, 5)"), (3, "both have [3, 4)")])
async def test_the_client_refuses_gaps_and_overlaps(begin: int, said: str) -> None:
    async with workers(other(LayerRange(0, 4)), other(LayerRange(begin, 8))) as cluster:
        error = await refused_route(cluster)
        assert error.reason == errors_pb2.REASON_ROUTE_INVALID
        assert said in error.message


def forge(route: Route, change: Callable[[shard_pb2.OpenSession], None]) -> Session:
    session = route.session()
    change(session._open_message)
    return session


async def refusal(session: Session) -> MeshnetError:
    with pytest.raises(MeshnetError) as caught:
        async with asyncio.timeout(END), session:
            pytest.fail("a forged route was opened")
    return caught.value


def set_artifact(message: shard_pb2.OpenSession) -> None:
    message.route.artifact_sha256 = "0" * 64


def set_recipe(message: shard_pb2.OpenSession) -> None:
    message.route.recipe_fingerprint = "0" * 64


def set_layers(message: shard_pb2.OpenSession) -> None:
    message.route.model_layers = 9
    message.route.hops[-1].range.end = 9


def move_cut(message: shard_pb2.OpenSession) -> None:
    message.route.hops[0].range.end = 3
    message.route.hops[1].range.begin = 3


def leave_gap(message: shard_pb2.OpenSession) -> None:
    message.route.hops[1].range.begin = 5


def overlap(message: shard_pb2.OpenSession) -> None:
    message.route.hops[1].range.begin = 3


def drop_hops(message: shard_pb2.OpenSession) -> None:
    del message.route.hops[:]


def drop_tail(message: shard_pb2.OpenSession) -> None:
    del message.route.hops[1]


def swap_hops(message: shard_pb2.OpenSession) -> None:
    first, second = (shard_pb2.Hop.FromString(h.SerializeToString()) for h in message.route.hops)
    del message.route.hops[:]
    message.route.hops.extend([second, first])


def many_hops(message: shard_pb2.OpenSession) -> None:
    message.route.model_layers = 65
    del message.route.hops[:]
    for index in range(65):
        layers = boundary_pb2.LayerRange(begin=index, end=index + 1)
        message.route.hops.append(shard_pb2.Hop(endpoint="127.0.0.1:1", range=layers))


def short_id(message: shard_pb2.OpenSession) -> None:
    message.route.route_session_id = b"short"


def epoch_zero(message: shard_pb2.OpenSession) -> None:
    message.route.route_epoch = 0


def wrong_version(message: shard_pb2.OpenSession) -> None:
    message.schema_version = 2


def bad_work_id(message: shard_pb2.OpenSession) -> None:
    message.work_id = "spaces are not allowed"


def huge_frames(message: shard_pb2.OpenSession) -> None:
    message.limits.max_frame_bytes = 1 << 40


def tiny_frames(message: shard_pb2.OpenSession) -> None:
    message.limits.max_frame_bytes = 100


FORGERIES: list[tuple[Callable[[shard_pb2.OpenSession], None], int]] = [
    (set_artifact, errors_pb2.REASON_ARTIFACT_MISMATCH),
    (set_recipe, errors_pb2.REASON_RECIPE_MISMATCH),
    (set_layers, errors_pb2.REASON_RANGE_MISMATCH),
    (move_cut, errors_pb2.REASON_RANGE_MISMATCH),
    (leave_gap, errors_pb2.REASON_ROUTE_INVALID),
    (overlap, errors_pb2.REASON_ROUTE_INVALID),
    (drop_hops, errors_pb2.REASON_ROUTE_INVALID),
    (drop_tail, errors_pb2.REASON_ROUTE_INVALID),
    (swap_hops, errors_pb2.REASON_ROUTE_INVALID),
    (many_hops, errors_pb2.REASON_ROUTE_INVALID),
    (short_id, errors_pb2.REASON_ROUTE_INVALID),
    (epoch_zero, errors_pb2.REASON_ROUTE_INVALID),
    (wrong_version, errors_pb2.REASON_SCHEMA_VERSION_UNSUPPORTED),
    (bad_work_id, errors_pb2.REASON_FIELD_OUT_OF_BOUNDS),
    (huge_frames, errors_pb2.REASON_FIELD_OUT_OF_BOUNDS),
    (tiny_frames, errors_pb2.REASON_FIELD_OUT_OF_BOUNDS),
]


async def test_the_head_refuses_every_forged_route() -> None:
    async with fake_cluster((4,)) as fake:
        for change, reason in FORGERIES:
            error = await refusal(forge(fake.route, change))
            assert error.reason == reason, f"{change.__name__}: {error}"
        await fake.wait_idle()
        metrics = (await fake.route.metrics())[0]
        assert sum(metrics.refusals.values()) == len(FORGERIES)
        assert metrics.sessions_opened == 0
        await healthy(fake)


async def healthy(fake: FakeCluster) -> None:
    """The cluster still serves."""
    async with asyncio.timeout(END), fake.route.session() as session:
        assert len((await session.generate([BOS], max_tokens=3).result()).token_ids) == 3


@pytest.mark.parametrize(
    ("flags", "layers", "reason"),
    [
        (("--fake_artifact=another",), LayerRange(4, 8), errors_pb2.REASON_ARTIFACT_MISMATCH),
        (("--prefill_chunk_tokens=8",), LayerRange(4, 8), errors_pb2.REASON_RECIPE_MISMATCH),
        ((), LayerRange(5, 8), errors_pb2.REASON_RANGE_MISMATCH),
        ((), LayerRange(4, 7), errors_pb2.REASON_RANGE_MISMATCH),
    ],
)
async def test_a_later_stage_checks_its_own_identity(
    flags: tuple[str, ...], layers: LayerRange, reason: int
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        fake = await stack.enter_async_context(fake_cluster((4,)))
        wrong = await stack.enter_async_context(workers(other(layers, *flags)))

        def lead_astray(message: shard_pb2.OpenSession) -> None:
            message.route.hops[1].endpoint = wrong.endpoints[0]

        error = await refusal(forge(fake.route, lead_astray))
        assert error.reason == reason
        assert error.stage is not None
        await fake.wait_idle()
        await healthy(fake)


async def test_a_next_stage_that_is_not_there() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, but nobody listens

        def lead_astray(message: shard_pb2.OpenSession) -> None:
            message.route.hops[1].endpoint = f"127.0.0.1:{unused.getsockname()[1]}"

        async with fake_cluster((4,)) as fake:
            error = await refusal(forge(fake.route, lead_astray))
            assert error.reason == errors_pb2.REASON_PEER_UNREACHABLE
            assert error.stage == (4, 8)
            await fake.wait_idle()


async def test_a_next_stage_beyond_loopback_needs_tls() -> None:
    def lead_astray(message: shard_pb2.OpenSession) -> None:
        message.route.hops[1].endpoint = "192.0.2.1:7000"

    async with fake_cluster((4,)) as fake:
        error = await refusal(forge(fake.route, lead_astray))
        assert error.reason == errors_pb2.REASON_INSECURE_TRANSPORT
        await fake.wait_idle()


async def test_a_newer_epoch_ends_the_older_and_an_older_is_refused() -> None:
    async with fake_cluster((4,)) as fake:
        key = b"k" * 16
        old = fake.route.session(route_session_id=key, route_epoch=2)
        with pytest.raises(MeshnetError) as caught:
            async with old:
                async with fake.route.session(route_session_id=key, route_epoch=3) as new:
                    assert len((await new.generate([BOS], max_tokens=3).result()).token_ids) == 3
                await old.generate([BOS], max_tokens=1).result()
        assert caught.value.reason == errors_pb2.REASON_STALE_EPOCH
        error = await refusal(fake.route.session(route_session_id=key, route_epoch=2))
        assert error.reason == errors_pb2.REASON_STALE_EPOCH
        await fake.wait_idle()


async def test_the_same_session_is_not_opened_twice() -> None:
    async with fake_cluster((4,)) as fake:
        key = b"k" * 16
        async with fake.route.session(route_session_id=key) as session:
            error = await refusal(fake.route.session(route_session_id=key))
            assert error.reason == errors_pb2.REASON_SESSION_EXISTS
            # And it does not disturb the one that is open.
            assert len((await session.generate([BOS], max_tokens=3).result()).token_ids) == 3
        await fake.wait_idle()


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (b"\xff\xff\xff", errors_pb2.REASON_MALFORMED_MESSAGE),
        (b"", errors_pb2.REASON_LIFECYCLE_VIOLATION),
        # Field 100, which no version has.
        (b"\xa0\x06\x01", errors_pb2.REASON_UNKNOWN_FIELD),
        # cancel before open
        (b"\x1a\x02\x08\x01", errors_pb2.REASON_LIFECYCLE_VIOLATION),
        (b"\x0a\x80\x80\x80\x02" + b"\0" * 4194304, errors_pb2.REASON_FRAME_TOO_LARGE),
    ],
    ids=["no protobuf", "empty", "unknown field", "out of order", "too large"],
)
@pytest.mark.parametrize("method", ["Session", "Seam", "Return"])
async def test_raw_bytes_get_a_reason(method: str, message: bytes, reason: int) -> None:
    async with fake_cluster((4,)) as fake:
        for worker in fake.route.workers:
            call = worker.channel.stream_stream(
                f"/meshnet.shard.v1.ShardService/{method}", None, None
            )(None)
            await call.write(message)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async with asyncio.timeout(END):
                    while isinstance(await call.read(), bytes):
                        pass
            error = from_rpc_error(caught.value)
            if (method, reason) == ("Return", errors_pb2.REASON_LIFECYCLE_VIOLATION):
                continue  # these bytes happen to mean something else there
            assert error.reason == reason, str(error)
        await fake.wait_idle()
        await healthy(fake)


async def test_a_second_open_ends_the_session() -> None:
    async with fake_cluster((4,)) as fake:
        session = fake.route.session()
        with pytest.raises(MeshnetError) as caught:
            async with asyncio.timeout(END), session:
                await session._send(shard_pb2.SessionRequest(open=session._open_message))
                await session.generate([BOS], max_tokens=1).result()
        assert caught.value.reason == errors_pb2.REASON_LIFECYCLE_VIOLATION
        await fake.wait_idle()
