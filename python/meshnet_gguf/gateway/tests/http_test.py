"""What clients may do on a connection: byte by byte, as HTTP/1.1 has it, and as it has not."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from meshnet_gguf.testing.gateway import MODEL, FakeGateway, fake_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")
END = 60.0
SLOW = ("--fake_delay=3ms", "--context_tokens=100000")
CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
SHORT: dict[str, Any] = {**BODY, "max_tokens": 2}
LONG: dict[str, Any] = {**BODY, "max_tokens": 50000}
# What Java's client sends with every request without TLS, and curl with --http2.
UPGRADE = (
    "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[FakeGateway]:
    async with fake_gateway((4,), *SLOW) as running:
        yield running


class Connection:
    """A client's end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, *data: bytes) -> None:
        for each in data:
            self.writer.write(each)
            await self.writer.drain()

    async def answer(self) -> tuple[int, dict[str, Any]]:
        """Status and body of the next answer, which has a length."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower()
        (length,) = [line for line in head.split("\r\n") if line.startswith("content-length:")]
        body = await self.reader.readexactly(int(length.split(":")[1]))
        return int(head.split()[1]), json.loads(body)

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


@contextlib.asynccontextmanager
async def connection(gateway: FakeGateway) -> AsyncIterator[Connection]:
    host, port = gateway.url.removeprefix("http://").split(":")
    async with asyncio.timeout(END):
        opened = Connection(*await asyncio.open_connection(host, int(port)))
        try:
            yield opened
        finally:
            await opened.close()


def request(body: dict[str, Any], more: str = "") -> bytes:
    data = json.dumps(body).encode()
    return (
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{more}"
        f"Content-Length: {len(data)}\r\n\r\n".encode()
        + data
    )


@pytest.mark.parametrize("together", [True, False])
async def test_a_client_that_offers_another_protocol_is_answered_in_this_one(
    gateway: FakeGateway, together: bool
) -> None:
    async with connection(gateway) as client:
        whole = request(SHORT, UPGRADE)
        end = whole.index(b"\r\n\r\n") + 4
        # Java's client sends head and body one after the other.
        parts = [whole] if together else [whole[:end], whole[end:]]
        for _ in range(2):
            await client.send(*parts)
            status, answer = await client.answer()
            assert (status, answer["usage"]["completion_tokens"]) == (200, 2)


async def test_requests_on_one_connection_are_answered_in_order(gateway: FakeGateway) -> None:
    async with connection(gateway) as client:
        await client.send(b"".join(request({**SHORT, "max_tokens": count}) for count in (3, 1, 2)))
        counts = [(await client.answer())[1]["usage"]["completion_tokens"] for _ in range(3)]
        assert counts == [3, 1, 2]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("behind", [b"", request(SHORT)])
async def test_a_client_that_has_sent_more_is_missed_too(
    gateway: FakeGateway, stream: bool, behind: bytes
) -> None:
    async with connection(gateway) as client:
        await client.send(request({**LONG, "stream": stream}), behind)
        while not gateway.admission.active:
            await asyncio.sleep(0.01)
    while gateway.admission.active:
        await asyncio.sleep(0.01)
    await gateway.fake.wait_idle()


async def test_who_sends_too_much_ahead_is_cut_off(gateway: FakeGateway) -> None:
    async with connection(gateway) as client:
        await client.send(request(LONG))
        while not gateway.admission.active:
            await asyncio.sleep(0.01)
        with contextlib.suppress(ConnectionError):
            await client.send(*[request({**SHORT, "user": "a" * 10_000})] * 100)
            assert await client.reader.read() == b""
    while gateway.admission.active:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"HELLO\r\n\r\n", 400, "MALFORMED_MESSAGE"),
        (b"CONNECT example.org:443 HTTP/1.1\r\nHost: localhost\r\n\r\n", 400, "MALFORMED_MESSAGE"),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 100_000, 431, "FRAME_TOO_LARGE"),
        (b"GET /" + b"a" * 100_000, 431, "FRAME_TOO_LARGE"),
        (b"GET / HTTP/1.1\r\n" + b"X: a\r\n" * 20_000, 431, "FRAME_TOO_LARGE"),
    ],
)
async def test_what_is_no_request_is_refused(
    gateway: FakeGateway, sent: bytes, status: int, code: str
) -> None:
    async with connection(gateway) as client:
        await client.send(sent)
        found, answer = await client.answer()
        assert (found, answer["error"]["code"]) == (status, code)
        with contextlib.suppress(ConnectionError):
            assert await client.reader.read() == b""


async def test_what_follows_a_body_has_bounds_as_well(gateway: FakeGateway) -> None:
    async with connection(gateway) as client:
        head = "POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
        with contextlib.suppress(ConnectionError):
            await client.send(head.encode(), *[b"X: " + b"a" * 1000 + b"\r\n"] * 100)
            assert b"X: a" not in await client.reader.read()


async def test_a_fault_of_a_later_request_is_not_put_into_an_answer(gateway: FakeGateway) -> None:
    async with connection(gateway) as client:
        await client.send(request({**LONG, "stream": True}))
        assert (await client.reader.readline()).split()[1] == b"200"
        await client.send(b"HELLO\r\n\r\n")
        assert b"HTTP/1.1" not in await client.reader.read()
    await gateway.fake.wait_idle()


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: localhost\r\n"])
async def test_who_says_nothing_is_not_waited_for(sent: bytes) -> None:
    async with fake_gateway((), head_seconds=0.05) as gateway, connection(gateway) as silent:
        with contextlib.suppress(ConnectionError):
            await silent.send(sent)
            assert await silent.reader.read() == b""


async def test_who_has_asked_is_served_for_longer() -> None:
    seconds = 0.05
    loop = asyncio.get_running_loop()
    async with fake_gateway((), *SLOW, head_seconds=seconds) as gateway:
        answered = False
        while not answered:  # a busy machine may take longer than that to send a request
            async with connection(gateway) as client:
                with contextlib.suppress(ConnectionError):
                    await client.send(request({**LONG, "stream": True}))
                    answered = b"200" in await client.reader.readline()
                until = loop.time() + 2 * seconds
                while answered and loop.time() < until:
                    assert await client.reader.readline()


async def test_who_does_not_read_an_answer_frees_every_stage() -> None:
    async with fake_gateway((), "--context_tokens=100000", read_seconds=0.05) as gateway:
        async with connection(gateway) as client:
            # Nothing is read: everything between the two ends is full soon.
            many = {**LONG, "stream": True, "logprobs": True, "top_logprobs": 20}
            await client.send(request(many))
            while not gateway.admission.active:
                await asyncio.sleep(0.01)
            while gateway.admission.active:
                await asyncio.sleep(0.01)
            await gateway.fake.wait_idle()
        metrics = await gateway.fake.route.metrics()
        assert [stage.sessions_completed for stage in metrics] == [0]
