"""Errors of the control plane: one exception with one stable reason.

On the wire a call fails with a gRPC status whose details carry one google.rpc.ErrorInfo (domain
"meshnet", reason = the name in the table below). `error_from_rpc` makes the exception of it
again.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from typing import Any, NoReturn, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

__all__ = ["ControlError", "Reason", "abort", "error_from_rpc", "rpc_text"]

_DOMAIN = "meshnet"
_DETAILS_KEY = "grpc-status-details-bin"
# Who calls says whom: the address comes once more behind this.
_CONNECTING = re.compile(
    r"^failed to connect to all addresses; last error: [A-Z_]+: (?:(?:ipv4|ipv6|unix):\S+: )?"
)


class Reason(enum.Enum):
    """Every refusal: a number of its own, and its gRPC status."""

    # A message that is wrong by itself.
    FIELD_OUT_OF_BOUNDS = (1, grpc.StatusCode.INVALID_ARGUMENT)
    MALFORMED_MESSAGE = (2, grpc.StatusCode.INVALID_ARGUMENT)
    SPAN_INVALID = (3, grpc.StatusCode.INVALID_ARGUMENT)
    # What the tracker knows forbids it; nothing but a change helps.
    CERTIFICATION_INVALID = (4, grpc.StatusCode.FAILED_PRECONDITION)
    CERTIFICATION_UNTRUSTED = (5, grpc.StatusCode.FAILED_PRECONDITION)
    INSECURE_TRANSPORT = (6, grpc.StatusCode.FAILED_PRECONDITION)
    CONFIGURATION_INVALID = (7, grpc.StatusCode.FAILED_PRECONDITION)
    RECEIPT_CONFLICT = (8, grpc.StatusCode.FAILED_PRECONDITION)
    LIFECYCLE_VIOLATION = (9, grpc.StatusCode.FAILED_PRECONDITION)
    # The caller's picture is out of date: start again higher up.
    WORKER_UNKNOWN = (10, grpc.StatusCode.ABORTED)
    SESSION_UNKNOWN = (11, grpc.StatusCode.ABORTED)
    STALE_EPOCH = (12, grpc.StatusCode.ABORTED)
    CALL_UNKNOWN = (13, grpc.StatusCode.ABORTED)
    # Not now.
    NO_ROUTE = (14, grpc.StatusCode.UNAVAILABLE)
    STORAGE_UNAVAILABLE = (15, grpc.StatusCode.UNAVAILABLE)
    PEER_UNREACHABLE = (16, grpc.StatusCode.UNAVAILABLE)
    PEER_LOST = (17, grpc.StatusCode.UNAVAILABLE)
    DEADLINE_EXCEEDED = (18, grpc.StatusCode.DEADLINE_EXCEEDED)
    CANCELLED = (19, grpc.StatusCode.CANCELLED)
    # Who are you.
    UNAUTHENTICATED = (20, grpc.StatusCode.UNAUTHENTICATED)
    # Others have all that there is.
    SESSIONS_EXHAUSTED = (21, grpc.StatusCode.RESOURCE_EXHAUSTED)

    @property
    def code(self) -> grpc.StatusCode:
        """Its gRPC status code."""
        return self.value[1]


class ControlError(Exception):
    """A refusal or failure. `message` says what was expected, what came and what to do."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(reason, message)
        self.reason = reason
        self.message = message

    def __str__(self) -> str:
        """Reason and message in one line."""
        return f"{self.reason.name}: {self.message}"


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: ControlError) -> NoReturn:
    """Ends a call on the server with the error's status and details."""
    info = error_details_pb2.ErrorInfo(reason=error.reason.name, domain=_DOMAIN)
    number = error.reason.code.value[0]
    status = status_pb2.Status(code=number, message=error.message)
    status.details.add().Pack(info)
    await context.abort(
        error.reason.code, error.message, ((_DETAILS_KEY, status.SerializeToString()),)
    )
    raise AssertionError("abort returned")


def error_from_rpc(error: grpc.aio.AioRpcError) -> ControlError:
    """The exception that the other side raised.

    Without meshnet's details: DEADLINE_EXCEEDED, CANCELLED, or PEER_UNREACHABLE with gRPC's text.
    """
    trailing = cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ())
    for key, value in trailing:
        if key == _DETAILS_KEY and isinstance(value, bytes):
            try:
                status = status_pb2.Status.FromString(value)
            except DecodeError:
                continue
            for detail in status.details:
                info = error_details_pb2.ErrorInfo()
                if detail.Unpack(info) and info.domain == _DOMAIN:
                    known = Reason.__members__.get(info.reason)
                    if known is not None:
                        return ControlError(known, status.message)
    reason = {
        grpc.StatusCode.DEADLINE_EXCEEDED: Reason.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED: Reason.CANCELLED,
    }.get(error.code(), Reason.PEER_UNREACHABLE)
    return ControlError(reason, rpc_text(error))


def rpc_text(error: grpc.aio.AioRpcError) -> str:
    """gRPC's own words for a call that failed, without those before the cause and the status."""
    return f"{_CONNECTING.sub('', error.details() or '')} (gRPC status {error.code().name})"
