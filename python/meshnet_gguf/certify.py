"""Certification of a lane: what has to hold on real hardware, and what ends a certification.

    record = await collect(target, contract, trusted, key_id=key.key_id)
    refusals(record, contract, trusted)              # empty: it certifies
    certification = certify(record, contract, trusted, key)
    stale(record, [capability.recipe], contract)     # what has changed since, with both values

    record = await collect(target, contract, (head, tail))

is about a mixture: a chain whose first stages are of one lane and whose last are of another.

A record holds the raw measurements of parity, concurrency, cancellation, cleanup and speed with
hardware, driver, runtime, model and recipe, of a mixture those of both lanes. Whether it certifies
is worked out from them each time, so no field of it says so. The signed line that trackers take
(meshnet.certification) carries the record's hash. A fixture engine, a program that stands in for
hardware, a model that nobody has pinned, and a contract that no trusted person has approved never
certify.
"""

from __future__ import annotations

import datetime
import hashlib
import itertools
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from meshnet import certification
from meshnet.certification import Certification, Lane
from meshnet.fingerprints import Mixture
from meshnet.signing import SigningKey, TrustedKeys

from meshnet_gguf import performance_contract
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.machine import machine_facts
from meshnet_gguf.measurement import LaneWorkers, Plan, measure, measure_mixture
from meshnet_gguf.models import pinned_models
from meshnet_gguf.performance_contract import PerformanceContract
from meshnet_gguf.recipe import LANE_KINDS, mixture_of
from proto.meshnet.shard.v1 import errors_pb2

__all__ = [
    "BINDINGS",
    "MIXTURE_SCHEMA",
    "SCHEMA",
    "Change",
    "Target",
    "certify",
    "collect",
    "encode",
    "mixture_in",
    "read_record",
    "recipes_in",
    "refusals",
    "stale",
]

SCHEMA: Final = "meshnet.certify/1"
# Of a mixture.
MIXTURE_SCHEMA: Final = "meshnet.certify-mixture/1"

# What a certification holds for, by recipe fields. Each kind of change ends it. What no kind names
# ends it as well.
BINDINGS: Final[Mapping[str, tuple[str, ...]]] = {
    "pin": ("llama_cpp_commit",),
    "patches": ("llama_cpp_patches_sha256",),
    "boundary": ("activation_dtype", "boundary_schema", "boundary_sha256", "wire_dtype"),
    "cache layout": ("kv_layout", "kv_type", "rollback_tokens"),
    **LANE_KINDS,
    "model": ("adapter", "architecture", "artifact_sha256", "quantization", "tokenizer_sha256"),
}

# Programs that stand in for hardware, should a worker not know that it runs on one.
_SOFTWARE: Final = ("llvmpipe", "lavapipe", "swiftshader", "software", "softpipe")
_SESSIONS: Final = 4
_CANCELLATIONS: Final = 3
_LOGIT_ROWS: Final = 16
_CHUNK: Final = 256
_ROLLBACK: Final = 64


@dataclass(frozen=True)
class Target:
    """What shall be certified: a model on this machine, under the name that routes use."""

    model: pathlib.Path
    model_id: str
    stages: int = 2
    threads: int = 0
    manifest: pathlib.Path | None = None


@dataclass(frozen=True)
class Change:
    """Why a record no longer holds."""

    kind: str
    field: str
    before: str | None
    now: str | None

    def __str__(self) -> str:
        """In words."""
        return f"{self.kind}: {self.field} was {self.before}, is {self.now}"


def plan_of(contract: PerformanceContract, stages: int) -> Plan:
    """What a contract's lanes say is run."""
    (chain,) = (lane for lane in contract.terms["lanes"] if lane["id"] == "chain")
    tokens = {prompt["id"]: prompt["tokens"] for prompt in contract.terms["prompts"]}
    return Plan(
        stages=stages,
        context_tokens=chain["context_tokens"],
        prefill_chunk_tokens=_CHUNK,
        rollback_tokens=_ROLLBACK,
        prompt_tokens=tuple(tokens[name] for name in chain["prompts"]),
        decode_tokens=chain["output_tokens"],
        compared_logit_rows=_LOGIT_ROWS,
        cancellations=_CANCELLATIONS,
        sessions=_SESSIONS,
    )


async def collect(
    target: Target,
    contract: PerformanceContract,
    mixed: tuple[LaneWorkers, LaneWorkers] | None = None,
    *,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Runs the contract on the hardware at hand, as often as it wants samples.

    Over a chain of one lane, or of two: `mixed` says how the head's workers and the tail's start.

    Raises MeshnetError: the contract is not locked or is not one for lanes, or the run failed.
    """
    performance_contract.check(contract)
    lanes = {lane["id"] for lane in contract.terms["lanes"]}
    if lanes != {"whole", "chain"}:
        raise MeshnetError(
            errors_pb2.REASON_CONFIGURATION_INVALID,
            f"expected a contract for lanes, with the lanes chain and whole, {contract.key} has "
            f"{', '.join(sorted(lanes))}",
        )
    plan = plan_of(contract, target.stages)
    begun = _now()
    runs = []
    for number in range(contract.terms["minimum_samples"]):
        say(f"run {number + 1} of {contract.terms['minimum_samples']}")
        how: Any = {"threads": target.threads, "manifest": target.manifest, "say": say}
        if mixed is None:
            runs.append(await measure(target.model, plan, **how))
        else:
            runs.append(await measure_mixture(target.model, plan, *mixed, **how))
    worker = runs[0]["workers"][0]
    if mixed is None:
        identity = {
            "schema": SCHEMA,
            "fingerprint": worker["recipe_fingerprint"],
            "recipe": worker["recipe"],
        }
    else:
        mixture = Mixture(**runs[0]["mixture"])
        identity = {
            "schema": MIXTURE_SCHEMA,
            "fingerprint": mixture.fingerprint,
            "mixture": asdict(mixture),
            "recipes": runs[0]["recipes"],
        }
    return identity | {
        "begun_at": begun,
        "ended_at": _now(),
        "model_id": target.model_id,
        "contract": _contract_name(contract),
        "machine": machine_facts(),
        "runtime": {"engine": worker["engine"], "worker_version": worker["worker_version"]},
        "model": {
            "file": target.model.name,
            "bytes": target.model.stat().st_size,
            "artifact_sha256": worker["artifact_sha256"],
        },
        "plan": asdict(plan),
        "runs": runs,
    }


def _contract_name(contract: PerformanceContract) -> dict[str, Any]:
    return {
        "name": contract.terms["name"],
        "version": contract.terms["version"],
        "sha256": contract.sha256,
    }


def refusals(
    record: Mapping[str, Any], contract: PerformanceContract, trusted: TrustedKeys
) -> list[str]:
    """Why the record does not certify; empty when it does.

    Raises MeshnetError (CONFIGURATION_INVALID): the record is of another contract, or malformed.
    """
    try:
        found = [*_not_real(record), *_not_kept(record)]
        outcome = performance_contract.evaluate(
            contract, _results(record, is_real=not list(_not_real(record))), trusted
        )
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise MeshnetError(
            errors_pb2.REASON_CONFIGURATION_INVALID,
            f"expected a record of `meshnet certify`, got one without what it needs: {error!r}",
        ) from error
    return [*found, *(f"speed contract: {reason}" for reason in outcome.reasons)]


def _is_mixture(record: Mapping[str, Any]) -> bool:
    return bool(record["schema"] == MIXTURE_SCHEMA)


def _lanes(record: Mapping[str, Any]) -> list[str]:
    """The fingerprints of the record's lanes, in order."""
    if _is_mixture(record):
        return [record["mixture"]["head"], record["mixture"]["tail"]]
    return [record["fingerprint"]]


def _workers(record: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for run in record["runs"]:
        yield from run["workers"]


def _not_real(record: Mapping[str, Any]) -> Iterator[str]:
    """What makes it no evidence of hardware and a real model."""
    workers = list(_workers(record))
    engines = {worker["engine"] for worker in workers}
    if engines != {"llama"}:
        yield f"expected the llama engine, got {', '.join(sorted(engines)) or 'none'}: a fixture"
    if any(worker["evidence"] != "DARK" for worker in workers):
        yield "a worker calls its own results fixture evidence: no hardware computed them"
    for worker in workers:
        named = " ".join(
            worker["recipe"].get(field, "") for field in ("accelerator", "accelerator_driver")
        ).lower()
        if any(name in named for name in _SOFTWARE):
            yield f"expected hardware, the accelerator is a program: {named.strip()}"
            break
    if {worker["recipe_fingerprint"] for worker in workers} != set(_lanes(record)):
        yield "the workers had several fingerprints, or another than the record's"
    if _is_mixture(record):
        yield from _not_mixed(record)
    pinned = {
        digest
        for model in pinned_models().values()
        for digest in (model.sha256, model.manifest.artifact_sha256)
    }
    artifacts = {worker["artifact_sha256"] for worker in workers}
    if not artifacts <= pinned:
        yield f"expected a pinned model (meshnet_gguf/models.json), got {', '.join(artifacts)}"


def _not_mixed(record: Mapping[str, Any]) -> Iterator[str]:
    """What makes it no evidence of the mixture that it names."""
    for run in record["runs"]:
        chain = [worker["recipe_fingerprint"] for worker in run["workers"]]
        if [lane for lane, _ in itertools.groupby(chain)] != _lanes(record):
            yield "expected stages of the head's lane before stages of the tail's"
            break
    found = mixture_of(record["recipes"]["head"], record["recipes"]["tail"])
    said = mixture_in(record)
    if found is None or found != said or found.fingerprint != record["fingerprint"]:
        yield "the record's recipes are not those of its mixture"


def _not_kept(record: Mapping[str, Any]) -> Iterator[str]:
    """What went wrong in a run."""
    for number, run in enumerate(record["runs"], 1):
        if not _is_mixture(record) and not all(row["identical"] for row in run["rows"]):
            yield f"run {number}: parity: the chain differs from the whole model"
        if run["sessions"]["together"] < _SESSIONS or not run["sessions"]["identical"]:
            yield f"run {number}: concurrency: sessions that ran together differ from those alone"
        if len(run["cancellations"]) < _CANCELLATIONS:
            yield f"run {number}: cancellation: expected {_CANCELLATIONS} cancelled prefills"
        if any(value for stage in run["left_behind"] for value in stage.values()):
            yield f"run {number}: cleanup: a stage still holds sessions, cache or work"
        if not run["rows"]:
            yield f"run {number}: nothing was compared"


def _results(record: Mapping[str, Any], *, is_real: bool) -> dict[str, Any]:
    """The measurements in the form that performance contracts evaluate."""
    rows = [row for run in record["runs"] for row in run["rows"]]
    chain: dict[str, list[float]] = {
        "ttft_ms": [row["ttft_ms"] for row in rows],
        "decode_tokens_per_s": [1000 / row["last_ms_per_token"] for row in rows],
    }
    whole: dict[str, list[float]] = {}
    if _is_mixture(record):
        for metric in ("squared_error", "same_choices"):
            chain[metric] = [row[metric][lane] for row in rows for lane in ("head", "tail")]
            whole[metric] = [row[metric]["of_lanes"] for row in rows]
        whole["ttft_ms"] = [took for row in rows for took in row["whole_ttft_ms"]]
        paces = [took for row in rows for took in row["whole_ms_per_token"]]
    else:
        chain["parity"] = [1.0 if row["identical"] else 0.0 for row in rows]
        whole["ttft_ms"] = [row["whole_ttft_ms"] for row in rows]
        paces = [row["whole_ms_per_token"] for row in rows]
    whole["decode_tokens_per_s"] = [1000 / pace for pace in paces]
    samples = {"chain": chain, "whole": whole}
    return {
        "schema_version": 1,
        "contract": record["contract"],
        "begun_at": record["begun_at"],
        "evidence": "real-hardware" if is_real else "fixture",
        "machine": json.dumps(record["machine"], sort_keys=True),
        "rows": [
            {"lane": lane, "concurrency": 1, "status": "measured", "samples": values}
            for lane, values in samples.items()
        ],
    }


def certify(
    record: Mapping[str, Any],
    contract: PerformanceContract,
    trusted: TrustedKeys,
    key: SigningKey,
    *,
    issued_ms: int,
    expires_ms: int = 0,
) -> Certification:
    """The signed record for trackers. Raises MeshnetError with all reasons why there is none."""
    found = refusals(record, contract, trusted)
    if found:
        raise MeshnetError(
            errors_pb2.REASON_CONFIGURATION_INVALID,
            f"the lane stays dark: {'; '.join(found)}",
        )
    return certification.issue(
        key,
        Lane(record["model_id"], record["fingerprint"]),
        issued_ms=issued_ms,
        evidence_sha256=hashlib.sha256(encode(record)).hexdigest(),
        expires_ms=expires_ms,
        mixture=mixture_in(record),
    )


def mixture_in(record: Mapping[str, Any]) -> Mixture | None:
    """The mixture that a record is about, None for a lane's."""
    return Mixture(**record["mixture"]) if _is_mixture(record) else None


def recipes_in(record: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """The recipes that a record is about: one lane's under "", a mixture's by the lanes' places."""
    if _is_mixture(record):
        return {place: record["recipes"][place] for place in ("head", "tail")}
    return {"": record["recipe"]}


def stale(
    record: Mapping[str, Any], recipes: Sequence[Mapping[str, str]], contract: PerformanceContract
) -> list[Change]:
    """What has changed between a record and workers' recipes and the contract of today.

    One recipe for a lane's record; for a mixture's that of the head's lane and of the tail's.
    """
    kinds = {field: kind for kind, fields in BINDINGS.items() for field in fields}
    changes = [
        Change(
            kinds.get(field, "recipe"), f"{place} {field}".strip(), then.get(field), now.get(field)
        )
        for (place, then), now in zip(recipes_in(record).items(), recipes, strict=True)
        for field in sorted(then.keys() | now.keys())
        if then.get(field) != now.get(field)
    ]
    then, now = record["contract"], _contract_name(contract)
    changes += [
        Change("thresholds", f"contract {name}", str(then.get(name)), str(now[name]))
        for name in now
        if then.get(name) != now[name]
    ]
    return changes


def encode(record: Mapping[str, Any]) -> bytes:
    """The record's bytes, whose hash is signed."""
    return (json.dumps(record, indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


def read_record(file: pathlib.Path) -> dict[str, Any]:
    """Raises MeshnetError (CONFIGURATION_INVALID): no record of this version."""
    try:
        found = json.loads(file.read_bytes())
        schema = found["schema"]
        named = found["contract"], *recipes_in(found).values()
        if not all(isinstance(value, dict) for value in named):
            raise TypeError("recipes and contract are objects")
        mixture = mixture_in(found)
        if mixture is not None and not all(isinstance(v, str) for v in vars(mixture).values()):
            raise TypeError("a mixture is three fingerprints")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MeshnetError(
            errors_pb2.REASON_CONFIGURATION_INVALID,
            f"expected a record of `meshnet certify` at {file}: {error!r}",
        ) from error
    if schema not in (SCHEMA, MIXTURE_SCHEMA):
        raise MeshnetError(
            errors_pb2.REASON_CONFIGURATION_INVALID,
            f"expected a record of {SCHEMA} or {MIXTURE_SCHEMA} at {file}, got {schema!r}; "
            "certify anew",
        )
    record: dict[str, Any] = found
    return record


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
