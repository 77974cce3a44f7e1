from __future__ import annotations

from pathlib import Path

import pytest

from third_party.llama_cpp.llama_source import manifest
from third_party.llama_cpp.llama_source.errors import LlamaSourceError, Reason
from third_party.llama_cpp.llama_source.tests.conftest import Upstream


def _refusal(upstream: Upstream) -> LlamaSourceError:
    with pytest.raises(LlamaSourceError) as caught:
        manifest.load(upstream.pin)
    assert caught.value.reason is Reason.MANIFEST_INVALID
    return caught.value


def test_a_complete_manifest_is_read(upstream: Upstream) -> None:
    loaded = manifest.load(upstream.pin)
    assert (loaded.commit, loaded.tree) == (upstream.commit, upstream.tree)
    assert loaded.methods == (manifest.LocalMethod(),)


@pytest.mark.parametrize("commit", ["master", "v1.0.0", "", "7fe450e", None, "G" * 40])
def test_a_branch_a_tag_or_a_short_commit_is_refused(upstream: Upstream, commit: object) -> None:
    upstream.write_manifest(commit=commit)
    error = _refusal(upstream)
    assert error.message == "manifest field 'commit'"
    assert error.expected == "a commit of 40 hexadecimal digits"
    assert error.found == repr(commit)


def test_a_manifest_without_a_tree_is_refused(upstream: Upstream) -> None:
    upstream.write_manifest(tree="HEAD")
    assert _refusal(upstream).message == "manifest field 'tree'"


def test_a_listing_of_another_tree_is_refused(upstream: Upstream) -> None:
    path = upstream.pin / "pinned_tree.txt"
    path.write_text("\n".join(path.read_text().splitlines()[1:]) + "\n")
    error = _refusal(upstream)
    assert error.expected == f"git tree {upstream.tree}"


_ARCHIVE = {
    "kind": "archive",
    "url": "https://example.invalid/a",
    "sha256": "0" * 64,
    "size": 1,
    "prefix": "a/",
}


@pytest.mark.parametrize(
    "method",
    [
        {"kind": "git_clone", "url": "https://example.invalid"},
        _ARCHIVE | {"url": "http://example.invalid/a"},
        _ARCHIVE | {"sha256": "0" * 63},
        _ARCHIVE | {"size": True},
        _ARCHIVE | {"prefix": ""},
        {
            "kind": "npm_bundle",
            "package": "p",
            "version": "1",
            "integrity": "sha1-x",
            "path": "x",
            "commit": "0" * 40,
            "size": 1,
        },
    ],
)
def test_a_method_without_an_exact_identity_is_refused(
    upstream: Upstream, method: dict[str, object]
) -> None:
    upstream.write_manifest(methods=[method])
    _refusal(upstream)


def test_the_pin_of_this_project_is_complete() -> None:
    folder = Path(__file__).parents[2]
    loaded = manifest.load(folder)
    assert loaded.commit == "7fe450e19305b828c199d602c23a8337aaa1f03b"
    assert loaded.tree == "fd570ef54b10ec5fecb739e7e04c8ce44a6f415a"
    kinds = [type(method) for method in loaded.methods]
    assert kinds == [manifest.ArchiveMethod, manifest.NpmBundleMethod, manifest.LocalMethod]
