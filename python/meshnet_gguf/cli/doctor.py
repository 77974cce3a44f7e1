"""Says what is wrong with this machine and its mesh, and what to do about it.

    meshnet doctor
    meshnet doctor smollm2 --tracker 127.0.0.1:7100
    meshnet doctor --tracker 10.0.0.5:7100 --tls-cert a.pem --tls-key a.key --tls-ca authorities.pem
    meshnet doctor --json

Looks at processor, memory, disk and ports; with certificates at those, also whether they name
--host; with --tracker at the clocks, whether every worker is reached from here and neighbours from
each other, at versions, dark lanes and routes. With MODEL, a known name or a GGUF file, at whether
it fits. Exit code 1 when a check fails; warnings are none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from absl import app, flags

from meshnet_gguf import doctor, progress
from meshnet_gguf.cli import mesh_flags, output, terminal
from meshnet_gguf.doctor import Check, Level
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.gguf_file import read_model
from meshnet_gguf.inventory import take_inventory
from meshnet_gguf.local_plan import WORKER_BYTES
from meshnet_gguf.models import pinned_models
from proto.meshnet.shard.v1 import errors_pb2

__all__ = ["FLAG_MODULES", "run"]

FLAG_MODULES = mesh_flags.MODULES

_PORTS = flags.DEFINE_list(
    "ports", ["127.0.0.1:8080", "127.0.0.1:7100"], "Addresses to serve on, HOST:PORT."
)
_HOST = flags.DEFINE_multi_string(
    "host", [], "Name by which others dial a program; to be in its certificate; repeatable."
)
_COLOURS = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "red"}


def run(arguments: Sequence[str]) -> int:
    """The command."""
    if len(arguments) > 1:
        raise app.UsageError(f"expected at most one model, got {len(arguments)}")
    security = mesh_flags.security()
    needed, stored = _needed(arguments[0]) if arguments else (0, 0)
    checks = [
        *doctor.check_machine(),
        doctor.check_memory(needed),
        doctor.check_storage(stored),
        *doctor.check_ports(_PORTS.value),
    ]
    if security.tls is not None:
        checks += doctor.check_certificates(security.tls, _HOST.value)
    if mesh_flags.trackers():
        with progress.working("asking the mesh"):
            checks += asyncio.run(doctor.check_mesh(mesh_flags.trackers(), security))
    failed = any(check.level is Level.FAIL for check in checks)
    if output.wants_json():
        output.print_json({"ok": not failed, "checks": [vars(check) for check in checks]})
    else:
        _show(checks)
    return 1 if failed else 0


def _needed(model: str) -> tuple[int, int]:
    """Bytes of memory and of storage for a model."""
    pinned = pinned_models()
    if model in pinned:
        size = pinned[model].manifest.total_bytes
        return size + WORKER_BYTES, size
    path = output.given_path(model)
    if not path.is_file():
        raise MeshnetError(
            errors_pb2.REASON_ARTIFACT_UNREADABLE,
            f"expected a GGUF file or one of {', '.join(sorted(pinned))}, got {model!r}",
        )
    inventory = take_inventory(read_model(path))
    return inventory.stage_bytes((0, inventory.main_layers)) + WORKER_BYTES, 0


def _show(checks: Sequence[Check]) -> None:
    console = terminal.console()
    width = max(len(check.name) for check in checks)
    for check in checks:
        found = terminal.line(f"{check.level.value:5}", _COLOURS[check.level])
        found.append_text(terminal.line(f"{check.name:{width}}  {check.message}", "default"))
        console.print(found)
        if check.cure:
            console.print(terminal.line(f"{'':5}{'':{width}}  -> {check.cure}"))
