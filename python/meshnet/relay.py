"""The relay: joins the streams of two peers that can only dial out.

    relay = Relay(Telemetry("relay"), RelayOptions())
    server.add_generic_rpc_handlers((relay.handler(),))

Frames are never parsed on their way: what one side's gRPC message holds is handed to the other
side's as the same bytes. See proto/meshnet/control/v1/relay.proto.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from meshnet.errors import ControlError, Reason, abort
from meshnet.tasks import cancel
from meshnet.telemetry import Telemetry
from proto.meshnet.control.v1 import relay_pb2 as pb

__all__ = ["CallRecord", "Relay", "RelayOptions"]

_SERVICE: Final = "meshnet.control.v1.RelayService"
_IDENTIFIER: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_MAX_TEXT: Final = 256
_MAX_PAIRS: Final = 16
_MAX_CREDENTIAL: Final = 2048
_GRACE_SECONDS: Final = 1.0
# The tag of RelayFrame.payload: how every frame but the first and the last begins.
_PAYLOAD_TAG: Final = 0x22
_END: Final = pb.RelayFrame(end=pb.RelayEnd()).SerializeToString()

_Context = grpc.aio.ServicerContext[bytes, bytes]


@dataclass(frozen=True)
class RelayOptions:
    """What the operator decides."""

    # How long a callee may take to take up a call.
    accept_seconds: float = 10.0
    # Calls of one callee at once, taken up or not.
    max_calls: int = 256
    max_listeners: int = 10_000


@dataclass(frozen=True)
class CallRecord:
    """What a call was, when it is over. Bytes are whole frames."""

    caller_id: str
    callee_id: str
    method: str
    attribution: Mapping[str, str]
    frames_to_callee: int
    bytes_to_callee: int
    frames_to_caller: int
    bytes_to_caller: int
    # "completed", or the reason why not.
    outcome: str
    seconds: float


@dataclass
class _Call:
    """One call between its first and its last frame."""

    call_id: str
    opened: pb.RelayOpen
    ended: asyncio.Future[ControlError | None]
    caller: _Context
    callee: asyncio.Future[_Context]
    # One a direction: held while a frame is written in it.
    writing: tuple[asyncio.Lock, asyncio.Lock] = field(
        default_factory=lambda: (asyncio.Lock(), asyncio.Lock())
    )
    frames: list[int] = field(default_factory=lambda: [0, 0])
    byte_counts: list[int] = field(default_factory=lambda: [0, 0])
    open_directions: int = 2
    began: float = field(default_factory=time.perf_counter)

    def end(self, error: ControlError | None) -> None:
        if not self.ended.done():
            self.ended.set_result(error)


@dataclass
class _Listener:
    peer_id: str
    events: asyncio.Queue[pb.ListenEvent | None]
    calls: int = 0


class Relay:
    """See the module. `record` gets every call that is over; the default writes a line of JSON."""

    def __init__(
        self,
        telemetry: Telemetry,
        options: RelayOptions,
        record: Callable[[CallRecord], None] | None = None,
    ) -> None:
        self._options = options
        self._record = record or _print_record
        self._listeners: dict[str, _Listener] = {}
        self._calls: dict[str, _Call] = {}
        self._refused = telemetry.refused
        self._finished = telemetry.counter("calls_finished_total", "Calls over.", ("outcome",))
        self._taking = telemetry.histogram(
            "take_up_seconds", "From a call's first frame until its callee took it up."
        )
        self._lasting = telemetry.histogram(
            "stream_seconds", "From a call's first frame to its end.", ("outcome",), streams=True
        )
        self._frames = telemetry.counter("frames_total", "Frames carried.", ("direction",))
        self._bytes = telemetry.counter("bytes_total", "Bytes carried.", ("direction",))
        telemetry.gauge("listeners", "Peers that listen.", lambda: len(self._listeners))
        telemetry.gauge("open_calls", "Calls now.", lambda: len(self._calls))

    def handler(self) -> Any:
        """The service, for a server; messages are left as bytes."""
        return grpc.method_handlers_generic_handler(
            _SERVICE,
            {
                "Listen": grpc.unary_stream_rpc_method_handler(self._listen),
                "Connect": grpc.stream_stream_rpc_method_handler(self._connect),
                "Accept": grpc.stream_stream_rpc_method_handler(self._accept),
            },
        )

    async def _listen(self, request: bytes, context: _Context) -> AsyncIterator[bytes]:
        try:
            peer_id = _parsed(pb.ListenRequest, request).peer_id
            _check_identifier("peer_id", peer_id)
            _authenticate(context, peer_id)
            if len(self._listeners) >= self._options.max_listeners:
                raise ControlError(Reason.PEER_UNREACHABLE, "the relay has no room for listeners")
        except ControlError as error:
            self._refused("Listen", error.reason)
            await abort(context, error)
        listener = _Listener(peer_id, asyncio.Queue())
        older = self._listeners.get(peer_id)
        if older is not None:
            older.events.put_nowait(None)
        self._listeners[peer_id] = listener
        try:
            yield pb.ListenEvent(listening=pb.Listening()).SerializeToString()
            while (event := await listener.events.get()) is not None:
                yield event.SerializeToString()
            await abort(
                context, ControlError(Reason.PEER_LOST, f"a newer listener took over {peer_id}")
            )
        finally:
            if self._listeners.get(peer_id) is listener:
                del self._listeners[peer_id]

    async def _connect(self, _requests: Any, context: _Context) -> None:
        try:
            call, listener = await self._open(context)
        except ControlError as error:
            self._refused("Connect", error.reason)
            await abort(context, error)
        try:
            callee = await self._taken_up(call)
            self._taking.observe(time.perf_counter() - call.began)
            opened = pb.RelayFrame(opened=pb.RelayOpened())
            await context.write(opened.SerializeToString())
            await self._carry(call, context, callee, 0)
        except ControlError as error:
            call.end(error)
            await self._abort(call, context, error, 1)
        except asyncio.CancelledError:
            call.end(self._caller_gone(context))
            raise
        except grpc.aio.BaseError:
            call.end(ControlError(Reason.PEER_LOST, f"{call.opened.caller_id} went away"))
            raise
        finally:
            call.end(None)
            listener.calls -= 1
            self._calls.pop(call.call_id, None)
            self._finish(call)

    def _caller_gone(self, context: _Context) -> ControlError:
        left = context.time_remaining()
        if left is not None and left <= 0:
            return ControlError(Reason.DEADLINE_EXCEEDED, "the caller's deadline has passed")
        return ControlError(Reason.CANCELLED, "the caller cancelled the call or went away")

    async def _open(self, context: _Context) -> tuple[_Call, _Listener]:
        """The call that a Connect stream's first frame asks for, announced to its callee."""
        opened = await _first(context, "open")
        for name in ("caller_id", "callee_id"):
            _check_identifier(name, getattr(opened.open, name))
        _authenticate(context, opened.open.caller_id)
        texts = [opened.open.method, *(t for p in opened.open.attribution.items() for t in p)]
        if len(texts) > 1 + 2 * _MAX_PAIRS or any(len(t.encode()) > _MAX_TEXT for t in texts):
            raise ControlError(
                Reason.FIELD_OUT_OF_BOUNDS,
                f"expected a method and at most {_MAX_PAIRS} pairs of attribution, "
                f"{_MAX_TEXT} bytes each",
            )
        if len(opened.open.credential) > _MAX_CREDENTIAL:
            raise ControlError(
                Reason.FIELD_OUT_OF_BOUNDS,
                f"expected a credential of at most {_MAX_CREDENTIAL} bytes, "
                f"got {len(opened.open.credential)}",
            )
        listener = self._listeners.get(opened.open.callee_id)
        if listener is None or listener.calls >= self._options.max_calls:
            why = "does not listen" if listener is None else f"has {listener.calls} calls already"
            raise ControlError(
                Reason.PEER_UNREACHABLE, f"{opened.open.callee_id} {why}; try again later"
            )
        loop = asyncio.get_running_loop()
        call = _Call(
            secrets.token_hex(16),
            opened.open,
            loop.create_future(),
            context,
            loop.create_future(),
        )
        self._calls[call.call_id] = call
        listener.calls += 1
        left = context.time_remaining()
        incoming = pb.Incoming(
            call_id=call.call_id,
            caller_id=opened.open.caller_id,
            method=opened.open.method,
            deadline_ms=0 if left is None else max(1, min(int(left * 1000), 2**32 - 1)),
            attribution=opened.open.attribution,
            credential=opened.open.credential,
        )
        listener.events.put_nowait(pb.ListenEvent(incoming=incoming))
        return call, listener

    async def _taken_up(self, call: _Call) -> _Context:
        try:
            return await asyncio.wait_for(call.callee, self._options.accept_seconds)
        except TimeoutError:
            raise ControlError(
                Reason.PEER_UNREACHABLE,
                f"expected {call.opened.callee_id} to take up the call within "
                f"{self._options.accept_seconds:g} s",
            ) from None

    async def _accept(self, _requests: Any, context: _Context) -> None:
        try:
            accepted = await _first(context, "accept")
            call = self._calls.get(accepted.accept.call_id)
            if call is None or call.callee.done():
                raise ControlError(Reason.CALL_UNKNOWN, "expected the id of a call that waits")
            _authenticate(context, call.opened.callee_id)
        except ControlError as error:
            self._refused("Accept", error.reason)
            await abort(context, error)
        call.callee.set_result(context)
        try:
            await self._carry(call, context, call.caller, 1)
        except ControlError as error:
            call.end(error)
            await self._abort(call, context, error, 0)
        except (asyncio.CancelledError, grpc.aio.BaseError):
            call.end(ControlError(Reason.PEER_LOST, f"{call.opened.callee_id} went away"))
            raise

    async def _carry(self, call: _Call, source: _Context, target: _Context, way: int) -> None:
        """Carries one direction until the call is over.

        Raises ControlError: why it ended early. Returns once both directions are done.
        """
        pump = asyncio.create_task(self._pump(call, source, target, way))
        try:
            either: set[asyncio.Future[Any]] = {pump, call.ended}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if pump.done() and not pump.cancelled():
                pump.result()  # its error, if it has one
            error = await asyncio.shield(call.ended)
        finally:
            await cancel(pump)
        if error is not None:
            raise error

    async def _pump(self, call: _Call, source: _Context, target: _Context, way: int) -> None:
        """Frame by frame: the next is read once the last one is on its way."""
        while True:
            frame: Any = await source.read()
            if not isinstance(frame, bytes):
                # Cancelled or gone, of which its handler hears; a stream that only stops is as bad.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(call.ended), _GRACE_SECONDS)
                    return
                raise ControlError(Reason.PEER_LOST, "a stream stopped without its end frame")
            if not frame or frame[0] != _PAYLOAD_TAG:
                if frame != _END:
                    raise ControlError(
                        Reason.LIFECYCLE_VIOLATION, "expected payload after the first frame"
                    )
                break
            call.frames[way] += 1
            call.byte_counts[way] += len(frame)
            if not await self._write(call, target, frame, way):
                return
        if await self._write(call, target, _END, way):
            call.open_directions -= 1
            if not call.open_directions:
                call.end(None)

    async def _write(self, call: _Call, target: _Context, frame: bytes, way: int) -> bool:
        """Whether the frame is on its way; if not, the other side is over, as its handler tells."""
        async with call.writing[way]:
            try:
                await target.write(frame)
            except (grpc.aio.BaseError, grpc.aio.InternalError, asyncio.InvalidStateError):
                return False
        return True

    async def _abort(self, call: _Call, context: _Context, error: ControlError, way: int) -> None:
        """Ends one side. `way` is the direction that writes to it.

        gRPC takes no status while a frame is being written. A receiver that does not even take that
        frame gets its stream cut.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_SECONDS), call.writing[way]:
                pass
        await abort(context, error)

    def _finish(self, call: _Call) -> None:
        error = call.ended.result()
        outcome = "completed" if error is None else error.reason.name
        self._finished.labels(outcome).inc()
        seconds = time.perf_counter() - call.began
        self._lasting.labels(outcome).observe(seconds)
        for way, name in enumerate(("to_callee", "to_caller")):
            self._frames.labels(name).inc(call.frames[way])
            self._bytes.labels(name).inc(call.byte_counts[way])
        self._record(
            CallRecord(
                call.opened.caller_id,
                call.opened.callee_id,
                call.opened.method,
                dict(call.opened.attribution),
                call.frames[0],
                call.byte_counts[0],
                call.frames[1],
                call.byte_counts[1],
                outcome,
                seconds,
            )
        )


def _print_record(record: CallRecord) -> None:
    print(json.dumps({"event": "call", **vars(record)}), file=sys.stderr, flush=True)


async def _first(context: _Context, kind: str) -> pb.RelayFrame:
    first: Any = await context.read()
    if not isinstance(first, bytes):
        raise ControlError(Reason.LIFECYCLE_VIOLATION, f"expected `{kind}` first, got the end")
    frame: pb.RelayFrame = _parsed(pb.RelayFrame, first)
    if frame.WhichOneof("body") != kind:
        raise ControlError(
            Reason.LIFECYCLE_VIOLATION, f"expected `{kind}` first, got {frame.WhichOneof('body')}"
        )
    return frame


def _parsed(kind: Any, message: bytes) -> Any:
    try:
        return kind.FromString(message)
    except DecodeError as error:
        raise ControlError(
            Reason.MALFORMED_MESSAGE, f"expected a {kind.DESCRIPTOR.name}: {error}"
        ) from error


def _check_identifier(name: str, value: str) -> None:
    if not _IDENTIFIER.fullmatch(value):
        raise ControlError(
            Reason.FIELD_OUT_OF_BOUNDS,
            f"expected {name} of 1 to 128 characters [A-Za-z0-9._:-], got {value[:140]!r}",
        )


def _authenticate(context: _Context, peer_id: str) -> None:
    """With TLS, a peer is one of its certificate's names."""
    names = context.auth_context()
    if b"insecure" in names.get("transport_security_type", (b"insecure",)):
        return
    known = [
        name
        for kind in ("x509_subject_alternative_name", "x509_common_name")
        for name in names.get(kind, ())
    ]
    if peer_id.encode() not in known:
        raise ControlError(
            Reason.UNAUTHENTICATED,
            "expected a name of the certificate "
            f"({b', '.join(known).decode(errors='replace') or 'it has none'}), got {peer_id}; "
            "call under that name, or have a certificate issued for this one",
        )
