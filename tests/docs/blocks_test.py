"""Every command block of our documents is run by docs_test, or checked here with a reason."""

import os
import pathlib
import re
import shutil
import subprocess

import pytest
import yaml

from tests.docs.blocks import Block, blocks_of, commands_of

DOCUMENTS = {path: pathlib.Path(path) for path in os.environ["DOCUMENTS"].split()}
MESHNET = os.environ["MESHNET"]
DEMO = os.environ["DEMO"]
WORKER = os.environ["MESHNET_WORKER"]
# Whoever adds a block that no test runs changes this number, and a reader sees it.
CHECKED = 24


def blocks() -> list[tuple[str, Block]]:
    return [
        (name, block) for name, path in DOCUMENTS.items() for block in blocks_of(path.read_text())
    ]


def test_every_block_is_treated() -> None:
    for name, block in blocks():
        assert block.treatment, f"{name}:{block.line}: nobody says what a test does with it"
        assert block.treatment != "checked" or block.detail, f"{name}:{block.line}: say why"


def test_few_blocks_are_not_run() -> None:
    checked = [f"{name}:{b.line} {b.detail}" for name, b in blocks() if b.treatment == "checked"]
    assert len(checked) == CHECKED, "\n".join(checked)
    assert sum(block.treatment == "run" for _, block in blocks()) >= 20


def helped(program: list[str]) -> set[str]:
    """The flags that a program's help names, with underscores."""
    said = subprocess.run([*program, "--help"], capture_output=True, text=True, check=False)
    found = re.findall(r"--(?:\[no\])?([a-z][\w-]*)", said.stdout + said.stderr)
    return {name.replace("-", "_") for name in found}


class Programs:
    """The flags of our programs, asked once."""

    def __init__(self) -> None:
        self._flags: dict[tuple[str, ...], set[str]] = {}

    def check(self, words: list[str]) -> bool:
        """Whether it is a program of ours; asserts that it knows the flags."""
        if words[0] == "sudo":
            words = words[3:] if words[1] == "-u" else words[1:]
        if words[:2] == ["tools/bazel", "run"]:
            target, *arguments = words[2:]
            known = {"//:meshnet": "meshnet", "//:demo": "demo"}
            words = [known.get(target, target), *[w for w in arguments if w != "--"]]
        name = pathlib.Path(words[0]).name
        if name == "meshnet" and len(words) > 1:
            self._check([MESHNET, words[1]], words[2:])
        elif name in ("worker", "meshnet-worker"):
            self._check([WORKER], words[1:])
        elif name == "demo":
            self._check([DEMO], words[1:])
        else:
            return False
        return True

    def _check(self, program: list[str], arguments: list[str]) -> None:
        if tuple(program) not in self._flags:
            self._flags[tuple(program)] = helped(program)
        flags = self._flags[tuple(program)]
        for word in arguments:
            if word.startswith("--"):
                flag = word[2:].partition("=")[0].replace("-", "_").removeprefix("no")
                assert flag in flags or f"no{flag}" in flags, f"{program[-1]} has no flag {word}"


@pytest.fixture(scope="module")
def programs() -> Programs:
    return Programs()


def test_commands_that_are_not_run_exist(programs: Programs) -> None:
    ours = 0
    for name, block in blocks():
        if block.treatment != "checked":
            continue
        for words in commands_of(block.text):
            try:
                ours += programs.check(words)
            except AssertionError as error:
                raise AssertionError(f"{name}:{block.line}: {error}") from error
    assert ours > 5


def test_units_are_what_systemd_takes(programs: Programs, tmp_path: pathlib.Path) -> None:
    units = [block for _, block in blocks() if block.treatment == "unit"]
    assert len(units) >= 3
    for block in units:
        [command] = re.findall(r"^ExecStart=(.*)$", block.text, re.MULTILINE)
        assert programs.check(command.split())
        # systemd looks whether the program is there; this one is not installed.
        text = block.text.replace("/opt/meshnet/bin/meshnet", shutil.which("true") or "")
        path = tmp_path / block.detail
        path.write_text(text)
        said = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(path)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert block.detail not in said.stderr, said.stderr


def test_files_of_other_programs_are_well_formed() -> None:
    for _, block in blocks():
        if block.treatment == "yaml":
            [job] = yaml.safe_load(block.text)["scrape_configs"]
            assert job["static_configs"][0]["targets"]
