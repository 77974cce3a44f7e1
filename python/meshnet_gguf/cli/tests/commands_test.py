"""All commands: help, flags, settings, completion, reference pages."""

import contextlib
import json
import os
import pathlib
import re
import shlex
import socket
import subprocess
import sys

import pytest
from meshnet.certification import Lane, issue
from meshnet.errors import Reason
from meshnet.signing import SigningKey
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
def test_every_flag_is_explained(name: str) -> None:
    command = describe(name)
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


# ---- All commands alike ----

# One process that has loaded what commands have in common, and forks for each command line.
MANY = """
import io, json, os, sys, contextlib
from meshnet_gguf.cli.meshnet import main
import httpx, rich.table, meshnet_gguf.client, meshnet.tracker_client
lines = json.load(sys.stdin)
answers = []
for arguments in lines:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(["meshnet", *arguments])
        with os.fdopen(writing, "w") as answer:
            json.dump([code, out.getvalue(), err.getvalue()], answer)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        answers.append(answer.read())
    os.waitpid(child, 0)
print("[" + ",".join(answers) + "]")
"""

# What makes no sense to a command, and what each refuses or fails in: a new command adds a line.
NONSENSE = {
    "api-keys": "no-such-action keys.json",
    "bench": "smollm2 --compare-stages none",
    "certification": "no-such-action x",
    "certify": "smollm2",
    "certs": "issue",
    "chat": "one two",
    "completion": "fish",
    "contract": "no-such-action",
    "doctor": "one two",
    "evidence": "one two",
    "inspect": "",
    "keys": "make",
    "manifest": "",
    "metrics": "",
    "models": "one",
    "node": "",
    "plan": "model.gguf",
    "provision": "",
    "recipe": "",
    "relay": "one",
    "serve": "one two",
    "status": "one",
    "tracker": "one",
}
REFUSED = {
    "api-keys": "add /no/such/folder/keys.json alice",
    "bench": "http://127.0.0.1:1/v1",
    "certification": "show /no/such/file",
    "certify": "--evidence /no/such/file",
    "certs": "issue /no/such/folder a",
    "chat": "--url http://127.0.0.1:1/v1",
    "contract": "check /no/such/file",
    "doctor": "/no/such/model.gguf",
    "evidence": "/no/such/model.gguf --record /no/such/record",
    "inspect": "/no/such/model.gguf",
    "keys": "show /no/such/file",
    "manifest": "/no/such/model.gguf --out /no/such/manifest",
    "metrics": "127.0.0.1:1",
    "models": "--url http://127.0.0.1:1/v1",
    "node": "--config /no/such/node.yaml",
    "plan": "/no/such/model.gguf --machines /no/such/machines.yaml",
    "provision": "/no/such/manifest --from /no/such/folder",
    "recipe": "127.0.0.1:1",
    "relay": "--listen 192.0.2.1:1",
    "serve": "/no/such/model.gguf",
    "status": "--url http://127.0.0.1:1/v1",
    "tracker": "--listen 192.0.2.1:1 --database sqlite:////no/such/folder/tracker.db",
}
# It reads nothing and asks nobody.
NEVER_REFUSED = {"completion"}


def run_all(lines: list[list[str]]) -> list[tuple[int, str, str]]:
    done = subprocess.run(
        [sys.executable, "-c", MANY],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    return [(code, out, err) for code, out, err in json.loads(done.stdout)]


def test_a_command_line_that_makes_no_sense_is_exit_code_2() -> None:
    assert set(NONSENSE) == set(COMMANDS)
    lines = [[name, "--no-such-flag"] for name in COMMANDS]
    lines += [[name, *NONSENSE[name].split(), "--json"] for name in COMMANDS]
    for line, (code, out, err) in zip(lines, run_all(lines), strict=True):
        assert (code, out) == (2, ""), (line, err)
        assert err.startswith(f"meshnet {line[0]}: "), line
        assert err.endswith(f"; see `meshnet {line[0]} --help`\n"), line


def test_a_refusal_is_exit_code_1_and_one_json_object_with_its_reason() -> None:
    assert set(REFUSED) == set(COMMANDS) - NEVER_REFUSED
    lines = [[name, *text.split(), "--json"] for name, text in REFUSED.items()]
    for line, (code, out, err) in zip(lines, run_all(lines), strict=True):
        assert code == 1, (line, code, err)
        error = json.loads(out)["error"]
        assert error["reason"] in CURES, line
        assert error["message"], line
        assert err.splitlines()[-1].startswith(f"meshnet {line[0]}: {error['reason']}"), line


def test_examples_are_command_lines_that_there_are() -> None:
    for name in COMMANDS:
        command = describe(name)
        flags = {flag.name for flag in command.flags}
        text = command.text.replace("\\\n", " ")
        examples = re.findall(r"^    (?:.*\| )?meshnet ([a-z][\w-]*)(.*)$", text, re.MULTILINE)
        assert name in dict(examples), name
        for other, rest in examples:
            assert other in COMMANDS, other
            known = flags if other == name else {flag.name for flag in describe(other).flags}
            for flag in re.findall(r" --([\w-]+)", rest.partition(" #")[0]):
                assert flag.replace("_", "-") in known, f"{name}: {other} has no --{flag}"


def test_who_waits_for_others_says_so(tmp_path: pathlib.Path) -> None:
    """A server that takes connections and never answers."""
    lane = Lane("m", "0" * 64)
    record = issue(SigningKey.generate(), lane, issued_ms=1, evidence_sha256="0" * 64)
    (tmp_path / "lane.records").write_bytes(record.encode() + b"\n")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        url = f"http://{address}/v1"
        lines = {
            f"bench {url}": f"asking {url} ...",
            f"certification import {tmp_path}/lane.records --tracker {address}": "giving ",
            f"chat --url {url}": f"asking {url} ...",
            f"chat model --url {url}": "waiting for the first token ...",
            f"doctor --tracker {address}": "asking the mesh ...",
            f"metrics {address}": "asking the workers ...",
            f"models --tracker {address}": "asking the mesh ...",
            f"models --url {url}": f"asking {url} ...",
            f"recipe {address}": "asking the workers ...",
            f"serve --join {address}": f"asking {address} ...",
            f"status --tracker {address}": "asking the mesh ...",
            f"status --url {url}": "asking the mesh ...",
        }
        with contextlib.ExitStack() as started:
            processes = {}
            for line in lines:
                processes[line] = subprocess.Popen(
                    [MESHNET, *line.split()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                )
                started.enter_context(processes[line])
                started.callback(processes[line].kill)
            for line, process in processes.items():
                assert process.stderr is not None
                assert process.stderr.readline().startswith(lines[line]), line
