"""Certification records and keys."""

from __future__ import annotations

import json
import pathlib
import stat

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st
from meshnet.certification import Certification, CertificationBook, Lane, issue, read_records
from meshnet.errors import ControlError, Reason
from meshnet.fingerprints import Mixture
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


MIXTURE = Mixture("c" * 64, "a" * 64, "b" * 64)


def test_a_mixture_has_a_fingerprint_of_its_own() -> None:
    # The workers' own function has the same golden value (cc/worker/mixtures_test.cc).
    golden = "cff17aabc52085949982fcc7fa5daa9a9c8fd6ffe2afc9f4fd317b6c631393a5"
    assert MIXTURE.fingerprint == golden
    # The order matters, and what both have in common.
    assert Mixture("c" * 64, "b" * 64, "a" * 64).fingerprint != golden
    assert Mixture("d" * 64, "a" * 64, "b" * 64).fingerprint != golden


def test_the_record_of_a_mixture_names_both_lanes() -> None:
    # The workers read the same record (cc/worker/mixtures_test.cc).
    key = SigningKey(Ed25519PrivateKey.from_private_bytes(bytes(range(32))))
    record = issue(
        key,
        Lane("model", MIXTURE.fingerprint),
        issued_ms=10,
        expires_ms=20,
        evidence_sha256="e" * 64,
        mixture=MIXTURE,
    )
    assert record.encode() == (
        b'{"evidence_sha256":"eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee","e'
        b'xpires_ms":20,"fingerprint":"cff17aabc52085949982fcc7fa5daa9a9c8fd6ffe2afc9f4fd317b6c631'
        b'393a5","head":"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa","issued'
        b'_ms":10,"key_id":"56475aa75463474c0285df5dbf2bcab7","model_id":"model","shared":"ccccccc'
        b'ccccccccccccccccccccccccccccccccccccccccccccccccccccccccc","signature":"X11g2+a5KTzijXOH'
        b'kgdV3TIoFx/iiDNjq5CUa5/bG+O/pawWRfSdkrvrkSVgVRMz18jvPaB3i+b+iNBZl60BCQ==","status":"cert'
        b'ified","tail":"bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb","versio'
        b'n":2}'
    )
    assert Certification.decode(record.encode()) == record
    book = CertificationBook(key.trust())
    book.add(book.check(record.encode()))
    assert book.mixtures("model") == [MIXTURE]
    assert book.mixtures("other") == []
    assert book.refusal(Lane("model", MIXTURE.fingerprint), 10) == ""
    assert book.refusal(Lane("model", "a" * 64), 10) != ""


@pytest.mark.parametrize(
    "change",
    [
        {"head": "b" * 64},
        {"tail": "a" * 64},
        {"head": "b" * 64, "tail": "a" * 64},
        {"shared": "d" * 64},
        {"shared": ""},
        {"fingerprint": "f" * 64},
        {"version": 1},
        {"version": 3},
        {"version": True},
        {"more": 1},
    ],
)
def test_a_mixture_that_is_not_its_fingerprints_is_none(change: dict[str, object]) -> None:
    record = issue(
        KEY, Lane("m", MIXTURE.fingerprint), issued_ms=1, evidence_sha256="e" * 64, mixture=MIXTURE
    )
    fields = json.loads(record.encode()) | change
    text = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    assert reason_of(text) is Reason.CERTIFICATION_INVALID


def test_a_mixture_needs_two_lanes_and_its_own_fingerprint() -> None:
    with pytest.raises(ControlError, match="two lanes"):
        same = Mixture("s", "f", "f")
        issue(KEY, Lane("m", same.fingerprint), issued_ms=1, evidence_sha256="e" * 64, mixture=same)
    with pytest.raises(ControlError, match="of this mixture"):
        issue(KEY, Lane("m", "f"), issued_ms=1, evidence_sha256="e" * 64, mixture=MIXTURE)


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
