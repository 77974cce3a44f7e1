"""What a contract refuses, and what it makes of results."""

from __future__ import annotations

import datetime
import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from meshnet.signing import SigningKey, TrustedKeys
from meshnet_gguf import performance_contract as contracts
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.performance_contract import PerformanceContract, evaluate

KEY = SigningKey.generate()
NOBODY = TrustedKeys({})
LOCKED = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
SCENARIO = {"model": "m", "storage": "s", "stages": [1], "hardware": "h", "link": "none"}


def terms(**changes: Any) -> dict[str, Any]:
    def lane(name: str, **more: Any) -> dict[str, Any]:
        return {
            "id": name,
            "runs": "whole-model",
            "scenario": SCENARIO,
            "prompts": ["p"],
            "context_tokens": 100,
            "output_tokens": 20,
            "sampling": {"temperature": 0, "seed": 0},
            "concurrency": [1, 4],
            **more,
        }

    base = {
        "schema_version": 1,
        "name": "small",
        "version": 1,
        "purpose": "a test",
        "evidence": "real-hardware",
        "minimum_samples": 2,
        "decisions": {"passed": "go", "missed": "tune", "stop": "stop"},
        "prompts": [{"id": "p", "tokens": 80, "formula": "i"}],
        "lanes": [
            lane("base"),
            lane("chain", against={"lane": "base", "differs_in": "transport"}),
        ],
        "metrics": [
            {"id": "speed", "unit": "tokens/s", "statistic": "median"},
            {"id": "wait", "unit": "ms", "statistic": "p95"},
        ],
        "thresholds": [
            {
                "id": "half",
                "lane": "chain",
                "metric": "speed",
                "concurrency": 1,
                "relative_to": "base",
                "at_least": 0.5,
                "why": "w",
            },
            {
                "id": "soon",
                "lane": "chain",
                "metric": "wait",
                "concurrency": 4,
                "at_most": 10,
                "why": "w",
            },
        ],
        "stop_conditions": [
            {
                "id": "hopeless",
                "lane": "chain",
                "metric": "speed",
                "concurrency": 1,
                "at_most": 1,
                "why": "no use",
            }
        ],
        "approval": None,
    }
    return base | changes


def write(
    folder: pathlib.Path, content: dict[str, Any], name: str = "small.v1.yaml"
) -> pathlib.Path:
    file = folder / name
    body = yaml.safe_dump({k: v for k, v in content.items() if k != "approval"}, sort_keys=False)
    file.write_text(f"# A comment.\n{body}approval: null\n")
    return file


@pytest.fixture
def contract(tmp_path: pathlib.Path) -> PerformanceContract:
    found = PerformanceContract.read(write(tmp_path, terms()))
    contracts.lock(found, LOCKED)
    return contracts.approve(found, KEY, "A. Person", LOCKED)


def results(contract: PerformanceContract, **changes: Any) -> dict[str, Any]:
    def row(lane: str, concurrency: int, speed: float, wait: float) -> dict[str, Any]:
        samples = {"speed": [speed, speed + 2], "wait": [1.0, wait]}
        return {
            "lane": lane,
            "concurrency": concurrency,
            "status": "measured",
            "samples": samples,
        }

    base = {
        "schema_version": 1,
        "contract": {"name": "small", "version": 1, "sha256": contract.sha256},
        "begun_at": "2026-01-01T00:00:00+00:00",
        "evidence": "real-hardware",
        "machine": "test",
        "rows": [
            row("base", 1, 19, 1),
            row("base", 4, 19, 1),
            row("chain", 1, 9, 1),
            row("chain", 4, 9, 10),
        ],
    }
    return base | changes


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(MeshnetError) as caught:
        call()
    assert caught.value.reason_name == "CONFIGURATION_INVALID"
    return caught.value.message


def test_our_own_contracts_are_locked_and_wait_for_a_person() -> None:
    files = contracts.contract_files(contracts.default_folder())
    assert [file.name for file in files] == [
        "alpha.v1.yaml",
        "beta.v1.yaml",
        "lane.v1.yaml",
        "mixture.v1.yaml",
    ]
    for file in files:
        contract = PerformanceContract.read(file)
        contracts.check(contract)
        assert contract.approval is None
        assert not contract.is_approved(KEY.trust())


def test_results_that_hold_pass(contract: PerformanceContract) -> None:
    outcome = evaluate(contract, results(contract), KEY.trust())
    assert (outcome.decision, outcome.passed, outcome.reasons) == ("go", True, ())
    assert [(f.id, f.measured, f.bound, f.holds) for f in outcome.findings] == [
        ("half", 0.5, ">= 0.5 of base", True),
        ("soon", 10.0, "<= 10", True),
        ("hopeless", 10.0, "<= 1", False),
    ]
    ratios = [(g["cause"], g["metric"], g["concurrency"], g["ratio"]) for g in outcome.gains]
    assert ratios[0] == ("transport", "speed", 1, 0.5)
    assert len(ratios) == 4


@pytest.mark.parametrize(
    ("row", "decision", "reason"),
    [
        (
            {"lane": "chain", "concurrency": 1, "samples": {"speed": [8, 9], "wait": [1, 1]}},
            "tune",
            "half: expected >= 0.5 of base, got 0.425",
        ),
        (
            {"lane": "chain", "concurrency": 1, "samples": {"speed": [1, 1], "wait": [1, 1]}},
            "stop",
            "hopeless: no use",
        ),
        (
            {"lane": "chain", "concurrency": 4, "samples": {"speed": [9, 9], "wait": [1]}},
            "tune",
            "soon: expected <= 10, got nothing usable",
        ),
        (
            {"lane": "base", "concurrency": 4, "status": "failed", "why": "lost", "samples": {}},
            "undecided",
            "lane base with 4 sessions failed: lost",
        ),
    ],
)
def test_results_that_do_not_hold(
    contract: PerformanceContract, row: dict[str, Any], decision: str, reason: str
) -> None:
    found = results(contract)
    found["rows"] = [
        r
        for r in found["rows"]
        if (r["lane"], r["concurrency"]) != (row["lane"], row["concurrency"])
    ] + [{"status": "measured"} | row]
    outcome = evaluate(contract, found, KEY.trust())
    assert (outcome.decision, outcome.passed) == (decision, False)
    assert reason in outcome.reasons


def test_nothing_passes_without_evidence_of_its_kind_and_a_person(
    contract: PerformanceContract,
) -> None:
    fixture = evaluate(contract, results(contract, evidence="fixture"), KEY.trust())
    assert (fixture.decision, fixture.passed) == ("undecided", False)
    assert fixture.reasons == ("expected real-hardware evidence, got fixture",)
    alone = evaluate(contract, results(contract), NOBODY)
    assert alone.reasons == ("no trusted person has approved small.v1",)
    half = results(contract)
    half["rows"] = half["rows"][1:]
    assert not evaluate(contract, half, KEY.trust()).passed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"contract": {"name": "small", "version": 1, "sha256": "0" * 64}},
            "measure anew under it",
        ),
        ({"begun_at": "2025-12-31T23:59:59+00:00"}, "before the contract was locked"),
        ({"begun_at": "2026-01-01T00:30:00+01:00"}, "before the contract was locked"),
        ({"begun_at": "2026-01-01T00:00:00"}, "a time with its zone"),
        ({"begun_at": "yesterday"}, "expected a time"),
        ({"rows": [{"lane": "other", "concurrency": 1}]}, "has no lane other"),
        ({"rows": [{"lane": "chain", "concurrency": 2}]}, "has no lane chain with 2 sessions"),
        ({"rows": [{"lane": "chain", "concurrency": 1}] * 2}, "two rows for lane chain"),
        (
            {"rows": [{"lane": "chain", "concurrency": 1, "samples": {"joy": [1]}}]},
            "has no metric joy",
        ),
        (
            {"rows": [{"lane": "chain", "concurrency": 1, "samples": {"speed": [float("nan")]}}]},
            "no numbers",
        ),
        ({"rows": [{"lane": "chain", "concurrency": 1, "status": "failed"}]}, "'why'"),
        ({"more": 1}, "the results: at $"),
        ({"evidence": "hearsay"}, "$.evidence"),
    ],
)
def test_results_that_are_refused(
    contract: PerformanceContract, change: dict[str, Any], message: str
) -> None:
    for row in change.get("rows", []):
        row.setdefault("status", "measured")
        row.setdefault("samples", {})
    found = results(contract) | change
    assert message in refusal(lambda: evaluate(contract, found, KEY.trust()))


def test_an_unlocked_contract_ingests_nothing(tmp_path: pathlib.Path) -> None:
    contract = PerformanceContract.read(write(tmp_path, terms()))
    expected = "is not locked, so nothing may be measured under it"
    assert expected in refusal(lambda: evaluate(contract, results(contract), NOBODY))
    assert expected in refusal(lambda: contracts.approve(contract, KEY, "A", LOCKED))


def test_changed_terms_are_refused_and_changed_layout_is_not(
    contract: PerformanceContract,
) -> None:
    file = contract.file
    file.write_text("# Other words.\n\n" + file.read_text())
    again = PerformanceContract.read(file)
    assert evaluate(again, results(again), KEY.trust()).passed
    file.write_text(file.read_text().replace("at_least: 0.5", "at_least: 0.4"))
    changed = PerformanceContract.read(file)
    for call in (
        lambda: contracts.check(changed),
        lambda: contracts.lock(changed, LOCKED),
        lambda: evaluate(changed, results(changed), KEY.trust()),
        lambda: evaluate(changed, results(contract), KEY.trust()),
    ):
        assert "expected the locked" in refusal(call)
    assert not changed.is_approved(KEY.trust())  # the signature was for other terms


def test_locking_again_keeps_the_time(contract: PerformanceContract) -> None:
    contracts.lock(contract, LOCKED + datetime.timedelta(days=1))
    assert contracts.check(contract) == LOCKED


def test_an_approval_is_of_one_person_for_one_contract(contract: PerformanceContract) -> None:
    assert contract.approval is not None
    assert contract.approval["by"] == "A. Person"
    assert contract.is_approved(KEY.trust())
    assert not contract.is_approved(SigningKey.generate().trust())
    assert "approved by A. Person already" in refusal(
        lambda: contracts.approve(contract, KEY, "B", LOCKED)
    )
    file = contract.file
    file.write_text(file.read_text().replace("A. Person", "B. Person"))
    assert not PerformanceContract.read(file).is_approved(KEY.trust())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "schema_version: "),
        ({"extra": 1}, "'extra' was unexpected"),
        ({"name": "other"}, "in a file of that name"),
        ({"version": 2}, "in a file of that name"),
        ({"prompts": [{"id": "p", "tokens": 81, "formula": "i"}]}, "its context has 100"),
        ({"prompts": [{"id": "q", "tokens": 1, "formula": "i"}]}, "unknown prompt p"),
        ({"metrics": [{"id": "speed", "unit": "", "statistic": "median"}]}, "unknown metric wait"),
        ({"thresholds": []}, "thresholds: "),
        ({"stop_conditions": []}, "stop_conditions: "),
    ],
)
def test_malformed_contracts(tmp_path: pathlib.Path, change: dict[str, Any], message: str) -> None:
    file = write(tmp_path, terms(**change))
    assert message in refusal(lambda: PerformanceContract.read(file))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lane": "nowhere"}, "unknown lane nowhere"),
        ({"concurrency": 2}, "2 sessions, which its lane never has"),
        ({"relative_to": "nowhere"}, "does not measure the same"),
        ({"at_most": 1}, "thresholds.0: "),
        ({"at_least": float("inf")}, "no bound"),
        ({"id": "soon"}, "thresholds has soon twice"),
    ],
)
def test_conditions_that_make_no_sense(
    tmp_path: pathlib.Path, change: dict[str, Any], message: str
) -> None:
    content = json.loads(json.dumps(terms()))
    content["thresholds"][0] |= change
    file = write(tmp_path, content)
    assert message in refusal(lambda: PerformanceContract.read(file))


@pytest.mark.parametrize("text", ["", "[", "- 1", "a: 1\na: 1", "a: !!python/object:x.Y {}"])
def test_what_is_no_contract(tmp_path: pathlib.Path, text: str) -> None:
    file = tmp_path / "x.v1.yaml"
    file.write_text(text)
    refusal(lambda: PerformanceContract.read(file))
    refusal(lambda: PerformanceContract.read(tmp_path / "nothing.v1.yaml"))
    refusal(lambda: PerformanceContract.read(tmp_path / "x.yaml"))
