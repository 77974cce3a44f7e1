"""A test in the head's place: what a tail worker does with the frames that reach it."""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest
import xxhash
from meshnet_gguf.client import Limits
from meshnet_gguf.errors import MeshnetError, from_rpc_error
from meshnet_gguf.testing.cluster import FakeCluster, fake_cluster

from proto.meshnet.shard.v1 import boundary_pb2, errors_pb2, frame_pb2, sampling_pb2, shard_pb2

WIDTH = 16
CUT = 4
EPOCH = 2
END = 30.0
BOS = 256
FLAGS = (f"--fake_width={WIDTH}", "--prefill_chunk_tokens=8", "--max_inflight_steps=2")


class Seam:
    """The head's side of a seam and of the return stream to one tail worker."""

    def __init__(self, fake: FakeCluster) -> None:
        self.fake = fake
        self.route = fake.route.to_proto(b"q" * 16, EPOCH)
        tail = fake.route.workers[1].shard
        self.seam: Any = tail.Seam(None)
        self.back: Any = tail.Return(None)

    async def open(self) -> shard_pb2.SeamOpened:
        limits = self.fake.route.capabilities[0].limits
        session = shard_pb2.OpenSession(
            schema_version=1, work_id="work", route=self.route, limits=limits.to_proto()
        )
        await self.send(open=shard_pb2.SeamOpen(session=session, hop_index=1))
        answer = await self.receive()
        assert answer.HasField("opened")
        return answer.opened

    async def attach(self) -> None:
        attach = shard_pb2.ReturnAttach(
            schema_version=1, route_session_id=b"q" * 16, route_epoch=EPOCH
        )
        await self.back.write(shard_pb2.ReturnRequest(attach=attach))
        assert (await self.result_event()).HasField("attached")

    async def send(self, **body: Any) -> None:
        await self.seam.write(shard_pb2.SeamMessage(**body))

    async def receive(self) -> shard_pb2.SeamMessage:
        async with asyncio.timeout(END):
            message = await self.seam.read()
        if not isinstance(message, shard_pb2.SeamMessage):
            pytest.fail("the seam has ended")
        if message.HasField("error"):
            raise MeshnetError.from_proto(message.error)
        return message

    async def result_event(self) -> shard_pb2.ReturnEvent:
        async with asyncio.timeout(END):
            event = await self.back.read()
        if not isinstance(event, shard_pb2.ReturnEvent):
            pytest.fail("the return stream has ended")
        if event.HasField("error"):
            raise MeshnetError.from_proto(event.error)
        return event

    async def result(self) -> frame_pb2.StepResult:
        event = await self.result_event()
        assert event.HasField("result")
        return event.result

    async def refusal(self) -> MeshnetError:
        """Why the worker ends the seam."""
        with pytest.raises(MeshnetError) as caught:
            while True:
                await self.receive()
        # The call's own status says the same.
        with pytest.raises(grpc.aio.AioRpcError) as status:
            while isinstance(await self.seam.read(), shard_pb2.SeamMessage):
                pass
        assert from_rpc_error(status.value).reason == caught.value.reason
        return caught.value

    def close(self) -> None:
        self.seam.cancel()
        self.back.cancel()


@contextlib.asynccontextmanager
async def seam(*flags: str, attached: bool = True) -> AsyncIterator[Seam]:
    """A seam to a tail worker, open and with its return stream."""
    async with fake_cluster((CUT,), *FLAGS, *flags) as fake:
        end = Seam(fake)
        await end.open()
        if attached:
            await end.attach()
        try:
            yield end
        finally:
            end.close()
        await fake.wait_idle()
        # Whatever came, the worker lives and serves others.
        async with fake.route.session() as session:
            assert len((await session.generate([BOS], max_tokens=1).result()).token_ids) == 1


def frame(step: int, start: int, tokens: int = 1, **changes: Any) -> frame_pb2.Frame:
    """A correct step of `tokens` rows, whole in one fragment; `changes` replace fields."""
    residual = [
        0.5 + 0.001 * (start + row + column) for row in range(tokens) for column in range(WIDTH)
    ]
    data = struct.pack(f"<{len(residual)}f", *residual)
    data += struct.pack(f"<{tokens}i", *range(start, start + tokens))
    data += struct.pack(f"<{tokens}i", *range(1, tokens + 1))

    def header(name: str, dtype: int, *shape: int) -> boundary_pb2.TensorHeader:
        size = 4
        for extent in shape:
            size *= extent
        return boundary_pb2.TensorHeader(
            name=name,
            dtype=boundary_pb2.DType.Name(dtype),
            byte_order=boundary_pb2.BYTE_ORDER_LITTLE_ENDIAN,
            compression=boundary_pb2.COMPRESSION_NONE,
            shape=shape,
            byte_length=size,
        )

    fields: dict[str, Any] = {
        "schema_version": 1,
        "work_id": "work",
        "route_session_id": b"q" * 16,
        "route_epoch": EPOCH,
        "step": step,
        "phase": frame_pb2.PHASE_DECODE if tokens == 1 else frame_pb2.PHASE_PREFILL,
        "applied": boundary_pb2.LayerRange(begin=0, end=CUT),
        "start_position": start,
        "token_count": tokens,
        "cache": frame_pb2.CacheExpectation(cached_tokens=start),
        "output_rows": frame_pb2.OUTPUT_ROWS_LAST,
        "boundary_schema": "dense.residual",
        "boundary_version": 1,
        "tensors": [
            header("residual", boundary_pb2.DTYPE_F32, tokens, WIDTH),
            header("positions", boundary_pb2.DTYPE_I32, tokens),
            header("token_ids", boundary_pb2.DTYPE_I32, tokens),
        ],
        "fragment": fragment(data),
    }
    fields.update(changes)
    return frame_pb2.Frame(**fields)


def fragment(data: bytes, index: int = 0, count: int = 1, offset: int = 0) -> boundary_pb2.Fragment:
    return boundary_pb2.Fragment(
        index=index, count=count, offset=offset, data=data, checksum=xxhash.xxh3_64_intdigest(data)
    )


async def test_a_step_is_answered_and_a_repeat_gets_the_same_answer() -> None:
    async with seam() as end:
        await end.send(frame=frame(1, 0, tokens=3))
        first = await end.result()
        assert (first.step, first.cache.cached_tokens, len(first.tokens)) == (1, 3, 1)
        await end.send(frame=frame(1, 0, tokens=3))
        assert await end.result() == first
        await end.send(frame=frame(2, 3))
        second = await end.result()
        assert (second.step, second.cache.cached_tokens) == (2, 4)


async def test_a_step_drops_what_lies_behind_its_start() -> None:
    async with seam() as end:
        await end.send(frame=frame(1, 0, tokens=3))
        await end.result()
        await end.send(frame=frame(2, 3))
        once = await end.result()
        await end.send(frame=frame(3, 3))
        again = await end.result()
        assert again.cache.cached_tokens == 4
        assert again.tokens[0].token_id == once.tokens[0].token_id


async def test_steps_under_way_are_bounded_by_credits() -> None:
    # A slow engine: the first steps are still on their way when the one too many comes.
    async with seam("--fake_delay=2s") as end:
        await end.send(frame=frame(1, 0))
        assert (await end.receive()).credit.steps == 1  # the engine has taken it
        for step in (2, 3, 4):
            await end.send(frame=frame(step, step - 1))
        assert (await end.refusal()).reason == errors_pb2.REASON_FLOW_CONTROL_VIOLATION


async def test_credits_come_back() -> None:
    async with seam() as end:
        returned = 0
        for step in range(1, 9):
            await end.send(frame=frame(step, step - 1))
            await end.result()
            while returned < step - 1:  # the window is two steps
                message = await end.receive()
                assert message.HasField("credit")
                returned += message.credit.steps
        assert returned >= 7


async def test_cancelled_steps_are_not_run() -> None:
    async with seam("--fake_delay=300ms") as end:
        await end.send(frame=frame(1, 0))
        await end.send(frame=frame(2, 1))
        await end.send(cancel=shard_pb2.CancelSteps(through_step=2))
        await end.send(frame=frame(3, 0))
        result = await end.result()
        while result.step == 1:  # it may have run already
            result = await end.result()
        assert (result.step, result.cache.cached_tokens) == (3, 1)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (frame(3, 0), errors_pb2.REASON_STEP_OUT_OF_ORDER),
        (
            frame(1, 1, cache=frame_pb2.CacheExpectation(cached_tokens=1)),
            errors_pb2.REASON_CACHE_MISS,
        ),
        (frame(1, 0, route_epoch=EPOCH - 1), errors_pb2.REASON_STALE_EPOCH),
        (frame(1, 0, route_session_id=b"x" * 16), errors_pb2.REASON_SESSION_UNKNOWN),
        (frame(1, 0, schema_version=2), errors_pb2.REASON_SCHEMA_VERSION_UNSUPPORTED),
        (
            frame(1, 0, applied=boundary_pb2.LayerRange(begin=0, end=3)),
            errors_pb2.REASON_RANGE_MISMATCH,
        ),
        (frame(1, 0, boundary_version=2), errors_pb2.REASON_BOUNDARY_SCHEMA_MISMATCH),
        (
            frame(
                1,
                0,
                reserved_state=frame_pb2.ReservedState(mtp=frame_pb2.MtpBoundary(draft_position=1)),
            ),
            errors_pb2.REASON_RESERVED_FIELD_SET,
        ),
        (frame(1, 0, fragment=fragment(b"\0" * 71)), errors_pb2.REASON_FRAGMENT_SIZE_MISMATCH),
        (
            frame(1, 0, fragment=boundary_pb2.Fragment(count=1, data=b"\0" * 72, checksum=1)),
            errors_pb2.REASON_CHECKSUM_MISMATCH,
        ),
        (
            frame(1, 0, fragment=fragment(struct.pack("<f", float("nan")) * 16 + b"\0" * 8)),
            errors_pb2.REASON_NON_FINITE_VALUE,
        ),
        (
            frame(1, 0, fragment=fragment(b"\0" * 64 + struct.pack("<ii", 5, 1))),
            errors_pb2.REASON_POSITION_MISMATCH,
        ),
        (
            frame(1, 0, fragment=fragment(b"\0" * 64 + struct.pack("<ii", 0, 9999))),
            errors_pb2.REASON_TOKEN_OUT_OF_RANGE,
        ),
        (
            frame(1, 0, sampling=sampling_pb2.SamplingParams(temperature=-1)),
            errors_pb2.REASON_SAMPLING_INVALID,
        ),
        (frame(1, 0, tokens=9), errors_pb2.REASON_FIELD_OUT_OF_BOUNDS),
        (
            frame(1, 0, fragment=fragment(b"\0" * 36, 1, 2, 36)),
            errors_pb2.REASON_FRAGMENT_OUT_OF_ORDER,
        ),
    ],
    ids=lambda value: errors_pb2.Reason.Name(value) if isinstance(value, int) else "",
)
async def test_a_wrong_frame_ends_the_session_with_its_reason(
    changed: frame_pb2.Frame, reason: int
) -> None:
    async with seam() as end:
        await end.send(frame=changed)
        error = await end.refusal()
        assert error.reason == reason, str(error)
        assert error.stage == (CUT, 8)


async def test_a_step_never_comes_again_with_other_content() -> None:
    async with seam() as end:
        await end.send(frame=frame(1, 0))
        await end.result()
        changed = fragment(b"\0" * 64 + struct.pack("<ii", 0, 2))
        await end.send(frame=frame(1, 0, fragment=changed))
        assert (await end.refusal()).reason == errors_pb2.REASON_STEP_CONFLICT


async def test_a_declared_size_beyond_the_bound_is_refused_at_once() -> None:
    """A header that declares 4 GiB, with a few bytes behind it."""
    async with seam() as end:
        before = (await end.fake.route.metrics())[1].resident_bytes
        huge = frame(1, 0)
        huge.tensors[0].shape[0] = 1 << 26
        huge.tensors[0].byte_length = 1 << 32
        huge.token_count = 1 << 26
        huge.fragment.count = 1 << 12
        await end.send(frame=huge)
        assert (await end.refusal()).reason in (
            errors_pb2.REASON_FIELD_OUT_OF_BOUNDS,
            errors_pb2.REASON_BUNDLE_TOO_LARGE,
        )
        after = (await end.fake.route.metrics())[1].resident_bytes
        assert after - before < 64 * 1024 * 1024


@pytest.mark.parametrize("attached", [True, False])
async def test_frames_need_an_open_seam_and_a_return_stream(attached: bool) -> None:
    async with seam(attached=attached) as end:
        if attached:
            session = shard_pb2.OpenSession(schema_version=1, work_id="work", route=end.route)
            await end.send(open=shard_pb2.SeamOpen(session=session, hop_index=1))
        else:
            await end.send(frame=frame(1, 0))
        assert (await end.refusal()).reason == errors_pb2.REASON_LIFECYCLE_VIOLATION


async def test_an_unfinished_bundle_is_told_at_the_end() -> None:
    async with seam() as end:
        whole = frame(1, 0)
        data = whole.fragment.data
        whole.fragment.CopyFrom(fragment(data[:40], 0, 2, 0))
        await end.send(frame=whole)
        await end.seam.done_writing()
        assert (await end.refusal()).reason == errors_pb2.REASON_FRAGMENT_MISSING


async def test_the_smaller_limit_holds() -> None:
    async with fake_cluster((CUT,), *FLAGS) as fake:
        offered = fake.route.capabilities[0].limits
        narrow = Limits(8192, offered.max_bundle_bytes, 4, 1)
        async with fake.route.session(limits=narrow) as session:
            assert session.limits == narrow
            assert session.prefill_chunk_tokens == 4
            narrowed = await session.generate([BOS] * 10, max_tokens=4).result()
        async with fake.route.session() as session:
            assert session.limits == offered
            wide = await session.generate([BOS] * 10, max_tokens=4).result()
        assert narrowed.token_ids == wide.token_ids
