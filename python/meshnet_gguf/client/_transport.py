"""Lines to workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from meshnet.errors import ControlError
from meshnet.transport import Line, Security

from meshnet_gguf.errors import MeshnetError, from_control_error
from proto.meshnet.shard.v1 import errors_pb2

# The largest frame that the protocol allows, with room for the message around it.
_MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024 + 64 * 1024
_OPTIONS: Final[Sequence[tuple[str, Any]]] = (
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
)


def open_line(endpoint: str, security: Security | None) -> Line:
    """A line to host:port. Connects when it is first used.

    Raises MeshnetError: INSECURE_TRANSPORT for plaintext to anything but loopback unless
    `security` says so, CONFIGURATION_INVALID for an endpoint that is no host:port and for TLS
    files that cannot be used.
    """
    host, _, port = endpoint.rpartition(":")
    if not endpoint.startswith(("unix:", "unix-abstract:")) and not (
        host and port.isascii() and port.isdecimal() and 0 < int(port) < 65536
    ):
        raise MeshnetError(
            errors_pb2.REASON_CONFIGURATION_INVALID, f"expected HOST:PORT, got {endpoint!r}"
        )
    try:
        return Line(endpoint, security, _OPTIONS)
    except ControlError as error:
        raise from_control_error(error) from error
