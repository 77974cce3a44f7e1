"""Measures how fast models answer: servers that run, or models on this machine, side by side.

    meshnet bench
    meshnet bench http://127.0.0.1:8080/v1 https://other.example/v1 --svg speed.svg
    meshnet bench smollm2 --compare-stages 1,2 --json
    meshnet bench http://127.0.0.1:8080/v1 ~/models/llama.gguf

A target is the address of an OpenAI server, whose first model is asked, or a model (a known name or
a GGUF file), whose workers are started here and asked directly, in so many stages. Without one it
is the gateway at --url. For each: the time until the first token, and tokens a second of the prompt
and of the answer; the median of a few, and what they lie between.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

from absl import app, flags

from meshnet_gguf import progress
from meshnet_gguf.chart import render_groups
from meshnet_gguf.cli import gateway_flags, output, terminal
from meshnet_gguf.client import open_route
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.gguf_file import read_model
from meshnet_gguf.local_cluster import LocalCluster, WorkerSpec
from meshnet_gguf.local_plan import memory_budget, plan_here
from meshnet_gguf.machine import free_memory, machine_facts
from meshnet_gguf.model_files import find_model
from meshnet_gguf.speed import Load, Speed, Spread, measure_route, measure_server
from proto.meshnet.shard.v1 import errors_pb2

__all__ = ["FLAG_MODULES", "run"]

FLAG_MODULES = (gateway_flags.__name__,)

_STAGES = flags.DEFINE_list(
    "compare_stages", ["1"], "Numbers of stages of a model here, such as 1,2."
)
_PROMPT = flags.DEFINE_integer("prompt_tokens", 128, "Tokens of a prompt.", lower_bound=1)
_TOKENS = flags.DEFINE_integer("max_tokens", 64, "Longest answer in tokens.", lower_bound=2)
_REPEATS = flags.DEFINE_integer("repeats", 3, "Measurements of each target.", lower_bound=1)
_SVG = flags.DEFINE_string("svg", None, "File for a picture of the result.")


def run(arguments: Sequence[str]) -> int:
    """The command."""
    stages = []
    for text in _STAGES.value:
        if not (text.isascii() and text.isdecimal() and int(text)):
            raise app.UsageError(f"expected --compare-stages such as 1,2, got {text!r}")
        stages.append(int(text))
    if _SVG.value:
        # To be told after minutes that the picture cannot be written helps nobody.
        output.given_path(_SVG.value).touch()
    load = Load(_PROMPT.value, _TOKENS.value, _REPEATS.value)
    found: dict[str, Speed] = {}
    for target in arguments or [gateway_flags.url()]:
        if target.startswith(("http://", "https://")):
            name, speed = _server(target.rstrip("/"), load)
            found[name] = speed
        else:
            for count in stages:
                name, speed = asyncio.run(_model(target, count, load))
                found[name] = speed
    if _SVG.value:
        output.given_path(_SVG.value).write_text(_picture(found), "utf-8")
    if output.wants_json():
        output.print_json(
            {
                "machine": machine_facts(),
                "results": [
                    {"target": name, **dataclasses.asdict(speed)} for name, speed in found.items()
                ],
            }
        )
    else:
        _show(found)
    return 0


def _server(url: str, load: Load) -> tuple[str, Speed]:
    with gateway_flags.unreachable(url), gateway_flags.client() as http:
        with progress.working(f"asking {url}"):
            answer = http.get(f"{url}/models")
        gateway_flags.check(answer, url)
        models = answer.json()["data"]
        if not models:
            raise MeshnetError(errors_pb2.REASON_NOT_SERVED, f"{url} serves no model")
        model = str(models[0]["id"])
        name = f"{model} at {url}"
        with progress.counting_bar(f"measuring {name}", load.measurements, "times") as show:
            return name, measure_server(http, url, model, load, show)


async def _model(model: str, stages: int, load: Load) -> tuple[str, Speed]:
    files = await find_model(model, output.given_path(model))
    plan = plan_here(
        read_model(files.path),
        budget=memory_budget(free_memory()),
        stages=stages,
        context_tokens=load.prompt_tokens + load.tokens,
        max_sessions=1,
    )
    flags_of_worker = tuple(f"--{name}={value}" for name, value in plan.worker_flags.items())
    specs = [WorkerSpec(layers, files.path, flags_of_worker) for layers in plan.ranges]
    name = f"{files.name}, {stages} stage{'' if stages == 1 else 's'}"
    async with contextlib.AsyncExitStack() as stack:
        with progress.working(f"starting {name}"):
            cluster = await stack.enter_async_context(LocalCluster(specs))
            route = await stack.enter_async_context(await open_route(cluster.endpoints))
        with progress.counting_bar(f"measuring {name}", load.measurements, "times") as show:
            return name, await measure_route(route, load, show)


def _show(found: dict[str, Speed]) -> None:
    numbers = ("first token ms", "prompt tokens/s", "answer tokens/s")
    rows = [
        (
            name,
            _spread(speed.first_token_ms),
            _spread(speed.prompt_tokens_per_s),
            _spread(speed.decode_tokens_per_s),
        )
        for name, speed in found.items()
    ]
    terminal.show(terminal.table(("target", *numbers), rows, numbers=numbers))


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return "?"
    return f"{spread.median:.1f} ({spread.least:.1f} to {spread.most:.1f})"


def _picture(found: dict[str, Speed]) -> str:
    def figures(of: str) -> Any:
        spreads = [(name, getattr(speed, of)) for name, speed in found.items()]
        return [(name, s.median, s.least, s.most) for name, s in spreads if s is not None]

    return render_groups(
        [
            ("Answer, tokens/s", figures("decode_tokens_per_s")),
            ("Prompt, tokens/s", figures("prompt_tokens_per_s")),
            ("Until the first token, ms", figures("first_token_ms")),
        ],
        title=f"{_PROMPT.value} tokens read, {_TOKENS.value} written",
    )
