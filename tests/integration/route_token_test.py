"""Workers that serve only routes which a tracker has issued tokens for."""

import asyncio
import contextlib
import dataclasses
import pathlib
import time
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
from meshnet.route_tokens import RouteClaim, issue
from meshnet.signing import SigningKey
from meshnet.testing.server_process import ServerProcess
from meshnet.testing.tracker_process import TrackerProcess
from meshnet_gguf.client import Endpoint, Metrics, Route, open_route
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.local_cluster import LocalCluster, WorkerSpec
from meshnet_gguf.testing.cluster import fake_cluster, fake_specs, wait_idle

from proto.meshnet.control.v1 import tracker_pb2
from proto.meshnet.shard.v1 import errors_pb2

BOS = 256
PROMPT = [BOS, *b"a prompt"]
END = 60.0  # seconds after which a test that hangs is given up
SESSION = bytes(range(16))
LIFE_MS = 600_000


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Three stages that want tokens of this key."""

    cluster: LocalCluster
    key: SigningKey
    relay: str

    def claim(self, hop: int, epoch: int = 1) -> RouteClaim:
        expires = time.time_ns() // 1_000_000 + LIFE_MS
        return RouteClaim(SESSION.hex(), epoch, hop, f"w{hop}", expires)

    def tokens(self, epoch: int = 1) -> list[str]:
        return [issue(self.key, self.claim(hop, epoch)).decode() for hop in range(3)]

    async def route(self, tokens: Sequence[str]) -> Route:
        """The last stage is called through a relay, so that its token goes there as well."""
        head, middle, tail = self.cluster.endpoints
        return await open_route(
            [
                Endpoint(head, route_token=tokens[0]),
                Endpoint(middle, route_token=tokens[1]),
                Endpoint(tail, self.relay, "w2", route_token=tokens[2]),
            ]
        )

    async def answer(self, tokens: Sequence[str], epoch: int = 1) -> tuple[int, ...]:
        async with (
            asyncio.timeout(END),
            await self.route(tokens) as route,
            route.session(route_session_id=SESSION, route_epoch=epoch) as session,
        ):
            return (await session.generate(PROMPT, max_tokens=4).result()).token_ids

    async def refusal(
        self, tokens: Sequence[str], epoch: int = 1
    ) -> tuple[str, tuple[int, int] | None]:
        """Reason and stage."""
        with pytest.raises(MeshnetError) as caught:
            await self.answer(tokens, epoch)
        return caught.value.reason_name, caught.value.stage


def specs(key_file: pathlib.Path, relay: str) -> list[WorkerSpec]:
    return [
        dataclasses.replace(
            spec,
            flags=(
                *spec.flags,
                f"--route_token_keys={key_file}.pub",
                f"--worker_id=w{index}",
                f"--relay_peer_id=w{index}",
                *((f"--relay={relay}",) if index == 2 else ()),
            ),
        )
        for index, spec in enumerate(fake_specs((2, 5)))
    ]


@pytest.fixture
async def mesh(tmp_path: pathlib.Path) -> AsyncIterator[Mesh]:
    key = SigningKey.generate()
    key.save(tmp_path / "tracker.pem")
    async with (
        await ServerProcess.launch("meshnet.relay_server") as relay,
        LocalCluster(specs(tmp_path / "tracker.pem", relay.endpoint)) as cluster,
    ):
        async with asyncio.timeout(END):
            while "relay_listening" not in cluster.workers[2].log_tail():
                await asyncio.sleep(0.005)
        yield Mesh(cluster, key, relay.endpoint)


@pytest.fixture(scope="module")
def expected() -> tuple[int, ...]:
    """What the whole model answers."""

    async def whole() -> tuple[int, ...]:
        async with asyncio.timeout(END), fake_cluster(()) as fake, fake.route.session() as session:
            return (await session.generate(PROMPT, max_tokens=4).result()).token_ids

    return asyncio.run(whole())


CHANGES: dict[str, Callable[[RouteClaim], RouteClaim]] = {
    "TOKEN_EXPIRED": lambda claim: dataclasses.replace(claim, expires_ms=1),
    "TOKEN_WRONG_WORKER": lambda claim: dataclasses.replace(claim, worker_id="other"),
    "TOKEN_WRONG_SESSION": lambda claim: dataclasses.replace(claim, session_id="00" * 16),
    "TOKEN_WRONG_EPOCH": lambda claim: dataclasses.replace(claim, epoch=claim.epoch + 1),
    "TOKEN_WRONG_HOP": lambda claim: dataclasses.replace(claim, hop=claim.hop + 1),
}

REASONS = [*CHANGES, "TOKEN_MALFORMED", "TOKEN_UNTRUSTED"]


async def test_every_stage_refuses_every_wrong_token(mesh: Mesh, expected: tuple[int, ...]) -> None:
    stages = [worker.spec.layers for worker in mesh.cluster.workers]
    stranger = SigningKey.generate()
    epoch = 0
    for hop in range(3):
        layers = stages[hop]
        assert layers is not None
        where = (layers.begin, layers.end)
        for reason in REASONS:
            # An epoch of its own: stages before this one have seen the last one's session end.
            epoch += 1
            tokens, claim = mesh.tokens(epoch), mesh.claim(hop, epoch)
            if reason == "TOKEN_MALFORMED":
                tokens[hop] = "no token"
            elif reason == "TOKEN_UNTRUSTED":
                tokens[hop] = issue(stranger, claim).decode()
            else:
                tokens[hop] = issue(mesh.key, CHANGES[reason](claim)).decode()
            assert await mesh.refusal(tokens, epoch) == (reason, where)
    epoch += 1
    assert await mesh.answer(mesh.tokens(epoch), epoch) == expected
    refusals = [metrics.refusals for metrics in await _metrics(mesh)]
    # Each stage counts what it refused itself, and what the stages behind it said of a session.
    assert refusals[-1] == dict.fromkeys(REASONS, 1)


async def _metrics(mesh: Mesh) -> list[Metrics]:
    async with await mesh.route([""] * 3) as route:
        return await route.metrics()


async def test_no_token_is_no_token(mesh: Mesh) -> None:
    assert await mesh.refusal([""] * 3) == ("TOKEN_MALFORMED", (0, 2))
    # The head's token is none for the stages behind it.
    assert await mesh.refusal([mesh.tokens()[0], "", ""]) == ("TOKEN_WRONG_WORKER", (2, 5))


async def test_a_token_is_over_with_its_session(mesh: Mesh, expected: tuple[int, ...]) -> None:
    tokens = mesh.tokens()
    assert await mesh.answer(tokens) == expected
    assert await mesh.refusal(tokens) == ("TOKEN_REPLAYED", (0, 2))
    assert await mesh.answer(mesh.tokens(2), epoch=2) == expected


async def test_cancelling_by_key_wants_a_token(mesh: Mesh) -> None:
    tokens = mesh.tokens()
    async with (
        asyncio.timeout(END),
        await mesh.route(tokens) as route,
    ):
        with pytest.raises(MeshnetError) as ended:
            async with route.session(route_session_id=SESSION) as session:
                head = route.workers[0]
                with pytest.raises(MeshnetError) as caught:
                    await head.cancel_session(SESSION, 1)
                assert caught.value.reason == errors_pb2.REASON_TOKEN_MALFORMED
                assert await head.cancel_session(SESSION, 1, route_token=tokens[0])
                await session.generate(PROMPT, max_tokens=4).result()
        assert ended.value.reason == errors_pb2.REASON_CANCELLED
        for worker in route.workers:
            await wait_idle(worker)


async def test_a_trackers_route_is_served(
    tmp_path: pathlib.Path, mesh: Mesh, expected: tuple[int, ...]
) -> None:
    flags = (f"--token_key={tmp_path / 'tracker.pem'}", "--admit_dark")
    async with await TrackerProcess.start(f"sqlite:///{tmp_path / 'db'}", *flags) as tracker:
        for index, worker in enumerate(mesh.cluster.workers):
            layers = worker.spec.layers
            assert layers is not None
            registration = tracker_pb2.Registration(
                worker_id=f"w{index}",
                node_id="n",
                endpoint=worker.endpoint,
                model_id="m",
                fingerprint="f",
                span=tracker_pb2.Span(begin=layers.begin, end=layers.end),
                model_units=8,
                max_sessions=4,
                step_us=100,
            )
            await tracker.stub.Register(
                tracker_pb2.RegisterRequest(
                    registration=registration, load=tracker_pb2.Load(ready=True)
                )
            )
        answer = await tracker.stub.SelectRoute(tracker_pb2.SelectRouteRequest(model_id="m"))
    hops = [Endpoint(hop.endpoint, route_token=hop.token.decode()) for hop in answer.hops]
    async with (
        asyncio.timeout(END),
        await open_route(hops) as route,
        route.session(
            route_session_id=bytes.fromhex(answer.session_id), route_epoch=answer.epoch
        ) as session,
    ):
        assert (await session.generate(PROMPT, max_tokens=4).result()).token_ids == expected


@pytest.mark.parametrize(
    "flags",
    [
        ("--route_token_keys=/nowhere", "--worker_id=w"),
        (f"--route_token_keys={__file__}", "--worker_id=w"),
        ("--route_token_keys={key}",),
    ],
)
async def test_keys_that_are_none_are_refused(
    tmp_path: pathlib.Path, flags: tuple[str, ...]
) -> None:
    SigningKey.generate().save(tmp_path / "key")
    given = tuple(flag.format(key=tmp_path / "key.pub") for flag in flags)
    with pytest.raises(MeshnetError) as caught, contextlib.suppress(TimeoutError):
        async with LocalCluster([WorkerSpec(flags=given)]):
            pass
    assert caught.value.reason == errors_pb2.REASON_CONFIGURATION_INVALID
