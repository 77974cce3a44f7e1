"""All commands: help, flags, settings, reference pages."""

import asyncio
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest
from meshnet.certification import Lane, issue
from meshnet.errors import Reason
from meshnet.signing import SigningKey
from meshnet_gguf.cli import reference
from meshnet_gguf.cli.commands import COMMANDS, describe
from meshnet_gguf.cures import CONTROL_CURES, CURES
from meshnet_gguf.errors import reason_name
from meshnet_gguf.testing.commands import Commands, Done

from proto.meshnet.shard.v1 import errors_pb2

MESHNET = os.environ["MESHNET"]
DOCS = pathlib.Path(os.environ["DOCS"])
TINY = pathlib.Path(os.environ["FIXTURE_TINY"])
for_all = pytest.mark.asyncio(loop_scope="module")


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


def test_the_program_is_there() -> None:
    done = subprocess.run([MESHNET, "--help"], capture_output=True, text=True, check=True)
    assert all(f"  {name} " in done.stdout for name in COMMANDS)


@for_all
async def test_help_is_what_the_reference_says(commands: Commands) -> None:
    helps = await asyncio.gather(*(commands.run(name, "--help") for name in COMMANDS))
    for name, done in zip(COMMANDS, helps, strict=True):
        assert (done.code, done.err) == (0, "")
        command = describe(name)
        assert command.text in done.out
        for flag in command.flags:
            assert f"--{flag.name}" in done.out
            assert flag.help in done.out


@for_all
async def test_a_command_that_there_is_not(commands: Commands) -> None:
    done = await commands.run("serv")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("meshnet: expected a command of api-keys, ")
    assert done.err.endswith("got 'serv' (did you mean serve?); see `meshnet --help`\n")


@for_all
async def test_help_on_a_command_is_its_help(commands: Commands) -> None:
    assert await commands.run("help", "certs") == await commands.run("certs", "--help")
    overview = await commands.run("--help")
    assert await commands.run("help") == overview
    assert "meshnet serve smollm2" in overview.out


def test_the_version_is_that_of_the_installed_release(tmp_path: pathlib.Path) -> None:
    here = subprocess.run([MESHNET, "--version"], capture_output=True, text=True)
    assert here.stdout == "meshnet of a work tree: no release is installed\n"
    (tmp_path / "meshnet_gguf-9.8.7.dist-info").mkdir()
    (tmp_path / "meshnet_gguf-9.8.7.dist-info" / "METADATA").write_text("Version: 9.8.7\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    installed = subprocess.run([MESHNET, "--version"], capture_output=True, env=environment)
    assert (installed.returncode, installed.stdout) == (0, b"meshnet 9.8.7\n")


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


async def url_that_chat_dials(commands: Commands, *arguments: str, **environment: str) -> str:
    """Nobody listens on these ports: the refusal names the address."""
    done = await commands.run("chat", *arguments, environment=environment)
    assert done.code == 1, done
    return done.err.partition("no answer from ")[2].partition(" ")[0]


@for_all
async def test_flags_before_environment_before_file(
    commands: Commands, tmp_path: pathlib.Path
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("all: {url: 'http://127.0.0.1:1/all', json: true}\n")
    settings = {"MESHNET_SETTINGS": str(file)}
    assert await url_that_chat_dials(commands, **settings) == "http://127.0.0.1:1/all"
    file.write_text("all: {url: 'http://127.0.0.1:1/all'}\nchat: {url: 'http://127.0.0.1:1/own'}\n")
    assert await url_that_chat_dials(commands, **settings) == "http://127.0.0.1:1/own"
    settings["MESHNET_URL"] = "http://127.0.0.1:1/env"
    assert await url_that_chat_dials(commands, **settings) == "http://127.0.0.1:1/env"
    settings["MESHNET_CHAT_URL"] = "http://127.0.0.1:1/chat"
    assert await url_that_chat_dials(commands, **settings) == "http://127.0.0.1:1/chat"
    flag = "--url=http://127.0.0.1:1/flag"
    assert await url_that_chat_dials(commands, flag, **settings) == "http://127.0.0.1:1/flag"


@for_all
async def test_the_file_of_the_home_folder(commands: Commands, tmp_path: pathlib.Path) -> None:
    (tmp_path / "meshnet").mkdir()
    (tmp_path / "meshnet" / "settings.yaml").write_text("chat: {url: 'http://127.0.0.1:1/xdg'}\n")
    assert (
        await url_that_chat_dials(commands, XDG_CONFIG_HOME=str(tmp_path))
        == "http://127.0.0.1:1/xdg"
    )


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
@for_all
async def test_settings_that_are_refused(
    commands: Commands, tmp_path: pathlib.Path, text: str, place: str
) -> None:
    (tmp_path / "s.yaml").write_text(text)
    done = await commands.run("chat", environment={"MESHNET_SETTINGS": str(tmp_path / "s.yaml")})
    said = ("CONFIGURATION_INVALID" in done.err, place in done.err)
    assert (done.code, said) == (1, (True, True)), done


@for_all
async def test_an_environment_that_is_refused(commands: Commands) -> None:
    done = await commands.run("chat", environment={"MESHNET_CHAT_TEMPERATURE": "hot"})
    assert (done.code, "$MESHNET_CHAT_TEMPERATURE" in done.err) == (1, True)


# Prints for every flag of every command what it is as one place after the other sets it, each
# before the last. A command is a process of its own: several define a flag of one name.
PLACES = """
import itertools, json, os, pathlib, sys
from absl import flags
from meshnet_gguf.cli import settings
from meshnet_gguf.cli.commands import COMMANDS, load
from meshnet_gguf.cli.main import _flags_of
import httpx, rich.table, meshnet_gguf.embedded_mesh, meshnet_gguf.gateway

file = pathlib.Path(sys.argv[1])

def values_for(flag):
    if flag.boolean:
        return itertools.cycle(["true", "false"])
    if values := getattr(flag.parser, "enum_values", None):
        return itertools.cycle(values)
    return (f"{n}.5" if flag.flag_type() == "float" else f"{n}" for n in itertools.count(11))

def found(command, name):
    given, environment, sections = [], {"MESHNET_SETTINGS": str(file)}, {}
    values = values_for(flags.FLAGS[name])
    for place in range(5):
        value, line = next(values), []
        if place < 2:
            sections["all" if place == 0 else command] = {name.replace("_", "-"): value}
            file.write_text(json.dumps(sections))
        elif place < 4:
            own = command.upper().replace("-", "_") + "_" if place == 3 else ""
            environment[f"MESHNET_{own}{name.upper()}"] = value
        else:
            line = [f"--{name}={value}"]
        flags.FLAGS.unparse_flags()
        settings.apply(command, [name], COMMANDS, environment)
        flags.FLAGS(["meshnet", *line])
        is_now = flags.FLAGS[name].value
        is_now = ",".join(is_now) if isinstance(is_now, list) else is_now
        given.append([value, str(is_now).lower() if flags.FLAGS[name].boolean else str(is_now)])
    return given

for command in COMMANDS:
    if not os.fork():
        names = _flags_of(load(command))
        print(json.dumps([command, {name: found(command, name) for name in names}]), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, command
"""


def test_every_flag_is_set_by_file_environment_and_command_line(tmp_path: pathlib.Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PLACES, str(tmp_path / "settings.yaml")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    found = dict(json.loads(line) for line in done.stdout.splitlines())
    for name in COMMANDS:
        flags = {flag.name.replace("-", "_") for flag in describe(name).flags}
        assert set(found[name]) == flags
        for flag, places in found[name].items():
            for given, is_now in places:
                assert given == is_now, (name, flag, places)


# ---- All commands alike ----

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


async def run_all(commands: Commands, lines: list[list[str]]) -> list[Done]:
    return await asyncio.gather(*(commands.run(*line) for line in lines))


@for_all
async def test_a_command_line_that_makes_no_sense_is_exit_code_2(commands: Commands) -> None:
    assert set(NONSENSE) == set(COMMANDS)
    lines = [[name, "--no-such-flag"] for name in COMMANDS]
    lines += [[name, *NONSENSE[name].split(), "--json"] for name in COMMANDS]
    for line, done in zip(lines, await run_all(commands, lines), strict=True):
        assert (done.code, done.out) == (2, ""), (line, done)
        assert done.err.startswith(f"meshnet {line[0]}: "), line
        assert done.err.endswith(f"; see `meshnet {line[0]} --help`\n"), line


@for_all
async def test_numbers_that_are_none_are_refused_in_words(commands: Commands) -> None:
    whole = await commands.run("serve", "m", "--stages=two")
    assert "expected a whole number, got 'two'" in whole.err
    part = await commands.run("serve", "m", "--queue-seconds=soon")
    assert "expected a number, got 'soon'" in part.err


@for_all
async def test_a_file_of_api_keys_that_is_not_there_is_no_empty_one(commands: Commands) -> None:
    done = await commands.run("api-keys", "list", "/no/such/keys.json", "--json")
    assert done.code == 1
    message = json.loads(done.out)["error"]["message"]
    assert message.startswith("expected a file of API keys, there is no /no/such/keys.json; ")


@for_all
async def test_a_refusal_is_exit_code_1_and_one_json_object_with_its_reason(
    commands: Commands,
) -> None:
    assert set(REFUSED) == set(COMMANDS) - NEVER_REFUSED
    lines = [[name, *text.split(), "--json"] for name, text in REFUSED.items()]
    for line, done in zip(lines, await run_all(commands, lines), strict=True):
        assert done.code == 1, (line, done)
        error = json.loads(done.out)["error"]
        assert error["reason"] in CURES, line
        assert error["message"], line
        assert error["cure"] == CURES[error["reason"]], line
        said = f"meshnet {line[0]}: {error['reason']}: {error['message']}\n  -> {error['cure']}\n"
        assert done.err.endswith(said), (line, done)


@pytest.mark.parametrize(
    "line",
    [
        "chat --api-key-file {tmp}/missing",
        "chat --api-key-file {tmp}",
        "chat --api-key-file {tmp}/no-key",
        "bench http://127.0.0.1:1/v1 --svg {tmp}/missing/speed.svg",
        "inspect {tiny} --svg {tmp}/missing/layers.svg",
    ],
)
@for_all
async def test_files_that_cannot_be_used(
    commands: Commands, tmp_path: pathlib.Path, line: str
) -> None:
    (tmp_path / "no-key").write_bytes(b"\xff\x00\n\n")
    words = line.format(tmp=tmp_path, tiny=TINY).split()
    done = await commands.run(*words)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"meshnet {words[0]}: CONFIGURATION_INVALID: "), done
    assert str(tmp_path) in done.err.splitlines()[0]


@for_all
async def test_no_question_on_stdin(commands: Commands) -> None:
    done = await commands.run("chat", "model", "--url=http://127.0.0.1:1/v1", stdin=" \n")
    said = "meshnet chat: expected a question on stdin, or a terminal to ask on; got nothing; see "
    assert (done.code, done.out, done.err.startswith(said)) == (2, "", True), done


@for_all
async def test_addresses_that_are_none(commands: Commands) -> None:
    for command in ("chat", "status", "models", "bench"):
        done = await commands.run(command, "--url=127.0.0.1:8080")
        said = f"meshnet {command}: CONFIGURATION_INVALID: expected --url such as http://"
        assert (done.code, done.err.startswith(said)) == (1, True), done


def test_who_stops_reading_hears_no_complaint() -> None:
    for arguments in (["completion", "bash"], ["--help"], ["serve", "--help"]):
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run([MESHNET, *arguments], stdout=writer, stderr=subprocess.PIPE)
        os.close(writer)
        assert (done.returncode, done.stderr) == (1, b""), arguments


# ---- Ctrl-C ----

# Whoever runs tests may have it ignored, as a shell does for what it runs in the background.
WITH_CTRL_C = ("env", "--default-signal=INT")
# Is interrupted while it imports the module named first.
INTERRUPTED = """
import os, signal, sys

module = sys.argv.pop(1)

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
from meshnet_gguf.cli import meshnet
meshnet.run()
"""


@pytest.mark.parametrize("module", ["meshnet_gguf.cli.settings", "meshnet_gguf.cli.relay"])
def test_interrupted_while_it_loads(module: str) -> None:
    done = subprocess.run(
        [*WITH_CTRL_C, sys.executable, "-c", INTERRUPTED, module, "relay", "--listen=127.0.0.1:0"],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    # As a shell tells it: 130.
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")


@pytest.mark.parametrize(
    "line", ["chat --url http://{at}/v1", "serve --join {at}", "status --url http://{at}/v1"]
)
async def test_interrupted_while_it_waits_for_others(line: str) -> None:
    connected = asyncio.Event()
    writers = []

    async def take(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        connected.set()

    silent = await asyncio.start_server(take, "127.0.0.1", 0)
    words = line.format(at=f"127.0.0.1:{silent.sockets[0].getsockname()[1]}").split()
    process = await asyncio.create_subprocess_exec(
        *(*WITH_CTRL_C, MESHNET, *words),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        await connected.wait()
        process.send_signal(signal.SIGINT)
        out, err = await process.communicate()
    finally:
        silent.close()
        for writer in writers:
            writer.close()
    said = err.decode().splitlines()
    assert (process.returncode, out, said[-1:]) == (130, b"", [f"meshnet {words[0]}: interrupted"])
    assert b"Traceback" not in err, said


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


@for_all
async def test_who_waits_for_others_says_so(commands: Commands, tmp_path: pathlib.Path) -> None:
    """A server that takes connections and never answers, until all have come."""
    lane = Lane("m", "0" * 64)
    record = issue(SigningKey.generate(), lane, issued_ms=1, evidence_sha256="0" * 64)
    (tmp_path / "lane.records").write_bytes(record.encode() + b"\n")
    connected: list[asyncio.StreamWriter] = []
    everybody = asyncio.Event()

    async def take(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.append(writer)
        if len(connected) >= len(lines):
            everybody.set()

    silent = await asyncio.start_server(take, "127.0.0.1", 0)
    address = f"127.0.0.1:{silent.sockets[0].getsockname()[1]}"
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
        f"plan {TINY} --tracker {address} --model-id m": "asking the mesh ...",
        f"recipe {address}": "asking the workers ...",
        f"serve --join {address}": f"asking {address} ...",
        f"serve m --workers {address} --listen 127.0.0.1:0": "asking the workers ...",
        f"status --tracker {address}": "asking the mesh ...",
        f"status --url {url}": "asking the mesh ...",
    }
    running = asyncio.gather(
        *(commands.run(*line.split(), stdin="Hello", impatient=True) for line in lines)
    )
    await everybody.wait()
    silent.close()
    for writer in connected:
        writer.close()
    for line, done in zip(lines, await running, strict=True):
        assert (done.code, done.err.startswith(lines[line])) == (1, True), (line, done)
