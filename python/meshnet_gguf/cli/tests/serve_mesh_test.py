"""`meshnet serve` as a mesh: it starts alone, others join it, and nothing is left behind."""

import asyncio
import contextlib
import json
import os
import pathlib
import shutil
import signal
from typing import Any

import httpx
import openai
import pytest
from meshnet.certificates import Authority
from meshnet.tracker_client import TrackerClient
from meshnet_gguf.manifest import Origin, make_manifest
from meshnet_gguf.testing.model_server import ModelServer
from meshnet_gguf.testing.node_process import wait_gone
from meshnet_gguf.testing.serve_process import serving

from proto.meshnet.control.v1 import tracker_pb2

MESHNET = os.environ["MESHNET"]
MODEL = os.path.realpath(os.environ["DEEPSEEK4_MODEL"])
LAYERS = 8


def here(*arguments: str) -> contextlib.AbstractAsyncContextManager[Any]:
    places = ("--listen=127.0.0.1:0", "--mesh-listen=127.0.0.1:0")
    return serving(MESHNET, "serve", MODEL, *places, *arguments)


def children(pid: int) -> set[int]:
    """All processes below one."""
    found: set[int] = set()
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text("ascii").split():
            found |= {int(child)} | children(int(child))
    return found


async def ask(url: str, model: str, choices: int = 1) -> str:
    async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
        answer = await client.completions.create(
            model=model, prompt="Hello", max_tokens=8, temperature=0, n=choices
        )
    return answer.choices[0].text


async def answers(http: httpx.AsyncClient, url: str, status: int) -> None:
    """Waits until it does: what is known of a mesh is a second old."""
    while (await http.get(url)).status_code != status:
        await asyncio.sleep(0.05)


async def on_route(tracker: str) -> set[tuple[str, int, int]]:
    """Whom the session goes over that the gateway keeps for the next turn."""
    async with TrackerClient([tracker]) as client:
        answer = await client.list_workers(tracker_pb2.ListWorkersRequest())
    return {
        (one.registration.node_id, one.registration.span.begin, one.registration.span.end)
        for one in answer.workers
        if one.assigned_sessions
    }


async def test_one_command_serves_and_leaves_no_process() -> None:
    async with here() as (said, process):
        name = pathlib.Path(MODEL).stem
        assert (said["model"], said["missing"], len(said["workers"])) == (name, None, 1)
        assert await ask(said["url"], name)
        ((_, *span),) = await on_route(said["tracker"])
        assert span == [0, LAYERS]
        below = children(process.pid)
        assert len(below) >= 2  # a worker, and the process for templates
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 0
        for pid in below:
            await wait_gone(pid)


async def test_no_process_is_left_by_one_that_is_killed() -> None:
    async with here("--stages=2") as (said, process):
        assert len(said["workers"]) == 2
        below = children(process.pid)
        process.kill()
        await process.wait()
        for pid in below:
            await wait_gone(pid)


async def test_interrupted_before_it_is_ready() -> None:
    process = await asyncio.create_subprocess_exec(
        MESHNET,
        "serve",
        MODEL,
        "--listen=127.0.0.1:0",
        "--mesh-listen=127.0.0.1:0",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    # A child: it is past its imports, and not through with loading.
    while not (below := children(process.pid)) and process.returncode is None:
        await asyncio.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, _ = await process.communicate()
    assert process.returncode in (0, 130), out
    for pid in below:
        await wait_gone(pid)


async def test_a_machine_joins_with_the_layers_that_are_missing() -> None:
    async with here("--layers=0:4") as (first, _), httpx.AsyncClient() as http:
        assert first["missing"] == [4, LAYERS]
        ready = first["url"].replace("/v1", "/readyz")
        await answers(http, ready, 503)
        with pytest.raises(openai.APIStatusError) as refused:
            await ask(first["url"], first["model"])
        assert refused.value.code == "NO_ROUTE"
        async with serving(MESHNET, "serve", MODEL, f"--join={first['tracker']}") as (
            joined,
            process,
        ):
            assert (joined["layers"], joined["missing"]) == ([4, LAYERS], [])
            await answers(http, ready, 200)
            assert await ask(first["url"], first["model"])
            assert (joined["node"], 4, LAYERS) in await on_route(first["tracker"])
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
        await answers(http, ready, 503)


async def slots(http: httpx.AsyncClient, url: str) -> int:
    metrics = (await http.get(url.replace("/v1", "/metrics"))).text
    return int(float(metrics.split("\nmeshnet_gateway_slots ")[1].split()[0]))


async def test_a_machine_that_joins_brings_slots_and_takes_them_along() -> None:
    async with here("--max-sessions=1") as (first, _), httpx.AsyncClient() as http:
        assert await slots(http, first["url"]) == 1
        with pytest.raises(openai.BadRequestError) as refused:
            await ask(first["url"], first["model"], choices=2)
        assert refused.value.param == "n"
        async with serving(MESHNET, "serve", MODEL, f"--join={first['tracker']}") as (joined, _):
            assert joined["layers"] == [0, LAYERS]
            while await slots(http, first["url"]) != 2:
                await asyncio.sleep(0.05)
            # Two sessions at once, of which one worker has room for one.
            assert await ask(first["url"], first["model"], choices=2)
        while await slots(http, first["url"]) != 1:
            await asyncio.sleep(0.05)
        assert await ask(first["url"], first["model"])


async def test_joins_that_are_refused() -> None:
    async with here() as (first, _):
        join = f"--join={first['tracker']}"
        assert await refusal(join) == "ARTIFACT_UNREADABLE"
        assert await refusal(MODEL, "--memory=1MiB", join) == "MEMORY_BUDGET_EXCEEDED"


def certificates(folder: pathlib.Path) -> dict[str, list[str]]:
    """Flags of two machines and of one of another mesh, all on loopback."""
    found = {}
    for mesh, name in (("ours", "a"), ("ours", "b"), ("theirs", "c")):
        where = folder / mesh
        authority = Authority.load(where) if where.exists() else Authority.create(where)
        certificate, key = authority.issue(name, ["127.0.0.1"])
        trusted = where / "authorities.pem"
        found[name] = [f"--tls-cert={certificate}", f"--tls-key={key}", f"--tls-ca={trusted}"]
    return found


async def refusal(*arguments: str) -> str:
    process = await asyncio.create_subprocess_exec(
        MESHNET, "serve", *arguments, "--json", stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert process.returncode == 1
    return str(json.loads(out)["error"]["reason"])


async def test_machines_with_certificates_that_fetch_what_they_serve(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Manifest, sources, mutual TLS and a second machine, each with a storage of its own."""
    source = tmp_path / "source"
    source.mkdir()
    shutil.copy(MODEL, source)
    manifest = make_manifest([source], Origin("", "r1", ""), chunk_bytes=1 << 16)
    size = manifest.total_bytes
    file = tmp_path / "tiny.json"
    file.write_bytes(manifest.to_bytes())
    flags = certificates(tmp_path)
    monkeypatch.setenv("MESHNET_STORAGE", str(tmp_path / "a"))
    places = ("--listen=127.0.0.1:0", "--mesh-listen=127.0.0.1:0")
    async with (
        serving(
            MESHNET, "serve", str(file), f"--from={source}", "--layers=0:4", *places, *flags["a"]
        ) as (
            first,
            _,
        ),
        httpx.AsyncClient() as http,
    ):
        assert (first["model"], first["missing"]) == ("tiny", [4, LAYERS])
        monkeypatch.setenv("MESHNET_STORAGE", str(tmp_path / "b"))
        join = [str(file), f"--join={first['tracker']}"]
        assert await refusal(*join, f"--from={source}") == "PEER_UNREACHABLE"
        assert await refusal(*join, f"--from={source}", *flags["c"]) == "PEER_UNREACHABLE"
        with ModelServer(source, tls=tmp_path) as server:
            fetching = (f"--from={server.url}", f"--ca={server.ca_file}")
            async with serving(MESHNET, "serve", *join, *fetching, *flags["b"]) as (
                joined,
                process,
            ):
                assert (joined["layers"], joined["missing"]) == ([4, LAYERS], [])
                await answers(http, first["url"].replace("/v1", "/readyz"), 200)
                assert await ask(first["url"], "tiny")
                process.send_signal(signal.SIGTERM)
                assert await process.wait() == 0
        # Neither machine has what only the other one needs.
        assert 0 < server.asked_bytes() < size
        for name in "ab":
            (stored,) = (tmp_path / name).rglob("*.gguf")
            assert stored.stat().st_size == size
            assert stored.stat().st_blocks * 512 < size
