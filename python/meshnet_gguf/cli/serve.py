"""Serves a model to OpenAI clients, from this machine or from several.

    meshnet serve smollm2
    meshnet serve ~/models/llama.gguf --stages 3 --listen 127.0.0.1:9000
    meshnet serve --join 127.0.0.1:7100
    meshnet serve v4.json --from https://models.example/v4 --mesh-listen 10.0.0.5:7100 \\
        --tls-cert a.pem --tls-key a.key --tls-ca authorities.pem
    meshnet serve llama --tracker 127.0.0.1:7100
    meshnet serve llama --workers 10.0.0.5:7001,10.0.0.6:7001 --insecure

MODEL is a known name (meshnet fetches it by its hash), a GGUF file, or a manifest whose files come
--from elsewhere. A tracker, a node and its worker, and the gateway start here, with as much of the
model as fits into this machine's memory; then any OpenAI client works on http://127.0.0.1:8080/v1.
--join adds this machine to a mesh that runs: it asks the tracker what is served, and takes the
layers that help most. With --tracker MODEL is the name under which nodes have registered it, with
--workers a name for what workers that run already hold. Ends on SIGTERM or SIGINT, after the
answers under way; at once when interrupted twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import shlex
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from absl import app, flags
from meshnet.errors import ControlError
from meshnet.tasks import cancel
from meshnet.transport import KeyFiles, is_loopback

from meshnet_gguf import progress
from meshnet_gguf.cli import machine_flags, mesh_flags, output, serve_join, source_flags
from meshnet_gguf.cli.serve_join import join
from meshnet_gguf.client import LayerRange
from meshnet_gguf.embedded_mesh import EmbeddedMesh, Place
from meshnet_gguf.gateway import (
    Admission,
    AllowedHosts,
    ApiKeys,
    GatewayOptions,
    GatewayServer,
    KeptRouteSource,
    KeptSessions,
    Listener,
    ServedModel,
    Serving,
    TemplateRenderer,
    TrackedModelSource,
    WatchedRouteSource,
    follow_capacity,
    make_app,
)
from meshnet_gguf.gguf_file import read_model
from meshnet_gguf.local_plan import plan_here
from meshnet_gguf.model_files import find_model
from meshnet_gguf.route_source import TrackerRouteSource

__all__ = ["FLAG_MODULES", "run"]

FLAG_MODULES = (
    machine_flags.__name__,
    *mesh_flags.MODULES,
    serve_join.__name__,
    source_flags.__name__,
)

_LISTEN = flags.DEFINE_string("listen", "127.0.0.1:8080", "Address to serve on, HOST:PORT.")
_JOIN = flags.DEFINE_list("join", [], "Add this machine to the mesh of these trackers, HOST:PORT.")
_STAGES = flags.DEFINE_integer(
    "stages", None, "Number of stages; without it, as many as help.", lower_bound=1
)
_WORKERS = flags.DEFINE_list("workers", [], "Workers that run already, instead of starting any.")
_QUEUE = flags.DEFINE_integer("max_queued", 64, "Requests that may wait.", lower_bound=0)
_QUEUE_SECONDS = flags.DEFINE_float(
    "queue_seconds", 30.0, "How long a request may wait.", lower_bound=0
)
_ANSWER_SECONDS = flags.DEFINE_float(
    "answer_seconds", 600.0, "How long an answer may take.", lower_bound=1
)
_KEEP_SECONDS = flags.DEFINE_float(
    "keep_seconds",
    120.0,
    "How long a session waits for its conversation's next turn, 0 = not at all.",
    lower_bound=0,
)
_API_KEYS = flags.DEFINE_string(
    "api_keys", None, "File of API keys (meshnet api-keys); without it everybody is served."
)
_HOSTS = flags.DEFINE_list(
    "allowed_hosts",
    [],
    "Names under which clients reach the gateway, beside its address and localhost; needed without "
    "API keys and HTTPS, where any web page could else ask it in its visitors' name.",
)
_CERT = flags.DEFINE_string("https_cert", None, "PEM file: certificate shown to OpenAI clients.")
_KEY = flags.DEFINE_string("https_key", None, "PEM file: private key of --https-cert.")
_LOG_PROMPTS = flags.DEFINE_bool("log_prompts", False, "Write requests' texts into the log.")
_LOG = flags.DEFINE_bool("log", False, "Write a line for every request to stderr.")

# As many as nothing is known of a tracker's mesh.
_TRACKED_SESSIONS = 16
# A head that does not answer within this is gone: another way is looked for.
_DIAL_SECONDS = 1.0
_DEFAULT_MESH_LISTEN = "127.0.0.1:7100"


@dataclass(frozen=True)
class _Mesh:
    """What the gateway stands before, how many answers it makes at once, and what else to say.

    `problem` says why there are no answers yet. Where `capacity` can be asked it says how many from
    then on, up to `most` (0: no limit).
    `failed` waits until something that no answer could do without has ended by itself.
    """

    name: str
    source: WatchedRouteSource
    endpoints: tuple[str, ...]
    slots: int
    tracker: str = ""
    missing: LayerRange | None = None
    problem: str | None = None
    failed: Callable[[], Awaitable[None]] | None = None
    capacity: Callable[[], Awaitable[int]] | None = None
    most: int = 0


def run(arguments: Sequence[str]) -> int:
    """The command."""
    if len(arguments) != 1 and not (_JOIN.value and not arguments):
        raise app.UsageError(f"expected one model, got {len(arguments)}")
    if (_CERT.value is None) != (_KEY.value is None):
        raise app.UsageError("expected --https-cert and --https-key together")
    chosen = [bool(mesh_flags.trackers()), bool(_WORKERS.value), bool(_JOIN.value)]
    if sum(chosen) > 1:
        raise app.UsageError("expected one of --tracker, --workers and --join")
    if _STAGES.value and (machine_flags.layers() or _JOIN.value):
        raise app.UsageError("expected --stages or --layers, and --stages not with --join")
    mesh_flags.security()
    machine_flags.budget()
    if _LOG.value or _LOG_PROMPTS.value:
        logging.basicConfig(
            stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(message)s"
        )
    with output.control_errors():
        if _JOIN.value:
            asyncio.run(
                machine_flags.until_told(
                    lambda ended, is_ready: join(arguments, _JOIN.value, ended, is_ready)
                )
            )
        else:
            asyncio.run(
                machine_flags.until_told(
                    lambda ended, is_ready: _serve(arguments[0], ended, is_ready)
                )
            )
    return 0


async def _serve(model: str, ended: asyncio.Event, is_ready: Callable[[], None]) -> None:
    started = time.monotonic()
    async with contextlib.AsyncExitStack() as stack:
        # Bound first: to be told after minutes of loading that the port is taken helps nobody.
        listener = stack.enter_context(
            Listener(_LISTEN.value, tls=_tls(), insecure=mesh_flags.security().insecure)
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
            [ServedModel(mesh.name, mesh.source)],
            admission,
            await renderer,
            answer_within=_ANSWER_SECONDS.value,
            kept=KeptSessions(admission, seconds=_KEEP_SECONDS.value),
        )
        keys = None if _API_KEYS.value is None else ApiKeys(output.given_path(_API_KEYS.value))
        options = GatewayOptions(log_prompts=_LOG_PROMPTS.value, keys=keys, hosts=_hosts(listener))
        server = await stack.enter_async_context(
            GatewayServer(make_app(gateway, options), listener)
        )
        if mesh.capacity is not None:
            following = asyncio.create_task(
                follow_capacity(admission, mesh.capacity, limit=mesh.most)
            )
            stack.push_async_callback(cancel, following)
        _collect_early()
        is_ready()
        _say_ready(mesh, server.url, time.monotonic() - started)
        await machine_flags.first_of(ended.wait(), mesh.failed)


def _collect_early() -> None:
    """Frees what requests leave behind soon after them, and never looks at what was there before.

    Python 3.14 looks through a hundredth of all objects at a time, which leaves megabytes of
    requests that have ended lying about.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(gc.get_threshold()[0], 1)


def _say_ready(mesh: _Mesh, url: str, seconds: float) -> None:
    missing = mesh.missing
    if output.wants_json():
        output.print_json(
            {
                "model": mesh.name,
                "url": f"{url}/v1",
                "workers": list(mesh.endpoints),
                "tracker": mesh.tracker,
                "missing": None if missing is None else [missing.begin, missing.end],
                "problem": mesh.problem,
                "seconds": seconds,
            }
        )
    else:
        sys.stdout.write(f"{mesh.name} is served on {url}/v1 (ready after {seconds:.1f} s)\n")
        if mesh.tracker:
            hint = "; other machines: --mesh-listen" if is_loopback(mesh.tracker) else ""
            sys.stdout.write(f"to join it: meshnet serve --join {mesh.tracker}{hint}\n")
        if mesh.problem is not None:
            sys.stdout.write(f"but not yet: {mesh.problem}; answers begin once that is over\n")
        if missing is not None:
            sys.stdout.write(f"layers {missing} are missing: answers begin once they have joined\n")
    sys.stdout.flush()


@contextlib.asynccontextmanager
async def _mesh(model: str) -> AsyncIterator[_Mesh]:
    async with contextlib.AsyncExitStack() as stack:
        if mesh_flags.trackers():
            source = await stack.enter_async_context(_tracked(mesh_flags.trackers(), model))
            most = machine_flags.SESSIONS.value
            yield _Mesh(
                model,
                TrackedModelSource(source),
                tuple(mesh_flags.trackers()),
                most or _TRACKED_SESSIONS,
                problem=await _problem(source),
                capacity=source.sessions_at_once,
                most=most,
            )
        elif _WORKERS.value:
            yield await stack.enter_async_context(_running_workers(model, _WORKERS.value))
        else:
            yield await stack.enter_async_context(_embedded(model))


@contextlib.asynccontextmanager
async def _tracked(trackers: Sequence[str], model_id: str) -> AsyncIterator[TrackerRouteSource]:
    async with TrackerRouteSource(
        trackers, model_id, security=mesh_flags.security(), dial_timeout=_DIAL_SECONDS
    ) as source:
        yield source


async def _problem(source: TrackerRouteSource) -> str | None:
    """Why a tracker's mesh has no route of the model just now."""
    try:
        with progress.working("asking the mesh"):
            sessions = await source.sessions_at_once()
    except ControlError as error:
        return str(error)
    return None if sessions else f"no workers of one lane hold all layers of {source.model_id}"


@contextlib.asynccontextmanager
async def _running_workers(model: str, endpoints: Sequence[str]) -> AsyncIterator[_Mesh]:
    source = KeptRouteSource(
        endpoints,
        security=mesh_flags.security(),
    )
    async with contextlib.aclosing(source):
        with progress.working("asking the workers"):
            async with source.open() as opened:
                slots = min(c.max_sessions for c in opened.route.capabilities)
        yield _Mesh(
            model, source, tuple(endpoints), min(slots, machine_flags.SESSIONS.value or slots)
        )


@contextlib.asynccontextmanager
async def _embedded(model: str) -> AsyncIterator[_Mesh]:
    place = Place(machine_flags.MESH_LISTEN.value or _DEFAULT_MESH_LISTEN, mesh_flags.security())
    machine_flags.check_place(
        place, "serve " + shlex.quote(model) + " --mesh-listen " + place.listen
    )
    files = await find_model(
        model,
        output.given_path(model),
        sources=source_flags.places(),
        sources_ca=source_flags.ca_file(),
    )
    plan = await asyncio.to_thread(
        lambda: plan_here(
            read_model(files.path),
            budget=machine_flags.budget(),
            stages=_STAGES.value or 0,
            layers=machine_flags.layers(),
            context_tokens=machine_flags.CONTEXT.value,
            max_sessions=machine_flags.SESSIONS.value,
        )
    )
    flags_of_ours = (
        {"cpu_variant": machine_flags.CPU_VARIANT.value} if machine_flags.CPU_VARIANT.value else {}
    )
    with machine_flags.state_folder() as folder:
        mesh = EmbeddedMesh(files, plan, place, folder=folder, worker_flags=flags_of_ours)
        with progress.working(f"starting {len(plan.ranges)} of {files.name}'s stages"):
            await mesh.__aenter__()
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_exit(mesh)
            source = await stack.enter_async_context(_tracked([mesh.tracker], mesh.model_id))
            yield _Mesh(
                files.name,
                TrackedModelSource(source),
                tuple(node.worker for node in mesh.nodes),
                plan.max_sessions,
                mesh.tracker,
                plan.missing,
                failed=mesh.failed,
                capacity=source.sessions_at_once,
            )


def _hosts(listener: Listener) -> AllowedHosts | None:
    # A page that has another's address has neither an API key nor a certificate of that name.
    if not _HOSTS.value and (_API_KEYS.value is not None or listener.tls is not None):
        return None
    named = _LISTEN.value.rpartition(":")[0]
    return AllowedHosts.listening_on(listener.host, [named, *_HOSTS.value])


def _tls() -> KeyFiles | None:
    if _CERT.value is None or _KEY.value is None:
        return None
    return KeyFiles(output.given_path(_CERT.value), output.given_path(_KEY.value))
