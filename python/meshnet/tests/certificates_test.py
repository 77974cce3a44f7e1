"""Certificates as the mesh uses them: real handshakes with a real relay."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import stat
from collections.abc import AsyncIterator

import grpc.aio
import pytest
from meshnet.certificates import Authority, describe
from meshnet.errors import ControlError, Reason
from meshnet.relay_client import Listener, connect
from meshnet.relay_server import RelaySettings, serve
from meshnet.transport import Security, TlsFiles, dial

LOOPBACK = ["127.0.0.1"]


def files(folder: pathlib.Path, name: str) -> TlsFiles:
    return TlsFiles(folder / f"{name}.pem", folder / f"{name}.key", folder / "authorities.pem")


def copied(folder: pathlib.Path, name: str, into: pathlib.Path) -> TlsFiles:
    """The files as a machine has them that is not told of later changes."""
    into.mkdir()
    for file in (f"{name}.pem", f"{name}.key", "authorities.pem"):
        (into / file).write_bytes((folder / file).read_bytes())
    return files(into, name)


@contextlib.asynccontextmanager
async def relay(folder: pathlib.Path) -> AsyncIterator[str]:
    Authority.load(folder).issue("relay", LOOPBACK)
    settings = RelaySettings(security=Security(files(folder, "relay")), record=lambda _: None)
    async with serve(settings) as (endpoint, _):
        yield endpoint


async def listen(endpoint: str, tls: TlsFiles | None, name: str) -> None:
    """Registers at the relay under this name. Raises ControlError."""
    channel = dial(endpoint, Security(tls))
    try:
        async with Listener(channel, name):
            pass
    finally:
        await channel.close(None)


async def refusal(endpoint: str, tls: TlsFiles | None, name: str) -> Reason:
    with pytest.raises(ControlError) as caught:
        await listen(endpoint, tls, name)
    return caught.value.reason


async def test_who_has_a_certificate_is_served_under_its_name(tmp_path: pathlib.Path) -> None:
    authority = Authority.create(tmp_path / "mesh")
    authority.issue("a", LOOPBACK)
    other = Authority.create(tmp_path / "other")
    other.issue("a", LOOPBACK)
    async with relay(tmp_path / "mesh") as endpoint:
        ours = files(tmp_path / "mesh", "a")
        await listen(endpoint, ours, "a")
        # An address is a name of the certificate as well.
        await listen(endpoint, ours, "127.0.0.1")
        assert await refusal(endpoint, ours, "b") is Reason.UNAUTHENTICATED
        channel = dial(endpoint, Security(ours))
        async with Listener(channel, "a"):
            with pytest.raises(ControlError) as caught:
                await connect(channel, caller_id="b", callee_id="a", method="seam")
            assert caught.value.reason is Reason.UNAUTHENTICATED
        await channel.close(None)
        # Nobody's certificate, another authority's, ours but with trust in another.
        assert await refusal(endpoint, None, "a") is Reason.PEER_UNREACHABLE
        theirs = files(tmp_path / "other", "a")
        assert await refusal(endpoint, theirs, "a") is Reason.PEER_UNREACHABLE
        mixed = TlsFiles(ours.certificate, ours.key, theirs.authority)
        assert await refusal(endpoint, mixed, "a") is Reason.PEER_UNREACHABLE


async def test_an_authority_is_replaced_while_the_server_runs(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "mesh"
    authority = Authority.create(folder)
    authority.issue("a", LOOPBACK)
    old = copied(folder, "a", tmp_path / "old")
    async with relay(folder) as endpoint:
        await listen(endpoint, old, "a")
        kept = dial(endpoint, Security(old))
        async with Listener(kept, "a") as listener:
            # Both authorities are good: certificates of either, at both ends.
            newer = authority.rotate()
            newer.issue("a", LOOPBACK)
            renewed = files(folder, "a")
            await listen(endpoint, old, "127.0.0.1")
            await listen(endpoint, renewed, "127.0.0.1")
            newer.issue("relay", LOOPBACK)
            await listen(endpoint, renewed, "127.0.0.1")
            # Whoever trusts the old one alone has missed the change.
            assert await refusal(endpoint, old, "127.0.0.1") is Reason.PEER_UNREACHABLE
            both = TlsFiles(old.certificate, old.key, renewed.authority)
            await listen(endpoint, both, "127.0.0.1")
            assert newer.retire() == 1
            await listen(endpoint, renewed, "127.0.0.1")
            assert await refusal(endpoint, both, "127.0.0.1") is Reason.PEER_UNREACHABLE
            # Connections that are open stay.
            channel = dial(endpoint, Security(renewed))
            calling = await _called(listener, channel)
            assert calling == "seam"
            await channel.close(None)
        await kept.close(None)


async def _called(listener: Listener, channel: grpc.aio.Channel) -> str:
    """The method of a call that goes through."""
    calling = asyncio.create_task(
        connect(channel, caller_id="127.0.0.1", callee_id="a", method="seam")
    )
    incoming = await anext(listener.calls())
    stream = await listener.accept(incoming)
    (await calling).cancel()
    stream.cancel()
    return incoming.method


async def test_a_half_replaced_pair_changes_nothing(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "mesh"
    Authority.create(folder).issue("a", LOOPBACK)
    async with relay(folder) as endpoint:
        key = (folder / "relay.key").read_bytes()
        (folder / "relay.key").write_bytes((folder / "a.key").read_bytes())
        await listen(endpoint, files(folder, "a"), "a")
        (folder / "relay.key").unlink()
        await listen(endpoint, files(folder, "a"), "a")
        (folder / "relay.key").write_bytes(key)
        await listen(endpoint, files(folder, "a"), "a")


def test_what_is_written(tmp_path: pathlib.Path) -> None:
    authority = Authority.create(tmp_path, "lab", days=10)
    certificate, key = authority.issue("worker-a", ["10.0.0.5", "worker-a.lab.example"], days=90)
    for private in (tmp_path / "ca.key", key):
        assert stat.S_IMODE(private.stat().st_mode) == 0o600
    (facts,) = describe(certificate.read_bytes())
    assert (facts.common_name, facts.issuer, facts.is_authority) == ("worker-a", "lab", False)
    assert facts.names == ("worker-a", "10.0.0.5", "worker-a.lab.example")
    # No certificate outlives its authority.
    (root,) = describe((tmp_path / "authorities.pem").read_bytes())
    assert facts.expires <= root.expires
    authority.rotate(days=20)
    newest, old = describe((tmp_path / "authorities.pem").read_bytes())
    assert (newest.common_name, old) == ("lab", root)
    assert newest.serial != old.serial
    assert describe((tmp_path / "ca.pem").read_bytes()) == [newest]


@pytest.mark.parametrize("name", ["", "a b", "../a", "ca", "authorities", "a/b", "x" * 65])
def test_names_that_are_no_names(tmp_path: pathlib.Path, name: str) -> None:
    with pytest.raises(ControlError) as caught:
        Authority.create(tmp_path).issue(name)
    assert caught.value.reason is Reason.CONFIGURATION_INVALID


def test_an_authority_is_never_overwritten(tmp_path: pathlib.Path) -> None:
    Authority.create(tmp_path)
    with pytest.raises(ControlError, match="rotate"):
        Authority.create(tmp_path)
    with pytest.raises(ControlError, match="meshnet certs init"):
        Authority.load(tmp_path / "elsewhere")
    with pytest.raises(ControlError):
        describe(b"nothing")


def test_files_that_do_not_fit_are_refused_at_start(tmp_path: pathlib.Path) -> None:
    authority = Authority.create(tmp_path)
    authority.issue("a")
    authority.issue("b")
    good = files(tmp_path, "a")
    assert good.checked()[0] == good.certificate.read_bytes()
    for bad in (
        TlsFiles(good.certificate, tmp_path / "b.key", good.authority),
        TlsFiles(good.key, good.key, good.authority),
        TlsFiles(good.certificate, good.key, good.key),
        TlsFiles(tmp_path / "none", good.key, good.authority),
    ):
        with pytest.raises(ControlError) as caught:
            bad.checked()
        assert caught.value.reason is Reason.CONFIGURATION_INVALID
