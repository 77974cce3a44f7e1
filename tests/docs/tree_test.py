"""What is true of the whole work tree: documents that tests read, and the tools for developers."""

import os
import pathlib
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.docs.blocks import blocks_of, commands_of, targets_of

RUNFILES = pathlib.Path(os.environ["TEST_SRCDIR"]) / os.environ["TEST_WORKSPACE"]
ROOT = (RUNFILES / "MODULE.bazel").resolve().parent
DOCUMENTS = {str(pathlib.Path(name)) for name in os.environ["DOCUMENTS"].split()}
# Its examples are the programs' own: commands_test.
GENERATED = {"docs/reference.md"}
# Not Bazel, whose help waits for the end of the command that runs this test.
TOOLS = sorted(
    path.name
    for path in (ROOT / "tools").iterdir()
    if path.is_file() and os.access(path, os.X_OK) and path.name != "bazel"
)


def run(tool: str, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [ROOT / "tools" / tool, *arguments], capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stdout + done.stderr


def test_every_document_is_read_by_a_test() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    found = {name for name in listed.stdout.split() if (ROOT / name).exists()}
    assert found - GENERATED == DOCUMENTS


def test_targets_that_are_named_exist() -> None:
    """In blocks and in the text. A list in a BUILD file may leave out _test, or write hyphens."""
    checked = 0
    for name in DOCUMENTS:
        text = (ROOT / name).read_text()
        named = set(re.findall(r"(?<![:\w/.@])//(?:[a-z][\w/-]*)?(?::[\w-]+|(?![\w/:.*]))", text))
        for block in blocks_of(text):
            for words in commands_of(block.text):
                named |= set(targets_of(words))
        for target in named:
            if target.endswith(("...", ":all")):
                continue
            package, _, short = target[2:].partition(":")
            short = short or package.rpartition("/")[2]
            file = ROOT / package / "BUILD.bazel"
            assert file.is_file(), f"{name}: {target}: there is no such package"
            quoted = re.findall(r'"([\w-]+)"', file.read_text())
            listed = {word.replace("-", "_") for word in quoted}
            assert {short, short.removesuffix("_test")} & listed, (
                f"{name}: {target}: no such target"
            )
            checked += 1
    assert checked > 20


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_says_what_it_takes(tool: str) -> None:
    code, said = run(tool, "--help")
    assert code == 0, said
    assert re.search(rf"^ +tools/{tool}\b", said, re.MULTILINE), f"no example: {said}"
    code, said = run(tool, "--no-such-flag")
    assert code == 2, said
    assert said


def test_tools_take_what_documents_give_them() -> None:
    wanted: dict[tuple[str, str], set[str]] = {}
    for name in DOCUMENTS:
        for block in blocks_of((ROOT / name).read_text()):
            for words in commands_of(block.text):
                tool = words[0].removeprefix("tools/")
                if words[0].startswith("tools/") and tool != "bazel":
                    command = words[1] if len(words) > 1 and words[1].islower() else ""
                    flags = {word.partition("=")[0] for word in words if word.startswith("--")}
                    wanted.setdefault((tool, command), set()).update(flags)
    assert len(wanted) > 5
    with ThreadPoolExecutor(4) as pool:
        whole = dict(zip(TOOLS, pool.map(lambda tool: run(tool, "--help")[1], TOOLS), strict=True))
        own = pool.map(lambda key: run(key[0], *filter(None, key[1:]), "--help")[1], wanted)
        for (tool, command), said in zip(wanted, own, strict=True):
            assert tool in whole, f"there is no tools/{tool}"
            assert command in whole[tool], f"tools/{tool} has no {command}"
            for flag in wanted[tool, command]:
                assert flag in said + whole[tool], f"tools/{tool} {command} has no {flag}"
