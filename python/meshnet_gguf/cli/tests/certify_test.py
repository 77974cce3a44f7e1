"""The certify command on real workers, and whether what it wrote still holds."""

import asyncio
import json
import os
import pathlib
from typing import Any

import grpc.aio
import pytest
from meshnet.certification import CertificationBook
from meshnet.errors import Reason, error_from_rpc
from meshnet.signing import SigningKey
from meshnet.testing.tracker_process import TrackerProcess
from meshnet_gguf.local_cluster import LocalCluster, WorkerSpec
from meshnet_gguf.testing.lane_contract import write_lane_contract
from meshnet_gguf.testing.lane_driver import use_lane_driver

from proto.meshnet.control.v1 import tracker_pb2

PROGRAM = pathlib.Path(os.environ["MESHNET"]).absolute()
WORKER = pathlib.Path(os.environ["WORKER"]).absolute()
# A fixture that nobody has pinned; or SmolLM2, for a worker whose driver computes on the CPU.
MODEL = pathlib.Path(os.environ["MODEL"]).absolute()
SOFTWARE = "SOFTWARE_DRIVER" in os.environ

# How the workers of two lanes are started here: the first's, the second's.
HEAD_FLAG, TAIL_FLAG = os.environ["MIXED_HEAD"], os.environ["MIXED_TAIL"]

NOT_CERTIFIED = 3


@pytest.fixture(name="shaders", scope="module")
def compiled_shaders(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("shaders")


@pytest.fixture(autouse=True)
def worker(monkeypatch: pytest.MonkeyPatch, shaders: pathlib.Path) -> None:
    monkeypatch.setenv("MESHNET_WORKER", str(WORKER))
    use_lane_driver(monkeypatch, shaders)


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
        code=NOT_CERTIFIED,
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


async def test_a_mixture_is_certified_by_both_lanes_on_hardware_and_a_change_of_one_ends_it(
    tmp_path: pathlib.Path,
) -> None:
    approver, certifier = SigningKey.generate(), SigningKey.generate()
    approver.save(tmp_path / "approver.pem")
    certifier.save(tmp_path / "certifier.pem")
    terms = write_lane_contract(tmp_path, approver, "mixture.v1.yaml")
    evidence, records = tmp_path / "mixture.json", tmp_path / "mixture.records"
    answer = await meshnet(
        "certify",
        MODEL,
        "--model-id=m",
        "--mixed",
        f"--head-flag={HEAD_FLAG}",
        f"--tail-flag={TAIL_FLAG}",
        "--threads=1",
        f"--evidence={evidence}",
        f"--contract={terms.file}",
        f"--trusted-key={tmp_path / 'approver.pem.pub'}",
        f"--key={tmp_path / 'certifier.pem'}",
        f"--records={records}",
        code=NOT_CERTIFIED,
    )
    record = json.loads(evidence.read_bytes())
    (run,) = record["runs"]
    chain = [worker["recipe_fingerprint"] for worker in run["workers"]]
    assert chain == [record["mixture"]["head"], record["mixture"]["tail"]]
    assert record["recipes"]["head"] != record["recipes"]["tail"]
    assert run["sessions"]["identical"]
    assert len(run["cancellations"]) == 3
    assert not any(value for stage in run["left_behind"] for value in stage.values())
    for row in run["rows"]:
        print(row["squared_error"], row["same_choices"])
        assert row["compared_logit_rows"] == 16
        assert row["squared_error"]["of_lanes"] > 0

    async with await TrackerProcess.start(
        f"sqlite:///{tmp_path}/t.db", f"--trusted_key={tmp_path / 'certifier.pem.pub'}"
    ) as tracker:
        give = ("certification", "import", f"--tracker={tracker.endpoint}")
        # A tracker takes nothing that a key did not sign.
        assert not records.exists()
        refused = await meshnet(*give, evidence, code=1)
        assert "expected of a certification record" in refused["error"]["message"]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await tracker.stub.PutCertification(
                tracker_pb2.PutCertificationRequest(record=evidence.read_bytes())
            )
        assert error_from_rpc(caught.value).reason is Reason.CERTIFICATION_INVALID
    if SOFTWARE:
        assert [worker["evidence"] for worker in run["workers"]] == ["DARK", "FIXTURE"]
        assert answer["backend"] == "cpu before vulkan"
        assert answer["reasons"] == [
            "a worker calls its own results fixture evidence: no hardware computed them",
            *(r for r in answer["reasons"] if r.startswith("expected hardware, the accelerator")),
            "speed contract: expected real-hardware evidence, got fixture",
        ]
        assert len(answer["reasons"]) == 3

    # The flags of `certify`, and another cache on the second lane.
    flags = ("--prefill_chunk_tokens=256", "--rollback_tokens=64", "--threads=1")
    specs = [
        WorkerSpec(model=MODEL, flags=(*flags, HEAD_FLAG)),
        WorkerSpec(model=MODEL, flags=(*flags, TAIL_FLAG, "--kv_type=q8_0")),
    ]
    async with LocalCluster(specs) as cluster:
        ended = await meshnet(
            "certification",
            "check",
            evidence,
            f"--contract={terms.file}",
            f"--worker={','.join(cluster.endpoints)}",
            f"--key={tmp_path / 'certifier.pem'}",
            f"--records={tmp_path / 'revoked.records'}",
            code=1,
        )
    assert ended["checked"][0]["changes"] == [
        {"kind": "cache layout", "field": "tail kv_type", "before": "f16", "now": "q8_0"}
    ]
    (line,) = (tmp_path / "revoked.records").read_bytes().splitlines()
    revoked = CertificationBook(certifier.trust()).check(line)
    assert (revoked.status, vars(revoked.mixture)) == ("revoked", record["mixture"])
