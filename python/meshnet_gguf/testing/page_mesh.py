"""What the page is looked at with: a gateway over a tracker and real nodes of these names."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import openai
from meshnet.testing.tracker_process import TrackerProcess

from meshnet_gguf.gateway import GatewayOptions, TrackedModelSource
from meshnet_gguf.logged_process import PythonProgram
from meshnet_gguf.route_source import TrackerRouteSource
from meshnet_gguf.testing.gateway import gateway_over
from meshnet_gguf.testing.node_process import node_values, start_node

__all__ = ["LAYERS", "MODEL", "PageMesh", "page_mesh"]

MODEL = "m"
LAYERS = {"attic-server": (0, 4), "office-pc": (4, 6), "laptop": (6, 8)}


@dataclass
class PageMesh:
    """A running gateway and the nodes behind it."""

    url: str
    client: openai.AsyncOpenAI
    tracker: TrackerProcess
    folder: pathlib.Path
    flags: dict[str, Any]
    nodes: dict[str, PythonProgram] = field(default_factory=dict)

    async def start(self, machine: str) -> None:
        """Starts a node; returns once it has registered."""
        values = node_values(
            machine,
            self.tracker.endpoint,
            LAYERS[machine],
            worker={"engine": "fake", "flags": self.flags},
            measurement={"every_ms": 200},
        )
        self.nodes[machine] = await start_node(values, self.folder)
        await self.nodes[machine].wait_event("registered")

    async def kill(self, machine: str) -> None:
        """Ends a machine as a power cut would: node and worker at once, without a word."""
        await self.nodes[machine].kill()

    async def answer(self, tokens: int) -> None:
        """Lets the model say so much to somebody else."""
        await self.client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Tell me of the sea."}],
            max_tokens=tokens,
            extra_body={"ignore_eos": True},
        )


@contextlib.asynccontextmanager
async def page_mesh(
    folder: pathlib.Path, *tracker_flags: str, status_seconds: float = 1.0, delay: str = "2ms"
) -> AsyncIterator[PageMesh]:
    """Three nodes, a tracker and a gateway; every stage takes `delay` over a step."""
    flags = {"fake_layers": 8, "fake_delay": delay, "context_tokens": 100_000}
    async with (
        await TrackerProcess.start(
            f"sqlite:///{folder}/tracker.db", "--lease_ms=9000", *tracker_flags
        ) as tracker,
        TrackerRouteSource([tracker.endpoint], MODEL) as source,
        gateway_over(
            TrackedModelSource(source),
            model=MODEL,
            options=GatewayOptions(ready_seconds=30, status_seconds=status_seconds),
        ) as gateway,
    ):
        mesh = PageMesh(gateway.url, gateway.client, tracker, folder, flags)
        try:
            await asyncio.gather(*(mesh.start(machine) for machine in LAYERS))
            yield mesh
        finally:
            await asyncio.gather(*(node.kill() for node in mesh.nodes.values()))
