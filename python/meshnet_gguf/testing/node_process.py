"""Nodes as processes of their own, with the fake engine, for tests that kill them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pathlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import yaml

from meshnet_gguf.logged_process import PythonProgram

__all__ = ["QUICK", "node_values", "running_node", "start_node", "wait_gone"]

_NUMBERS = itertools.count()
# Restarts and probes at a pace for tests.
QUICK = {
    "backoff_first_ms": 50,
    "backoff_most_ms": 200,
    "probe_every_ms": 100,
    "probe_timeout_ms": 1000,
    "probe_failures": 2,
    "drain_ms": 2000,
}


def node_values(
    node_id: str, tracker: str, layers: tuple[int, int], **sections: Mapping[str, Any]
) -> dict[str, Any]:
    """A configuration for the fake engine; `sections` are merged into it."""
    values: dict[str, Any] = {
        "node": {"id": node_id, "folder": node_id},
        "tracker": {"endpoints": [tracker], "timeout_ms": 2000},
        "model": {"id": "m", "layers": list(layers)},
        "worker": {"engine": "fake", "flags": {"fake_layers": 8}},
        "supervision": dict(QUICK),
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return values


async def start_node(values: Mapping[str, Any], folder: pathlib.Path) -> PythonProgram:
    """Starts `meshnet node`; it has not registered yet."""
    name = values["node"]["id"]
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(dict(values)))
    log = folder / f"{name}-{next(_NUMBERS)}.log"
    return await PythonProgram.start(
        "meshnet_gguf.cli.meshnet", "node", f"--config={path}", "--json", log=log
    )


@contextlib.asynccontextmanager
async def running_node(
    values: Mapping[str, Any], folder: pathlib.Path
) -> AsyncIterator[PythonProgram]:
    """A node that has registered; killed at the end, if it still runs."""
    node = await start_node(values, folder)
    try:
        await node.wait_event("registered")
        yield node
    finally:
        await node.kill()


async def wait_gone(pid: int) -> None:
    """Waits until a process that is no child of ours has ended."""
    while _runs(pid):  # noqa: ASYNC110 - only polling shows it
        await asyncio.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        status = pathlib.Path(f"/proc/{pid}/stat").read_text("ascii")
    except (FileNotFoundError, ProcessLookupError):
        return False
    # Z: ended, but not yet waited for by whoever inherited it.
    return status.rpartition(")")[2].split()[0] != "Z"
