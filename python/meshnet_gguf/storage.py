"""Where artifacts lie: configured storage, never under /home.

    folder = storage_root() / "models"
    refuse_home(folder)

Storage is $MESHNET_STORAGE or /var/tmp/meshnet-<uid>.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import pathlib
import stat
from collections.abc import AsyncIterator

from meshnet_gguf import progress
from meshnet_gguf.errors import MeshnetError
from proto.meshnet.shard.v1 import errors_pb2

__all__ = ["free_bytes", "locked", "make_folder", "refuse_home", "storage_root", "sync_folder"]

_STORAGE_VARIABLE = "MESHNET_STORAGE"
_LOCK_POLL_SECONDS = 0.05


def _configuration_error(message: str) -> MeshnetError:
    return MeshnetError(errors_pb2.REASON_CONFIGURATION_INVALID, message)


def refuse_home(path: pathlib.Path) -> None:
    """Raises MeshnetError (CONFIGURATION_INVALID) for a path under /home, also through links."""
    home = pathlib.Path("/home")
    resolved = pathlib.Path(os.path.realpath(path))
    lexical = pathlib.Path(os.path.normpath(path.absolute()))
    homes = (home, pathlib.Path(os.path.realpath(home)))
    if any(p.is_relative_to(h) for p in (resolved, lexical) for h in homes):
        raise _configuration_error(
            f"expected storage outside /home, got {path} ({resolved}); "
            f"choose a folder on another file system"
        )


def make_folder(path: pathlib.Path) -> pathlib.Path:
    """An absolute folder outside /home, made (for its user alone) if it is missing.

    Raises MeshnetError (CONFIGURATION_INVALID).
    """
    if not path.is_absolute():
        raise _configuration_error(f"expected an absolute path as storage, got {path}")
    refuse_home(path)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _configuration_error(
            f"cannot make the storage folder {path} ({error.strerror}); "
            "choose a folder that you may write to"
        ) from error
    return path


def _user_id() -> int:
    # In a user namespace (the build root makes one) everybody is 0; the machine's own number keeps
    # users apart. Lines of the map: first number inside, first number outside, how many.
    with contextlib.suppress(OSError, ValueError):
        for line in pathlib.Path("/proc/self/uid_map").read_text("ascii").splitlines():
            inside, outside, count = map(int, line.split())
            if inside <= os.getuid() < inside + count:
                return outside + os.getuid() - inside
    return os.getuid()


def storage_root(root: str | os.PathLike[str] | None = None) -> pathlib.Path:
    """The storage folder, made if it is missing: `root`, $MESHNET_STORAGE or the default.

    Raises MeshnetError (CONFIGURATION_INVALID) for a relative path, for a folder under /home (also
    through links), and for a default folder that somebody else owns or may write to.
    """
    chosen = root if root is not None else os.environ.get(_STORAGE_VARIABLE)
    path = pathlib.Path(chosen or f"/var/tmp/meshnet-{_user_id()}")  # noqa: S108 (checked below)
    try:
        make_folder(path)
    except MeshnetError as error:
        raise _configuration_error(f"{error.message}; {_STORAGE_VARIABLE} names it") from error
    if not chosen:
        # Its name can be guessed and /var/tmp is everybody's: take it only if it is ours alone.
        status = path.lstat()
        if (
            not stat.S_ISDIR(status.st_mode)
            or status.st_uid != os.getuid()
            or status.st_mode & 0o022
        ):
            raise _configuration_error(
                f"{path} is no folder that only user {os.getuid()} may write to; "
                f"remove it or set {_STORAGE_VARIABLE}"
            )
    return path


def free_bytes(folder: pathlib.Path) -> int:
    """How much may still be written to a folder's file system."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def sync_folder(folder: pathlib.Path) -> None:
    """Makes the folder's entries outlast a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that has nothing to do here
            raise
    finally:
        os.close(descriptor)


@contextlib.asynccontextmanager
async def locked(path: pathlib.Path) -> AsyncIterator[None]:
    """Holds a lock file, after waiting for whoever holds it; the kernel frees it with us."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as lock:
        said = False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not said:
                    progress.say("waiting for another process that fetches the same artifact")
                    said = True
                await asyncio.sleep(_LOCK_POLL_SECONDS)
        yield
