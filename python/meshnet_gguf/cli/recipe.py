"""Shows the recipe of a running worker field by field, or where two workers' recipes differ.

    meshnet recipe 127.0.0.1:7001
    meshnet recipe 127.0.0.1:7001 127.0.0.1:7002

Workers serve one route only if their recipes' fingerprints are equal. The fingerprint is computed
anew from the fields here; a worker that claims another one is an error. With two workers the exit
code is 1 when they differ.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from absl import app

from meshnet_gguf import progress
from meshnet_gguf.cli import output, security_flags, terminal
from meshnet_gguf.client import Capability, WorkerClient
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.protocol import recipe_fingerprint
from meshnet_gguf.recipe import differences, explain
from proto.meshnet.shard.v1 import errors_pb2

__all__ = ["FLAG_MODULES", "run"]

FLAG_MODULES = (security_flags.__name__,)


def run(arguments: Sequence[str]) -> int:
    """The command."""
    if len(arguments) not in (1, 2):
        raise app.UsageError(f"expected one or two workers as HOST:PORT, got {len(arguments)}")
    with progress.working("asking the workers"):
        found = asyncio.run(_ask_all(arguments))
    if len(found) == 1:
        _show(found[0])
        return 0
    changes = differences(found[0].recipe, found[1].recipe)
    if output.wants_json():
        output.print_json(
            {
                "fingerprints": [capability.recipe_fingerprint for capability in found],
                "differences": [
                    {"name": name, "values": [first, second]} for name, first, second in changes
                ],
            }
        )
    elif not changes:
        terminal.show(f"the same recipe: {found[0].recipe_fingerprint}")
    else:
        rows = [
            (name, *("(none)" if value is None else value for value in values))
            for name, *values in changes
        ]
        terminal.show(terminal.table(("field", *arguments), rows))
    return 1 if changes else 0


async def _ask_all(endpoints: Sequence[str]) -> list[Capability]:
    return list(await asyncio.gather(*(_ask(endpoint) for endpoint in endpoints)))


async def _ask(endpoint: str) -> Capability:
    async with WorkerClient(endpoint, security=security_flags.security()) as worker:
        capability = await worker.capability()
    computed = recipe_fingerprint(capability.recipe.items())
    if computed != capability.recipe_fingerprint:
        raise MeshnetError(
            errors_pb2.REASON_RECIPE_MISMATCH,
            f"worker {endpoint} says fingerprint {capability.recipe_fingerprint}, "
            f"but its fields give {computed}",
        )
    return capability


def _show(capability: Capability) -> None:
    entries = explain(capability.recipe)
    if output.wants_json():
        output.print_json(
            {
                "fingerprint": capability.recipe_fingerprint,
                "evidence": capability.evidence,
                "layers": [capability.layers.begin, capability.layers.end],
                "fields": [vars(entry) for entry in entries],
            }
        )
        return
    rows = [(entry.name, entry.value, entry.meaning) for entry in entries]
    terminal.show(
        terminal.table(("field", "value", "what it is"), rows),
        f"fingerprint {capability.recipe_fingerprint}",
        f"layers {capability.layers}, evidence {capability.evidence}",
    )
