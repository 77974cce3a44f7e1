"""A request's way: a slot, a route, the prompt's tokens, its choices, their pieces.

async with serving.open(request, owner="", limits=None) as answering:
    async for event in answering.events(): ...
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from meshnet.tasks import cancel

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
from meshnet_gguf.gateway._requests import (
    ChatRequest,
    CompletionRequest,
    schema_text,
)
from meshnet_gguf.gateway._tool_calls import ToolRun, ToolUse, check_tools, tool_use
from meshnet_gguf.gateway._tool_format import GENERIC
from meshnet_gguf.gateway._tool_parser import CallArguments, CallBegun, Content, ToolEvent
from meshnet_gguf.gateway.admission import Admission, KeyLimits, Place
from meshnet_gguf.gateway.kept_sessions import KeptSessions, Lease
from meshnet_gguf.gateway.routes import ModelText, ServedModel, report
from meshnet_gguf.gateway.template_process import TemplateRenderer
from meshnet_gguf.route_source import OpenedRoute, Outcome
from proto.meshnet.shard.v1 import errors_pb2

__all__ = ["Answering", "Serving"]

# What a model has said so far counts for OpenAI's penalties, as far as the sampler looks back.
_PENALTY_TOKENS = 4096
# For OpenAI 0 is a share, of the likeliest token alone; the sampler's has to be greater.
_LEAST_TOP_P = 1e-6
_QUEUED_PIECES = 64
# No vocabulary has tokens that are longer on average: what is no prompt for the context in any case
# is not worth a tokenizer's time, which others wait for.
_TOKEN_BYTES = 128
# What a template is given of the request anyway.
_TEMPLATES_OWN = frozenset({"messages", "tools", "bos_token", "eos_token", "strftime_now"})
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
_FULL = frozenset({errors_pb2.REASON_SESSIONS_EXHAUSTED, errors_pb2.REASON_MEMORY_BUDGET_EXCEEDED})
# Others have what this request needs, and will give it back.
_TAKEN = frozenset({errors_pb2.REASON_SESSIONS_EXHAUSTED, errors_pb2.REASON_QUEUE_FULL})

_Form = ChatForm | CompletionForm
_Opened = TypeVar("_Opened")


@dataclass(frozen=True)
class _Job:
    """One choice before it is asked for, and which of the request's prompts it goes on after."""

    index: int
    prompt: int
    token_ids: list[int]
    sampling: SamplingParams
    tools: ToolUse | None = None


@dataclass(frozen=True)
class _Asked:
    """A request, whose it is, and its place, with as many slots as it needs sessions."""

    owner: str
    model: ServedModel
    request: ChatRequest | CompletionRequest
    place: Place

    @property
    def choices(self) -> int:
        """How many sessions it needs."""
        return self.place.slots


class Answering:
    """The choices of one request, under way. Made by Serving.open()."""

    def __init__(
        self,
        request: ChatRequest | CompletionRequest,
        form: _Form,
        jobs: Sequence[_Job],
        leases: list[Lease],
        text: ModelText,
        renewed: Callable[[Lease, MeshnetError], Awaitable[Lease]],
    ) -> None:
        self.form = form
        self.answers = [Answer(job.index) for job in jobs]
        # Whether any text has come.
        self.shown = False
        self._request = request
        self._jobs = jobs
        # Changes where a session that was kept from an earlier turn turns out to be lost.
        self.leases = leases
        self._renewed = renewed
        self._text = text
        self._controls = frozenset(token.token_id for token in text.vocabulary.control_tokens)

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
                async with contextlib.aclosing(self._choice(number)) as choice:
                    async for event in choice:
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
            await cancel(*tasks)

    async def _choice(self, number: int) -> AsyncGenerator[bytes, None]:
        job, answer = self._jobs[number], self.answers[number]
        async for part in self._parts(number):
            if isinstance(part, Piece):
                logprobs = (
                    await self._logprobs(self.leases[number], part.tokens)
                    if job.sampling.logprobs
                    else ()
                )
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

    async def _parts(self, number: int) -> AsyncGenerator[Begun | Piece | ToolEvent | Ended, None]:
        """A choice's parts; from a new session where a kept one ends before it has begun."""
        job, lease, begun = self._jobs[number], self.leases[number], False
        try:
            async for part in self._parts_of(job, lease):
                begun = True
                yield part
            return
        except MeshnetError as error:
            if begun or not lease.reused:
                raise
            self.leases[number] = lease = await self._renewed(lease, error)
        async for part in self._parts_of(job, lease):
            yield part

    def _parts_of(
        self, job: _Job, lease: Lease
    ) -> AsyncGenerator[Begun | Piece | ToolEvent | Ended, None]:
        session = lease.session
        self.answers[job.index].cached_tokens = session.held_of(job.token_ids)
        max_tokens = self._request.length or max(1, session.context_tokens - len(job.token_ids))
        if job.tools is not None:
            return self._tool_run(job, lease, job.tools, max_tokens).parts()
        generation = session.continue_with(
            job.token_ids,
            job.sampling,
            max_tokens=max_tokens,
            ignore_end_of_generation=self._request.ignore_eos,
        )
        return pieces_of(generation, self._request.stops, self._controls)

    def _tool_run(self, job: _Job, lease: Lease, use: ToolUse, max_tokens: int) -> ToolRun:
        head = lease.opened.route.head

        async def tokenize(text: str) -> list[int]:
            return await self._text.tokenize(head, text, add_special=False, parse_special=True)

        return ToolRun(
            use,
            lease.session,
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

    async def _logprobs(self, lease: Lease, tokens: Sequence[Token]) -> list[TokenLogprobs]:
        named = [token_id for token in tokens for token_id, _ in token.top_logprobs]
        pieces = iter(await self._text.pieces(lease.opened.route.head, named))
        return [
            TokenLogprobs(
                token, tuple((next(pieces), logprob) for _, logprob in token.top_logprobs)
            )
            for token in tokens
        ]

    def usage(self) -> Usage:
        """What the request has taken so far."""
        prompts = {job.prompt: len(job.token_ids) for job in self._jobs}
        return Usage(
            sum(prompts.values()),
            sum(answer.completion_tokens for answer in self.answers),
            sum(answer.cached_tokens for answer in self.answers),
        )


class Serving:
    """The models of a gateway and what stands before them.

    `open_within` seconds may pass until a route has agreed to a session, `answer_within` until an
    answer has ended. Sessions are kept for following turns in `kept`, if there is one.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        admission: Admission,
        renderer: TemplateRenderer,
        *,
        open_within: float = 2.5,
        answer_within: float = 600.0,
        kept: KeptSessions | None = None,
    ) -> None:
        self.models = {model.name: model for model in models}
        self.admission = admission
        self._renderer = renderer
        self._open_within = open_within
        self._answer_within = answer_within
        self.kept = KeptSessions(admission) if kept is None else kept

    async def aclose(self) -> None:
        """Ends the sessions that are kept."""
        await self.kept.aclose()

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
        async with self.admission.enter(owner=owner, choices=choices, limits=limits) as place:
            asked = _Asked(owner, model, request, place)
            answering = await self._once_there_is_room(place, lambda: self._open(asked))
            try:
                async with self._in_answer_time():
                    yield answering
            except BaseException as error:
                await self._give_up(answering.leases, error)
                raise
            await asyncio.gather(*(self._give_back(lease, request) for lease in answering.leases))

    @contextlib.asynccontextmanager
    async def _in_answer_time(self) -> AsyncIterator[None]:
        # The workers' own deadline is that of the whole session.
        try:
            async with asyncio.timeout(self._answer_within if self.kept.seconds else None):
                yield
        except TimeoutError as error:
            raise RequestError(
                errors_pb2.REASON_DEADLINE_EXCEEDED,
                f"expected an answer within {self._answer_within:g} s, it is not complete; "
                "ask for fewer tokens",
            ) from error

    async def _give_up(self, leases: Sequence[Lease], error: BaseException) -> None:
        """Ends sessions as one does that fail; what goes wrong with that is not the answer's."""
        await asyncio.gather(
            *(lease.stack.__aexit__(type(error), error, error.__traceback__) for lease in leases),
            return_exceptions=True,
        )

    async def _give_back(self, lease: Lease, request: ChatRequest | CompletionRequest) -> None:
        if (request.n or 1) > 1 or not self.kept.seconds:
            await lease.stack.aclose()
        else:
            await self.kept.put(lease)

    async def _once_there_is_room(
        self, place: Place, opening: Callable[[], Awaitable[_Opened]]
    ) -> _Opened:
        """Opens sessions, again whenever it is this request's turn while others fill the mesh."""
        while True:
            await self.kept.make_room()
            try:
                opened = await opening()
            except MeshnetError as error:
                if error.reason not in _TAKEN:
                    raise
                taken = error
            else:
                place.served()
                return opened
            try:
                await place.wait_again(taken.retry_after_ms)
            except MeshnetError as error:
                raise error from taken

    async def _open(self, asked: _Asked) -> Answering:
        until = asyncio.get_running_loop().time() + self._open_within
        for attempt in range(_ATTEMPTS):
            try:
                return await self._in_time(until, self._try_open(asked))
            except MeshnetError as error:
                if attempt + 1 == _ATTEMPTS:
                    raise
                if error.reason in _FULL and len(self.kept):
                    # Ours may be the sessions that take the room.
                    await self.kept.end_all()
                elif error.reason not in _OPEN_AGAIN_AFTER:
                    raise
        raise AssertionError("the last attempt returns or raises")

    async def _in_time(self, until: float, opening: Awaitable[_Opened]) -> _Opened:
        try:
            async with asyncio.timeout_at(until):
                return await opening
        except TimeoutError as error:
            raise RequestError(
                errors_pb2.REASON_DEADLINE_EXCEEDED,
                f"expected a route to agree within {self._open_within:g} s, none did; "
                "come again later",
            ) from error

    async def _try_open(self, asked: _Asked) -> Answering:
        reused = await self._reuse(asked)
        if reused is not None:
            return reused
        async with contextlib.AsyncExitStack() as trial:
            stacks = [
                await trial.enter_async_context(contextlib.AsyncExitStack())
                for _ in range(asked.choices)
            ]
            first = await stacks[0].enter_async_context(asked.model.source.open())
            text = await asked.model.text(first.route)
            jobs = await self._jobs(asked.request, first.route, text)
            leases = [await self._lease(stacks[0], asked, first)]
            for stack in stacks[1:]:
                opened = await stack.enter_async_context(asked.model.source.open())
                leases.append(await self._lease(stack, asked, opened))
            # From here on each session has a stack of its own.
            trial.pop_all()
            return self._answering(asked, jobs, leases, text)

    def _answering(
        self, asked: _Asked, jobs: Sequence[_Job], leases: list[Lease], text: ModelText
    ) -> Answering:
        request = asked.request
        form = _form(request, asked.model.name, jobs)

        async def renewed(lease: Lease, error: MeshnetError) -> Lease:
            await self._give_up([lease], error)

            def opening() -> Awaitable[Lease]:
                until = asyncio.get_running_loop().time() + self._open_within
                return self._in_time(until, self._fresh(asked, lease, error))

            return await self._once_there_is_room(asked.place, opening)

        return Answering(request, form, jobs, leases, text, renewed)

    async def _reuse(self, asked: _Asked) -> Answering | None:
        """An answer of a session that has read the beginning of this conversation."""
        # What is read in other portions may round otherwise: not where the same seed is to give
        # the same answer.
        if asked.choices > 1 or asked.request.seed is not None:
            return None
        waiting = self.kept.any_of(asked.owner, asked.model.name)
        if waiting is None:
            return None
        route = waiting.opened.route
        try:
            text = await asked.model.text(route)
            jobs = await self._jobs(asked.request, route, text)
        except MeshnetError as error:
            if error.recovery == errors_pb2.RECOVERY_FIX_REQUEST:
                raise
            return None  # a new route says better what is wrong
        lease = self.kept.take(waiting, jobs[0].token_ids)
        return None if lease is None else self._answering(asked, jobs, [lease], text)

    async def _fresh(self, asked: _Asked, lost: Lease, error: MeshnetError) -> Lease:
        """A new session in the place of one that was kept."""
        async with contextlib.AsyncExitStack() as stack:
            opened = await stack.enter_async_context(asked.model.source.open())
            if opened.route.identity != lost.opened.route.identity:
                raise error  # the tokens are another model's
            lease = await self._lease(stack, asked, opened)
            lease.stack = stack.pop_all()
            return lease

    async def _lease(
        self, stack: contextlib.AsyncExitStack, asked: _Asked, opened: OpenedRoute
    ) -> Lease:
        """Opens a session, on another way than the route's first where there is one."""
        identity = opened.route.identity
        for _ in range(_ATTEMPTS):
            try:
                session = await stack.enter_async_context(self._session(opened))
                return Lease(asked.owner, asked.model.name, opened, session, stack, self.kept.now())
            except MeshnetError as error:
                if error.reason not in _OPEN_AGAIN_AFTER or not await opened.go_round(error):
                    raise
                if opened.route.identity != identity:
                    raise  # the tokens are another model's
                failure = error
        raise failure

    @contextlib.asynccontextmanager
    async def _session(self, opened: OpenedRoute) -> AsyncIterator[Session]:
        longest = self.kept.longest if self.kept.seconds else 0.0
        session = opened.session(
            deadline=self._answer_within + longest, open_timeout=self._open_within
        )
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
        choices = request.n or 1
        uses: list[ToolUse | None] = [None]
        if isinstance(request, ChatRequest):
            prompts, uses = await self._chat_prompts(request, route, text)
        else:
            _check_length([each for each in request.prompts if isinstance(each, str)], route)
            _check_token_ids(request.prompts, text.vocabulary.size)
            prompts = [
                prompt
                if isinstance(prompt, list)
                else await text.tokenize(route.head, prompt, add_special=True, parse_special=False)
                for prompt in request.prompts
            ]
            prompts = [prompt for prompt in prompts for _ in range(choices)]
        if not all(prompts):
            raise RequestError(
                errors_pb2.REASON_FIELD_OUT_OF_BOUNDS,
                "expected a prompt, got an empty one",
                request.prompt_field,
            )
        _check_context(request, prompts, route)
        sampling = _sampling(request, text.vocabulary.size)
        random_seed = secrets.randbits(32)
        return [
            _Job(
                index,
                index // choices,
                prompt,
                dataclasses.replace(sampling, seed=request.seed_of(index, random_seed)),
                uses[index % len(uses)],
            )
            for index, prompt in enumerate(prompts)
        ]

    async def _chat_prompts(
        self, request: ChatRequest, route: Route, text: ModelText
    ) -> tuple[list[list[int]], list[ToolUse | None]]:
        """The tokens of each choice's prompt, and how it uses tools.

        They differ where a template writes the id of a call that the prompt begins.
        """
        form = await text.tool_format(self._renderer) if request.with_tools else GENERIC
        use = tool_use(request, form)
        uses = [use] + [use and use.of_another_choice() for _ in range(1, request.n or 1)]
        prompts: dict[str, list[int]] = {}
        for beginning in dict.fromkeys("" if each is None else each.beginning for each in uses):
            pieces = await chat_pieces(
                self._renderer, text.vocabulary, text.specials, request, form, beginning
            )
            _check_length(pieces, route)
            prompts[beginning] = [
                token_id
                for piece in pieces
                for token_id in await text.tokenize(
                    route.head, piece, add_special=False, parse_special=True
                )
            ]
        return [prompts["" if each is None else each.beginning] for each in uses], uses


def _sampling(request: ChatRequest | CompletionRequest, vocabulary_size: int) -> SamplingParams:
    if isinstance(request, ChatRequest):
        logprobs, top = bool(request.logprobs), request.top_logprobs or 0
    else:
        logprobs, top = request.logprobs is not None, request.logprobs or 0
    return SamplingParams(
        temperature=1.0 if request.temperature is None else request.temperature,
        top_k=min(request.top_k, vocabulary_size),
        top_p=1.0 if request.top_p is None else max(request.top_p, _LEAST_TOP_P),
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
    return schema_text(schema, "response_format")


def _check_length(texts: Sequence[str], route: Route) -> None:
    """Raises RequestError for text that is too long for the context, however it is tokenized."""
    context = _context_tokens(route)
    size = sum(len(text.encode()) for text in texts)
    if size > _TOKEN_BYTES * context:
        raise _too_long(context, f"{size} bytes, which are more")


def _check_context(
    request: ChatRequest | CompletionRequest, prompts: Sequence[Sequence[int]], route: Route
) -> None:
    """Raises RequestError for what does not fit into the context, with what is to come."""
    context = _context_tokens(route)
    prompt = max(len(token_ids) for token_ids in prompts)
    if prompt + (request.length or 1) > context:
        raise _too_long(
            context,
            f"{prompt} of the prompt and {request.length or 1} to come",
            "max_tokens" if prompt < context else request.prompt_field,
        )


def _too_long(context: int, got: str, param: str | None = None) -> RequestError:
    # Many programs know by these words that they have to shorten a conversation.
    return RequestError(
        errors_pb2.REASON_CONTEXT_EXCEEDED,
        f"this model's maximum context length is {context} tokens, for prompt and answer together, "
        f"got {got}; shorten the prompt, or ask for fewer tokens",
        param,
    )


def _context_tokens(route: Route) -> int:
    return min(capability.context_tokens for capability in route.capabilities)


def _check_token_ids(prompts: Sequence[str | Sequence[int]], vocabulary_size: int) -> None:
    """Raises RequestError for tokens that no worker need be asked about."""
    most = max((max(prompt) for prompt in prompts if not isinstance(prompt, str)), default=0)
    if most >= vocabulary_size:
        raise RequestError(
            errors_pb2.REASON_TOKEN_OUT_OF_RANGE,
            f"expected token ids in [0, {vocabulary_size}), got {most}",
            "prompt",
        )


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
        if taken := _TEMPLATES_OWN & (request.chat_template_kwargs or {}).keys():
            raise RequestError(
                errors_pb2.REASON_FIELD_OUT_OF_BOUNDS,
                f"expected names that a template does not have by itself, got {min(taken)!r}; "
                "leave it away",
                "chat_template_kwargs",
            )
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
        "with_usage": request.stream_options is not None
        and bool(request.stream_options.include_usage),
        "with_logprobs": jobs[0].sampling.logprobs,
    }
    if isinstance(request, ChatRequest):
        return ChatForm(f"chatcmpl-{random}", created, model, **options)
    echoes = [
        str(request.prompts[index // (request.n or 1)]) if request.echo else ""
        for index in range(len(jobs))
    ]
    return CompletionForm(f"cmpl-{random}", created, model, **options, echoes=echoes)
