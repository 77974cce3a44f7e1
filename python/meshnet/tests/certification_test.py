"""Certification records and keys."""

from __future__ import annotations

import json
import pathlib
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st
from meshnet.certification import Certification, CertificationBook, Lane, issue, read_records
from meshnet.errors import ControlError, Reason
from meshnet.signing import SigningKey, TrustedKeys

KEY = SigningKey.generate()
LANE = Lane("model", "fingerprint")
RECORD = issue(KEY, LANE, issued_ms=10, expires_ms=20, evidence_sha256="ab" * 32)


def reason_of(record: bytes) -> Reason | None:
    try:
        CertificationBook(KEY.trust()).check(record)
    except ControlError as error:
        return error.reason
    return None


def test_round_trip() -> None:
    assert Certification.decode(RECORD.encode()) == RECORD
    assert reason_of(RECORD.encode()) is None


def test_newest_record_decides() -> None:
    book = CertificationBook(KEY.trust())
    assert book.refusal(LANE, 0) == "no certification record for this model and fingerprint"
    book.add(RECORD)
    assert book.refusal(LANE, 19) == ""
    assert book.refusal(LANE, 20).endswith("expired")
    assert book.refusal(Lane("model", "other"), 0) != ""
    newer = issue(KEY, LANE, issued_ms=12, evidence_sha256="ab" * 32, status="revoked")
    book.add(newer)
    book.add(issue(KEY, LANE, issued_ms=11, evidence_sha256="ab" * 32))
    assert book.refusal(LANE, 0) == f"revoked by record {newer.record_id[:12]}"


@pytest.mark.parametrize(
    "change",
    [
        {"fingerprint": "other"},
        {"status": "revoked"},
        {"expires_ms": 0},
        {"evidence_sha256": "cd" * 32},
    ],
)
def test_a_changed_record_is_not_believed(change: dict[str, object]) -> None:
    fields = json.loads(RECORD.encode()) | change
    changed = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    assert reason_of(changed) is Reason.CERTIFICATION_UNTRUSTED


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"version": None},
        {"status": "maybe"},
        {"issued_ms": True},
        {"issued_ms": -1},
        {"extra": 1},
        {"model_id": "a b"},
        {"signature": "AAAA"},
    ],
)
def test_another_form_is_invalid(change: dict[str, object]) -> None:
    fields = json.loads(RECORD.encode()) | change
    changed = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    assert reason_of(changed) is Reason.CERTIFICATION_INVALID


def test_only_canonical_text_is_a_record() -> None:
    spaced = json.dumps(json.loads(RECORD.encode()), sort_keys=True).encode()
    assert reason_of(spaced) is Reason.CERTIFICATION_INVALID


@given(st.binary(max_size=200))
def test_noise_is_invalid(noise: bytes) -> None:
    assert reason_of(noise) is Reason.CERTIFICATION_INVALID


def test_key_files(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "key.pem"
    KEY.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(ControlError):  # never over another key
        SigningKey.generate().save(path)
    again = SigningKey.load(path)
    assert again.key_id == KEY.key_id
    other = SigningKey.generate()
    both = tmp_path / "both.pem"
    both.write_text((tmp_path / "key.pem.pub").read_text() + other.public_pem())
    trusted = TrustedKeys.load([both])
    assert set(trusted.keys) == {KEY.key_id, other.key_id}
    assert trusted.verify("x", b"content", KEY.key_id, again.sign("x", b"content"))
    assert not trusted.verify("y", b"content", KEY.key_id, again.sign("x", b"content"))
    for wrong in (path, tmp_path / "nothing"):
        with pytest.raises(ControlError):
            TrustedKeys.load([wrong])


def test_files_of_records(tmp_path: pathlib.Path) -> None:
    other = issue(KEY, Lane("m", "other"), issued_ms=1, evidence_sha256="ab" * 32)
    file = tmp_path / "records"
    file.write_bytes(RECORD.encode() + b"\n" + other.encode() + b"\n")
    assert read_records(file) == [RECORD.encode(), other.encode()]
    file.write_bytes(RECORD.encode() + b"\n\n")
    with pytest.raises(ControlError, match="line 2: expected of a certification record"):
        read_records(file)
    for content in (b"", None):
        file.write_bytes(content) if content is not None else file.unlink()
        with pytest.raises(ControlError) as error:
            read_records(file)
        assert error.value.reason is Reason.CERTIFICATION_INVALID
