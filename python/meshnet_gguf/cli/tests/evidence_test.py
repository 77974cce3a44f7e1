"""The evidence command: a real run on a small random model, and what it refuses."""

import hashlib
import json
import os
import pathlib
import subprocess
from typing import Any

import pytest

from tests.docs.blocks import blocks_for_this_test
from tests.docs.reader import Programs, Reader

TINY = os.environ["FIXTURE_TINY"]
SPLIT = os.environ["FIXTURE_TINY_SPLIT"].split()
PROGRAM, WORKER, ABSOLUTE_TINY = (
    pathlib.Path(os.environ[name]).absolute() for name in ("MESHNET", "WORKER", "FIXTURE_TINY")
)
DOCUMENT = pathlib.Path(os.environ["DOCUMENT"]).read_text()
FIXTURE = "--contract=deepseek4-tiny-fixture"
PLAN = {
    "stages": 3,
    "context_tokens": 512,
    "prefill_chunk_tokens": 64,
    "rollback_tokens": 64,
    "prompt_tokens": [40, 150],
    "decode_tokens": 16,
    "compared_logit_rows": 8,
    "cancellations": 1,
    "sessions": 4,
}


def meshnet(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PROGRAM, "evidence", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "MESHNET_WORKER": str(WORKER)},
    )


@pytest.fixture
def plan(tmp_path: pathlib.Path) -> str:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(PLAN))
    return f"--plan={path}"


def identity(files: list[str]) -> str:
    """As a worker computes it."""
    digests = [hashlib.sha256(pathlib.Path(file).read_bytes()).hexdigest() for file in files]
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("".join(f"{digest}\n" for digest in digests).encode()).hexdigest()


def check(record: dict[str, Any], files: list[str]) -> None:
    """Holds a record against what a run of PLAN over four workers shows."""
    assert record["schema"] == "meshnet.evidence/1"
    assert record["class"] == "fixture"
    assert record["lane"] == "dark"
    assert record["outcome"] == "identical"
    assert record["contract"]["name"] == "deepseek4-tiny-fixture"
    assert record["artifact"]["sha256"] == identity(files)
    assert [file["name"] for file in record["artifact"]["files"]] == [
        pathlib.Path(file).name for file in files
    ]
    assert record["recipe"]["artifact_sha256"] == identity(files)
    assert record["recipe"]["mtp"] == "off"
    assert record["machine"]["cores"] >= 1
    assert record["machine"]["memory_mib"] > 0
    assert record["machine"]["kernel"]
    assert record["machine"]["drivers"] is not None
    results = record["results"]
    assert results["layers"] == [[0, 2], [2, 4], [4, 6], [6, 8]]
    assert [worker["layers"] for worker in results["workers"]] == results["layers"]
    assert {worker["engine"] for worker in results["workers"]} == {"llama"}
    assert results["sessions"] == {"together": 4, "tokens": 16, "identical": True}
    assert len(results["cancellations"]) == 1
    assert results["left_behind"] == [
        {"open_sessions": 0, "kv_bytes": 0, "queued_steps": 0} for _ in range(4)
    ]
    assert [row["prompt_tokens"] for row in results["rows"]] == [40, 150]
    for row in results["rows"]:
        assert row["identical"] is True
        assert row["max_logit_difference"] == 0
        assert row["compared_tokens"] == 16 + 8
        assert row["compared_logit_rows"] == 8
        assert row["ttft_ms"] > 0
        assert len(row["seam_bytes_per_token"]) == 3
        # Four streams of 128 floats, a position and a token id.
        for size in row["seam_bytes_per_token"]:
            assert 4 * 128 * 4 + 8 <= size < 4 * 128 * 4 + 300


async def test_the_document_s_run_of_a_fixture_is_fixture_evidence(
    plan: str, tmp_path: pathlib.Path
) -> None:
    """By a plan with less to run than the fixed one."""
    reader = Reader(
        tmp_path,
        Programs(
            run={"//:meshnet": [str(PROGRAM)]},
            build={"//tests/fixtures:deepseek4_tiny": [ABSOLUTE_TINY]},
        ),
        words={" evidence ": f" evidence {plan} --threads=1 "},
        environment={"MESHNET_WORKER": str(WORKER)},
    )
    for block in blocks_for_this_test(DOCUMENT):
        await reader.do(block)
    here = reader.machine("a")
    check(json.loads((here / "fixture.json").read_text()), [TINY])
    assert not (here / "evidence.json").exists()


def test_a_run_of_a_split_set_is_that_of_all_its_files(plan: str, tmp_path: pathlib.Path) -> None:
    target = tmp_path / "out" / "evidence.json"
    result = meshnet(
        SPLIT[0],
        FIXTURE,
        plan,
        "--stages=4",
        "--threads=1",
        f"--artifact-sha256={identity(SPLIT)}",
        f"--record={target}",
        "--json",
    )
    assert result.returncode == 0, result.stderr
    record: dict[str, Any] = json.loads(target.read_text())
    assert json.loads(result.stdout) == record
    check(record, SPLIT)


def test_by_its_manifest_the_artifact_is_the_manifests_hash(
    plan: str, tmp_path: pathlib.Path
) -> None:
    manifest = tmp_path / "manifest.json"
    made = subprocess.run(
        [PROGRAM, "manifest", TINY, "--repository=example/tiny", f"--out={manifest}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert made.returncode == 0, made.stderr
    result = meshnet(TINY, FIXTURE, plan, "--threads=1", f"--manifest={manifest}", "--json")
    assert result.returncode == 0, result.stderr
    record = json.loads(result.stdout)
    assert record["outcome"] == "identical"
    assert record["artifact"]["manifest"] == "manifest.json"
    assert record["artifact"]["origin"]["repository"] == "example/tiny"
    assert record["artifact"]["sha256"] == identity([str(manifest)])


def refused(*arguments: str) -> tuple[str, str]:
    result = meshnet(*arguments, "--json")
    assert result.returncode == 1
    error = json.loads(result.stdout)["error"]
    return error["reason"], error["message"]


@pytest.mark.parametrize("arguments", [(), ("/nowhere/V4.gguf",)])
def test_missing_weights_are_named(arguments: tuple[str, ...], tmp_path: pathlib.Path) -> None:
    target = tmp_path / "evidence.json"
    reason, message = refused(*arguments, f"--record={target}")
    assert reason == "ARTIFACT_UNREADABLE"
    assert "the weights are missing" in message
    assert "the contract deepseek-v4-flash" in message
    assert "revision 60d8d70770c6776ff598c94bb586a859a38244f1" in message
    assert "43 main layers" in message
    assert not target.exists()


def test_a_missing_part_is_named(tmp_path: pathlib.Path) -> None:
    for file in SPLIT[:2]:
        (tmp_path / pathlib.Path(file).name).write_bytes(pathlib.Path(file).read_bytes())
    reason, message = refused(str(tmp_path / pathlib.Path(SPLIT[0]).name), FIXTURE)
    assert reason == "ARTIFACT_UNREADABLE"
    assert pathlib.Path(SPLIT[2]).name in message


def test_a_fixture_is_never_the_real_model(plan: str, tmp_path: pathlib.Path) -> None:
    target = tmp_path / "evidence.json"
    reason, message = refused(TINY, plan, f"--record={target}")
    assert reason == "ARTIFACT_MISMATCH"
    assert "it is a generated fixture" in message
    assert "expected 43 main layers" in message
    assert not target.exists()


def test_another_artifact_than_expected_is_refused(plan: str, tmp_path: pathlib.Path) -> None:
    target = tmp_path / "evidence.json"
    reason, message = refused(
        TINY, FIXTURE, plan, "--threads=1", f"--artifact-sha256={'0' * 64}", f"--record={target}"
    )
    assert reason == "ARTIFACT_MISMATCH"
    assert identity([TINY]) in message
    assert not target.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context_tokens": 100}, "expected prompt and decoded tokens within 100, got 174"),
        ({"nonsense": 1}, "is no plan"),
        ({"prompt_tokens": 5}, "is no plan"),
    ],
)
def test_plans_that_are_none_are_refused(
    change: dict[str, Any], message: str, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**PLAN, **change}))
    assert refused(TINY, FIXTURE, f"--plan={path}")[0] == "CONFIGURATION_INVALID"
    assert message in refused(TINY, FIXTURE, f"--plan={path}")[1]


def test_help_has_an_example() -> None:
    usage = meshnet("--help")
    assert usage.returncode == 0
    assert "    meshnet evidence V4-00001-of-00004.gguf --stages 4 --record evidence.json\n" in (
        usage.stdout
    )
