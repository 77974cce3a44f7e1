"""Every block of our documents is run by docs_test, or checked here with a reason."""

import os
import pathlib
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml
from meshnet_gguf.cli.commands import describe

from tests.docs.blocks import TREATMENTS, Block, blocks_for_this_test, blocks_of, commands_of

DOCUMENTS = {path: pathlib.Path(path) for path in os.environ["DOCUMENTS"].split()}
# Target -> the program, for those whose flags are looked at.
PROGRAMS = dict(pair.split("=") for pair in os.environ["PROGRAMS"].split())
MESHNET = PROGRAMS["//:meshnet"]
CONFIGS = set(re.findall(r"^\w+:(\w+)", pathlib.Path(".bazelrc").read_text(), re.MULTILINE))
RUN = set(os.environ["RUN"].split())
RUN_BY = set(os.environ["RUN_BY"].split())
# Tools of the work tree, which tree_test asks, and programs of others.
OTHERS = {
    *("apt-get", "cd", "createdb", "createuser", "export", "git", "install", "journalctl"),
    *("install.sh", "pip", "python3", "systemctl", "tar"),
}
# Whoever adds a block that no test runs changes this number, and a reader sees it.
CHECKED = 2


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
        assert block.detail or block.treatment not in ("checked", "shown"), f"{place}: say why"


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


def test_few_blocks_are_not_run() -> None:
    checked = [f"{name}:{block.line} {block.detail}" for name, block in treated("checked")]
    assert len(checked) == CHECKED, "\n".join(checked)


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


# ---- Commands that are not run ----


def helped(program: tuple[str, ...]) -> set[str]:
    """The flags that a program's help names, with underscores."""
    if program[0] == MESHNET and program[1:]:
        # What its help is made of; a process for each of its commands would take longer.
        found = [flag.name for flag in describe(program[1]).flags]
    else:
        said = subprocess.run([*program, "--help"], capture_output=True, text=True, check=False)
        found = re.findall(r"--(?:\[no\])?([a-z][\w-]*)", said.stdout)
        assert said.returncode == 0, f"{program} --help: {said.stdout}{said.stderr}"
    return {name.replace("-", "_") for name in found}


def program_of(words: list[str]) -> tuple[tuple[str, ...], list[str]] | None:
    """A program of ours and its arguments; None for somebody else's."""
    if words[0] == "sudo":
        words = words[3:] if words[1] == "-u" else words[1:]
    if words[0] == "tools/bazel":
        if words[1] != "run":
            return None
        target = next(word for word in words[2:] if word.startswith("//"))
        arguments = [word for word in words[words.index(target) + 1 :] if word != "--"]
        if target not in PROGRAMS:
            assert not [word for word in arguments if word.startswith("--")], f"{target}: no help"
            return None
        program, words = PROGRAMS[target], [target, *arguments]
    elif words[0].startswith("tools/"):
        return None
    else:
        name = pathlib.Path(words[0]).name.removeprefix("meshnet-")
        known = {"demo": "//:demo", "meshnet": "//:meshnet", "worker": "//cc/worker"}
        if name not in known:
            assert name in OTHERS, f"nobody knows the program {name}"
            return None
        program = PROGRAMS[known[name]]
    if program == MESHNET and len(words) > 1:
        return (program, words[1]), words[2:]
    return (program,), words[1:]


def check_flags(places: list[tuple[str, list[str]]]) -> int:
    """Asks each program once for its flags; returns how many commands are of ours."""
    found = []
    for place, words in places:
        try:
            command = program_of(words)
        except AssertionError as error:
            raise AssertionError(f"{place}: {error}") from error
        if command is not None:
            found.append((place, *command))
    programs = sorted({program for _, program, _ in found})
    with ThreadPoolExecutor(4) as pool:
        flags = dict(zip(programs, pool.map(helped, programs), strict=True))
    for place, program, arguments in found:
        for word in arguments:
            if word.startswith("--") and word != "--help":
                flag = word[2:].partition("=")[0].replace("-", "_").removeprefix("no")
                known = flag in flags[program] or f"no{flag}" in flags[program]
                assert known, f"{place}: {program[-1]} has no flag {word}"
    return len(found)


def test_commands_that_are_not_run_exist() -> None:
    places = [
        (f"{name}:{block.line}", words)
        for name, block in treated("checked")
        if block.language != "python"
        for words in commands_of(block.text)
    ]
    assert check_flags(places) > 2


def test_commands_that_are_not_run_are_what_a_shell_reads() -> None:
    for name, block in treated("checked"):
        program = ["bash", "-n"] if block.language != "python" else ["python3", "-m", "ast"]
        said = subprocess.run(program, input=block.text, capture_output=True, text=True)
        assert said.returncode == 0, f"{name}:{block.line}: {said.stderr}"


def test_a_flag_that_is_gone_is_found() -> None:
    with pytest.raises(AssertionError, match="has no flag --no-such-flag"):
        check_flags([("x", ["meshnet", "chat", "--no-such-flag"])])
    with pytest.raises(AssertionError, match="nobody knows the program"):
        check_flags([("x", ["no-such-program"])])


def test_configs_that_are_named_exist() -> None:
    for name, path in DOCUMENTS.items():
        for config in re.findall(r"--config=(\w+)", path.read_text()):
            assert config in CONFIGS | {"LANE", "cache", "cache_write"}, f"{name}: {config}"


# ---- Files ----


def test_units_are_what_systemd_takes(tmp_path: pathlib.Path) -> None:
    units = treated("unit")
    assert len(units) >= 3
    for name, block in units:
        [command] = re.findall(r"^ExecStart=(.*)$", block.text, re.MULTILINE)
        assert check_flags([(f"{name}:{block.line}", command.split())]) == 1
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
    for _, block in treated("yaml"):
        for job in yaml.safe_load(block.text)["scrape_configs"]:
            assert job["static_configs"][0]["targets"]
    for name, block in treated("bazelrc"):
        for line in block.text.splitlines():
            form = r"(build|test|common)(:\w+)? --\w+[= ][^ ]+( #.*)?"
            assert re.fullmatch(form, line), f"{name}:{block.line}: {line}"
