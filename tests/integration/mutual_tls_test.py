"""A mesh in which everything proves who it is: tracker, relay, nodes, workers and a client, as real
processes with certificates of `meshnet certs`, before, during and after a rotation."""

import asyncio
import contextlib
import datetime
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from meshnet.certificates import Authority
from meshnet.errors import ControlError, Reason
from meshnet.relay_client import Listener
from meshnet.testing.handshake import client_context, shown_serial
from meshnet.tracker_client import TrackerClient
from meshnet.transport import Security, TlsFiles, dial
from meshnet_gguf.client import LayerRange, Route, RouteHop, Token, WorkerClient
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.local_cluster import LocalCluster, WorkerSpec
from meshnet_gguf.logged_process import PythonProgram
from meshnet_gguf.route_source import TrackerRouteSource
from meshnet_gguf.testing.cluster import fake_cluster
from meshnet_gguf.testing.node_process import node_values, start_node

from proto.meshnet.control.v1 import tracker_pb2
from proto.meshnet.shard.v1 import errors_pb2

END = 200.0
BOS = 256
PROMPT = [BOS, 1, 2]
RANGES = {"n1": (0, 3), "n2": (3, 6), "n3": (6, 8)}
SERVERS = ("tracker", "relay", *RANGES)


def meshnet(*arguments: str) -> str:
    """A command, as an operator gives it; what it says."""
    path = os.pathsep.join(folder for folder in sys.path if folder)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "meshnet_gguf.cli.meshnet", *arguments],
        check=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    return done.stdout.decode()


def certs(*arguments: str) -> None:
    meshnet("certs", *arguments)


def issue(folder: pathlib.Path, name: str) -> None:
    """As `meshnet certs issue` does; the command itself is started where it matters."""
    names = ["127.0.0.1", *([f"{name}.worker"] if name in RANGES else [])]
    Authority.load(folder).issue(name, names)


def files(folder: pathlib.Path, name: str) -> TlsFiles:
    return TlsFiles(folder / f"{name}.pem", folder / f"{name}.key", folder / "authorities.pem")


def copied(tls: TlsFiles, folder: pathlib.Path) -> TlsFiles:
    """As somebody has them who is not told of later changes."""
    folder.mkdir()
    copies = []
    for path in (tls.certificate, tls.key, tls.authority):
        copies.append(folder / path.name)
        copies[-1].write_bytes(path.read_bytes())
    return TlsFiles(*copies)


class Mesh:
    """A tracker, a relay, and a node for each range; n2's worker is called through the relay."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.certificates = folder / "certs"
        self.nodes: dict[str, PythonProgram] = {}
        self.tracker = ""
        self.relay = ""
        self.relay_program: PythonProgram | None = None

    def tls(self, name: str) -> TlsFiles:
        return files(self.certificates, name)

    @property
    def client(self) -> Security:
        return Security(self.tls("client"))

    async def serve(self, command: str, listen: str, *flags: str) -> tuple[PythonProgram, str]:
        """Listens on all addresses, as only who has a certificate may."""
        tls = self.tls(command)
        program = await PythonProgram.start(
            "meshnet_gguf.cli.meshnet",
            command,
            f"--listen={listen}",
            f"--tls_cert={tls.certificate}",
            f"--tls_key={tls.key}",
            f"--tls_ca={tls.authority}",
            *flags,
            log=self.folder / f"{command}-{len(list(self.folder.iterdir()))}.log",
        )
        address = str((await program.wait_event("listening"))["address"])
        return program, f"127.0.0.1:{address.rpartition(':')[2]}"

    async def start_relay(self) -> None:
        listen = f"0.0.0.0:{self.relay.rpartition(':')[2] or 0}"
        self.relay_program, self.relay = await self.serve("relay", listen)

    async def start_node(self, name: str, **tls: str) -> PythonProgram:
        values = node_values(
            name,
            self.tracker,
            RANGES[name],
            measurement={"every_ms": 100, "payload_bytes": 1000},
            tls={
                "certificate": str(self.tls(name).certificate),
                "key": str(self.tls(name).key),
                "authority": str(self.tls(name).authority),
                **tls,
            },
        )
        values["worker"]["flags"] = {"fake_layers": 8, "fake_delay": "3ms"}
        if name == "n2":
            values["worker"]["relay"] = self.relay
        return await start_node(values, self.folder)

    def endpoints(self) -> dict[str, str]:
        """Of all that listen: tracker, relay, nodes, workers."""
        found = {"tracker": self.tracker, "relay": self.relay}
        for name, node in self.nodes.items():
            found[name] = str(node.events("node")[-1]["address"])
            found[f"{name}.worker"] = str(node.events("registered")[-1]["endpoint"])
        return found


@contextlib.asynccontextmanager
async def running_mesh(folder: pathlib.Path, *nodes: str) -> AsyncIterator[Mesh]:
    mesh = Mesh(folder)
    await asyncio.to_thread(certs, "init", str(mesh.certificates))
    for name in (*SERVERS, "client"):
        issue(mesh.certificates, name)
    programs: list[PythonProgram] = []
    try:
        async with asyncio.timeout(END):
            tracker, mesh.tracker = await mesh.serve(
                "tracker", "0.0.0.0:0", f"--database=sqlite:///{folder}/t.db", "--admit_dark"
            )
            programs.append(tracker)
            await mesh.start_relay()
            for name in nodes:
                mesh.nodes[name] = await mesh.start_node(name)
                programs.append(mesh.nodes[name])
            for node in mesh.nodes.values():
                await node.wait_event("registered")
            yield mesh
    finally:
        if mesh.relay_program is not None:
            programs.append(mesh.relay_program)
        await asyncio.gather(*(program.kill() for program in programs))


async def expected(max_tokens: int) -> tuple[int, ...]:
    """What the whole model answers, in plaintext on loopback."""
    async with fake_cluster((), "--fake_layers=8") as fake, fake.route.session() as session:
        return (await session.generate(PROMPT, max_tokens=max_tokens).result()).token_ids


async def answer(source: TrackerRouteSource, max_tokens: int) -> tuple[int, ...]:
    async with source.open() as route, route.session() as session:
        return (await session.generate(PROMPT, max_tokens=max_tokens).result()).token_ids


async def test_a_rotation_under_load_loses_nothing(tmp_path: pathlib.Path) -> None:
    async with (
        running_mesh(tmp_path, *RANGES) as mesh,
        TrackerRouteSource([mesh.tracker], "m", security=mesh.client) as source,
    ):
        right = await expected(200)
        assert await answer(source, 8) == right[:8]
        assert mesh.relay_program is not None
        # The relay writes a call down when it is over, which the session's end does not wait for.
        await mesh.relay_program.wait_event("call")
        calls = mesh.relay_program.events("call")
        assert {call["caller_id"] for call in calls} == {"n1.worker"}
        assert {call["callee_id"] for call in calls} == {"n2.worker"}
        before = copied(mesh.tls("client"), tmp_path / "before")
        trusting = client_context(before)
        shown = {where: shown_serial(at, trusting) for where, at in mesh.endpoints().items()}
        assert len(shown) == 8

        async with source.open() as route, route.session() as session:
            tokens: list[int] = []
            rotating: asyncio.Task[None] | None = None
            async for event in session.generate(PROMPT, max_tokens=200):
                if isinstance(event, Token):
                    tokens.append(event.token_id)
                    # In the middle of the answer.
                    rotating = rotating or asyncio.create_task(asyncio.to_thread(rotate, mesh))
            assert tuple(tokens) == right
            assert rotating is not None
            await rotating
            # Its streams go on; what is dialed from now on shows and trusts what is new.
            again = await session.generate([BOS, 1], max_tokens=4).result()
            assert len(again.token_ids) == 4

        for where, at in mesh.endpoints().items():
            assert shown_serial(at, client_context(mesh.tls("client"))) != shown[where], where
        await refused_everywhere(mesh, Security(before))
        assert await answer(source, 8) == right[:8]

        # The nodes go on measuring and beating with what is new.
        for node in mesh.nodes.values():
            count = len(node.events("measured"))
            measured = await node.wait_event("measured", count + 2)
            assert len(measured["peers"]) == 2  # type: ignore[arg-type]
            assert not node.events("restarting")
        async with TrackerClient([mesh.tracker], security=mesh.client) as tracker:
            workers = (await tracker.list_workers(tracker_pb2.ListWorkersRequest())).workers
        assert sorted(worker.registration.node_id for worker in workers) == sorted(RANGES)

        # Commands that ask workers show who they are, too.
        tls = mesh.tls("client")
        shown_by_flags = [f"--tls-cert={tls.certificate}", f"--tls-key={tls.key}"]
        worker = mesh.endpoints()["n3.worker"]
        said = await asyncio.to_thread(
            meshnet, "metrics", worker, *shown_by_flags, f"--tls-ca={tls.authority}"
        )
        assert f'meshnet_worker_up{{worker="{worker}"}} 1.0' in said

        # What the relay's loss breaks is dialed anew, with what is new.
        await mesh.relay_program.kill()
        await mesh.nodes["n2"].wait_event("relay_lost")
        await mesh.start_relay()
        await mesh.nodes["n2"].wait_event("registered", 2)
        assert await answer(source, 8) == right[:8]


def rotate(mesh: Mesh) -> None:
    """As `meshnet certs --help` says, but that all machines share the folder."""
    folder = str(mesh.certificates)
    certs("rotate", folder)
    certs("issue", folder, "client", "--host=127.0.0.1")
    for name in SERVERS:
        issue(mesh.certificates, name)
    certs("retire", folder)


async def refused_everywhere(mesh: Mesh, stranger: Security) -> None:
    """By tracker, relay and workers alike, each time with a reason and a word on why."""
    where = mesh.endpoints()
    async with TrackerClient([where["tracker"]], security=stranger, timeout=5.0) as tracker:
        with pytest.raises(ControlError) as caught:
            await tracker.get_status()
    assert caught.value.reason is Reason.PEER_UNREACHABLE
    assert where["tracker"] in caught.value.message
    channel = dial(where["relay"], stranger)
    with pytest.raises(ControlError) as caught:
        async with Listener(channel, "client"):
            pytest.fail("the relay took a stranger")
    assert caught.value.reason is Reason.PEER_UNREACHABLE
    await channel.close(None)
    async with WorkerClient(where["n3.worker"], security=stranger) as worker:
        with pytest.raises(MeshnetError) as refused:
            await worker.capability()
    assert refused.value.reason == errors_pb2.REASON_PEER_UNREACHABLE
    assert where["n3.worker"] in refused.value.message


def forged(
    mesh: Mesh, folder: pathlib.Path, name: str, hosts: Sequence[str], days: int
) -> TlsFiles:
    """By the mesh's own authority, but to end `days` from now."""
    folder.mkdir()
    authority = x509.load_pem_x509_certificate((mesh.certificates / "ca.pem").read_bytes())
    signer = serialization.load_pem_private_key((mesh.certificates / "ca.key").read_bytes(), None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=9))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(
            x509.SubjectAlternativeName([x509.DNSName(host) for host in (name, *hosts)]), False
        )
        .sign(signer, hashes.SHA256())
    )
    (folder / "c.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "c.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return TlsFiles(folder / "c.pem", folder / "c.key", mesh.certificates / "authorities.pem")


async def why(endpoint: str, security: Security) -> str:
    """What a caller of a worker is told instead of an answer."""
    async with WorkerClient(endpoint, security=security) as worker:
        with pytest.raises(MeshnetError) as caught:
            await worker.capability()
    assert caught.value.reason == errors_pb2.REASON_PEER_UNREACHABLE
    return caught.value.message


@contextlib.asynccontextmanager
async def impostor(tls: TlsFiles) -> AsyncIterator[str]:
    """A server that shows any certificate it likes, as ours would not."""
    certificate, key, authority = tls.read()
    server = grpc.aio.server()
    credentials = grpc.ssl_server_credentials([(key, certificate)], authority, True)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def test_certificates_that_are_not_good_are_refused_with_the_reason(
    tmp_path: pathlib.Path,
) -> None:
    async with running_mesh(tmp_path, "n1") as mesh:
        worker = mesh.endpoints()["n1.worker"]
        # Another authority's, at either end.
        Authority.create(tmp_path / "other")
        issue(tmp_path / "other", "client")
        theirs = files(tmp_path / "other", "client")
        assert "certificate" in (await why(worker, Security(theirs))).lower()
        ours = mesh.tls("client")
        mixed = TlsFiles(theirs.certificate, theirs.key, ours.authority)
        assert worker in await why(worker, Security(mixed))
        # Another name than it is dialed by.
        renamed = Security(ours, server_name="somebody.example")
        assert "Hostname" in await why(worker, renamed)
        # One that has run out: a program of ours does not start with it, ...
        expired = forged(mesh, tmp_path / "expired", "n1", ["127.0.0.1", "n1.worker"], -1)
        with pytest.raises(ControlError, match="valid now") as caught:
            dial(worker, Security(expired))
        assert caught.value.reason is Reason.CONFIGURATION_INVALID
        flags = tuple(
            f"--tls_{name}={path}"
            for name, path in (
                ("cert", expired.certificate),
                ("key", expired.key),
                ("ca", expired.authority),
            )
        )
        cluster = LocalCluster([WorkerSpec(flags=flags)])
        with pytest.raises(MeshnetError, match="valid now") as refused:
            async with cluster:
                pytest.fail("the worker served with a certificate that has run out")
        assert refused.value.reason == errors_pb2.REASON_CONFIGURATION_INVALID
        # ... and one that shows it all the same is no peer, for a client or the stage before.
        async with impostor(expired) as endpoint:
            assert "expired" in await why(endpoint, mesh.client)
            with pytest.raises(MeshnetError) as refused:
                await through(worker, endpoint, mesh)
        assert refused.value.reason == errors_pb2.REASON_PEER_UNREACHABLE
        assert "certificate" in refused.value.message.lower()

        # A node whose certificate is another authority's hears why from its tracker's line.
        stranger = await mesh.start_node(
            "n3",
            certificate=str(theirs.certificate),
            key=str(theirs.key),
            authority=str(theirs.authority),
        )
        away = await stranger.wait_event("tracker_away")
        assert away["reason"] == "PEER_UNREACHABLE"
        assert mesh.tracker in str(away["message"])
        await stranger.kill()

        # A certificate without the worker's name listens at no relay.
        Authority.load(mesh.certificates).issue("n2", ["127.0.0.1"])
        nameless = await mesh.start_node("n2")
        log = pathlib.Path(str((await nameless.wait_event("worker_started"))["log"]))
        while not (lost := _events(log, "relay_lost")):
            await asyncio.sleep(0.01)
        assert lost[0]["reason"] == "UNAUTHENTICATED"
        assert not nameless.events("registered")
        await nameless.kill()


def _events(log: pathlib.Path, name: str) -> list[dict[str, object]]:
    records = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]
    return [record for record in records if record["event"] == name]


async def through(head: str, next_stage: str, mesh: Mesh) -> None:
    """A session over a head and whatever is at the other endpoint."""
    async with WorkerClient(head, security=mesh.client) as worker:
        capability = await worker.capability()
        hops = [
            RouteHop(head, capability.layers),
            RouteHop(next_stage, LayerRange(capability.layers.end, capability.model_layers)),
        ]
        async with Route([worker], [capability], hops).session():
            pytest.fail("a stage that is none joined the route")
