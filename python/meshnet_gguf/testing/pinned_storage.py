"""A storage folder that has a pinned model already, so that no test has to fetch it."""

from __future__ import annotations

import pathlib

from meshnet_gguf.models import pinned_models
from meshnet_gguf.provision import provision
from meshnet_gguf.sources import FolderSource

__all__ = ["provide_model"]


async def provide_model(storage: pathlib.Path, name: str, file: pathlib.Path) -> None:
    """Puts a model of one file where programs find it that have MESHNET_STORAGE=storage.

    `file` is absolute.
    """
    manifest = pinned_models()[name].manifest
    [wanted] = manifest.files
    source = storage / "from"
    source.mkdir(parents=True)
    (source / wanted.name).symlink_to(file)
    await provision(manifest, [FolderSource(source)], storage / "models")
