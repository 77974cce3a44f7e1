"""The commands `meshnet recipe`, on real workers, `meshnet keys` and `meshnet certs`."""

import asyncio
import json
import os
import pathlib
import stat
from typing import Any

from meshnet_gguf.client import LayerRange
from meshnet_gguf.local_cluster import LocalCluster, WorkerSpec
from meshnet_gguf.recipe import differences, explain

PROGRAM = pathlib.Path(os.environ["MESHNET"]).absolute()


async def meshnet(*arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        PROGRAM,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def answer(*arguments: str, code: int = 0) -> Any:
    found, out, err = await meshnet(*arguments, "--json")
    assert found == code, err
    return json.loads(out)


async def test_recipes_of_running_workers() -> None:
    specs = [
        WorkerSpec(LayerRange(0, 4), flags=("--fake_layers=8",)),
        WorkerSpec(LayerRange(4, 8), flags=("--fake_layers=8",)),
        WorkerSpec(LayerRange(4, 8), flags=("--fake_layers=8", "--batch_policy=shared")),
    ]
    async with LocalCluster(specs) as cluster:
        head, tail, other = cluster.endpoints
        one = await answer("recipe", head)
        fields = {field["name"]: field for field in one["fields"]}
        assert fields["batch_policy"]["value"] == "exact"
        assert all(field["meaning"] for field in one["fields"])
        assert (one["layers"], one["evidence"]) == ([0, 4], "FIXTURE")
        assert len(one["fingerprint"]) == 64

        same = await answer("recipe", head, tail)
        assert same == {"fingerprints": [one["fingerprint"]] * 2, "differences": []}

        changed = await answer("recipe", head, other, code=1)
        assert changed["differences"] == [{"name": "batch_policy", "values": ["exact", "shared"]}]
        assert changed["fingerprints"][0] != changed["fingerprints"][1]

        code, out, _ = await meshnet("recipe", head)
        assert code == 0
        assert one["fingerprint"] in out
        code, out, _ = await meshnet("recipe", head, other)
        assert code == 1
        assert "batch_policy" in out
        assert "shared" in out
    gone = await answer("recipe", head, code=1)
    assert gone["error"]["reason"] == "PEER_UNREACHABLE"
    assert (await meshnet("recipe"))[0] == 2


def test_differences_name_every_field() -> None:
    assert differences({"a": "1", "b": "2"}, {"b": "3", "c": "4"}) == [
        ("a", "1", None),
        ("b", "2", "3"),
        ("c", None, "4"),
    ]
    assert [(e.name, e.value, e.meaning) for e in explain({"zzz": "1"})] == [("zzz", "1", "")]


async def test_keys(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "key.pem"
    made = await answer("keys", "make", str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert await answer("keys", "show", f"{path}.pub") == made
    again = await answer("keys", "make", str(path), code=1)  # never over another key
    assert again["error"]["reason"] == "CONFIGURATION_INVALID"
    assert (await meshnet("keys", "explode", str(path)))[0] == 2


async def test_certs(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "ca"
    (made,) = (await answer("certs", "init", str(folder)))["certificates"]
    assert made["is_authority"]
    issued = await answer("certs", "issue", str(folder), "w1", "--host=10.0.0.5", "--days=7")
    assert issued["written"] == [str(folder / "w1.pem"), str(folder / "w1.key")]
    (facts,) = issued["certificates"]
    assert (facts["common_name"], facts["names"]) == ("w1", ["w1", "10.0.0.5"])
    assert stat.S_IMODE((folder / "w1.key").stat().st_mode) == 0o600
    assert len((await answer("certs", "rotate", str(folder)))["certificates"]) == 2
    assert len((await answer("certs", "retire", str(folder)))["certificates"]) == 1
    _, text, _ = await meshnet("certs", "show", str(folder / "w1.pem"))
    assert text.startswith("certificate w1 (w1, 10.0.0.5), issued by meshnet, until ")
    refused = await answer("certs", "init", str(folder), code=1)
    assert refused["error"]["reason"] == "CONFIGURATION_INVALID"
    assert (await meshnet("certs", "issue", str(folder)))[0] == 2
