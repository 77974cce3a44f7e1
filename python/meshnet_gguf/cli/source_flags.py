"""The flags by which commands know where the files of a manifest come from."""

from __future__ import annotations

import pathlib

from absl import flags

from meshnet_gguf.cli import output

__all__ = ["ca_file", "places"]

_FROM = flags.DEFINE_list(
    "from", [], "Folders and https addresses that hold the files; they share the work."
)
_CA = flags.DEFINE_string(
    "ca", None, "PEM file with the authorities to trust instead, of web servers with the files."
)


def places() -> list[str]:
    """What --from says, folders as whole paths."""
    return [place if "://" in place else str(output.given_path(place)) for place in _FROM.value]


def ca_file() -> pathlib.Path | None:
    """What --ca says."""
    return output.given_path(_CA.value) if _CA.value else None
