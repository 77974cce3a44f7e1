"""Chats with a model through an OpenAI server, such as one that meshnet serve has started.

    meshnet chat
    meshnet chat smollm2 --url http://127.0.0.1:8080/v1 --system "Be short."
    echo "What is gravity?" | meshnet chat

MODEL is the server's first one when it is left away. On a terminal it goes on until the end of
input (Ctrl-D), and remembers the conversation; Ctrl-C ends an answer. A question on stdin is
answered once. The key comes from $OPENAI_API_KEY or --api-key-file.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
from absl import app, flags

from meshnet_gguf.cli import output
from meshnet_gguf.errors import MeshnetError
from proto.meshnet.shard.v1 import errors_pb2

__all__ = ["run"]

_URL = flags.DEFINE_string("url", "http://127.0.0.1:8080/v1", "The server's base address.")
_SYSTEM = flags.DEFINE_string("system", None, "What the model is told first.")
_MAX_TOKENS = flags.DEFINE_integer(
    "max_tokens", 0, "Longest answer in tokens, 0 = as long as fits.", lower_bound=0
)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.7, "Randomness, 0 = none.", lower_bound=0)
_KEY_FILE = flags.DEFINE_string("api_key_file", None, "File that holds the API key.")
_CONNECT_SECONDS = 10.0
_SILENT_SECONDS = 600.0


def run(arguments: Sequence[str]) -> int:
    """The command."""
    if len(arguments) > 1:
        raise app.UsageError(f"expected at most one model, got {len(arguments)}")
    timeout = httpx.Timeout(_SILENT_SECONDS, connect=_CONNECT_SECONDS)
    # A server named by the user is dialled as it is, never through a web proxy.
    with httpx.Client(timeout=timeout, headers=_headers(), trust_env=False) as http:
        model = arguments[0] if arguments else _first_model(http)
        messages: list[dict[str, str]] = []
        if _SYSTEM.value:
            messages.append({"role": "system", "content": _SYSTEM.value})
        if sys.stdin.isatty():
            _converse(http, model, messages)
        else:
            messages.append({"role": "user", "content": sys.stdin.read().strip()})
            text = _answer(http, model, messages, show=not output.wants_json())
            if output.wants_json():
                output.print_json({"model": model, "text": text})
    return 0


def _headers() -> dict[str, str]:
    key = os.environ.get("OPENAI_API_KEY", "")
    if _KEY_FILE.value:
        key = output.given_path(_KEY_FILE.value).read_text("utf-8").strip()
    return {"authorization": f"Bearer {key}"} if key else {}


def _converse(http: httpx.Client, model: str, messages: list[dict[str, str]]) -> None:
    sys.stderr.write(f"{model} at {_URL.value}; end with Ctrl-D\n")
    while True:
        try:
            question = input("> ")
        except EOFError:
            sys.stdout.write("\n")
            return
        if not question.strip():
            continue
        messages.append({"role": "user", "content": question})
        try:
            text = _answer(http, model, messages, show=True)
        except KeyboardInterrupt:
            sys.stdout.write("\n")
            messages.pop()
            continue
        except MeshnetError as error:
            sys.stderr.write(f"meshnet chat: {error}\n")
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": text})


def _first_model(http: httpx.Client) -> str:
    with _errors():
        answer = http.get(f"{_URL.value}/models")
        _check(answer)
        models = answer.json()["data"]
    if not models:
        raise MeshnetError(errors_pb2.REASON_NOT_SERVED, f"{_URL.value} serves no model")
    return str(models[0]["id"])


def _answer(
    http: httpx.Client, model: str, messages: Sequence[dict[str, str]], *, show: bool
) -> str:
    body: dict[str, Any] = {
        "model": model,
        "messages": list(messages),
        "temperature": _TEMPERATURE.value,
        "stream": True,
    }
    if _MAX_TOKENS.value:
        body["max_tokens"] = _MAX_TOKENS.value
    parts: list[str] = []
    with _errors(), http.stream("POST", f"{_URL.value}/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            answer.read()
        _check(answer)
        for text in _texts(answer.iter_lines()):
            parts.append(text)
            if show:
                sys.stdout.write(_printable(text))
                sys.stdout.flush()
    if show:
        sys.stdout.write("\n")
    return "".join(parts)


def _texts(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        data = line.removeprefix("data: ")
        if data == line or data == "[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            raise _error(event["error"])
        for choice in event["choices"]:
            yield choice["delta"].get("content") or ""


def _printable(text: str) -> str:
    # A model may write anything, also what would steer a terminal.
    return "".join(char for char in text if char.isprintable() or char in "\n\t")


def _check(answer: httpx.Response) -> None:
    if answer.status_code == 200:
        return
    try:
        raise _error(answer.json()["error"])
    except (ValueError, KeyError, TypeError) as error:
        raise MeshnetError(
            errors_pb2.REASON_PEER_UNREACHABLE,
            f"expected an OpenAI server at {_URL.value}, got HTTP {answer.status_code}",
        ) from error


def _error(error: dict[str, Any]) -> MeshnetError:
    known = errors_pb2.Reason.DESCRIPTOR.values_by_name.get(f"REASON_{error.get('code')}")
    reason = errors_pb2.REASON_ENGINE_FAILURE if known is None else known.number
    return MeshnetError(reason, str(error.get("message", "")))


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except httpx.HTTPError as error:
        raise MeshnetError(
            errors_pb2.REASON_PEER_UNREACHABLE,
            f"no answer from {_URL.value} ({error}); start a server with meshnet serve MODEL",
        ) from error
