"""Ed25519 keys and signatures, each for one purpose.

    key = SigningKey.generate()
    key.save(path)                                    # PEM, readable by its owner only
    trusted = TrustedKeys.load([path_of_public_key])
    signature = key.sign("certification", content)
    trusted.verify("certification", content, key.key_id, signature)

What is signed is "meshnet PURPOSE v1\\n" and the content, so that a signature made for one
purpose means nothing for another. A key's id is the first 32 hex digits of the SHA-256 of its 32
public bytes.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)

from meshnet.errors import ControlError, Reason

__all__ = ["SigningKey", "TrustedKeys", "key_id_of"]

_PUBLIC_END = "-----END PUBLIC KEY-----"


def key_id_of(key: Ed25519PublicKey) -> str:
    """The id of a public key."""
    return hashlib.sha256(key.public_bytes_raw()).hexdigest()[:32]


def _signed(purpose: str, content: bytes) -> bytes:
    return f"meshnet {purpose} v1\n".encode() + content


class SigningKey:
    """A private key."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.key_id = key_id_of(key.public_key())

    @classmethod
    def generate(cls) -> SigningKey:
        """A new key."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, path: pathlib.Path) -> SigningKey:
        """From a PEM file. Raises ControlError (CONFIGURATION_INVALID)."""
        try:
            key = serialization.load_pem_private_key(path.read_bytes(), password=None)
        except (OSError, ValueError, TypeError) as error:
            raise ControlError(
                Reason.CONFIGURATION_INVALID, f"expected a private key in PEM at {path}: {error}"
            ) from error
        if not isinstance(key, Ed25519PrivateKey):
            raise ControlError(
                Reason.CONFIGURATION_INVALID, f"expected an Ed25519 key at {path}; make a new one"
            )
        return cls(key)

    def save(self, path: pathlib.Path) -> None:
        """Writes PATH (mode 0600) and PATH.pub. Raises ControlError where there is one already."""
        private = self._key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(private)
            path.with_name(path.name + ".pub").write_text(self.public_pem())
        except OSError as error:
            raise ControlError(
                Reason.CONFIGURATION_INVALID, f"expected to write a new key at {path}: {error}"
            ) from error

    def public_pem(self) -> str:
        """The public half, to be given to whoever shall trust it."""
        return (
            self._key.public_key()
            .public_bytes(
                serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
            )
            .decode()
        )

    def sign(self, purpose: str, content: bytes) -> bytes:
        """64 bytes."""
        return self._key.sign(_signed(purpose, content))

    def trust(self) -> TrustedKeys:
        """The set of this key alone."""
        return TrustedKeys({self.key_id: self._key.public_key()})


@dataclass(frozen=True)
class TrustedKeys:
    """Public keys by their ids."""

    keys: Mapping[str, Ed25519PublicKey]

    def __len__(self) -> int:
        """How many."""
        return len(self.keys)

    @classmethod
    def load(cls, files: Iterable[pathlib.Path]) -> TrustedKeys:
        """From PEM files of one or more keys. Raises ControlError (CONFIGURATION_INVALID)."""
        keys = {}
        for file in files:
            try:
                blocks = file.read_text("ascii").split(_PUBLIC_END)
                if len(blocks) < 2:
                    raise ValueError("no public key in it")
                for block in blocks[:-1]:
                    key = serialization.load_pem_public_key((block + _PUBLIC_END).encode())
                    if not isinstance(key, Ed25519PublicKey):
                        raise ValueError("another kind of key than Ed25519")
                    keys[key_id_of(key)] = key
            except (OSError, ValueError) as error:
                raise ControlError(
                    Reason.CONFIGURATION_INVALID,
                    f"expected Ed25519 public keys in PEM at {file}: {error}",
                ) from error
        return cls(keys)

    def verify(self, purpose: str, content: bytes, key_id: str, signature: bytes) -> bool:
        """Whether one of these keys signed it for this purpose."""
        key = self.keys.get(key_id)
        if key is None:
            return False
        try:
            key.verify(signature, _signed(purpose, content))
        except InvalidSignature:
            return False
        return True
