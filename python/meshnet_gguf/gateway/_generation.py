"""One choice: a session's tokens as the pieces of text that a client is shown."""

from __future__ import annotations

import collections
from collections.abc import AsyncGenerator, AsyncIterator, Container, Sequence
from dataclasses import dataclass
from typing import Protocol

from meshnet_gguf.client import Event, Finished, FinishReason, Token
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.gateway._stops import StopFilter
from meshnet_gguf.text import Utf8Stream
from proto.meshnet.shard.v1 import errors_pb2

__all__ = ["Begun", "Ended", "Piece", "pieces_of"]


@dataclass(frozen=True)
class Begun:
    """The route has taken the prompt: from here on an answer is under way."""


@dataclass(frozen=True)
class Piece:
    """Text to show, and the tokens whose text begins in it.

    The last of a choice may have tokens and no text: of a character that was not completed.
    """

    text: str
    tokens: tuple[Token, ...]


@dataclass(frozen=True)
class Ended:
    """The last of a choice. `reason` is OpenAI's: stop or length."""

    reason: str
    prompt_tokens: int
    completion_tokens: int


class Generating(Protocol):
    """A generation, as far as it is needed here."""

    def __aiter__(self) -> AsyncIterator[Event]:
        """Its events."""

    async def request_cancel(self) -> None:
        """Asks for its end."""


class _Aligned:
    """Tokens beside a text that comes out later than they do."""

    def __init__(self) -> None:
        self._waiting: collections.deque[tuple[int, Token]] = collections.deque()
        self._begun = 0
        self._shown = 0

    def add(self, token: Token, text: str) -> None:
        self._waiting.append((self._begun, token))
        self._begun += len(text)

    def shown(self, text: str, *, last: bool = False) -> tuple[Token, ...]:
        self._shown += len(text)
        ready = []
        while self._waiting and (last or self._waiting[0][0] < self._shown):
            ready.append(self._waiting.popleft()[1])
        return tuple(ready)


async def pieces_of(
    generation: Generating, stops: Sequence[str], hidden: Container[int] = ()
) -> AsyncGenerator[Begun | Piece | Ended, None]:
    """Begun, then pieces, then Ended. Characters and stop strings come whole or not at all.

    Tokens in `hidden` and those that end the generation have no text. After a stop string the
    generation is cancelled and its end awaited, so that the session may be used again. Raises
    MeshnetError as iterating the generation does.
    """
    held = StopFilter(stops)
    decoder = Utf8Stream()
    aligned = _Aligned()
    begun = False
    count = 0
    async for event in generation:
        if not begun:
            begun = True
            yield Begun()
        if isinstance(event, Token):
            if held.stopped:
                continue
            count += 1
            if event.end_of_generation or event.token_id in hidden:
                continue
            decoded = decoder.push(event.piece)
            aligned.add(event, decoded)
            text, stopped = held.push(decoded)
            if text:
                yield Piece(text, aligned.shown(text))
            if stopped:
                await generation.request_cancel()
        elif isinstance(event, Finished):
            if not held.stopped:
                rest = decoder.finish()
                if event.reason is FinishReason.LENGTH:
                    rest = ""  # more tokens would have completed the character
                # What is left of an unfinished character may complete a stop string as well.
                text, stopped = held.push(rest)
                text += "" if stopped else held.finish()
                unseen = aligned.shown(text, last=True)
                if text or unseen:
                    yield Piece(text, unseen)
            yield Ended(_reason(event, held.stopped), event.prompt_tokens, count)


def _reason(finished: Finished, stopped: bool) -> str:
    if stopped or finished.reason is FinishReason.STOP:
        return "stop"
    if finished.reason is FinishReason.LENGTH:
        return "length"
    # Cancelled by somebody else: an operator.
    raise MeshnetError(errors_pb2.REASON_CANCELLED, "the answer was cancelled at its route")
