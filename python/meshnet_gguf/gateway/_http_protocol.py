"""HTTP on a connection: uvicorn's protocol, with bounds, and with clients that offer HTTP/2.

    uvicorn.Server(HttpConfig(app, head_seconds=30.0, read_seconds=120.0))

What uvicorn leaves open: the head of a request may take for ever and be of any size, and so may the
reading of an answer; a body is lost where the client offers to upgrade the connection, as Java's
own client does with every request; and whoever has sent a second request before the answer to the
first, and goes away, is not missed.
"""

from __future__ import annotations

import asyncio
import http
import json
from typing import Any

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from meshnet_gguf.gateway._failures import RequestError, error_body, http_status
from proto.meshnet.shard.v1 import errors_pb2

__all__ = ["HttpConfig"]

# What a request may have beside its body.
_MAX_HEAD_BYTES = 64 * 1024
# What may come of further requests while one is answered.
_MAX_AHEAD_BYTES = 256 * 1024
# Clients keep connections for reuse, most of them for a minute; who closes first should be them.
_KEEP_ALIVE_SECONDS = 75


class HttpConfig(uvicorn.Config):
    """Configuration of a server that speaks HTTP this way.

    The head of a request has to be complete `head_seconds` after the connection, or the head's
    first byte. Who does not read an answer for `read_seconds` is gone, as far as we can see.
    """

    def __init__(
        self, app: ASGIApp, *, head_seconds: float, read_seconds: float, **options: Any
    ) -> None:
        super().__init__(app, http=_HttpProtocol, timeout_keep_alive=_KEEP_ALIVE_SECONDS, **options)
        self.head_seconds = head_seconds
        self.read_seconds = read_seconds


class _HttpProtocol(HttpToolsProtocol):
    def __init__(
        self,
        config: HttpConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._head_seconds = config.head_seconds
        self._head_timer: asyncio.TimerHandle | None = None
        self._read_seconds = config.read_seconds
        self._read_timer: asyncio.TimerHandle | None = None
        # Whether a request's body comes, or may come, next.
        self._has_head = False
        # Bytes since there was a part of a body, or the end of a head.
        self._unused = 0
        self._ahead = 0
        self._answering: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_awaiting_head()
        self._stop_awaiting_reader()
        # uvicorn does so only where the client has closed: a reset one would be kept until then.
        self._unset_keepalive_if_required()
        # Of several requests uvicorn tells the last one only.
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._head_timer is None and not self._has_head:
            self._await_head()
        self._unused += len(data)
        rest = memoryview(data)
        while rest:
            try:
                self.parser.feed_data(rest)
                break
            except httptools.HttpParserUpgrade as upgrade:
                rest = rest[upgrade.args[0] :]
                self._stay()
            except httptools.HttpParserError:
                self.send_400_response("expected a request in HTTP/1.1, got something else")
                return
        if self._unused > _MAX_HEAD_BYTES:
            self._refuse(
                RequestError(
                    errors_pb2.REASON_FRAME_TOO_LARGE,
                    f"expected at most {_MAX_HEAD_BYTES} bytes of headers, got more",
                    status=431,
                )
            )
        elif self.pipeline:
            self._ahead += len(data)
            if self._ahead > _MAX_AHEAD_BYTES:
                self.transport.close()
            else:
                # Whoever does not read does not see the client go, either.
                self.flow.resume_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        # abort(): what close() still wants to send, nobody takes.
        self._read_timer = self.loop.call_later(self._read_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_awaiting_reader()
        super().resume_writing()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._has_head = False

    def on_headers_complete(self) -> None:
        if self.parser.get_method() == b"CONNECT":
            raise ValueError("this is no proxy")
        if self.parser.should_upgrade():
            return  # _stay() comes next
        self._has_head = True
        self._unused = 0
        self._stop_awaiting_head()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unused = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            self._has_head = False
            super().on_message_complete()

    def on_response_complete(self) -> None:
        self._ahead = 0
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(RequestError(errors_pb2.REASON_MALFORMED_MESSAGE, msg))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    @property
    def _is_answering(self) -> bool:
        return self._answering is not None and not self._answering.response_complete

    def _stay(self) -> None:
        """Goes on with HTTP/1.1 and the same request, as if no upgrade had been offered."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        head = b"%s %s HTTP/%s\r\n" % (method, self.url, version)
        fields = [b"%s: %s\r\n" % field for field in self.headers if field[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.parser.feed_data(head + b"".join(fields) + b"\r\n")

    def _refuse(self, error: RequestError) -> None:
        """Says what is wrong with what comes on this connection, and closes it."""
        self.logger.warning("%s", error.message)
        if not self._is_answering:
            status, body = http_status(error), json.dumps(error_body(error)).encode()
            self.transport.write(
                f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\n"
                "content-type: application/json\r\n"
                f"content-length: {len(body)}\r\n"
                "connection: close\r\n\r\n".encode()
                + body
            )
        self.transport.close()

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self._head_seconds, self.transport.close)

    def _stop_awaiting_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_awaiting_reader(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None
