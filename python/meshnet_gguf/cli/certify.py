"""Certifies a lane on the hardware at hand: parity, concurrency, cancellation, cleanup and speed.

    meshnet certify smollm2 --model-id smollm2 --evidence lane.json
    meshnet certify --evidence lane.json --trusted-key approver.pem.pub \\
        --key certifier.pem --records lane.records
    meshnet certify smollm2 --mixed --head-flag=--device=cpu --evidence mixture.json

Runs the contract for lanes with a chain of workers and the whole model, and writes the raw
measurements with hardware, driver, runtime, model and recipe. With --key the record is judged, and
a line that trackers take (`meshnet certification import`) is added to --records; without a model
that is done with evidence that is there. The model is a pinned one, by name or as a file. Give
--threads as workers there will have them: the recipe names them, and a record is for one recipe.

With --mixed it is about routes over two lanes, which are refused without a record of their own: the
first half of a chain's stages is started with each --head-flag (and is --head-program), the second
with each --tail-flag. The whole model runs on both lanes. The record holds for these two recipes in
this order, and for nothing else.

Exit code: 0 when the lane is certified (without --key: when it would be), 3 when it is not, with
every reason. A fixture engine, a driver that computes on the CPU, a model that is not pinned and a
contract that no trusted person has approved never certify.
"""

from __future__ import annotations

import asyncio
import pathlib
import time
from collections.abc import Sequence
from typing import Any

from absl import app, flags
from meshnet.signing import SigningKey, TrustedKeys

from meshnet_gguf import certify, evidence, progress
from meshnet_gguf.cli import output, terminal
from meshnet_gguf.measurement import LaneWorkers
from meshnet_gguf.models import fetch_model, pinned_models
from meshnet_gguf.performance_contract import PerformanceContract, default_folder

__all__ = ["run"]

_MODEL_ID = flags.DEFINE_string(
    "model_id", "", "The model's id at the tracker; its own, unless set."
)
_EVIDENCE = flags.DEFINE_string("evidence", None, "File for the measurements, or with them.")
_RECORDS = flags.DEFINE_string(
    "records", None, "File that gets signed records; this one as a line."
)
_KEY = flags.DEFINE_string(
    "key", None, "PEM file of the private key that signs; `meshnet keys` makes one."
)
_TRUSTED = flags.DEFINE_multi_string(
    "trusted_key",
    [],
    "PEM file of public keys that count; for the contract's approval; repeatable.",
)
_CONTRACT = flags.DEFINE_string(
    "contract", None, "Contract of the model; another than this project's for lanes."
)
_MIXED = flags.DEFINE_bool("mixed", False, "Certify routes over two lanes, one behind the other.")
_HEAD_FLAG = flags.DEFINE_multi_string(
    "head_flag", [], "With --mixed: a flag of the first lane's workers; repeatable."
)
_TAIL_FLAG = flags.DEFINE_multi_string(
    "tail_flag", [], "With --mixed: a flag of the second lane's workers; repeatable."
)
_HEAD_PROGRAM = flags.DEFINE_string(
    "head_program", None, "With --mixed: the first lane's worker program; the usual, unless set."
)
_TAIL_PROGRAM = flags.DEFINE_string(
    "tail_program", None, "With --mixed: the second lane's worker program; the usual, unless set."
)
_STAGES = flags.DEFINE_integer(
    "stages", 2, "Number of stages; workers of the chain.", lower_bound=2
)
_THREADS = flags.DEFINE_integer(
    "threads", 0, "Compute threads of each worker; 0 = the cores' share.", lower_bound=0
)
_DAYS = flags.DEFINE_integer(
    "days", 0, "Days of life of what is made; 0 = for ever.", lower_bound=0
)

_NOT_CERTIFIED = 3


def run(arguments: Sequence[str]) -> int:
    """The command."""
    if len(arguments) > 1 or not _EVIDENCE.value:
        raise app.UsageError("expected at most one model, and --evidence")
    if bool(_KEY.value) != bool(_RECORDS.value):
        raise app.UsageError("expected --key and --records together")
    lanes = (
        _lane_workers(_HEAD_FLAG.value, _HEAD_PROGRAM.value),
        _lane_workers(_TAIL_FLAG.value, _TAIL_PROGRAM.value),
    )
    if (lanes[0] != lanes[1]) != (_MIXED.value and bool(arguments)):
        raise app.UsageError(
            "expected --mixed with a model, and flags or programs in which the two lanes differ"
        )
    target = output.given_path(_EVIDENCE.value)
    with output.control_errors():
        trusted = TrustedKeys.load(output.given_path(name) for name in _TRUSTED.value)
        key = SigningKey.load(output.given_path(_KEY.value)) if _KEY.value else None
        record = None if arguments else certify.read_record(target)
        is_mixture = _MIXED.value or (record is not None and certify.mixture_in(record) is not None)
        contract = PerformanceContract.read(
            output.given_path(_CONTRACT.value)
            if _CONTRACT.value
            else default_folder() / ("mixture.v1.yaml" if is_mixture else "lane.v1.yaml")
        )
        if record is None:
            mixed = lanes if is_mixture else None
            record = asyncio.run(
                certify.collect(_target(arguments[0]), contract, mixed, say=progress.say)
            )
            evidence.write(record, target)
        return _judge(record, contract, trusted, key)


def _lane_workers(more: Sequence[str], program: str | None) -> LaneWorkers:
    return LaneWorkers(tuple(more), output.given_path(program) if program else None)


def _target(name: str) -> certify.Target:
    pinned = name in pinned_models()
    model = fetch_model(name) if pinned else output.given_path(name)
    model_id = _MODEL_ID.value or (name if pinned else model.stem)
    return certify.Target(model, model_id, _STAGES.value, _THREADS.value)


def _judge(
    record: dict[str, Any],
    contract: PerformanceContract,
    trusted: TrustedKeys,
    key: SigningKey | None,
) -> int:
    reasons = certify.refusals(record, contract, trusted)
    record_id = ""
    if key is not None and not reasons:
        now = time.time_ns() // 1_000_000
        expires = now + _DAYS.value * 86_400_000 if _DAYS.value else 0
        signed = certify.certify(record, contract, trusted, key, issued_ms=now, expires_ms=expires)
        record_id = signed.record_id
        _append(output.given_path(str(_RECORDS.value)), signed.encode())
    if output.wants_json():
        output.print_json(
            {
                "certified": not reasons and key is not None,
                "certifies": not reasons,
                "reasons": reasons,
                "record_id": record_id,
                "model_id": record["model_id"],
                "fingerprint": record["fingerprint"],
                "backend": _backend(record),
            }
        )
    else:
        lane = f"{record['model_id']} on {_backend(record)}"
        if reasons:
            terminal.show(f"{lane} stays dark:", *(f"  {reason}" for reason in reasons))
        elif record_id:
            terminal.show(f"{lane} is certified: record {record_id}")
        else:
            terminal.show(f"{lane} can be certified; give --key and --records")
    return _NOT_CERTIFIED if reasons else 0


def _backend(record: dict[str, Any]) -> str:
    """The lane's, or both lanes' in their order."""
    recipes = certify.recipes_in(record).values()
    return " before ".join(recipe.get("backend", "no backend") for recipe in recipes)


def _append(file: pathlib.Path, line: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as records:
        records.write(line + b"\n")
