"""Checks, locks, signs and applies performance contracts.

    meshnet contract check
    meshnet contract lock alpha.v2.yaml
    meshnet contract approve alpha.v1.yaml --key me.pem --by "Ada Lovelace"
    meshnet contract evaluate alpha.v1.yaml results.json --trusted-key me.pem.pub

`check` looks at the contracts given, or at all of this project's: well formed, locked, unchanged;
it says which of them a person has approved. `lock` fixes the terms of a new one. `approve` writes
the signature of a key (`meshnet keys make`) into its approval field. `evaluate` holds results
against a contract and exits with 0 when they pass, with 3 when they do not; results that were begun
before the lock or under other terms are refused with 1.
"""

from __future__ import annotations

import datetime
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from absl import app, flags
from meshnet.signing import SigningKey, TrustedKeys

from meshnet_gguf import performance_contract as contracts
from meshnet_gguf.cli import output, terminal
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.performance_contract import Outcome, PerformanceContract
from proto.meshnet.shard.v1 import errors_pb2

__all__ = ["ACTIONS", "run"]

ACTIONS = ("check", "lock", "approve", "evaluate")

_KEY = flags.DEFINE_string("key", None, "PEM file of the private key that signs; the approval.")
_BY = flags.DEFINE_string("by", "", "Name of the person who approves.")
_TRUSTED = flags.DEFINE_multi_string(
    "trusted_key", [], "PEM file of public keys that count; repeatable."
)

_NOT_PASSED = 3


def run(arguments: Sequence[str]) -> int:
    """The command."""
    if not arguments or arguments[0] not in ACTIONS:
        raise app.UsageError(f"expected one of {', '.join(ACTIONS)}, got {' '.join(arguments)!r}")
    run_of = dict(zip(ACTIONS, (_check, _lock, _approve, _evaluate), strict=True))
    with output.control_errors():
        return run_of[arguments[0]](arguments[1:])


def _trusted() -> TrustedKeys:
    return TrustedKeys.load(output.given_path(name) for name in _TRUSTED.value)


def _file(name: str) -> pathlib.Path:
    """A contract as it was named: a path, or one of this project's."""
    given = output.given_path(name)
    own = contracts.default_folder() / name
    return own if not given.exists() and own.exists() else given


def _one(names: Sequence[str], what: str) -> PerformanceContract:
    if len(names) != 1:
        raise app.UsageError(f"expected {what}, got {len(names)} arguments")
    return PerformanceContract.read(_file(names[0]))


def _check(names: Sequence[str]) -> int:
    files = [_file(name) for name in names]
    files = files or contracts.contract_files(contracts.default_folder())
    trusted = _trusted()
    rows: list[dict[str, Any]] = []
    for file in files:
        contract = PerformanceContract.read(file)
        since = contracts.check(contract)
        rows.append(
            {
                "contract": contract.key,
                "sha256": contract.sha256,
                "locked_at": since.isoformat(),
                "approved_by": contract.approval["by"] if contract.approval else None,
                "approval_is_trusted": contract.is_approved(trusted),
            }
        )
    if output.wants_json():
        output.print_json({"contracts": rows})
        return 0
    shown = []
    for row in rows:
        by = "nobody yet"
        if row["approved_by"]:
            doubt = "" if row["approval_is_trusted"] else " (no --trusted-key of theirs)"
            by = f"{row['approved_by']}{doubt}"
        shown.append((row["contract"], row["locked_at"], by, str(row["sha256"])[:16]))
    terminal.show(terminal.table(("contract", "locked", "approved by", "terms"), shown))
    return 0


def _lock(names: Sequence[str]) -> int:
    contract = _one(names, "the contract to lock")
    contracts.lock(contract, _now())
    return _say(contract)


def _approve(names: Sequence[str]) -> int:
    contract = _one(names, "the contract to approve")
    if not _KEY.value or not _BY.value:
        raise app.UsageError("expected --key and --by: who approves, with which key")
    key = SigningKey.load(output.given_path(_KEY.value))
    return _say(contracts.approve(contract, key, _BY.value, _now()))


def _say(contract: PerformanceContract) -> int:
    found = {"contract": contract.key, "sha256": contract.sha256}
    if output.wants_json():
        output.print_json(found)
    else:
        terminal.show(f"{found['contract']} {found['sha256']}")
    return 0


def _evaluate(names: Sequence[str]) -> int:
    if len(names) != 2:
        raise app.UsageError(f"expected a contract and a file of results, got {len(names)}")
    contract = PerformanceContract.read(_file(names[0]))
    outcome = contracts.evaluate(contract, _results(output.given_path(names[1])), _trusted())
    if output.wants_json():
        output.print_json({"contract": contract.key, **outcome.to_json()})
    else:
        _show(contract, outcome)
    return 0 if outcome.passed else _NOT_PASSED


def _results(path: pathlib.Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise MeshnetError(
            errors_pb2.REASON_CONFIGURATION_INVALID, f"expected results as JSON at {path}: {error}"
        ) from error


def _show(contract: PerformanceContract, outcome: Outcome) -> None:
    rows = []
    for finding in outcome.findings:
        measured = "-" if finding.measured is None else f"{finding.measured:.4g}"
        words = ("STOP", "") if finding.kind == "stop" else ("holds", "MISSED")
        rows.append((finding.id, finding.bound, measured, words[0 if finding.holds else 1]))
    gains = [
        f"{gain['cause']}: {gain['metric']} of {gain['lane']} is {gain['ratio']:.3g} x "
        f"{gain['against']}, {gain['concurrency']} sessions"
        for gain in outcome.gains
    ]
    terminal.show(
        terminal.table(("term", "bound", "measured", ""), rows),
        *gains,
        *(f"- {reason}" for reason in outcome.reasons),
        f"{contract.key}: {outcome.decision}",
    )


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
