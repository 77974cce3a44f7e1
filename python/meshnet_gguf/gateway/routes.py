"""The models that a gateway serves, and where their routes come from.

A source gives a route for each answer (meshnet_gguf.route_source). One for named workers keeps its
connections and its knowledge of them between answers, and asks them anew after a failure; one for
trackers says what they refuse in the gateway's own reasons.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from meshnet.errors import ControlError, Reason
from meshnet.transport import Security

from meshnet_gguf.client import (
    Endpoint,
    Route,
    Session,
    Vocabulary,
    WorkerClient,
    open_route,
)
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.gateway._failures import RequestError, names_machine
from meshnet_gguf.gateway._prompts import SpecialTexts, tool_format
from meshnet_gguf.gateway._tool_format import ToolFormat
from meshnet_gguf.gateway.template_process import TemplateRenderer
from meshnet_gguf.route_source import (
    OpenedRoute,
    Outcome,
    RouteSource,
    StaticRoute,
    TrackerRouteSource,
)
from meshnet_gguf.status_watch import ModelWatch, NamedWorkers
from proto.meshnet.shard.v1 import errors_pb2

__all__ = [
    "KeptRouteSource",
    "ModelText",
    "ServedModel",
    "TrackedModelSource",
    "WatchedRouteSource",
    "report",
]

_LOG = logging.getLogger("meshnet.gateway")
_REPORT_SECONDS = 2.0
_MAX_PIECES = 300_000
# A worker lets some dozens wait for its tokenizer and refuses more; many requests may come at once.
_TOKENIZER_CALLS = 16


class WatchedRouteSource(RouteSource, Protocol):
    """A source of routes that can be looked at as well."""

    def watch(self, name: str) -> ModelWatch:
        """Watches what routes there are for a model that is shown under this name."""


class _KeptRoute(StaticRoute):
    def __init__(self, route: Route) -> None:
        super().__init__(route)
        self.users = 0


# After these nothing that was known of the workers need hold.
_STALE_AFTER = frozenset(
    {
        errors_pb2.REASON_PEER_LOST,
        errors_pb2.REASON_PEER_UNREACHABLE,
        errors_pb2.REASON_DEADLINE_EXCEEDED,
        errors_pb2.REASON_RECIPE_MISMATCH,
        errors_pb2.REASON_ARTIFACT_MISMATCH,
        errors_pb2.REASON_RANGE_MISMATCH,
        errors_pb2.REASON_DRAINING,
        errors_pb2.REASON_NOT_READY,
    }
)


class KeptRouteSource:
    """The same workers for everyone, asked what they are once, and again after a failure."""

    def __init__(
        self,
        endpoints: Sequence[str | Endpoint],
        *,
        security: Security | None = None,
        answer_within: float = 2.0,
    ) -> None:
        self._endpoints = tuple(endpoints)
        self._security = security
        self._answer_within = answer_within
        self._kept: _KeptRoute | None = None
        self._lock = asyncio.Lock()

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._drop(self._kept)

    def watch(self, name: str) -> ModelWatch:
        """Watches the same workers, on connections of its own."""
        return ModelWatch(name, NamedWorkers(self._endpoints, security=self._security))

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[OpenedRoute]:
        """The route; a failure in the block that is the workers' makes the next one ask again."""
        async with self._lock:
            if self._kept is None:
                self._kept = _KeptRoute(
                    await open_route(
                        self._endpoints,
                        security=self._security,
                        answer_within=self._answer_within,
                    )
                )
            kept = self._kept
            kept.users += 1
        try:
            yield kept
        except MeshnetError as error:
            if error.reason in _STALE_AFTER and self._kept is kept:
                self._kept = None
            raise
        finally:
            kept.users -= 1
            if self._kept is not kept and not kept.users:
                await kept.route.close()

    async def _drop(self, kept: _KeptRoute | None) -> None:
        self._kept = None
        if kept is not None and not kept.users:
            await kept.route.close()


class TrackedModelSource:
    """Routes of a tracker. What it refuses is a MeshnetError, as everything else."""

    def __init__(self, source: TrackerRouteSource) -> None:
        self._source = source

    def watch(self, name: str) -> ModelWatch:
        """Watches the workers that the trackers know."""
        return ModelWatch(name, self._source.workers())

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[OpenedRoute]:
        """A session's route. Raises MeshnetError: NO_ROUTE, and what the workers say."""
        try:
            async with self._source.open() as tracked:
                yield tracked
        except ControlError as error:
            raise _of_control(error) from error


def _of_control(error: ControlError) -> MeshnetError:
    # A tracker that is away or has forgotten leaves a model without a route, whatever it says.
    known = errors_pb2.Reason.DESCRIPTOR.values_by_name.get(f"REASON_{error.reason.name}")
    if known is None or error.reason is Reason.PEER_UNREACHABLE:
        return MeshnetError(errors_pb2.REASON_NO_ROUTE, f"the tracker says: {error}")
    if error.reason is Reason.NO_ROUTE and not names_machine(error.message):
        return RequestError(errors_pb2.REASON_NO_ROUTE, f"the tracker says: {error.message}")
    return MeshnetError(known.number, f"the tracker says: {error.message}")


async def report(
    opened: OpenedRoute, session: Session, outcome: Outcome, error: MeshnetError | None = None
) -> None:
    """Tells a route's source how a session ended; where it cannot be told, the log is."""
    try:
        async with asyncio.timeout(_REPORT_SECONDS):
            await opened.report(session, outcome, error)
    except (ControlError, TimeoutError) as failure:
        _LOG.warning("the outcome of a session is not in the ledger: %s", failure)


class ModelText:
    """What tokens are to a model: its vocabulary and the bytes of tokens, remembered."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.specials = SpecialTexts(
            [token.piece.decode("utf-8", "replace") for token in vocabulary.control_tokens]
        )
        self._pieces: dict[int, bytes] = {}
        self._tokenizing = asyncio.Semaphore(_TOKENIZER_CALLS)
        self._tool_format: ToolFormat | None = None

    async def tokenize(
        self, head: WorkerClient, text: str, *, add_special: bool, parse_special: bool
    ) -> list[int]:
        """Token ids of `text`, see WorkerClient.tokenize. Raises MeshnetError."""
        async with self._tokenizing:
            return await head.tokenize(text, add_special=add_special, parse_special=parse_special)

    async def tool_format(self, renderer: TemplateRenderer) -> ToolFormat:
        """How the model's template writes calls of tools, found once. Raises MeshnetError."""
        if self._tool_format is None:
            self._tool_format = await tool_format(renderer, self.vocabulary)
        return self._tool_format

    def tokens_in(self, text: str) -> frozenset[int]:
        """The special tokens whose text stands in `text`, without those that end a generation."""
        return frozenset(
            token.token_id
            for token in self.vocabulary.control_tokens
            if token.token_id not in self.vocabulary.end_of_generation_ids
            and len(token.piece) > 1
            and token.piece.decode("utf-8", "replace") in text
        )

    async def pieces(self, head: WorkerClient, token_ids: Sequence[int]) -> list[bytes]:
        """The bytes of each token. Raises MeshnetError."""
        missing = [token for token in dict.fromkeys(token_ids) if token not in self._pieces]
        if missing:
            if len(self._pieces) + len(missing) > _MAX_PIECES:
                self._pieces.clear()
                missing = list(dict.fromkeys(token_ids))
            self._pieces.update(zip(missing, await head.pieces(missing), strict=True))
        return [self._pieces[token] for token in token_ids]


class ServedModel:
    """A name that clients ask for, and where its routes come from."""

    def __init__(self, name: str, source: WatchedRouteSource) -> None:
        self.name = name
        self.source = source
        self.created = int(time.time())
        self._texts: dict[tuple[str, str], ModelText] = {}

    async def text(self, route: Route) -> ModelText:
        """The vocabulary of the artifact behind a route, asked once."""
        key = route.identity
        if key not in self._texts:
            if len(self._texts) > 8:
                self._texts.clear()
            self._texts[key] = ModelText(await route.head.vocabulary())
        return self._texts[key]
