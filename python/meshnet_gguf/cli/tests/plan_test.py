"""The command `meshnet plan`, and the help of those that serve."""

import json
import os
import pathlib
import subprocess
from typing import Any

import pytest

PROGRAM = pathlib.Path(os.environ["MESHNET"]).absolute()
MODEL = pathlib.Path(os.environ["FIXTURE_TINY"]).absolute()
MACHINES = """
machines:
  - {name: small, memory: 4MB, weights_per_second: 1GB, latency_us: 100}
  - {name: large, memory: 1GB, weights_per_second: 2GB, latency_us: 100}
"""


def meshnet(*arguments: str | pathlib.Path) -> tuple[int, str, str]:
    found = subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, check=False)
    return found.returncode, found.stdout, found.stderr


@pytest.fixture
def machines(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "machines.yaml"
    path.write_text(MACHINES)
    return path


def answer(*arguments: str | pathlib.Path, code: int = 0) -> Any:
    found, out, err = meshnet("plan", MODEL, *arguments, "--json")
    assert found == code, err
    return json.loads(out)


def test_a_plan_for_people_and_for_programs(machines: pathlib.Path) -> None:
    plan = answer("--machines", machines)
    assert [(stage["machine"], stage["layers"]) for stage in plan["stages"]] == [("large", [0, 8])]
    assert plan["proven"] is True
    assert plan["total_us"] == plan["stages"][0]["compute_us"] > 0
    code, out, _ = meshnet("plan", MODEL, "--machines", machines)
    assert code == 0
    assert "large" in out
    assert "[0, 8)" in out
    assert "tokens/s" in out
    assert "caches are not reckoned with" not in out


def test_a_useless_split_is_refused_unless_accepted(machines: pathlib.Path) -> None:
    refused = answer("--machines", machines, "--stages=2", code=1)
    assert refused["error"]["reason"] == "SPLIT_USELESS"
    slower = answer("--machines", machines, "--stages=2", "--accept-slower")
    assert len(slower["stages"]) == 2
    split = ",".join(f"{s['machine']}={s['layers'][0]}:{s['layers'][1]}" for s in slower["stages"])
    assert answer("--machines", machines, f"--split={split}", "--accept-slower") == slower
    assert answer("--machines", machines, f"--split={split}", code=1) == refused


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "expected one GGUF file"),
        ([MODEL], "expected one of --machines and --tracker"),
        ([MODEL, "--tracker=127.0.0.1:1"], "expected --model-id"),
        ([MODEL, "--machines=x", "--split=a=0:8", "--stages=1"], "got both"),
    ],
)
def test_command_lines_that_make_no_sense(arguments: list[str | pathlib.Path], said: str) -> None:
    code, _, err = meshnet("plan", *arguments)
    assert code == 2
    assert said in err


def test_a_tracker_that_is_not_there() -> None:
    refused = answer("--tracker=127.0.0.1:1", "--model-id=m", code=1)
    assert refused["error"]["reason"] == "PEER_UNREACHABLE"


def test_the_sample_of_machines_is_a_file_of_machines(tmp_path: pathlib.Path) -> None:
    code, out, _ = meshnet("plan", "--sample")
    assert code == 0
    (tmp_path / "sample.yaml").write_text(out)
    plan = answer("--machines", tmp_path / "sample.yaml")
    assert plan["stages"][0]["machine"] == "paris"


def test_a_node_configuration_is_checked(tmp_path: pathlib.Path) -> None:
    code, out, _ = meshnet("node", "--sample")
    assert code == 0
    path = tmp_path / "node.yaml"
    path.write_text(out)
    code, _, err = meshnet("node", "--config", path, "--check")
    assert (code, "configuration_valid" in err) == (0, True)
    path.write_text(out.replace("tracker:", "trackers:"))
    code, out, err = meshnet("node", "--config", path, "--json")
    assert code == 1
    assert json.loads(out)["error"]["reason"] == "CONFIGURATION_INVALID"
    assert "'tracker' is a required property" in err or "'trackers' was unexpected" in err


@pytest.mark.parametrize("command", ["node", "plan", "relay", "tracker"])
def test_help_shows_an_example_and_the_flags(command: str) -> None:
    code, out, _ = meshnet(command, "--help")
    assert code == 0
    assert f"    meshnet {command} " in out
    assert ("--listen=LISTEN" in out) == (command in ("relay", "tracker"))
    assert "--json" in out
