"""Every block of commands in our documents is run by a test, and which one is looked at here."""

import os
import pathlib
import re
import shutil
import subprocess

import pytest
import yaml
from meshnet_gguf.cli.commands import describe

from tests.docs.blocks import TREATMENTS, Block, blocks_for_this_test, blocks_of, commands_of

DOCUMENTS = {path: pathlib.Path(path) for path in os.environ["DOCUMENTS"].split()}
CONFIGS = set(re.findall(r"^\w+:(\w+)", pathlib.Path(".bazelrc").read_text(), re.MULTILINE))
RUN = set(os.environ["RUN"].split())
RUN_BY = set(os.environ["RUN_BY"].split())


def blocks() -> list[tuple[str, Block]]:
    return [
        (name, block) for name, path in DOCUMENTS.items() for block in blocks_of(path.read_text())
    ]


def treated(treatment: str) -> list[tuple[str, Block]]:
    return [(name, block) for name, block in blocks() if block.treatment == treatment]


def test_every_block_is_treated() -> None:
    for name, block in blocks():
        place = f"{name}:{block.line}"
        assert block.treatment in TREATMENTS, f"{place}: nobody says what a test does with it"
        assert block.detail or block.treatment != "shown", f"{place}: say why"


def test_a_block_that_nobody_treats_is_found() -> None:
    text = '# A\n\n    meshnet serve\n\n<!-- run: on b, says "x y", says "z" -->\n```sh\na\n```\n'
    text += "\n- an item\n\n    goes on\n\n```yaml\nb: 1\n```\n"
    first, second, third = blocks_of(text)
    assert (first.text, first.treatment) == ("meshnet serve\n", "")
    assert (second.treatment, second.machines, second.says) == ("run", "b", ("x y", "z"))
    assert (third.language, third.treatment) == ("yaml", "")


def test_a_test_finds_the_blocks_that_it_is_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "<!-- run by //a/b:c_test: fails -->\n\n    d\n\n<!-- run -->\n\n    e\n"
    monkeypatch.setenv("TEST_TARGET", "//a/b:c_test")
    [block] = blocks_for_this_test(text)
    assert (block.text, block.treatment, block.fails) == ("d\n", "run by", True)
    monkeypatch.setenv("TEST_TARGET", "//a/b:other_test")
    with pytest.raises(AssertionError, match="run by //a/b:other_test"):
        blocks_for_this_test(text)


def is_command(words: list[str]) -> bool:
    """Whether a line begins with a program: of ours, of the work tree, or of this machine."""
    ours = {"demo", "meshnet", "worker"}
    return "/" in words[0] or words[0] in ours or shutil.which(words[0]) is not None


def test_no_command_is_only_shown() -> None:
    for name, block in treated("shown"):
        for words in commands_of(block.text):
            assert not is_command(words), f"{name}:{block.line}: let a test run {words[0]}"
    assert is_command(["meshnet", "chat"])
    assert is_command(["tools/bazel", "test"])
    assert is_command(["git", "log"])
    assert not is_command(["Why:", "because"])


def test_documents_that_want_to_be_run_are() -> None:
    wanted = {name for name, _ in treated("run") + treated("output")}
    assert wanted == RUN


def test_blocks_of_other_tests_reach_them() -> None:
    found = treated("run by")
    assert {block.test for _, block in found} == RUN_BY
    for name, block in found:
        package, _, test = block.test.removeprefix("//").partition(":")
        targets = pathlib.Path(package, "BUILD.bazel").read_text()
        rules = re.findall(r"^\w+\(\n.*?^\)", targets, re.MULTILINE | re.DOTALL)
        [rule] = [rule for rule in rules if f'\n    name = "{test}",\n' in rule]
        for wanted in (pathlib.Path(name).name, "//tests/docs:blocks"):
            assert wanted in rule, f"{name}:{block.line}: {block.test} does not have {wanted}"


def test_configs_that_are_named_exist() -> None:
    for name, path in DOCUMENTS.items():
        for config in re.findall(r"--config=(\w+)", path.read_text()):
            assert config in CONFIGS | {"LANE", "cache", "cache_write"}, f"{name}: {config}"


def unknown_flags(words: list[str]) -> list[str]:
    """Of a call of meshnet, those that the command does not have."""
    known = {flag.name.replace("-", "_") for flag in describe(words[1]).flags}
    given = [word[2:].partition("=")[0] for word in words[2:] if word.startswith("--")]
    return [name for name in given if name.replace("-", "_") not in known]


def test_units_are_what_systemd_takes(tmp_path: pathlib.Path) -> None:
    units = treated("unit")
    assert len(units) >= 3
    for name, block in units:
        [command] = re.findall(r"^ExecStart=(.*)$", block.text, re.MULTILINE)
        assert command.startswith("/opt/meshnet/bin/meshnet ")
        assert unknown_flags(command.split()) == [], f"{name}:{block.line}"
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
    assert unknown_flags(["meshnet", "chat", "--no-such-flag=1"]) == ["no-such-flag"]


def test_files_of_other_programs_are_well_formed() -> None:
    for _, block in treated("yaml"):
        for job in yaml.safe_load(block.text)["scrape_configs"]:
            assert job["static_configs"][0]["targets"]
    for name, block in treated("bazelrc"):
        for line in block.text.splitlines():
            form = r"(build|test|common)(:\w+)? --\w+[= ][^ ]+( #.*)?"
            assert re.fullmatch(form, line), f"{name}:{block.line}: {line}"
