from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from third_party.llama_cpp.llama_source import (
    diff,
    git_tree,
    manifest,
    patch_stack,
    regenerate,
)
from third_party.llama_cpp.llama_source.errors import LlamaSourceError, Reason
from third_party.llama_cpp.llama_source.tests.conftest import FILES, Upstream, git, write_files

ENGINE = FILES["src/engine.c"]


def _edit(data: bytes, old: bytes, new: bytes) -> bytes:
    assert data.count(old) == 1
    return data.replace(old, new)


FIRST = _edit(ENGINE, b"line 5\n", b"line five\nand a half\n")
SECOND = _edit(FIRST, b"line 30\n", b"line thirty\n")


def _two_patches(upstream: Upstream) -> patch_stack.Stack:
    upstream.commit_change("first thing: change five", {"src/engine.c": FIRST})
    upstream.commit_change(
        "second/thing: change thirty, add a file",
        {"src/engine.c": SECOND, "src/models/new.c": b"int added;\n"},
    )
    regenerate.regenerate(manifest.load(upstream.pin), upstream.work_tree, upstream.patches)
    return patch_stack.load(upstream.patches)


def test_regenerated_patches_are_named_and_ordered(upstream: Upstream) -> None:
    stack = _two_patches(upstream)
    names = [patch.name for patch in stack.patches]
    assert names == ["0001-first-thing.patch", "0002-secondthing.patch"]
    assert patch_stack.read_series(upstream.patches) == names
    assert stack.patches[1].subject == "second/thing: change thirty, add a file"


def test_check_proves_the_stack_and_changes_nothing(upstream: Upstream) -> None:
    stack = _two_patches(upstream)
    before = git_tree.scan(upstream.source)
    result = patch_stack.check(manifest.load(upstream.pin), stack, upstream.source)
    assert result.pinned_tree == upstream.tree
    assert result.patched_tree == git(upstream.work_tree, "rev-parse", "HEAD^{tree}")
    assert git_tree.scan(upstream.source) == before


def test_apply_and_reverse_are_exact(upstream: Upstream) -> None:
    stack = _two_patches(upstream)
    pin = manifest.load(upstream.pin)
    patched = patch_stack.apply_to_folder(pin, stack, upstream.source)
    assert patched == git(upstream.work_tree, "rev-parse", "HEAD^{tree}")
    assert (upstream.source / "src/engine.c").read_bytes() == SECOND
    with pytest.raises(LlamaSourceError) as caught:
        patch_stack.apply_to_folder(pin, stack, upstream.source)
    assert caught.value.reason is Reason.TREE_MISMATCH
    patch_stack.reverse_in_folder(pin, stack, upstream.source)
    git_tree.verify(upstream.source, upstream.tree, pin.listing)


def test_check_takes_a_patched_tree_too(upstream: Upstream) -> None:
    stack = _two_patches(upstream)
    pin = manifest.load(upstream.pin)
    expected = patch_stack.check(pin, stack, upstream.source)
    patch_stack.apply_to_folder(pin, stack, upstream.source)
    assert patch_stack.check(pin, stack, upstream.source, patched=True) == expected
    (upstream.source / "README.md").write_text("altered\n")
    with pytest.raises(LlamaSourceError) as caught:
        patch_stack.check(pin, stack, upstream.source, patched=True)
    assert caught.value.details[0].startswith("content of README.md: ")


def test_reversing_something_else_is_refused_and_changes_nothing(upstream: Upstream) -> None:
    stack = _two_patches(upstream)
    pin = manifest.load(upstream.pin)
    patch_stack.apply_to_folder(pin, stack, upstream.source)
    (upstream.source / "README.md").write_text("altered\n")
    with pytest.raises(LlamaSourceError) as caught:
        patch_stack.reverse_in_folder(pin, stack, upstream.source)
    assert caught.value.reason is Reason.TREE_MISMATCH
    assert (upstream.source / "src/engine.c").read_bytes() == SECOND


def test_regenerating_an_applied_stack_gives_the_same_bytes(upstream: Upstream) -> None:
    _two_patches(upstream)
    pin = manifest.load(upstream.pin)
    regenerate.work_tree(pin, upstream.patches, upstream.source)
    again = upstream.root / "again"
    regenerate.regenerate(pin, upstream.source, again)
    names = sorted(p.name for p in upstream.patches.iterdir())
    assert sorted(p.name for p in again.iterdir()) == names
    for name in names:
        assert (again / name).read_bytes() == (upstream.patches / name).read_bytes()


def test_regenerating_removes_patches_that_are_gone(upstream: Upstream) -> None:
    _two_patches(upstream)
    git(upstream.work_tree, "reset", "--quiet", "--hard", "HEAD~1")
    pin = manifest.load(upstream.pin)
    names = regenerate.regenerate(pin, upstream.work_tree, upstream.patches)
    assert names == ["0001-first-thing.patch"]
    assert len(patch_stack.load(upstream.patches).patches) == 1


def test_a_work_tree_with_changes_is_refused(upstream: Upstream) -> None:
    _two_patches(upstream)
    (upstream.work_tree / "README.md").write_text("not committed\n")
    with pytest.raises(LlamaSourceError) as caught:
        regenerate.regenerate(manifest.load(upstream.pin), upstream.work_tree, upstream.patches)
    assert caught.value.reason is Reason.WORK_TREE_INVALID


def test_a_work_tree_of_something_else_is_refused(upstream: Upstream) -> None:
    other = write_files(upstream.root / "other", {"a": b"a\n"})
    git(other, "init", "--quiet")
    git(other, "add", "--all")
    git(other, "commit", "--quiet", "--message", "other")
    with pytest.raises(LlamaSourceError) as caught:
        regenerate.regenerate(manifest.load(upstream.pin), other, upstream.patches)
    assert caught.value.expected == f"git tree {upstream.tree}"


def test_on_another_pin_the_first_conflict_is_named(upstream: Upstream) -> None:
    stack = _two_patches(upstream)
    # lines moved: still applies
    moved = b"new first line\n" + ENGINE
    (upstream.source / "src/engine.c").write_bytes(moved)
    assert patch_stack.check_against(stack, upstream.source) != upstream.tree
    # the second patch's place changed
    (upstream.source / "src/engine.c").write_bytes(_edit(moved, b"line 31\n", b"line XXXI\n"))
    with pytest.raises(LlamaSourceError) as caught:
        patch_stack.check_against(stack, upstream.source)
    assert caught.value.reason is Reason.PATCH_CONFLICT
    assert caught.value.message == (
        "0002-secondthing.patch does not apply: src/engine.c, hunk 1 (@@ -28,7 +28,7 @@ line 26)"
    )
    # a file of the first patch is gone
    (upstream.source / "src/engine.c").unlink()
    with pytest.raises(LlamaSourceError) as caught:
        patch_stack.check_against(stack, upstream.source)
    assert caught.value.message == "0001-first-thing.patch does not apply: src/engine.c"
    assert caught.value.found == "no such file"


def test_names_that_a_patch_relies_on_must_be_there(upstream: Upstream) -> None:
    header = (
        "\n\nWhy: because.\nUpstream: shop::open_door, close, the file src/no_such_file.c,\n"
        "    keep_open as it was\nDrop-when: never\n"
    )
    changed = FILES["src/models/small.c"] + b"int door;\n"
    upstream.commit_change("door: open it", {"src/models/small.c": changed}, header)
    regenerate.regenerate(manifest.load(upstream.pin), upstream.work_tree, upstream.patches)
    stack = patch_stack.load(upstream.patches)
    assert patch_stack.upstream_names(stack.patches[0]) == ["shop::open_door", "keep_open"]
    (upstream.source / "src/doors.h").write_text("struct shop { void open_door(); };\n")
    with pytest.raises(LlamaSourceError) as caught:
        patch_stack.check_against(stack, upstream.source)
    assert caught.value.reason is Reason.PATCH_CONFLICT
    assert caught.value.message == (
        "0001-door.patch relies on names that this source does not have"
    )
    assert caught.value.found == "no keep_open"
    (upstream.source / "src/doors.h").write_text(
        "struct shop { void open_door(), keep_open(); };\n"
    )
    patch_stack.check_against(stack, upstream.source)


def _load_error(upstream: Upstream) -> LlamaSourceError:
    with pytest.raises(LlamaSourceError) as caught:
        patch_stack.load(upstream.patches)
    return caught.value


def test_the_series_must_name_exactly_the_patches(upstream: Upstream) -> None:
    _two_patches(upstream)
    extra = upstream.patches / "0003-extra.patch"
    extra.write_text("")
    assert _load_error(upstream).reason is Reason.MANIFEST_INVALID
    extra.unlink()
    (upstream.patches / "0002-secondthing.patch").unlink()
    assert _load_error(upstream).reason is Reason.MANIFEST_INVALID


def test_the_series_must_be_in_order(upstream: Upstream) -> None:
    _two_patches(upstream)
    (upstream.patches / "series").write_text("0002-secondthing.patch\n0001-first-thing.patch\n")
    assert _load_error(upstream).found == "0002-secondthing.patch"


def test_one_changed_byte_of_a_patch_is_noticed(upstream: Upstream) -> None:
    _two_patches(upstream)
    path = upstream.patches / "0001-first-thing.patch"
    path.write_bytes(path.read_bytes().replace(b"+and a half", b"+and a calf"))
    stack = patch_stack.load(upstream.patches)
    with pytest.raises(LlamaSourceError) as caught:
        patch_stack.check(manifest.load(upstream.pin), stack, upstream.source)
    assert caught.value.reason is Reason.PATCH_CONFLICT
    assert caught.value.expected == f"blob {git_tree.blob_hash(FIRST)}"


@pytest.mark.parametrize("field", patch_stack.HEADER_FIELDS)
def test_a_header_without_a_field_is_refused(upstream: Upstream, field: str) -> None:
    header = "\n\nWhy: a\nUpstream: b\nDrop-when: c\n".replace(f"{field} ", "Other: ")
    upstream.commit_change("thing: x", {"src/engine.c": FIRST}, header)
    with pytest.raises(LlamaSourceError) as caught:
        regenerate.regenerate(manifest.load(upstream.pin), upstream.work_tree, upstream.patches)
    assert caught.value.reason is Reason.PATCH_INVALID
    assert field in caught.value.message


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"LICENSE": b"Public domain\n"}, ("LICENSE",)),
        ({"AUTHORS": b"# authors\nB. Person\n"}, ("AUTHORS",)),
        ({"licenses/LICENSE-other": b"x\n"}, ("licenses/LICENSE-other",)),
        ({"cc/worker.c": b"x\n"}, ("cc/worker.c",)),
        ({"src/worker/new.c": b"x\n"}, ("src/worker/new.c",)),
        ({"top.c": b"x\n"}, ("top.c",)),
        ({"src/models/small.c": b"int small;\nint last;"}, ("// Copyright (c) 2024 someone",)),
        ({"src/engine.c": ENGINE + b"// billing of the relay\n"}, ("billing", "relay")),
        ({"src/engine.c": ENGINE + b"int meshnet_port;\n"}, ("meshnet",)),
        ({"src/engine.c": ENGINE + b"int route; // Authenticate\n"}, ("authenticat", "route")),
    ],
)
def test_what_a_patch_must_not_do(
    upstream: Upstream, changes: dict[str, bytes], found: tuple[str, ...]
) -> None:
    upstream.commit_change("thing: x", changes)
    with pytest.raises(LlamaSourceError) as caught:
        regenerate.regenerate(manifest.load(upstream.pin), upstream.work_tree, upstream.patches)
    assert caught.value.reason is Reason.PATCH_FORBIDDEN
    assert caught.value.details == found
    assert not upstream.patches.exists()


def test_words_in_the_message_count_too(upstream: Upstream) -> None:
    upstream.commit_change("thing: for the gateway", {"src/engine.c": FIRST})
    with pytest.raises(LlamaSourceError) as caught:
        regenerate.regenerate(manifest.load(upstream.pin), upstream.work_tree, upstream.patches)
    assert caught.value.details == ("gateway",)


def test_words_of_upstream_around_a_change_do_not_count(upstream: Upstream) -> None:
    stack = _two_patches(upstream)
    patch_stack.check_rules(stack, git_tree.scan(upstream.source))


@pytest.mark.parametrize(
    "arguments",
    [["mv", "src/engine.c", "src/motor.c"], ["rm", "--quiet", "src/engine.c"]],
)
def test_renames_and_deletions_are_refused(upstream: Upstream, arguments: list[str]) -> None:
    git(upstream.work_tree, *arguments)
    git(upstream.work_tree, "commit", "--quiet", "--message", "thing: x")
    with pytest.raises(LlamaSourceError) as caught:
        regenerate.regenerate(manifest.load(upstream.pin), upstream.work_tree, upstream.patches)
    assert caught.value.reason is Reason.PATCH_INVALID


def test_a_changed_licence_is_refused(upstream: Upstream) -> None:
    stack = _two_patches(upstream)
    upstream.write_manifest(licence={"spdx": "MIT", "file": "LICENSE", "sha256": "0" * 64})
    with pytest.raises(LlamaSourceError) as caught:
        patch_stack.check(manifest.load(upstream.pin), stack, upstream.source)
    assert caught.value.message == "licence file LICENSE"


_LINES = st.lists(st.sampled_from(["a\n", "b\n", "\n", "c d\n", "-x\n", "+y\n"]), max_size=25)


@given(_LINES, _LINES, st.booleans())
@settings(max_examples=40, deadline=None)
def test_any_change_of_text_goes_there_and_back(
    tmp_path_factory: pytest.TempPathFactory, old: list[str], new: list[str], cut: bool
) -> None:
    before = "".join(old).encode() or b"x\n"
    after = "".join(new).encode() or b"y\n"
    if cut:
        after = after.removesuffix(b"\n") or b"z"
    if before == after:
        return
    folder = tmp_path_factory.mktemp("text")
    git(folder, "init", "--quiet")
    for content in (before, after):
        (folder / "f.c").write_bytes(content)
        git(folder, "add", "--all")
        git(folder, "commit", "--quiet", "--message", "thing: x")
    git(folder, "format-patch", "-1", "--full-index", "--no-signature", "--output=patch")
    patch = diff.parse("0001-thing.patch", (folder / "patch").read_text(encoding="utf-8"))
    tree = diff.MemoryTree(
        {"f.c": git_tree.Entry(git_tree.FILE, git_tree.blob_hash(before))}, {"f.c": before}
    )
    diff.apply(patch, tree)
    assert tree.content["f.c"] == after
    diff.apply(patch, tree, reverse=True)
    assert tree.content["f.c"] == before


def test_the_stack_of_this_project_obeys_the_rules() -> None:
    repository = Path(__file__).parents[4]
    pin = manifest.load(repository / "third_party/llama_cpp")
    stack = patch_stack.load(repository / "patches/llama_cpp")
    patch_stack.check_headers(stack)
    patch_stack.check_rules(stack, pin.listing)
    concerns = [patch.name for patch in stack.patches[:4]]
    assert concerns == [
        "0001-range-loading.patch",
        "0002-boundary-io.patch",
        "0003-filtered-state.patch",
        "0004-worker-hooks.patch",
    ]
