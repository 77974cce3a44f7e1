"""Runs a model over workers and whole, compares them bit for bit, and writes an evidence record.

    meshnet evidence V4-00001-of-00004.gguf --stages 4 --record evidence.json
    meshnet evidence tiny.gguf --contract deepseek4-tiny-fixture --record evidence.json

The model must be the one of the contract: nothing is fetched, and another one is refused with every
difference. The chain runs first, the whole model after it, so that memory need hold the weights
once. The record has the class of the contract (real-model or fixture), the artifact's hash, the
recipe, the machine with its drivers, parity and measurements. The lane stays dark: a record is what
a certification can be signed over.

Exit code 1 when something was refused, failed, or differs; the record of a difference is written.
"""

from __future__ import annotations

import asyncio
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from absl import app, flags

from meshnet_gguf import evidence, progress
from meshnet_gguf.cli import output, terminal
from meshnet_gguf.contract import load_contract
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.measurement import Plan
from proto.meshnet.shard.v1 import errors_pb2

__all__ = ["run"]

_PLAN = pathlib.Path(__file__).parents[1] / "evidence_plan.json"

_CONTRACT = flags.DEFINE_string(
    "contract", "deepseek-v4-flash", "Contract of the model; it must satisfy it."
)
_STAGES = flags.DEFINE_integer(
    "stages", None, "Number of stages; as the plan says, without it.", lower_bound=1
)
_THREADS = flags.DEFINE_integer(
    "threads", 0, "Compute threads of each worker; 0 = the cores' share.", lower_bound=0
)
_PLAN_FILE = flags.DEFINE_string("plan", None, "A JSON file with another plan than the fixed one.")
_MANIFEST = flags.DEFINE_string(
    "manifest",
    None,
    "Manifest of the artifact; its hash is the identity, and workers verify by it.",
)
_ARTIFACT = flags.DEFINE_string(
    "artifact_sha256", "", "Refuse an artifact with another hash, as its manifest gives it."
)
_RECORD = flags.DEFINE_string("record", None, "File for the record.")


def run(arguments: Sequence[str]) -> int:
    """The command."""
    if len(arguments) > 1:
        raise app.UsageError(f"expected one GGUF file, got {len(arguments)}")
    if not arguments:
        contract = load_contract(_CONTRACT.value)
        raise MeshnetError(
            errors_pb2.REASON_ARTIFACT_UNREADABLE,
            f"the weights are missing: give {evidence.wanted(contract)}",
        )
    subject = evidence.identify(output.given_path(arguments[0]), _CONTRACT.value)
    plan = Plan.load(output.given_path(_PLAN_FILE.value) if _PLAN_FILE.value else _PLAN)
    record = asyncio.run(
        evidence.collect(
            subject,
            plan,
            stages=_STAGES.value,
            threads=_THREADS.value,
            manifest=output.given_path(_MANIFEST.value) if _MANIFEST.value else None,
            expected_artifact_sha256=_ARTIFACT.value,
            say=progress.say,
        )
    )
    if _RECORD.value:
        evidence.write(record, output.given_path(_RECORD.value))
    if output.wants_json():
        output.print_json(record)
    else:
        _show(record)
    return 0 if record["outcome"] == "identical" else 1


def _show(record: Mapping[str, Any]) -> None:
    results = record["results"]
    titles = ("prompt", "first token", "prompt/s", "ms/token", "whole", "difference")
    rows = [
        (
            str(row["prompt_tokens"]),
            f"{row['ttft_ms']:.0f} ms",
            f"{row['prompt_tokens_per_s']:.0f}",
            f"{row['last_ms_per_token']:.1f}",
            f"{row['whole_ms_per_token']:.1f}",
            f"{row['max_logit_difference']:g}",
        )
        for row in results["rows"]
    ]
    terminal.show(
        terminal.table(titles, rows, numbers=titles),
        f"{record['outcome']} over {len(results['layers'])} workers: evidence of class "
        f"{record['class']}, contract {record['contract']['name']}, artifact "
        f"{record['artifact']['sha256']}; the lane stays {record['lane']}",
    )
