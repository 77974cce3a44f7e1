"""A choice that may call tools: which tools, and the generations that make its calls.

What the model writes of itself is read by ToolParser. Where a call must be one by its JSON schema
(the request demands a call, or the tool is strict), the text up to its arguments is ours and a
generation of its own writes them under the schema; the session keeps what it has read, so that
costs a step, no prefill. A strict tool that the model calls by itself is noticed at its name: the
generation is given up there, and the call goes on under the schema from the same place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshnet_gguf.client import Event, Generation, SamplingParams, Session, Token
from meshnet_gguf.gateway._failures import RequestError
from meshnet_gguf.gateway._generation import Begun, Ended, Piece, pieces_of
from meshnet_gguf.gateway._requests import ChatRequest, ToolChoice, schema_text
from meshnet_gguf.gateway._tool_format import ToolFormat, new_call_id
from meshnet_gguf.gateway._tool_parser import (
    CallArguments,
    CallBegun,
    Content,
    ToolEvent,
    ToolParser,
)
from proto.meshnet.shard.v1 import errors_pb2

__all__ = ["ToolRun", "ToolUse", "check_tools", "tool_use"]

_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
# Every generation of a choice draws from a seed of its own.
_SEED_STEP = 0x9E3779B1


@dataclass(frozen=True)
class ToolUse:
    """What a request says about tools. `forced`: one of these must be called, `call_id` is it.

    Every choice of a request has one of its own, with its own `call_id`.
    """

    form: ToolFormat
    schemas: Mapping[str, Mapping[str, Any]]
    strict: frozenset[str]
    forced: tuple[str, ...]
    parallel: bool
    call_id: str = field(default_factory=new_call_id)

    def of_another_choice(self) -> ToolUse:
        """The same for one more choice."""
        return dataclasses.replace(self, call_id=new_call_id())

    @property
    def beginning(self) -> str:
        """What the prompt ends with, after the assistant's turn has begun."""
        if not self.forced:
            return ""
        form = self.form.forced()
        text = form.leave_thinking + form.announcement() + form.until_name(self.call_id)
        if len(self.forced) > 1:
            return text
        return text + self.forced[0] + form.until_arguments(self.call_id)


def check_tools(request: ChatRequest) -> None:
    """What a request says about tools that no field alone shows to be wrong. RequestError."""

    def wrong(message: str, param: str) -> RequestError:
        return RequestError(errors_pb2.REASON_FIELD_OUT_OF_BOUNDS, message, param)

    names = [tool.function.name for tool in request.tools or ()]
    if len(set(names)) < len(names):
        raise wrong("expected tools of different names, got one twice", "tools")
    choice = request.tool_choice
    if isinstance(choice, ToolChoice) and choice.function.name not in names:
        raise wrong(
            f"expected the name of one of the tools, got {choice.function.name!r}", "tool_choice"
        )
    if choice == "required" and not names:
        raise wrong("expected tools with tool_choice required, got none", "tool_choice")
    form = request.response_format
    if names and choice != "none" and form is not None and form.type != "text":
        raise RequestError(
            errors_pb2.REASON_FEATURE_UNSUPPORTED,
            "this server holds an answer to response_format or lets it call tools, not both; "
            "leave one away, or set tool_choice to none",
            "response_format",
        )


def tool_use(request: ChatRequest, form: ToolFormat) -> ToolUse | None:
    """How a request that has passed check_tools() uses tools; None when it does not."""
    choice = request.tool_choice
    if not request.tools or choice == "none":
        return None
    functions = [tool.function for tool in request.tools]
    forced: tuple[str, ...] = ()
    if isinstance(choice, ToolChoice):
        forced = (choice.function.name,)
    elif choice == "required":
        forced = tuple(function.name for function in functions)
    return ToolUse(
        form,
        {function.name: function.parameters or _ANY_OBJECT for function in functions},
        frozenset(function.name for function in functions if function.strict),
        forced,
        request.parallel_tool_calls is not False,
    )


class _Tape:
    """A generation whose tokens are kept."""

    def __init__(self, generation: Generation) -> None:
        self.tokens: list[Token] = []
        self._generation = generation

    def __aiter__(self) -> _Tape:
        return self

    async def __anext__(self) -> Event:
        event = await self._generation.__anext__()
        if isinstance(event, Token):
            self.tokens.append(event)
        return event

    async def request_cancel(self) -> None:
        await self._generation.request_cancel()

    async def cancel(self) -> None:
        await self._generation.cancel()

    @property
    def token_ids(self) -> list[int]:
        """Those that a text may go on after."""
        return [token.token_id for token in self.tokens if not token.end_of_generation]


class ToolRun:
    """One choice. `hidden` tokens have no text, but for those that stand around calls."""

    def __init__(
        self,
        use: ToolUse,
        session: Session,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        tokenize: Callable[[str], Awaitable[list[int]]],
        hidden: frozenset[int],
        visible: frozenset[int],
        stops: Sequence[str],
        max_tokens: int,
        ignore_end_of_generation: bool,
    ) -> None:
        self._use = use
        self._session = session
        self._prompt_tokens = len(token_ids)
        self._token_ids = list(token_ids)
        self._sampling = sampling
        self._tokenize = tokenize
        self._all_hidden = hidden
        self._hidden = hidden - visible
        self._stops = stops
        self._left = max_tokens
        self._count = 0
        self._ignore_end = ignore_end_of_generation
        self._generations = 0
        self._reason = "stop"
        self._begun = False

    async def parts(self) -> AsyncGenerator[Begun | Piece | ToolEvent | Ended, None]:
        """Begun, then pieces of content (with their tokens), calls, and Ended."""
        run = self._forced() if self._use.forced else self._free()
        async with contextlib.aclosing(run) as parts:
            async for part in parts:
                yield part
        yield Ended(self._reason, self._prompt_tokens, self._count)

    async def _generate(
        self,
        tape: list[_Tape],
        stops: Sequence[str],
        hidden: frozenset[int],
        *,
        grammar: str = "",
        json_schema: str = "",
    ) -> AsyncGenerator[Begun | Piece, None]:
        """A generation after all tokens so far; sets `_reason`. `tape` receives its tape."""
        sampling = dataclasses.replace(
            self._sampling,
            seed=(self._sampling.seed + self._generations * _SEED_STEP) % 2**32,
            grammar=grammar or ("" if json_schema else self._sampling.grammar),
            json_schema=json_schema,
        )
        self._generations += 1
        if self._left <= 0:
            self._reason = "length"
            return
        generation = self._session.continue_with(
            self._token_ids,
            sampling,
            max_tokens=self._left,
            ignore_end_of_generation=self._ignore_end and not (grammar or json_schema),
        )
        recorded = _Tape(generation)
        tape.append(recorded)
        try:
            async for part in pieces_of(recorded, stops, hidden):
                if isinstance(part, Ended):
                    self._reason = part.reason
                elif isinstance(part, Piece) or not self._begun:
                    self._begun = True
                    yield part
        finally:
            self._count += len(recorded.tokens)
            self._left -= len(recorded.tokens)

    async def _free(self) -> AsyncGenerator[Begun | Piece | ToolEvent, None]:
        use = self._use
        parser = ToolParser(
            use.form, use.schemas, limit=0 if use.parallel else 1, pause_at=use.strict
        )
        while True:
            tape: list[_Tape] = []
            text = ""
            tokens: list[Token] = []
            running = self._generate(tape, self._stops, self._hidden)
            async with contextlib.aclosing(running) as parts:
                async for part in parts:
                    if isinstance(part, Begun):
                        yield part
                        continue
                    text += part.text
                    tokens += part.tokens
                    for event in parser.push(part.text):
                        if isinstance(event, Content):
                            yield Piece(event.text, tuple(tokens))
                            tokens = []
                        else:
                            yield event
                    if parser.paused or parser.done:
                        break
            if parser.paused or parser.done:
                # Its end says what the stages hold.
                await tape[0].cancel()
            if parser.done or not parser.paused:
                break
            name = parser.last_name
            await self._go_on_at(tape[0], text, parser.body_start, name)
            async for arguments in self._constrained(name, parser.calls - 1):
                yield arguments
            if self._reason != "stop" or not use.parallel:
                return
            self._token_ids += await self._tokenize(use.form.forced().after_arguments())
            parser.resume()
        if parser.done:
            self._reason = "stop"
        for event in parser.finish():
            yield Piece(event.text, tuple(tokens)) if isinstance(event, Content) else event

    async def _go_on_at(self, tape: _Tape, text: str, place: int, name: str) -> None:
        """The next prompt: the text up to `place`, then a call of `name` up to its arguments."""
        form = self._use.form.forced()
        wanted = text[:place].encode()
        size = 0
        for token in tape.tokens:
            length = 0 if token.token_id in self._hidden else len(token.piece)
            if size + length > len(wanted):
                break
            size += length
            self._token_ids.append(token.token_id)
        rest = wanted[size:].decode("utf-8", "ignore")
        call_id = new_call_id()
        beginning = form.until_name(call_id) + name + form.until_arguments(call_id)
        self._token_ids += await self._tokenize(rest + beginning)

    async def _forced(self) -> AsyncGenerator[Begun | Piece | ToolEvent, None]:
        use = self._use
        name = use.forced[0]
        if len(use.forced) > 1:
            grammar = "root ::= " + " | ".join(json.dumps(name) for name in use.forced)
            tape: list[_Tape] = []
            chosen = ""
            running = self._generate(tape, (), self._all_hidden, grammar=grammar)
            async with contextlib.aclosing(running) as parts:
                async for part in parts:
                    if isinstance(part, Piece):
                        chosen += part.text
                    else:
                        yield part
            if self._reason != "stop" or chosen not in use.forced:
                return
            name = chosen
            self._token_ids += tape[0].token_ids
            self._token_ids += await self._tokenize(use.form.forced().until_arguments(use.call_id))
        call = CallBegun(0, use.call_id, name)
        if self._begun:
            yield call
        async for step in self._constrained(name, 0):
            yield step
            if isinstance(step, Begun):
                # Not earlier: until then it may still be refused.
                yield call

    async def _constrained(
        self, name: str, index: int
    ) -> AsyncGenerator[Begun | CallArguments, None]:
        """A call's arguments, which the tail holds to the tool's schema."""
        schema = schema_text(self._use.schemas[name], "tools")
        tape: list[_Tape] = []
        running = self._generate(tape, (), self._all_hidden, json_schema=schema)
        async with contextlib.aclosing(running) as parts:
            async for part in parts:
                yield CallArguments(index, part.text) if isinstance(part, Piece) else part
        if tape:
            self._token_ids += tape[0].token_ids
