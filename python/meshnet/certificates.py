"""A mesh's own certificate authority: node certificates, and its replacement while all runs.

    authority = Authority.create(folder)                     # ca.pem, ca.key, authorities.pem
    authority.issue("worker-a", ["10.0.0.5"])                # worker-a.pem, worker-a.key
    authority.rotate()                                       # a new authority beside the old one
    authority.retire()                                       # the old one is trusted no more

Every program is given its own certificate and key, and `authorities.pem`, which holds every
authority that is trusted now, the newest first. To replace an authority: rotate() and distribute
authorities.pem; issue() every certificate anew; retire() and distribute authorities.pem again. All
certificates of either authority are good in between.

A certificate's common name and names (DNS names and IP addresses) are what peers are known by.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import pathlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from meshnet.errors import ControlError, Reason

__all__ = ["Authority", "CertificateFacts", "describe"]

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9])?")
# Clocks of a mesh differ.
_BACKDATED = datetime.timedelta(hours=1)
_OWN_FILES = ("authorities", "ca")


@dataclass(frozen=True)
class CertificateFacts:
    """One certificate, for people. `names` without its common name."""

    common_name: str
    names: tuple[str, ...]
    issuer: str
    serial: str
    expires: datetime.datetime
    is_authority: bool


def describe(pem: bytes) -> list[CertificateFacts]:
    """The certificates of a PEM file, in its order. Raises ControlError."""
    try:
        return [_facts(certificate) for certificate in x509.load_pem_x509_certificates(pem)]
    except ValueError as error:
        raise _invalid(f"expected certificates in PEM: {error}") from error


class Authority:
    """The authority of a folder; its key (mode 0600) never leaves it."""

    def __init__(
        self,
        folder: pathlib.Path,
        certificate: x509.Certificate,
        key: ec.EllipticCurvePrivateKey,
    ) -> None:
        self._folder = folder
        self._certificate = certificate
        self._key = key

    @property
    def common_name(self) -> str:
        """Its certificate's."""
        return _common_name(self._certificate.subject)

    @classmethod
    def create(cls, folder: pathlib.Path, name: str = "meshnet", days: int = 3650) -> Authority:
        """A new one. Raises ControlError where the folder has one already."""
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "ca.key").exists():
            raise _invalid(f"expected no authority in {folder}, found ca.key; rotate it instead")
        authority = cls._made(folder, name, days)
        _replace(folder / "authorities.pem", authority._pem())
        return authority

    @classmethod
    def load(cls, folder: pathlib.Path) -> Authority:
        """The newest authority of a folder. Raises ControlError."""
        try:
            certificate = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
            key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
        except (OSError, ValueError, TypeError) as error:
            raise _invalid(
                f"expected an authority in {folder}: {error}; make one with `meshnet certs init`"
            ) from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise _invalid(f"expected the elliptic curve key of an authority at {folder}/ca.key")
        return cls(folder, certificate, key)

    @classmethod
    def _made(cls, folder: pathlib.Path, name: str, days: int) -> Authority:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _subject(name)
        certificate = (
            _builder(subject, subject, key.public_key(), days)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
            )
            .sign(key, hashes.SHA256())
        )
        authority = cls(folder, certificate, key)
        _replace(folder / "ca.key", _key_pem(key), mode=0o600)
        _replace(folder / "ca.pem", authority._pem())
        return authority

    def issue(
        self, name: str, hosts: Sequence[str] = (), days: int = 90
    ) -> tuple[pathlib.Path, pathlib.Path]:
        """Writes NAME.pem and NAME.key (mode 0600) beside the authority, anew if they are there.

        `hosts` are DNS names and IP addresses that the node is dialed by; `name` is one of its
        names, too. Raises ControlError.
        """
        if name in _OWN_FILES or any(not _NAME.fullmatch(text) for text in (name,)):
            raise _invalid(f"expected a name of 1 to 64 characters [A-Za-z0-9._-], got {name!r}")
        key = ec.generate_private_key(ec.SECP256R1())
        until = self._certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
        certificate = (
            _builder(
                _subject(name), self._certificate.subject, key.public_key(), min(days, until.days)
            )
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage(
                    [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
                ),
                critical=False,
            )
            .add_extension(
                x509.SubjectAlternativeName([_general_name(host) for host in (name, *hosts)]),
                critical=False,
            )
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )
        files = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        # A reader between the two finds a pair that does not fit, and looks again.
        _replace(files[1], _key_pem(key), mode=0o600)
        _replace(files[0], certificate.public_bytes(serialization.Encoding.PEM))
        return files

    def rotate(self, days: int = 3650) -> Authority:
        """A new authority, of the same name, which issues from now on. This one stays trusted."""
        trusted = self._trusted()
        authority = self._made(self._folder, self.common_name, days)
        _replace(self._folder / "authorities.pem", authority._pem() + b"".join(trusted))
        return authority

    def retire(self) -> int:
        """Trusts the newest authority alone; the number of those that no longer are trusted."""
        before = len(self._trusted())
        _replace(self._folder / "authorities.pem", self._pem())
        return before - 1

    def _trusted(self) -> list[bytes]:
        """The authorities that have not expired, in PEM."""
        now = datetime.datetime.now(datetime.UTC)
        path = self._folder / "authorities.pem"
        return [
            certificate.public_bytes(serialization.Encoding.PEM)
            for certificate in x509.load_pem_x509_certificates(path.read_bytes())
            if certificate.not_valid_after_utc > now
        ]

    def _pem(self) -> bytes:
        return self._certificate.public_bytes(serialization.Encoding.PEM)


def _invalid(message: str) -> ControlError:
    return ControlError(Reason.CONFIGURATION_INVALID, message)


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _common_name(name: x509.Name) -> str:
    attributes = name.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(attributes[0].value) if attributes else ""


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not _NAME.fullmatch(host):
        raise _invalid(f"expected a DNS name or an IP address, got {host!r}")
    return x509.DNSName(host)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    if days < 1:
        raise _invalid(f"expected at least 1 day of life, got {days}; rotate the authority first")
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _replace(path: pathlib.Path, content: bytes, mode: int = 0o644) -> None:
    """Whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
    part.replace(path)


def _facts(certificate: x509.Certificate) -> CertificateFacts:
    names: Iterable[str] = ()
    is_authority = False
    for extension in certificate.extensions:
        if isinstance(extension.value, x509.SubjectAlternativeName):
            names = (str(name.value) for name in extension.value)
        elif isinstance(extension.value, x509.BasicConstraints):
            is_authority = extension.value.ca
    return CertificateFacts(
        _common_name(certificate.subject),
        tuple(names),
        _common_name(certificate.issuer),
        f"{certificate.serial_number:x}",
        certificate.not_valid_after_utc,
        is_authority,
    )
