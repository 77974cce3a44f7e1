"""What certifies a lane, and what ends a certification; measurements are made up."""

import copy
import hashlib
import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
from meshnet.certification import CertificationBook, Lane
from meshnet.signing import SigningKey, TrustedKeys
from meshnet_gguf.certify import (
    BINDINGS,
    certify,
    encode,
    mixture_in,
    read_record,
    refusals,
    stale,
)
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.performance_contract import PerformanceContract
from meshnet_gguf.protocol import recipe_fingerprint
from meshnet_gguf.recipe import mixture_of
from meshnet_gguf.testing.lane_contract import RECIPE, record_that_certifies, write_lane_contract

APPROVER, CERTIFIER = SigningKey.generate(), SigningKey.generate()
TRUSTED = APPROVER.trust()


@pytest.fixture(name="contract")
def approved_contract(tmp_path: pathlib.Path) -> PerformanceContract:
    return write_lane_contract(tmp_path, APPROVER)


def test_what_holds_everything_is_signed_and_believed(contract: PerformanceContract) -> None:
    record = record_that_certifies(contract)
    assert refusals(record, contract, TRUSTED) == []
    signed = certify(record, contract, TRUSTED, CERTIFIER, issued_ms=5)
    assert signed.lane == Lane("smollm2", "f" * 64)
    assert signed.evidence_sha256 == hashlib.sha256(encode(record)).hexdigest()
    book = CertificationBook(CERTIFIER.trust())
    book.add(book.check(signed.encode()))
    assert book.refusal(signed.lane, 6) == ""


def _software(record: dict[str, Any]) -> None:
    for worker in record["runs"][0]["workers"]:
        worker["recipe"] = RECIPE | {"accelerator": "llvmpipe (LLVM 21.1.8, 256 bits)"}


SPOILED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "fake engine": (lambda r: r["runs"][0]["workers"][1].update(engine="fake"), "fixture"),
    "fixture evidence": (
        lambda r: r["runs"][0]["workers"][0].update(evidence="FIXTURE"),
        "no hardware computed them",
    ),
    "lavapipe": (_software, "the accelerator is a program: llvmpipe"),
    "unpinned model": (
        lambda r: r["runs"][0]["workers"][0].update(artifact_sha256="0" * 64),
        "expected a pinned model",
    ),
    "two fingerprints": (
        lambda r: r["runs"][0]["workers"][0].update(recipe_fingerprint="0" * 64),
        "several fingerprints",
    ),
    "parity": (lambda r: r["runs"][0]["rows"][1].update(identical=False), "run 1: parity"),
    "concurrency": (
        lambda r: r["runs"][0]["sessions"].update(identical=False),
        "run 1: concurrency",
    ),
    "too few sessions": (lambda r: r["runs"][0]["sessions"].update(together=1), "concurrency"),
    "cancellation": (lambda r: r["runs"][0]["cancellations"].pop(), "run 1: cancellation"),
    "cleanup": (
        lambda r: r["runs"][0]["left_behind"].append({"open_sessions": 1}),
        "run 1: cleanup",
    ),
    "speed": (
        lambda r: [row.update(ttft_ms=1e9) for row in r["runs"][0]["rows"]],
        "speed contract: useful-first-token",
    ),
    "nothing measured": (lambda r: r["runs"][0].update(rows=[]), "speed contract"),
}


def expect_dark(
    sound: dict[str, Any],
    contract: PerformanceContract,
    spoil: Callable[[dict[str, Any]], Any],
    reason: str,
) -> None:
    record = copy.deepcopy(sound)
    spoil(record)
    found = refusals(record, contract, TRUSTED)
    assert any(reason in text for text in found), found
    with pytest.raises(MeshnetError, match="stays dark"):
        certify(record, contract, TRUSTED, CERTIFIER, issued_ms=5)


@pytest.mark.parametrize("what", SPOILED)
def test_one_thing_amiss_and_nothing_is_signed(what: str, contract: PerformanceContract) -> None:
    expect_dark(record_that_certifies(contract), contract, *SPOILED[what])


def test_without_an_approval_that_is_trusted_nothing_certifies(
    contract: PerformanceContract, tmp_path: pathlib.Path
) -> None:
    nobody = "speed contract: no trusted person has approved lane.v1"
    assert nobody in refusals(record_that_certifies(contract), contract, TrustedKeys({}))
    folder = tmp_path / "unapproved"
    folder.mkdir()
    unapproved = write_lane_contract(folder, None)
    assert unapproved.sha256 == contract.sha256
    assert nobody in refusals(record_that_certifies(unapproved), unapproved, TRUSTED)


def test_a_record_of_other_thresholds_is_refused(contract: PerformanceContract) -> None:
    record = record_that_certifies(contract)
    record["contract"]["sha256"] = "0" * 64
    with pytest.raises(MeshnetError, match="expected results under lane"):
        refusals(record, contract, TRUSTED)


@pytest.mark.parametrize("missing", ["runs", "recipe", "fingerprint", "begun_at"])
def test_a_record_with_something_missing_is_refused(
    missing: str, contract: PerformanceContract
) -> None:
    record = record_that_certifies(contract)
    del record[missing]
    if missing == "recipe":
        assert refusals(record, contract, TRUSTED) == []  # that of the workers is what counts
        return
    with pytest.raises(MeshnetError, match="without what it needs"):
        refusals(record, contract, TRUSTED)


CHANGES = {
    "pin": ("llama_cpp_commit", "0"),
    "patches": ("llama_cpp_patches_sha256", "b" * 64),
    "boundary": ("boundary_schema", "dense.residual/2"),
    "cache layout": ("kv_type", "q8_0"),
    "backend build": ("build_options", "gcc 13"),
    "hardware": ("accelerator", "NVIDIA H100"),
    "driver": ("accelerator_driver", "590"),
    "model": ("artifact_sha256", "0" * 64),
    "recipe": ("prefill_chunk", "512"),
}


def test_each_kind_of_change_ends_a_certification_and_is_named(
    contract: PerformanceContract,
) -> None:
    record = record_that_certifies(contract)
    assert stale(record, [RECIPE], contract) == []
    assert set(CHANGES) == {*BINDINGS, "recipe"}
    for kind, (field, value) in CHANGES.items():
        (change,) = stale(record, [RECIPE | {field: value}], contract)
        assert (change.kind, change.field, change.now) == (kind, field, value)
        assert change.before == RECIPE.get(field)
        assert str(change) == f"{kind}: {field} was {RECIPE.get(field)}, is {value}"


def test_a_field_that_comes_or_goes_is_a_change(contract: PerformanceContract) -> None:
    record = record_that_certifies(contract)
    without = {name: value for name, value in RECIPE.items() if name != "kv_layout"}
    assert [(c.kind, c.now) for c in stale(record, [without], contract)] == [("cache layout", None)]
    more = RECIPE | {"mtp": "on"}
    assert [(c.kind, c.before) for c in stale(record, [more], contract)] == [("recipe", None)]


def test_other_thresholds_end_a_certification(contract: PerformanceContract) -> None:
    record = record_that_certifies(contract)
    record["contract"]["sha256"] = "0" * 64
    (change,) = stale(record, [RECIPE], contract)
    assert (change.kind, change.before, change.now) == ("thresholds", "0" * 64, contract.sha256)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"schema": "meshnet.certify/0", "recipe": {}, "contract": {}}']
)
def test_what_is_no_record_is_refused(content: bytes, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "record.json"
    file.write_bytes(content)
    with pytest.raises(MeshnetError, match="expected a record"):
        read_record(file)


def test_a_record_comes_back_as_it_was_signed(
    contract: PerformanceContract, tmp_path: pathlib.Path
) -> None:
    file = tmp_path / "record.json"
    file.write_bytes(encode(record_that_certifies(contract)))
    assert encode(read_record(file)) == file.read_bytes()
    assert json.loads(file.read_bytes())["schema"] == "meshnet.certify/1"


# ---- Mixtures ----

CPU = {n: v for n, v in RECIPE.items() if not n.startswith("accelerator")} | {"backend": "cpu"}


@pytest.fixture(name="terms")
def approved_mixture_contract(tmp_path: pathlib.Path) -> PerformanceContract:
    return write_lane_contract(tmp_path, APPROVER, "mixture.v1.yaml")


def mixed_sample(terms: PerformanceContract) -> dict[str, Any]:
    """A record of a mixture, the CPU's lane before the GPU's, that certifies."""
    mixture = mixture_of(CPU, RECIPE)
    assert mixture is not None
    record = record_that_certifies(terms)
    del record["fingerprint"], record["recipe"]
    (run,) = record["runs"]
    for worker, recipe in zip(run["workers"], (CPU, RECIPE), strict=True):
        worker["recipe"] = recipe
        worker["recipe_fingerprint"] = recipe_fingerprint(recipe.items())
    run["rows"] = [
        {
            "squared_error": {"head": 3e-4, "tail": 2e-4, "of_lanes": 4e-4},
            "same_choices": {"head": 1.0, "tail": 0.9375, "of_lanes": 1.0},
            "ttft_ms": 50.0,
            "last_ms_per_token": 10.0,
            "whole_ttft_ms": [40.0, 45.0],
            "whole_ms_per_token": [9.0, 11.0],
        }
    ]
    return record | {
        "schema": "meshnet.certify-mixture/1",
        "fingerprint": mixture.fingerprint,
        "mixture": vars(mixture),
        "recipes": {"head": CPU, "tail": RECIPE},
        "contract": {"name": "mixture", "version": 1, "sha256": terms.sha256},
    }


def test_a_mixture_is_signed_with_both_lanes_and_believed(terms: PerformanceContract) -> None:
    record = mixed_sample(terms)
    assert refusals(record, terms, TRUSTED) == []
    signed = certify(record, terms, TRUSTED, CERTIFIER, issued_ms=5)
    assert signed.mixture == mixture_of(CPU, RECIPE)
    assert signed.lane == Lane("smollm2", record["fingerprint"])
    assert signed.evidence_sha256 == hashlib.sha256(encode(record)).hexdigest()
    book = CertificationBook(CERTIFIER.trust())
    book.add(book.check(signed.encode()))
    assert book.mixtures("smollm2") == [mixture_of(CPU, RECIPE)]


def _row(record: dict[str, Any], metric: str, **values: float) -> None:
    record["runs"][0]["rows"][0][metric].update(values)


MIXED_SPOILED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "fixture evidence": (
        lambda r: r["runs"][0]["workers"][1].update(evidence="FIXTURE"),
        "no hardware computed them",
    ),
    "lavapipe": (_software, "the accelerator is a program: llvmpipe"),
    "one lane alone": (lambda r: r["runs"][0]["workers"].pop(), "several fingerprints"),
    "the other order": (
        lambda r: r["runs"][0]["workers"].reverse(),
        "stages of the head's lane before stages of the tail's",
    ),
    "another cache": (
        lambda r: r["recipes"].update(tail=RECIPE | {"kv_type": "q8_0"}),
        "recipes are not those of its mixture",
    ),
    "another fingerprint": (
        lambda r: r["mixture"].update(shared="0" * 64),
        "recipes are not those of its mixture",
    ),
    "far from the head's lane": (
        lambda r: _row(r, "squared_error", head=0.03, of_lanes=0.019),
        "speed contract: parity: expected <= 0.02, got 0.03",
    ),
    "farther than the lanes": (
        lambda r: _row(r, "squared_error", tail=9e-4),
        "speed contract: relative-parity: expected <= 2 of whole, got 2.25",
    ),
    "lanes far apart": (
        lambda r: _row(r, "squared_error", of_lanes=0.03),
        "speed contract: lanes: expected <= 0.02",
    ),
    "other choices": (
        lambda r: _row(r, "same_choices", tail=0.5),
        "speed contract: choices: expected >= 0.75, got 0.5",
    ),
    "concurrency": (
        lambda r: r["runs"][0]["sessions"].update(identical=False),
        "run 1: concurrency",
    ),
    "cancellation": (lambda r: r["runs"][0]["cancellations"].pop(), "run 1: cancellation"),
    "cleanup": (
        lambda r: r["runs"][0]["left_behind"].append({"open_sessions": 1}),
        "run 1: cleanup",
    ),
    "nothing measured": (lambda r: r["runs"][0].update(rows=[]), "run 1: nothing was compared"),
}


@pytest.mark.parametrize("what", MIXED_SPOILED)
def test_one_thing_amiss_and_no_mixture_is_signed(what: str, terms: PerformanceContract) -> None:
    expect_dark(mixed_sample(terms), terms, *MIXED_SPOILED[what])


def test_a_mixture_is_not_judged_by_the_contract_for_lanes(
    terms: PerformanceContract, contract: PerformanceContract
) -> None:
    record = mixed_sample(terms)
    record["contract"] = {"name": "lane", "version": 1, "sha256": contract.sha256}
    with pytest.raises(MeshnetError, match="no metric"):
        refusals(record, contract, TRUSTED)


def test_a_change_of_either_lane_ends_a_mixture_and_says_of_which(
    terms: PerformanceContract,
) -> None:
    record = mixed_sample(terms)
    assert stale(record, [CPU, RECIPE], terms) == []
    for kind, (field, value) in CHANGES.items():
        (change,) = stale(record, [CPU, RECIPE | {field: value}], terms)
        assert (change.kind, change.field, change.now) == (kind, f"tail {field}", value)
        (change,) = stale(record, [CPU | {field: value}, RECIPE], terms)
        assert (change.kind, change.field) == (kind, f"head {field}")
    assert stale(record, [RECIPE, CPU], terms)
    record["contract"]["sha256"] = "0" * 64
    (change,) = stale(record, [CPU, RECIPE], terms)
    assert change.kind == "thresholds"


@pytest.mark.parametrize(
    ("name", "value"),
    [("recipes", {"head": {}}), ("recipes", []), ("mixture", {"head": "x"}), ("mixture", None)],
)
def test_what_is_no_record_of_a_mixture_is_refused(
    name: str, value: object, terms: PerformanceContract, tmp_path: pathlib.Path
) -> None:
    file = tmp_path / "record.json"
    record = mixed_sample(terms)
    file.write_bytes(encode(record))
    assert mixture_in(read_record(file)) == mixture_of(CPU, RECIPE)
    file.write_bytes(encode(record | {name: value}))
    with pytest.raises(MeshnetError, match="expected a record"):
        read_record(file)
