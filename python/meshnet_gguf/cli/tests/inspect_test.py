import hashlib
import json
import os
import pathlib
import subprocess
from typing import Any

import pytest

TINY = os.environ["FIXTURE_TINY"]


def meshnet(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = pathlib.Path(os.environ["MESHNET"]).absolute()
    return subprocess.run(
        [program, *arguments], capture_output=True, text=True, check=False, timeout=60
    )


def answer(*arguments: str, code: int = 0) -> Any:
    result = meshnet(*arguments, "--json")
    assert result.returncode == code, result.stderr
    return json.loads(result.stdout)


def test_help_lists_commands_and_each_has_an_example() -> None:
    overview = meshnet("--help")
    assert overview.returncode == 0
    assert "  inspect  " in overview.stdout
    usage = meshnet("inspect", "--help")
    assert usage.returncode == 0
    assert "    meshnet inspect model.gguf\n" in usage.stdout
    assert "--cuts=CUTS" in usage.stdout
    assert "--json" in usage.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Commands:"),
        (("explode",), "expected a command of "),
        (("inspect",), "expected one GGUF file, got 0"),
        (("inspect", "a", "b"), "expected one GGUF file, got 2"),
        (("inspect", TINY, "--nonsense"), "Unknown command line flag 'nonsense'"),
        (("inspect", TINY, "--cuts=3", "--stages=2"), "expected --cuts or --stages"),
        (("inspect", TINY, "--cuts=x"), "expected layers such as 12,30"),
        (("inspect", TINY, "--cuts=5,3"), "expected ascending layers"),
    ],
)
def test_command_line_that_makes_no_sense(arguments: tuple[str, ...], message: str) -> None:
    result = meshnet(*arguments)
    assert result.returncode == 2
    assert message in result.stdout + result.stderr


def test_report_for_machines() -> None:
    found = answer("inspect", TINY, "--cuts=3,6")
    assert found["architecture"] == "deepseek4"
    assert (found["main_layers"], found["mtp_layers"]) == (8, 1)
    assert [stage["layers"] for stage in found["stages"]] == [[0, 3], [3, 6], [6, 8]]
    assert found["layers"][2]["states"][0] == "raw_window"
    assert len(found["ranges"]) == 36
    assert sum(found["class_bytes"].values()) == found["tensor_bytes"]
    tensors = {tensor["name"]: tensor for tensor in found["tensors"]}
    assert tensors["blk.4.indexer.proj.weight"]["class"] == "indexer"
    assert tensors["blk.4.indexer.proj.weight"]["stages"] == [1]
    assert tensors["output.weight"]["stages"] == [2]


def test_split_set_has_the_tensors_of_the_whole() -> None:
    first = os.environ["FIXTURE_TINY_SPLIT"].split()[0]
    split, whole = answer("inspect", first), answer("inspect", TINY)
    assert len(split["files"]) == 3
    assert split["class_bytes"] == whole["class_bytes"]
    assert split["stages"] == whole["stages"]


def test_report_for_people() -> None:
    result = meshnet("inspect", TINY, "--stages=2")
    assert result.returncode == 0
    assert "'deepseek4': 8 layers and 1 of MTP, 264 tensors" in result.stdout
    assert "may be cut at: 3-7\n" in result.stdout
    assert "with token_ids for the stage behind: 1-2\n" in result.stdout


def test_picture_is_written(tmp_path: pathlib.Path) -> None:
    assert meshnet("inspect", TINY, f"--svg={tmp_path / 'a.svg'}").returncode == 0
    assert (tmp_path / "a.svg").read_text().startswith("<svg ")


def test_contract_accepts_what_is_meant_and_refuses_another() -> None:
    assert meshnet("inspect", TINY, "--contract=deepseek4-tiny-fixture").returncode == 0
    error = answer("inspect", TINY, "--contract=deepseek-v4-flash", code=1)["error"]
    assert error["reason"] == "ARTIFACT_MISMATCH"
    assert "expected 43 main layers" in error["message"]
    error = answer("inspect", TINY, "--contract=unknown", code=1)["error"]
    assert error["reason"] == "CONFIGURATION_INVALID"


def test_report_names_the_checkpoint_and_the_exact_artifact(tmp_path: pathlib.Path) -> None:
    manifest = tmp_path / "manifest.json"
    made = meshnet("manifest", TINY, "--repository=example/tiny", f"--out={manifest}")
    assert made.returncode == 0, made.stderr
    plain = answer("inspect", TINY)
    assert (plain["contract"], plain["artifact"]) == (None, None)
    found = answer("inspect", TINY, "--contract=deepseek4-tiny-fixture", f"--manifest={manifest}")
    assert found["contract"]["name"] == "deepseek4-tiny-fixture"
    assert found["contract"]["source"]["model"] == "//tests/fixtures:deepseek4_tiny"
    assert found["artifact"]["sha256"] == hashlib.sha256(manifest.read_bytes()).hexdigest()
    assert found["artifact"]["origin"]["repository"] == "example/tiny"
    assert found["tensors"] == plain["tensors"]
    first = os.environ["FIXTURE_TINY_SPLIT"].split()[0]
    error = answer("inspect", first, f"--manifest={manifest}", code=1)["error"]
    assert error["reason"] == "ARTIFACT_MISMATCH"


def test_refusals_have_a_reason(tmp_path: pathlib.Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF")
    error = answer("inspect", str(bad), code=1)["error"]
    assert error["reason"] == "ARTIFACT_INVALID"
    error = answer("inspect", TINY, "--cuts=8", code=1)["error"]
    assert error["reason"] == "LAYER_RANGE_INVALID"
    assert error["message"] == ("it cannot be cut at 8: MTP stays with the last main layer's stage")
    assert "the model has 8 layers" in meshnet("inspect", TINY, "--cuts=9").stderr
