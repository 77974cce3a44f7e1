"""Both ends of a relayed call.

async with Listener(channel, "callee") as listener: async for call in listener.calls(): stream =
await listener.accept(call) while (payload := await stream.receive()) is not None: await
stream.send(payload) await stream.end()

stream = await connect(channel, caller_id="caller", callee_id="callee", method="seam")


"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import grpc.aio

from meshnet.errors import ControlError, Reason, error_from_rpc
from proto.meshnet.control.v1 import relay_pb2 as pb
from proto.meshnet.control.v1 import relay_pb2_grpc

if TYPE_CHECKING:
    from typing import Self

__all__ = ["Listener", "RelayStream", "connect"]


class RelayStream:
    """One side of a call. Every method raises ControlError with the reason of the call's end."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def send(self, payload: bytes) -> None:
        """Returns once there is room for another one."""
        await self._write(pb.RelayFrame(payload=payload))

    async def receive(self) -> bytes | None:
        """The other side's next payload; None when it is done."""
        frame = await self._read()
        if frame is None or frame.WhichOneof("body") == "end":
            return None
        payload: bytes = frame.payload
        return payload

    async def end(self) -> None:
        """Nothing more will be sent."""
        await self._write(pb.RelayFrame(end=pb.RelayEnd()))

    def cancel(self) -> None:
        """Ends the call on both sides at once."""
        self._call.cancel()

    async def _write(self, frame: pb.RelayFrame) -> None:
        try:
            await self._call.write(frame)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        except grpc.aio.UsageError as error:  # over already
            raise await self._reason() from error

    async def _reason(self) -> ControlError:
        code = await self._call.code()
        return ControlError(Reason.PEER_LOST, f"the call is over ({code.name})")

    async def _read(self) -> pb.RelayFrame | None:
        try:
            frame = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        return frame if isinstance(frame, pb.RelayFrame) else None  # the end of the stream


async def connect(
    channel: grpc.aio.Channel,
    *,
    caller_id: str,
    callee_id: str,
    method: str,
    attribution: Mapping[str, str] | None = None,
    credential: bytes = b"",
    timeout: float | None = None,  # noqa: ASYNC109 - the deadline of the whole call
) -> RelayStream:
    """Calls a peer; returns once it has taken up the call. Raises ControlError."""
    stub: Any = relay_pb2_grpc.RelayServiceStub(channel)
    call = stub.Connect(timeout=timeout)
    stream = RelayStream(call)
    opened = pb.RelayOpen(
        caller_id=caller_id,
        callee_id=callee_id,
        method=method,
        attribution=attribution or {},
        credential=credential,
    )
    await stream._write(pb.RelayFrame(open=opened))
    frame = await stream._read()
    if frame is None or frame.WhichOneof("body") != "opened":
        raise ControlError(Reason.PEER_LOST, "expected the relay to open the call")
    return stream


class Listener:
    """Makes a peer reachable under its id, while the block runs."""

    def __init__(self, channel: grpc.aio.Channel, peer_id: str) -> None:
        self._stub: Any = relay_pb2_grpc.RelayServiceStub(channel)
        self._peer_id = peer_id
        self._call: Any = None

    async def __aenter__(self) -> Self:
        """Returns once others can call. Raises ControlError."""
        self._call = self._stub.Listen(pb.ListenRequest(peer_id=self._peer_id))
        await self._read()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """No further calls; those that were taken up go on."""
        self._call.cancel()

    async def _read(self) -> pb.ListenEvent:
        try:
            event = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        if not isinstance(event, pb.ListenEvent):
            raise ControlError(Reason.PEER_LOST, "the relay ended the listening")
        return event

    async def calls(self) -> AsyncIterator[pb.Incoming]:
        """Calls as they come. Raises ControlError when the relay is gone."""
        while True:
            yield (await self._read()).incoming

    async def accept(self, incoming: pb.Incoming) -> RelayStream:
        """Takes up a call."""
        stream = RelayStream(self._stub.Accept())
        await stream._write(pb.RelayFrame(accept=pb.RelayAccept(call_id=incoming.call_id)))
        return stream
