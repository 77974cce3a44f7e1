"""tools/reproducible, as docs/releases.md tells to run it, in a small work tree; Bazel is real."""

import pathlib
import re

from tests.docs.blocks import blocks_for_this_test
from tools.testing.work_tree import SmallWorkTree

BLOCKS = blocks_for_this_test(pathlib.Path("docs/releases.md").read_text())
TARGETS = """
filegroup(name = "all", srcs = [":a", ":b"])

genrule(name = "a", outs = ["a.txt"], cmd = "echo 1 >$@")

genrule(name = "b", srcs = ["a.txt"], outs = ["b.txt"], cmd = "cat $< $< >$@")

genrule(name = "clock", outs = ["clock.txt"], cmd = "date +%s.%N >$@", tags = ["manual"])
"""


async def test_what_the_document_says_finds_the_same_bytes_and_others(
    tmp_path: pathlib.Path,
) -> None:
    tree = SmallWorkTree(tmp_path, {"release/BUILD.bazel": TARGETS}, ["tools/reproducible"])
    try:
        reader = tree.reader()
        for block in BLOCKS:
            await reader.do(block)
        sums = re.findall(r"^([0-9a-f]{64})  \S*/release/(?:a|b).txt$", reader.said, re.MULTILINE)
        # Of each command two builds with two files.
        assert sums == sums[:2] * 4
        assert reader.said.count("identical: 2 files") == 2
        done = tree.run("tools/reproducible", "--once", "//release:clock")
    finally:
        tree.end()
    assert done.returncode == 1, done.stderr
    assert "not the same:" in done.stderr
    assert re.search("^> .*/release/clock.txt$", done.stderr, re.MULTILINE)
