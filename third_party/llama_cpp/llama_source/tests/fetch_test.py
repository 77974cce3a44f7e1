from __future__ import annotations

import base64
import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from third_party.llama_cpp.llama_source import archive, fetch, git_tree, manifest
from third_party.llama_cpp.llama_source.errors import LlamaSourceError, Reason
from third_party.llama_cpp.llama_source.tests.conftest import Upstream, git


def _quiet(text: str) -> None:
    del text


def _fetch(
    upstream: Upstream,
    *,
    local: Path | None = None,
    cache: Path | None = None,
    offline: bool = False,
) -> str:
    return fetch.fetch(
        manifest.load(upstream.pin),
        upstream.root / "out",
        cache=cache,
        local=local,
        offline=offline,
        log=_quiet,
    )


def _check(upstream: Upstream) -> None:
    assert git_tree.tree_hash(git_tree.scan(upstream.root / "out")) == upstream.tree
    leftovers = [p.name for p in upstream.root.iterdir() if p.name.startswith(".llama-source")]
    assert leftovers == []


def _archive(upstream: Upstream, path: Path) -> Path:
    with path.open("wb") as stream:
        archive.create_tar(upstream.source, stream)
    return path


def _bundle(upstream: Upstream) -> Path:
    path = upstream.root / "source.bundle"
    git(upstream.work_tree, "bundle", "create", "--quiet", str(path), "HEAD")
    return path


def test_a_local_folder_is_taken(upstream: Upstream) -> None:
    assert _fetch(upstream, local=upstream.source) == "local"
    _check(upstream)


def test_a_local_work_tree_is_taken_without_its_repository(upstream: Upstream) -> None:
    assert _fetch(upstream, local=upstream.work_tree) == "local"
    _check(upstream)


def test_a_local_archive_is_taken(upstream: Upstream) -> None:
    assert _fetch(upstream, local=_archive(upstream, upstream.root / "a.tar.gz")) == "local"
    _check(upstream)


def test_a_local_archive_with_a_folder_at_its_top_is_taken(upstream: Upstream) -> None:
    path = upstream.root / "a.tar"
    with tarfile.open(path, "w") as tar:
        tar.add(upstream.source, arcname="upstream-1.0.0")
    assert _fetch(upstream, local=path) == "local"
    _check(upstream)


def test_a_local_bundle_is_taken(upstream: Upstream) -> None:
    assert _fetch(upstream, local=_bundle(upstream)) == "local"
    _check(upstream)


def test_a_bundle_without_the_commit_is_refused(upstream: Upstream) -> None:
    bundle = _bundle(upstream)
    upstream.write_manifest(commit="1" * 40)
    with pytest.raises(LlamaSourceError) as caught:
        _fetch(upstream, local=bundle)
    assert caught.value.message == f"{bundle} holds none of the commits {'1' * 40}"


def test_an_altered_local_folder_is_refused(upstream: Upstream) -> None:
    altered = upstream.root / "altered"
    upstream.source.rename(altered)
    (altered / "README.md").write_text("altered\n")
    upstream.source = altered
    with pytest.raises(LlamaSourceError) as caught:
        _fetch(upstream, local=altered)
    assert caught.value.reason is Reason.TREE_MISMATCH
    assert not (upstream.root / "out").exists()


def test_an_existing_folder_is_not_touched(upstream: Upstream) -> None:
    (upstream.root / "out").mkdir()
    with pytest.raises(LlamaSourceError) as caught:
        _fetch(upstream, local=upstream.source)
    assert "exists already" in caught.value.message


def test_without_a_reachable_method_all_are_named(
    upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    # port 1 of this machine: refused at once
    upstream.write_manifest(
        methods=[
            {"kind": "archive", "url": "https://127.0.0.1:1/a.tar.gz", "sha256": "0" * 64,
             "size": 5, "prefix": "a/"},
            {"kind": "npm_bundle", "package": "p", "version": "1",
             "integrity": "sha512-" + "A" * 86 + "==", "path": "b", "commit": "0" * 40, "size": 5},
        ]
    )  # fmt: skip
    monkeypatch.setenv("PATH", str(upstream.root))
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(LlamaSourceError) as caught:
        _fetch(upstream)
    assert caught.value.reason is Reason.SOURCE_UNAVAILABLE
    assert caught.value.details[0].startswith("archive: https://127.0.0.1:1/a.tar.gz: ")
    assert caught.value.details[1] == "npm_bundle: npm is not installed"


def _with_npm(upstream: Upstream, monkeypatch: pytest.MonkeyPatch, package: bytes) -> None:
    """Puts an npm on the PATH that packs the given file, and pins that file."""
    bin_folder = upstream.root / "bin"
    bin_folder.mkdir()
    (upstream.root / "package.tgz").write_bytes(package)
    npm = bin_folder / "npm"
    npm.write_text(
        '#!/bin/sh\n[ "$1 $2" = "pack p@1" ] || exit 9\n'
        f'cp "{upstream.root}/package.tgz" "$5/p-1.tgz"\n'
    )
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_folder}:/usr/bin:/bin")
    upstream.write_manifest(
        methods=[
            {
                "kind": "npm_bundle",
                "package": "p",
                "version": "1",
                "integrity": "sha512-"
                + base64.b64encode(hashlib.sha512(package).digest()).decode(),
                "path": "package/x.bundle",
                "commit": upstream.commit,
                "size": len(package),
            }
        ]
    )


def _package(upstream: Upstream) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        tar.add(_bundle(upstream), arcname="package/x.bundle")
    return stream.getvalue()


def test_the_npm_package_is_taken_and_cached(
    upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = upstream.root / "cache"
    _with_npm(upstream, monkeypatch, _package(upstream))
    assert _fetch(upstream, cache=cache) == "npm_bundle"
    _check(upstream)
    (upstream.root / "out").rename(upstream.root / "first")
    assert _fetch(upstream, cache=cache, offline=True) == "cache"
    _check(upstream)


def test_another_npm_package_than_the_pinned_one_is_refused(
    upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = _package(upstream)
    _with_npm(upstream, monkeypatch, package)
    altered = package[:-1] + bytes([package[-1] ^ 1])
    (upstream.root / "package.tgz").write_bytes(altered)
    with pytest.raises(LlamaSourceError) as caught:
        _fetch(upstream)
    assert caught.value.reason is Reason.ARCHIVE_MISMATCH
    digest = base64.b64encode(hashlib.sha512(altered).digest()).decode()
    assert caught.value.found == f"sha512-{digest}"


def test_a_pinned_package_with_another_tree_is_refused(
    upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream.commit_change("more", {"README.md": b"altered\n"})
    upstream.commit = git(upstream.work_tree, "rev-parse", "HEAD")
    _with_npm(upstream, monkeypatch, _package(upstream))
    with pytest.raises(LlamaSourceError) as caught:
        _fetch(upstream)
    assert caught.value.reason is Reason.TREE_MISMATCH
    assert caught.value.expected == f"git tree {upstream.tree}"


def test_an_altered_cache_is_removed_and_refused_offline(upstream: Upstream) -> None:
    cache = upstream.root / "cache"
    cache.mkdir()
    cached = cache / f"{upstream.tree}.tar.gz"
    (upstream.source / "README.md").write_text("altered\n")
    _archive(upstream, cached)
    with pytest.raises(LlamaSourceError) as caught:
        _fetch(upstream, cache=cache, offline=True)
    assert caught.value.reason is Reason.TREE_MISMATCH
    assert not cached.exists()
    with pytest.raises(LlamaSourceError) as caught:
        _fetch(upstream, cache=cache, offline=True)
    assert caught.value.reason is Reason.SOURCE_UNAVAILABLE


@pytest.mark.parametrize(
    ("data", "found"),
    [(b"12345678", "more than 5"), (b"123", "3"), (b"12345", None)],
)
def test_a_download_of_another_size_or_hash_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, found: str | None
) -> None:
    method = manifest.ArchiveMethod("https://example.invalid/a", "0" * 64, 5, "a/")
    monkeypatch.setattr("urllib.request.urlopen", lambda request, timeout: io.BytesIO(data))
    with pytest.raises(LlamaSourceError) as caught:
        fetch.download(method, tmp_path / "a", _quiet)
    assert caught.value.reason is Reason.ARCHIVE_MISMATCH
    assert caught.value.found == (found or f"sha256 {hashlib.sha256(data).hexdigest()}")


def test_the_release_archive_is_taken(upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        tar.add(upstream.source, arcname="upstream-1.0.0")
    data = stream.getvalue()
    upstream.write_manifest(
        methods=[
            {
                "kind": "archive",
                "url": "https://example.invalid/v1.0.0.tar.gz",
                "sha256": hashlib.sha256(data).hexdigest(),
                "size": len(data),
                "prefix": "upstream-1.0.0/",
            }
        ]
    )
    monkeypatch.setattr("urllib.request.urlopen", lambda request, timeout: io.BytesIO(data))
    assert _fetch(upstream) == "archive"
    _check(upstream)
