"""The certify command on real workers, and whether what it wrote still holds."""

import asyncio
import json
import os
import pathlib
from typing import Any

import pytest
from meshnet.certification import CertificationBook
from meshnet.signing import SigningKey
from meshnet_gguf.local_cluster import LocalCluster, WorkerSpec
from meshnet_gguf.testing.lane_contract import write_lane_contract

PROGRAM = pathlib.Path(os.environ["MESHNET"]).absolute()
WORKER = pathlib.Path(os.environ["WORKER"]).absolute()
# SmolLM2, or a fixture that nobody has pinned.
REAL = os.environ.get("REAL_MODEL")
MODEL = pathlib.Path(REAL or os.environ["FIXTURE_TINY"]).absolute()
# The worker is of a lane whose driver here computes on the CPU.
SOFTWARE = "SOFTWARE_DRIVER" in os.environ

NOT_CERTIFIED = 3


@pytest.fixture(autouse=True)
def worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHNET_WORKER", str(WORKER))
    for name in ("LD_LIBRARY_PATH", "VK_DRIVER_FILES"):
        if name in os.environ:
            monkeypatch.setenv(name, str(pathlib.Path(os.environ[name]).absolute()))


async def meshnet(*arguments: str | pathlib.Path, code: int) -> Any:
    process = await asyncio.create_subprocess_exec(
        PROGRAM,
        *arguments,
        "--json",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode == code, (out.decode(), err.decode())
    return json.loads(out)


async def test_only_a_pinned_model_on_hardware_is_certified_and_a_change_ends_it(
    tmp_path: pathlib.Path,
) -> None:
    approver, certifier = SigningKey.generate(), SigningKey.generate()
    approver.save(tmp_path / "approver.pem")
    certifier.save(tmp_path / "certifier.pem")
    contract = write_lane_contract(tmp_path, approver)
    evidence, records = tmp_path / "lane.json", tmp_path / "lane.records"
    terms = f"--contract={contract.file}"
    answer = await meshnet(
        "certify",
        MODEL,
        "--model-id=m",
        "--threads=1",
        f"--evidence={evidence}",
        terms,
        f"--trusted-key={tmp_path / 'approver.pem.pub'}",
        f"--key={tmp_path / 'certifier.pem'}",
        f"--records={records}",
        code=0 if REAL and not SOFTWARE else NOT_CERTIFIED,
    )
    record = json.loads(evidence.read_bytes())
    assert record["model_id"] == "m"
    assert record["machine"]["cpu"]
    assert record["runtime"]["worker_version"]
    assert len(record["runs"]) == 1
    assert all(row["identical"] for row in record["runs"][0]["rows"])
    if SOFTWARE:
        assert answer["reasons"][0].endswith("no hardware computed them")
        assert "expected hardware, the accelerator is a program" in answer["reasons"][1]
        assert answer["reasons"][2:] == [
            "speed contract: expected real-hardware evidence, got fixture"
        ]
        assert not records.exists()
    elif REAL:
        book = CertificationBook(certifier.trust())
        found = book.check(records.read_bytes().rstrip(b"\n"))
        assert found.record_id == answer["record_id"]
        assert found.lane.fingerprint == record["fingerprint"]
    else:
        (reason,) = (r for r in answer["reasons"] if not r.startswith("speed contract"))
        assert reason.startswith("expected a pinned model")
        assert not records.exists()

    # Judged again from the file alone: without the approver's key nothing certifies.
    again = await meshnet("certify", f"--evidence={evidence}", terms, code=NOT_CERTIFIED)
    assert "speed contract: no trusted person has approved lane.v1" in again["reasons"]

    # The flags of `certify`, and another cache.
    flags = ("--prefill_chunk_tokens=256", "--rollback_tokens=64", "--threads=1")
    specs = [
        WorkerSpec(model=MODEL, flags=flags),
        WorkerSpec(model=MODEL, flags=(*flags, "--kv_type=q8_0")),
    ]
    async with LocalCluster(specs) as cluster:
        same, other = cluster.endpoints
        check = ("certification", "check", evidence, terms)
        held = await meshnet(*check, f"--worker={same}", code=0)
        assert held["checked"][0]["changes"] == []
        revoked = tmp_path / "revoked.records"
        ended = await meshnet(
            *check,
            f"--worker={other}",
            f"--key={tmp_path / 'certifier.pem'}",
            f"--records={revoked}",
            code=1,
        )
    assert ended["checked"][0]["changes"] == [
        {"kind": "cache layout", "field": "kv_type", "before": "f16", "now": "q8_0"}
    ]
    line = CertificationBook(certifier.trust()).check(revoked.read_bytes().rstrip(b"\n"))
    assert (line.status, line.lane.fingerprint) == ("revoked", record["fingerprint"])
