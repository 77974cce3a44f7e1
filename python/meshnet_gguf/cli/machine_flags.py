"""What a machine gives to a mesh, and where: the flags of `meshnet serve`, alone or joining."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import signal
import socket
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from absl import app, flags
from meshnet.tasks import cancel
from meshnet.transport import is_loopback

from meshnet_gguf.cli import output
from meshnet_gguf.client import LayerRange
from meshnet_gguf.embedded_mesh import Place
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.local_plan import memory_budget
from meshnet_gguf.machine import free_memory
from meshnet_gguf.sizes import parse_size
from proto.meshnet.shard.v1 import errors_pb2

__all__ = [
    "CONTEXT",
    "CPU_VARIANT",
    "MESH_LISTEN",
    "SESSIONS",
    "budget",
    "check_place",
    "first_of",
    "layers",
    "state_folder",
    "until_told",
]

_LAYERS = flags.DEFINE_string(
    "layers", None, "Half-open range of layers, BEGIN:END; without it, as planned."
)
_MEMORY = flags.DEFINE_string(
    "memory", None, "What workers may take of this machine, such as 12GiB; 85 % of what is free."
)
CONTEXT = flags.DEFINE_integer(
    "context_tokens", 0, "Tokens that a session may hold; 0 = as fits.", lower_bound=0
)
SESSIONS = flags.DEFINE_integer("max_sessions", 0, "Sessions at once; 0 = as fits.", lower_bound=0)
CPU_VARIANT = flags.DEFINE_string(
    "cpu_variant", None, "Kernels for another CPU than this one, so that others may join."
)
MESH_LISTEN = flags.DEFINE_string(
    "mesh_listen",
    None,
    "Where the tracker is served, HOST:PORT, and on whose host node and worker listen; "
    "127.0.0.1:7100, and with --join this machine's address towards the mesh.",
)
_STATE = flags.DEFINE_string(
    "state", None, "Folder that keeps the tracker's database and key from one run to the next."
)


def layers() -> LayerRange | None:
    """What --layers says. Raises app.UsageError."""
    if _LAYERS.value is None:
        return None
    begin, colon, end = _LAYERS.value.partition(":")
    if not (colon and begin.isascii() and begin.isdecimal() and end.isascii() and end.isdecimal()):
        raise app.UsageError(f"expected --layers BEGIN:END, got {_LAYERS.value!r}")
    return LayerRange(int(begin), int(end))


def budget() -> int:
    """Bytes that workers may take here. Raises app.UsageError."""
    if _MEMORY.value is None:
        return memory_budget(free_memory())
    size = parse_size(_MEMORY.value)
    if size is None:
        raise app.UsageError(f"expected --memory such as 12GiB, got {_MEMORY.value!r}")
    return size


@contextlib.contextmanager
def state_folder() -> Iterator[pathlib.Path]:
    """The folder of --state, or one that is gone afterwards. Raises MeshnetError."""
    if _STATE.value is None:
        with tempfile.TemporaryDirectory(prefix="meshnet-serve-") as name:
            yield pathlib.Path(name)
        return
    folder = output.given_path(_STATE.value)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise MeshnetError(
            errors_pb2.REASON_CONFIGURATION_INVALID, f"expected a folder for --state: {error}"
        ) from error
    yield folder


def check_place(place: Place, command: str) -> None:
    """Refuses to go beyond loopback in plaintext, with what to do.

    Raises MeshnetError (INSECURE_TRANSPORT, CONFIGURATION_INVALID).
    """
    host = place.listen.rpartition(":")[0].strip("[]")
    if host in ("0.0.0.0", "::", ""):  # noqa: S104 - refused
        raise MeshnetError(
            errors_pb2.REASON_CONFIGURATION_INVALID,
            f"expected --mesh-listen with the address that others dial, got {place.listen}",
        )
    if place.security.tls is None and not place.security.insecure and not is_loopback(place.listen):
        name = "".join(char if char.isalnum() else "-" for char in socket.gethostname()) or "node"
        raise MeshnetError(
            errors_pb2.REASON_INSECURE_TRANSPORT,
            f"expected certificates for a mesh on {place.listen}, which is not loopback. Where the "
            "mesh's authority is (once: meshnet certs init mesh-ca) run\n"
            f"  meshnet certs issue mesh-ca {name} --host={host}\n"
            f"copy {name}.pem, {name}.key and authorities.pem here, and run\n"
            f"  meshnet {command} --tls-cert={name}.pem --tls-key={name}.key "
            "--tls-ca=authorities.pem\n"
            "In a network that is trusted as a whole, --insecure does instead",
        )


async def until_told(
    serve: Callable[[asyncio.Event, Callable[[], None]], Awaitable[None]],
) -> None:
    """Runs what ends when the event is set, on a signal; at once if it is not ready by then."""
    ended = asyncio.Event()
    task = asyncio.current_task()
    assert task is not None
    ready = False

    def end(number: int) -> None:
        impatient = number == signal.SIGINT and ended.is_set()
        if ready and not impatient:
            ended.set()
        else:
            # There is nothing to drain yet, or no patience for it.
            task.cancel()

    def is_ready() -> None:
        nonlocal ready
        ready = True

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, end, number)
    try:
        await serve(ended, is_ready)
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def first_of(ended: Awaitable[Any], failed: Callable[[], Awaitable[None]] | None) -> None:
    """Waits for the end, or for what raises the reason of another one."""
    tasks = [asyncio.ensure_future(ended)]
    if failed is not None:
        tasks.append(asyncio.ensure_future(failed()))
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel(*tasks)
    for task in done:
        task.result()
