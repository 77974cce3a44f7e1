"""A request's way: a slot, a route, the prompt's tokens, its choices, their pieces.

async with serving.open(request, owner="", limits=None) as answering:
    async for event in answering.events(): ...
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from meshnet_gguf.client import Route, SamplingParams, Session, Token
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.gateway._answers import (
    Answer,
    Call,
    ChatForm,
    CompletionForm,
    TokenLogprobs,
    Usage,
)
from meshnet_gguf.gateway._failures import RequestError
from meshnet_gguf.gateway._generation import Begun, Ended, Piece, pieces_of
from meshnet_gguf.gateway._prompts import chat_pieces
from meshnet_gguf.gateway._requests import ChatRequest, CompletionRequest, SamplingRequest
from meshnet_gguf.gateway._tool_calls import ToolRun, ToolUse, check_tools, tool_use
from meshnet_gguf.gateway._tool_format import GENERIC
from meshnet_gguf.gateway._tool_parser import CallArguments, CallBegun, Content, ToolEvent
from meshnet_gguf.gateway.admission import Admission, KeyLimits
from meshnet_gguf.gateway.routes import ModelText, ServedModel, report
from meshnet_gguf.gateway.template_process import TemplateRenderer
from meshnet_gguf.route_source import OpenedRoute, Outcome
from proto.meshnet.shard.v1 import errors_pb2

__all__ = ["Answering", "Serving"]

# What a model has said so far counts for OpenAI's penalties, as far as the sampler looks back.
_PENALTY_TOKENS = 4096
_QUEUED_PIECES = 64
# A route that could not be opened is looked for once more: another may have taken its place.
_ATTEMPTS = 2
_OPEN_AGAIN_AFTER = frozenset(
    {
        errors_pb2.REASON_PEER_LOST,
        errors_pb2.REASON_PEER_UNREACHABLE,
        errors_pb2.REASON_RECIPE_MISMATCH,
        errors_pb2.REASON_RANGE_MISMATCH,
        errors_pb2.REASON_DRAINING,
        errors_pb2.REASON_STALE_EPOCH,
    }
)

_Form = ChatForm | CompletionForm


@dataclass(frozen=True)
class _Job:
    """One choice before it is asked for."""

    index: int
    token_ids: list[int]
    sampling: SamplingParams
    tools: ToolUse | None = None


class Answering:
    """The choices of one request, under way. Made by Serving.open()."""

    def __init__(
        self,
        request: SamplingRequest,
        form: _Form,
        jobs: Sequence[_Job],
        sessions: Sequence[Session],
        route: Route,
        text: ModelText,
        length: int | None,
    ) -> None:
        self.form = form
        self.answers = [Answer(job.index) for job in jobs]
        # Whether any text has come.
        self.shown = False
        self._request = request
        self._jobs = jobs
        self._sessions = sessions
        self._head = route.head
        self._text = text
        self._length = length
        self._controls = frozenset(token.token_id for token in text.vocabulary.special_tokens)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The events of a stream: an empty one once the route has taken a choice, then its text.

        Fills `answers` on the way. Raises MeshnetError.
        """
        if len(self._jobs) == 1:
            async for event in self._choice(0):
                yield event
            return
        async with contextlib.aclosing(self._merged()) as merged:
            async for event in merged:
                yield event

    async def _merged(self) -> AsyncGenerator[bytes, None]:
        events: asyncio.Queue[bytes | Exception | None] = asyncio.Queue(_QUEUED_PIECES)

        async def run(number: int) -> None:
            try:
                async for event in self._choice(number):
                    await events.put(event)
                await events.put(None)
            except Exception as error:
                await events.put(error)

        tasks = [asyncio.create_task(run(number)) for number in range(len(self._jobs))]
        try:
            running = len(tasks)
            while running:
                event = await events.get()
                if event is None:
                    running -= 1
                elif isinstance(event, Exception):
                    raise event
                else:
                    yield event
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _choice(self, number: int) -> AsyncGenerator[bytes, None]:
        job, session, answer = self._jobs[number], self._sessions[number], self.answers[number]
        max_tokens = self._length or max(1, session.context_tokens - len(job.token_ids))
        if job.tools is None:
            generation = session.generate(
                job.token_ids,
                job.sampling,
                max_tokens=max_tokens,
                ignore_end_of_generation=self._request.ignore_eos,
            )
            parts: AsyncGenerator[Begun | Piece | ToolEvent | Ended, None] = pieces_of(
                generation, self._request.stops, self._controls
            )
        else:
            parts = self._tool_run(job, session, job.tools, max_tokens).parts()
        async for part in parts:
            if isinstance(part, Piece):
                logprobs = await self._logprobs(part.tokens) if job.sampling.logprobs else ()
                self.shown = True
                answer.text.append(part.text)
                answer.completion_tokens += len(part.tokens)
                answer.logprobs += logprobs
                yield self.form.text(job.index, part.text, logprobs)
            elif isinstance(part, Begun):
                yield self.form.start(job.index)
            elif isinstance(part, (CallBegun, CallArguments, Content)):
                yield self._called(answer, part)
            else:
                self._end(answer, part)
                yield self.form.end(answer)

    def _tool_run(self, job: _Job, session: Session, use: ToolUse, max_tokens: int) -> ToolRun:
        async def tokenize(text: str) -> list[int]:
            return await self._text.tokenize(
                self._head, text, add_special=False, parse_special=True
            )

        return ToolRun(
            use,
            session,
            job.token_ids,
            job.sampling,
            tokenize=tokenize,
            hidden=self._controls,
            visible=self._text.tokens_in(use.form.marks),
            stops=self._request.stops,
            max_tokens=max_tokens,
            ignore_end_of_generation=self._request.ignore_eos,
        )

    def _called(self, answer: Answer, part: ToolEvent) -> bytes:
        assert isinstance(self.form, ChatForm)
        self.shown = True
        if isinstance(part, CallBegun):
            answer.calls.append(Call(part.call_id, part.name))
            return self.form.call(answer.index, part.index, answer.calls[-1])
        assert isinstance(part, CallArguments)
        answer.calls[part.index].arguments.append(part.text)
        return self.form.arguments(answer.index, part.index, part.text)

    def _end(self, answer: Answer, ended: Ended) -> None:
        called = answer.calls and ended.reason == "stop"
        answer.finish_reason = "tool_calls" if called else ended.reason
        answer.prompt_tokens = len(self._jobs[answer.index].token_ids)
        answer.completion_tokens = ended.completion_tokens

    async def _logprobs(self, tokens: Sequence[Token]) -> list[TokenLogprobs]:
        named = [token_id for token in tokens for token_id, _ in token.top_logprobs]
        pieces = iter(await self._text.pieces(self._head, named))
        return [
            TokenLogprobs(
                token, tuple((next(pieces), logprob) for _, logprob in token.top_logprobs)
            )
            for token in tokens
        ]

    def usage(self) -> Usage:
        """What the request has taken so far."""
        prompts = {id(job.token_ids): len(job.token_ids) for job in self._jobs}
        return Usage(
            sum(prompts.values()),
            sum(answer.completion_tokens for answer in self.answers),
            sum(answer.cached_tokens for answer in self.answers),
        )


class Serving:
    """The models of a gateway and what stands before them.

    `open_within` seconds may pass until a route has agreed to a session, `answer_within` until an
    answer has ended.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        admission: Admission,
        renderer: TemplateRenderer,
        *,
        open_within: float = 2.5,
        answer_within: float = 600.0,
    ) -> None:
        self.models = {model.name: model for model in models}
        self.admission = admission
        self._renderer = renderer
        self._open_within = open_within
        self._answer_within = answer_within

    def model(self, name: str) -> ServedModel:
        """The model of this name. Raises RequestError (NOT_SERVED)."""
        if name not in self.models:
            raise RequestError(
                errors_pb2.REASON_NOT_SERVED,
                f"expected a model of {', '.join(sorted(self.models))}, got {name!r}",
                "model",
            )
        return self.models[name]

    @contextlib.asynccontextmanager
    async def open(
        self,
        request: ChatRequest | CompletionRequest,
        *,
        owner: str = "",
        limits: KeyLimits | None = None,
    ) -> AsyncIterator[Answering]:
        """Sessions for all choices of a request, which end with the block.

        Raises MeshnetError: whatever refuses the request, and what ends its sessions.
        """
        model = self.model(request.model)
        _check(request)
        prompts = request.prompts if isinstance(request, CompletionRequest) else [None]
        choices = len(prompts) * (request.n or 1)
        async with (
            self.admission.enter(owner=owner, choices=choices, limits=limits),
            contextlib.AsyncExitStack() as stack,
        ):
            answering = await self._open(stack, model, request, choices)
            yield answering

    async def _open(
        self,
        stack: contextlib.AsyncExitStack,
        model: ServedModel,
        request: ChatRequest | CompletionRequest,
        choices: int,
    ) -> Answering:
        until = asyncio.get_running_loop().time() + self._open_within
        for attempt in range(_ATTEMPTS):
            try:
                async with contextlib.AsyncExitStack() as trial:
                    answering = await self._in_time(until, trial, model, request, choices)
                    stack.push_async_exit(trial.pop_all())
                    return answering
            except MeshnetError as error:
                if error.reason not in _OPEN_AGAIN_AFTER or attempt + 1 == _ATTEMPTS:
                    raise
        raise AssertionError("the last attempt returns or raises")

    async def _in_time(
        self,
        until: float,
        stack: contextlib.AsyncExitStack,
        model: ServedModel,
        request: ChatRequest | CompletionRequest,
        choices: int,
    ) -> Answering:
        try:
            async with asyncio.timeout_at(until):
                return await self._try_open(stack, model, request, choices)
        except TimeoutError as error:
            raise MeshnetError(
                errors_pb2.REASON_DEADLINE_EXCEEDED,
                f"expected a route to agree within {self._open_within:g} s, none did; "
                "come again later",
            ) from error

    async def _try_open(
        self,
        stack: contextlib.AsyncExitStack,
        model: ServedModel,
        request: ChatRequest | CompletionRequest,
        choices: int,
    ) -> Answering:
        opened = await stack.enter_async_context(model.source.open())
        text = await model.text(opened.route)
        jobs = await self._jobs(request, opened.route, text)
        routes: list[OpenedRoute] = [opened]
        while len(routes) < choices:
            routes.append(await stack.enter_async_context(model.source.open()))
        sessions = [await stack.enter_async_context(self._session(route)) for route in routes]
        form = _form(request, model.name, jobs)
        length = request.length if isinstance(request, ChatRequest) else request.max_tokens
        return Answering(request, form, jobs, sessions, opened.route, text, length)

    @contextlib.asynccontextmanager
    async def _session(self, opened: OpenedRoute) -> AsyncIterator[Session]:
        session = opened.session(deadline=self._answer_within, open_timeout=self._open_within)
        try:
            async with session:
                yield session
        except MeshnetError as error:
            await report(opened, session, Outcome.FAILED, error)
            raise
        except BaseException:
            await report(opened, session, Outcome.CANCELLED)
            raise
        await report(opened, session, Outcome.COMPLETED)

    async def _jobs(
        self, request: ChatRequest | CompletionRequest, route: Route, text: ModelText
    ) -> list[_Job]:
        use = None
        if isinstance(request, ChatRequest):
            form = await text.tool_format(self._renderer) if request.with_tools else GENERIC
            use = tool_use(request, form)
            pieces = await chat_pieces(
                self._renderer,
                text.vocabulary,
                text.specials,
                request,
                form,
                "" if use is None else use.beginning,
            )
            prompts = [
                [
                    token_id
                    for piece in pieces
                    for token_id in await text.tokenize(
                        route.head, piece, add_special=False, parse_special=True
                    )
                ]
            ]
        else:
            prompts = [
                prompt
                if isinstance(prompt, list)
                else await text.tokenize(route.head, prompt, add_special=True, parse_special=False)
                for prompt in request.prompts
            ]
        if not all(prompts):
            raise RequestError(
                errors_pb2.REASON_FIELD_OUT_OF_BOUNDS, "expected a prompt, got an empty one"
            )
        sampling = _sampling(request, text.vocabulary.size)
        random_seed = secrets.randbits(32)
        return [
            _Job(
                index,
                prompts[index // (request.n or 1)],
                dataclasses.replace(sampling, seed=request.seed_of(index, random_seed)),
                use,
            )
            for index in range(len(prompts) * (request.n or 1))
        ]


def _sampling(request: ChatRequest | CompletionRequest, vocabulary_size: int) -> SamplingParams:
    if isinstance(request, ChatRequest):
        logprobs, top = bool(request.logprobs), request.top_logprobs or 0
    else:
        logprobs, top = request.logprobs is not None, request.logprobs or 0
    return SamplingParams(
        temperature=1.0 if request.temperature is None else request.temperature,
        top_k=min(request.top_k, vocabulary_size),
        top_p=1.0 if request.top_p is None else request.top_p,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        frequency_penalty=request.frequency_penalty or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        penalty_last_n=_PENALTY_TOKENS,
        logit_bias=request.biases(vocabulary_size),
        top_logprobs=top,
        logprobs=logprobs,
        json_schema=_json_schema(request),
    )


def _json_schema(request: ChatRequest | CompletionRequest) -> str:
    """The schema that the answer must have, as JSON; empty for any text."""
    form = request.response_format if isinstance(request, ChatRequest) else None
    if form is None or form.type == "text":
        return ""
    schema = {"type": "object"} if form.json_schema is None else form.json_schema.schema_
    return json.dumps(schema)


def _check(request: ChatRequest | CompletionRequest) -> None:
    """What a body says that no field alone shows to be wrong. Raises RequestError."""

    def unsupported(param: str, message: str) -> RequestError:
        return RequestError(errors_pb2.REASON_FEATURE_UNSUPPORTED, message, param)

    if request.stream_options is not None and not request.stream:
        raise RequestError(
            errors_pb2.REASON_FIELD_OUT_OF_BOUNDS,
            "expected stream_options with stream only; set stream or leave them away",
            "stream_options",
        )
    if isinstance(request, ChatRequest):
        if request.top_logprobs and not request.logprobs:
            raise RequestError(
                errors_pb2.REASON_FIELD_OUT_OF_BOUNDS,
                "expected logprobs with top_logprobs; set logprobs to true",
                "top_logprobs",
            )
        form = request.response_format
        if form is not None and (form.type == "json_schema") != (form.json_schema is not None):
            raise RequestError(
                errors_pb2.REASON_FIELD_OUT_OF_BOUNDS,
                "expected json_schema with the type json_schema, and with no other",
                "response_format",
            )
        check_tools(request)
        return
    if request.suffix:
        raise unsupported("suffix", "this server does not fill in before a suffix; leave it away")
    if request.echo and request.logprobs is not None:
        raise unsupported("echo", "this server has no log-probabilities of prompts to echo")
    if request.echo and not all(isinstance(prompt, str) for prompt in request.prompts):
        raise unsupported("echo", "this server echoes text only; give the prompt as text")
    if request.best_of not in (None, request.n or 1):
        raise unsupported("best_of", "this server returns all it generates: leave best_of away")


def _form(request: ChatRequest | CompletionRequest, model: str, jobs: Sequence[_Job]) -> _Form:
    random = os.urandom(12).hex()
    created = int(time.time())
    options: dict[str, Any] = {
        "with_usage": request.stream_options is not None and request.stream_options.include_usage,
        "with_logprobs": jobs[0].sampling.logprobs,
    }
    if isinstance(request, ChatRequest):
        return ChatForm(f"chatcmpl-{random}", created, model, **options)
    echoes = [
        str(request.prompts[index // (request.n or 1)]) if request.echo else ""
        for index in range(len(jobs))
    ]
    return CompletionForm(f"cmpl-{random}", created, model, **options, echoes=echoes)
