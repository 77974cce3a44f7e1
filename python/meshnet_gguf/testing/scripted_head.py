"""A head worker in this process whose session follows a test's script."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from google.protobuf import any_pb2

from meshnet_gguf.client import Capability, LayerRange, Limits, Route, RouteHop, WorkerClient
from meshnet_gguf.errors import options_of, reason_name
from proto.meshnet.shard.v1 import boundary_pb2, errors_pb2, sampling_pb2, shard_pb2

LIMITS = Limits(
    max_frame_bytes=65536, max_bundle_bytes=1 << 20, max_step_tokens=32, max_inflight_steps=4
)

_WHOLE = LayerRange(0, 4)


def capability(layers: LayerRange = _WHOLE, **changes: Any) -> Capability:
    """What a worker of a model with four layers says."""
    values: dict[str, Any] = {
        "engine": "fake",
        "architecture": "fake",
        "artifact_sha256": "a" * 64,
        "recipe": {"quant": "q4", "batch_policy": "exact"},
        "recipe_fingerprint": "f" * 64,
        "layers": layers,
        "model_layers": 4,
        "boundary_in": None if layers.begin == 0 else ("dense.residual", 1),
        "boundary_out": None if layers.end == 4 else ("dense.residual", 1),
        "limits": LIMITS,
        "max_sessions": 4,
        "context_tokens": 128,
        "batch_policy": "EXACT",
        "evidence": "FIXTURE",
        "vocabulary_size": 320,
        "prefill_chunk_tokens": 32,
        "owned_tensor_bytes": 0,
        "owned_tensors": 0,
        "worker_version": "0",
    }
    return Capability(**{**values, **changes})


class Talk:
    """The head's side of one session: what came, and how to answer."""

    def __init__(self, context: Any) -> None:
        self.context = context

    async def receive(self) -> shard_pb2.SessionRequest | None:
        """The next request, None when the client has half-closed."""
        request = await self.context.read()
        return request if isinstance(request, shard_pb2.SessionRequest) else None

    async def generate(self) -> shard_pb2.Generate:
        """The next request, which must be a generation."""
        request = await self.receive()
        assert request is not None
        assert request.HasField("generate")
        return request.generate

    async def accept(self) -> shard_pb2.OpenSession:
        """Takes the opening message and agrees."""
        request = await self.receive()
        assert request is not None
        await self.send(
            opened=shard_pb2.SessionOpened(
                limits=request.open.limits, context_tokens=128, prefill_chunk_tokens=32
            )
        )
        return request.open

    async def send(self, **body: Any) -> None:
        """Sends one event."""
        await self.context.write(shard_pb2.SessionEvent(**body))

    async def token(self, generation: int, token_id: int, piece: bytes, **more: Any) -> None:
        """Sends a token; `more` are further fields of SampledToken."""
        await self.send(
            token=shard_pb2.TokenEvent(
                generation=generation,
                token=sampling_pb2.SampledToken(token_id=token_id, **more),
                position=10,
                piece=piece,
            )
        )

    async def finish(self, generation: int, reason: shard_pb2.FinishReason, cached: int) -> None:
        """Ends a generation."""
        await self.send(
            finished=shard_pb2.GenerationFinished(
                generation=generation,
                reason=reason,
                cached_tokens=cached,
                prompt_tokens=1,
                completion_tokens=2,
            )
        )

    async def close(self) -> None:
        """Waits for the client's half-close and answers with a receipt."""
        assert await self.receive() is None
        await self.send(
            closed=shard_pb2.SessionClosed(
                receipts=[
                    shard_pb2.StageReceipt(
                        range=boundary_pb2.LayerRange(begin=0, end=4), decode_tokens=2
                    )
                ]
            )
        )

    async def fail(self, reason: int, message: str) -> None:
        """Ends the call as a worker does: status, and the reason in its details."""
        code = options_of(reason).grpc_code
        info = errors_pb2.ErrorInfo(reason=reason_name(reason), domain="meshnet")
        details = any_pb2.Any(
            type_url="type.googleapis.com/google.rpc.ErrorInfo", value=info.SerializeToString()
        )
        status = errors_pb2.RpcStatus(code=code, message=message, details=[details])
        by_number = {status_code.value[0]: status_code for status_code in grpc.StatusCode}
        await self.context.abort(
            by_number[code],
            message,
            trailing_metadata=(("grpc-status-details-bin", status.SerializeToString()),),
        )


Script = Callable[[Talk], Awaitable[None]]


@dataclass
class Head:
    """The service; its sessions run `script`, whose failures are kept for the test to look at."""

    script: Script
    capability: shard_pb2.Capability = field(default_factory=shard_pb2.Capability)
    failures: list[BaseException] = field(default_factory=list)

    async def get_capability(
        self, request: shard_pb2.GetCapabilityRequest, context: Any
    ) -> shard_pb2.Capability:
        """The GetCapability method."""
        return self.capability

    async def run_session(self, request_iterator: Any, context: Any) -> None:
        """The Session method."""
        try:
            await self.script(Talk(context))
        except grpc.aio.AbortError:
            raise
        except BaseException as error:
            self.failures.append(error)
            raise


@contextlib.asynccontextmanager
async def scripted_route(script: Script) -> AsyncIterator[tuple[Route, Head]]:
    """A route whose only worker follows `script`, and that worker."""
    head = Head(script)
    server = grpc.aio.server()
    session = grpc.stream_stream_rpc_method_handler(
        head.run_session,
        request_deserializer=shard_pb2.SessionRequest.FromString,
        response_serializer=shard_pb2.SessionEvent.SerializeToString,
    )
    get_capability = grpc.unary_unary_rpc_method_handler(
        head.get_capability,
        request_deserializer=shard_pb2.GetCapabilityRequest.FromString,
        response_serializer=shard_pb2.Capability.SerializeToString,
    )
    methods = {"Session": session, "GetCapability": get_capability}
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("meshnet.shard.v1.ShardService", methods)]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    endpoint = f"127.0.0.1:{port}"
    try:
        hops = [RouteHop(endpoint, _WHOLE)]
        async with Route([WorkerClient(endpoint)], [capability()], hops) as route:
            yield route, head
    finally:
        await server.stop(None)
