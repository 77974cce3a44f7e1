"""The commands manifest and provision as processes, killed and resumed."""

import hashlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import threading
from typing import Any

import pytest
from meshnet_gguf.testing.model_server import Answer, ModelServer, Request

SPLIT = [pathlib.Path(path) for path in os.environ["FIXTURE_TINY_SPLIT"].split()]
MESHNET = pathlib.Path(os.environ["MESHNET"]).absolute()
CHUNK = 1 << 16


def meshnet(*arguments: str | pathlib.Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [MESHNET, *arguments], capture_output=True, text=True, check=False, timeout=60
    )


def answer(*arguments: str | pathlib.Path, code: int = 0) -> Any:
    result = meshnet(*arguments, "--json")
    assert result.returncode == code, result.stderr
    return json.loads(result.stdout)


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    folder = tmp_path / "source"
    folder.mkdir()
    for path in SPLIT:
        shutil.copy(path, folder)
    return folder


@pytest.fixture
def manifest(folder: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "manifest.json"
    made = answer("manifest", folder, f"--chunk-bytes={CHUNK}", "--revision=r1", "--out", path)
    assert made["artifact_sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    return path


def test_a_manifest_on_stdout_is_the_one_in_a_file(
    folder: pathlib.Path, manifest: pathlib.Path
) -> None:
    result = meshnet("manifest", folder / SPLIT[1].name, f"--chunk-bytes={CHUNK}", "--revision=r1")
    assert result.returncode == 0, result.stderr
    assert result.stdout == manifest.read_text()


def test_what_a_manifest_says(manifest: pathlib.Path) -> None:
    shown = answer("manifest", "--show", manifest)
    assert shown["revision"] == "r1"
    assert [file["name"] for file in shown["files"]] == [path.name for path in SPLIT]
    assert [file["role"] for file in shown["files"]] == ["metadata", "weights", "weights"]
    text = meshnet("manifest", "--show", manifest).stdout
    assert shown["artifact_sha256"] in text
    assert SPLIT[2].name in text


def test_help_has_examples() -> None:
    for command in ("manifest", "provision"):
        result = meshnet(command, "--help")
        assert result.returncode == 0
        assert f"    meshnet {command} " in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("manifest",), "expected GGUF files or a folder"),
        (("manifest", "a.gguf", "--json"), "expected --out"),
        (("manifest", "--show"), "expected one manifest to show"),
        (("provision", "m.json"), "expected --from"),
        (("provision", "--from=a", "--to=b"), "expected one manifest"),
        (("provision", "m", "--from=a", "--to=b", "--layers=3"), "expected --layers BEGIN:END"),
        (("provision", "m", "--from=a", "--to=b", "--layers=3:3"), "expected --layers BEGIN:END"),
    ],
)
def test_wrong_flags(arguments: tuple[str, ...], message: str) -> None:
    result = meshnet(*arguments)
    assert result.returncode == 2
    assert message in result.stderr


def test_refusals_are_named(
    manifest: pathlib.Path, folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    source = f"--from={folder}"
    failed = answer("provision", manifest, source, "--to=/home/somebody", code=1)
    assert failed["error"]["reason"] == "CONFIGURATION_INVALID"
    (tmp_path / "link").symlink_to("/home/somebody")
    failed = answer("provision", manifest, source, f"--to={tmp_path}/link/models", code=1)
    assert failed["error"]["reason"] == "CONFIGURATION_INVALID"
    to = f"--to={tmp_path}/storage"
    failed = answer("provision", manifest, source, to, "--layers=0:9", code=1)
    assert failed["error"]["reason"] == "LAYER_RANGE_INVALID"
    failed = answer("provision", manifest, source, to, f"--artifact={'0' * 64}", code=1)
    assert failed["error"]["reason"] == "ARTIFACT_MISMATCH"
    manifest.write_text(manifest.read_text() + "\n")
    failed = answer("provision", manifest, source, to, code=1)
    assert failed["error"]["reason"] == "MANIFEST_INVALID"


def test_layers_from_a_folder(
    manifest: pathlib.Path, folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    to = f"--to={tmp_path}/storage"
    part = answer("provision", manifest, f"--from={folder}", to, "--layers=0:2")
    assert part["layers"] == [0, 2]
    whole = answer("provision", manifest, f"--from={folder}", to)
    assert whole["kept_bytes"] == part["fetched_bytes"]
    result = meshnet("provision", manifest, f"--from={folder}", to)
    assert result.stdout.strip() == whole["model"]
    for path in SPLIT:
        found = pathlib.Path(whole["folder"]) / path.name
        assert found.read_bytes() == path.read_bytes()


def test_storage_is_where_it_is_configured(
    manifest: pathlib.Path,
    folder: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MESHNET_STORAGE", str(tmp_path / "configured"))
    identity = hashlib.sha256(manifest.read_bytes()).hexdigest()
    done = answer("provision", manifest, f"--from={folder}", f"--artifact={identity}")
    assert done["folder"] == str(tmp_path / "configured" / "models" / identity)


def test_killed_and_resumed(
    manifest: pathlib.Path, folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """kill -9 in the middle of a file; nothing that was verified comes or is read a second time."""
    last = SPLIT[2].name
    middle = threading.Event()
    go_on = threading.Event()

    def hold(sent: int) -> None:
        if sent >= 3_000_000:
            middle.set()
            go_on.wait(60)

    def fault(request: Request) -> Answer | None:
        is_body = request.file == last and request.range and request.range[0] > 0
        return Answer(before_byte=hold) if is_body else None

    to = tmp_path / "storage"
    with ModelServer(folder) as server:
        server.fault = fault
        command = ["provision", str(manifest), f"--from={server.url}", f"--to={to}"]
        with subprocess.Popen(
            [MESHNET, *command, "--parallel=1"], stderr=subprocess.DEVNULL
        ) as process:
            assert middle.wait(60)
            part = next(path for path in to.iterdir() if path.name.endswith(".part"))
            # The server has sent more than this; what the process has verified of it is noted.
            while journalled(part).count(last) < 30:
                assert process.poll() is None
            process.send_signal(signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
        go_on.set()
        noted = set(journalled(part).splitlines())
        assert 30 <= sum(line.startswith(last) for line in noted) < 60
        assert not any(path.name == "provisioned.json" for path in part.iterdir())
        before = len(server.requests)
        done = answer(*command)
        for request in server.requests[before:]:
            assert request.range
            for chunk in range(request.range[0] // CHUNK, -(-request.range[1] // CHUNK)):
                assert f"{request.file} {chunk}" not in noted
        resumed = server.requests[before:]
    asked = sum(request.range[1] - request.range[0] for request in resumed if request.range)
    assert asked == done["fetched_bytes"]
    total = sum(path.stat().st_size for path in SPLIT)
    assert done["kept_bytes"] + done["fetched_bytes"] == total
    assert done["kept_bytes"] >= 30 * CHUNK
    for path in SPLIT:
        assert (pathlib.Path(done["folder"]) / path.name).read_bytes() == path.read_bytes()


def journalled(part: pathlib.Path) -> str:
    try:
        return (part / ".journal").read_text()
    except FileNotFoundError:
        return ""
