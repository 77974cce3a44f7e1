"""A process that renders chat templates, one after the other: requests on stdin, answers on stdout.

    python -c "from meshnet_gguf.chat_process import serve; serve()"

It imports nothing else, so that it is there soon and small. Both ways a message is its length and a
JSON object: `template`, `messages` (role, content and the rest of each) and `options` of
render_chat(); then `text`, or `reason` and `message` of its refusal. It ends with its stdin, and
has bounded memory (meshnet_gguf.gateway.template_process bounds its time).
"""

from __future__ import annotations

import json
import resource
import struct
import sys
from collections.abc import Mapping
from typing import IO, Any

from meshnet_gguf.chat import ChatMessage, render_chat
from meshnet_gguf.errors import MeshnetError

__all__ = ["LENGTH", "serve"]

LENGTH = struct.Struct("<I")
_MEMORY_BYTES = 2 * 1024 * 1024 * 1024


def serve() -> None:
    """Answers requests on stdin until it ends."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    while (request := _read(requests)) is not None:
        try:
            answer: dict[str, Any] = {"text": _render(request)}
        except MeshnetError as error:
            answer = {"reason": error.reason, "message": error.message}
        body = json.dumps(answer).encode()
        answers.write(LENGTH.pack(len(body)) + body)
        answers.flush()


def _render(request: Mapping[str, Any]) -> str:
    messages = [ChatMessage(role, text, extra) for role, text, extra in request["messages"]]
    return render_chat(request["template"], messages, **request["options"])


def _read(stream: IO[bytes]) -> dict[str, Any] | None:
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    value = json.loads(stream.read(LENGTH.unpack(head)[0]))
    assert isinstance(value, dict)
    return value
