from __future__ import annotations

import os
import string
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from third_party.llama_cpp.llama_source import git_tree
from third_party.llama_cpp.llama_source.errors import LlamaSourceError, Reason
from third_party.llama_cpp.llama_source.tests.conftest import Upstream, git

# ordering is where a hash goes wrong: '-' and '.' sort before '/', with which a folder sorts
_NAME = st.text(alphabet="ab-.0" + string.ascii_uppercase[:2] + "é", min_size=1, max_size=4).filter(
    lambda name: name not in (".", "..") and not name.startswith(".g")
)
_CONTENT = st.binary(max_size=40)


@st.composite
def _trees(draw: st.DrawFn, depth: int = 2) -> dict[str, object]:
    names = draw(st.lists(_NAME, min_size=1, max_size=4, unique_by=str.casefold))
    result: dict[str, object] = {}
    for name in names:
        kind = draw(st.sampled_from(["file", "script", "link", "folder"] if depth else ["file"]))
        if kind == "folder":
            result[name] = draw(_trees(depth=depth - 1))
        else:
            result[name] = (kind, draw(_CONTENT))
    return result


def _build(root: Path, tree: dict[str, object]) -> None:
    root.mkdir(exist_ok=True)
    for name, value in tree.items():
        path = root / name
        if isinstance(value, dict):
            _build(path, value)
            continue
        assert isinstance(value, tuple)
        kind, content = value
        if kind == "link":
            path.symlink_to("target-" + content.hex())
        else:
            path.write_bytes(content)
            path.chmod(0o755 if kind == "script" else 0o644)


@given(_trees())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_hash_is_gits(tree: dict[str, object]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "tree"
        _build(root, tree)
        entries = git_tree.scan(root)
        git(root, "init", "--quiet")
        git(root, "-c", "core.autocrlf=false", "add", "--all", "--force")
        assert git_tree.tree_hash(entries) == git(root, "write-tree")


@given(_trees())
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_listing_holds_a_tree(tree: dict[str, object]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _build(Path(folder), tree)
        entries = git_tree.scan(Path(folder))
        assert git_tree.parse_listing(git_tree.format_listing(entries)) == entries


def _refusal(upstream: Upstream) -> LlamaSourceError:
    listing = git_tree.parse_listing((upstream.pin / "pinned_tree.txt").read_text())
    with pytest.raises(LlamaSourceError) as caught:
        git_tree.verify(upstream.source, upstream.tree, listing)
    assert caught.value.reason is Reason.TREE_MISMATCH
    return caught.value


def test_the_pinned_tree_is_accepted(upstream: Upstream) -> None:
    listing = git_tree.parse_listing((upstream.pin / "pinned_tree.txt").read_text())
    assert git_tree.verify(upstream.source, upstream.tree, listing) == listing


def test_one_changed_byte_is_refused(upstream: Upstream) -> None:
    path = upstream.source / "src/engine.c"
    before = git_tree.blob_hash(path.read_bytes())
    path.write_bytes(path.read_bytes().replace(b"line 7\n", b"line 8\n"))
    error = _refusal(upstream)
    after = git_tree.blob_hash(path.read_bytes())
    assert error.expected == f"git tree {upstream.tree}"
    assert error.details == (f"content of src/engine.c: expected blob {before}, found {after}",)


def test_a_missing_file_is_refused(upstream: Upstream) -> None:
    (upstream.source / "tests/test.c").unlink()
    (upstream.source / "tests").rmdir()
    assert _refusal(upstream).details == ("missing: tests/test.c",)


def test_an_extra_file_is_refused(upstream: Upstream) -> None:
    (upstream.source / "src/.hidden").touch()
    assert _refusal(upstream).details == ("extra: src/.hidden",)


def test_an_extra_empty_folder_is_refused(upstream: Upstream) -> None:
    (upstream.source / "src/empty").mkdir()
    assert _refusal(upstream).message == "src/empty is an empty folder"


def test_another_mode_is_refused(upstream: Upstream) -> None:
    (upstream.source / "README.md").chmod(0o755)
    details = _refusal(upstream).details
    assert details == ("mode of README.md: expected 100644, found 100755",)


def test_a_file_that_became_a_link_is_refused(upstream: Upstream) -> None:
    (upstream.source / "README.md").unlink()
    (upstream.source / "README.md").symlink_to("LICENSE")
    assert _refusal(upstream).details == ("mode of README.md: expected 100644, found 120000",)


@pytest.mark.parametrize("target", ["/etc/passwd", "../../outside", "../..", ".."])
def test_a_link_that_escapes_is_refused(upstream: Upstream, target: str) -> None:
    (upstream.source / "out").symlink_to(target)
    error = _refusal(upstream)
    assert error.message.endswith("has links that lead outside")
    assert error.details == (f"link out -> {target}",)


def test_a_pipe_is_refused(upstream: Upstream) -> None:
    os.mkfifo(upstream.source / "pipe")
    assert _refusal(upstream).message == "pipe is neither a file, a link nor a folder"


def test_a_missing_folder_is_refused(upstream: Upstream) -> None:
    upstream.source = upstream.root / "nowhere"
    assert _refusal(upstream).found == "nothing"
