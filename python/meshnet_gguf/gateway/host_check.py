"""Under which names a gateway may be asked, so that no web page reaches it under one of its own.

    hosts = AllowedHosts.listening_on("127.0.0.1", ["models.example.org"])
    hosts.allow("localhost:8080")

Whoever serves a web page can give the page's name a second address, for example 127.0.0.1: the
visitor's browser then takes a gateway there for a part of the page (DNS rebinding). It still says
the page's name, in Host and in Origin. An IP address is no such name, it leads nowhere else.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Receive, Scope, Send

from meshnet_gguf.gateway._failures import RequestError
from proto.meshnet.shard.v1 import errors_pb2

if TYPE_CHECKING:
    from typing import Self

__all__ = ["AllowedHosts", "HostCheck"]

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_ANYWHERE = frozenset({"0.0.0.0", "::"})  # noqa: S104 - addresses to compare with
_AUTHORITY = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::[0-9]{0,5})?")
_ORIGIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://(.*)")


@dataclass(frozen=True)
class AllowedHosts:
    """Names and addresses, in lower case; with `any_address` every IP address, too."""

    names: frozenset[str] = _LOOPBACK
    any_address: bool = False

    @classmethod
    def listening_on(cls, host: str, more: Iterable[str] = ()) -> Self:
        """Those of a gateway that is bound to `host`: itself, loopback, this machine's name."""
        names = {_plain(name) for name in (host, socket.gethostname(), *more)}
        return cls(_LOOPBACK | names, host in _ANYWHERE)

    def allow(self, authority: str) -> bool:
        """Whether HOST, HOST:PORT or [HOST]:PORT may be asked for; ports are not looked at."""
        found = _AUTHORITY.fullmatch(authority)
        if found is None:
            return False
        name = _plain(found[1] or found[2])
        return name in self.names or (self.any_address and _is_address(name))

    def check(self, hosts: Iterable[str], origins: Iterable[str]) -> None:
        """What a request's headers say. Raises RequestError (NOT_SERVED).

        A request without a Host is none of a browser's.
        """
        for host in hosts:
            if not self.allow(host):
                raise _refused("Host", host)
        for origin in origins:
            found = _ORIGIN.fullmatch(origin)
            if found is None or not self.allow(found[1]):
                raise _refused("Origin", origin)


def _plain(name: str) -> str:
    return name.lower().removeprefix("[").removesuffix("]").removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _refused(header: str, value: str) -> RequestError:
    return RequestError(
        errors_pb2.REASON_NOT_SERVED,
        f"expected an address or name of this gateway in {header}, got {value[:200]!r}; if it is "
        "one, start the gateway with it in --allowed-hosts",
        status=403,
    )


class HostCheck:
    """ASGI middleware: `refuse` answers what `hosts` does not allow."""

    def __init__(
        self,
        app: ASGIApp,
        hosts: AllowedHosts,
        refuse: Callable[[RequestError, Scope, Receive, Send], Awaitable[None]],
    ) -> None:
        self._app = app
        self._hosts = hosts
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or not."""
        if scope["type"] == "http":
            said: dict[bytes, list[str]] = {b"host": [], b"origin": []}
            for name, value in scope["headers"]:
                if name in said:
                    said[name].append(value.decode("latin-1"))
            try:
                self._hosts.check(said[b"host"], said[b"origin"])
            except RequestError as error:
                await self._refuse(error, scope, receive, send)
                return
        await self._app(scope, receive, send)
