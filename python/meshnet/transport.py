"""Where servers may listen, and how clients dial: mutual TLS, or loopback, or an explicit word.

security = Security(TlsFiles(cert, key, authorities))
port = bind(server, "0.0.0.0:7000", security)
channel = dial("tracker.example.org:7000", security)

TLS files are read again while all runs: by a server at every handshake, by a Line for further
calls. Certificates are renewed, and authorities replaced, without a restart; files that cannot be
read, do not fit each other while they are being replaced, or have run out change nothing.


"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import pathlib
import ssl
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import grpc
import grpc.aio
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

from meshnet.errors import ControlError, Reason

__all__ = [
    "CHANNEL_OPTIONS",
    "KeyFiles",
    "Line",
    "Security",
    "TlsFiles",
    "bind",
    "check_listen",
    "dial",
    "follow_files",
    "is_loopback",
    "make_server",
    "server_context",
]

_Stub = TypeVar("_Stub")

_UNIX: Final = ("unix:", "unix-abstract:")
_MAX_MESSAGE_BYTES = 72 << 20
CHANNEL_OPTIONS: Final[Sequence[tuple[str, Any]]] = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    # A server that comes back is found again at once, not after gRPC's backoff of up to minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
_SERVER_OPTIONS = (
    *CHANNEL_OPTIONS,
    ("grpc.so_reuseport", 0),
    # Peers ping as often as they were told to.
    ("grpc.http2.max_ping_strikes", 0),
    # Calls that wait to be taken up: from 1000 on gRPC would drop some at random, with a bare
    # CANCELLED and no reason. As many as a tracker has workers may come at once after a pause.
    ("grpc.server.max_pending_requests", 20_000),
    ("grpc.server.max_pending_requests_hard_limit", 40_000),
)


@dataclass(frozen=True)
class KeyFiles:
    """PEM files: our certificate chain, and its key."""

    certificate: pathlib.Path
    key: pathlib.Path

    def paths(self) -> tuple[pathlib.Path, ...]:
        """All of them."""
        return (self.certificate, self.key)

    def read(self) -> tuple[bytes, ...]:
        """Their contents. Raises ControlError (CONFIGURATION_INVALID)."""
        try:
            return tuple(path.read_bytes() for path in self.paths())
        except OSError as error:
            raise ControlError(
                Reason.CONFIGURATION_INVALID, f"expected a readable file: {error}"
            ) from error

    def checked(self) -> tuple[bytes, ...]:
        """Their contents, which fit each other and are valid now.

        Raises ControlError (CONFIGURATION_INVALID).
        """
        certificate, key, *authorities = contents = self.read()
        try:
            ours = x509.load_pem_x509_certificate(certificate)
            private: Any = serialization.load_pem_private_key(key, None)
            fits = private.public_key() == ours.public_key()
            for authority in authorities:
                x509.load_pem_x509_certificates(authority)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise ControlError(
                Reason.CONFIGURATION_INVALID,
                f"expected PEM files at {', '.join(map(str, self.paths()))}: {error}",
            ) from error
        if not fits:
            raise ControlError(
                Reason.CONFIGURATION_INVALID,
                f"expected {self.key} to be the key of {self.certificate}",
            )
        begins, ends = ours.not_valid_before_utc, ours.not_valid_after_utc
        if not begins <= datetime.datetime.now(datetime.UTC) <= ends:
            raise ControlError(
                Reason.CONFIGURATION_INVALID,
                f"expected a certificate that is valid now, {self.certificate} is valid from "
                f"{begins:%Y-%m-%d %H:%M} to {ends:%Y-%m-%d %H:%M} UTC; issue it anew",
            )
        return contents

    def stamp(self) -> tuple[tuple[int, int, int], ...]:
        """Differs when a file was replaced; a file that is not there has one, too."""
        return tuple(_stamp(path) for path in self.paths())


@dataclass(frozen=True)
class TlsFiles(KeyFiles):
    """With the authorities of the others: both ends prove who they are."""

    authority: pathlib.Path

    @classmethod
    def named(cls, certificate: str, key: str, authority: str) -> TlsFiles | None:
        """Of a command line; None when none is named.

        Raises ControlError (CONFIGURATION_INVALID) when only some are.
        """
        names = (certificate, key, authority)
        if not any(names):
            return None
        if not all(names):
            raise ControlError(
                Reason.CONFIGURATION_INVALID,
                "expected a certificate, its key and the authorities of the others together: both "
                "ends of a connection prove who they are",
            )
        return cls(*(pathlib.Path(name) for name in names))

    def paths(self) -> tuple[pathlib.Path, ...]:
        """All of them."""
        return (*super().paths(), self.authority)


def _stamp(path: pathlib.Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except OSError:
        return (0, 0, 0)
    return (found.st_ino, found.st_mtime_ns, found.st_size)


@dataclass(frozen=True)
class Security:
    """How the ends of connections prove who they are: one value for whoever listens or dials.

    Without `tls` only loopback is served and dialed, or anything when `insecure` says so.
    `server_name` is what dialed servers' certificates must carry instead of the endpoint's host.
    """

    tls: TlsFiles | None = None
    insecure: bool = False
    server_name: str = ""

    def check(self, endpoint: str) -> None:
        """Raises ControlError (INSECURE_TRANSPORT) unless the endpoint may be dialed."""
        if self.tls is None and not self.insecure and not is_loopback(endpoint):
            raise ControlError(
                Reason.INSECURE_TRANSPORT,
                f"expected TLS for {endpoint}, which is not a loopback address; "
                "name a certificate, a key and an authority, or say --insecure",
            )


def is_loopback(endpoint: str) -> bool:
    """Whether HOST:PORT, [HOST]:PORT or unix:PATH stays on this machine."""
    if endpoint.startswith(_UNIX):
        return True
    host = endpoint.rpartition(":")[0].removeprefix("[").removesuffix("]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_listen(listen: str, *, secured: bool, insecure: bool) -> None:
    """What everything of ours that listens asks before it binds HOST:PORT.

    Raises ControlError: CONFIGURATION_INVALID for a port that there is not, of which gRPC would
    take the lower 16 bits; INSECURE_TRANSPORT for an address beyond loopback without TLS, unless
    the operator said that the network is trusted.
    """
    if not listen.startswith(_UNIX) and not _has_port(listen):
        raise ControlError(Reason.CONFIGURATION_INVALID, f"expected HOST:PORT, got {listen!r}")
    if not secured and not insecure and not is_loopback(listen):
        raise ControlError(
            Reason.INSECURE_TRANSPORT,
            f"expected TLS to serve on {listen}, which is not a loopback address; "
            "name a certificate and its key, or say --insecure if the network itself is trusted",
        )


def _has_port(listen: str) -> bool:
    _, colon, port = listen.rpartition(":")
    if not (colon and port.isascii() and port.isdecimal()):
        return False
    return len(port) <= 5 and int(port) <= 65535


def make_server() -> grpc.aio.Server:
    """A server with our limits."""
    return grpc.aio.server(options=list(_SERVER_OPTIONS))


def bind(server: grpc.aio.Server, listen: str, security: Security | None = None) -> int:
    """Adds HOST:PORT to a server; the port that it got.

    Raises ControlError: INSECURE_TRANSPORT, CONFIGURATION_INVALID.
    """
    security = security or Security()
    tls = security.tls
    check_listen(listen, secured=tls is not None, insecure=security.insecure)
    try:
        if tls is None:
            port = server.add_insecure_port(listen)
        else:
            port = server.add_secure_port(listen, _server_credentials(tls))
    except RuntimeError as error:
        raise ControlError(
            Reason.CONFIGURATION_INVALID, f"expected to listen on {listen}: {error}"
        ) from error
    return port


def _server_credentials(tls: TlsFiles) -> grpc.ServerCredentials:
    """Mutual TLS by what the files hold at each handshake."""
    lock = threading.Lock()
    current = tls.checked()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal current
        with lock:
            try:
                found = tls.checked()
            except ControlError:
                return None
            if found == current:
                return None
            current = found
            return _configuration(*found)

    # grpc-stubs do not know that None keeps what is in use.
    fetcher: Any = fetch
    return grpc.dynamic_ssl_server_credentials(_configuration(*current), fetcher, True)


def _configuration(
    certificate: bytes, key: bytes, authority: bytes
) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(key, certificate)], authority)


def server_context(files: KeyFiles) -> ssl.SSLContext:
    """For a server that is not gRPC's: what the files hold at each handshake, likewise.

    Clients must show a certificate where the files name authorities. Raises ControlError
    (CONFIGURATION_INVALID).
    """
    context = _context(files)
    follow_files(context, files)
    return context


def follow_files(context: ssl.SSLContext, files: KeyFiles) -> None:
    """Makes a context that was made of these files use what they hold at each handshake."""
    lock = threading.Lock()
    stamp, current = files.stamp(), context

    def fetch(connection: Any, _name: str | None, _made_with: ssl.SSLContext) -> None:
        nonlocal stamp, current
        with lock:
            now = files.stamp()
            if now != stamp:
                with contextlib.suppress(ControlError):
                    stamp, current = now, _context(files)
            connection.context = current

    context.sni_callback = fetch


def _context(files: KeyFiles) -> ssl.SSLContext:
    files.checked()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(files.certificate, files.key)
        if isinstance(files, TlsFiles):
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(files.authority)
    except OSError as error:  # SSLError is one
        raise ControlError(
            Reason.CONFIGURATION_INVALID, f"expected TLS files that can be used: {error}"
        ) from error
    return context


def dial(
    endpoint: str,
    security: Security | None = None,
    options: Sequence[tuple[str, Any]] = CHANNEL_OPTIONS,
) -> grpc.aio.Channel:
    """A channel to HOST:PORT. Raises ControlError: INSECURE_TRANSPORT, CONFIGURATION_INVALID."""
    security = security or Security()
    security.check(endpoint)
    if security.tls is None:
        return grpc.aio.insecure_channel(endpoint, options=list(options))
    certificate, key, authority = security.tls.checked()
    credentials = grpc.ssl_channel_credentials(authority, key, certificate)
    names = []
    if security.server_name:
        names = [("grpc.ssl_target_name_override", security.server_name)]
    return grpc.aio.secure_channel(endpoint, credentials, options=[*options, *names])


class Line:
    """A way to HOST:PORT for as long as its owner lives, whatever becomes of the TLS files.

        await line.stub(TrackerServiceStub).Register(request)

    Raises ControlError as dial() does.
    """

    def __init__(
        self,
        endpoint: str,
        security: Security | None = None,
        options: Sequence[tuple[str, Any]] = CHANNEL_OPTIONS,
    ) -> None:
        self.endpoint = endpoint
        self._security = security or Security()
        self._options = options
        self._stamp = self._seen()
        self._channel = dial(endpoint, self._security, options)
        # Dialed with what the files held before; calls under way are on them.
        self._before: list[grpc.aio.Channel] = []
        self._stubs: dict[Callable[[grpc.aio.Channel], Any], Any] = {}

    @property
    def channel(self) -> grpc.aio.Channel:
        """For the next call: dialed with what the TLS files hold now."""
        seen = self._seen()
        if seen != self._stamp:
            try:
                channel = dial(self.endpoint, self._security, self._options)
            except ControlError:
                return self._channel  # files that are being replaced
            self._stamp = seen
            self._before.append(self._channel)
            self._channel = channel
            self._stubs.clear()
        return self._channel

    def stub(self, service: Callable[[grpc.aio.Channel], _Stub]) -> _Stub:
        """A service's stub, for the next call."""
        channel = self.channel
        if service not in self._stubs:
            self._stubs[service] = service(channel)
        found: _Stub = self._stubs[service]
        return found

    def _seen(self) -> object:
        return None if self._security.tls is None else self._security.tls.stamp()

    async def close(self) -> None:
        """Closes the connections; calls under way fail."""
        await asyncio.gather(*(channel.close(None) for channel in (*self._before, self._channel)))
