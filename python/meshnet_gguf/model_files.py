"""A model as somebody names it: a pinned name, a GGUF file, or a manifest and where its files are.

    files = await find_model("smollm2")
    files = await find_model("/srv/llama.gguf")
    files = await find_model("/etc/v4.json", sources=["https://models.example/v4"])

Of a manifest no more than one layer is fetched, which brings the headers with it: the rest comes
once it is clear which layers are wanted.
"""

from __future__ import annotations

import asyncio
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass

from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.manifest import read_manifest
from meshnet_gguf.models import fetch_model, pinned_models
from meshnet_gguf.provision import open_sources, provision
from meshnet_gguf.storage import storage_root
from proto.meshnet.shard.v1 import errors_pb2

__all__ = ["ModelFiles", "find_model"]


@dataclass(frozen=True)
class ModelFiles:
    """What a worker is started with. `path` is the (first) GGUF file; its headers are there.

    With `sources` the files come from there, into `storage`, as far as layers need them;
    `sources_ca` (PEM) are the authorities of those that are web servers, None: the system's.
    """

    name: str
    path: pathlib.Path
    manifest: pathlib.Path | None = None
    artifact_sha256: str = ""
    sources: tuple[str, ...] = ()
    storage: pathlib.Path | None = None
    sources_ca: pathlib.Path | None = None


async def find_model(
    model: str,
    path: pathlib.Path,
    *,
    sources: Sequence[str] = (),
    sources_ca: pathlib.Path | None = None,
    layer: int = 0,
) -> ModelFiles:
    """What `model` means; `path` is it as a path. `layer` is one that will be wanted.

    Raises MeshnetError: ARTIFACT_UNREADABLE, and as fetch_model() and provision() do.
    """
    pinned = pinned_models()
    if model in pinned:
        found = await asyncio.to_thread(fetch_model, model)
        artifact = pinned[model].manifest.artifact_sha256
        return ModelFiles(model, found, found.with_name("manifest.json"), artifact)
    if not await asyncio.to_thread(path.is_file):
        raise MeshnetError(
            errors_pb2.REASON_ARTIFACT_UNREADABLE,
            f"expected a GGUF file, a manifest or one of {', '.join(sorted(pinned))}, "
            f"got {model!r}",
        )
    if path.suffix != ".json":
        return ModelFiles(path.stem, path)
    if not sources:
        raise MeshnetError(
            errors_pb2.REASON_CONFIGURATION_INVALID,
            f"expected --from with the manifest {path.name}: folders and https addresses that "
            "hold its files",
        )
    manifest = await asyncio.to_thread(read_manifest, path)
    storage = storage_root() / "models"
    async with open_sources(sources, ca_file=sources_ca) as opened:
        done = await provision(manifest, opened, storage, layers=(layer, layer + 1))
    return ModelFiles(
        path.stem,
        done.model,
        path,
        manifest.artifact_sha256,
        tuple(sources),
        storage,
        sources_ca,
    )
