"""The benchmark runs through and writes what it says; its numbers are not looked at."""

from __future__ import annotations

import json
import pathlib
import subprocess

# Not `serve`, which fetches a model.
SECTIONS = ("streams", "first_token", "memory", "vanish")


def test_quick_run(tmp_path: pathlib.Path) -> None:
    target = tmp_path / "out" / "results.json"
    command = [f"{pathlib.Path(__file__).parent}/gateway", "--quick", f"--json={target}"]
    subprocess.run([*command, *(f"--section={name}" for name in SECTIONS)], check=True)
    results = json.loads(target.read_text())
    assert results["quick"] is True
    for metric in results["metrics"]:
        assert set(metric) == {"name", "value", "unit", "bar", "holds"}
    found = {metric["name"]: metric for metric in results["metrics"]}
    assert {name: metric["bar"] for name, metric in found.items() if metric["bar"]} == {
        "gateway_added_ms_per_token_32_streams": "<= 1",
        "gateway_wrong_streams_of_256": "<= 0",
        "gateway_added_first_token_ms": "<= 20",
        "gateway_growth_mib_10000_requests": "<= 5",
        "gateway_sessions_left_1s_after_100_vanish": "<= 0",
    }
    # What counts faults has none, in a short run either.
    assert found["gateway_wrong_streams_of_256"]["value"] == 0
    assert found["gateway_sessions_left_1s_after_100_vanish"]["value"] == 0
