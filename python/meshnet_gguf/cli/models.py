"""Lists models: those that meshnet knows, those on this machine, and those that are served.

    meshnet models
    meshnet models --tracker 127.0.0.1:7100 --json

A known model is pinned by its hash, and fetched when it is served first. A model on this machine
lies in $MESHNET_STORAGE, whole or as far as somebody has needed it. What is served is asked of the
gateway at --url, or of the trackers; without either flag a gateway that is away is no error.
"""

from __future__ import annotations

import asyncio
import pathlib
from collections.abc import Sequence
from typing import Any

from absl import app
from meshnet.tracker_client import TrackerClient

from meshnet_gguf import progress
from meshnet_gguf.cli import gateway_flags, mesh_flags, output, terminal
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.models import pinned_models
from meshnet_gguf.provisioned_set import installed_sets
from meshnet_gguf.storage import storage_root
from proto.meshnet.control.v1 import tracker_pb2
from proto.meshnet.shard.v1 import errors_pb2

__all__ = ["FLAG_MODULES", "run"]

FLAG_MODULES = (gateway_flags.__name__, *mesh_flags.MODULES)

_ANSWER_SECONDS = 5.0


def run(arguments: Sequence[str]) -> int:
    """The command."""
    if arguments:
        raise app.UsageError(f"expected flags only, got {arguments[0]!r}")
    known = _known()
    installed = _installed()
    served, where = _served()
    if output.wants_json():
        output.print_json(
            {"known": known, "installed": installed, "served": served, "served_by": where}
        )
        return 0
    names = {model["artifact_sha256"]: model["name"] for model in known}
    here = {model["artifact_sha256"] for model in installed}
    rows = [
        (model["name"], "known", f"{model['bytes'] / 1e6:.0f}", model["license"])
        for model in known
        if model["artifact_sha256"] not in here
    ]
    for model in installed:
        name = names.get(model["artifact_sha256"], model["name"])
        state = "here" if model["whole"] else f"here, {model['verified_share']:.0%} of it"
        rows.append((name, state, f"{model['bytes'] / 1e6:.0f}", model["folder"]))
    rows += [(name, "served", "", where) for name in served]
    terminal.show(terminal.table(("model", "state", "MB", "where"), rows, numbers=("MB",)))
    return 0


def _known() -> list[dict[str, Any]]:
    return [
        {
            "name": model.name,
            "license": model.license,
            "bytes": model.manifest.total_bytes,
            "artifact_sha256": model.manifest.artifact_sha256,
        }
        for model in pinned_models().values()
    ]


def _installed() -> list[dict[str, Any]]:
    folder: pathlib.Path = storage_root() / "models"
    return [
        {
            "name": found.model.stem,
            "artifact_sha256": found.artifact_sha256,
            "bytes": found.total_bytes,
            "whole": found.verified_chunks == found.chunks,
            "verified_share": found.verified_chunks / max(1, found.chunks),
            "folder": str(found.folder),
        }
        for found in installed_sets(folder)
    ]


def _served() -> tuple[list[str], str]:
    """Names, and who said so."""
    if mesh_flags.trackers():
        with output.control_errors(), progress.working("asking the mesh"):
            return asyncio.run(_ask_tracker()), ",".join(mesh_flags.trackers())
    where = gateway_flags.url()
    try:
        with (
            gateway_flags.unreachable(where),
            gateway_flags.client(silent_seconds=_ANSWER_SECONDS) as http,
            progress.working(f"asking {where}"),
        ):
            answer = http.get(f"{where}/models")
        gateway_flags.check(answer, where)
        return [str(model["id"]) for model in answer.json()["data"]], where
    except MeshnetError as error:
        if gateway_flags.is_url_given() or error.reason != errors_pb2.REASON_PEER_UNREACHABLE:
            raise
        return [], ""


async def _ask_tracker() -> list[str]:
    async with TrackerClient(mesh_flags.trackers(), security=mesh_flags.security()) as tracker:
        answer = await tracker.list_workers(tracker_pb2.ListWorkersRequest())
    return sorted({worker.registration.model_id for worker in answer.workers})
