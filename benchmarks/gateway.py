"""Measures the gateway against its bars, over workers with the fake engine.

    tools/bazel run //benchmarks:gateway -- --json results.json
    tools/bazel run //benchmarks:gateway -- --section streams

Writes {"metrics": [{name, value, unit, bar, holds}, ...]} to --json. Section serve runs the real
model that `meshnet serve smollm2` fetches; all others need none. Leave the machine alone while it
runs. Exit status: 0; 1 when something failed; 3 with --check when a bar is missed.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import os
import pathlib
import platform
import signal
import statistics
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from absl import app, flags
from meshnet import command_line
from meshnet_gguf.client import ChatMessage, Route, SamplingParams, Token
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.models import fetch_model
from meshnet_gguf.testing.cluster import FakeCluster, cluster_of, fake_specs

from benchmarks.control.metrics import Metric, at_most, say

_JSON = flags.DEFINE_string("json", None, "File for the results.")
_SECTION = flags.DEFINE_multi_enum(
    "section",
    [],
    ["streams", "first_token", "memory", "vanish", "serve"],
    "Only this one; repeatable.",
)
_QUICK = flags.DEFINE_bool("quick", False, "See that it works; the numbers say nothing.")
_CHECK = flags.DEFINE_bool("check", False, "Exit status 3 when a bar is missed.")

_HOST = "127.0.0.1"
_LETTERS = b"abcdefgh"
_BIASES = dict.fromkeys(_LETTERS, 100.0)
_WORKERS = ("--max_sessions=264", "--context_tokens=2048")
_MIB = 1024 * 1024


@dataclass(frozen=True)
class _Gateway:
    """A gateway process of its own, as operators run it."""

    process: asyncio.subprocess.Process
    port: int
    fake: FakeCluster

    def resident_bytes(self) -> int:
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text("ascii")
        (line,) = (line for line in status.splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) * 1024

    def cpu_seconds(self) -> float:
        fields = (
            pathlib.Path(f"/proc/{self.process.pid}/stat").read_text("ascii").rpartition(")")[2]
        )
        user, system = fields.split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "meshnet_gguf.cli.meshnet", *arguments]


@contextlib.asynccontextmanager
async def _process(*arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """A `meshnet serve` and the port that it says it serves on."""
    process = await asyncio.create_subprocess_exec(
        *_command("serve", *arguments, f"--listen={_HOST}:0", f"--mesh-listen={_HOST}:0", "--json"),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    try:
        said = json.loads(await process.stdout.readline())
        yield process, int(said["url"].rpartition(":")[2].removesuffix("/v1"))
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        await process.wait()


@contextlib.asynccontextmanager
async def _gateway(*flags: str) -> AsyncIterator[_Gateway]:
    async with (
        cluster_of(fake_specs((4,), *_WORKERS, *flags)) as fake,
        _process("fake", f"--workers={','.join(fake.cluster.endpoints)}", "--max_queued=1000") as (
            process,
            port,
        ),
    ):
        yield _Gateway(process, port, fake)


def _body(model: str, tokens: int, seed: int) -> bytes:
    value: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": "Hello"}],
        "stream": True,
        "max_tokens": tokens,
        "seed": seed,
    }
    if model == "fake":
        value["logit_bias"] = {str(byte): bias for byte, bias in _BIASES.items()}
    return json.dumps(value).encode()


async def _events(port: int, body: bytes) -> AsyncGenerator[str, None]:
    """The texts of a streamed answer, by a client that does as little as one can."""
    reader, writer = await asyncio.open_connection(_HOST, port)
    try:
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nconnection: close\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"expected HTTP 200, got {status!r} {await reader.read()!r}")
        ended = False
        while line := await reader.readline():
            if line.startswith(b"data: [DONE]"):
                ended = True
            elif line.startswith(b"data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(str(event["error"]))
                yield event["choices"][0]["delta"].get("content") or ""
        if not ended:
            raise RuntimeError("expected a stream that ends with [DONE]")
    finally:
        writer.close()


async def _text(port: int, tokens: int, seed: int) -> str:
    return "".join([text async for text in _events(port, _body("fake", tokens, seed))])


async def _bare_text(route: Route, tokens: int, seed: int) -> str:
    sampling = SamplingParams(temperature=1.0, seed=seed, logit_bias=_BIASES, penalty_last_n=4096)
    async with route.session() as session:
        answer = await session.chat([ChatMessage("user", "Hello")], sampling, max_tokens=tokens)
        return "".join([event.text async for event in answer if isinstance(event, Token)])


async def _streams(*, quick: bool) -> AsyncIterator[Metric]:
    tokens = 20 if quick else 200
    async with _gateway() as gateway:
        route = gateway.fake.route
        await _text(gateway.port, tokens, 0)
        added, cpu = [], []
        for _ in range(1 if quick else 3):
            started = time.monotonic()
            await asyncio.gather(*(_bare_text(route, tokens, seed) for seed in range(32)))
            bare = time.monotonic() - started
            used, started = gateway.cpu_seconds(), time.monotonic()
            await asyncio.gather(*(_text(gateway.port, tokens, seed) for seed in range(32)))
            through = time.monotonic() - started
            added.append(1000 * (through - bare) / (32 * tokens))
            cpu.append(1000 * (gateway.cpu_seconds() - used) / (32 * tokens))
        yield Metric(
            "gateway_added_ms_per_token_32_streams", statistics.median(added), "ms", at_most(1)
        )
        yield Metric("gateway_cpu_ms_per_token_32_streams", statistics.median(cpu), "ms")

        count = 32 if quick else 256
        expected = [await _bare_text(route, 40, seed) for seed in range(count)]
        found = await asyncio.gather(*(_text(gateway.port, 40, seed) for seed in range(count)))
        wrong = sum(text != right for text, right in zip(found, expected, strict=True))
        yield Metric("gateway_wrong_streams_of_256", float(wrong), "streams", at_most(0))


async def _first_token(*, quick: bool) -> AsyncIterator[Metric]:
    bare: list[float] = []
    through: list[float] = []
    async with _gateway() as gateway:
        for seed in range(5 if quick else 60):
            started = time.monotonic()
            async with gateway.fake.route.session() as session:
                answer = await session.chat(
                    [ChatMessage("user", "Hello")],
                    SamplingParams(temperature=1.0, seed=seed, logit_bias=_BIASES),
                    max_tokens=2,
                )
                async for event in answer:
                    if isinstance(event, Token):
                        bare.append(1000 * (time.monotonic() - started))
                        break
            started = time.monotonic()
            async with contextlib.aclosing(_events(gateway.port, _body("fake", 2, seed))) as texts:
                async for text in texts:
                    if text:
                        through.append(1000 * (time.monotonic() - started))
                        break
    difference = statistics.median(through) - statistics.median(bare)
    yield Metric("gateway_first_token_ms", statistics.median(through), "ms")
    yield Metric("bare_first_token_ms", statistics.median(bare), "ms")
    yield Metric("gateway_added_first_token_ms", difference, "ms", at_most(20))


async def _memory(*, quick: bool) -> AsyncIterator[Metric]:
    """Resident memory as requests go by: medians, since Python's collector moves it.

    It grows until the allocators hold as much as requests under way ever need at once, which takes
    about 10,000 requests; what grows after them is what would grow for ever.
    """
    requests, warm, window = (60, 20, 10) if quick else (10_000, 10_000, 2_000)
    async with _gateway() as gateway:
        seeds = iter(range(warm + requests))
        resident: list[int] = []

        async def ask() -> None:
            for seed in seeds:
                await _text(gateway.port, 2, seed)
                if seed >= warm:
                    resident.append(gateway.resident_bytes())

        await asyncio.gather(*(ask() for _ in range(16)))
    before, after = statistics.median(resident[:window]), statistics.median(resident[-window:])
    yield Metric("gateway_resident_mib", after / _MIB, "MiB")
    yield Metric("gateway_growth_mib_10000_requests", (after - before) / _MIB, "MiB", at_most(5))


async def _vanish(*, quick: bool) -> AsyncIterator[Metric]:
    count = 10 if quick else 100
    async with _gateway("--fake_delay=1ms") as gateway:

        async def leave_early(seed: int) -> None:
            async with contextlib.aclosing(
                _events(gateway.port, _body("fake", 2000, seed))
            ) as texts:
                async for text in texts:
                    if text:
                        return

        await asyncio.gather(*(leave_early(seed) for seed in range(count)))
        await asyncio.sleep(1.0)
        left = [stage.open_sessions for stage in await gateway.fake.route.metrics()]
    yield Metric(
        "gateway_sessions_left_1s_after_100_vanish", float(max(left)), "sessions", at_most(0)
    )


async def _serve(*, quick: bool) -> AsyncIterator[Metric]:
    await asyncio.to_thread(fetch_model, "smollm2")
    seconds = []
    for _ in range(1 if quick else 3):
        started = time.monotonic()
        async with _process("smollm2") as (_, port):
            async for text in _events(port, _body("smollm2", 4, 1)):
                if text:
                    seconds.append(time.monotonic() - started)
                    break
    yield Metric("serve_first_token_s", statistics.median(seconds), "s", at_most(10))


_SECTIONS: Mapping[str, Callable[..., AsyncIterator[Metric]]] = {
    "streams": _streams,
    "first_token": _first_token,
    "memory": _memory,
    "vanish": _vanish,
    "serve": _serve,
}


def _line(metric: Metric) -> str:
    bar = "" if metric.bar is None else f"  {metric.bar}: {'holds' if metric.holds else 'MISSED'}"
    return f"{metric.name:42} {metric.value:>12.3f} {metric.unit:8}{bar}"


async def _run(names: Sequence[str], *, quick: bool) -> list[Metric]:
    found = []
    for name in names:
        say(f"section {name}")
        async for metric in _SECTIONS[name](quick=quick):
            say(_line(metric))
            found.append(metric)
    return found


def main(argv: Sequence[str]) -> int:
    """The command."""
    if len(argv) > 1:
        raise app.UsageError(f"expected flags only, got {argv[1:]}")
    names = _SECTION.value or list(_SECTIONS)
    try:
        metrics = asyncio.run(_run(names, quick=_QUICK.value))
    except (MeshnetError, RuntimeError) as error:
        print(f"gateway: {error}", file=sys.stderr)
        return 1
    print("\n".join(_line(metric) for metric in metrics))
    if _JSON.value:
        # `bazel run` starts elsewhere: a relative path is meant from where the user is.
        target = pathlib.Path(os.environ.get("BUILD_WORKING_DIRECTORY", "."), _JSON.value)
        target.parent.mkdir(parents=True, exist_ok=True)
        results = {
            "benchmark": "gateway",
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "quick": _QUICK.value,
            "metrics": [metric.to_json() for metric in metrics],
        }
        target.write_text(json.dumps(results, indent=2) + "\n", "utf-8")
    return 3 if _CHECK.value and not all(metric.holds for metric in metrics) else 0


if __name__ == "__main__":
    command_line.run(main)
