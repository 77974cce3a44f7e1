"""What README.md says of the benchmark, on the real model with tiny counts: is it so?"""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import re
import xml.etree.ElementTree as ET

import pytest
from meshnet_gguf.testing.pinned_storage import provide_model

from benchmarks.readme import commands, run

MODEL = pathlib.Path(os.environ["SMOLLM2"]).absolute()
WHOLE, QUICK, HELP = commands()
TINY = (
    # More threads than free cores wait for each other, and a test must end on a busy machine.
    "--threads=1",
    "--prompt_tokens=32",
    "--session_prompt_tokens=8",
    "--decode_tokens=8",
)


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("storage")
    asyncio.run(provide_model(folder, "smollm2", MODEL))
    return str(folder)


def test_a_tiny_run_writes_every_row_and_a_picture(tmp_path: pathlib.Path, storage: str) -> None:
    fewer = ("--repeats=1", "--rtt_ms=0,10", "--sessions=1,2", "--check")
    done = run(WHOLE, tmp_path, *TINY, *fewer, MESHNET_STORAGE=storage)
    target = tmp_path / "results.json"
    results = json.loads(target.read_text("utf-8"))
    verdicts = [bar["verdict"] for bar in results["bars"]]
    assert done.returncode == (3 if "missed" in verdicts else 0), done.stderr
    assert {"machine", "plan", "rpc_tuning", "chain", "bars", "rows"} <= set(results)

    rows = {(row["system"], row["rtt_ms"], row["sessions"]): row for row in results["rows"]}
    far = [
        (system, 10, sessions)
        for system in ("meshnet", "rpc-default", "rpc-tuned")
        for sessions in (1, 2)
    ]
    near = [(system, 0, sessions) for system, _, sessions in far]
    assert set(rows) == {*near, *far, ("whole", 0, 1), ("whole", 0, 2)}
    for (system, rtt_ms, sessions), row in rows.items():
        for name in ("prompt_tokens_per_s", "decode_tokens_per_s", "ttft_ms"):
            figure = row[name]
            assert 0 < figure["min"] <= figure["median"] <= figure["max"], (system, name)
        assert row["stages"] == (1 if system == "whole" else 2)
        assert ("floor_ms_per_token" in row) == (system == "meshnet" and rtt_ms > 0)
        assert ("hop_ms" in row) == (system == "meshnet" and sessions == 1)
        assert ("stage_queue" in row) == (system == "meshnet" and sessions == 2)
        assert 0 <= row["others_busy"]["median"] <= 1
        assert len(row["decode_samples"]) == row["samples"]
        for memory in row["resident_mib"].values():
            assert memory["median"] > 5
        seam = row["seam_bytes_per_token"]["median"]
        if system == "whole":
            assert seam == 0
        elif system == "meshnet":
            assert 2312 < seam < 2312 + 1024
        else:
            # The logits alone are 49152 x 4 bytes.
            assert seam > 196_608
    assert set(verdicts) <= {"met", "missed", "not measured"}
    assert len(verdicts) == 8
    ET.fromstring(target.with_suffix(".svg").read_text("utf-8"))


def test_quick_takes_fewer_settings(tmp_path: pathlib.Path, storage: str) -> None:
    done = run(QUICK, tmp_path, *TINY, "--filter=whole", "--check", MESHNET_STORAGE=storage)
    # Nothing to compare with: no bar is missed.
    assert done.returncode == 0, done.stderr
    settings = re.findall(r"^(\S+) +(\d+) +(\d+) +[\d.]+ +[\d.]+ ", done.stdout, re.MULTILINE)
    assert settings == [("whole", "0", "1"), ("whole", "0", "4")]
    assert list(tmp_path.iterdir()) == []


def test_help_shows_the_commands(tmp_path: pathlib.Path) -> None:
    done = run(HELP, tmp_path)
    assert done.returncode == 0
    for command in (WHOLE, QUICK):
        assert f"    {' '.join(command)}\n" in done.stdout
