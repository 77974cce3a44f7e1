"""One worker: everything that is not a session."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import grpc.aio
from meshnet.transport import Security

from meshnet_gguf.client._transport import open_line
from meshnet_gguf.client._values import (
    SCHEMA_VERSION,
    Capability,
    Health,
    LayerRange,
    Metrics,
    Vocabulary,
    WorkerState,
    known,
)
from meshnet_gguf.errors import MeshnetError, from_rpc_error
from proto.meshnet.shard.v1 import (
    errors_pb2,
    shard_pb2,
    shard_pb2_grpc,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
)

if TYPE_CHECKING:
    from typing import Self

_Response = TypeVar("_Response")
_POLL_SECONDS = 0.02
_ROUTE_TOKEN_KEY = "meshnet-route-token"  # noqa: S105 - a name


class WorkerClient:
    """A connection to one worker. Use it as an async context manager, or close() it.

        async with WorkerClient("127.0.0.1:7000") as worker:
            print(await worker.capability())

    Every call raises MeshnetError: the worker's own reason, or PEER_UNREACHABLE, DEADLINE_EXCEEDED
    (`timeout` seconds) and the like when it could not answer.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        security: Security | None = None,
        timeout: float = 10.0,
    ) -> None:
        self.endpoint = endpoint
        self.timeout = timeout
        self._line = open_line(endpoint, security)
        self._vocabulary: Vocabulary | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection; calls under way fail with CANCELLED."""
        await self._line.close()

    @property
    def channel(self) -> grpc.aio.Channel:
        """For the next call."""
        return self._line.channel

    @property
    def shard(self) -> shard_pb2_grpc.ShardServiceAsyncStub:
        """The worker's service, for the next call."""
        stub: Any = self._line.stub(shard_pb2_grpc.ShardServiceStub)  # async, by its channel
        found: shard_pb2_grpc.ShardServiceAsyncStub = stub
        return found

    @property
    def _tokenizer(self) -> tokenizer_pb2_grpc.TokenizerServiceAsyncStub:
        stub: Any = self._line.stub(tokenizer_pb2_grpc.TokenizerServiceStub)
        found: tokenizer_pb2_grpc.TokenizerServiceAsyncStub = stub
        return found

    async def capability(self) -> Capability:
        """What the worker has loaded. Answers also while the worker is not ready."""
        request = shard_pb2.GetCapabilityRequest(schema_versions=[SCHEMA_VERSION])
        return Capability.from_proto(await self._call(self.shard.GetCapability, request))

    async def health(self) -> Health:
        """The worker's state, and why it is not ready."""
        answer = await self._call(self.shard.GetHealth, shard_pb2.GetHealthRequest())
        reason = ""
        if answer.HasField("error"):
            reason = MeshnetError.from_proto(answer.error).reason_name
        return Health(
            known(WorkerState, answer.state),
            reason,
            answer.error.message,
            LayerRange.from_proto(answer.range) if answer.HasField("range") else None,
            answer.artifact_sha256,
            answer.recipe_fingerprint,
        )

    async def wait_ready(self, within: float) -> None:
        """Returns once the worker is ready.

        Raises MeshnetError: NOT_READY after `within` seconds with what was seen last, the worker's
        own reason if it has failed, DRAINING.
        """
        seen = "nothing"
        deadline = asyncio.get_running_loop().time() + within
        while asyncio.get_running_loop().time() < deadline:
            try:
                health = await self.health()
            except MeshnetError as error:
                seen = str(error)
            else:
                seen = (
                    f"{health.state.name} ({health.message})"
                    if health.message
                    else (health.state.name)
                )
                if health.state is WorkerState.READY:
                    return
                if health.state in (WorkerState.FAILED, WorkerState.DRAINING):
                    own = errors_pb2.Reason.DESCRIPTOR.values_by_name.get(f"REASON_{health.reason}")
                    reason = errors_pb2.REASON_ENGINE_FAILURE if own is None else own.number
                    if health.state is WorkerState.DRAINING:
                        reason = errors_pb2.REASON_DRAINING
                    raise MeshnetError(reason, f"worker {self.endpoint} is {seen}")
            await asyncio.sleep(_POLL_SECONDS)
        raise MeshnetError(
            errors_pb2.REASON_NOT_READY,
            f"expected worker {self.endpoint} to be ready within {within:g} s, last saw {seen}",
        )

    async def metrics(self) -> Metrics:
        """Memory, queues, tokens, times, bytes, sessions, refusals."""
        answer = await self._call(self.shard.GetMetrics, shard_pb2.GetMetricsRequest())
        return Metrics.from_proto(answer)

    async def cancel_session(
        self, route_session_id: bytes, route_epoch: int, *, route_token: str = ""
    ) -> bool:
        """Ends a session on all stages; whether the worker knew it."""
        request = shard_pb2.CancelSessionRequest(
            route_session_id=route_session_id, route_epoch=route_epoch
        )
        return (await self._call(self.shard.CancelSession, request, route_token)).found

    async def release_session(
        self, route_session_id: bytes, route_epoch: int, *, route_token: str = ""
    ) -> bool:
        """Frees what the worker holds of a session; whether it knew it."""
        request = shard_pb2.ReleaseSessionRequest(
            route_session_id=route_session_id, route_epoch=route_epoch
        )
        return (await self._call(self.shard.ReleaseSession, request, route_token)).found

    async def vocabulary(self) -> Vocabulary:
        """Special tokens and chat templates. Asked once, then remembered."""
        if self._vocabulary is None:
            request = tokenizer_pb2.GetVocabularyRequest()
            self._vocabulary = Vocabulary.from_proto(
                await self._call(self._tokenizer.GetVocabulary, request)
            )
        return self._vocabulary

    async def tokenize(
        self, text: str, *, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Token ids of `text` (at most 8 MiB of UTF-8), see TokenizeRequest."""
        request = tokenizer_pb2.TokenizeRequest(
            text=text, add_special=add_special, parse_special=parse_special
        )
        return list((await self._call(self._tokenizer.Tokenize, request)).token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, unparse_special: bool = False) -> bytes:
        """The bytes of `token_ids`; may end inside a character."""
        request = tokenizer_pb2.DetokenizeRequest(
            token_ids=token_ids, unparse_special=unparse_special
        )
        return (await self._call(self._tokenizer.Detokenize, request)).text

    async def pieces(self, token_ids: Sequence[int]) -> list[bytes]:
        """The bytes of each token alone, special tokens included."""
        request = tokenizer_pb2.GetPiecesRequest(token_ids=token_ids)
        return list((await self._call(self._tokenizer.GetPieces, request)).pieces)

    async def _call(
        self,
        method: Callable[..., Awaitable[_Response]],
        request: object,
        route_token: str = "",
    ) -> _Response:
        try:
            return await method(request, timeout=self.timeout, metadata=token_metadata(route_token))
        except grpc.aio.AioRpcError as error:
            raise _located(from_rpc_error(error), self.endpoint) from error


def token_metadata(route_token: str) -> Any:
    """How a call presents a route token (grpc-stubs have no type for it); None without one."""
    return ((_ROUTE_TOKEN_KEY, route_token),) if route_token else None


def _located(error: MeshnetError, endpoint: str) -> MeshnetError:
    """The same error, naming the endpoint, and saying UNREACHABLE where nothing was open yet."""
    reason = error.reason
    if reason == errors_pb2.REASON_PEER_LOST:
        reason = errors_pb2.REASON_PEER_UNREACHABLE
    return MeshnetError(
        reason,
        f"worker {endpoint}: {error.message}",
        retry_after_ms=error.retry_after_ms,
        stage=error.stage,
    )
