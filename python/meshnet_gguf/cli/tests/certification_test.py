"""The command `meshnet certification`, on a real tracker."""

import asyncio
import json
import os
import pathlib
from typing import Any

from meshnet.certification import Lane, issue
from meshnet.signing import SigningKey
from meshnet.testing.tracker_process import TrackerProcess

from proto.meshnet.control.v1 import tracker_pb2 as pb

PROGRAM = pathlib.Path(os.environ["MESHNET"]).absolute()


async def certification(*arguments: str | pathlib.Path, code: int = 0) -> Any:
    process = await asyncio.create_subprocess_exec(
        PROGRAM,
        "certification",
        *arguments,
        "--json",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode == code, err.decode()
    return json.loads(out)


async def test_records_reach_the_tracker(tmp_path: pathlib.Path) -> None:
    key, other = SigningKey.generate(), SigningKey.generate()
    key.save(tmp_path / "key.pem")
    public = tmp_path / "key.pem.pub"
    lane = Lane("m", "f")
    good = issue(key, lane, issued_ms=1, evidence_sha256="0" * 64)
    revoked = issue(key, lane, issued_ms=2, evidence_sha256="0" * 64, status="revoked")
    foreign = issue(other, lane, issued_ms=3, evidence_sha256="0" * 64)
    for name, record in (("good", good), ("revoked", revoked), ("foreign", foreign)):
        (tmp_path / name).write_bytes(record.encode() + b"\n")

    shown = await certification("show", tmp_path / "good", "--trusted-key", public)
    assert [(r["model_id"], r["status"], r["trusted"]) for r in shown["records"]] == [
        ("m", "certified", True)
    ]
    shown = await certification("show", tmp_path / "foreign", "--trusted-key", public, code=1)
    assert not shown["records"][0]["trusted"]

    async with await TrackerProcess.start(
        f"sqlite:///{tmp_path}/t.db", f"--trusted_key={public}"
    ) as tracker:
        at = f"--tracker={tracker.endpoint}"
        registration = pb.Registration(
            worker_id="w",
            node_id="n",
            endpoint="h:1",
            model_id="m",
            fingerprint="f",
            span=pb.Span(begin=0, end=1),
            model_units=1,
            max_sessions=1,
        )

        async def admission() -> int:
            request = pb.RegisterRequest(registration=registration, load=pb.Load(ready=True))
            return (await tracker.stub.Register(request)).admission

        assert await admission() == pb.ADMISSION_DARK
        for _ in range(2):
            imported = await certification("import", tmp_path / "good", at)
            assert imported == {"record_ids": [good.record_id]}
        assert await admission() == pb.ADMISSION_CERTIFIED
        refused = await certification("import", tmp_path / "foreign", at, code=1)
        assert "the signature of one of 1 trusted keys" in refused["error"]["message"]
        await certification("import", tmp_path / "revoked", at)
        assert await admission() == pb.ADMISSION_DARK
