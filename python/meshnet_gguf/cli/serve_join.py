"""`meshnet serve --join`: this machine takes part in a mesh that runs."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import socket
import sys
import time
from collections.abc import Callable, Sequence

from absl import flags

from meshnet_gguf import joining, progress
from meshnet_gguf.cli import machine_flags, mesh_flags, output, source_flags
from meshnet_gguf.client import LayerRange
from meshnet_gguf.embedded_mesh import Place, RunningNode, node_config
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.gguf_file import read_model
from meshnet_gguf.inventory import take_inventory
from meshnet_gguf.local_cluster import share_of_cores
from meshnet_gguf.local_plan import WORKER_BYTES
from meshnet_gguf.model_files import ModelFiles, find_model
from meshnet_gguf.models import pinned_models
from meshnet_gguf.plan import ModelShape, shape_of
from proto.meshnet.shard.v1 import errors_pb2

__all__ = ["join"]

_MODEL_ID = flags.DEFINE_string("model_id", None, "The model's id at the tracker.")
_DEFAULT_SESSIONS = 8
_DEFAULT_CONTEXT = 4096


async def join(
    arguments: Sequence[str],
    trackers: Sequence[str],
    ended: asyncio.Event,
    is_ready: Callable[[], None],
) -> None:
    """Serves part of the mesh's model until `ended`. Raises MeshnetError, ControlError."""
    started = time.monotonic()
    place = Place(
        machine_flags.MESH_LISTEN.value or _own_address(trackers[0]), mesh_flags.security()
    )
    machine_flags.check_place(
        place, shlex.join(["serve", *arguments, "--join", ",".join(trackers)])
    )
    with progress.working(f"asking {trackers[0]}"):
        mesh = await joining.look(
            trackers,
            model_id=_MODEL_ID.value or "",
            security=place.security,
        )
    files = await _files_to_join(arguments, mesh)
    with progress.working("measuring this machine"):
        proposal, flags_of_worker, reckoned = await asyncio.to_thread(_propose, mesh, files)
    progress.say(
        f"taking layers {proposal.layers} of {mesh.model_id or files.name}: {proposal.reason}"
    )
    if reckoned:
        progress.say(f"a token through this machine is reckoned to take {reckoned / 1000:.1f} ms")
    with machine_flags.state_folder() as folder:
        keys = None
        if mesh.token_public_key:
            keys = folder / "tracker.pub"
            keys.write_text(mesh.token_public_key, "utf-8")
        capability = mesh.capability
        config = node_config(
            files,
            proposal.layers,
            place,
            tracker=trackers[0],
            model_id=mesh.model_id or files.name,
            folder=folder,
            token_keys=keys,
            worker_flags=flags_of_worker,
            artifact_sha256="" if capability is None else capability.artifact_sha256,
            recipe_fingerprint="" if capability is None else capability.recipe_fingerprint,
        )
        node = RunningNode(config)
        try:
            # What fetches shows its own progress.
            loading = f"loading layers {proposal.layers}"
            with contextlib.nullcontext() if files.sources else progress.working(loading):
                await node.ready()
            is_ready()
            _say_joined(config.node_id, node.worker, proposal, time.monotonic() - started)
            await machine_flags.first_of(ended.wait(), node.failed)
        finally:
            await node.stop()


def _own_address(tracker: str) -> str:
    """This machine's address in the tracker's network, with port 0."""
    host, _, port = tracker.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal():
        raise MeshnetError(
            errors_pb2.REASON_CONFIGURATION_INVALID, f"expected --join HOST:PORT, got {tracker!r}"
        )
    try:
        family, _, _, _, where = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)  # chooses a route, sends nothing
            own = probe.getsockname()[0]
    except OSError as error:
        raise MeshnetError(
            errors_pb2.REASON_PEER_UNREACHABLE, f"cannot find a way to {tracker}: {error}"
        ) from error
    return f"[{own}]:0" if ":" in own else f"{own}:0"


async def _files_to_join(arguments: Sequence[str], mesh: joining.MeshView) -> ModelFiles:
    """What to load: the model that was named, or the one that the mesh is known to serve."""
    artifact = ""
    if mesh.workers:
        artifact = mesh.workers[0].registration.labels.get("artifact_sha256", "")
    if arguments:
        model = arguments[0]
    else:
        known = {model.manifest.artifact_sha256: name for name, model in pinned_models().items()}
        if artifact not in known:
            raise MeshnetError(
                errors_pb2.REASON_ARTIFACT_UNREADABLE,
                f"expected MODEL: the mesh serves {mesh.model_id or 'nothing yet'}"
                + (f", artifact {artifact}, which is no known model" if artifact else "")
                + "; name its GGUF file, or its manifest with --from",
            )
        model = known[artifact]
    first = min((left.begin for left in _holes(mesh)), default=0)
    files = await find_model(
        model,
        output.given_path(model),
        sources=source_flags.places(),
        sources_ca=source_flags.ca_file(),
        layer=first,
    )
    if artifact and files.artifact_sha256 and files.artifact_sha256 != artifact:
        raise MeshnetError(
            errors_pb2.REASON_ARTIFACT_MISMATCH,
            f"expected artifact {artifact}, which the mesh serves as {mesh.model_id}, "
            f"{model} is {files.artifact_sha256}; name the same model",
        )
    return files


def _holes(mesh: joining.MeshView) -> list[LayerRange]:
    if not mesh.workers:
        return []
    return joining.gaps([mesh.workers[0].registration.model_units], mesh.spans)


def _propose(
    mesh: joining.MeshView, files: ModelFiles
) -> tuple[joining.Proposal, dict[str, str], int | None]:
    """Layers, the worker's flags, and what a token is reckoned to take then."""
    model = read_model(files.path)
    inventory = take_inventory(model)
    worker_flags = {"threads": str(share_of_cores(1))}
    if mesh.capability is not None:
        worker_flags = joining.worker_flags_of(mesh.capability)
    if machine_flags.CPU_VARIANT.value:
        worker_flags["cpu_variant"] = machine_flags.CPU_VARIANT.value
    context = machine_flags.CONTEXT.value or int(
        worker_flags.get("context_tokens", _DEFAULT_CONTEXT)
    )
    sessions = machine_flags.SESSIONS.value or int(
        worker_flags.get("max_sessions", _DEFAULT_SESSIONS)
    )
    room = machine_flags.budget() - WORKER_BYTES
    best: tuple[int, joining.Proposal, ModelShape, int] | None = None
    failure: MeshnetError | None = None
    while sessions:
        shape = shape_of(model, inventory, context_tokens=context, sessions=sessions)
        try:
            proposal = _proposal(shape, mesh, room)
        except MeshnetError as error:
            failure = error
        else:
            left = sum(missing.end - missing.begin for missing in proposal.missing)
            if best is None or left < best[0]:
                best = (left, proposal, shape, sessions)
        if machine_flags.SESSIONS.value:
            break
        sessions //= 2
    if best is None:
        assert failure is not None
        raise failure
    _, proposal, shape, sessions = best
    worker_flags |= {"context_tokens": str(context), "max_sessions": str(sessions)}
    here = joining.this_machine("this machine", room, mesh.round_trip_us)
    return proposal, worker_flags, joining.reckon(shape, mesh, proposal, here)


def _proposal(shape: ModelShape, mesh: joining.MeshView, room: int) -> joining.Proposal:
    layers = machine_flags.layers()
    if layers is None:
        return joining.propose(shape, mesh.spans, room)
    size = shape.memory.get((layers.begin, layers.end))
    if size is None:
        raise MeshnetError(
            errors_pb2.REASON_LAYER_RANGE_INVALID,
            f"expected layers between allowed cuts ({', '.join(map(str, shape.bounds))}), got "
            f"{layers}",
        )
    if size > room:
        raise MeshnetError(
            errors_pb2.REASON_MEMORY_BUDGET_EXCEEDED,
            f"expected {size} bytes for layers {layers}, workers may take {room} here",
        )
    left = joining.gaps(shape.bounds, [*mesh.spans, joining.Span(layers, 1)])
    return joining.Proposal(layers, size, "as you said", tuple(left))


def _say_joined(node_id: str, worker: str, proposal: joining.Proposal, seconds: float) -> None:
    if output.wants_json():
        output.print_json(
            {
                "node": node_id,
                "worker": worker,
                "layers": [proposal.layers.begin, proposal.layers.end],
                "missing": [[left.begin, left.end] for left in proposal.missing],
                "seconds": seconds,
            }
        )
    else:
        sys.stdout.write(
            f"this machine serves layers {proposal.layers} as {node_id} "
            f"(ready after {seconds:.1f} s)\n"
        )
        for left in proposal.missing:
            sys.stdout.write(f"layers {left} are still missing\n")
    sys.stdout.flush()
