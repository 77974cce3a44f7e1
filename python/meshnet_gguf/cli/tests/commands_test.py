"""All commands: help, flags, settings, completion, reference pages."""

import os
import pathlib
import shlex
import subprocess

import pytest
from meshnet.errors import Reason
from meshnet_gguf.cli import reference
from meshnet_gguf.cli.commands import COMMANDS, describe
from meshnet_gguf.cli.completion import bash_completion, zsh_completion
from meshnet_gguf.cures import CONTROL_CURES, CURES
from meshnet_gguf.errors import reason_name

from proto.meshnet.shard.v1 import errors_pb2

MESHNET = os.environ["MESHNET"]
DOCS = pathlib.Path(os.environ["DOCS"])


def run(*arguments: str, **environment: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [MESHNET, *arguments], capture_output=True, text=True, env={**os.environ, **environment}
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example_and_json(name: str) -> None:
    command = describe(name)
    assert f"\n    meshnet {name}" in command.text
    assert "json" in {flag.name for flag in command.flags}
    assert all(flag.help.endswith((".", "%", "free.")) for flag in command.flags)


def test_a_flag_means_the_same_everywhere() -> None:
    """What stands before the first semicolon is its meaning, the rest is the command's."""
    meanings: dict[str, set[tuple[str, str]]] = {}
    for name in COMMANDS:
        for flag in describe(name).flags:
            meaning = flag.help.partition(";")[0].rstrip(".")
            meanings.setdefault(flag.name, set()).add((flag.kind, meaning))
    assert {name: found for name, found in meanings.items() if len(found) > 1} == {}
    # These are variables of their own, see settings.py.
    assert not {"settings", "storage", "cache"} & set(meanings)


def test_help_is_what_the_reference_says() -> None:
    code, out, _ = run("chat", "--help")
    assert code == 0
    for flag in describe("chat").flags:
        assert f"--{flag.name}" in out
        assert flag.help in out
    assert run("chat", "--no-such-flag")[0] == 2
    assert run("no-such-command")[0] == 2


@pytest.mark.parametrize(
    ("name", "page"),
    [("reference.md", reference.commands_page), ("errors.md", reference.errors_page)],
)
def test_pages_are_the_generated_ones(name: str, page: object) -> None:
    assert callable(page)
    assert (DOCS / name).read_text("utf-8") == page(), "tools/bazel run //docs:reference"


def test_every_reason_has_a_cure() -> None:
    reasons = {reason_name(v.number) for v in errors_pb2.Reason.DESCRIPTOR.values if v.number}
    assert set(CURES) == reasons
    assert {reason.name for reason in Reason} <= set(CURES) | set(CONTROL_CURES)
    assert set(CONTROL_CURES) <= {reason.name for reason in Reason}


# ---- Settings ----


def url_that_chat_dials(*arguments: str, **environment: str) -> str:
    """Nobody listens on these ports: the refusal names the address."""
    code, _, err = run("chat", *arguments, **environment)
    assert code == 1, err
    return err.partition("no answer from ")[2].partition(" ")[0]


def test_flags_before_environment_before_file(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("all: {url: 'http://127.0.0.1:1/all', json: true}\n")
    settings = {"MESHNET_SETTINGS": str(file)}
    assert url_that_chat_dials(**settings) == "http://127.0.0.1:1/all"
    file.write_text("all: {url: 'http://127.0.0.1:1/all'}\nchat: {url: 'http://127.0.0.1:1/own'}\n")
    assert url_that_chat_dials(**settings) == "http://127.0.0.1:1/own"
    settings["MESHNET_URL"] = "http://127.0.0.1:1/env"
    assert url_that_chat_dials(**settings) == "http://127.0.0.1:1/env"
    settings["MESHNET_CHAT_URL"] = "http://127.0.0.1:1/chat"
    assert url_that_chat_dials(**settings) == "http://127.0.0.1:1/chat"
    flag = "--url=http://127.0.0.1:1/flag"
    assert url_that_chat_dials(flag, **settings) == "http://127.0.0.1:1/flag"


def test_the_file_of_the_home_folder(tmp_path: pathlib.Path) -> None:
    (tmp_path / "meshnet").mkdir()
    (tmp_path / "meshnet" / "settings.yaml").write_text("chat: {url: 'http://127.0.0.1:1/xdg'}\n")
    assert url_that_chat_dials(XDG_CONFIG_HOME=str(tmp_path)) == "http://127.0.0.1:1/xdg"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("chat: {no-such-flag: 1}", "chat.no-such-flag"),
        ("chat: {temperature: hot}", "chat.temperature"),
        ("chat: {url: a, url: b}", "every key once"),
        ("chatt: {url: a}", "'chatt'"),
        ("[", "expected YAML"),
    ],
)
def test_settings_that_are_refused(tmp_path: pathlib.Path, text: str, place: str) -> None:
    (tmp_path / "s.yaml").write_text(text)
    code, _, err = run("chat", MESHNET_SETTINGS=str(tmp_path / "s.yaml"))
    assert (code, "CONFIGURATION_INVALID" in err, place in err) == (1, True, True), err


def test_an_environment_that_is_refused() -> None:
    code, _, err = run("chat", MESHNET_CHAT_TEMPERATURE="hot")
    assert (code, "$MESHNET_CHAT_TEMPERATURE" in err) == (1, True)


# ---- Completion ----


def completed(*words: str) -> list[str]:
    """What a real bash offers for the last word."""
    script = (
        f"{bash_completion()}\nCOMP_WORDS=({shlex.join(words)})\nCOMP_CWORD={len(words) - 1}\n"
        '_meshnet\nprintf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(["bash", "-u"], input=script, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_bash(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert completed("meshnet", "st") == ["status"]
    assert set(completed("meshnet", "")) == {*COMMANDS, "--help"}
    assert completed("meshnet", "status", "--wa") == ["--watch"]
    assert completed("meshnet", "serve", "--mesh-l") == ["--mesh-listen="]
    offered = set(completed("meshnet", "serve", "--"))
    flags = describe("serve").flags
    assert offered == {f"--{f.name}{'=' * f.takes_value}" for f in flags} | {"--help"}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").touch()
    assert completed("meshnet", "serve", "mod") == ["model.gguf"]
    assert completed("meshnet", "serve", "--api-keys", "=", "mod") == ["model.gguf"]


def test_zsh() -> None:
    """No zsh here: a shell's words are cut as zsh cuts them."""
    words = shlex.split(zsh_completion(), comments=True)
    for name in COMMANDS:
        case = words[words.index(f"{name})") + 1 :]
        assert case[0] == "_arguments"
        specs = case[1 : case.index("*:file:_files")]
        specs = [spec for spec in specs if spec.strip()]
        flags = describe(name).flags
        assert [s.lstrip("*").partition("[")[0] for s in specs] == [
            f"--{flag.name}{'=' * flag.takes_value}" for flag in flags
        ]
    assert subprocess.run(["bash", "-n"], input=zsh_completion(), text=True).returncode == 0
