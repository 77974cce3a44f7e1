"""What a node measures: the lines to its neighbours, and the service that they measure it by."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import statistics
import time
from typing import Any, Final

import grpc.aio
from meshnet.errors import ControlError, Reason, abort
from meshnet.tracker_client import TrackerClient
from meshnet.transport import Security, dial

from meshnet_gguf.client import LayerRange
from meshnet_gguf.registration import PeerMeasurement
from proto.meshnet.control.v1 import node_pb2, node_pb2_grpc, tracker_pb2

__all__ = [
    "NODE_LABEL",
    "NodeService",
    "machine_memory_bytes",
    "measure_peer",
    "measure_peers",
    "neighbours",
]

# The label of a registration under which its node can be measured.
NODE_LABEL: Final = "node_endpoint"
_MAX_PAYLOAD_BYTES: Final = 4 << 20
_ROUND_TRIPS: Final = 5
# A tracker takes no more measurements of one worker.
_MAX_PEERS: Final = 64


def machine_memory_bytes() -> int:
    """This machine's memory, or a container's share of it."""
    total = 0
    for line in pathlib.Path("/proc/meminfo").read_text("ascii").splitlines():
        if line.startswith("MemTotal:"):
            total = int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):
        total = min(total, int(pathlib.Path("/sys/fs/cgroup/memory.max").read_text("ascii")))
    return total


class NodeService(node_pb2_grpc.NodeServiceServicer):
    """Answers other nodes."""

    def __init__(self, node_id: str) -> None:
        self._node_id = node_id

    async def Measure(  # noqa: D102, N802 - node.proto describes it
        self, request: node_pb2.MeasureRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> node_pb2.MeasureResponse:
        if request.node_id != self._node_id:
            message = f"expected {request.node_id[:128]} here, this is {self._node_id}"
            await abort(context, ControlError(Reason.WORKER_UNKNOWN, message))
        if len(request.payload) > _MAX_PAYLOAD_BYTES:
            message = f"expected at most {_MAX_PAYLOAD_BYTES} bytes, got {len(request.payload)}"
            await abort(context, ControlError(Reason.FIELD_OUT_OF_BOUNDS, message))
        return node_pb2.MeasureResponse(received_bytes=len(request.payload))


async def neighbours(
    tracker: TrackerClient, node_id: str, model_id: str, fingerprint: str, layers: LayerRange
) -> dict[str, str]:
    """Nodes, with their endpoints, that could be next to these layers on a route.

    No more than a tracker takes measurements of, however many there are. Raises ControlError.
    """
    answer = await tracker.list_workers(
        tracker_pb2.ListWorkersRequest(
            model_id=model_id,
            fingerprint=fingerprint,
            beside=tracker_pb2.Span(begin=layers.begin, end=layers.end),
            other_than_node_id=node_id,
            max_nodes=_MAX_PEERS,
        )
    )
    found = {}
    for worker in answer.workers:
        endpoint = worker.registration.labels.get(NODE_LABEL, "")
        if endpoint:
            found[worker.registration.node_id] = endpoint
    return found


async def measure_peer(
    node_id: str,
    endpoint: str,
    payload_bytes: int,
    *,
    security: Security | None = None,
    answer_within: float = 5.0,
) -> PeerMeasurement | None:
    """The line to one node; None when it does not answer, or somebody else does.

    The round trip is the median of a few; the bandwidth that of one payload, less a round trip
    where the payload takes longer than that.
    """
    try:
        channel = dial(endpoint, security)
    except ControlError:
        return None
    stub: Any = node_pb2_grpc.NodeServiceStub(channel)

    async def once(payload: bytes) -> float:
        request = node_pb2.MeasureRequest(node_id=node_id, payload=payload)
        began = time.perf_counter()
        await stub.Measure(request, timeout=answer_within)
        return time.perf_counter() - began

    try:
        await once(b"")  # connects
        round_trip = statistics.median([await once(b"") for _ in range(_ROUND_TRIPS)])
        bandwidth = 0
        if payload_bytes:
            took = await once(bytes(payload_bytes))
            # Where a round trip drowns the transfer, nothing can be taken off.
            transfer = took - round_trip if took > 2 * round_trip else took
            bandwidth = int(payload_bytes / max(transfer, 1e-6))
    except grpc.aio.AioRpcError:
        return None
    finally:
        await channel.close(None)
    return PeerMeasurement(node_id, max(1, round(round_trip * 1e6)), bandwidth)


async def measure_peers(
    peers: dict[str, str],
    payload_bytes: int,
    *,
    security: Security | None = None,
    answer_within: float = 5.0,
) -> list[PeerMeasurement]:
    """The lines to several nodes, one after the other: they would slow each other down."""
    found = []
    for node_id, endpoint in peers.items():
        measured = await measure_peer(
            node_id,
            endpoint,
            payload_bytes,
            security=security,
            answer_within=answer_within,
        )
        if measured is not None:
            found.append(measured)
        await asyncio.sleep(0)
    return found
