"""The typed asyncio client of shard workers.

    async with await open_route(["127.0.0.1:7001", "127.0.0.1:7002"]) as route:
        async with route.session() as session:
            answer = await session.chat([ChatMessage("user", "Hello")], max_tokens=64)
            async for event in answer:
                if isinstance(event, Token):
                    print(event.text, end="", flush=True)

Whatever fails, fails with a MeshnetError that carries one stable reason.
"""

from meshnet_gguf.chat import ChatMessage
from meshnet_gguf.client._route import Endpoint, Route, RouteHop, check_route, open_route
from meshnet_gguf.client._session import Generation, Session, chat_token_ids
from meshnet_gguf.client._values import (
    SCHEMA_VERSION,
    Capability,
    Event,
    Finished,
    FinishReason,
    GenerationResult,
    Health,
    Histogram,
    LayerRange,
    Limits,
    Metrics,
    PrefillProgress,
    SamplingParams,
    SpecialToken,
    StageReceipt,
    Token,
    Vocabulary,
    WorkerState,
)
from meshnet_gguf.client._worker import WorkerClient

__all__ = [
    "SCHEMA_VERSION",
    "Capability",
    "ChatMessage",
    "Endpoint",
    "Event",
    "FinishReason",
    "Finished",
    "Generation",
    "GenerationResult",
    "Health",
    "Histogram",
    "LayerRange",
    "Limits",
    "Metrics",
    "PrefillProgress",
    "Route",
    "RouteHop",
    "SamplingParams",
    "Session",
    "SpecialToken",
    "StageReceipt",
    "Token",
    "Vocabulary",
    "WorkerClient",
    "WorkerState",
    "chat_token_ids",
    "check_route",
    "open_route",
]
