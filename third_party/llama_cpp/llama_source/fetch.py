"""Getting the pinned source: the methods in their order, and a cache of what was verified.

Nothing that a method returns is trusted: whatever it unpacked must hash to the pinned git tree. The
cache holds one archive a tree; it is unpacked and verified again every time it is used.
"""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from third_party.llama_cpp.llama_source import archive, git_tree
from third_party.llama_cpp.llama_source.errors import LlamaSourceError, Reason
from third_party.llama_cpp.llama_source.manifest import (
    ArchiveMethod,
    LocalMethod,
    Manifest,
    Method,
    NpmBundleMethod,
)

# a machine that cannot reach the host must get to the next method quickly
CONNECT_TIMEOUT_S = 10
_CHUNK = 1 << 20

Log = Callable[[str], None]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def default_cache() -> Path:
    """$MESHNET_CACHE/llama_cpp, or the same below the user's cache folder."""
    root = os.environ.get("MESHNET_CACHE")
    if root:
        return Path(root) / "llama_cpp"
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "meshnet" / "llama_cpp"


def _mismatch(what: str, expected: str, found: str) -> LlamaSourceError:
    return LlamaSourceError(Reason.ARCHIVE_MISMATCH, what, expected=expected, found=found)


def _unavailable(message: str) -> LlamaSourceError:
    return LlamaSourceError(Reason.SOURCE_UNAVAILABLE, message)


def _run(command: Sequence[str], cwd: Path) -> str:
    """Runs a program that the method needs; its failure means that the method is not available."""
    if shutil.which(command[0]) is None:
        raise _unavailable(f"{command[0]} is not installed")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        tail = " | ".join(done.stderr.strip().splitlines()[-3:])
        raise _unavailable(f"{' '.join(command[:3])} ended with {done.returncode}: {tail}")
    return done.stdout


def download(method: ArchiveMethod, destination: Path, log: Log = _say) -> None:
    """Downloads an archive. Raises SOURCE_UNAVAILABLE or ARCHIVE_MISMATCH."""
    digest = hashlib.sha256()
    received = 0
    # the manifest takes https only
    request = urllib.request.Request(  # noqa: S310
        method.url, headers={"User-Agent": "meshnet-llama-source"}
    )
    try:
        with (
            urllib.request.urlopen(request, timeout=CONNECT_TIMEOUT_S) as response,  # noqa: S310
            destination.open("wb") as out,
        ):
            shown = -1
            while chunk := response.read(_CHUNK):
                received += len(chunk)
                if received > method.size:
                    break
                digest.update(chunk)
                out.write(chunk)
                if (tenth := received * 10 // method.size) != shown:
                    shown = tenth
                    log(f"  {received >> 20} of {method.size >> 20} MiB")
    except (urllib.error.URLError, OSError) as error:
        raise _unavailable(f"{method.url}: {error}") from error
    if received != method.size:
        more = "more than " if received > method.size else ""
        raise _mismatch(method.url, f"{method.size} bytes", f"{more}{min(received, method.size)}")
    if digest.hexdigest() != method.sha256:
        raise _mismatch(method.url, f"sha256 {method.sha256}", f"sha256 {digest.hexdigest()}")


def _from_archive(method: ArchiveMethod, out: Path, work: Path, log: Log) -> None:
    path = work / "archive"
    log(f"downloading {method.url}")
    download(method, path, log)
    with path.open("rb") as stream:
        archive.extract_tar(stream, out, method.prefix)


def bundle_to_folder(bundle: Path, commit: str, out: Path, work: Path) -> None:
    """Unpacks one commit of a git bundle into out."""
    bare = work / "bundle.git"
    _run(["git", "clone", "--quiet", "--bare", str(bundle), str(bare)], work)
    tar = work / "bundle.tar"
    _run(["git", f"--git-dir={bare}", "archive", "--format=tar", f"--output={tar}", commit], work)
    with tar.open("rb") as stream:
        archive.extract_tar(stream, out)


def _bundle_of_package(package: Path, member: str, destination: Path) -> None:
    """Takes one file out of an npm package's tarball."""
    try:
        with tarfile.open(package, mode="r:gz") as tar:
            content = tar.extractfile(member)
            if content is None:
                raise _mismatch(package.name, f"a file {member}", "something else")
            with destination.open("wb") as out:
                shutil.copyfileobj(content, out, _CHUNK)
    except (KeyError, tarfile.TarError) as error:
        raise _mismatch(package.name, f"a file {member}", str(error)) from error


def check_integrity(path: Path, method: NpmBundleMethod) -> None:
    """Compares a package's tarball with its pinned size and hash. Raises ARCHIVE_MISMATCH."""
    size = path.stat().st_size
    if size != method.size:
        raise _mismatch(path.name, f"{method.size} bytes", f"{size} bytes")
    digest = hashlib.sha512()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    found = "sha512-" + base64.b64encode(digest.digest()).decode()
    if found != method.integrity:
        raise _mismatch(path.name, method.integrity, found)


def _from_npm(method: NpmBundleMethod, out: Path, work: Path, log: Log) -> None:
    name = f"{method.package}@{method.version}"
    log(f"npm pack {name} ({method.size >> 20} MiB)")
    _run(["npm", "pack", name, "--silent", "--pack-destination", str(work)], work)
    packages = sorted(work.glob("*.tgz"))
    if len(packages) != 1:
        raise _unavailable(f"npm pack {name} wrote {len(packages)} files")
    check_integrity(packages[0], method)
    _from_npm_package(packages[0], method, out, work)


def _from_npm_package(package: Path, method: NpmBundleMethod, out: Path, work: Path) -> None:
    bundle = work / "git.bundle"
    _bundle_of_package(package, method.path, bundle)
    bundle_to_folder(bundle, method.commit, out, work)


def _from_local(path: Path, manifest: Manifest, out: Path, work: Path, log: Log) -> None:
    """A folder, a tar archive (or one with a single top folder), a bundle, or the npm package."""
    log(f"taking {path}")
    bundles = [m for m in manifest.methods if isinstance(m, NpmBundleMethod)]
    if path.is_dir():
        # a work tree's repository is not part of the tree
        shutil.copytree(path, out, symlinks=True, ignore=_ignore_git(path))
    elif not path.is_file():
        raise _unavailable(f"{path} does not exist")
    elif path.suffix == ".bundle":
        commits = [manifest.commit, *(m.commit for m in bundles)]
        _first_commit(path, commits, out, work)
    elif bundles and path.suffix == ".tgz":
        _from_npm_package(path, bundles[0], out, work)
    else:
        with path.open("rb") as stream:
            archive.extract_tar(stream, work / "local")
        top = list((work / "local").iterdir())
        single = len(top) == 1 and top[0].is_dir()
        (top[0] if single else work / "local").rename(out)


def _ignore_git(root: Path) -> Callable[[str, list[str]], set[str]]:
    def ignore(folder: str, names: list[str]) -> set[str]:
        return {".git"} & set(names) if Path(folder) == root else set()

    return ignore


def _first_commit(bundle: Path, commits: Sequence[str], out: Path, work: Path) -> None:
    for commit in commits:
        try:
            bundle_to_folder(bundle, commit, out, work)
            return
        except LlamaSourceError:
            shutil.rmtree(work / "bundle.git", ignore_errors=True)
    raise _unavailable(f"{bundle} holds none of the commits {', '.join(commits)}")


def _from_cache(cache: Path, manifest: Manifest, out: Path) -> bool:
    """Unpacks the cached archive and verifies it; False if there is none. A bad one is removed."""
    path = cache / f"{manifest.tree}.tar.gz"
    if not path.is_file():
        return False
    try:
        with path.open("rb") as stream:
            archive.extract_tar(stream, out)
        git_tree.verify(out, manifest.tree, manifest.listing)
    except LlamaSourceError:
        shutil.rmtree(out, ignore_errors=True)
        path.unlink(missing_ok=True)
        raise
    return True


def _to_cache(cache: Path, manifest: Manifest, source: Path) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=cache, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as stream:
            archive.create_tar(source, stream)
        Path(name).chmod(0o644)
        Path(name).replace(cache / f"{manifest.tree}.tar.gz")
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _kind(method: Method) -> str:
    if isinstance(method, ArchiveMethod):
        return "archive"
    return "npm_bundle" if isinstance(method, NpmBundleMethod) else "local"


def fetch(
    manifest: Manifest,
    out: Path,
    *,
    cache: Path | None,
    local: Path | None = None,
    only: str | None = None,
    offline: bool = False,
    log: Log = _say,
) -> str:
    """Puts the verified source into a new folder; returns the name of the method that gave it.

    Order: local if given (then nothing else is tried), the cache, the manifest's methods. A method
    that is not reachable gives way to the next one. One that returns something else than the pinned
    tree ends the fetch: an altered source is not worked around silently. Raises SOURCE_UNAVAILABLE,
    ARCHIVE_*, TREE_MISMATCH.
    """
    if out.exists():
        raise _unavailable(f"{out} exists already: name a folder that does not")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".llama-source-") as folder:
        work = Path(folder)
        source = work / "source"
        used = _obtain(manifest, source, work, cache, local, only, offline, log)
        if cache is not None and used not in ("cache", "local"):
            _to_cache(cache, manifest, source)
        source.rename(out)
    return used


def _obtain(
    manifest: Manifest,
    source: Path,
    work: Path,
    cache: Path | None,
    local: Path | None,
    only: str | None,
    offline: bool,
    log: Log,
) -> str:
    if local is not None:
        _from_local(local, manifest, source, work, log)
        git_tree.verify(source, manifest.tree, manifest.listing)
        return "local"
    if cache is not None and only is None:
        try:
            if _from_cache(cache, manifest, source):
                return "cache"
        except LlamaSourceError as error:
            if offline:
                raise
            log(f"the cached source was refused and removed: {error}")
    if offline:
        raise LlamaSourceError(
            Reason.SOURCE_UNAVAILABLE,
            "offline, and the source is not in the cache",
            expected=f"{manifest.tree}.tar.gz in {cache}",
            found="no such file",
            hint="fetch once with a network, or give --local",
        )
    failures: list[str] = []
    for method in manifest.methods:
        if isinstance(method, LocalMethod) or (only is not None and _kind(method) != only):
            continue
        attempt = work / _kind(method)
        attempt.mkdir()
        try:
            if isinstance(method, ArchiveMethod):
                _from_archive(method, source, attempt, log)
            else:
                _from_npm(method, source, attempt, log)
        except LlamaSourceError as error:
            if error.reason is not Reason.SOURCE_UNAVAILABLE:
                raise
            log(f"  not available: {error.message}")
            failures.append(f"{_kind(method)}: {error.message}")
            shutil.rmtree(source, ignore_errors=True)
            continue
        git_tree.verify(source, manifest.tree, manifest.listing)
        return _kind(method)
    raise LlamaSourceError(
        Reason.SOURCE_UNAVAILABLE,
        "no retrieval method gave the source",
        details=failures,
        hint="give a folder or an archive of it with --local or MESHNET_LLAMA_CPP_SOURCE",
    )
