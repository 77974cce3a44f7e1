"""Serves a model to OpenAI clients: workers and gateway on this machine, in one command.

    meshnet serve smollm2
    meshnet serve ~/models/llama.gguf --stages 3 --listen 127.0.0.1:9000
    meshnet serve llama --tracker 127.0.0.1:7100
    meshnet serve llama --workers 10.0.0.5:7001,10.0.0.6:7001 --insecure

MODEL is a known name (meshnet fetches it by its hash) or a GGUF file, split into stages that run as
worker processes within the memory that is free here. With --tracker it is the name under which
nodes have registered the model, with --workers a name for what workers that run already hold. Then
any OpenAI client works on http://127.0.0.1:8080/v1. Ends on SIGTERM or SIGINT, after the answers
under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pathlib
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from absl import app, flags
from meshnet.transport import TlsFiles

from meshnet_gguf import progress
from meshnet_gguf.cli import output
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.gateway import (
    Admission,
    ApiKeys,
    GatewayOptions,
    GatewayServer,
    KeptRouteSource,
    Listener,
    ServedModel,
    ServerTls,
    Serving,
    TemplateRenderer,
    TrackedModelSource,
    WatchedRouteSource,
    make_app,
)
from meshnet_gguf.gateway.local import free_memory, plan_here
from meshnet_gguf.gguf_file import read_model
from meshnet_gguf.local_cluster import LocalCluster
from meshnet_gguf.models import fetch_model, pinned_models
from meshnet_gguf.route_source import TrackerRouteSource, worker_credentials
from proto.meshnet.shard.v1 import errors_pb2

__all__ = ["run"]

_LISTEN = flags.DEFINE_string("listen", "127.0.0.1:8080", "Address of the gateway, HOST:PORT.")
_STAGES = flags.DEFINE_integer("stages", 2, "Worker processes to start here.", lower_bound=1)
_CONTEXT = flags.DEFINE_integer(
    "context_tokens", 0, "Tokens that a session may hold, 0 = as fits.", lower_bound=0
)
_SESSIONS = flags.DEFINE_integer(
    "max_sessions", 0, "Answers that are made at once, 0 = as fits.", lower_bound=0
)
_WORKERS = flags.DEFINE_list("workers", [], "Workers that run already, instead of starting any.")
_TRACKER = flags.DEFINE_list("tracker", [], "Trackers that know routes, instead of workers here.")
_QUEUE = flags.DEFINE_integer("max_queued", 64, "Requests that may wait.", lower_bound=0)
_QUEUE_SECONDS = flags.DEFINE_float(
    "queue_seconds", 30.0, "How long a request may wait.", lower_bound=0
)
_ANSWER_SECONDS = flags.DEFINE_float(
    "answer_seconds", 600.0, "How long an answer may take.", lower_bound=1
)
_API_KEYS = flags.DEFINE_string(
    "api_keys", None, "File of API keys (meshnet api-keys); without it everybody is served."
)
_CERT = flags.DEFINE_string("tls_cert", None, "PEM file with the gateway's certificate chain.")
_KEY = flags.DEFINE_string("tls_key", None, "PEM file with the certificate's private key.")
_MESH_CA = flags.DEFINE_string(
    "mesh_ca", None, "PEM file with the authority of workers and trackers."
)
_MESH_CERT = flags.DEFINE_string("mesh_cert", None, "PEM file shown to workers and trackers.")
_MESH_KEY = flags.DEFINE_string("mesh_key", None, "PEM file with its private key.")
_INSECURE = flags.DEFINE_bool("insecure", False, "Plaintext beyond loopback, in trusted networks.")
_LOG_PROMPTS = flags.DEFINE_bool("log_prompts", False, "Write requests' texts into the log.")
_LOG = flags.DEFINE_bool("log", False, "Write a line for every request to stderr.")

# A tracker's mesh may serve many routes at once; more than this asks for --max-sessions.
_TRACKED_SESSIONS = 16


@dataclass(frozen=True)
class _Mesh:
    """What the gateway stands before, and how many answers it makes at once."""

    source: WatchedRouteSource
    endpoints: tuple[str, ...]
    slots: int


def run(arguments: Sequence[str]) -> int:
    """The command."""
    if len(arguments) != 1:
        raise app.UsageError(f"expected one model, got {len(arguments)}")
    if (_CERT.value is None) != (_KEY.value is None):
        raise app.UsageError("expected --tls-cert and --tls-key together")
    if len({_MESH_CA.value is None, _MESH_CERT.value is None, _MESH_KEY.value is None}) > 1:
        raise app.UsageError("expected --mesh-ca, --mesh-cert and --mesh-key together")
    if _TRACKER.value and _WORKERS.value:
        raise app.UsageError("expected --tracker or --workers, got both")
    if _LOG.value or _LOG_PROMPTS.value:
        logging.basicConfig(
            stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(message)s"
        )
    asyncio.run(_serve(arguments[0]))
    return 0


async def _serve(model: str) -> None:
    started = time.monotonic()
    ended = asyncio.Event()
    task = asyncio.current_task()
    assert task is not None

    def end() -> None:
        if serving:
            ended.set()
        else:
            # There is nothing to drain yet.
            task.cancel()

    serving = False
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, end)
    name = pathlib.Path(model).stem if model.endswith(".gguf") else model
    try:
        async with contextlib.AsyncExitStack() as stack:
            # Bound first: to be told after minutes of loading that the port is taken helps nobody.
            listener = stack.enter_context(
                Listener(_LISTEN.value, tls=_tls(), insecure=_INSECURE.value)
            )
            renderer = asyncio.create_task(stack.enter_async_context(TemplateRenderer()))
            try:
                mesh = await stack.enter_async_context(_mesh(model))
            finally:
                # Only what the stack holds by then is ended with it.
                await asyncio.gather(renderer, return_exceptions=True)
            admission = Admission(
                max_active=mesh.slots,
                max_queued=_QUEUE.value,
                queue_seconds=_QUEUE_SECONDS.value,
            )
            gateway = Serving(
                [ServedModel(name, mesh.source)],
                admission,
                await renderer,
                answer_within=_ANSWER_SECONDS.value,
            )
            keys = None if _API_KEYS.value is None else ApiKeys(output.given_path(_API_KEYS.value))
            options = GatewayOptions(log_prompts=_LOG_PROMPTS.value, keys=keys)
            server = await stack.enter_async_context(
                GatewayServer(make_app(gateway, options), listener)
            )
            serving = True
            _say_ready(name, server.url, mesh.endpoints, time.monotonic() - started)
            await ended.wait()
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def _say_ready(name: str, url: str, endpoints: Sequence[str], seconds: float) -> None:
    if output.wants_json():
        output.print_json(
            {"model": name, "url": f"{url}/v1", "workers": list(endpoints), "seconds": seconds}
        )
    else:
        sys.stdout.write(f"{name} is served on {url}/v1 (ready after {seconds:.1f} s)\n")
    sys.stdout.flush()


@contextlib.asynccontextmanager
async def _mesh(model: str) -> AsyncIterator[_Mesh]:
    async with contextlib.AsyncExitStack() as stack:
        if _TRACKER.value:
            tracker = await stack.enter_async_context(
                TrackerRouteSource(_TRACKER.value, model, tls=_mesh_tls(), insecure=_INSECURE.value)
            )
            slots = _SESSIONS.value or _TRACKED_SESSIONS
            yield _Mesh(TrackedModelSource(tracker), tuple(_TRACKER.value), slots)
            return
        if _WORKERS.value:
            endpoints = list(_WORKERS.value)
        else:
            endpoints = (await stack.enter_async_context(_cluster(model))).endpoints
        source = KeptRouteSource(
            endpoints,
            credentials=worker_credentials(_mesh_tls()),
            allow_insecure=_INSECURE.value,
        )
        await stack.enter_async_context(contextlib.aclosing(source))
        async with source.open() as opened:
            slots = min(c.max_sessions for c in opened.route.capabilities)
        yield _Mesh(source, tuple(endpoints), min(slots, _SESSIONS.value or slots))


@contextlib.asynccontextmanager
async def _cluster(model: str) -> AsyncIterator[LocalCluster]:
    path = await asyncio.to_thread(_file_of, model)
    plan = plan_here(
        read_model(path),
        stages=_STAGES.value,
        free_bytes=free_memory(),
        context_tokens=_CONTEXT.value,
        max_sessions=_SESSIONS.value,
    )
    async with contextlib.AsyncExitStack() as stack:
        with progress.working(f"starting {len(plan.ranges)} workers"):
            cluster = await stack.enter_async_context(LocalCluster(plan.specs(path)))
        yield cluster


def _file_of(model: str) -> pathlib.Path:
    if model in pinned_models():
        return fetch_model(model)
    path = output.given_path(model)
    if not path.is_file():
        raise MeshnetError(
            errors_pb2.REASON_ARTIFACT_UNREADABLE,
            f"expected a GGUF file or one of {', '.join(sorted(pinned_models()))}, got {model!r}",
        )
    return path


def _tls() -> ServerTls | None:
    if _CERT.value is None or _KEY.value is None:
        return None
    return ServerTls(output.given_path(_CERT.value), output.given_path(_KEY.value))


def _mesh_tls() -> TlsFiles | None:
    if _MESH_CA.value is None or _MESH_CERT.value is None or _MESH_KEY.value is None:
        return None
    return TlsFiles(
        output.given_path(_MESH_CERT.value),
        output.given_path(_MESH_KEY.value),
        output.given_path(_MESH_CA.value),
    )
