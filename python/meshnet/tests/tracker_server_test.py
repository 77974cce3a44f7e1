"""The tracker as a process: killed, refused, measured."""

from __future__ import annotations

import asyncio
import os
import pathlib
import signal
import urllib.request

import grpc.aio
import pytest
from meshnet.errors import Reason, error_from_rpc
from meshnet.signing import SigningKey
from meshnet.testing.tracker_process import TrackerProcess

from proto.meshnet.control.v1 import tracker_pb2 as pb


def registration(name: str, begin: int, end: int) -> pb.RegisterRequest:
    return pb.RegisterRequest(
        registration=pb.Registration(
            worker_id=name,
            node_id=f"node-{name}",
            endpoint="127.0.0.1:1",
            model_id="m",
            fingerprint="f",
            span=pb.Span(begin=begin, end=end),
            model_units=4,
            max_sessions=64,
            step_us=100,
        ),
        load=pb.Load(ready=True),
    )


async def test_a_killed_tracker_loses_nothing_acknowledged(database: str) -> None:
    async with await TrackerProcess.start(database, "--admit_dark", "--lease_ms=60000") as first:
        generations = {}
        for name, begin, end in (("a", 0, 2), ("b", 2, 4)):
            answer = await first.stub.Register(registration(name, begin, end))
            generations[name] = answer.generation
        acknowledged: list[str] = []
        routes: dict[str, pb.RouteResponse] = {}

        async def work(number: int) -> None:
            for step in range(1000):
                session = f"s{number}-{step}"
                request = pb.SelectRouteRequest(model_id="m", session_id=session)
                routes[session] = await first.stub.SelectRoute(request)
                receipt = pb.Receipt(
                    session_id=session,
                    epoch=1,
                    work_id="w",
                    worker_id="a",
                    node_id="node-a",
                    outcome=pb.OUTCOME_COMPLETED,
                )
                await first.stub.ReportOutcome(pb.ReportOutcomeRequest(receipts=[receipt]))
                acknowledged.append(session)
                await first.stub.CloseSession(pb.CloseSessionRequest(session_id=session))

        workers = [asyncio.create_task(work(number)) for number in range(4)]
        while len(acknowledged) < 40:
            await asyncio.sleep(0.01)
        await first.kill()
        for outcome in await asyncio.gather(*workers, return_exceptions=True):
            assert isinstance(outcome, grpc.aio.AioRpcError)
            assert error_from_rpc(outcome).reason is Reason.PEER_UNREACHABLE
    async with await TrackerProcess.start(database, "--admit_dark", "--lease_ms=60000") as second:
        for name, generation in generations.items():
            await second.stub.Heartbeat(
                pb.HeartbeatRequest(worker_id=name, generation=generation, load=pb.Load(ready=True))
            )
        found = (await second.stub.ListReceipts(pb.ListReceiptsRequest())).receipts
        assert {receipt.session_id for receipt in found} >= set(acknowledged)
        for session in set(routes) - set(acknowledged):  # still open
            request = pb.SelectRouteRequest(model_id="m", session_id=session)
            assert await second.stub.SelectRoute(request) == routes[session]
        assert await second.stop() == 0


async def test_errors_carry_their_reason(tmp_path: pathlib.Path) -> None:
    async with await TrackerProcess.start(f"sqlite:///{tmp_path}/t.db") as tracker:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await tracker.stub.SelectRoute(pb.SelectRouteRequest(model_id="m"))
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        found = error_from_rpc(error.value)
        assert found.reason is Reason.NO_ROUTE
        assert found.message.endswith("model m: no worker is registered for it")


async def test_metrics(tmp_path: pathlib.Path) -> None:
    SigningKey.generate().save(tmp_path / "key.pem")
    flags = ("--metrics_listen=127.0.0.1:0", f"--trusted_key={tmp_path}/key.pem.pub")
    async with await TrackerProcess.start(f"sqlite:///{tmp_path}/t.db", *flags) as tracker:
        await tracker.stub.Register(registration("a", 0, 4))
        with pytest.raises(grpc.aio.AioRpcError):
            await tracker.stub.SelectRoute(pb.SelectRouteRequest(model_id="m"))
        status = await tracker.stub.GetStatus(pb.GetStatusRequest())
        assert (status.workers, status.trusted_keys, status.admits_dark) == (1, 1, False)
        url = f"http://127.0.0.1:{tracker.metrics_port}/metrics"
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(url).read().decode())
        lines = text.splitlines()
        assert "meshnet_tracker_workers 1.0" in lines
        assert "meshnet_tracker_admits_dark 0.0" in lines
        assert 'meshnet_tracker_calls_total{method="register"} 1.0' in lines
        refused = 'meshnet_tracker_refusals_total{method="select_route",reason="NO_ROUTE"} 1.0'
        assert refused in lines


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("--listen=0.0.0.0:0", "INSECURE_TRANSPORT"),
        ("--metrics_listen=0.0.0.0:0", "INSECURE_TRANSPORT"),
        ("--trusted_key=/nowhere", "CONFIGURATION_INVALID"),
        ("--tls_cert=/nowhere", "CONFIGURATION_INVALID"),
    ],
)
async def test_what_does_not_start(flag: str, reason: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(RuntimeError, match=f'"reason": "{reason}"'):
        await TrackerProcess.start(f"sqlite:///{tmp_path}/t.db", flag)


async def test_a_tracker_that_was_busy_answers_all_who_waited(tmp_path: pathlib.Path) -> None:
    """gRPC by itself drops some of a thousand waiting calls, with the bare status CANCELLED."""
    database = f"sqlite:///{tmp_path / 'db'}"
    async with await TrackerProcess.start(database, "--admit_dark") as tracker:
        generation = (await tracker.stub.Register(registration("a", 0, 4))).generation
        beat = pb.HeartbeatRequest(
            worker_id="a", generation=generation, load=pb.Load(ready=True, queued_steps=1)
        )
        os.kill(tracker.pid, signal.SIGSTOP)
        waiting = [asyncio.ensure_future(tracker.stub.Heartbeat(beat)) for _ in range(3500)]
        await asyncio.sleep(0)
        os.kill(tracker.pid, signal.SIGCONT)
        answers = await asyncio.gather(*waiting, return_exceptions=True)
        assert [answer for answer in answers if isinstance(answer, BaseException)] == []
