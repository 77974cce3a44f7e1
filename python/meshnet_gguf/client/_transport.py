"""Channels: plaintext on loopback, (m)TLS elsewhere."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

import grpc
import grpc.aio

from meshnet_gguf.errors import MeshnetError
from proto.meshnet.shard.v1 import errors_pb2

# The largest frame that the protocol allows, with room for the message around it.
_MAX_MESSAGE_BYTES = 64 * 1024 * 1024 + 64 * 1024


@dataclass(frozen=True)
class TlsCredentials:
    """PEM bytes. With a certificate and its key the client shows who it is (mTLS).

    `server_name` is checked instead of the endpoint's host name when it is given.
    """

    root_certificates: bytes
    certificate_chain: bytes | None = None
    private_key: bytes | None = None
    server_name: str | None = None


def is_loopback(endpoint: str) -> bool:
    """Whether host:port (or unix:path) never leaves this machine."""
    if endpoint.startswith(("unix:", "unix-abstract:")):
        return True
    host = endpoint.rpartition(":")[0].removeprefix("[").removesuffix("]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def open_channel(
    endpoint: str, credentials: TlsCredentials | None, allow_insecure: bool
) -> grpc.aio.Channel:
    """A channel to host:port. Connects when it is first used.

    Raises MeshnetError: INSECURE_TRANSPORT for plaintext to anything but loopback unless
    `allow_insecure`, CONFIGURATION_INVALID for an endpoint that is no host:port.
    """
    host, _, port = endpoint.rpartition(":")
    if not endpoint.startswith(("unix:", "unix-abstract:")) and not (
        host and port.isascii() and port.isdecimal() and 0 < int(port) < 65536
    ):
        raise MeshnetError(
            errors_pb2.REASON_CONFIGURATION_INVALID, f"expected HOST:PORT, got {endpoint!r}"
        )
    options: list[tuple[str, int | str]] = [
        ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
        # An own connection per channel: nobody else's failure or flow control is ours.
        ("grpc.use_local_subchannel_pool", 1),
        # A worker is an address of ours, never something behind a web proxy.
        ("grpc.enable_http_proxy", 0),
        # A head that hangs, or whose machine is gone, is noticed within ten seconds. (One that dies
        # is noticed at once.) On a busy machine a healthy process may well be silent for seconds.
        ("grpc.keepalive_time_ms", 2000),
        ("grpc.keepalive_timeout_ms", 8000),
        ("grpc.http2.ping_timeout_ms", 8000),
        ("grpc.http2.max_pings_without_data", 0),
        # A worker that comes back is found again at once, not after gRPC's backoff of many seconds.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
    ]
    if credentials is None:
        if not allow_insecure and not is_loopback(endpoint):
            raise MeshnetError(
                errors_pb2.REASON_INSECURE_TRANSPORT,
                f"expected TLS credentials for {endpoint}, which is not loopback; "
                "give credentials, or allow_insecure=True if the network itself is trusted",
            )
        return grpc.aio.insecure_channel(endpoint, options=options)
    if credentials.server_name is not None:
        options.append(("grpc.ssl_target_name_override", credentials.server_name))
    return grpc.aio.secure_channel(
        endpoint,
        grpc.ssl_channel_credentials(
            root_certificates=credentials.root_certificates,
            private_key=credentials.private_key,
            certificate_chain=credentials.certificate_chain,
        ),
        options=options,
    )
