"""What README.md says of the benchmark, quickly; its numbers are not looked at."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib

from meshnet_gguf.testing.pinned_storage import provide_model

from benchmarks.readme import commands, run

MODEL = pathlib.Path(os.environ["SMOLLM2"]).absolute()
[WHOLE] = commands()


def test_all_sections(tmp_path: pathlib.Path) -> None:
    storage = tmp_path / "storage"
    asyncio.run(provide_model(storage, "smollm2", MODEL))
    done = run(WHOLE, tmp_path, "--quick", "--check", MESHNET_STORAGE=str(storage))
    results = json.loads((tmp_path / "gateway.json").read_text())
    missed = [metric for metric in results["metrics"] if not metric["holds"]]
    assert done.returncode == (3 if missed else 0), done.stderr
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
        "serve_first_token_s": "<= 10",
    }
    assert found["serve_first_token_s"]["value"] > 0
    # What counts faults has none, in a short run either.
    assert found["gateway_wrong_streams_of_256"]["value"] == 0
    assert found["gateway_sessions_left_1s_after_100_vanish"]["value"] == 0
