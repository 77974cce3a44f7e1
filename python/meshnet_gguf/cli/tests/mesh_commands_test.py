"""status, doctor, models and bench against one mesh that `meshnet serve` runs."""

import asyncio
import json
import os
import pathlib
import xml.etree.ElementTree as ET
from typing import Any

import pytest
from meshnet_gguf.testing.commands import Commands
from meshnet_gguf.testing.serve_process import serving

MESHNET = os.environ["MESHNET"]
MODEL = pathlib.Path(os.environ["DEEPSEEK4_MODEL"]).resolve()
NAME = MODEL.stem
pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_commands_around_a_mesh(commands: Commands, tmp_path: pathlib.Path) -> None:
    """It serves the first half of a model; another process has joined with the rest."""
    places = ("--listen=127.0.0.1:0", "--mesh-listen=127.0.0.1:0")
    async with (
        serving(MESHNET, "serve", str(MODEL), *places, "--layers=0:4") as (mesh, _),
        serving(MESHNET, "serve", str(MODEL), f"--join={mesh['tracker']}") as (joined, _),
    ):
        assert set(mesh) == {
            *("model", "url", "workers", "tracker", "missing", "problem", "seconds")
        }
        assert (mesh["model"], mesh["missing"], len(mesh["workers"])) == (NAME, [4, 8], 1)
        assert set(joined) == {"node", "worker", "layers", "missing", "seconds"}
        assert (joined["layers"], joined["missing"]) == ([4, 8], [])
        await check_status(commands, mesh)
        await check_status_goes_on(mesh)
        await check_doctor(commands, mesh)
        await check_models(commands, mesh)
        await check_bench(commands, mesh, tmp_path)


async def test_a_gateway_says_why_there_are_no_answers_yet() -> None:
    where = ("--listen=127.0.0.1:0", "--tracker=127.0.0.1:1")
    async with serving(MESHNET, "serve", "llama", *where) as (said, _):
        assert said["problem"].startswith("PEER_UNREACHABLE: ")


async def check_status(commands: Commands, mesh: dict[str, Any]) -> None:
    for flag in (f"--url={mesh['url']}", f"--tracker={mesh['tracker']}"):
        code, out, err = await commands.run("status", flag, "--json")
        assert code == 0, err
        (model,) = json.loads(out)["models"]
        assert (model["name"], model["layers"], model["problem"]) == (NAME, 8, None)
        assert [(s["begin"], s["end"], s["state"]) for s in model["stages"]] == [
            (0, 4, "READY"),
            (4, 8, "READY"),
        ]
        (lane,) = model["lanes"]
        assert lane["admission"] == "DARK_ADMITTED"
    code, out, _ = await commands.run("status", f"--url={mesh['url']}")
    assert code == 0
    assert f"{NAME}, 8 layers: served" in out
    assert "DARK_ADMITTED (no valid certification record" in out
    assert "answers under way" in out


async def check_status_goes_on(mesh: dict[str, Any]) -> None:
    process = await asyncio.create_subprocess_exec(
        MESHNET,
        "status",
        "--watch",
        "--json",
        f"--tracker={mesh['tracker']}",
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    times = [json.loads(await process.stdout.readline())["taken_at"] for _ in range(2)]
    process.kill()
    await process.wait()
    assert times[0] < times[1]


async def check_doctor(commands: Commands, mesh: dict[str, Any]) -> None:
    busy = mesh["url"].removeprefix("http://").removesuffix("/v1")
    code, out, err = await commands.run(
        "doctor", f"--tracker={mesh['tracker']}", f"--ports={busy},127.0.0.1:0", "--json"
    )
    found = {check["name"]: check for check in json.loads(out)["checks"]}
    assert code == 0, err + out
    levels = {name: check["level"] for name, check in found.items()}
    assert levels["cpu.baseline"] == levels["worker.program"] == "ok"
    assert levels[f"port.{busy.rpartition(':')[2]}"] == "warn"
    assert levels["port.0"] == "ok"
    assert levels[f"tracker.{mesh['tracker']}"] == levels["clock.tracker"] == "ok"
    assert levels[f"route.{NAME}"] == levels["versions.workers"] == "ok"
    workers = [name for name in levels if name.startswith("worker.") and name != "worker.program"]
    assert [levels[name] for name in workers] == ["ok", "ok"]
    (reach,) = [name for name in levels if name.startswith("reach.")]
    assert levels[reach] in ("ok", "warn")  # measured with the next heartbeat
    (lane,) = [name for name in levels if name.startswith("lane.")]
    assert (levels[lane], "certification import" in found[lane]["cure"]) == ("warn", True)
    assert all(bool(check["cure"]) == (check["level"] != "ok") for check in found.values())


async def test_doctor_fails_with_a_cure(commands: Commands, tmp_path: pathlib.Path) -> None:
    authority = str(tmp_path / "ca")
    assert (await commands.run("certs", "init", authority)).code == 0
    assert (await commands.run("certs", "issue", authority, "a", "--host=10.0.0.5")).code == 0
    folder = tmp_path / "ca"
    code, out, _ = await commands.run(
        "doctor",
        "--tracker=127.0.0.1:1",
        f"--tls-cert={folder}/a.pem",
        f"--tls-key={folder}/a.key",
        f"--tls-ca={folder}/authorities.pem",
        "--host=10.0.0.6",
    )
    assert code == 1
    lines = out.splitlines()
    names = next(n for n, line in enumerate(lines) if "certificates.names" in line)
    assert lines[names].startswith("fail")
    assert lines[names + 1].strip() == "-> meshnet certs issue FOLDER a --host=10.0.0.6"
    assert any(line.startswith("ok") and "certificates.authority" in line for line in lines)
    assert any(line.startswith("fail") and "tracker.127.0.0.1:1" in line for line in lines)


async def check_models(commands: Commands, mesh: dict[str, Any]) -> None:
    code, out, err = await commands.run("models", f"--tracker={mesh['tracker']}", "--json")
    assert code == 0, err
    said = json.loads(out)
    assert said["served"] == [NAME]
    assert "smollm2" in {model["name"] for model in said["known"]}
    code, out, _ = await commands.run("models", f"--url={mesh['url']}")
    assert (code, NAME in out, "smollm2" in out) == (0, True, True)
    code, _, err = await commands.run("models", "--url=http://127.0.0.1:1/v1")
    assert (code, "PEER_UNREACHABLE" in err) == (1, True)


async def check_bench(commands: Commands, mesh: dict[str, Any], tmp_path: pathlib.Path) -> None:
    code, out, err = await commands.run(
        "bench",
        mesh["url"],
        str(MODEL),
        "--compare-stages=1,2",
        "--prompt-tokens=16",
        "--max-tokens=8",
        "--repeats=1",
        f"--svg={tmp_path}/speed.svg",
        "--json",
        impatient=True,
    )
    assert code == 0, err
    assert f"measuring {NAME} at {mesh['url']} (2 times) ...\n" in err
    for stages in ("1 stage", "2 stages"):
        assert f"starting {NAME}, {stages} ...\n" in err
        assert f"measuring {NAME}, {stages} (2 times) ...\n" in err
    said = json.loads(out)
    assert said["machine"]["cores"] >= 1
    assert [result["target"] for result in said["results"]] == [
        f"{NAME} at {mesh['url']}",
        f"{NAME}, 1 stage",
        f"{NAME}, 2 stages",
    ]
    for result in said["results"]:
        assert result["tokens"] == 8
        assert result["first_token_ms"]["median"] > 0
        assert result["decode_tokens_per_s"]["median"] > 0
    assert said["results"][1]["prompt_tokens"] == 16
    picture = (tmp_path / "speed.svg").read_text("utf-8")
    assert ET.fromstring(picture).tag.endswith("svg")
    assert f"{NAME}, 2 stages" in picture
