"""Chats with a model through an OpenAI server, such as one that meshnet serve has started.

    meshnet chat
    meshnet chat smollm2 --url http://127.0.0.1:8080/v1 --system "Be short."
    echo "What is gravity?" | meshnet chat

MODEL is the server's first one when it is left away. On a terminal it goes on until the end of
input (Ctrl-D), and remembers the conversation; Ctrl-C ends an answer. A question on stdin is
answered once. With --json every answer is one object. The key comes from $OPENAI_API_KEY or
--api-key-file.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
from absl import app, flags

from meshnet_gguf import progress
from meshnet_gguf.cli import gateway_flags, output
from meshnet_gguf.errors import MeshnetError
from proto.meshnet.shard.v1 import errors_pb2

__all__ = ["FLAG_MODULES", "run"]

FLAG_MODULES = (gateway_flags.__name__,)

_SYSTEM = flags.DEFINE_string("system", None, "What the model is told first.")
_MAX_TOKENS = flags.DEFINE_integer(
    "max_tokens", 0, "Longest answer in tokens; 0 = as long as fits.", lower_bound=0
)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.7, "Randomness, 0 = none.", lower_bound=0)


def run(arguments: Sequence[str]) -> int:
    """The command."""
    if len(arguments) > 1:
        raise app.UsageError(f"expected at most one model, got {len(arguments)}")
    with gateway_flags.client() as http:
        model = arguments[0] if arguments else _first_model(http)
        messages: list[dict[str, str]] = []
        if _SYSTEM.value:
            messages.append({"role": "system", "content": _SYSTEM.value})
        if sys.stdin.isatty():
            _converse(http, model, messages)
        else:
            messages.append({"role": "user", "content": _question_on_stdin()})
            _answer(http, model, messages)
    return 0


def _converse(http: httpx.Client, model: str, messages: list[dict[str, str]]) -> None:
    sys.stderr.write(f"{model} at {gateway_flags.url()}; end with Ctrl-D\n")
    while True:
        try:
            question = _question()
        except EOFError:
            sys.stderr.write("\n")
            return
        if not question.strip():
            continue
        messages.append({"role": "user", "content": question})
        try:
            text = _answer(http, model, messages)
        except KeyboardInterrupt:
            sys.stderr.write("\n")
            messages.pop()
            continue
        except MeshnetError as error:
            output.error("meshnet chat", error)
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": text})


def _question() -> str:
    if not output.wants_json():
        return input("> ")
    # Stdout is for answers.
    sys.stderr.write("> ")
    sys.stderr.flush()
    return input()


def _question_on_stdin() -> str:
    question = sys.stdin.buffer.read().decode("utf-8", "replace").strip()
    if not question:
        raise app.UsageError("expected a question on stdin, or a terminal to ask on; got nothing")
    return question


def _first_model(http: httpx.Client) -> str:
    with gateway_flags.unreachable(gateway_flags.url()):
        with progress.working(f"asking {gateway_flags.url()}"):
            answer = http.get(f"{gateway_flags.url()}/models")
        gateway_flags.check(answer, gateway_flags.url())
        models = answer.json()["data"]
    if not models:
        raise MeshnetError(errors_pb2.REASON_NOT_SERVED, f"{gateway_flags.url()} serves no model")
    return str(models[0]["id"])


def _answer(http: httpx.Client, model: str, messages: Sequence[dict[str, str]]) -> str:
    """Shows an answer, piece by piece or with --json as a whole."""
    show = not output.wants_json()
    body: dict[str, Any] = {
        "model": model,
        "messages": list(messages),
        "temperature": _TEMPERATURE.value,
        "stream": True,
    }
    if _MAX_TOKENS.value:
        body["max_tokens"] = _MAX_TOKENS.value
    parts: list[str] = []
    url = gateway_flags.url()
    waiting = contextlib.ExitStack()
    waiting.enter_context(progress.working("waiting for the first token"))
    with (
        gateway_flags.unreachable(url),
        waiting,
        http.stream("POST", f"{url}/chat/completions", json=body) as answer,
    ):
        if answer.status_code != 200:
            answer.read()
        gateway_flags.check(answer, url)
        for text in _texts(answer.iter_lines()):
            if text:
                waiting.close()
            parts.append(text)
            if show:
                sys.stdout.write(_printable(text))
                sys.stdout.flush()
    if show:
        sys.stdout.write("\n")
    else:
        output.print_json({"model": model, "text": "".join(parts)})
    return "".join(parts)


def _texts(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        data = line.removeprefix("data: ")
        if data == line or data == "[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            raise gateway_flags.error_of(event["error"])
        for choice in event["choices"]:
            yield choice["delta"].get("content") or ""


def _printable(text: str) -> str:
    # A model may write anything, also what would steer a terminal.
    return "".join(char for char in text if char.isprintable() or char in "\n\t")
