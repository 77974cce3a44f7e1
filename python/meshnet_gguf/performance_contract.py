"""Performance contracts: what a release must show, fixed before anything is measured for it.

    contract = PerformanceContract.read(default_folder() / "alpha.v1.yaml")
    check(contract)                                   # locked and unchanged
    outcome = evaluate(contract, results, trusted)    # refuses results under other terms

A contract is contracts/performance/NAME.vVERSION.yaml in the form of performance.schema.json.
Its lanes say what is run (prompts, lengths, sampling, concurrency, evidence), its thresholds what
must come out, its stop conditions what ends the attempt. All of this is *the terms*; their hash is
the SHA-256 of their canonical JSON, so that comments and layout are free and nothing else is.

lock.json holds each contract's hash and since when. Results name the hash that they were measured
under and when they were begun; results begun before the lock, or under another hash, are refused.
Other terms are another version.

`approval` is the one field beside the terms: null until a person signs the hash with an Ed25519
key (`meshnet contract approve`). Without an approval by a trusted key nothing passes.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import datetime
import hashlib
import importlib.resources
import json
import math
import pathlib
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jsonschema
from meshnet.signing import SigningKey, TrustedKeys

from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.strict_yaml import read_yaml
from proto.meshnet.shard.v1 import errors_pb2

__all__ = [
    "Finding",
    "Outcome",
    "PerformanceContract",
    "approve",
    "check",
    "contract_files",
    "default_folder",
    "evaluate",
    "lock",
]

_PURPOSE: Final = "performance contract approval"
_NAME: Final = re.compile(r"(?P<name>[a-z0-9-]+)\.v(?P<version>[1-9][0-9]*)\.yaml")
_NO_APPROVAL: Final = re.compile(r"^approval: null *(#.*)?$", re.MULTILINE)
_STATISTICS: Final[Mapping[str, Callable[[Sequence[float]], float]]] = {
    "median": statistics.median,
    "mean": statistics.fmean,
    "max": max,
    "min": min,
    "p95": lambda samples: sorted(samples)[-(-95 * len(samples) // 100) - 1],
    "sum": sum,
}


@dataclass(frozen=True)
class PerformanceContract:
    """A contract that has the form of its schema; made by read()."""

    file: pathlib.Path
    terms: Mapping[str, Any]
    approval: Mapping[str, str] | None

    @classmethod
    def read(cls, file: pathlib.Path) -> PerformanceContract:
        """Raises MeshnetError (CONFIGURATION_INVALID): unreadable, malformed, contradictory."""
        named = _NAME.fullmatch(file.name)
        if named is None:
            raise _refusal(f"expected a file like NAME.v1.yaml, got {file.name}")
        try:
            content = read_yaml(file.read_bytes(), _form("performance.schema.json"))
        except OSError as error:
            raise _refusal(f"expected a contract at {file}: {error}") from error
        except MeshnetError as error:
            raise _refusal(f"the contract {file.name}: {error.message}") from error
        approval = content.pop("approval")
        contract = cls(file, content, approval)
        if (content["name"], str(content["version"])) != (named["name"], named["version"]):
            raise _refusal(f"expected {contract.key} in a file of that name, got {file.name}")
        problems = [*_not_finite(content), *_contradictions(content)]
        if problems:
            raise _refusal(f"the contract {contract.key} contradicts itself: {'; '.join(problems)}")
        return contract

    @property
    def key(self) -> str:
        """Name and version, as in the lock."""
        return f"{self.terms['name']}.v{self.terms['version']}"

    @property
    def sha256(self) -> str:
        """Of the terms."""
        return hashlib.sha256(_canonical(self.terms)).hexdigest()

    def is_approved(self, trusted: TrustedKeys) -> bool:
        """Whether a trusted key signed exactly these terms."""
        if self.approval is None:
            return False
        try:
            signature = base64.b64decode(self.approval["signature"], validate=True)
        except binascii.Error:
            return False
        content = _approved_text(self, self.approval["by"], self.approval["on"])
        return trusted.verify(_PURPOSE, content, self.approval["key_id"], signature)


def default_folder() -> pathlib.Path:
    """Where this project's own contracts lie."""
    return pathlib.Path(str(importlib.resources.files("meshnet_gguf"))) / "contracts/performance"


def contract_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """All contracts of a folder, in order."""
    return sorted(file for file in folder.glob("*.yaml") if _NAME.fullmatch(file.name))


def _not_finite(content: Any) -> Iterator[str]:
    """YAML and Python's JSON know numbers that are none."""
    if isinstance(content, float) and not math.isfinite(content):
        yield f"{content} is no bound"
    for item in content.values() if isinstance(content, dict) else ():
        yield from _not_finite(item)
    for item in content if isinstance(content, list) else ():
        yield from _not_finite(item)


def _contradictions(terms: Mapping[str, Any]) -> Iterator[str]:
    for kind in ("lanes", "prompts", "metrics", "thresholds", "stop_conditions"):
        ids = [item["id"] for item in terms[kind]]
        yield from (f"{kind} has {i} twice" for i in sorted({i for i in ids if ids.count(i) > 1}))
    lanes = {lane["id"]: lane for lane in terms["lanes"]}
    prompts = {prompt["id"]: prompt for prompt in terms["prompts"]}
    metrics = {metric["id"] for metric in terms["metrics"]}
    for lane in lanes.values():
        unknown = sorted(set(lane["prompts"]) - prompts.keys())
        yield from (f"lane {lane['id']} names the unknown prompt {name}" for name in unknown)
        known = [prompts[name] for name in lane["prompts"] if name in prompts]
        for prompt in known:
            needed = prompt["tokens"] + lane["output_tokens"]
            if needed > lane["context_tokens"]:
                yield (
                    f"lane {lane['id']} needs {needed} tokens for {prompt['id']}, "
                    f"its context has {lane['context_tokens']}"
                )
        against = lane.get("against")
        if against is not None and against["lane"] not in lanes:
            yield f"lane {lane['id']} is set against the unknown lane {against['lane']}"
    for condition in [*terms["thresholds"], *terms["stop_conditions"]]:
        lane = lanes.get(condition["lane"])
        name = condition["id"]
        if lane is None:
            yield f"{name} names the unknown lane {condition['lane']}"
            continue
        if condition["metric"] not in metrics:
            yield f"{name} names the unknown metric {condition['metric']}"
        if condition["concurrency"] not in lane["concurrency"]:
            yield f"{name} asks for {condition['concurrency']} sessions, which its lane never has"
        base = lanes.get(condition.get("relative_to", condition["lane"]))
        if base is None or condition["concurrency"] not in base["concurrency"]:
            yield f"{name} is relative to a lane that does not measure the same"


# ---- The lock ----


def _lock_path(folder: pathlib.Path) -> pathlib.Path:
    return folder / "lock.json"


def _locked(folder: pathlib.Path) -> dict[str, dict[str, str]]:
    try:
        found: dict[str, dict[str, str]] = json.loads(_lock_path(folder).read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise _refusal(f"expected a lock at {_lock_path(folder)}: {error}") from error
    return found


def check(contract: PerformanceContract) -> datetime.datetime:
    """Since when the contract is locked.

    Raises MeshnetError (CONFIGURATION_INVALID): it is not, or its terms have changed since.
    """
    entry = _locked(contract.file.parent).get(contract.key)
    if entry is None:
        raise _refusal(
            f"the contract {contract.key} is not locked, so nothing may be measured under it; "
            f"run `meshnet contract lock {contract.file.name}`"
        )
    if entry["sha256"] != contract.sha256:
        raise _refusal(
            f"the terms of {contract.key} have the SHA-256 {contract.sha256}, expected the locked "
            f"{entry['sha256']}; restore them, or make other terms another version"
        )
    return _time(entry["locked_at"])


def lock(contract: PerformanceContract, now: datetime.datetime) -> None:
    """Fixes the terms from now on. Raises MeshnetError: other terms are locked under the name."""
    folder = contract.file.parent
    entries = _locked(folder)
    if contract.key in entries:
        check(contract)
        return
    entries[contract.key] = {"sha256": contract.sha256, "locked_at": _written(now)}
    _lock_path(folder).write_text(json.dumps(entries, indent=2, sort_keys=True) + "\n", "utf-8")


def approve(
    contract: PerformanceContract, key: SigningKey, by: str, now: datetime.datetime
) -> PerformanceContract:
    """Signs the terms into the contract's file. Raises MeshnetError: not locked, signed already."""
    check(contract)
    if contract.approval is not None:
        raise _refusal(f"{contract.key} was approved by {contract.approval['by']} already")
    if not by.strip():
        raise _refusal("expected the name of the person who approves")
    on = _written(now)
    signature = base64.b64encode(key.sign(_PURPOSE, _approved_text(contract, by, on))).decode()
    approval = {"by": by, "key_id": key.key_id, "on": on, "signature": signature}
    text = contract.file.read_text("utf-8")
    # JSON is YAML: one line that takes the place of the empty field.
    line = f"approval: {json.dumps(approval)}"
    signed, times = _NO_APPROVAL.subn(lambda _: line, text)
    if times != 1:
        raise _refusal(f"expected one line `approval: null` in {contract.file}, got {times}")
    contract.file.write_text(signed, "utf-8")
    return PerformanceContract.read(contract.file)


def _approved_text(contract: PerformanceContract, by: str, on: str) -> bytes:
    return _canonical({"by": by, "contract": contract.key, "on": on, "sha256": contract.sha256})


# ---- Evaluation ----


@dataclass(frozen=True)
class Finding:
    """One threshold or stop condition, and what was measured (None: nothing usable)."""

    id: str
    kind: str
    measured: float | None
    bound: str
    holds: bool
    note: str = ""


@dataclass(frozen=True)
class Outcome:
    """What the contract makes of results: its word for it, and why."""

    decision: str
    passed: bool
    reasons: tuple[str, ...]
    findings: tuple[Finding, ...]
    # What lanes gained over the lanes that they are set against, under what differs between them.
    gains: tuple[Mapping[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        """As `meshnet contract evaluate --json` prints it."""
        return dataclasses.asdict(self)


def evaluate(contract: PerformanceContract, results: Any, trusted: TrustedKeys) -> Outcome:
    """Holds results against the contract.

    Raises MeshnetError (CONFIGURATION_INVALID) before looking at any number: the contract is not
    locked or has changed, the results are malformed, were measured under another contract, were
    begun before the lock, or speak of what the contract does not know.
    """
    since = check(contract)
    try:
        jsonschema.validate(results, _form("performance_results.schema.json"))
    except jsonschema.ValidationError as error:
        raise _refusal(f"the results: at {error.json_path}: {error.message}") from error
    _check_results(contract, results, since)
    rows = {(row["lane"], row["concurrency"]): row for row in results["rows"]}
    findings = [
        *(_find(contract.terms, rows, item, "threshold") for item in contract.terms["thresholds"]),
        *(_find(contract.terms, rows, item, "stop") for item in contract.terms["stop_conditions"]),
    ]
    stops = [f"{item.id}: {item.note}" for item in findings if item.kind == "stop" and item.holds]
    missed = [
        f"{item.id}: expected {item.bound}, got {_figure(item)}"
        for item in findings
        if item.kind == "threshold" and not item.holds
    ]
    doubts = list(_doubts(contract, results, rows, trusted))
    words = contract.terms["decisions"]
    if stops:
        decision, reasons = words["stop"], stops
    elif missed:
        decision, reasons = words["missed"], missed
    elif doubts:
        decision, reasons = "undecided", doubts
    else:
        decision, reasons = words["passed"], []
    passed = not (stops or missed or doubts)
    return Outcome(
        decision, passed, tuple(reasons), tuple(findings), tuple(_gains(contract.terms, rows))
    )


def _check_results(
    contract: PerformanceContract, results: Mapping[str, Any], since: datetime.datetime
) -> None:
    under = results["contract"]
    if (under["name"], under["version"], under["sha256"]) != (
        contract.terms["name"],
        contract.terms["version"],
        contract.sha256,
    ):
        raise _refusal(
            f"expected results under {contract.key} with the hash {contract.sha256}, got "
            f"{under['name']}.v{under['version']} with {under['sha256']}; measure anew under it"
        )
    begun = _time(results["begun_at"])
    if begun < since:
        raise _refusal(
            f"the results were begun at {_written(begun)}, before the contract was locked at "
            f"{_written(since)}; measure anew"
        )
    lanes = {lane["id"]: lane for lane in contract.terms["lanes"]}
    metrics = {metric["id"] for metric in contract.terms["metrics"]}
    seen = set()
    for row in results["rows"]:
        at = (row["lane"], row["concurrency"])
        lane = lanes.get(row["lane"])
        if lane is None or row["concurrency"] not in lane["concurrency"]:
            raise _refusal(f"{contract.key} has no lane {at[0]} with {at[1]} sessions")
        if at in seen:
            raise _refusal(f"the results have two rows for lane {at[0]} with {at[1]} sessions")
        seen.add(at)
        if any(_not_finite(row["samples"])):
            raise _refusal(f"lane {at[0]} with {at[1]} sessions has samples that are no numbers")
        unknown = sorted(row["samples"].keys() - metrics)
        if unknown:
            raise _refusal(f"{contract.key} has no metric {', '.join(unknown)}")


def _doubts(
    contract: PerformanceContract,
    results: Mapping[str, Any],
    rows: Mapping[tuple[str, int], Mapping[str, Any]],
    trusted: TrustedKeys,
) -> Iterator[str]:
    """Why nothing can pass although nothing was missed."""
    if not contract.is_approved(trusted):
        yield f"no trusted person has approved {contract.key}"
    if results["evidence"] != contract.terms["evidence"]:
        yield f"expected {contract.terms['evidence']} evidence, got {results['evidence']}"
    for lane in contract.terms["lanes"]:
        for concurrency in lane["concurrency"]:
            row = rows.get((lane["id"], concurrency))
            if row is None:
                yield f"lane {lane['id']} with {concurrency} sessions was not measured"
            elif row["status"] != "measured":
                yield f"lane {lane['id']} with {concurrency} sessions {row['status']}: {row['why']}"


def _value(
    terms: Mapping[str, Any],
    rows: Mapping[tuple[str, int], Mapping[str, Any]],
    lane: str,
    metric: str,
    concurrency: int,
) -> float | None:
    row = rows.get((lane, concurrency))
    if row is None or row["status"] != "measured":
        return None
    samples = row["samples"].get(metric, [])
    if len(samples) < terms["minimum_samples"]:
        return None
    (form,) = (item for item in terms["metrics"] if item["id"] == metric)
    return float(_STATISTICS[form["statistic"]](samples))


def _find(
    terms: Mapping[str, Any],
    rows: Mapping[tuple[str, int], Mapping[str, Any]],
    item: Mapping[str, Any],
    kind: str,
) -> Finding:
    at = (item["metric"], item["concurrency"])
    measured = _value(terms, rows, item["lane"], *at)
    bound = f">= {item['at_least']:g}" if "at_least" in item else f"<= {item['at_most']:g}"
    if "relative_to" in item:
        base = _value(terms, rows, item["relative_to"], *at)
        measured = measured / base if measured is not None and base else None
        bound += f" of {item['relative_to']}"
    holds = measured is not None and (
        measured >= item["at_least"] if "at_least" in item else measured <= item["at_most"]
    )
    return Finding(item["id"], kind, measured, bound, holds, item["why"])


def _gains(
    terms: Mapping[str, Any], rows: Mapping[tuple[str, int], Mapping[str, Any]]
) -> Iterator[Mapping[str, Any]]:
    for lane in terms["lanes"]:
        against = lane.get("against")
        if against is None:
            continue
        for metric in terms["metrics"]:
            for concurrency in lane["concurrency"]:
                at = (metric["id"], concurrency)
                ours = _value(terms, rows, lane["id"], *at)
                theirs = _value(terms, rows, against["lane"], *at)
                if ours is not None and theirs:
                    yield {
                        "lane": lane["id"],
                        "against": against["lane"],
                        "cause": against["differs_in"],
                        "metric": metric["id"],
                        "concurrency": concurrency,
                        "ratio": ours / theirs,
                    }


def _figure(finding: Finding) -> str:
    return "nothing usable" if finding.measured is None else f"{finding.measured:.4g}"


# ---- Forms ----


def _form(schema: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(default_folder().joinpath(schema).read_bytes())
    return found


def _canonical(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _time(text: str) -> datetime.datetime:
    try:
        found = datetime.datetime.fromisoformat(text)
    except ValueError as error:
        raise _refusal(f"expected a time like 2026-01-31T12:00:00+00:00, got {text!r}") from error
    if found.tzinfo is None:
        raise _refusal(f"expected a time with its zone, got {text!r}")
    return found


def _written(time: datetime.datetime) -> str:
    return time.astimezone(datetime.UTC).isoformat(timespec="seconds")


def _refusal(message: str) -> MeshnetError:
    return MeshnetError(errors_pb2.REASON_CONFIGURATION_INVALID, message)
