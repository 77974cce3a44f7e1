"""The flags by which commands know a gateway, or any OpenAI server, and how they talk to it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import httpx
from absl import flags

from meshnet_gguf.cli import output
from meshnet_gguf.errors import MeshnetError
from proto.meshnet.shard.v1 import errors_pb2

__all__ = ["async_client", "check", "client", "error_of", "is_url_given", "unreachable", "url"]

_URL = flags.DEFINE_string("url", "http://127.0.0.1:8080/v1", "The gateway's base address.")
_KEY_FILE = flags.DEFINE_string(
    "api_key_file", None, "File that holds the API key, instead of $OPENAI_API_KEY."
)
_CONNECT_SECONDS = 10.0
_SILENT_SECONDS = 600.0


def url() -> str:
    """What --url says. Raises MeshnetError (CONFIGURATION_INVALID)."""
    said = str(_URL.value).rstrip("/")
    if not said.startswith(("http://", "https://")):
        raise MeshnetError(
            errors_pb2.REASON_CONFIGURATION_INVALID,
            f"expected --url such as {_URL.default}, got {said!r}",
        )
    return said


def is_url_given() -> bool:
    """Whether somebody has said --url."""
    return bool(_URL.present)


def client(*, silent_seconds: float = _SILENT_SECONDS) -> httpx.Client:
    """For calls with the API key. A server is dialled as it is, never through a web proxy.

    Raises OSError and MeshnetError (CONFIGURATION_INVALID) for a key that cannot be used.
    """
    return httpx.Client(timeout=_timeout(silent_seconds), headers=_headers(), trust_env=False)


def async_client(*, silent_seconds: float = _SILENT_SECONDS) -> httpx.AsyncClient:
    """The same for asyncio."""
    return httpx.AsyncClient(timeout=_timeout(silent_seconds), headers=_headers(), trust_env=False)


def _timeout(silent_seconds: float) -> httpx.Timeout:
    return httpx.Timeout(silent_seconds, connect=min(_CONNECT_SECONDS, silent_seconds))


def _headers() -> dict[str, str]:
    key, where = os.environ.get("OPENAI_API_KEY", "").strip(), "$OPENAI_API_KEY"
    if _KEY_FILE.value:
        file = output.given_path(_KEY_FILE.value)
        key, where = file.read_text("utf-8", "replace").strip(), str(file)
    if not (key.isascii() and key.isprintable()):
        raise MeshnetError(
            errors_pb2.REASON_CONFIGURATION_INVALID, f"expected an API key in {where}, in one line"
        )
    return {"authorization": f"Bearer {key}"} if key else {}


def check(answer: httpx.Response, where: str) -> None:
    """Raises MeshnetError unless it is an answer of status 200."""
    if answer.status_code == 200:
        return
    try:
        raise error_of(answer.json()["error"])
    except (ValueError, KeyError, TypeError) as error:
        raise MeshnetError(
            errors_pb2.REASON_PEER_UNREACHABLE,
            f"expected an OpenAI server at {where}, got HTTP {answer.status_code}",
        ) from error


def error_of(error: dict[str, Any]) -> MeshnetError:
    """OpenAI's form of an error."""
    known = errors_pb2.Reason.DESCRIPTOR.values_by_name.get(f"REASON_{error.get('code')}")
    reason = errors_pb2.REASON_ENGINE_FAILURE if known is None else known.number
    return MeshnetError(reason, str(error.get("message", "")))


@contextlib.contextmanager
def unreachable(where: str) -> Iterator[None]:
    """Makes a connection's failure a MeshnetError (PEER_UNREACHABLE)."""
    try:
        yield
    except httpx.HTTPError as error:
        raise MeshnetError(
            errors_pb2.REASON_PEER_UNREACHABLE,
            f"no answer from {where} ({error}); start a server with meshnet serve MODEL",
        ) from error
