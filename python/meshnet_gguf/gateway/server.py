"""The gateway's web server, inside a running event loop.

with Listener("127.0.0.1:8080") as listener:
    async with GatewayServer(app, listener) as server:
        print(server.url)
        await server.wait()
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING

import uvicorn
from meshnet.errors import ControlError
from meshnet.transport import KeyFiles, check_listen, server_context

from meshnet_gguf.errors import MeshnetError, from_control_error
from meshnet_gguf.gateway._http_protocol import HttpConfig
from meshnet_gguf.gateway.app import GatewayApp
from proto.meshnet.shard.v1 import errors_pb2

if TYPE_CHECKING:
    from typing import Self

__all__ = ["GatewayServer", "Listener"]

_BACKLOG = 2048


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are for the program, not for its web server."""
        yield


class Listener:
    """A bound address, host:port (port 0: a free one). Use as a context manager.

    With `tls` it speaks https, by what the files hold at each handshake.

    Raises MeshnetError: INSECURE_TRANSPORT for plaintext beyond loopback unless `insecure`,
    CONFIGURATION_INVALID for an address that cannot be had, and for files that cannot be used.
    """

    def __init__(
        self, address: str, *, tls: KeyFiles | None = None, insecure: bool = False
    ) -> None:
        try:
            check_listen(address, secured=tls is not None, insecure=insecure)
            self.tls = None if tls is None else server_context(tls)
        except ControlError as error:
            raise from_control_error(error) from error
        self.socket = _listen(address)

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Gives the address back."""
        self.socket.close()

    @property
    def host(self) -> str:
        """The IP address that it is bound to."""
        return str(self.socket.getsockname()[0])

    @property
    def url(self) -> str:
        """http://host:port as bound."""
        host, port = self.host, self.socket.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        return f"http{'s' if self.tls else ''}://{shown}:{port}"


class GatewayServer:
    """Serves an application while the block runs.

    Leaving the block lets answers under way go on for `drain_seconds`, and closes the application.
    A connection that says nothing, or no whole head of a request, for `head_seconds` is closed, and
    one whose answer is not read for `read_seconds`.
    """

    def __init__(
        self,
        app: GatewayApp,
        listener: Listener,
        *,
        drain_seconds: float = 5.0,
        head_seconds: float = 30.0,
        read_seconds: float = 120.0,
    ) -> None:
        self.url = listener.url
        self._app = app
        self._socket = listener.socket
        tls = listener.tls
        config = HttpConfig(
            app,
            head_seconds=head_seconds,
            read_seconds=read_seconds,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=round(drain_seconds),
            ssl_context_factory=None if tls is None else lambda _config, _default: tls,
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Starts serving."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise MeshnetError(
                    errors_pb2.REASON_CONFIGURATION_INVALID, "the web server did not start"
                )
            await asyncio.sleep(0.005)
        return self

    async def wait(self) -> None:
        """Until the server ends."""
        assert self._task is not None
        await asyncio.shield(self._task)

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stops taking requests, then ends."""
        # Whoever follows the status would go on for ever.
        self._app.feed.end()
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        await self._app.feed.aclose()
        await self._app.serving.aclose()


def _listen(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not (port.isascii() and port.isdecimal() and int(port) < 65536):
        raise MeshnetError(
            errors_pb2.REASON_CONFIGURATION_INVALID, f"expected HOST:PORT, got {address!r}"
        )
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _taken(address, error) from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(where)
        listening.listen(_BACKLOG)
        listening.setblocking(False)
    except OSError as error:
        listening.close()
        raise _taken(address, error) from error
    return listening


def _taken(address: str, error: OSError) -> MeshnetError:
    return MeshnetError(
        errors_pb2.REASON_CONFIGURATION_INVALID,
        f"cannot listen on {address} ({error.strerror}); choose another address",
    )
