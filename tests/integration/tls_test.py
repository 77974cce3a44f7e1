"""Mutual TLS between client and workers and between stages; plaintext only where it may be."""

import asyncio
import contextlib
import datetime
import ipaddress
import pathlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from meshnet.transport import Security, TlsFiles
from meshnet_gguf.client import (
    LayerRange,
    Route,
    WorkerClient,
    open_route,
)
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.local_cluster import LocalCluster, WorkerSpec
from meshnet_gguf.testing.cluster import fake_cluster

from proto.meshnet.shard.v1 import errors_pb2, shard_pb2, shard_pb2_grpc

BOS = 256
END = 60.0


@dataclass(frozen=True)
class Authority:
    """A certificate authority of a test."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def make(cls, name: str) -> "Authority":
        key = ec.generate_private_key(ec.SECP256R1())
        builder = certificate(name, name, key).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        return cls(builder.sign(key, hashes.SHA256()), key)

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def issue(self, name: str) -> tuple[bytes, bytes]:
        """Certificate and key for a worker or a client on 127.0.0.1."""
        key = ec.generate_private_key(ec.SECP256R1())
        issuer = self.certificate.subject.rfc4514_string().removeprefix("CN=")
        names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName(name)]
        signed = (
            certificate(name, issuer, key)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(self.key, hashes.SHA256())
        )
        return (
            signed.public_bytes(serialization.Encoding.PEM),
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            ),
        )


def certificate(
    subject: str, issuer: str, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
    )


@dataclass(frozen=True)
class Fleet:
    """One authority, what it has issued, and the worker flags that go with it."""

    authority: Authority
    client: Security
    flags: tuple[str, ...]

    @property
    def tls(self) -> TlsFiles:
        """The client's."""
        assert self.client.tls is not None
        return self.client.tls


@pytest.fixture
def fleet(tmp_path: pathlib.Path) -> Fleet:
    return make_fleet(tmp_path / "fleet")


def make_fleet(folder: pathlib.Path) -> Fleet:
    folder.mkdir()
    authority = Authority.make("fleet")
    worker, worker_key = authority.issue("worker")
    client, client_key = authority.issue("client")
    for name, content in [
        ("ca", authority.pem),
        ("cert", worker),
        ("key", worker_key),
        ("client", client),
        ("client.key", client_key),
    ]:
        (folder / name).write_bytes(content)
    return Fleet(
        authority,
        Security(TlsFiles(folder / "client", folder / "client.key", folder / "ca")),
        tuple(f"--tls_{name}={folder / name}" for name in ("ca", "cert", "key")),
    )


@contextlib.asynccontextmanager
async def secure_cluster(fleet: Fleet) -> AsyncIterator[LocalCluster]:
    specs = [WorkerSpec(LayerRange(*item), flags=fleet.flags) for item in [(0, 4), (4, 8)]]
    async with asyncio.timeout(END), LocalCluster(specs, security=fleet.client) as cluster:
        yield cluster


async def answer(route: Route) -> tuple[int, ...]:
    async with route.session() as session:
        return (await session.generate([BOS, 1, 2], max_tokens=8).result()).token_ids


async def unreachable(endpoint: str, security: Security | None) -> None:
    async with WorkerClient(endpoint, security=security) as worker:
        with pytest.raises(MeshnetError) as caught:
            await worker.capability()
    assert caught.value.reason == errors_pb2.REASON_PEER_UNREACHABLE


async def nameless(endpoint: str, authority: bytes) -> None:
    """Who trusts the worker but shows no certificate, which no program of ours does."""
    channel = grpc.aio.secure_channel(endpoint, grpc.ssl_channel_credentials(authority))
    stub = shard_pb2_grpc.ShardServiceStub(channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.GetHealth(shard_pb2.GetHealthRequest())
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    await channel.close(None)


async def test_a_chain_over_mutual_tls_gives_what_one_in_plaintext_gives(fleet: Fleet) -> None:
    async with (
        secure_cluster(fleet) as cluster,
        await open_route(cluster.endpoints, security=fleet.client) as route,
    ):
        secure = await answer(route)
    async with fake_cluster((4,)) as fake:
        assert await answer(fake.route) == secure


async def test_who_cannot_prove_who_it_is_gets_nothing(
    fleet: Fleet, tmp_path: pathlib.Path
) -> None:
    strangers = make_fleet(tmp_path / "strangers")
    async with secure_cluster(fleet) as cluster:
        endpoint = cluster.endpoints[0]
        await unreachable(endpoint, None)
        await nameless(endpoint, fleet.authority.pem)
        ours, theirs = fleet.tls, strangers.tls
        await unreachable(
            endpoint, Security(TlsFiles(theirs.certificate, theirs.key, ours.authority))
        )
        await unreachable(endpoint, strangers.client)
        async with await open_route(cluster.endpoints, security=fleet.client) as route:
            assert len(await answer(route)) == 8


async def test_a_stage_of_another_fleet_is_no_next_stage(
    fleet: Fleet, tmp_path: pathlib.Path
) -> None:
    strangers = make_fleet(tmp_path / "strangers")
    async with (
        secure_cluster(fleet) as ours,
        secure_cluster(strangers) as theirs,
        await open_route(ours.endpoints, security=fleet.client) as route,
    ):
        session = route.session()
        session._open_message.route.hops[1].endpoint = theirs.endpoints[1]
        with pytest.raises(MeshnetError) as caught:
            async with session:
                pytest.fail("a strange stage joined the route")
        assert caught.value.reason == errors_pb2.REASON_PEER_UNREACHABLE
        assert len(await answer(route)) == 8


async def test_another_name_than_the_certificates_needs_to_be_said(fleet: Fleet) -> None:
    async with secure_cluster(fleet) as cluster:
        named = Security(fleet.tls, server_name="worker")
        async with WorkerClient(cluster.endpoints[0], security=named) as worker:
            assert (await worker.capability()).layers == LayerRange(0, 4)
        await unreachable(cluster.endpoints[0], Security(fleet.tls, server_name="somebody.example"))


@pytest.mark.parametrize("missing", ["ca", "cert", "key"])
async def test_half_a_tls_configuration_is_refused(fleet: Fleet, missing: str) -> None:
    flags = tuple(flag for flag in fleet.flags if not flag.startswith(f"--tls_{missing}="))
    with pytest.raises(MeshnetError) as caught:
        async with LocalCluster([WorkerSpec(flags=flags)]):
            pytest.fail("the worker got ready")
    assert caught.value.reason == errors_pb2.REASON_CONFIGURATION_INVALID


@pytest.mark.parametrize("damage", ["no PEM", "damaged", "another's"])
@pytest.mark.parametrize("name", ["ca", "cert", "key"])
async def test_tls_files_that_cannot_serve_are_named(
    fleet: Fleet, tmp_path: pathlib.Path, name: str, damage: str
) -> None:
    if (name, damage) == ("ca", "another's"):
        pytest.skip("any authority may be chosen")
    path = tmp_path / "fleet" / name
    if damage == "no PEM":
        path.write_bytes(b"-- nothing of the kind --\n")
    elif damage == "damaged":
        head, _, rest = path.read_bytes().partition(b"\n")
        path.write_bytes(head + b"\n" + b"AAAA" + rest[4:])
    else:
        make_fleet(tmp_path / "strangers")
        path.write_bytes((tmp_path / "strangers" / name).read_bytes())
    cluster = LocalCluster([WorkerSpec(flags=fleet.flags)])
    with pytest.raises(MeshnetError) as caught:
        async with cluster:
            pytest.fail("the worker got ready")
    assert caught.value.reason == errors_pb2.REASON_CONFIGURATION_INVALID
    assert f"--tls_{name}" in caught.value.message
    assert cluster.workers[0].exit_code == 2


async def test_plaintext_on_a_tls_port_leaves_the_log_json(fleet: Fleet) -> None:
    async with secure_cluster(fleet) as cluster:
        host, _, port = cluster.endpoints[0].rpartition(":")
        # More than what is logged in a minute.
        for _ in range(30):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET / HTTP/1.1\r\n\r\n" * 10)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
                await reader.read()
            writer.close()
        worker = cluster.workers[0]
        assert await worker.stop() == 0
        records = worker.log_records()
        assert len(records) == len(worker.log.read_text().splitlines())
        noise = [record for record in records if record["event"] == "grpc"]
        assert 1 <= len(noise) <= 20
        assert {record["severity"] for record in noise} == {"WARNING"}


async def test_the_word_insecure_opens_it() -> None:
    flags = ("--listen=0.0.0.0:0", "--insecure")
    async with LocalCluster([WorkerSpec(flags=flags)], security=Security(insecure=True)) as cluster:
        port = cluster.endpoints[0].rpartition(":")[2]
        async with WorkerClient(f"127.0.0.1:{port}") as worker:
            assert (await worker.capability()).layers == LayerRange(0, 8)
