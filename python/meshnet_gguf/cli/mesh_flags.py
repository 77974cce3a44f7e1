"""The flags by which commands know a mesh: its trackers, and how they show themselves to it."""

from __future__ import annotations

from absl import flags

from meshnet_gguf.cli import security_flags
from meshnet_gguf.cli.security_flags import security

__all__ = ["MODULES", "security", "trackers"]

# For a command's FLAG_MODULES.
MODULES = (__name__, security_flags.__name__)

_TRACKER = flags.DEFINE_list(
    "tracker", [], "Trackers of the mesh, HOST:PORT; several share a mesh."
)


def trackers() -> list[str]:
    """What --tracker says."""
    return list(_TRACKER.value)
