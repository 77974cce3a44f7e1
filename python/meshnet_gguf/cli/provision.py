"""Brings an artifact, or what some layers need of it, onto this machine, and checks every byte.

    meshnet provision manifest.json --from https://example.org/models/v4 --to /srv/models
    meshnet provision manifest.json --from /mnt/models --layers 0:12
    meshnet provision manifest.json --from https://a.example/v4,/mnt/models --to /srv/models

The set becomes the folder TO/ARTIFACT: files, manifest.json, provisioned.json. Run it again after
whatever ended it: what was verified is neither fetched nor read again. With --layers only what
these layers need is fetched, and a worker loads just such layers; run it again for others. A server
without ranges works, too, but sends more. Never to a folder under /home.
"""

from __future__ import annotations

import asyncio
import pathlib
import sys
from collections.abc import Sequence

from absl import app, flags

from meshnet_gguf.cli import output, source_flags
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.manifest import Manifest, read_manifest
from meshnet_gguf.provision import Options, Provisioned, open_sources, provision
from meshnet_gguf.storage import storage_root
from proto.meshnet.shard.v1 import errors_pb2

__all__ = ["FLAG_MODULES", "run"]

FLAG_MODULES = (source_flags.__name__,)

_TO = flags.DEFINE_string(
    "to",
    None,
    "Folder that the set is put into, not under /home; without it `models` in $MESHNET_STORAGE.",
)
_ARTIFACT = flags.DEFINE_string(
    "artifact", None, "Refuse a manifest of another artifact than this SHA-256."
)
_LAYERS = flags.DEFINE_string(
    "layers", None, "Half-open range of layers, BEGIN:END; without it the whole artifact."
)
_SILENCE = flags.DEFINE_float(
    "silence", 30.0, "Seconds without a byte after which a server counts as gone.", 0.1
)
_PARALLEL = flags.DEFINE_integer("parallel", 4, "Fetches at once.", 1, 64)
_ATTEMPTS = flags.DEFINE_integer(
    "attempts", 6, "Attempts in a row without progress before a fetch fails.", 1, 100
)
_RECHECK = flags.DEFINE_bool(
    "recheck", False, "Read what is already there and fetch what is damaged."
)


def run(arguments: Sequence[str]) -> int:
    """The command."""
    if len(arguments) != 1:
        raise app.UsageError(f"expected one manifest, got {len(arguments)}")
    if not source_flags.places():
        raise app.UsageError("expected --from")
    layers = _parse_layers(_LAYERS.value)
    manifest = read_manifest(output.given_path(arguments[0]))
    if _ARTIFACT.value and _ARTIFACT.value != manifest.artifact_sha256:
        raise MeshnetError(
            errors_pb2.REASON_ARTIFACT_MISMATCH,
            f"expected the manifest of artifact {_ARTIFACT.value}, {arguments[0]} is that of "
            f"{manifest.artifact_sha256}",
        )
    to = output.given_path(_TO.value) if _TO.value else storage_root() / "models"
    done = asyncio.run(_provision(manifest, to, layers))
    if output.wants_json():
        output.print_json(
            {
                "artifact_sha256": done.artifact_sha256,
                "folder": str(done.folder),
                "model": str(done.model),
                "manifest": str(done.manifest),
                "layers": list(done.layers) if done.layers else None,
                "fetched_bytes": done.fetched_bytes,
                "kept_bytes": done.kept_bytes,
                "rehashed": list(done.rehashed),
            }
        )
    else:
        sys.stdout.write(f"{done.model}\n")
    return 0


async def _provision(
    manifest: Manifest, to: pathlib.Path, layers: tuple[int, int] | None
) -> Provisioned:
    options = Options(
        parallel=_PARALLEL.value, attempts=_ATTEMPTS.value, recheck=bool(_RECHECK.value)
    )
    async with open_sources(
        source_flags.places(), ca_file=source_flags.ca_file(), silence_seconds=_SILENCE.value
    ) as sources:
        return await provision(manifest, sources, to, layers=layers, options=options)


def _parse_layers(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    begin, colon, end = text.partition(":")
    if not (colon and begin.isdecimal() and end.isdecimal() and int(begin) < int(end)):
        raise app.UsageError(f"expected --layers BEGIN:END with BEGIN < END, got {text!r}")
    return int(begin), int(end)
