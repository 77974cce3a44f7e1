"""A client of one tracker, or of several that share a database.

    async with TrackerClient(["127.0.0.1:7100", "127.0.0.1:7101"]) as tracker:
        await tracker.register(request)

A call goes to the tracker that answered last; one that cannot be reached, or that does not answer
in time, is passed over for the next. So a call may have been done by a tracker whose answer was
lost: every call of the service can be repeated, except that Reroute then answers STALE_EPOCH, and
SelectRoute does not make a second session only if the request names one.

Every method raises ControlError.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import grpc.aio

from meshnet.errors import ControlError, Reason, error_from_rpc
from meshnet.transport import Line, Security
from proto.meshnet.control.v1 import tracker_pb2 as pb
from proto.meshnet.control.v1 import tracker_pb2_grpc

if TYPE_CHECKING:
    from typing import Self

__all__ = ["TrackerClient"]

_Answer = TypeVar("_Answer")
_GONE = (Reason.PEER_UNREACHABLE, Reason.DEADLINE_EXCEEDED, Reason.STORAGE_UNAVAILABLE)


class TrackerClient:
    """Connections to trackers. Use as an async context manager, or close() it.

    `timeout` is how long one tracker may take over a call, seconds.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        security: Security | None = None,
        timeout: float = 5.0,
    ) -> None:
        if not endpoints:
            raise ControlError(
                Reason.CONFIGURATION_INVALID, "expected at least one tracker as HOST:PORT, got none"
            )
        self.endpoints = tuple(endpoints)
        self.timeout = timeout
        self._lines = [Line(endpoint, security) for endpoint in endpoints]
        self._preferred = 0

    async def __aenter__(self) -> Self:
        """Itself."""
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes it."""
        await self.close()

    async def close(self) -> None:
        """Closes the connections."""
        await asyncio.gather(*(line.close() for line in self._lines))

    async def register(self, request: pb.RegisterRequest) -> pb.RegisterResponse:
        """Adds or replaces a worker."""
        return await self._call(lambda stub: stub.Register, request)

    async def heartbeat(self, request: pb.HeartbeatRequest) -> pb.HeartbeatResponse:
        """Prolongs a lease. WORKER_UNKNOWN: register anew."""
        return await self._call(lambda stub: stub.Heartbeat, request)

    async def deregister(self, request: pb.DeregisterRequest) -> pb.DeregisterResponse:
        """Withdraws a worker."""
        return await self._call(lambda stub: stub.Deregister, request)

    async def select_route(self, request: pb.SelectRouteRequest) -> pb.RouteResponse:
        """The cheapest route. Raises ControlError: NO_ROUTE, SESSIONS_EXHAUSTED."""
        return await self._call(lambda stub: stub.SelectRoute, request)

    async def reroute(self, request: pb.RerouteRequest) -> pb.RouteResponse:
        """A session's next epoch."""
        return await self._call(lambda stub: stub.Reroute, request)

    async def touch_session(self, request: pb.TouchSessionRequest) -> pb.TouchSessionResponse:
        """Prolongs a session."""
        return await self._call(lambda stub: stub.TouchSession, request)

    async def close_session(self, request: pb.CloseSessionRequest) -> pb.CloseSessionResponse:
        """Ends a session."""
        return await self._call(lambda stub: stub.CloseSession, request)

    async def report_outcome(self, request: pb.ReportOutcomeRequest) -> pb.ReportOutcomeResponse:
        """Adds receipts."""
        return await self._call(lambda stub: stub.ReportOutcome, request)

    async def list_receipts(self, request: pb.ListReceiptsRequest) -> pb.ListReceiptsResponse:
        """A page of the ledger."""
        return await self._call(lambda stub: stub.ListReceipts, request)

    async def list_workers(self, request: pb.ListWorkersRequest) -> pb.ListWorkersResponse:
        """Workers with a lease."""
        return await self._call(lambda stub: stub.ListWorkers, request)

    async def get_status(self) -> pb.GetStatusResponse:
        """Counts and settings."""
        return await self._call(lambda stub: stub.GetStatus, pb.GetStatusRequest())

    async def _call(
        self, method: Callable[[Any], Callable[..., Awaitable[_Answer]]], request: object
    ) -> _Answer:
        first = self._preferred
        failure: ControlError | None = None
        for offset in range(len(self._lines)):
            index = (first + offset) % len(self._lines)
            stub: Any = self._lines[index].stub(tracker_pb2_grpc.TrackerServiceStub)
            try:
                answer = await method(stub)(request, timeout=self.timeout)
            except grpc.aio.AioRpcError as error:
                failure = error_from_rpc(error)
                if failure.reason not in _GONE:
                    self._preferred = index
                    raise failure from error
                failure = ControlError(
                    failure.reason, f"tracker {self.endpoints[index]}: {failure.message}"
                )
            else:
                self._preferred = index
                return answer
        assert failure is not None
        raise failure
