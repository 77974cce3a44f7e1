"""The whole benchmark on the real model with tiny counts: is what it writes well-formed?"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import xml.etree.ElementTree as ET

HERE = pathlib.Path(__file__).absolute().parent


def test_a_tiny_run_writes_every_row_and_a_picture(tmp_path: pathlib.Path) -> None:
    model = os.environ.get("MESHNET_MODEL") or next(
        str(path) for path in HERE.parent.parent.rglob("SmolLM2-135M-Instruct.Q4_1.gguf")
    )
    target = tmp_path / "out" / "results.json"
    command = [
        *(os.environ.get("MESHNET_DENSE", str(HERE / "dense")).split()),
        f"--model={model}",
        f"--json={target}",
        "--repeats=1",
        # More threads than free cores wait for each other, and a test must end on a busy machine.
        "--threads=1",
        "--rtt_ms=0,10",
        "--sessions=1,2",
        "--prompt_tokens=32",
        "--session_prompt_tokens=8",
        "--decode_tokens=8",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads(target.read_text("utf-8"))

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
    assert {bar["verdict"] for bar in results["bars"]} <= {"met", "missed", "not measured"}
    assert len(results["bars"]) == 8
    ET.fromstring(target.with_suffix(".svg").read_text("utf-8"))


def test_help_shows_an_example() -> None:
    command = [*(os.environ.get("MESHNET_DENSE", str(HERE / "dense")).split()), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "tools/bazel run //benchmarks:dense -- --json results.json" in done.stdout
