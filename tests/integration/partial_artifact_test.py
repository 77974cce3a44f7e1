"""Workers on parts of one artifact, each provisioned on a storage of its own."""

import asyncio
import dataclasses
import json
import os
import pathlib
import shutil
from collections.abc import Iterator

import pytest
from meshnet_gguf.client import LayerRange, Route, RouteHop, WorkerClient, open_route
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.local_cluster import LocalCluster, WorkerSpec
from meshnet_gguf.manifest import Manifest, Origin, make_manifest
from meshnet_gguf.provision import Provisioned, open_sources, provision
from meshnet_gguf.testing.model_server import ModelServer

from proto.meshnet.shard.v1 import errors_pb2

END = 60.0
SPLIT = [pathlib.Path(path).absolute() for path in os.environ["FIXTURE_TINY_SPLIT"].split()]
CHUNK = 1 << 14
PROMPT = [300 + (7919 * i) % 200 for i in range(40)]
FLAGS = (
    "--max_sessions=1",
    "--context_tokens=256",
    "--prefill_chunk_tokens=64",
    "--rollback_tokens=16",
    "--threads=1",
)
STAGES = (LayerRange(0, 2), LayerRange(2, 5), LayerRange(5, 8))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    folder = tmp_path_factory.mktemp("source")
    for path in SPLIT:
        shutil.copy(path, folder / path.name)
    with ModelServer(folder) as server:
        yield server


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    return make_manifest(SPLIT, Origin("example/tiny", "r1"), chunk_bytes=CHUNK)


async def provisioned(
    manifest: Manifest, server: ModelServer, to: pathlib.Path, layers: LayerRange | None
) -> Provisioned:
    async with open_sources([server.url]) as sources:
        bounds = (layers.begin, layers.end) if layers else None
        return await provision(manifest, sources, to, layers=bounds)


def fill_holes(manifest: Manifest, done: Provisioned) -> int:
    """Writes NaNs where nothing was fetched; whoever read them would compute nonsense."""
    filled = 0
    for kept in json.loads((done.folder / "provisioned.json").read_text())["files"]:
        file = next(file for file in manifest.files if file.name == kept["name"])
        bounds = kept["chunks"]
        fetched = {
            chunk
            for begin, end in zip(bounds[::2], bounds[1::2], strict=True)
            for chunk in range(begin, end)
        }
        path = done.folder / file.name
        path.chmod(0o644)
        with path.open("r+b") as content:
            for chunk in set(range(len(file.chunks))) - fetched:
                offset, length = manifest.chunk_span(file, chunk)
                content.seek(offset)
                filled += content.write(b"\xff" * length)
    return filled


def spec(done: Provisioned, layers: LayerRange | None) -> WorkerSpec:
    return WorkerSpec(layers, done.model, (*FLAGS, f"--manifest={done.manifest}"))


async def generated(route: Route) -> tuple[int, ...]:
    async with asyncio.timeout(END), route.session() as session:
        result = await session.generate(
            PROMPT, max_tokens=16, ignore_end_of_generation=True
        ).result()
        return result.token_ids


async def artifacts(endpoints: list[str]) -> set[str]:
    found = set()
    for endpoint in endpoints:
        async with WorkerClient(endpoint) as worker:
            found.add((await worker.capability()).artifact_sha256)
    return found


async def test_stages_on_parts_are_one_model(
    manifest: Manifest, server: ModelServer, tmp_path: pathlib.Path
) -> None:
    total = sum(path.stat().st_size for path in SPLIT)
    whole = await provisioned(manifest, server, tmp_path / "whole", None)
    async with LocalCluster([spec(whole, None)]) as cluster:
        async with await open_route(cluster.endpoints) as route:
            expected = await generated(route)
        assert await artifacts(cluster.endpoints) == {manifest.artifact_sha256}
    specs = []
    for layers in STAGES:
        done = await provisioned(manifest, server, tmp_path / str(layers.begin), layers)
        assert done.fetched_bytes < 0.6 * total
        assert fill_holes(manifest, done) == total - done.fetched_bytes
        specs.append(spec(done, layers))
    async with LocalCluster(specs) as cluster:
        async with await open_route(cluster.endpoints) as route:
            assert await generated(route) == expected
        assert await artifacts(cluster.endpoints) == {manifest.artifact_sha256}


async def test_who_has_a_manifest_and_who_has_none_are_told_why_they_do_not_fit(
    manifest: Manifest, server: ModelServer, tmp_path: pathlib.Path
) -> None:
    layers = LayerRange(4, 8)
    done = await provisioned(manifest, server, tmp_path, layers)
    specs = [WorkerSpec(LayerRange(0, 4), SPLIT[0], FLAGS), spec(done, layers)]
    async with asyncio.timeout(END), LocalCluster(specs) as cluster:
        with pytest.raises(MeshnetError) as caught:
            await open_route(cluster.endpoints)
        # As the head itself says it, whatever a client believes.
        async with WorkerClient(cluster.endpoints[0]) as head:
            own = await head.capability()
            other = dataclasses.replace(own, artifact_sha256=manifest.artifact_sha256)
            hops = [
                RouteHop(cluster.endpoints[0], own.layers),
                RouteHop(cluster.endpoints[1], layers),
            ]
            with pytest.raises(MeshnetError) as refused:
                async with Route([head], [other], hops).session():
                    pytest.fail("a worker served another artifact than its own")
    for error in (caught.value, refused.value):
        assert error.reason == errors_pb2.REASON_ARTIFACT_MISMATCH
        assert manifest.artifact_sha256 in error.message
        assert own.artifact_sha256 in error.message
        assert "a manifest" in error.message


@pytest.mark.parametrize(("begin", "end"), [(layer, layer + 1) for layer in range(8)])
async def test_every_layer_alone_is_enough_for_its_worker(
    manifest: Manifest, server: ModelServer, tmp_path: pathlib.Path, begin: int, end: int
) -> None:
    """What provisioning leaves out, no worker asks for."""
    layers = LayerRange(begin, end)
    done = await provisioned(manifest, server, tmp_path, layers)
    async with LocalCluster([spec(done, layers)]) as cluster:
        assert await artifacts(cluster.endpoints) == {manifest.artifact_sha256}


def record_of_everything(manifest: Manifest) -> str:
    files = [{"name": file.name, "chunks": [0, len(file.chunks)]} for file in manifest.files]
    return json.dumps({"artifact_sha256": manifest.artifact_sha256, "files": files})


async def refusal(worker: WorkerSpec) -> MeshnetError:
    with pytest.raises(MeshnetError) as refused:
        async with LocalCluster([worker]):
            pass
    return refused.value


async def test_layers_that_were_not_fetched(
    manifest: Manifest, server: ModelServer, tmp_path: pathlib.Path
) -> None:
    done = await provisioned(manifest, server, tmp_path, LayerRange(2, 5))
    for layers in (LayerRange(0, 5), LayerRange(2, 6), LayerRange(5, 8), None):
        error = await refusal(spec(done, layers))
        assert error.reason_name == "ARTIFACT_INCOMPLETE"
        assert "were not fetched" in error.message
    # Without the record, or with one that lies, a hole is still no part of the artifact.
    record = done.folder / "provisioned.json"
    true = record.read_text()
    for lie in ("", "{}", record_of_everything(manifest)):
        record.write_text(lie)
        error = await refusal(spec(done, LayerRange(2, 6)))
        assert error.reason_name == "ARTIFACT_MISMATCH"
    record.write_text(true)
    await provisioned(manifest, server, tmp_path, LayerRange(5, 6))
    async with LocalCluster([spec(done, LayerRange(2, 6))]):
        pass


async def test_damage_in_what_is_read_and_nowhere_else(
    manifest: Manifest, server: ModelServer, tmp_path: pathlib.Path
) -> None:
    done = await provisioned(manifest, server, tmp_path, None)
    last = done.folder / SPLIT[2].name
    last.chmod(0o644)
    with last.open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"damage")
    error = await refusal(spec(done, LayerRange(5, 8)))
    assert error.reason_name == "ARTIFACT_MISMATCH"
    assert "--recheck" in error.message
    async with LocalCluster([spec(done, LayerRange(0, 2))]) as cluster:
        assert await artifacts(cluster.endpoints) == {manifest.artifact_sha256}
    os.truncate(last, 4096)
    error = await refusal(spec(done, LayerRange(0, 2)))
    assert "expected 7921152 bytes by the manifest, got 4096" in error.message
    last.unlink()
    error = await refusal(spec(done, LayerRange(0, 2)))
    assert error.reason_name == "ARTIFACT_INCOMPLETE"
    assert SPLIT[2].name in error.message


async def test_a_manifest_of_something_else(
    manifest: Manifest, server: ModelServer, tmp_path: pathlib.Path
) -> None:
    done = await provisioned(manifest, server, tmp_path, None)
    text = manifest.to_bytes().decode()
    for change, said in (
        (text.replace(manifest.tokenizer_sha256, "0" * 64), "ARTIFACT_MISMATCH"),
        (text.replace(manifest.files[0].chunks[0], "0" * 64), "ARTIFACT_MISMATCH"),
        (text.replace("meshnet.manifest/1", "meshnet.manifest/2"), "MANIFEST_INVALID"),
        (text[:-10], "MANIFEST_INVALID"),
        ("[" * 100_000, "MANIFEST_INVALID"),
    ):
        beside = done.folder / "other.json"
        beside.write_text(change)
        worker = WorkerSpec(LayerRange(0, 2), done.model, (*FLAGS, f"--manifest={beside}"))
        assert (await refusal(worker)).reason_name == said
