"""Route tokens: what shows a worker that a tracker put it on a route.

    token = issue(key, RouteClaim("s1", 1, 0, "w1", expires_ms))
    claim = check(trusted, token, now_ms)

A token is short-lived and bound to one session, epoch, hop and worker. Its form is written down in
proto/meshnet/control/v1/route_token.proto.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
from dataclasses import dataclass
from typing import Final

from google.protobuf.message import DecodeError

from meshnet.errors import ControlError, Reason
from meshnet.signing import SigningKey, TrustedKeys
from proto.meshnet.control.v1 import route_token_pb2 as pb

__all__ = ["RouteClaim", "check", "issue"]

_PURPOSE: Final = "route token"
_MAX_BYTES: Final = 2048


@dataclass(frozen=True)
class RouteClaim:
    """Worker `worker_id` is hop `hop` (from 0) of this session's epoch, until then."""

    session_id: str
    epoch: int
    hop: int
    worker_id: str
    expires_ms: int

    def encode(self) -> bytes:
        """What is signed."""
        return pb.RouteClaim(**dataclasses.asdict(self)).SerializeToString(deterministic=True)

    @classmethod
    def decode(cls, content: bytes) -> RouteClaim:
        """Raises DecodeError."""
        claim = pb.RouteClaim.FromString(content)
        return cls(claim.session_id, claim.epoch, claim.hop, claim.worker_id, claim.expires_ms)


def issue(key: SigningKey, claim: RouteClaim) -> bytes:
    """The token."""
    content = claim.encode()
    parts = (content, key.sign(_PURPOSE, content), bytes.fromhex(key.key_id))
    return b".".join(base64.urlsafe_b64encode(part) for part in parts)


def check(trusted: TrustedKeys, token: bytes, now_ms: int) -> RouteClaim:
    """What the token says. Raises ControlError (UNAUTHENTICATED): malformed, forged, expired."""
    try:
        if len(token) > _MAX_BYTES:
            raise ValueError(f"longer than {_MAX_BYTES} bytes")
        content, signature, key_id = (
            base64.b64decode(part, altchars=b"-_", validate=True) for part in token.split(b".")
        )
        if not trusted.verify(_PURPOSE, content, key_id.hex(), signature):
            raise ValueError("not signed by a trusted tracker")
        claim = RouteClaim.decode(content)
        if now_ms >= claim.expires_ms:
            raise ValueError(f"expired {now_ms - claim.expires_ms} ms ago")
    except (ValueError, DecodeError, binascii.Error) as error:
        raise ControlError(
            Reason.UNAUTHENTICATED, f"expected a valid route token: {error}; select a route anew"
        ) from error
    return claim
