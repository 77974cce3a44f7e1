"""A small contract for lanes, locked and approved, and what it certifies: for tests."""

from __future__ import annotations

import datetime
import pathlib
from typing import Any

from meshnet.signing import SigningKey

from meshnet_gguf import performance_contract
from meshnet_gguf.models import pinned_models
from meshnet_gguf.performance_contract import PerformanceContract, default_folder

__all__ = ["RECIPE", "record_that_certifies", "write_lane_contract"]

RECIPE = {
    "accelerator": "NVIDIA H200",
    "accelerator_driver": "580.65.06 CUDA 13000",
    "backend": "cuda",
    "boundary_schema": "dense.residual/1",
    "build_options": "gcc 12.2.0 -O3",
    "kv_layout": "slot",
    "kv_type": "f16",
    "llama_cpp_commit": "7fe450e1",
    "llama_cpp_patches_sha256": "a" * 64,
    "prefill_chunk": "256",
}


def write_lane_contract(
    folder: pathlib.Path, approver: SigningKey | None, name: str = "lane.v1.yaml"
) -> PerformanceContract:
    """The project's contract for lanes with less to run and bounds that any machine keeps.

    With another name it is that for mixtures.
    """
    text = (default_folder() / name).read_text("utf-8")
    less = {
        "minimum_samples: 3": "minimum_samples: 1",
        "tokens: 128": "tokens: 24",
        "tokens: 1024": "tokens: 40",
        "context_tokens: 2048": "context_tokens: 256",
        "output_tokens: 64": "output_tokens: 8",
        "at_least: 3\n": "at_least: 0.001\n",
        "at_most: 30000": "at_most: 600000",
    }
    if name == "lane.v1.yaml":
        less["at_least: 0.5"] = "at_least: 0.001"
    for old, new in less.items():
        if old not in text:
            raise AssertionError(f"{name} has no {old!r} any more")
        text = text.replace(old, new)
    file = folder / name
    file.write_text(text, "utf-8")
    contract = PerformanceContract.read(file)
    performance_contract.lock(contract, datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC))
    if approver is None:
        return contract
    now = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
    return performance_contract.approve(contract, approver, "A. Tester", now)


def record_that_certifies(contract: PerformanceContract) -> dict[str, Any]:
    """A record, made up, under which a lane is certified; its recipe is RECIPE."""
    worker = {
        "engine": "llama",
        "evidence": "DARK",
        "artifact_sha256": pinned_models()["smollm2"].sha256,
        "recipe": RECIPE,
        "recipe_fingerprint": "f" * 64,
    }
    row = {
        "identical": True,
        "ttft_ms": 50.0,
        "last_ms_per_token": 10.0,
        "whole_ms_per_token": 9.0,
        "whole_ttft_ms": 40.0,
    }
    run = {
        "workers": [worker, dict(worker)],
        "rows": [row, dict(row)],
        "sessions": {"together": 4, "tokens": 8, "identical": True},
        "cancellations": [{"cancel_ms": 1.0, "release_ms": 1.0}] * 3,
        "left_behind": [{"open_sessions": 0, "kv_bytes": 0, "queued_steps": 0}] * 2,
    }
    return {
        "schema": "meshnet.certify/1",
        "begun_at": "2026-02-01T00:00:00+00:00",
        "model_id": "smollm2",
        "fingerprint": "f" * 64,
        "recipe": RECIPE,
        "contract": {"name": "lane", "version": 1, "sha256": contract.sha256},
        "machine": {"cpu": "x"},
        "runs": [run],
    }
