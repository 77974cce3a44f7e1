"""The line to a node, measured over a real one."""

import asyncio

import pytest
from meshnet.transport import bind, make_server
from meshnet_gguf.node.measure import NodeService, measure_peer

from proto.meshnet.control.v1 import node_pb2_grpc

END = 60.0  # seconds after which a test that hangs is given up


@pytest.mark.parametrize("payload", [1, 64])
async def test_a_payload_too_small_to_time_gives_no_bandwidth_out_of_noise(payload: int) -> None:
    server = make_server()
    node_pb2_grpc.add_NodeServiceServicer_to_server(NodeService("n"), server)
    port = bind(server, "127.0.0.1:0")
    await server.start()
    try:
        async with asyncio.timeout(END):
            for _ in range(20):
                peer = await measure_peer("n", f"127.0.0.1:{port}", payload)
                assert peer is not None
                # No call takes less than 10 microseconds.
                assert 0 < peer.bytes_per_second < payload * 100_000
    finally:
        await server.stop(None)
