"""The commands around the gateway, as processes: serve, chat, api-keys."""

import asyncio
import contextlib
import json
import os
import pathlib
import signal
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from meshnet_gguf.testing.cluster import cluster_of, fake_specs
from meshnet_gguf.testing.commands import Commands

MESHNET = os.environ["MESHNET"]
END = 60.0
FOREVER = ("--fake_delay=3ms", "--context_tokens=100000")


pytestmark = pytest.mark.asyncio(loop_scope="module")


@contextlib.asynccontextmanager
async def served(
    *arguments: str, flags: tuple[str, ...] = ()
) -> AsyncIterator[tuple[dict[str, Any], asyncio.subprocess.Process]]:
    async with asyncio.timeout(END), cluster_of(fake_specs((4,), *flags)) as fake:
        process = await asyncio.create_subprocess_exec(
            MESHNET,
            "serve",
            "fake",
            f"--workers={','.join(fake.cluster.endpoints)}",
            "--listen=127.0.0.1:0",
            "--json",
            *arguments,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        try:
            yield json.loads(await process.stdout.readline()), process
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def test_serve_answers_clients_and_ends_when_told(commands: Commands) -> None:
    async with served() as (said, process):
        assert said["model"] == "fake"
        async with openai.AsyncOpenAI(base_url=said["url"], api_key="x", max_retries=0) as client:
            assert [model.id async for model in client.models.list()] == ["fake"]
        code, out, err = await commands.run(
            "chat", f"--url={said['url']}", "--max-tokens=5", stdin="Hello"
        )
        assert code == 0, err
        assert out.endswith("\n")
        code, out, _ = await commands.run(
            "chat", "fake", f"--url={said['url']}", "--max-tokens=5", "--json", stdin="Hello"
        )
        assert (code, json.loads(out)["model"]) == (0, "fake")
        assert await answers_on_a_terminal(said["url"]) == ["fake", "fake"]
        code, out, err = await commands.run("chat", "other", f"--url={said['url']}", stdin="Hello")
        assert code == 1
        assert "NOT_SERVED" in err
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


async def answers_on_a_terminal(url: str) -> list[str]:
    """The model of each of two answers: a question on a terminal, answers as JSON to a program."""
    ours, theirs = os.openpty()
    process = await asyncio.create_subprocess_exec(
        *(MESHNET, "chat", f"--url={url}", "--max-tokens=5", "--json"),
        stdin=theirs,
        stdout=asyncio.subprocess.PIPE,
    )
    os.close(theirs)
    os.write(ours, b"Hello\nAnd now?\n\x04")
    out, _ = await process.communicate()
    os.close(ours)
    assert process.returncode == 0
    answers = [json.loads(line) for line in out.splitlines()]
    assert all(set(answer) == {"model", "text"} for answer in answers)
    return [answer["model"] for answer in answers]


async def test_a_stream_that_outlives_the_server_is_told_so() -> None:
    async with served(flags=FOREVER) as (said, process):
        async with openai.AsyncOpenAI(base_url=said["url"], api_key="x", max_retries=0) as client:
            stream = await client.chat.completions.create(
                model="fake", messages=[{"role": "user", "content": "Hello"}], stream=True
            )
            with pytest.raises(openai.APIError) as caught:
                async for chunk in stream:
                    if chunk.choices[0].delta.content and process.returncode is None:
                        process.send_signal(signal.SIGTERM)
            assert caught.value.code == "DRAINING"
        assert await process.wait() == 0


async def test_serve_with_keys(commands: Commands, tmp_path: pathlib.Path) -> None:
    file = str(tmp_path / "keys.json")
    code, key, _ = await commands.run("api-keys", "add", file, "alice", "--max-active", "2")
    assert code == 0
    async with served(f"--api-keys={file}") as (said, _):
        arguments = ("chat", f"--url={said['url']}", "--max-tokens=2")
        with_key = {"OPENAI_API_KEY": key.strip()}
        code, _, err = await commands.run(*arguments, stdin="Hello")
        assert code == 1
        assert "UNAUTHENTICATED" in err
        code, _, err = await commands.run(*arguments, stdin="Hello", environment=with_key)
        assert code == 0, err
        assert (await commands.run("api-keys", "remove", file, "alice")).code == 0
        code, _, err = await commands.run(*arguments, stdin="Hello", environment=with_key)
        assert "UNAUTHENTICATED" in err
    code, out, _ = await commands.run("api-keys", "list", file, "--json")
    assert json.loads(out) == {"keys": []}


async def test_names_of_a_gateway() -> None:
    """A web page whose name leads to this machine cannot ask it, unless somebody says so."""
    async with (
        served("--allowed-hosts=models.example,models2.example") as (said, _),
        httpx.AsyncClient() as http,
    ):
        statuses = [
            (await http.get(f"{said['url']}/models", headers={"host": host})).status_code
            for host in ("evil.example", "models2.example", said["url"].split("/")[2])
        ]
        assert statuses == [403, 200, 200]


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (("serve",), 2, "one model"),
        (("serve", "no-such-model", "--listen=127.0.0.1:0"), 1, "ARTIFACT_UNREADABLE"),
        (("serve", "x", "--workers=127.0.0.1:1", "--listen=0.0.0.0:0"), 1, "INSECURE_TRANSPORT"),
        (("serve", "x", "--workers=127.0.0.1:1", "--listen=127.0.0.1:0"), 1, "PEER_UNREACHABLE"),
        (("serve", "x", "--https-cert=a"), 2, "together"),
        (("serve", "x", "--tls-cert=a"), 2, "together"),
        (("serve", "x", "--memory=much"), 2, "such as 12GiB"),
        (("serve", "x", "--stages=2", "--layers=0:1"), 2, "--stages or --layers"),
        (("serve", "x", "--join=127.0.0.1:1", "--workers=127.0.0.1:1"), 2, "expected one of"),
        (("serve", "--join=127.0.0.1:1"), 1, "PEER_UNREACHABLE"),
        (
            ("serve", "--join=192.0.2.1:7100", "--mesh-listen=192.0.2.2:0"),
            1,
            "meshnet certs issue mesh-ca",
        ),
        (
            ("serve", "x", "--listen=127.0.0.1:0", "--mesh-listen=192.0.2.1:7100"),
            1,
            "--tls-ca=authorities.pem",
        ),
        (
            ("serve", "x", "--listen=127.0.0.1:0", "--mesh-listen=0.0.0.0:7100"),
            1,
            "the address that others dial",
        ),
        (("chat", "--url=http://127.0.0.1:1/v1"), 1, "PEER_UNREACHABLE"),
        (("api-keys", "add", "file"), 2, "expected add"),
    ],
)
async def test_what_is_refused(
    commands: Commands, arguments: tuple[str, ...], code: int, word: str
) -> None:
    found, _, err = await commands.run(*arguments)
    assert (found, word in err) == (code, True), err
