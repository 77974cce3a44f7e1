"""The flags by which commands know a mesh: its trackers, and how they show themselves to it."""

from __future__ import annotations

from absl import app, flags
from meshnet.transport import TlsFiles

from meshnet_gguf.cli import output

__all__ = ["insecure", "mesh_tls", "trackers"]

_TRACKER = flags.DEFINE_list(
    "tracker", [], "Trackers of the mesh, HOST:PORT; several share a mesh."
)
_CERT = flags.DEFINE_string("tls_cert", None, "PEM file: certificate shown to the mesh.")
_KEY = flags.DEFINE_string("tls_key", None, "PEM file: its private key.")
_CA = flags.DEFINE_string("tls_ca", None, "PEM file: authorities of the mesh.")
_INSECURE = flags.DEFINE_bool("insecure", False, "Plaintext beyond loopback, in trusted networks.")


def trackers() -> list[str]:
    """What --tracker says."""
    return list(_TRACKER.value)


def insecure() -> bool:
    """What --insecure says."""
    return bool(_INSECURE.value)


def mesh_tls() -> TlsFiles | None:
    """Certificate, key and authority. Raises app.UsageError unless all are given or none."""
    if _CERT.value is None and _KEY.value is None and _CA.value is None:
        return None
    if _CERT.value is None or _KEY.value is None or _CA.value is None:
        raise app.UsageError("expected --tls-cert, --tls-key and --tls-ca together")
    return TlsFiles(*(output.given_path(name) for name in (_CERT.value, _KEY.value, _CA.value)))
