"""The flags by which commands prove who they are to trackers and workers, and whom they trust."""

from __future__ import annotations

from absl import app, flags
from meshnet.transport import Security, TlsFiles

from meshnet_gguf.cli import output

__all__ = ["security"]

_CERT = flags.DEFINE_string("tls_cert", None, "PEM file: certificate shown to the mesh.")
_KEY = flags.DEFINE_string("tls_key", None, "PEM file: its private key.")
_CA = flags.DEFINE_string("tls_ca", None, "PEM file: authorities of the mesh.")
_INSECURE = flags.DEFINE_bool("insecure", False, "Plaintext beyond loopback, in trusted networks.")


def security() -> Security:
    """What they say. Raises app.UsageError unless all TLS files are given or none."""
    named = [name for name in (_CERT.value, _KEY.value, _CA.value) if name]
    if len(named) not in (0, 3):
        raise app.UsageError("expected --tls-cert, --tls-key and --tls-ca together")
    tls = TlsFiles(*(output.given_path(name) for name in named)) if named else None
    return Security(tls, bool(_INSECURE.value))
