"""What README.md says of the benchmark, with shorter prompts; its times are not looked at."""

from __future__ import annotations

import json
import pathlib
import xml.etree.ElementTree as ET

from benchmarks.readme import commands, run

[WHOLE] = commands()
# Of a row, or of each stage in it.
TIMES = (
    *("ttft_ms", "prompt_tokens_per_s", "first_ms_per_token", "last_ms_per_token"),
    *("worst_ms_per_token", "whole_ms_per_token", "whole_ttft_ms"),
)
OF_STAGES = ("stage_decode_ms_per_token", "resident_bytes", "kv_bytes", "kv_budget_bytes")


def test_a_quick_run_writes_every_row_and_a_picture(tmp_path: pathlib.Path) -> None:
    done = run(WHOLE, tmp_path, "--quick")
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "long.json").read_text("utf-8"))
    assert (results["evidence"], results["quick"]) == ("fixture", True)
    crossed = [
        (row["prompt_tokens"], row["ring_wraps"], row["csa_blocks"], row["hca_blocks"])
        for row in results["rows"]
    ]
    # Rings of 512 cells; blocks end every 4 and every 128 tokens.
    assert crossed == [(260, 0, 34, 1), (600, 0, 34, 1)]
    for row in results["rows"]:
        assert row["identical"] is True
        assert (row["compared_tokens"], row["compared_logit_rows"]) == (144, 8)
        assert [name for name in TIMES if row[name] <= 0] == []
        for name in OF_STAGES:
            assert len(row[name]) == 3
            assert min(row[name]) > 0, name
        assert len(row["seam_bytes_per_token"]) == 2
        assert min(row["seam_bytes_per_token"]) > 0
        assert row["chunk_bytes"] > 0
        assert row["fragments_per_chunk"] >= 1
    [cancelled] = results["cancellations"]
    assert cancelled["cancel_ms"] > 0
    assert cancelled["release_ms"] > 0
    ET.fromstring((tmp_path / "long.svg").read_text("utf-8"))


def test_a_model_that_cannot_be_read_is_exit_status_1(tmp_path: pathlib.Path) -> None:
    done = run(WHOLE, tmp_path, "--model=missing.gguf")
    assert done.returncode == 1
    assert "missing.gguf" in done.stderr
    assert list(tmp_path.iterdir()) == []
