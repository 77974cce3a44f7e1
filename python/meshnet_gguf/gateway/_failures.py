"""Failures as HTTP tells them: OpenAI's error form, with our stable reason as `code`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from meshnet_gguf.errors import MeshnetError
from proto.meshnet.shard.v1 import errors_pb2

__all__ = [
    "RequestError",
    "error_body",
    "error_event",
    "headers_of",
    "http_status",
    "http_statuses",
    "names_machine",
    "words_of",
]

_UNAUTHENTICATED = 16

_STATUS_OF_CODES = {
    1: 499,  # CANCELLED: the client has gone
    3: 400,
    4: 504,
    5: 404,
    8: 429,
    10: 503,
    13: 500,
    14: 503,
    _UNAUTHENTICATED: 401,
}
# FAILED_PRECONDITION is the caller's to mend for these reasons; for all others the mesh's.
_OF_THE_REQUEST = frozenset(
    {
        errors_pb2.REASON_CONTEXT_EXCEEDED,
        errors_pb2.REASON_FEATURE_UNSUPPORTED,
        errors_pb2.REASON_GRAMMAR_DEAD_END,
        errors_pb2.REASON_LIFECYCLE_VIOLATION,
    }
)
_STATUS_OF_REASONS: dict[int, int] = {
    errors_pb2.REASON_FRAME_TOO_LARGE: 413,
    # Coming again later does not make a grammar cheaper.
    errors_pb2.REASON_GRAMMAR_TOO_COSTLY: 400,
}
# What the gateway's own refusals may say instead: the body came too late, the headers are too long,
# another host or method.
_MORE_STATUSES: dict[int, tuple[int, ...]] = {
    errors_pb2.REASON_DEADLINE_EXCEEDED: (408,),
    errors_pb2.REASON_FRAME_TOO_LARGE: (431,),
    errors_pb2.REASON_NOT_SERVED: (403, 405),
}
# What clients are told of failures that are not theirs. What the workers, or gRPC, say of them
# names machines and is for operators: it goes into the log.
_WORDS: Mapping[int, str] = {
    errors_pb2.REASON_PEER_LOST: (
        "a machine that took part in the answer went away; ask again, what was said so far is not "
        "the whole answer"
    ),
    errors_pb2.REASON_PEER_UNREACHABLE: (
        "a machine that the answer needs cannot be reached; ask again in a moment"
    ),
    errors_pb2.REASON_DEADLINE_EXCEEDED: (
        "the machines that serve the model did not answer in time; ask again, or for less"
    ),
    errors_pb2.REASON_NOT_READY: "the model is being loaded; ask again in a moment",
    errors_pb2.REASON_DRAINING: "a machine that serves the model shuts down; ask again",
    errors_pb2.REASON_NO_ROUTE: (
        "no machines serve all layers of the model right now; ask again in a moment"
    ),
}
_OTHER_WORDS = (
    "the machines that serve the model failed; ask again, and if that does not help, tell the "
    "gateway's operator the answer's x-request-id"
)
# Of refusals that are the client's to mend, those are told as a worker says them that are about
# what the client has sent, and name no machine.
_TOLD = frozenset(
    {
        errors_pb2.REASON_CONTEXT_EXCEEDED,
        errors_pb2.REASON_FEATURE_UNSUPPORTED,
        errors_pb2.REASON_FIELD_OUT_OF_BOUNDS,
        errors_pb2.REASON_MEMORY_BUDGET_EXCEEDED,
        errors_pb2.REASON_QUEUE_FULL,
        errors_pb2.REASON_RATE_LIMITED,
        errors_pb2.REASON_SAMPLING_INVALID,
        errors_pb2.REASON_SESSIONS_EXHAUSTED,
        errors_pb2.REASON_TOKEN_OUT_OF_RANGE,
    }
)
# These quote the client, and nobody else.
_QUOTING = frozenset(
    {
        errors_pb2.REASON_GRAMMAR_DEAD_END,
        errors_pb2.REASON_GRAMMAR_INVALID,
        errors_pb2.REASON_GRAMMAR_TOO_COSTLY,
    }
)
_MACHINE = re.compile(
    r"\b(?:address|dial|endpoint|relay)\b|\b\d{1,3}(?:\.\d{1,3}){3}\b|[\w\]-]:\d{2,5}\b"
)
_REFUSED_WORDS = (
    "the machines that serve the model refuse this request; if nothing is wrong with it, tell the "
    "gateway's operator the answer's x-request-id"
)
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class RequestError(MeshnetError):
    """A refusal in the gateway's own words.

    `param` is the field of the request that it is about, such as `messages.0.role`; `status` the
    HTTP status where that of the reason says too little.
    """

    def __init__(
        self, reason: int, message: str, param: str | None = None, *, status: int = 0
    ) -> None:
        super().__init__(reason, message)
        assert not status or status in _MORE_STATUSES[reason], "docs/errors.md lists them all"
        self.param = param
        self.status = status


def http_status(error: MeshnetError) -> int:
    """The HTTP status for an error."""
    if isinstance(error, RequestError):
        if error.status:
            return error.status
    elif error.grpc_code == _UNAUTHENTICATED:
        return 503  # the gateway is whom the mesh does not know
    special = _STATUS_OF_REASONS.get(error.reason)
    if special is not None:
        return special
    if error.grpc_code == 9:
        return 400 if error.reason in _OF_THE_REQUEST else 503
    return _STATUS_OF_CODES.get(error.grpc_code, 500)


def http_statuses(reason: int) -> list[int]:
    """Each status that an error with this reason as its `code` may have."""
    usual = {http_status(kind(reason, "")) for kind in (MeshnetError, RequestError)}
    return sorted(usual | {*_MORE_STATUSES.get(reason, ())})


def names_machine(message: str) -> bool:
    """Whether a message of the mesh may say where a machine is."""
    return _MACHINE.search(message) is not None


def words_of(error: MeshnetError) -> str:
    """What a client is told."""
    where = f" (stage [{error.stage[0]}, {error.stage[1]}))" if error.stage else ""
    if isinstance(error, RequestError) or error.reason in _QUOTING:
        return error.message + where
    if http_status(error) >= 500:
        return _WORDS.get(error.reason, _OTHER_WORDS) + where
    if error.reason in _TOLD and not names_machine(error.message):
        return error.message + where
    return _REFUSED_WORDS + where


def error_body(error: MeshnetError) -> dict[str, Any]:
    """The body in OpenAI's form."""
    status = http_status(error)
    kind = _TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    return {
        "error": {
            "message": words_of(error),
            "type": kind,
            "param": error.param if isinstance(error, RequestError) else None,
            "code": error.reason_name,
        }
    }


def headers_of(error: MeshnetError) -> dict[str, str]:
    """When to come again, for errors that say so, and whether the connection may be used again."""
    if http_status(error) in (408, 413):
        # What is left of the body is never read.
        return {"connection": "close"}
    if http_status(error) == 401:
        return {"www-authenticate": "Bearer"}
    if http_status(error) not in (429, 503):
        return {}
    wait = error.retry_after_ms or 1000
    return {"retry-after": str(math.ceil(wait / 1000)), "retry-after-ms": str(wait)}


def error_event(error: MeshnetError) -> bytes:
    """The last event of a stream that failed after it had begun."""
    return b"data: " + json.dumps(error_body(error)).encode() + b"\n\n"
