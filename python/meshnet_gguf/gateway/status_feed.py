"""The status of a gateway and its mesh, read once a second for as long as anybody looks.

    feed = StatusFeed(watches, gateway_status)
    text = await feed.latest()                      # a MeshStatus as JSON
    models = await feed.models()                    # its ModelStatus, one by one
    async with contextlib.aclosing(feed.follow()) as news:
        async for text in news: ...                 # the same, whenever there is a new one
    feed.end()                                      # ends every follow()

However many look, one reader asks the workers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence

from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.status import GatewayStatus, MeshStatus, ModelStatus, status_to_json
from meshnet_gguf.status_watch import ModelWatch
from proto.meshnet.shard.v1 import errors_pb2

__all__ = ["StatusFeed"]

_MAX_FOLLOWERS = 64


class StatusFeed:
    """Reads `watches` and `gateway` together, at most every `interval` seconds."""

    def __init__(
        self,
        watches: Sequence[ModelWatch],
        gateway: Callable[[], GatewayStatus],
        *,
        interval: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._watches = tuple(watches)
        self._gateway = gateway
        self._interval = interval
        self._clock = clock
        self._reading = asyncio.Lock()
        self._text = b""
        self._models: tuple[ModelStatus, ...] = ()
        self._read_at = float("-inf")
        self._followers = 0
        self._ended = asyncio.Event()

    async def aclose(self) -> None:
        """Ends everything and closes the connections to the workers."""
        self.end()
        async with self._reading:
            await asyncio.gather(*(watch.aclose() for watch in self._watches))

    def end(self) -> None:
        """Ends all that follow, now and later."""
        self._ended.set()

    async def latest(self) -> bytes:
        """The status as JSON, no older than the interval."""
        async with self._reading:
            await self._read()
            return self._text

    async def models(self) -> tuple[ModelStatus, ...]:
        """The models in the same status, in the order of the watches."""
        async with self._reading:
            await self._read()
            return self._models

    async def _read(self) -> None:
        if self._clock() - self._read_at >= self._interval:
            self._models = tuple(await asyncio.gather(*(watch.read() for watch in self._watches)))
            self._text = status_to_json(MeshStatus(time.time(), self._models, self._gateway()))
            self._read_at = self._clock()

    async def follow(self) -> AsyncGenerator[bytes, None]:
        """The status now, and again every interval. Raises MeshnetError (QUEUE_FULL)."""
        if self._followers >= _MAX_FOLLOWERS:
            raise MeshnetError(
                errors_pb2.REASON_QUEUE_FULL,
                f"expected at most {_MAX_FOLLOWERS} to follow the status at once, got one more; "
                "close another page, or come again later",
                retry_after_ms=1000,
            )
        self._followers += 1
        try:
            while not self._ended.is_set():
                yield await self.latest()
                try:
                    async with asyncio.timeout(self._interval):
                        await self._ended.wait()
                except TimeoutError:
                    continue
        finally:
            self._followers -= 1
