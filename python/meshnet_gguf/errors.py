"""Errors of the data plane: one exception with one stable reason.

    try:
        ...
    except MeshnetError as error:
        if error.recovery == errors_pb2.RECOVERY_RETRY_CALL: ...

Reasons, their gRPC codes and what to do next are read from the table in
proto/meshnet/shard/v1/errors.proto, which C++ reads as well (cc/common/status.h).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from meshnet.errors import ControlError, rpc_text

from proto.meshnet.shard.v1 import errors_pb2

__all__ = [
    "MeshnetError",
    "from_control_error",
    "from_rpc_error",
    "options_of",
    "reason_in_details",
    "reason_name",
]

_DOMAIN = "meshnet"
_ERROR_INFO_URL = "type.googleapis.com/google.rpc.ErrorInfo"
_DETAILS_KEY = "grpc-status-details-bin"
_PREFIX = "REASON_"
_RETRY_KEY = "retry_after_ms"
_MAX_MESSAGE_BYTES = 1024
_MAX_UINT32 = 2**32 - 1

# What a status of gRPC's own making means; anything else is ENGINE_FAILURE.
_REASONS_OF_CODES = {
    grpc.StatusCode.UNAVAILABLE: errors_pb2.REASON_PEER_LOST,
    grpc.StatusCode.CANCELLED: errors_pb2.REASON_CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors_pb2.REASON_DEADLINE_EXCEEDED,
}


def reason_name(reason: int) -> str:
    """ "STALE_EPOCH" for REASON_STALE_EPOCH; the number for a value that is not in the table."""
    value = errors_pb2.Reason.DESCRIPTOR.values_by_number.get(reason)
    return str(reason) if value is None else value.name.removeprefix(_PREFIX)


def options_of(reason: int) -> errors_pb2.ReasonOptions:
    """Code and recovery of a reason; those of ENGINE_FAILURE for a value not in the table."""
    values = errors_pb2.Reason.DESCRIPTOR.values_by_number
    value = values.get(reason or errors_pb2.REASON_ENGINE_FAILURE)
    if value is None:
        value = values[errors_pb2.REASON_ENGINE_FAILURE]
    options: Any = value.GetOptions()  # extensions are beyond what stubs can tell
    return cast("errors_pb2.ReasonOptions", options.Extensions[errors_pb2.reason_options])


class MeshnetError(Exception):
    """A refusal or failure with its stable reason.

    `stage` is the layer range [begin, end) of the stage that refused, where one is known.
    `retry_after_ms` is the earliest useful retry, 0 without a hint. `message` is for people and at
    most 1024 bytes of UTF-8. An unknown reason becomes ENGINE_FAILURE.
    """

    def __init__(
        self,
        reason: int,
        message: str,
        *,
        retry_after_ms: int = 0,
        stage: tuple[int, int] | None = None,
    ) -> None:
        known = errors_pb2.Reason.DESCRIPTOR.values_by_number
        if reason == errors_pb2.REASON_UNSPECIFIED or reason not in known:
            reason = errors_pb2.REASON_ENGINE_FAILURE
        encoded = message.encode("utf-8", "replace")[:_MAX_MESSAGE_BYTES]
        self.reason: int = reason
        self.message = encoded.decode("utf-8", "ignore")
        self.retry_after_ms = retry_after_ms
        self.stage = stage
        super().__init__(reason, self.message)

    def __str__(self) -> str:
        """Reason, stage and message in one line."""
        where = f" (stage [{self.stage[0]}, {self.stage[1]}))" if self.stage else ""
        return f"{self.reason_name}{where}: {self.message}"

    @property
    def reason_name(self) -> str:
        """The reason's name without prefix, as on the wire."""
        return reason_name(self.reason)

    @property
    def recovery(self) -> int:
        """What the caller should do next, a value of errors_pb2.Recovery."""
        return options_of(self.reason).recovery

    @property
    def grpc_code(self) -> int:
        """The canonical gRPC status code."""
        return options_of(self.reason).grpc_code

    @classmethod
    def from_proto(cls, error: errors_pb2.Error) -> MeshnetError:
        """From an error inside a stream."""
        stage = (error.stage_begin, error.stage_end) if error.stage_end else None
        return cls(error.reason, error.message, retry_after_ms=error.retry_after_ms, stage=stage)

    def to_proto(self) -> errors_pb2.Error:
        """For an error inside a stream."""
        begin, end = self.stage or (0, 0)
        return errors_pb2.Error(
            reason=cast("errors_pb2.Reason", self.reason),
            message=self.message,
            stage_begin=begin,
            stage_end=end,
            retry_after_ms=self.retry_after_ms,
        )


def from_control_error(error: ControlError) -> MeshnetError:
    """Of the control plane: the same reason, or ENGINE_FAILURE for one that is its own."""
    value = errors_pb2.Reason.DESCRIPTOR.values_by_name.get(_PREFIX + error.reason.name)
    if value is None:
        return MeshnetError(errors_pb2.REASON_ENGINE_FAILURE, str(error))
    return MeshnetError(value.number, error.message)


def from_rpc_error(error: grpc.aio.AioRpcError) -> MeshnetError:
    """From a call that failed.

    Without meshnet's details it is PEER_LOST, CANCELLED, DEADLINE_EXCEEDED or ENGINE_FAILURE, with
    gRPC's own text kept.
    """
    found = reason_in_details(error)
    if found is not None:
        return found
    reason = _REASONS_OF_CODES.get(error.code(), errors_pb2.REASON_ENGINE_FAILURE)
    return MeshnetError(reason, rpc_text(error))


def reason_in_details(error: grpc.aio.AioRpcError) -> MeshnetError | None:
    """What the other side itself gave as the reason; None when gRPC's status is all there is."""
    # grpc-stubs take the metadata for a single pair.
    trailing = cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ())
    for key, value in trailing:
        if key == _DETAILS_KEY and isinstance(value, bytes):
            found = _from_details(value, error.details() or "")
            if found is not None:
                return found
    return None


def _from_details(encoded: bytes, text: str) -> MeshnetError | None:
    try:
        status = errors_pb2.RpcStatus.FromString(encoded)
        infos = [
            errors_pb2.ErrorInfo.FromString(detail.value)
            for detail in status.details
            if detail.type_url == _ERROR_INFO_URL
        ]
    except DecodeError:
        return None
    for info in infos:
        value = errors_pb2.Reason.DESCRIPTOR.values_by_name.get(_PREFIX + info.reason)
        if info.domain == _DOMAIN and value is not None:
            hint = info.metadata.get(_RETRY_KEY, "")
            retry = int(hint) if hint.isascii() and hint.isdecimal() and len(hint) < 11 else 0
            if retry > _MAX_UINT32:
                retry = 0
            return MeshnetError(value.number, text or status.message, retry_after_ms=retry)
    return None
