"""The tracker behind gRPC.

    async with TrackerServer.start(settings) as server:
        print(server.endpoint)

meshnet.tracker_program makes a program of it.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc.aio

from meshnet.clock import Clock, SystemClock
from meshnet.errors import ControlError, abort
from meshnet.storage import Storage
from meshnet.telemetry import Telemetry
from meshnet.tracker import Tracker, TrackerOptions
from meshnet.transport import Security, bind, make_server
from proto.meshnet.control.v1 import tracker_pb2 as pb
from proto.meshnet.control.v1 import tracker_pb2_grpc

__all__ = ["TrackerServer", "TrackerSettings"]

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
_FAREWELL_SECONDS = 2.0


@dataclass(frozen=True)
class TrackerSettings:
    """What one tracker process is started with."""

    database: str
    listen: str = "127.0.0.1:0"
    metrics_listen: str = ""
    security: Security = Security()  # noqa: RUF009 - immutable
    tracker_id: str = ""
    options: TrackerOptions = field(default_factory=TrackerOptions)


class TrackerServer(tracker_pb2_grpc.TrackerServiceServicer):
    """A running tracker. Made by start()."""

    def __init__(self, tracker: Tracker, telemetry: Telemetry) -> None:
        self.tracker = tracker
        self.telemetry = telemetry
        self.endpoint = ""
        self.metrics_port = 0
        self._receipts = telemetry.counter("receipts_total", "Receipts recorded.", ("outcome",))
        self._work = telemetry.counter("work_total", "Work of new receipts.", ("unit",))
        telemetry.gauge("workers", "Workers with a lease.", lambda: tracker.counts()[0])
        telemetry.gauge("open_sessions", "Open route sessions.", lambda: tracker.counts()[1])
        telemetry.gauge(
            "admits_dark",
            "1 when lanes without a certification record are routed.",
            lambda: float(tracker.options.admit_dark),
        )

    @classmethod
    @contextlib.asynccontextmanager
    async def start(
        cls, settings: TrackerSettings, clock: Clock | None = None
    ) -> AsyncIterator[TrackerServer]:
        """Serves while the block runs. Raises ControlError when it cannot."""
        tracker_id = settings.tracker_id or f"tracker-{secrets.token_hex(4)}"
        async with contextlib.AsyncExitStack() as stack:
            storage = await Storage.open(settings.database, tracker_id)
            stack.push_async_callback(storage.close)
            tracker = await Tracker.open(storage, settings.options, clock or SystemClock())
            stack.push_async_callback(tracker.close)
            server = cls(tracker, Telemetry("tracker"))
            rpc = make_server()
            tracker_pb2_grpc.add_TrackerServiceServicer_to_server(server, rpc)
            port = bind(rpc, settings.listen, settings.security)
            server.endpoint = f"{settings.listen.rpartition(':')[0]}:{port}"
            if settings.metrics_listen:
                server.metrics_port = stack.enter_context(
                    server.telemetry.serve(settings.metrics_listen, settings.security)
                )
            await rpc.start()
            stack.push_async_callback(rpc.stop, _FAREWELL_SECONDS)
            yield server

    async def _call(
        self,
        method: Callable[[_Request], Awaitable[_Response]],
        request: _Request,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> _Response:
        try:
            return await self.telemetry.observe(method.__name__, lambda: method(request))
        except ControlError as error:
            return await abort(context, error)

    # One method a call of the service; tracker.proto describes them.
    # ruff: noqa: D102, N802

    async def Register(self, request: pb.RegisterRequest, context: Any) -> pb.RegisterResponse:
        return await self._call(self.tracker.register, request, context)

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatResponse:
        return await self._call(self.tracker.heartbeat, request, context)

    async def Deregister(
        self, request: pb.DeregisterRequest, context: Any
    ) -> pb.DeregisterResponse:
        return await self._call(self.tracker.deregister, request, context)

    async def SelectRoute(self, request: pb.SelectRouteRequest, context: Any) -> pb.RouteResponse:
        return await self._call(self.tracker.select_route, request, context)

    async def Reroute(self, request: pb.RerouteRequest, context: Any) -> pb.RouteResponse:
        return await self._call(self.tracker.reroute, request, context)

    async def TouchSession(
        self, request: pb.TouchSessionRequest, context: Any
    ) -> pb.TouchSessionResponse:
        return await self._call(self.tracker.touch_session, request, context)

    async def CloseSession(
        self, request: pb.CloseSessionRequest, context: Any
    ) -> pb.CloseSessionResponse:
        return await self._call(self.tracker.close_session, request, context)

    async def ReportOutcome(
        self, request: pb.ReportOutcomeRequest, context: Any
    ) -> pb.ReportOutcomeResponse:
        answer = await self._call(self.tracker.report_outcome, request, context)
        if answer.repeated_before == 0:
            self._count(request)
        return answer

    async def ListReceipts(
        self, request: pb.ListReceiptsRequest, context: Any
    ) -> pb.ListReceiptsResponse:
        return await self._call(self.tracker.list_receipts, request, context)

    async def PutCertification(
        self, request: pb.PutCertificationRequest, context: Any
    ) -> pb.PutCertificationResponse:
        return await self._call(self.tracker.put_certification, request, context)

    async def ListWorkers(
        self, request: pb.ListWorkersRequest, context: Any
    ) -> pb.ListWorkersResponse:
        return await self._call(self.tracker.list_workers, request, context)

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
        return await self._call(self.tracker.get_status, request, context)

    def _count(self, request: pb.ReportOutcomeRequest) -> None:
        for receipt in request.receipts:
            name = pb.Outcome.Name(receipt.outcome).removeprefix("OUTCOME_").lower()
            self._receipts.labels(name).inc()
            self._work.labels("input_steps").inc(receipt.input_steps)
            self._work.labels("output_steps").inc(receipt.output_steps)
            self._work.labels("busy_us").inc(receipt.busy_us)
            self._work.labels("bytes").inc(receipt.bytes_received + receipt.bytes_sent)
