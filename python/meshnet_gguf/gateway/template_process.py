"""Chat templates rendered in a process of their own, which can be ended.

A template is somebody else's code. The sandbox of `meshnet_gguf.chat` keeps it from files and from
the interpreter, but not from running for hours or from taking all memory: so it runs where neither
harms anybody.

    async with TemplateRenderer() as renderer:
        prompt = await renderer.render(template, messages, tools=None, variables={})
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from meshnet_gguf import chat_process
from meshnet_gguf.chat import ChatMessage
from meshnet_gguf.chat_process import LENGTH
from meshnet_gguf.gateway._failures import RequestError
from proto.meshnet.shard.v1 import errors_pb2

if TYPE_CHECKING:
    from typing import Self

__all__ = ["TemplateRenderer"]

_MAX_ANSWER_BYTES = 64 * 1024 * 1024
_START_SECONDS = 30.0


class TemplateRenderer:
    """One process, started with the block; it is replaced when a template has misbehaved.

    Renders one template at a time; others wait. `time_limit` is in seconds.
    """

    def __init__(self, *, time_limit: float = 2.0) -> None:
        self._time_limit = time_limit
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> Self:
        """Starts the process and waits until it renders."""
        await self._start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends the process."""
        await self._end()

    async def render(
        self,
        template: str,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        bos_token: str = "",
        eos_token: str = "",
    ) -> str:
        """What render_chat() returns and raises; ARTIFACT_INVALID also when it takes too long."""
        request = {
            "template": template,
            "messages": [[turn.role, turn.content, dict(turn.extra)] for turn in messages],
            "options": {
                "tools": tools,
                "variables": variables,
                "add_generation_prompt": add_generation_prompt,
                "bos_token": bos_token,
                "eos_token": eos_token,
            },
        }
        async with self._lock:
            if self._process is None:
                # Not in the template's time: it is another one's fault that there is none.
                await self._start()
            try:
                async with asyncio.timeout(self._time_limit):
                    answer = await self._ask(request)
            except TimeoutError as error:
                await self._end()
                raise RequestError(
                    errors_pb2.REASON_ARTIFACT_INVALID,
                    f"the model's chat template ran for more than {self._time_limit:g} s; "
                    "give a prompt instead of messages, or another artifact",
                ) from error
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                await self._end()
                raise RequestError(
                    errors_pb2.REASON_ARTIFACT_INVALID,
                    "the model's chat template took more memory than it may have; "
                    "give a prompt instead of messages, or another artifact",
                ) from error
            except BaseException:
                # Half an answer would be taken for the next one's.
                await self._end()
                raise
        if "text" in answer:
            return str(answer["text"])
        raise RequestError(int(answer["reason"]), str(answer["message"]))

    async def _start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            f"from {chat_process.__name__} import serve; serve()",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # What it says when it fails may hold a prompt, and stderr is the log.
            stderr=asyncio.subprocess.DEVNULL,
            env={"PYTHONPATH": os.pathsep.join(sys.path), "PATH": os.environ.get("PATH", "")},
            # Ctrl-C is for whoever started this process; the pipe's end ends it.
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(_START_SECONDS):
                await self._ask({"template": "x", "messages": [], "options": {}})
        except BaseException:
            await self._end()
            raise

    async def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process is not None
        writer, reader = self._process.stdin, self._process.stdout
        assert writer is not None
        assert reader is not None
        body = json.dumps(request).encode()
        writer.write(LENGTH.pack(len(body)) + body)
        await writer.drain()
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        if length > _MAX_ANSWER_BYTES:
            raise ConnectionError("an answer longer than any template may write")
        answer = json.loads(await reader.readexactly(length))
        assert isinstance(answer, dict)
        return answer

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
