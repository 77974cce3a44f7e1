"""A session at a route's head, and the generations in it.

The decode loop runs in the head worker; here tokens only arrive.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import grpc
import grpc.aio
from meshnet.tasks import cancel

from meshnet_gguf.chat import ChatMessage, render_chat
from meshnet_gguf.client._values import (
    Event,
    Finished,
    FinishReason,
    GenerationResult,
    Limits,
    PrefillProgress,
    SamplingParams,
    StageReceipt,
    Token,
    known,
)
from meshnet_gguf.client._worker import WorkerClient, token_metadata
from meshnet_gguf.errors import MeshnetError, from_rpc_error, reason_in_details
from meshnet_gguf.text import Utf8Stream
from proto.meshnet.shard.v1 import errors_pb2, shard_pb2

if TYPE_CHECKING:
    from typing import Self

    _SessionCall = grpc.aio.StreamStreamCall[shard_pb2.SessionRequest, shard_pb2.SessionEvent]

# Events that wait for a slow reader before the head is made to wait by gRPC's flow control.
_QUEUED_EVENTS = 256


class Session:
    """One conversation on a route, made by Route.session().

    One generation at a time: starting one cancels what is left of the one before.

        async with route.session() as session:
            async for event in session.generate(token_ids, max_tokens=32):
                ...

    Leaving the block ends the session on every stage: in an orderly way with `receipts` at the end,
    or at once (as if the client had gone away) when the block ends by an exception.
    """

    def __init__(
        self, head: WorkerClient, open_message: shard_pb2.OpenSession, *, open_timeout: float
    ) -> None:
        self.route_session_id: bytes = open_message.route.route_session_id
        self.route_epoch: int = open_message.route.route_epoch
        self.work_id: str = open_message.work_id
        self.limits: Limits | None = None
        self.context_tokens = 0
        self.prefill_chunk_tokens = 0
        self.receipts: tuple[StageReceipt, ...] = ()
        self._head = head
        self._open_message = open_message
        self._open_timeout = open_timeout
        self._call: _SessionCall | None = None
        self._reader: asyncio.Task[None] | None = None
        self._events: asyncio.Queue[shard_pb2.SessionEvent | MeshnetError] = asyncio.Queue(
            _QUEUED_EVENTS
        )
        self._failure: MeshnetError | None = None
        self._running: Generation | None = None
        self._last_generation = 0
        self._closed = False
        self._history: list[int] = []
        self._cached = 0

    async def __aenter__(self) -> Self:
        """Opens the session on all stages.

        Raises MeshnetError with the reason of the stage that refused; PEER_UNREACHABLE,
        DEADLINE_EXCEEDED (after `open_timeout` seconds) and the like.
        """
        hops = self._open_message.route.hops
        metadata = token_metadata(hops[0].route_token if hops else "")
        self._call = self._head.shard.Session(None, metadata=metadata)
        self._reader = asyncio.create_task(self._read(self._call))
        try:
            async with asyncio.timeout(self._open_timeout):
                await self._send(shard_pb2.SessionRequest(open=self._open_message))
                event = await self._next()
        except TimeoutError as error:
            await self._abort()
            raise MeshnetError(
                errors_pb2.REASON_DEADLINE_EXCEEDED,
                f"expected {self._head.endpoint} to open the session within "
                f"{self._open_timeout:g} s",
            ) from error
        except BaseException:
            await self._abort()
            raise
        if not event.HasField("opened"):
            await self._abort()
            raise _unexpected(event, "the answer to opening a session")
        self.limits = Limits.from_proto(event.opened.limits)
        self.context_tokens = event.opened.context_tokens
        self.prefill_chunk_tokens = event.opened.prefill_chunk_tokens
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc_type is not None or self._failure is not None:
            await self._abort()
            return
        try:
            await self.close()
        finally:
            await self._abort()

    async def close(self, within: float = 10.0) -> tuple[StageReceipt, ...]:
        """Ends the session: cancels a running generation, waits for every stage's receipt.

        Raises MeshnetError: what ended the session instead, DEADLINE_EXCEEDED after `within`
        seconds. Closing again gives the same receipts.
        """
        call = self._opened_call()
        if self._closed:
            return self.receipts
        try:
            async with asyncio.timeout(within):
                if self._running is not None:
                    await self._running.cancel()
                with contextlib.suppress(asyncio.InvalidStateError):
                    await call.done_writing()
                while True:
                    event = await self._next()
                    if event.HasField("closed"):
                        self._closed = True
                        self.receipts = tuple(
                            StageReceipt.from_proto(item) for item in event.closed.receipts
                        )
                        return self.receipts
        except TimeoutError as error:
            raise MeshnetError(
                errors_pb2.REASON_DEADLINE_EXCEEDED,
                f"expected {self._head.endpoint} to close the session within {within:g} s",
            ) from error

    @property
    def cached_token_ids(self) -> tuple[int, ...]:
        """The tokens that the stages hold, as far as finished generations tell.

        The last token of a generation is sampled but not yet held.
        """
        return tuple(self._history[: self._cached])

    @property
    def ended(self) -> bool:
        """Whether the session is known to have ended: closed, lost, evicted."""
        reader = self._reader
        return self._closed or self._failure is not None or (reader is not None and reader.done())

    def held_of(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens the stages hold already, as far as continue_with() can use it.

        One token at least must be computed to sample after it.
        """
        held = 0
        for ours, theirs in zip(token_ids[:-1], self._history[: self._cached], strict=False):
            if ours != theirs:
                break
            held += 1
        return held

    def generate(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        max_tokens: int,
        start_position: int = 0,
        stop_token_ids: Sequence[int] = (),
        ignore_end_of_generation: bool = False,
        return_logits: bool = False,
    ) -> Generation:
        """Keeps `start_position` tokens of the session, appends `token_ids`, generates.

        Nothing is sent before the returned iterator is first asked.
        """
        self._last_generation += 1
        message = shard_pb2.Generate(
            generation=self._last_generation,
            start_position=start_position,
            token_ids=token_ids,
            sampling=(sampling or SamplingParams()).to_proto(),
            max_tokens=max_tokens,
            stop_token_ids=stop_token_ids,
            ignore_end_of_generation=ignore_end_of_generation,
            return_logits=return_logits,
        )
        return Generation(self, message)

    def continue_with(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        max_tokens: int,
        ignore_end_of_generation: bool = False,
    ) -> Generation:
        """Generates after the whole sequence `token_ids`, computing only what is not held yet."""
        held = self.held_of(token_ids)
        return self.generate(
            token_ids[held:],
            sampling,
            max_tokens=max_tokens,
            start_position=held,
            ignore_end_of_generation=ignore_end_of_generation,
        )

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        sampling: SamplingParams | None = None,
        *,
        max_tokens: int,
    ) -> Generation:
        """Generates the answer to a whole conversation, by the model's own chat template.

        What the session holds of an earlier turn is used again. Raises MeshnetError as
        render_chat() does.
        """
        return self.continue_with(
            await chat_token_ids(self._head, messages), sampling, max_tokens=max_tokens
        )

    def _opened_call(self) -> _SessionCall:
        if self._call is None:
            raise MeshnetError(
                errors_pb2.REASON_LIFECYCLE_VIOLATION,
                "expected an open session; use it inside `async with route.session()`",
            )
        return self._call

    async def _send(self, request: shard_pb2.SessionRequest) -> None:
        # When the stream has ended, the reader has found why or is about to.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._opened_call().write(request)

    async def _read(self, call: _SessionCall) -> None:
        # A task of its own: cancelling a read would end the whole call in grpc.aio, and a reader
        # that stops waiting for one event must not lose its session.
        try:
            while True:
                event = await call.read()
                if isinstance(event, shard_pb2.SessionEvent):
                    await self._events.put(event)
                else:
                    break
            code = await call.code()
            failure = MeshnetError(
                errors_pb2.REASON_PEER_LOST, f"{self._head.endpoint} ended the session ({code})"
            )
        except grpc.aio.AioRpcError as error:
            failure = from_rpc_error(error)
            if reason_in_details(error) is None and error.code() is grpc.StatusCode.INTERNAL:
                # gRPC's own: what a write into a connection that has just broken makes of the call.
                failure = MeshnetError(errors_pb2.REASON_PEER_LOST, failure.message)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # It is the call that was cancelled: by abort(), or by closing the connection.
            failure = MeshnetError(errors_pb2.REASON_CANCELLED, "this client ended the session")
        await self._events.put(failure)

    async def _next(self) -> shard_pb2.SessionEvent:
        if self._failure is not None:
            raise self._failure
        event = await self._events.get()
        if isinstance(event, shard_pb2.SessionEvent):
            if not (event.HasField("error") and event.error.generation == 0):
                return event
            failure = MeshnetError.from_proto(event.error.error)
        else:
            failure = event
        self._failure = failure
        raise failure

    async def _abort(self) -> None:
        if self._call is not None:
            self._call.cancel()
        if self._reader is not None:
            await cancel(self._reader)

    async def _start(self, generation: Generation) -> None:
        if self._running is not None:
            # Left unfinished by a reader that lost interest.
            await self._running.cancel()
        self._running = generation
        await self._send(shard_pb2.SessionRequest(generate=generation.message))

    def _finish(self, generation: Generation, cached_tokens: int | None) -> None:
        if self._running is generation:
            self._running = None
        if cached_tokens is None:
            return
        message = generation.message
        self._history[message.start_position :] = [*message.token_ids, *generation.token_ids]
        self._cached = cached_tokens


class Generation:
    """An async iterator over one generation's events; the last one is `Finished`.

    Iterating raises MeshnetError: the reason that refused this generation (the session goes on), or
    the one that ended the session. `started` and `first_token` are time.monotonic() seconds.
    """

    def __init__(self, session: Session, message: shard_pb2.Generate) -> None:
        self.message = message
        self.token_ids: list[int] = []
        self.started: float | None = None
        self.first_token: float | None = None
        self.last_token: float | None = None
        self._session = session
        self._decoder = Utf8Stream()
        self._done = False
        self._stops = frozenset(message.stop_token_ids)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        if self._done:
            raise StopAsyncIteration
        if self.started is None:
            await self._session._start(self)
            self.started = time.monotonic()
        while True:
            try:
                event = await self._session._next()
            except MeshnetError:
                self._end(None)
                raise
            result = self._take(event)
            if result is not None:
                return result

    async def cancel(self) -> None:
        """Ends the generation and waits until the head has ended it. Keeps the session.

        Raises MeshnetError when the session itself has ended.
        """
        if self._done:
            return
        if self.started is None:
            self._done = True
            return
        await self.request_cancel()
        async for _ in self:
            pass

    async def request_cancel(self) -> None:
        """Asks the head to end the generation; the events up to Finished are still to be read."""
        await self._session._send(
            shard_pb2.SessionRequest(
                cancel=shard_pb2.CancelGeneration(generation=self.message.generation)
            )
        )

    async def result(self) -> GenerationResult:
        """Reads all events (from here on) and sums them up."""
        text: list[str] = []
        logits: list[bytes] = []
        finished: Finished | None = None
        async for event in self:
            if isinstance(event, Token):
                text.append(event.text)
                if event.logits:
                    logits.append(event.logits)
            elif isinstance(event, Finished):
                text.append(event.text)
                finished = event
        if finished is None:
            raise MeshnetError(
                errors_pb2.REASON_LIFECYCLE_VIOLATION,
                "expected a generation that has not been read to its end yet",
            )
        return self.summary(finished, "".join(text), logits)

    def summary(
        self, finished: Finished, text: str, logits: Sequence[bytes] = ()
    ) -> GenerationResult:
        """What result() returns, for somebody who has read the events one by one."""
        return GenerationResult(
            token_ids=tuple(self.token_ids),
            text=text,
            finished=finished,
            time_to_first_token=self.time_to_first_token,
            decode_tokens_per_second=self.decode_tokens_per_second,
            logits=tuple(logits),
        )

    @property
    def time_to_first_token(self) -> float:
        """Seconds from sending to the first token; 0 while there is none."""
        if self.started is None or self.first_token is None:
            return 0.0
        return self.first_token - self.started

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens after the first per second, as they arrived; 0 with fewer than two tokens."""
        if self.first_token is None or self.last_token is None or len(self.token_ids) < 2:
            return 0.0
        seconds = self.last_token - self.first_token
        return (len(self.token_ids) - 1) / seconds if seconds > 0 else 0.0

    def _end(self, cached_tokens: int | None) -> None:
        self._done = True
        self._session._finish(self, cached_tokens)

    def _take(self, event: shard_pb2.SessionEvent) -> Event | None:
        kind = event.WhichOneof("body")
        number = self.message.generation
        if kind == "prefill" and event.prefill.generation == number:
            return PrefillProgress(event.prefill.tokens_done, event.prefill.tokens_total)
        if kind == "token" and event.token.generation == number:
            return self._token(event.token)
        if kind == "finished" and event.finished.generation == number:
            finished = event.finished
            self._end(finished.cached_tokens)
            return Finished(
                reason=known(FinishReason, finished.reason),
                prompt_tokens=finished.prompt_tokens,
                completion_tokens=finished.completion_tokens,
                cached_tokens=finished.cached_tokens,
                prefill_us=finished.prefill_us,
                decode_us=finished.decode_us,
                text=self._decoder.finish(),
            )
        if kind == "error" and event.error.generation == number:
            self._end(None)
            raise MeshnetError.from_proto(event.error.error)
        if kind in ("prefill", "token", "finished", "error"):
            return None  # of a generation that was given up
        self._end(None)
        raise _unexpected(event, "an event of the running generation")

    def _token(self, event: shard_pb2.TokenEvent) -> Token:
        now = time.monotonic()
        if self.first_token is None:
            self.first_token = now
        self.last_token = now
        token = event.token
        self.token_ids.append(token.token_id)
        ends = token.end_of_generation or token.token_id in self._stops
        return Token(
            token_id=token.token_id,
            position=event.position,
            text="" if ends else self._decoder.push(event.piece),
            piece=event.piece,
            end_of_generation=token.end_of_generation,
            logprob=token.logprob if token.HasField("logprob") else None,
            top_logprobs=tuple((top.token_id, top.logprob) for top in token.top),
            logits=event.logits,
        )


async def chat_token_ids(head: WorkerClient, messages: Sequence[ChatMessage]) -> list[int]:
    """The conversation as the model's chat template writes it, in tokens.

    The template itself writes what belongs at the start, so the tokenizer adds nothing.
    """
    vocabulary = await head.vocabulary()
    prompt = render_chat(
        vocabulary.chat_template,
        messages,
        bos_token=vocabulary.special_text("bos"),
        eos_token=vocabulary.special_text("eos"),
    )
    return await head.tokenize(prompt, add_special=False, parse_special=True)


def _unexpected(event: shard_pb2.SessionEvent, expected: str) -> MeshnetError:
    return MeshnetError(
        errors_pb2.REASON_LIFECYCLE_VIOLATION,
        f"expected {expected}, got {event.WhichOneof('body') or 'an empty event'}",
    )
