"""How fast a model answers: of an OpenAI server as its clients see it, or of workers directly.

    speed = measure_server(http, "http://127.0.0.1:8080/v1", "smollm2", Load())
    speed = await measure_route(route, Load())

The prompt is of about so many tokens and begins with another word every time, so that nothing of it
is remembered; the first measurement is not counted.
"""

from __future__ import annotations

import json
import secrets
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import httpx

from meshnet_gguf.client import Route, Token
from meshnet_gguf.errors import MeshnetError
from proto.meshnet.shard.v1 import errors_pb2

__all__ = ["Load", "Speed", "Spread", "measure_route", "measure_server"]

# About a token each, in any vocabulary.
_WORDS: Final = "the a of to and in is that for it as was with on by at from this"


@dataclass(frozen=True)
class Load:
    """What is asked for, and how often."""

    prompt_tokens: int = 128
    tokens: int = 64
    repeats: int = 3

    @property
    def measurements(self) -> int:
        """How many there are with the first, which is not counted."""
        return self.repeats + 1


@dataclass(frozen=True)
class Spread:
    """Of several measurements."""

    median: float
    least: float
    most: float


@dataclass(frozen=True)
class Speed:
    """Tokens a second, and milliseconds until the first token is there.

    `decode_tokens_per_s` is None where the answers were too short to tell.
    """

    prompt_tokens: int
    tokens: int
    first_token_ms: Spread
    prompt_tokens_per_s: Spread
    decode_tokens_per_s: Spread | None


@dataclass(frozen=True)
class _Sample:
    prompt_tokens: int
    tokens: int
    first_s: float
    last_s: float


def _nobody(_: int) -> None:
    """Nobody looks how far it is."""


def prompt_text(tokens: int) -> str:
    """Words that make about so many tokens, and begin as no other's do."""
    words = _WORDS.split()
    return " ".join([secrets.token_hex(3), *(words[n % len(words)] for n in range(tokens))])


def measure_server(
    http: httpx.Client, url: str, model: str, load: Load, show: Callable[[int], None] = _nobody
) -> Speed:
    """Over HTTP, streamed; `show` is told of every measurement, the one to warm up included.

    Raises MeshnetError; httpx.HTTPError when the server is away.
    """
    samples = []
    for number in range(load.measurements):
        samples.append(_ask(http, url, model, load))
        show(number + 1)
    return _summary(samples[1:])


def _ask(http: httpx.Client, url: str, model: str, load: Load) -> _Sample:
    body = {
        "model": model,
        "prompt": prompt_text(load.prompt_tokens),
        "max_tokens": load.tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began = time.perf_counter()
    first = last = 0.0
    usage: dict[str, Any] = {}
    with http.stream("POST", f"{url}/completions", json=body) as answer:
        if answer.status_code != 200:
            raise MeshnetError(
                errors_pb2.REASON_PEER_UNREACHABLE,
                f"expected an answer of {model} at {url}, got HTTP {answer.status_code}: "
                f"{answer.read()[:300].decode('utf-8', 'replace')}",
            )
        for event in _events(answer.iter_lines()):
            if "error" in event:
                raise MeshnetError(
                    errors_pb2.REASON_PEER_LOST, f"{url} broke off: {event['error']}"
                )
            usage = event.get("usage") or usage
            if event.get("choices"):
                last = time.perf_counter() - began
                first = first or last
    if not first or not usage:
        raise MeshnetError(
            errors_pb2.REASON_FEATURE_UNSUPPORTED,
            f"expected tokens and their number from {model} at {url}, it sent none",
        )
    return _Sample(usage["prompt_tokens"], usage["completion_tokens"], first, last)


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        data = line.removeprefix("data: ")
        if data != line and data != "[DONE]":
            yield json.loads(data)


async def measure_route(route: Route, load: Load, show: Callable[[int], None] = _nobody) -> Speed:
    """Of sessions on workers, without a gateway; `show` as above. Raises MeshnetError."""
    samples = []
    for number in range(load.measurements):
        samples.append(await _generate(route, load))
        show(number + 1)
    return _summary(samples[1:])


async def _generate(route: Route, load: Load) -> _Sample:
    prompt = (await route.head.tokenize(prompt_text(2 * load.prompt_tokens)))[: load.prompt_tokens]
    async with route.session() as session:
        began = time.perf_counter()
        first = last = 0.0
        tokens = 0
        async for event in session.generate(prompt, max_tokens=load.tokens):
            if isinstance(event, Token):
                tokens += 1
                last = time.perf_counter() - began
                first = first or last
    return _Sample(len(prompt), tokens, first, last)


def _summary(samples: list[_Sample]) -> Speed:
    def spread(values: list[float]) -> Spread:
        return Spread(statistics.median(values), min(values), max(values))

    long = [sample for sample in samples if sample.tokens > 1 and sample.last_s > sample.first_s]
    return Speed(
        prompt_tokens=round(statistics.median(sample.prompt_tokens for sample in samples)),
        tokens=round(statistics.median(sample.tokens for sample in samples)),
        first_token_ms=spread([1000 * sample.first_s for sample in samples]),
        prompt_tokens_per_s=spread([s.prompt_tokens / max(s.first_s, 1e-9) for s in samples]),
        decode_tokens_per_s=spread([(s.tokens - 1) / (s.last_s - s.first_s) for s in long])
        if long
        else None,
    )
