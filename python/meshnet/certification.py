"""Certification records: who vouches for a lane, and until when.

A record is one line of canonical JSON (keys sorted, no spaces, ASCII):

    {"evidence_sha256":"...","expires_ms":0,"fingerprint":"...","issued_ms":1,"key_id":"...",
     "model_id":"...","signature":"...","status":"certified","version":1}

signed over the same text without `signature` (base64). A lane is certified by the newest record
for it from a trusted key, if its status is "certified" and it has not expired; "revoked"
withdraws. Nothing else makes a lane certified: no list of names, no label.

A record of version 2 is for a mixture: routes whose first workers are of the lane `head` and whose
last are of the lane `tail`. It has these two fingerprints and `shared`, that of what they have in
common, besides; its `fingerprint` is that of meshnet.fingerprints.Mixture of the three. Two lanes
share a route by such a record alone.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import json
import pathlib
import re
from dataclasses import dataclass
from typing import Any, Final

from meshnet.errors import ControlError, Reason
from meshnet.fingerprints import Mixture
from meshnet.signing import SigningKey, TrustedKeys

__all__ = ["Certification", "CertificationBook", "Lane", "issue", "read_records"]

VERSION: Final = 1
MIXTURE_VERSION: Final = 2
_PURPOSE: Final = "certification"
_MAX_BYTES: Final = 8192
_IDENTIFIER: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Lane:
    """What is certified: a model under one fingerprint."""

    model_id: str
    fingerprint: str


@dataclass(frozen=True)
class Certification:
    """A record whose form is right; whether to believe it is for the book to say."""

    lane: Lane
    status: str
    issued_ms: int
    # 0 = never.
    expires_ms: int
    # Of the file with the measurements that the signer saw.
    evidence_sha256: str
    key_id: str
    signature: bytes
    # Set: the lane is one of two lanes, and has their fingerprint.
    mixture: Mixture | None = None

    def content(self) -> bytes:
        """What is signed."""
        return _canonical(self._fields())

    def encode(self) -> bytes:
        """The record as it is kept and sent."""
        signature = base64.b64encode(self.signature).decode()
        return _canonical(self._fields() | {"signature": signature})

    @property
    def record_id(self) -> str:
        """SHA-256 of the record, hex."""
        return hashlib.sha256(self.encode()).hexdigest()

    def _fields(self) -> dict[str, Any]:
        mixture = {} if self.mixture is None else dataclasses.asdict(self.mixture)
        return mixture | {
            "evidence_sha256": self.evidence_sha256,
            "expires_ms": self.expires_ms,
            "fingerprint": self.lane.fingerprint,
            "issued_ms": self.issued_ms,
            "key_id": self.key_id,
            "model_id": self.lane.model_id,
            "status": self.status,
            "version": VERSION if self.mixture is None else MIXTURE_VERSION,
        }

    @classmethod
    def decode(cls, record: bytes) -> Certification:
        """From the canonical text. Raises ControlError (CERTIFICATION_INVALID)."""
        try:
            if len(record) > _MAX_BYTES:
                raise ValueError(f"at most {_MAX_BYTES} bytes, got {len(record)}")
            fields = json.loads(record)
            if not isinstance(fields, dict):
                raise ValueError("a JSON object")
            if fields.get("version") not in (VERSION, MIXTURE_VERSION):
                raise ValueError(
                    f"version {VERSION} or {MIXTURE_VERSION}, got {fields.get('version')!r}"
                )
            found = cls(
                Lane(
                    _matching(fields, "model_id", _IDENTIFIER),
                    _matching(fields, "fingerprint", _IDENTIFIER),
                ),
                _matching(fields, "status", re.compile("certified|revoked")),
                _time(fields, "issued_ms"),
                _time(fields, "expires_ms"),
                _matching(fields, "evidence_sha256", _SHA256),
                _matching(fields, "key_id", re.compile("[0-9a-f]{32}")),
                base64.b64decode(
                    _matching(fields, "signature", re.compile(r"[A-Za-z0-9+/=]{88}")),
                    validate=True,
                ),
                _mixture(fields) if fields["version"] == MIXTURE_VERSION else None,
            )
            if found.encode() != record:
                raise ValueError("canonical JSON and no further fields")
        except (ValueError, binascii.Error, RecursionError) as error:
            raise ControlError(
                Reason.CERTIFICATION_INVALID, f"expected of a certification record: {error}"
            ) from error
        return found


def _mixture(fields: dict[str, Any]) -> Mixture:
    found = Mixture(*(_matching(fields, name, _IDENTIFIER) for name in ("shared", "head", "tail")))
    if found.head == found.tail:
        raise ValueError("two lanes, head and tail are one")
    if fields.get("fingerprint") != found.fingerprint:
        raise ValueError(f"the fingerprint {found.fingerprint} of this mixture")
    return found


def _canonical(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def _matching(fields: dict[str, Any], name: str, pattern: re.Pattern[str]) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ValueError(f"{name} like {pattern.pattern}, got {value!r}")
    return value


def _time(fields: dict[str, Any], name: str) -> int:
    value = fields.get(name)
    if type(value) is not int or not 0 <= value < 1 << 53:
        raise ValueError(f"{name} in milliseconds, got {value!r}")
    return value


def issue(
    key: SigningKey,
    lane: Lane,
    *,
    issued_ms: int,
    evidence_sha256: str,
    expires_ms: int = 0,
    status: str = "certified",
    mixture: Mixture | None = None,
) -> Certification:
    """Makes and signs a record. Raises ControlError (CERTIFICATION_INVALID).

    With a `mixture` the lane is that of its fingerprint.
    """
    unsigned = Certification(
        lane, status, issued_ms, expires_ms, evidence_sha256, key.key_id, bytes(64), mixture
    )
    signature = key.sign(_PURPOSE, unsigned.content())
    return Certification.decode(dataclasses.replace(unsigned, signature=signature).encode())


def read_records(file: pathlib.Path) -> list[bytes]:
    """The records of a file, one a line, as they are; their form is right.

    Raises ControlError (CERTIFICATION_INVALID): with the line that is none.
    """
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise ControlError(
            Reason.CERTIFICATION_INVALID, f"expected certification records at {file}: {error}"
        ) from error
    for number, line in enumerate(lines, 1):
        try:
            Certification.decode(line)
        except ControlError as error:
            raise ControlError(error.reason, f"{file}, line {number}: {error.message}") from error
    if not lines:
        raise ControlError(Reason.CERTIFICATION_INVALID, f"expected a record in {file}, got none")
    return lines


class CertificationBook:
    """The records that trusted keys signed, and what follows from them."""

    def __init__(self, trusted: TrustedKeys) -> None:
        self.trusted = trusted
        self._newest: dict[Lane, Certification] = {}
        self._known: set[str] = set()

    def __len__(self) -> int:
        """The number of records."""
        return len(self._known)

    def check(self, record: bytes) -> Certification:
        """The record, if it is to be believed.

        Raises ControlError: CERTIFICATION_INVALID, CERTIFICATION_UNTRUSTED.
        """
        found = Certification.decode(record)
        if not self.trusted.verify(_PURPOSE, found.content(), found.key_id, found.signature):
            raise ControlError(
                Reason.CERTIFICATION_UNTRUSTED,
                f"expected the signature of one of {len(self.trusted)} trusted keys, "
                f"got one by {found.key_id} that none of them made",
            )
        return found

    def add(self, certification: Certification) -> None:
        """Takes up a record that check() returned."""
        self._known.add(certification.record_id)
        held = self._newest.get(certification.lane)
        order = (certification.issued_ms, certification.record_id)
        if held is None or order > (held.issued_ms, held.record_id):
            self._newest[certification.lane] = certification

    def mixtures(self, model_id: str) -> list[Mixture]:
        """Those of a model that the newest records speak of, certified or not, in order."""
        found = [
            record.mixture
            for lane, record in self._newest.items()
            if lane.model_id == model_id and record.mixture is not None
        ]
        return sorted(found, key=lambda mixture: mixture.fingerprint)

    def refusal(self, lane: Lane, now_ms: int) -> str:
        """Why a lane is not certified now; empty when it is."""
        found = self._newest.get(lane)
        if found is None:
            return "no certification record for this model and fingerprint"
        if found.status != "certified":
            return f"revoked by record {found.record_id[:12]}"
        if found.expires_ms and now_ms >= found.expires_ms:
            return f"record {found.record_id[:12]} expired"
        return ""
