"""The relay on loopback: how much it carries, and how much later a frame arrives for it.

The relay's process has a core of its own; both peers are this process. Latency is one-way, from
before a frame is sent until it is received, by one clock; what the relay adds is its 99th
percentile less the median of the same frames over a direct stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from meshnet.relay_client import Listener, RelayStream, connect
from meshnet.testing.server_process import ServerProcess
from meshnet.transport import bind, dial, make_server

from benchmarks.control.cores import hold_to
from benchmarks.control.metrics import Metric, Settings, at_least, at_most, percentile
from proto.meshnet.control.v1 import relay_pb2 as pb

__all__ = ["measure"]

_FRAME_BYTES = 1 << 20
_SMALL_BYTES = 256

_Send = Callable[[bytes], Awaitable[None]]
_Receive = Callable[[], Awaitable[bytes | None]]


async def measure(settings: Settings) -> AsyncIterator[Metric]:
    """See the module."""
    frames = 16 if settings.quick else 4096
    small = 50 if settings.quick else 5000
    relay = await ServerProcess.launch("meshnet.relay_server")
    async with relay, _relayed(relay.endpoint) as (caller, callee):
        hold_to(relay.pid, settings.core)
        used = relay.cpu_seconds()
        seconds = await _carry(caller.send, callee.receive, frames)
        share = (relay.cpu_seconds() - used) / seconds
        rate = frames * _FRAME_BYTES / seconds / 1e6
        yield Metric("relay_mb_per_s", rate, "MB/s", at_least(200))
        yield Metric("relay_core_share", share, "")
        through = await _latencies(caller.send, callee.receive, small)
    async with _direct() as (send, receive):
        direct = await _latencies(send, receive, small)
    middle = percentile(direct, 0.5)
    yield Metric("relay_direct_p50_ms", middle, "ms")
    yield Metric("relay_added_p50_ms", percentile(through, 0.5) - middle, "ms")
    yield Metric("relay_added_p99_ms", percentile(through, 0.99) - middle, "ms", at_most(1))


@contextlib.asynccontextmanager
async def _relayed(endpoint: str) -> AsyncIterator[tuple[RelayStream, RelayStream]]:
    """Both ends of a call through the relay."""
    one, other = dial(endpoint), dial(endpoint)
    async with Listener(other, "callee") as listener:
        calling = asyncio.create_task(
            connect(one, caller_id="caller", callee_id="callee", method="benchmark")
        )
        callee = await listener.accept(await anext(listener.calls()))
        caller = await calling
        yield caller, callee
        caller.cancel()
    await one.close(None)
    await other.close(None)


@contextlib.asynccontextmanager
async def _direct() -> AsyncIterator[tuple[_Send, _Receive]]:
    """Both ends of a stream between the same peers without the relay."""
    arrived: asyncio.Queue[bytes] = asyncio.Queue()

    async def take(frames: AsyncIterator[pb.RelayFrame], _context: Any) -> AsyncIterator[bytes]:
        async for frame in frames:
            arrived.put_nowait(frame.payload)
        yield b""

    server = make_server()
    handler = grpc.stream_stream_rpc_method_handler(
        take, request_deserializer=pb.RelayFrame.FromString
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("d", {"d": handler}),))
    port = bind(server, "127.0.0.1:0")
    await server.start()
    channel: Any = dial(f"127.0.0.1:{port}")
    call = channel.stream_stream("/d/d", request_serializer=pb.RelayFrame.SerializeToString)()

    async def send(payload: bytes) -> None:
        await call.write(pb.RelayFrame(payload=payload))

    yield send, arrived.get
    call.cancel()
    await channel.close(None)
    await server.stop(None)


async def _carry(send: _Send, receive: _Receive, frames: int) -> float:
    """Seconds until all of them have arrived."""
    payload = bytes(_FRAME_BYTES)

    async def sending() -> None:
        for _ in range(frames):
            await send(payload)

    started = time.perf_counter()
    task = asyncio.create_task(sending())
    for _ in range(frames):
        found = await receive()
        assert found is not None
        assert len(found) == _FRAME_BYTES
    await task
    return time.perf_counter() - started


async def _latencies(send: _Send, receive: _Receive, frames: int) -> list[float]:
    """Milliseconds from sending to receiving each of some frames, one after the other."""
    took = []
    for _ in range(frames):
        started = time.perf_counter_ns()
        _, found = await asyncio.gather(send(bytes(_SMALL_BYTES)), receive())
        took.append((time.perf_counter_ns() - started) / 1e6)
        assert found == bytes(_SMALL_BYTES)
    return took
