"""A gateway over real worker processes with the fake engine, and OpenAI's own client for it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import openai
from meshnet.transport import KeyFiles

from meshnet_gguf.gateway import (
    Admission,
    GatewayOptions,
    GatewayServer,
    KeptRouteSource,
    KeptSessions,
    Listener,
    ServedModel,
    Serving,
    TemplateRenderer,
    make_app,
)
from meshnet_gguf.gateway.routes import WatchedRouteSource
from meshnet_gguf.testing.cluster import FakeCluster, cluster_of, fake_specs

__all__ = ["MODEL", "FakeGateway", "RunningGateway", "fake_gateway", "gateway_over"]

MODEL = "fake"


@dataclass(frozen=True)
class RunningGateway:
    """A running gateway and a client of it that never retries."""

    url: str
    client: openai.AsyncOpenAI
    admission: Admission
    server: GatewayServer
    kept: KeptSessions


@dataclass(frozen=True)
class FakeGateway(RunningGateway):
    """One with the workers behind it."""

    fake: FakeCluster


@contextlib.asynccontextmanager
async def gateway_over(
    source: WatchedRouteSource,
    *,
    model: str = MODEL,
    admission: Admission | None = None,
    options: GatewayOptions | None = None,
    api_key: str = "unused",
    open_within: float = 30.0,
    keep_seconds: float = 0.0,
    tls: KeyFiles | None = None,
    **connections: float,
) -> AsyncIterator[RunningGateway]:
    """A gateway for one model, whose routes come from `source`.

    A route may take `open_within` seconds to agree, more than a gateway gives it by itself:
    machines that run tests are busy. `connections` are GatewayServer's bounds of them.
    """
    admission = admission or Admission(max_active=8)
    async with TemplateRenderer() as renderer:
        serving = Serving(
            [ServedModel(model, source)],
            admission,
            renderer,
            open_within=open_within,
            kept=KeptSessions(admission, seconds=keep_seconds),
        )
        app = make_app(serving, options or GatewayOptions(ready_seconds=30))
        with Listener("127.0.0.1:0", tls=tls) as listener:
            async with (
                GatewayServer(app, listener, **connections) as server,
                openai.AsyncOpenAI(
                    base_url=f"{server.url}/v1", api_key=api_key, max_retries=0, timeout=60.0
                ) as client,
            ):
                yield RunningGateway(server.url, client, admission, server, serving.kept)


@contextlib.asynccontextmanager
async def fake_gateway(
    cuts: Sequence[int] = (4,),
    *flags: str,
    open_within: float = 30.0,
    **settings: Any,
) -> AsyncIterator[FakeGateway]:
    """A gateway over a fake model in `len(cuts) + 1` workers, each started with `flags` too.

    `settings` are those of gateway_over().
    """
    async with (
        cluster_of(fake_specs(cuts, *flags)) as fake,
        contextlib.aclosing(
            KeptRouteSource(fake.cluster.endpoints, answer_within=open_within)
        ) as source,
        gateway_over(source, open_within=open_within, **settings) as gateway,
    ):
        yield FakeGateway(**vars(gateway), fake=fake)
