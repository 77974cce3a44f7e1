"""Seams through a real relay: the same bytes, the same ends, and what happens when it dies."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import pytest
from meshnet.testing.server_process import ServerProcess
from meshnet.transport import bind, dial, make_server
from meshnet_gguf.client import Endpoint, LayerRange, Route, Token, open_route
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.local_cluster import LocalCluster, WorkerProcess, WorkerSpec
from meshnet_gguf.testing.cluster import fake_cluster, fake_specs, wait_idle

from proto.meshnet.control.v1 import relay_pb2
from proto.meshnet.shard.v1 import errors_pb2, shard_pb2

BOS = 256
PROMPT = [BOS, *b"a prompt of several chunks"]
FLAGS = ("--prefill_chunk_tokens=4",)
SLOW = ("--fake_delay=3ms", "--context_tokens=100000", *FLAGS)
END = 60.0  # seconds after which a test that hangs is given up


class LeaveError(Exception):
    """Ends a session in the middle."""


@dataclass
class Call:
    """What passed a tap: frames towards the relay, and from it."""

    method: str
    up: list[bytes] = field(default_factory=list)
    down: list[bytes] = field(default_factory=list)


class Tap:
    """Stands between a worker and the relay, hands bytes on and keeps them."""

    def __init__(self, relay: str) -> None:
        self.calls: list[Call] = []
        self._channel: Any = dial(relay)

    def handler(self) -> Any:
        def carry(name: str) -> Any:
            async def handle(_requests: Any, context: Any) -> None:
                await self._carry(name, context)

            return grpc.stream_stream_rpc_method_handler(handle)

        streams = {name: carry(name) for name in ("Listen", "Connect", "Accept")}
        return grpc.method_handlers_generic_handler("meshnet.control.v1.RelayService", streams)

    async def _carry(self, name: str, context: Any) -> None:
        kept = Call(name)
        self.calls.append(kept)
        path = f"/meshnet.control.v1.RelayService/{name}"
        call: Any = self._channel.stream_stream(path)(timeout=context.time_remaining())

        async def up() -> None:
            while isinstance(frame := await context.read(), bytes):
                kept.up.append(frame)
                await call.write(frame)
            await call.done_writing()

        rising = asyncio.create_task(up())
        try:
            while isinstance(frame := await call.read(), bytes):
                kept.down.append(frame)
                await context.write(frame)
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details() or "", error.trailing_metadata())
        finally:
            rising.cancel()
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await rising

    def of(self, name: str) -> list[Call]:
        return [call for call in self.calls if call.method == name]

    async def close(self) -> None:
        await self._channel.close(None)


async def start_relay(*flags: str) -> ServerProcess:
    return await ServerProcess.launch("meshnet.relay_server", *flags)


@contextlib.asynccontextmanager
async def tapped(relay: str) -> AsyncIterator[tuple[Tap, str]]:
    tap = Tap(relay)
    server = make_server()
    server.add_generic_rpc_handlers((tap.handler(),))
    port = bind(server, "127.0.0.1:0")
    await server.start()
    try:
        yield tap, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
        await tap.close()


def without_end(frames: list[bytes]) -> list[bytes]:
    return frames[:-1] if frames[-1] == b"\x2a\x00" else frames


def relayed_specs(relay: str, cuts: Sequence[int], *flags: str) -> list[WorkerSpec]:
    """Stages of which all but the head can be called through the relay, as s0, s1, ..."""
    return [
        WorkerSpec(
            spec.layers,
            flags=(
                *spec.flags,
                f"--relay_peer_id=s{index}",
                *((f"--relay={relay}",) if index else ()),
            ),
        )
        for index, spec in enumerate(fake_specs(cuts, *flags))
    ]


async def listening(worker: WorkerProcess, times: int = 1) -> None:
    """Waits until a worker has reached its relay so many times."""
    async with asyncio.timeout(END):
        while True:
            events = [r for r in worker.log_records() if r.get("event") == "relay_listening"]
            if len(events) >= times:
                return
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def relayed_route(
    relay: str, cuts: Sequence[int] = (4,), *flags: str, caller_relay: str = ""
) -> AsyncIterator[tuple[LocalCluster, Route]]:
    """A route whose every seam, and the return stream, goes through the relay."""
    async with LocalCluster(relayed_specs(relay, cuts, *flags)) as cluster:
        for worker in cluster.workers[1:]:
            await listening(worker)
        head, *others = cluster.endpoints
        endpoints = [Endpoint(head)] + [
            Endpoint(address, caller_relay or relay, f"s{index}")
            for index, address in enumerate(others, 1)
        ]
        async with await open_route(endpoints) as route:
            yield cluster, route


async def answer(route: Route, max_tokens: int = 8) -> tuple[int, ...]:
    async with asyncio.timeout(END), route.session() as session:
        return (await session.generate(PROMPT, max_tokens=max_tokens).result()).token_ids


@pytest.fixture(scope="module")
def expected() -> tuple[int, ...]:
    """What the whole model answers."""

    async def whole() -> tuple[int, ...]:
        async with fake_cluster((), *FLAGS) as fake:
            return await answer(fake.route)

    return asyncio.run(whole())


async def test_frames_pass_byte_for_byte(expected: tuple[int, ...]) -> None:
    async with (
        await start_relay() as relay,
        tapped(relay.endpoint) as (near_head, head_relay),
        tapped(relay.endpoint) as (near_tail, tail_relay),
        relayed_route(tail_relay, (4,), *FLAGS, caller_relay=head_relay) as (_, route),
    ):
        assert await answer(route) == expected
        seam = await relay.wait_event("call", method="Seam", outcome="completed")
        # The head may leave this one when the seam has told it that all is over.
        await relay.wait_event("call", method="Return")
        called, taken = near_head.of("Connect"), near_tail.of("Accept")
        assert [len(called), len(taken)] == [2, 2]
        opened = [relay_pb2.RelayFrame.FromString(call.up[0]).open for call in called]
        assert [(item.caller_id, item.callee_id, item.method) for item in opened] == [
            ("s0", "s1", "Seam"),
            ("s0", "s1", "Return"),
        ]
        for call, other in zip(called, taken, strict=True):
            assert without_end(call.up[1:]) == without_end(other.down)
            assert without_end(other.up[1:]) == without_end(call.down[1:])
        # What was compared are boundaries of the prompt's seven chunks and of each token but one.
        sent = [relay_pb2.RelayFrame.FromString(frame).payload for frame in called[0].up[1:-1]]
        messages = [shard_pb2.SeamMessage.FromString(payload) for payload in sent]
        assert [item.WhichOneof("body") for item in messages] == ["open"] + ["frame"] * 14
        assert all(item.frame.fragment.data for item in messages[1:])
        assert seam["attribution"] == {
            "work": messages[0].open.session.work_id,
            "session": messages[0].open.session.route.route_session_id.hex(),
            "epoch": "1",
        }
        assert seam["frames_to_callee"] == len(sent)
        assert seam["bytes_to_callee"] == sum(map(len, called[0].up[1:-1]))


async def test_every_seam_of_three_stages_can_be_relayed(expected: tuple[int, ...]) -> None:
    async with (
        await start_relay() as relay,
        relayed_route(relay.endpoint, (2, 5), *FLAGS) as (_, route),
    ):
        answers = await asyncio.gather(*(answer(route) for _ in range(4)))
        assert set(answers) == {expected}
        for worker in route.workers:
            await wait_idle(worker)


async def test_many_large_boundaries_queue_nowhere() -> None:
    """More than any buffer holds, to a tail that is slower than everything before it."""
    wide = ("--fake_width=16384", "--prefill_chunk_tokens=16", "--fake_delay=2ms")
    prompt = [BOS] * 1600  # 100 MB of boundaries
    async with (
        await start_relay() as relay,
        relayed_route(
            relay.endpoint, (4,), *wide, "--context_tokens=2048", "--max_bundle_bytes=4194304"
        ) as (_, route),
    ):
        async with asyncio.timeout(END), route.session() as session:
            before = [item.resident_bytes for item in await route.metrics()]
            result = await session.generate(prompt, max_tokens=1).result()
            after = [item.resident_bytes for item in await route.metrics()]
        assert len(result.token_ids) == 1
        assert all(b - a < 48 << 20 for a, b in zip(before, after, strict=True))


async def test_the_deadline_reaches_the_callee() -> None:
    async with (
        await start_relay() as relay,
        tapped(relay.endpoint) as (near_tail, tail_relay),
        relayed_route(tail_relay, (4,), *SLOW, caller_relay=relay.endpoint) as (_, route),
    ):
        with pytest.raises(MeshnetError) as caught:
            async with asyncio.timeout(END), route.session(deadline=1.0) as session:
                await session.generate(PROMPT, max_tokens=50_000).result()
        assert caught.value.reason == errors_pb2.REASON_DEADLINE_EXCEEDED
        for worker in route.workers:
            await wait_idle(worker)
        (listen,) = near_tail.of("Listen")
        events = [relay_pb2.ListenEvent.FromString(event) for event in listen.down]
        assert [event.WhichOneof("body") for event in events] == ["listening"] + ["incoming"] * 2
        # What is left of the session's second, and the second that the relay leaves the stages.
        assert all(1000 < event.incoming.deadline_ms <= 2000 for event in events[1:])


async def test_a_client_that_leaves_frees_all_stages() -> None:
    async with (
        await start_relay() as relay,
        relayed_route(relay.endpoint, (2, 5), *SLOW) as (_, route),
    ):
        with pytest.raises(LeaveError):
            async with asyncio.timeout(END), route.session() as session:
                async for event in session.generate(PROMPT, max_tokens=50_000):
                    if isinstance(event, Token):
                        raise LeaveError
        for worker in route.workers:
            await wait_idle(worker)
        # Two seams and the return stream.
        async with asyncio.timeout(END):
            while sum(event["event"] == "call" for event in relay.events) < 3:
                await asyncio.sleep(0.005)


async def test_a_killed_relay_is_a_structured_error_and_a_new_one_is_found(
    expected: tuple[int, ...],
) -> None:
    relay = await start_relay()
    async with relayed_route(relay.endpoint, (4,), *SLOW) as (cluster, route):
        with pytest.raises(MeshnetError) as caught:
            async with asyncio.timeout(END), route.session(deadline=END) as session:
                async for event in session.generate(PROMPT, max_tokens=50_000):
                    if isinstance(event, Token) and event.position == len(PROMPT) + 3:
                        await relay.kill()
        # Not its deadline's end, which comes later.
        assert caught.value.reason == errors_pb2.REASON_PEER_LOST
        assert caught.value.stage == (4, 8)
        assert "relay" in caught.value.message
        for worker in route.workers:
            await wait_idle(worker)
        with pytest.raises(MeshnetError) as refused:
            await answer(route)
        assert refused.value.reason == errors_pb2.REASON_PEER_UNREACHABLE
        async with await start_relay(f"--listen={relay.endpoint}"):
            await listening(cluster.workers[1], times=2)
            assert await answer(route) == expected


async def test_a_peer_that_nobody_has_heard_of(expected: tuple[int, ...]) -> None:
    async with (
        await start_relay() as relay,
        relayed_route(relay.endpoint, (4,), *FLAGS) as (cluster, route),
    ):
        wrong = [Endpoint(cluster.endpoints[0])]
        wrong.append(Endpoint(cluster.endpoints[1], relay.endpoint, "stranger"))
        async with await open_route(wrong) as elsewhere:
            with pytest.raises(MeshnetError) as caught:
                await answer(elsewhere)
        assert caught.value.reason == errors_pb2.REASON_PEER_UNREACHABLE
        assert caught.value.stage == (4, 8)
        assert "stranger does not listen" in caught.value.message
        assert await answer(route) == expected


async def test_a_worker_without_a_name_dials_no_relay() -> None:
    async with await start_relay() as relay:
        async with LocalCluster(fake_specs((4,), *FLAGS)) as cluster:
            head, tail = cluster.endpoints
            async with await open_route([head, Endpoint(tail, relay.endpoint, "s1")]) as route:
                with pytest.raises(MeshnetError) as caught:
                    await answer(route)
        assert caught.value.reason == errors_pb2.REASON_CONFIGURATION_INVALID


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--relay=127.0.0.1:7200",), "CONFIGURATION_INVALID"),
        (("--relay=127.0.0.1", "--relay_peer_id=s1"), "CONFIGURATION_INVALID"),
        (("--relay=127.0.0.1:7200", "--relay_peer_id=two words"), "CONFIGURATION_INVALID"),
        (("--relay=192.0.2.1:7200", "--relay_peer_id=s1"), "INSECURE_TRANSPORT"),
    ],
)
async def test_flags_that_make_no_sense_are_refused(flags: tuple[str, ...], reason: str) -> None:
    with pytest.raises(MeshnetError) as caught:
        async with LocalCluster([WorkerSpec(LayerRange(0, 8), flags=flags)]):
            pass
    assert caught.value.reason == errors_pb2.Reason.Value(f"REASON_{reason}")
