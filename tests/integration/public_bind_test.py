"""Nothing of ours listens beyond loopback without TLS, unless the operator says so."""

import asyncio
import json
import pathlib

import pytest
import yaml
from meshnet_gguf.local_cluster import WorkerProcess, WorkerSpec
from meshnet_gguf.logged_process import PythonProgram
from meshnet_gguf.testing.cluster import fake_cluster
from meshnet_gguf.testing.node_process import node_values

END = 60.0
PUBLIC = ("0.0.0.0:0", "[::]:0")


def node(folder: pathlib.Path, **node: str) -> list[str]:
    values = node_values("n1", "127.0.0.1:1", (0, 8))
    values["node"] = {**values["node"], "advertise": "127.0.0.1:1", **node}
    path = folder / "node.yaml"
    path.write_text(yaml.safe_dump(values))
    return ["node", f"--config={path}"]


def commands(folder: pathlib.Path, worker: str, where: str) -> dict[str, list[str]]:
    """Each of our listeners, told to listen there."""
    database = f"--database=sqlite:///{folder}/t.db"
    return {
        "tracker": ["tracker", database, f"--listen={where}"],
        "tracker's metrics": [
            "tracker",
            database,
            "--listen=127.0.0.1:0",
            f"--metrics_listen={where}",
        ],
        "relay": ["relay", f"--listen={where}"],
        "relay's metrics": ["relay", "--listen=127.0.0.1:0", f"--metrics_listen={where}"],
        "node": node(folder, listen=where),
        "node's metrics": node(folder, metrics_listen=where),
        "gateway": ["serve", "m", f"--workers={worker}", f"--listen={where}"],
        "workers' metrics": ["metrics", worker, f"--listen={where}"],
    }


@pytest.mark.parametrize("where", PUBLIC)
async def test_a_public_address_wants_tls(tmp_path: pathlib.Path, where: str) -> None:
    async with asyncio.timeout(END), fake_cluster(()) as fake:
        (worker,) = fake.cluster.endpoints
        names = list(commands(tmp_path, worker, where))

        async def refused(number: int) -> str:
            folder = tmp_path / str(number)
            folder.mkdir()
            arguments = list(commands(folder, worker, where).values())[number]
            program = await PythonProgram.start(
                "meshnet_gguf.cli.meshnet", *arguments, log=folder / "log"
            )
            code = await program.wait()
            said = program.log.read_text()
            assert code != 0, f"{names[number]} served:\n{said}"
            return said

        for start in range(0, len(names), 2):
            both = [number for number in (start, start + 1) if number < len(names)]
            for number, said in zip(both, await asyncio.gather(*map(refused, both)), strict=True):
                assert "INSECURE_TRANSPORT" in said, f"{names[number]}: {said}"
                assert "--insecure" in said, f"{names[number]}: {said}"
                assert "Traceback" not in said, f"{names[number]}: {said}"


@pytest.mark.parametrize("where", PUBLIC)
async def test_a_worker_on_a_public_address_wants_tls(tmp_path: pathlib.Path, where: str) -> None:
    spec = WorkerSpec(flags=(f"--listen={where}",))
    async with asyncio.timeout(END):
        worker = await WorkerProcess.start(spec, tmp_path / "log")
        assert await worker.wait() == 2
    (refusal,) = worker.events("listen_failed")
    assert refusal["reason"] == "INSECURE_TRANSPORT", json.dumps(refusal)
