"""Each patch has a page; it applies to the pinned tree behind those that the table names."""

import os
import pathlib
import re

import pytest

from third_party.llama_cpp.llama_source import diff, git_tree, manifest, patch_stack
from third_party.llama_cpp.llama_source.errors import LlamaSourceError

ROOT = pathlib.Path(__file__).parents[2]
PAGES = pathlib.Path(__file__).parent
STACK = patch_stack.load(ROOT / "patches/llama_cpp")
ROW = re.compile(
    r"^\| (\d{4}) [^|]*\| (?:([\d, ]+)|-) \| \[[^\]]+\]\(([\w.-]+\.md)\) \|", re.MULTILINE
)
ROWS = {
    number: (needs, page) for number, needs, page in ROW.findall((PAGES / "README.md").read_text())
}
SECTIONS = ("## To post", "## The test", "## Prior art and upstream's present state")


@pytest.fixture(scope="module")
def pinned() -> diff.MemoryTree:
    """The pinned tree, from the patched one that is built."""
    source = pathlib.Path(os.environ["LLAMA_CPP_LICENSE"]).resolve(strict=True).parent
    tree = patch_stack.memory_tree(source, git_tree.scan(source), STACK)
    for patch in reversed(STACK.patches):
        diff.apply(patch, tree, reverse=True)
    pin = manifest.load(ROOT / "third_party/llama_cpp")
    assert git_tree.tree_hash(tree.entries) == pin.tree
    return tree


def test_every_patch_has_a_row_and_every_page_its_parts() -> None:
    assert [f"{number}-" for number in ROWS] == [patch.name[:5] for patch in STACK.patches]
    pages = {page for _, page in ROWS.values()}
    assert pages == {path.name for path in PAGES.glob("*.md")} - {"README.md"}
    for page in pages:
        text = (PAGES / page).read_text()
        assert [line for line in text.splitlines() if line.startswith("## ")] == list(SECTIONS), (
            page
        )
        for test in re.findall(r"\]\((test-[\w-]+\.cpp)\)", text):
            assert (PAGES / test).exists(), test


@pytest.mark.parametrize("patch", STACK.patches, ids=lambda patch: str(patch.name))
def test_it_applies_behind_what_it_needs(pinned: diff.MemoryTree, patch: diff.Patch) -> None:
    needs = ROWS[patch.name[:4]][0].replace(",", " ").split()
    by_number = {entry.name[:4]: entry for entry in STACK.patches}
    tree = pinned.copy()
    for number in needs:
        diff.apply(by_number[number], tree, exact=False)
    diff.apply(patch, tree, exact=False)


def test_words_of_this_project_stay_out_of_what_is_posted() -> None:
    for path in [*PAGES.glob("*.md")]:
        posted = [line for line in path.read_text().splitlines() if line.startswith("> ")]
        assert posted or path.name == "README.md"
        assert not [line for line in posted if "meshnet" in line.lower()], path.name


def test_a_conflict_would_be_seen(pinned: diff.MemoryTree) -> None:
    second = STACK.patches[0]
    tree = pinned.copy()
    diff.apply(second, tree, exact=False)
    with pytest.raises(LlamaSourceError):
        diff.apply(second, tree, exact=False)
