"""The command `meshnet contract`."""

import json
import os
import pathlib
import shutil
import subprocess
from typing import Any

from meshnet_gguf.testing.empty_results import write_empty_results

PROGRAM = pathlib.Path(os.environ["MESHNET"]).absolute()
CONTRACTS = pathlib.Path(os.environ["CONTRACT"]).absolute().parent


def contract(*arguments: str | pathlib.Path, code: int = 0) -> Any:
    command = [PROGRAM, "contract", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == code, done.stderr.decode()
    return json.loads(done.stdout)


def test_our_contracts_are_locked_and_nobody_has_signed() -> None:
    found = contract("check")["contracts"]
    names = [row["contract"] for row in found]
    assert names == ["alpha.v1", "beta.v1", "lane.v1", "mixture.v1"]
    alpha = found[0]
    lock = json.loads((CONTRACTS / "lock.json").read_text())
    assert alpha["sha256"] == lock["alpha.v1"]["sha256"]
    assert (alpha["approved_by"], alpha["approval_is_trusted"]) == (None, False)


def test_from_the_lock_to_a_decision(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "alpha.v1.yaml"
    shutil.copyfile(CONTRACTS / file.name, file)
    unlocked = contract("check", file, code=1)["error"]
    assert unlocked["reason"] == "CONFIGURATION_INVALID"
    assert "is not locked" in unlocked["message"]
    locked = contract("lock", file)

    subprocess.run([PROGRAM, "keys", "make", tmp_path / "me.pem"], check=True, capture_output=True)
    contract("approve", file, "--key", tmp_path / "me.pem", "--by", "A. Person")
    trusted = ("--trusted-key", tmp_path / "me.pem.pub")
    (checked,) = contract("check", file, *trusted)["contracts"]
    assert (checked["approved_by"], checked["approval_is_trusted"]) == ("A. Person", True)

    results = write_empty_results(tmp_path, locked["sha256"])
    outcome = contract("evaluate", file, results, *trusted, code=3)
    assert (outcome["decision"], outcome["passed"]) == ("optimize measured bottleneck", False)
    assert "dense-parity: expected >= 1, got nothing usable" in outcome["reasons"]

    results = write_empty_results(tmp_path, "0" * 64)
    refused = contract("evaluate", file, results, *trusted, code=1)["error"]
    assert "measure anew under it" in refused["message"]
