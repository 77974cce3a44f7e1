"""The gateway as an ASGI application: OpenAI's endpoints over routes of shard workers.

    app = make_app(Serving([ServedModel("smollm2", source)], admission, renderer))

GET /v1/models and /v1/models/NAME, POST /v1/chat/completions, POST /v1/completions; GET /healthz
(this process lives), /readyz (every model has a complete route), /metrics (Prometheus); GET
/status.json (the gateway and its mesh, a meshnet_gguf.status.MeshStatus) and /status/events (the
same as server-sent events, once a second); / is a page that shows them. Logs say what was asked for
in numbers, never in words, unless `log_prompts` is set.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import time
import traceback
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from meshnet.tasks import cancel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route as HttpRoute
from starlette.types import Message as AsgiMessage
from starlette.types import Receive, Scope, Send

from meshnet_gguf.errors import MeshnetError, reason_name
from meshnet_gguf.gateway._answers import DONE
from meshnet_gguf.gateway._failures import (
    RequestError,
    error_body,
    error_event,
    headers_of,
    http_status,
    words_of,
)
from meshnet_gguf.gateway._requests import ChatRequest, CompletionRequest, parse
from meshnet_gguf.gateway._serving import Answering, Serving
from meshnet_gguf.gateway.admission import KeyLimits
from meshnet_gguf.gateway.api_keys import ApiKey, ApiKeys
from meshnet_gguf.gateway.host_check import AllowedHosts, HostCheck
from meshnet_gguf.gateway.metrics import GatewayMetrics
from meshnet_gguf.gateway.page_files import page_routes
from meshnet_gguf.gateway.status_feed import StatusFeed
from meshnet_gguf.status import Problem
from proto.meshnet.shard.v1 import errors_pb2

__all__ = ["GatewayApp", "GatewayOptions", "make_app"]

_LOG = logging.getLogger("meshnet.gateway")
_HTTP_REASONS = {
    404: errors_pb2.REASON_NOT_SERVED,
    405: errors_pb2.REASON_NOT_SERVED,
}


@dataclass(frozen=True)
class GatewayOptions:
    """What bounds a request, and who may ask. Without `keys` everybody may.

    `hosts` are the names under which it may be asked, None: any (ADR 0014).
    """

    max_request_bytes: int = 8 * 1024 * 1024
    body_seconds: float = 30.0
    ready_seconds: float = 2.0
    status_seconds: float = 1.0
    log_prompts: bool = False
    keys: ApiKeys | None = None
    hosts: AllowedHosts | None = AllowedHosts()  # noqa: RUF009 - immutable


class _ClientGoneError(Exception):
    """Nobody reads the answer any more."""


@dataclass
class _Record:
    """What the log says of a request."""

    request_id: str
    endpoint: str
    owner: str = ""
    model: str = ""
    status: int = 0
    reason: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    first_text_ms: float = 0.0
    total_ms: float = 0.0


class _Exchange:
    """One request and its answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, record: _Record) -> None:
        self.headers = {name.decode("latin-1"): value for name, value in scope["headers"]}
        self.path: dict[str, str] = scope.get("path_params", {})
        self.record = record
        self.started = time.monotonic()
        self._receive = receive
        self._send = send
        self.streaming = False
        self.answered = False

    async def body(self, limit: int, within: float) -> bytes:
        """The request's body. Raises MeshnetError, _ClientGoneError."""
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(within):
                more = True
                while more:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise _ClientGoneError
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    more = message.get("more_body", False)
                    if size > limit:
                        raise RequestError(
                            errors_pb2.REASON_FRAME_TOO_LARGE,
                            f"expected a body of at most {limit} bytes, got more",
                        )
        except TimeoutError as error:
            raise RequestError(
                errors_pb2.REASON_DEADLINE_EXCEEDED,
                f"expected the whole body within {within:g} s, got {size} bytes",
                status=408,
            ) from error
        self.started = time.monotonic()
        return b"".join(parts)

    async def while_client_listens(self, work: Awaitable[None]) -> None:
        """Runs `work` and cancels it when the client goes away: _ClientGoneError then.

        Once the answer has gone out whole, what is left of `work` is done in any case.
        """
        task = asyncio.ensure_future(work)
        gone = asyncio.create_task(self._gone())
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and not self.answered:
                await cancel(task)
                raise _ClientGoneError
            await task
        finally:
            await cancel(task, gone)

    async def _gone(self) -> None:
        message: AsgiMessage = {}
        while message.get("type") != "http.disconnect":
            message = await self._receive()

    async def answer(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        """A whole answer in JSON; bytes are taken for JSON as they are."""
        self.record.status = status
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        await self._start(
            status,
            {
                **(headers or {}),
                "content-type": "application/json",
                "content-length": str(len(body)),
            },
        )
        self.answered = True
        await self._send({"type": "http.response.body", "body": body})

    async def start_stream(self) -> None:
        """The headers of a stream of events."""
        self.record.status = 200
        self.streaming = True
        # Proxies that collect answers before they pass them on would undo the streaming.
        await self._start(
            200,
            {
                "content-type": "text/event-stream; charset=utf-8",
                "cache-control": "no-cache",
                "x-accel-buffering": "no",
            },
        )

    async def event(self, event: bytes, *, more: bool = True) -> None:
        """One event, or several."""
        self.answered = not more
        await self._send({"type": "http.response.body", "body": event, "more_body": more})

    async def _start(self, status: int, headers: dict[str, str]) -> None:
        pairs = {**headers, "x-request-id": self.record.request_id}
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [(name.encode(), value.encode()) for name, value in pairs.items()],
            }
        )


_Handler = Callable[["_Gateway", _Exchange], Awaitable[None]]


class _Endpoint:
    """An endpoint as ASGI: errors become answers, and every request a line in the log."""

    def __init__(self, gateway: _Gateway, name: str, handler: _Handler) -> None:
        self._gateway = gateway
        self._name = name
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = _Record(f"req_{uuid.uuid4().hex}", self._name)
        exchange = _Exchange(scope, receive, send, record)
        try:
            try:
                await self._handler(self._gateway, exchange)
            except MeshnetError as error:
                await self._failed(exchange, error)
        except _ClientGoneError:
            record.status, record.reason = 499, "CANCELLED"
            self._gateway.metrics.clients_gone.inc()
        except asyncio.CancelledError:
            # The server ends and has waited for this answer as long as it may.
            # Nobody waits for this task: to raise it again would only put it into the log.
            with contextlib.suppress(Exception):
                await self._failed(exchange, _ending())
        except Exception as error:
            said = self._gateway.words_of_fault(error)
            _LOG.error("request %s failed\n%s", record.request_id, said)
            with contextlib.suppress(Exception):
                await self._failed(exchange, _own_fault(error))
        finally:
            self._gateway.finished(exchange)

    async def _failed(self, exchange: _Exchange, error: MeshnetError) -> None:
        exchange.record.reason = error.reason_name
        if error.message not in words_of(error):
            _LOG.warning("request %s: %s%s", exchange.record.request_id, error, _cause(error))
        self._gateway.metrics.refusals.labels(error.reason_name).inc()
        if not exchange.record.status:
            await exchange.answer(http_status(error), error_body(error), headers_of(error))
        elif not exchange.answered:
            await exchange.event(error_event(error), more=False)
        else:
            # The answer had gone out whole; what failed came after it.
            _LOG.warning("after request %s: %s", exchange.record.request_id, error)


def _cause(error: MeshnetError) -> str:
    # gRPC tells its errors over several lines.
    return "" if error.__cause__ is None else f" ({' '.join(str(error.__cause__).split())})"


def _places(error: BaseException | None) -> str:
    """Where a fault and what led to it happened. What it says is left out: it may hold a prompt."""
    lines: list[str] = []
    while error is not None:
        lines[:0] = [*traceback.format_tb(error.__traceback__), f"{type(error).__name__}\n"]
        error = error.__cause__ or error.__context__
    return "".join(lines).rstrip()


def _own_fault(error: Exception) -> MeshnetError:
    return RequestError(
        errors_pb2.REASON_ENGINE_FAILURE,
        f"the gateway failed ({type(error).__name__}); its log says more",
    )


def _ending() -> MeshnetError:
    return RequestError(
        errors_pb2.REASON_DRAINING, "the gateway shuts down; ask again when it is back"
    )


class _Gateway:
    def __init__(self, serving: Serving, options: GatewayOptions) -> None:
        self.serving = serving
        self.options = options
        self.metrics = GatewayMetrics(serving.admission, serving.kept)
        self.feed = StatusFeed(
            [model.source.watch(name) for name, model in serving.models.items()],
            self.metrics.status,
            interval=options.status_seconds,
        )

    def words_of_fault(self, error: Exception) -> str:
        """What the log says of an error that is the gateway's own."""
        if self.options.log_prompts:
            return "".join(traceback.format_exception(error)).rstrip()
        return _places(error)

    async def models(self, exchange: _Exchange) -> None:
        self._authorise(exchange)
        await exchange.answer(
            200, {"object": "list", "data": [_model(m) for m in self.serving.models.values()]}
        )

    async def one_model(self, exchange: _Exchange) -> None:
        self._authorise(exchange)
        await exchange.answer(200, _model(self.serving.model(exchange.path["name"])))

    async def status(self, exchange: _Exchange) -> None:
        self._authorise(exchange)
        await exchange.answer(200, await self.feed.latest())

    async def status_events(self, exchange: _Exchange) -> None:
        self._authorise(exchange)

        async def work() -> None:
            async with contextlib.aclosing(self.feed.follow()) as statuses:
                async for status in statuses:
                    self._authorise(exchange)  # a key may have been taken away by now
                    if not exchange.streaming:
                        await exchange.start_stream()
                    await exchange.event(b"data: " + status + b"\n\n")
            if not exchange.streaming:
                raise _ending()
            await exchange.event(b"", more=False)

        await exchange.while_client_listens(work())

    async def chat(self, exchange: _Exchange) -> None:
        await self._complete(exchange, ChatRequest)

    async def completions(self, exchange: _Exchange) -> None:
        await self._complete(exchange, CompletionRequest)

    async def _complete(
        self, exchange: _Exchange, kind: type[ChatRequest | CompletionRequest]
    ) -> None:
        limits = self._authorise(exchange)
        media = exchange.headers.get("content-type", b"").split(b";")[0].strip().lower()
        if media != b"application/json":
            # A browser asks before it sends this type across origins, and gets no leave.
            raise RequestError(
                errors_pb2.REASON_MALFORMED_MESSAGE,
                f"expected content-type application/json, got {media.decode('latin-1')!r}",
            )
        body = await exchange.body(self.options.max_request_bytes, self.options.body_seconds)
        request = parse(kind, body)
        exchange.record.model = request.model
        if self.options.log_prompts:
            _LOG.info(
                "prompt of %s: %s", exchange.record.request_id, body.decode("utf-8", "replace")
            )

        async def work() -> None:
            async with self.serving.open(
                request, owner=exchange.record.owner, limits=limits
            ) as answering:
                try:
                    if request.stream:
                        await self._stream(exchange, answering)
                    else:
                        await self._whole(exchange, answering)
                finally:
                    self._count(exchange, answering)

        await exchange.while_client_listens(work())

    async def _stream(self, exchange: _Exchange, answering: Answering) -> None:
        async with contextlib.aclosing(answering.events()) as events:
            async for event in events:
                if not exchange.streaming:
                    await exchange.start_stream()
                if event:
                    await exchange.event(event)
                    if not exchange.record.first_text_ms and answering.shown:
                        self._first_text(exchange)
        # The end is sent before the sessions are closed: nobody waits for that.
        await exchange.event(answering.form.usage_event(answering.usage()) + DONE, more=False)

    async def _whole(self, exchange: _Exchange, answering: Answering) -> None:
        async with contextlib.aclosing(answering.events()) as events:
            async for _ in events:
                if not exchange.record.first_text_ms and answering.shown:
                    self._first_text(exchange)
        await exchange.answer(200, answering.form.whole(answering.answers, answering.usage()))

    def _first_text(self, exchange: _Exchange) -> None:
        seconds = time.monotonic() - exchange.started
        exchange.record.first_text_ms = round(1000 * seconds, 3)
        self.metrics.first_token.observe(seconds)

    def _count(self, exchange: _Exchange, answering: Answering) -> None:
        usage = answering.usage()
        exchange.record.prompt_tokens = usage.prompt_tokens
        exchange.record.completion_tokens = usage.completion_tokens
        exchange.record.cached_tokens = usage.cached_tokens
        self.metrics.prompt_tokens.inc(usage.prompt_tokens)
        self.metrics.completion_tokens.inc(usage.completion_tokens)
        self.metrics.cached_tokens.inc(usage.cached_tokens)

    def _authorise(self, exchange: _Exchange) -> KeyLimits | None:
        key = self._key(exchange.headers)
        if key is None:
            return None
        exchange.record.owner = key.name
        return key.limits

    def _key(self, headers: Mapping[str, bytes]) -> ApiKey | None:
        """Whose key it is; None where everybody is served. Raises RequestError."""
        if self.options.keys is None:
            return None
        scheme, _, secret = headers.get("authorization", b"").partition(b" ")
        key = self.options.keys.find(secret.strip().decode("utf-8", "replace"))
        if scheme.lower() != b"bearer" or key is None:
            raise RequestError(
                errors_pb2.REASON_UNAUTHENTICATED,
                "expected an API key of this gateway in the header Authorization: Bearer KEY",
            )
        return key

    def finished(self, exchange: _Exchange) -> None:
        """Counts and logs a request."""
        record = exchange.record
        seconds = time.monotonic() - exchange.started
        record.total_ms = round(1000 * seconds, 3)
        self.metrics.requests.labels(record.endpoint, str(record.status)).inc()
        if record.model:
            self.metrics.duration.observe(seconds)
        _LOG.info("request %s", json.dumps(dataclasses.asdict(record)))

    async def ready(self, request: Request) -> Response:
        """Whether every model has a complete route whose workers are ready, busy or not.

        No older than the status, and like it without effect on the mesh: to open a session would
        take the place of somebody's who wants an answer. Whoever has no key is told the reasons
        alone: what models there are, and who serves them, is for those who have one.
        """
        try:
            async with asyncio.timeout(self.options.ready_seconds):
                models = await self.feed.models()
            problems = {model.name: model.problem for model in models if model.problem is not None}
            reasons = sorted({problem.reason for problem in problems.values()})
        except TimeoutError:
            reasons = [reason_name(errors_pb2.REASON_DEADLINE_EXCEEDED)]
            problems = dict.fromkeys(
                self.serving.models,
                Problem(reasons[0], f"no word of it within {self.options.ready_seconds:g} s"),
            )
        said: dict[str, Any] = {"ready": not problems, "reasons": reasons}
        with contextlib.suppress(RequestError):
            self._key({name: value.encode("latin-1") for name, value in request.headers.items()})
            said["models"] = {
                name: f"{problems[name].reason}: {problems[name].message}"
                if name in problems
                else "ready"
                for name in self.serving.models
            }
        return JSONResponse(said, status_code=503 if problems else 200)


def _model(model: Any) -> dict[str, Any]:
    return {"id": model.name, "object": "model", "created": model.created, "owned_by": "meshnet"}


async def _alive(_: Request) -> Response:
    return JSONResponse({"alive": True})


async def _http_error(_: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    reason = _HTTP_REASONS.get(status, errors_pb2.REASON_ENGINE_FAILURE)
    refusal = RequestError(
        reason,
        f"expected a path and method of OpenAI's API that is served here (HTTP {status})",
        status=405 if status == 405 else 0,
    )
    # Which methods there are.
    headers = error.headers if isinstance(error, HTTPException) else None
    return JSONResponse(error_body(refusal), http_status(refusal), headers)


class GatewayApp(Starlette):
    """The application. Its feed runs on until somebody ends it (GatewayServer does)."""

    def __init__(self, feed: StatusFeed, serving: Serving, **options: Any) -> None:
        super().__init__(**options)
        self.feed = feed
        self.serving = serving


def make_app(serving: Serving, options: GatewayOptions | None = None) -> GatewayApp:
    """The application."""
    gateway = _Gateway(serving, options or GatewayOptions())

    async def metrics(_: Request) -> Response:
        return Response(
            gateway.metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    def endpoint(path: str, method: str, handler: _Handler) -> HttpRoute:
        return HttpRoute(path, _Endpoint(gateway, path, handler), methods=[method])

    async def refuse(error: RequestError, scope: Scope, receive: Receive, send: Send) -> None:
        gateway.metrics.refusals.labels(error.reason_name).inc()
        answer = JSONResponse(
            error_body(error), http_status(error), {**headers_of(error), "connection": "close"}
        )
        await answer(scope, receive, send)

    hosts = gateway.options.hosts
    return GatewayApp(
        gateway.feed,
        serving,
        middleware=[] if hosts is None else [Middleware(HostCheck, hosts, refuse)],
        routes=[
            endpoint("/v1/models", "GET", _Gateway.models),
            endpoint("/v1/models/{name:path}", "GET", _Gateway.one_model),
            endpoint("/v1/chat/completions", "POST", _Gateway.chat),
            endpoint("/v1/completions", "POST", _Gateway.completions),
            endpoint("/status.json", "GET", _Gateway.status),
            endpoint("/status/events", "GET", _Gateway.status_events),
            HttpRoute("/healthz", _alive),
            HttpRoute("/readyz", gateway.ready),
            HttpRoute("/metrics", metrics),
            *page_routes(),
        ],
        exception_handlers={404: _http_error, 405: _http_error},
    )
