"""Where servers may listen, and how clients dial: mutual TLS, or loopback, or an explicit word.

port = bind(server, "0.0.0.0:7000", TlsFiles(cert, key, ca)) channel =
dial("tracker.example.org:7000", TlsFiles(cert, key, ca))

A server reads its TLS files again at every handshake: certificates are renewed, and authorities
replaced, without a restart.


"""

from __future__ import annotations

import ipaddress
import pathlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

from meshnet.errors import ControlError, Reason

__all__ = ["TlsFiles", "bind", "dial", "is_loopback", "make_server"]

_MAX_MESSAGE_BYTES = 72 << 20
_OPTIONS: Sequence[tuple[str, Any]] = (
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
# Peers ping as often as they were told to.
_SERVER_OPTIONS = (*_OPTIONS, ("grpc.so_reuseport", 0), ("grpc.http2.max_ping_strikes", 0))


@dataclass(frozen=True)
class TlsFiles:
    """PEM files: our certificate chain and key, and the authority of the others."""

    certificate: pathlib.Path
    key: pathlib.Path
    authority: pathlib.Path

    def read(self) -> tuple[bytes, bytes, bytes]:
        """Their contents. Raises ControlError (CONFIGURATION_INVALID)."""
        try:
            return (
                self.certificate.read_bytes(),
                self.key.read_bytes(),
                self.authority.read_bytes(),
            )
        except OSError as error:
            raise ControlError(
                Reason.CONFIGURATION_INVALID, f"expected a readable file: {error}"
            ) from error

    def checked(self) -> tuple[bytes, bytes, bytes]:
        """Their contents, which fit each other. Raises ControlError (CONFIGURATION_INVALID)."""
        certificate, key, authority = self.read()
        try:
            ours = x509.load_pem_x509_certificate(certificate).public_key()
            private: Any = serialization.load_pem_private_key(key, None)
            fits = private.public_key() == ours
            x509.load_pem_x509_certificates(authority)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise ControlError(
                Reason.CONFIGURATION_INVALID,
                f"expected PEM files at {self.certificate}, {self.key} and {self.authority}: "
                f"{error}",
            ) from error
        if not fits:
            raise ControlError(
                Reason.CONFIGURATION_INVALID,
                f"expected {self.key} to be the key of {self.certificate}",
            )
        return certificate, key, authority


def is_loopback(endpoint: str) -> bool:
    """Whether HOST:PORT (or [HOST]:PORT) stays on this machine."""
    host = endpoint.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check(endpoint: str, tls: TlsFiles | None, insecure: bool) -> None:
    if tls is None and not insecure and not is_loopback(endpoint):
        raise ControlError(
            Reason.INSECURE_TRANSPORT,
            f"expected TLS for {endpoint}, which is not a loopback address; "
            "name a certificate, a key and an authority, or say --insecure",
        )


def make_server() -> grpc.aio.Server:
    """A server with our limits."""
    return grpc.aio.server(options=list(_SERVER_OPTIONS))


def bind(
    server: grpc.aio.Server, listen: str, tls: TlsFiles | None = None, *, insecure: bool = False
) -> int:
    """Adds HOST:PORT to a server; the port that it got.

    Raises ControlError: INSECURE_TRANSPORT, CONFIGURATION_INVALID.
    """
    _check(listen, tls, insecure)
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
    """Mutual TLS by what the files hold at each handshake.

    Files that cannot be read, or do not fit each other while they are being replaced, change
    nothing.
    """
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


def dial(endpoint: str, tls: TlsFiles | None = None, *, insecure: bool = False) -> grpc.aio.Channel:
    """A channel to HOST:PORT. Raises ControlError: INSECURE_TRANSPORT, CONFIGURATION_INVALID."""
    _check(endpoint, tls, insecure)
    if tls is None:
        return grpc.aio.insecure_channel(endpoint, options=list(_OPTIONS))
    certificate, key, authority = tls.read()
    credentials = grpc.ssl_channel_credentials(authority, key, certificate)
    return grpc.aio.secure_channel(endpoint, credentials, options=list(_OPTIONS))
