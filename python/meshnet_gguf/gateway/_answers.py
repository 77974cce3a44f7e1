"""Bodies and stream events in OpenAI's form. Nothing here waits or decides."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshnet_gguf.client import Token

__all__ = ["DONE", "Answer", "Call", "ChatForm", "CompletionForm", "TokenLogprobs", "Usage"]

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class TokenLogprobs:
    """A shown token with the bytes of its alternatives: (bytes, log-probability), best first."""

    token: Token
    top: tuple[tuple[bytes, float], ...]


@dataclass
class Call:
    """A call of a tool; `arguments` in pieces of JSON."""

    call_id: str
    name: str
    arguments: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """In OpenAI's form."""
        function = {"name": self.name, "arguments": "".join(self.arguments)}
        return {"id": self.call_id, "type": "function", "function": function}


@dataclass
class Answer:
    """What became of one choice."""

    index: int
    text: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True)
class Usage:
    """Tokens of a whole request. A prompt counts once, however many choices follow it."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def as_json(self) -> dict[str, Any]:
        """In OpenAI's form."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def _event(value: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _shown(piece: bytes) -> str:
    # A part of a character has no text; its bytes stand beside it.
    return piece.decode("utf-8", "backslashreplace")


class _Form:
    """What both endpoints' answers share."""

    object_name = ""
    chunk_name = ""

    def __init__(self, answer_id: str, created: int, model: str, *, with_usage: bool) -> None:
        self._head = {"id": answer_id, "created": created, "model": model}
        self._with_usage = with_usage

    def _chunk(self, choices: Sequence[Mapping[str, Any]], usage: Usage | None = None) -> bytes:
        value = {**self._head, "object": self.chunk_name, "choices": choices}
        if self._with_usage:
            value["usage"] = None if usage is None else usage.as_json()
        return _event(value)

    def usage_event(self, usage: Usage) -> bytes:
        """The event with no choice that carries the usage; empty when nobody asked for it."""
        return self._chunk([], usage) if self._with_usage else b""

    def whole(self, answers: Sequence[Answer], usage: Usage) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        return {
            **self._head,
            "object": self.object_name,
            "choices": [self.choice(answer) for answer in answers],
            "usage": usage.as_json(),
        }

    def choice(self, answer: Answer) -> dict[str, Any]:
        """One choice of a whole answer."""
        raise NotImplementedError


class ChatForm(_Form):
    """chat.completion and chat.completion.chunk."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(
        self, answer_id: str, created: int, model: str, *, with_usage: bool, with_logprobs: bool
    ) -> None:
        super().__init__(answer_id, created, model, with_usage=with_usage)
        self._with_logprobs = with_logprobs
        self._before, self._after = self._text_template()

    def _text_template(self) -> tuple[bytes, bytes]:
        # All text events of an answer are alike but for index and text: no need to write them out
        # again for every token.
        mark = "\0"
        event = self._delta(0, {"content": mark}).decode()
        before, _, after = event.partition(json.dumps(mark))
        return before.encode(), after.encode()

    def start(self, index: int) -> bytes:
        """The first event of a choice."""
        return self._delta(index, {"role": "assistant", "content": ""})

    def text(self, index: int, text: str, logprobs: Sequence[TokenLogprobs]) -> bytes:
        """A piece of a choice's text."""
        if index == 0 and not self._with_logprobs:
            return self._before + json.dumps(text).encode() + self._after
        return self._delta(index, {"content": text}, logprobs)

    def call(self, index: int, number: int, call: Call) -> bytes:
        """The beginning of a choice's call `number`."""
        return self._delta(index, {"tool_calls": [{"index": number, **call.as_json()}]})

    def arguments(self, index: int, number: int, text: str) -> bytes:
        """A piece of the arguments of a choice's call `number`."""
        part = {"index": number, "function": {"arguments": text}}
        return self._delta(index, {"tool_calls": [part]})

    def end(self, answer: Answer) -> bytes:
        """The last event of a choice."""
        return self._delta(answer.index, {}, finish_reason=answer.finish_reason)

    def _delta(
        self,
        index: int,
        delta: Mapping[str, Any],
        logprobs: Sequence[TokenLogprobs] = (),
        finish_reason: str | None = None,
    ) -> bytes:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(logprobs) if logprobs else None,
            "finish_reason": finish_reason,
        }
        return self._chunk([choice])

    def _logprobs(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
        def entry(piece: bytes, logprob: float | None) -> dict[str, Any]:
            return {"token": _shown(piece), "logprob": logprob, "bytes": list(piece)}

        return {
            "content": [
                {
                    **entry(item.token.piece, item.token.logprob),
                    "top_logprobs": [entry(piece, logprob) for piece, logprob in item.top],
                }
                for item in tokens
            ],
            "refusal": None,
        }

    def choice(self, answer: Answer) -> dict[str, Any]:
        """One choice of a whole answer."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(answer.text)}
        if answer.calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [call.as_json() for call in answer.calls]
        return {
            "index": answer.index,
            "message": {**message, "refusal": None},
            "logprobs": self._logprobs(answer.logprobs) if self._with_logprobs else None,
            "finish_reason": answer.finish_reason,
        }


class CompletionForm(_Form):
    """text_completion. `echoes` holds what stands before each choice's text."""

    object_name = "text_completion"
    chunk_name = "text_completion"

    def __init__(
        self,
        answer_id: str,
        created: int,
        model: str,
        *,
        with_usage: bool,
        with_logprobs: bool,
        echoes: Sequence[str],
    ) -> None:
        super().__init__(answer_id, created, model, with_usage=with_usage)
        self._with_logprobs = with_logprobs
        self._echoes = tuple(echoes)
        self._offsets = [0] * len(echoes)

    def start(self, index: int) -> bytes:
        """The first event of a choice: its echo, if there is one."""
        echo = self._echoes[index]
        return self._part(index, echo, None) if echo else b""

    def text(self, index: int, text: str, logprobs: Sequence[TokenLogprobs]) -> bytes:
        """A piece of a choice's text."""
        shown = self._logprobs(logprobs, self._offsets[index])
        self._offsets[index] += sum(len(_shown(item.token.piece)) for item in logprobs)
        return self._part(index, text, None, shown)

    def end(self, answer: Answer) -> bytes:
        """The last event of a choice."""
        return self._part(answer.index, "", answer.finish_reason)

    def _part(
        self, index: int, text: str, finish_reason: str | None, logprobs: Any = None
    ) -> bytes:
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return self._chunk([choice])

    def _logprobs(self, tokens: Sequence[TokenLogprobs], offset: int = 0) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        shown = [_shown(item.token.piece) for item in tokens]
        offsets = []
        for text in shown:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": shown,
            "token_logprobs": [item.token.logprob for item in tokens],
            "top_logprobs": [
                {_shown(piece): logprob for piece, logprob in item.top} for item in tokens
            ],
            "text_offset": offsets,
        }

    def choice(self, answer: Answer) -> dict[str, Any]:
        """One choice of a whole answer."""
        return {
            "index": answer.index,
            "text": self._echoes[answer.index] + "".join(answer.text),
            "logprobs": self._logprobs(answer.logprobs),
            "finish_reason": answer.finish_reason,
        }
