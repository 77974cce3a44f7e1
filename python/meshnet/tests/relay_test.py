"""Calls through the relay, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import pytest
from meshnet.errors import ControlError, Reason
from meshnet.relay import CallRecord, RelayOptions
from meshnet.relay_client import Listener, RelayStream, connect
from meshnet.relay_server import RelaySettings, serve
from meshnet.transport import dial

from proto.meshnet.control.v1 import relay_pb2 as pb
from proto.meshnet.control.v1 import relay_pb2_grpc

PATIENCE = 30.0


@dataclass
class Mesh:
    """A relay, and a channel of each peer to it."""

    endpoint: str
    caller: grpc.aio.Channel
    callee: grpc.aio.Channel
    records: list[CallRecord] = field(default_factory=list)

    async def record(self) -> CallRecord:
        async with asyncio.timeout(PATIENCE):
            while not self.records:
                await asyncio.sleep(0.005)
        return self.records.pop()


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    async with running(RelayOptions(accept_seconds=PATIENCE, max_calls=2)) as mesh:
        yield mesh


@contextlib.asynccontextmanager
async def running(options: RelayOptions) -> AsyncIterator[Mesh]:
    records: list[CallRecord] = []
    async with serve(RelaySettings(options=options, record=records.append)) as (endpoint, _):
        caller, callee = dial(endpoint), dial(endpoint)
        try:
            yield Mesh(endpoint, caller, callee, records)
        finally:
            await caller.close(None)
            await callee.close(None)


async def reason(call: Awaitable[object]) -> Reason:
    with pytest.raises(ControlError) as error:
        async with asyncio.timeout(PATIENCE):
            await call
    return error.value.reason


async def open_call(
    mesh: Mesh, listener: Listener, **options: Any
) -> tuple[RelayStream, RelayStream]:
    calling = asyncio.create_task(
        connect(mesh.caller, caller_id="a", callee_id="b", method="seam", **options)
    )
    incoming = await anext(listener.calls())
    accepted = await listener.accept(incoming)
    return await calling, accepted


async def test_bytes_come_out_as_they_went_in(mesh: Mesh) -> None:
    noise = random.Random(7)
    sizes = [0, 1, 127, 128, 65_537, 1 << 20, 3 << 20]
    sent = [noise.randbytes(size) for size in sizes]
    async with Listener(mesh.callee, "b") as listener:
        labels = {"work": "w1", "session": "s1"}
        calling = asyncio.create_task(
            connect(mesh.caller, caller_id="a", callee_id="b", method="seam", attribution=labels)
        )
        incoming = await anext(listener.calls())
        assert (incoming.caller_id, incoming.method) == ("a", "seam")
        assert dict(incoming.attribution) == labels
        assert incoming.deadline_ms == 0
        callee = await listener.accept(incoming)
        caller = await calling

        async def echo() -> None:
            while (payload := await callee.receive()) is not None:
                await callee.send(payload[::-1])
            await callee.end()

        echoing = asyncio.create_task(echo())
        for payload in sent:
            await caller.send(payload)
            assert await caller.receive() == payload[::-1]
        await caller.end()
        assert await caller.receive() is None
        await echoing
        record = await mesh.record()
    assert record.outcome == "completed"
    assert (record.caller_id, record.callee_id, record.attribution) == ("a", "b", labels)
    assert (record.frames_to_callee, record.frames_to_caller) == (7, 7)
    frames = [pb.RelayFrame(payload=payload).ByteSize() for payload in sent]
    assert (record.bytes_to_callee, record.bytes_to_caller) == (sum(frames), sum(frames))


async def test_frames_are_the_same_bytes(mesh: Mesh) -> None:
    """Not only the payload: the relay hands on what it got, whatever its encoding."""
    odd = b"\x22\x03abc\x22\x02de"  # a payload given twice: parsers keep the last
    async with Listener(mesh.callee, "b") as listener:
        ends: list[Any] = [mesh.caller, mesh.callee]
        call = ends[0].stream_stream("/meshnet.control.v1.RelayService/Connect")()
        opened = pb.RelayOpen(caller_id="a", callee_id="b")
        await call.write(pb.RelayFrame(open=opened).SerializeToString())
        incoming = await anext(listener.calls())
        accepting = ends[1].stream_stream("/meshnet.control.v1.RelayService/Accept")()
        accept = pb.RelayAccept(call_id=incoming.call_id)
        await accepting.write(pb.RelayFrame(accept=accept).SerializeToString())
        assert await call.read() == pb.RelayFrame(opened=pb.RelayOpened()).SerializeToString()
        await call.write(odd)
        assert await accepting.read() == odd
        call.cancel()


async def test_a_stalled_call_can_be_cancelled(mesh: Mesh) -> None:
    """Even while the relay waits for the receiver to take a frame."""
    async with Listener(mesh.callee, "b") as listener:
        caller, callee = await open_call(mesh, listener)
        for _ in range(64):
            try:
                async with asyncio.timeout(0.5):
                    await caller.send(bytes(1 << 20))
            except TimeoutError:
                break
        else:
            pytest.fail("the sender was never stopped")
        caller.cancel()
        assert (await mesh.record()).outcome == "CANCELLED"
        found = None
        async with asyncio.timeout(PATIENCE):
            while found is None:
                try:
                    assert await callee.receive() is not None
                except ControlError as error:
                    found = error.reason
        assert found in (Reason.CANCELLED, Reason.PEER_UNREACHABLE)


async def test_each_direction_ends_by_itself(mesh: Mesh) -> None:
    async with Listener(mesh.callee, "b") as listener:
        caller, callee = await open_call(mesh, listener)
        await caller.end()
        assert await callee.receive() is None
        for number in range(3):
            await callee.send(bytes([number]))
        await callee.end()
        assert [await caller.receive() for _ in range(4)] == [b"\0", b"\1", b"\2", None]
        assert (await mesh.record()).outcome == "completed"


async def test_cancellation_reaches_the_other_side(mesh: Mesh) -> None:
    async with Listener(mesh.callee, "b") as listener:
        caller, callee = await open_call(mesh, listener)
        caller.cancel()
        assert await reason(callee.receive()) is Reason.CANCELLED
        assert (await mesh.record()).outcome == "CANCELLED"
        caller, callee = await open_call(mesh, listener)
        callee.cancel()
        assert await reason(caller.receive()) is Reason.PEER_LOST
        assert (await mesh.record()).outcome == "PEER_LOST"


async def test_a_peer_that_disconnects_is_lost(mesh: Mesh) -> None:
    async with Listener(mesh.callee, "b") as listener:
        caller, _ = await open_call(mesh, listener)
        await mesh.callee.close(None)
        assert await reason(caller.receive()) is Reason.PEER_LOST
        assert (await mesh.record()).outcome == "PEER_LOST"


async def test_the_callers_deadline_holds_for_both(mesh: Mesh) -> None:
    async with Listener(mesh.callee, "b") as listener:
        calling = asyncio.create_task(
            connect(mesh.caller, caller_id="a", callee_id="b", method="seam", timeout=1.0)
        )
        incoming = await anext(listener.calls())
        assert 0 < incoming.deadline_ms <= 1100  # gRPC rounds it up
        callee = await listener.accept(incoming)
        caller = await calling
        assert await reason(caller.receive()) is Reason.DEADLINE_EXCEEDED
        assert await reason(callee.receive()) in (Reason.DEADLINE_EXCEEDED, Reason.CANCELLED)


async def test_who_cannot_be_reached(mesh: Mesh) -> None:
    def call() -> Awaitable[RelayStream]:
        return connect(mesh.caller, caller_id="a", callee_id="b", method="seam")

    assert await reason(call()) is Reason.PEER_UNREACHABLE  # does not listen
    async with Listener(mesh.callee, "b") as listener:
        opened = [await open_call(mesh, listener) for _ in range(2)]
        assert await reason(call()) is Reason.PEER_UNREACHABLE  # has enough to do
        for caller, _ in opened:
            caller.cancel()


async def test_a_call_that_nobody_takes_up_fails() -> None:
    async with (
        running(RelayOptions(accept_seconds=0.1)) as mesh,
        Listener(mesh.callee, "b") as listener,
    ):
        call = connect(mesh.caller, caller_id="a", callee_id="b", method="seam")
        assert await reason(call) is Reason.PEER_UNREACHABLE
        stream = await listener.accept(await anext(listener.calls()))
        assert await reason(stream.receive()) is Reason.CALL_UNKNOWN


async def test_a_new_listener_replaces_the_old_one(mesh: Mesh) -> None:
    async with Listener(mesh.callee, "b") as old:
        waiting = asyncio.ensure_future(anext(old.calls()))
        async with Listener(mesh.callee, "b") as new:
            assert await reason(waiting) is Reason.PEER_LOST
            caller, callee = await open_call(mesh, new)
            await caller.send(b"x")
            assert await callee.receive() == b"x"
            caller.cancel()


@pytest.mark.parametrize(
    "first",
    [
        pb.RelayFrame(payload=b"x"),
        pb.RelayFrame(),
        pb.RelayFrame(open=pb.RelayOpen(caller_id="a b", callee_id="b")),
        pb.RelayFrame(open=pb.RelayOpen(caller_id="a", callee_id="b", method="m" * 257)),
    ],
    ids=["payload", "nothing", "bad id", "long method"],
)
async def test_calls_that_begin_wrongly_are_refused(mesh: Mesh, first: pb.RelayFrame) -> None:
    stub: Any = relay_pb2_grpc.RelayServiceStub(mesh.caller)
    stream = RelayStream(stub.Connect())
    with contextlib.suppress(ControlError):
        await stream._write(first)
    found = await reason(stream.receive())
    assert found in (Reason.LIFECYCLE_VIOLATION, Reason.FIELD_OUT_OF_BOUNDS)


async def test_a_slow_receiver_stops_the_sender(mesh: Mesh) -> None:
    """What is under way is bounded: by far fewer frames than the sender has."""
    frames = 400
    async with Listener(mesh.callee, "b") as listener:
        caller, callee = await open_call(mesh, listener)
        sent = 0

        async def send() -> None:
            nonlocal sent
            for _ in range(frames):
                await caller.send(bytes(1 << 20))
                sent += 1
            await caller.end()

        sending = asyncio.create_task(send())
        stalled = -1
        async with asyncio.timeout(PATIENCE):
            while stalled != sent or not sent:
                stalled = sent
                await asyncio.sleep(0.3)
        assert stalled < 64
        received = 0
        while await callee.receive() is not None:
            received += 1
        await sending
        assert received == frames
        caller.cancel()
