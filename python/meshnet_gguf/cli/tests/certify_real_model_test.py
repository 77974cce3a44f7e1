"""What the documents say of certifying a lane and a mixture, word for word, on a real model.

Both lanes are sets of this CPU's kernels. The terms are the project's with less to run.
"""

import asyncio
import json
import os
import pathlib
import re
import sys
from collections.abc import Iterable

import pytest
from meshnet.certification import CertificationBook
from meshnet.signing import SigningKey
from meshnet.testing.tracker_process import TrackerProcess
from meshnet_gguf.client import ChatMessage, SamplingParams, Token, WorkerClient, open_route
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.local_cluster import LocalCluster, WorkerSpec
from meshnet_gguf.testing.lane_contract import write_lane_contract
from meshnet_gguf.testing.pinned_storage import provide_model

from proto.meshnet.control.v1 import tracker_pb2 as pb
from proto.meshnet.shard.v1 import errors_pb2
from tests.docs.blocks import Block, blocks_for_this_test
from tests.docs.reader import Programs, Reader

PROGRAM, WORKER, MODEL = (
    pathlib.Path(os.environ[name]).absolute() for name in ("MESHNET", "WORKER", "REAL_MODEL")
)
MAINTENANCE, RECIPE = (
    blocks_for_this_test(pathlib.Path(os.environ[name]).read_text())
    for name in ("MAINTENANCE", "RECIPE")
)
TRACKER, TODAY = "127.0.0.1:7100", "127.0.0.1:7001"
CONTRACTS = "python/meshnet_gguf/contracts/performance"


@pytest.fixture(name="storage", scope="module")
def storage_with_the_model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    storage = tmp_path_factory.mktemp("storage")
    asyncio.run(provide_model(storage, "smollm2", MODEL))
    return storage


@pytest.fixture(autouse=True)
def worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHNET_WORKER", str(WORKER))


def reader_of(
    folder: pathlib.Path, storage: pathlib.Path, name: str, approver: SigningKey | None = None
) -> tuple[Reader, dict[str, str]]:
    """One whose programs take that contract with less to run, and for four threads one.

    Its words may be added to.
    """
    words = {"--threads 4": "--threads 1", "--threads=4": "--threads=1", "model.gguf": str(MODEL)}
    if "avx512f" in pathlib.Path("/proc/cpuinfo").read_text():
        # Not the best of this CPU either, and many times as fast.
        words["--cpu_variant=sse42"] = "--cpu_variant=haswell"
    terms = folder / "a" / CONTRACTS
    reader = Reader(
        folder,
        Programs(
            run={},
            build={},
            path={
                "worker": f'exec "{WORKER}" "$@"',
                "meshnet": f"""
                    export PYTHONPATH="{os.pathsep.join(sys.path)}"
                    case "$1 $2" in
                    "certify "* | "certification check") set -- "$@" --contract "{terms}/{name}" ;;
                    esac
                    exec "{PROGRAM}" "$@"
                """,
            },
        ),
        words=words,
        environment={"MESHNET_STORAGE": str(storage), "MESHNET_WORKER": str(WORKER)},
    )
    terms.mkdir(parents=True)
    write_lane_contract(terms, approver, name)
    return reader, words


async def admission(tracker: TrackerProcess, fingerprint: str) -> int:
    """What the tracker says to a worker of that lane."""
    registration = pb.Registration(
        worker_id="w",
        node_id="n",
        endpoint="h:1",
        model_id="smollm2",
        fingerprint=fingerprint,
        span=pb.Span(begin=0, end=1),
        model_units=1,
        max_sessions=1,
    )
    request = pb.RegisterRequest(registration=registration, load=pb.Load(ready=True))
    return (await tracker.stub.Register(request)).admission


async def fingerprint_of(endpoint: str) -> str:
    async with WorkerClient(endpoint) as client:
        return (await client.capability()).recipe_fingerprint


async def test_a_lane_is_certified_and_a_change_ends_it(
    storage: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    reader, words = reader_of(tmp_path, storage, "lane.v1.yaml")
    here = reader.machine("a")
    keys, certifies, checks, revokes, imports = MAINTENANCE
    await reader.do(keys)
    specs = [
        WorkerSpec(model=MODEL, flags=("--threads=1", *more)) for more in ((), ("--kv_type=q8_0",))
    ]
    async with (
        await TrackerProcess.start(
            f"sqlite:///{tmp_path}/t.db", f"--trusted_key={here}/me.pem.pub"
        ) as tracker,
        LocalCluster(specs) as cluster,
    ):
        same, other = cluster.endpoints
        lane = await fingerprint_of(same)
        words[TRACKER] = tracker.endpoint
        assert await admission(tracker, lane) == pb.ADMISSION_DARK
        await reader.do(certifies)
        assert await admission(tracker, lane) == pb.ADMISSION_CERTIFIED
        assert await admission(tracker, await fingerprint_of(other)) == pb.ADMISSION_DARK

        words[TODAY] = same
        await reader.do(checks)
        words[TODAY] = other
        await reader.do(revokes)
        assert "cache layout: kv_type was f16, is q8_0" in reader.said
        assert await admission(tracker, lane) == pb.ADMISSION_CERTIFIED
        await reader.do(imports)
        assert await admission(tracker, lane) == pb.ADMISSION_DARK

    evidence = json.loads((here / "lane.json").read_bytes())
    assert (evidence["model_id"], evidence["fingerprint"]) == ("smollm2", lane)
    (run,) = evidence["runs"]
    assert all(row["identical"] for row in run["rows"])
    book = CertificationBook(SigningKey.load(here / "me.pem").trust())
    lines = (here / "lane.records").read_bytes().splitlines()
    records = [book.check(line) for line in lines]
    assert [record.status for record in records] == ["certified", "revoked"]
    assert {record.lane.fingerprint for record in records} == {lane}


async def test_a_mixture_is_certified_and_its_workers_serve_it(
    storage: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    key = SigningKey.generate()
    reader, words = reader_of(tmp_path, storage, "mixture.v1.yaml", key)
    here = reader.machine("a")
    key.save(here / "me.pem")
    certifies, *serves = RECIPE
    async with await TrackerProcess.start(
        f"sqlite:///{tmp_path}/t.db", f"--trusted_key={here}/me.pem.pub"
    ) as tracker:
        words[TRACKER] = tracker.endpoint
        await reader.do(certifies)
    evidence = json.loads((here / "mixture.json").read_bytes())
    (line,) = (here / "mixture.records").read_bytes().splitlines()
    signed = CertificationBook(key.trust()).check(line)
    assert signed.record_id in reader.said  # of the tracker, too
    assert (signed.status, vars(signed.mixture)) == ("certified", evidence["mixture"])
    assert signed.lane.fingerprint == evidence["fingerprint"]
    (run,) = evidence["runs"]
    for row in run["rows"]:
        assert row["squared_error"]["of_lanes"] > 0
    try:
        head, tail = await started(reader, words, serves)
        assert await fingerprint_of(head) == evidence["mixture"]["head"]
        assert await fingerprint_of(tail) == evidence["mixture"]["tail"]
        with pytest.raises(MeshnetError) as refused:
            await open_route([head, tail])
        assert refused.value.reason == errors_pb2.REASON_RECIPE_MISMATCH
        async with (
            await open_route([head, tail], mixture=signed.lane.fingerprint) as route,
            route.session() as session,
        ):
            hello = [ChatMessage("user", "Hello")]
            answer = await session.chat(hello, SamplingParams(), max_tokens=4)
            assert len([event async for event in answer if isinstance(event, Token)]) == 4
    finally:
        await reader.end()


async def started(reader: Reader, words: dict[str, str], blocks: Iterable[Block]) -> list[str]:
    """Starts the workers that the blocks start, on ports that are free: where they listen."""
    words |= {TODAY: "127.0.0.1:0", "127.0.0.1:7002": "127.0.0.1:0"}
    endpoints = []
    for block in blocks:
        await reader.do(block)
        endpoints += re.findall(r'"event":"listening","address":"([^"]+)"', reader.said)
    return endpoints
