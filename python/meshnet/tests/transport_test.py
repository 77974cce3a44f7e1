"""Where may be listened and dialed, and TLS files that are replaced while all runs."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import pathlib
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable

import pytest
from meshnet.certificates import Authority
from meshnet.errors import ControlError, Reason
from meshnet.telemetry import Telemetry
from meshnet.testing.handshake import client_context, shown_serial
from meshnet.transport import Line, Security, TlsFiles, bind, dial, is_loopback, make_server

LOOPBACK = ["127.0.0.1", "localhost"]


def files(folder: pathlib.Path, name: str) -> TlsFiles:
    return TlsFiles(folder / f"{name}.pem", folder / f"{name}.key", folder / "authorities.pem")


@pytest.mark.parametrize(
    ("endpoint", "local"),
    [
        ("127.0.0.1:80", True),
        ("127.8.8.8:80", True),
        ("localhost:80", True),
        ("[::1]:80", True),
        ("unix:/run/x", True),
        ("10.0.0.1:80", False),
        ("0.0.0.0:80", False),
        ("[::]:80", False),
        ("localhost.example:80", False),
        ("127.0.0.1.example:80", False),
    ],
)
def test_loopback(endpoint: str, local: bool) -> None:
    assert is_loopback(endpoint) is local


def refusal(attempt: Callable[[], object]) -> ControlError:
    with pytest.raises(ControlError) as caught:
        attempt()
    return caught.value


async def test_plaintext_beyond_loopback_is_refused_everywhere() -> None:
    server = make_server()
    for attempt in (
        lambda: bind(server, "0.0.0.0:0"),
        lambda: bind(server, "[::]:0", Security()),
        lambda: Telemetry("t").serve("0.0.0.0:0").__enter__(),
        lambda: dial("10.0.0.1:7000"),
        lambda: Line("10.0.0.1:7000"),
    ):
        error = refusal(attempt)
        assert error.reason is Reason.INSECURE_TRANSPORT
        assert "--insecure" in error.message
    assert bind(server, "0.0.0.0:0", Security(insecure=True)) > 0
    await dial("10.0.0.1:7000", Security(insecure=True)).close(None)


@pytest.mark.parametrize("listen", ["127.0.0.1:99999", "127.0.0.1:x", "127.0.0.1:", "localhost"])
def test_ports_that_there_are_not(listen: str) -> None:
    """GRPC would listen on 34463 for the first, and nobody would find it."""
    error = refusal(lambda: bind(make_server(), listen))
    assert error.reason is Reason.CONFIGURATION_INVALID
    assert error.message == f"expected HOST:PORT, got {listen!r}"


@pytest.mark.parametrize("names", [("a", "", ""), ("", "b", "c"), ("a", "b", "")])
def test_some_tls_files_are_none(names: tuple[str, str, str]) -> None:
    assert refusal(lambda: TlsFiles.named(*names)).reason is Reason.CONFIGURATION_INVALID
    assert TlsFiles.named("", "", "") is None


def test_a_certificate_that_has_run_out_is_refused_at_start(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Authority.create(tmp_path).issue("a", LOOPBACK, days=1)
    tls = files(tmp_path, "a")
    tls.checked()

    class Later(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Later:
            return cls.fromtimestamp(super().now(tz).timestamp() + 2 * 86_400, tz)

    monkeypatch.setattr(datetime, "datetime", Later)
    error = refusal(tls.checked)
    assert error.reason is Reason.CONFIGURATION_INVALID
    assert "valid from" in error.message
    assert "issue it anew" in error.message


async def test_a_line_is_dialed_anew_when_its_files_change(tmp_path: pathlib.Path) -> None:
    authority = Authority.create(tmp_path)
    authority.issue("a", LOOPBACK)
    line = Line("127.0.0.1:1", Security(files(tmp_path, "a")))
    first = line.channel
    assert line.channel is first
    # A pair of which one half is there yet is left alone.
    (tmp_path / "a.key").write_bytes((tmp_path / "ca.key").read_bytes())
    assert line.channel is first
    made: list[object] = []

    def service(channel: object) -> object:
        made.append(channel)
        return channel

    assert line.stub(service) is line.stub(service) is first
    authority.issue("a", LOOPBACK)
    second = line.channel
    assert second is not first
    assert line.stub(service) is second
    assert made == [first, second]
    await line.close()


async def test_metrics_beyond_loopback_are_for_who_has_a_certificate(
    tmp_path: pathlib.Path,
) -> None:
    authority = Authority.create(tmp_path)
    authority.issue("server", LOOPBACK)
    authority.issue("prometheus")
    ours = files(tmp_path, "prometheus")
    telemetry = Telemetry("t")
    security = Security(files(tmp_path, "server"))

    def scrape(port: int, context: ssl.SSLContext) -> str:
        with urllib.request.urlopen(f"https://127.0.0.1:{port}/metrics", context=context) as page:
            return str(page.read(), "ascii")

    with telemetry.serve("0.0.0.0:0", security) as port:
        trusting = client_context(ours)
        text = await asyncio.to_thread(scrape, port, trusting)
        assert "meshnet_t_calls_total" in text
        with pytest.raises((urllib.error.URLError, ssl.SSLError, ConnectionError)):
            await asyncio.to_thread(scrape, port, client_context(ours, nameless=True))
        # Who connects and says nothing keeps nobody out.
        _, silent = await asyncio.open_connection("127.0.0.1", port)
        before = await asyncio.to_thread(shown_serial, f"127.0.0.1:{port}", trusting)
        newer = authority.rotate()
        newer.issue("server", LOOPBACK)
        newer.issue("prometheus")
        newer.retire()
        with pytest.raises((urllib.error.URLError, ssl.SSLError, ConnectionError)):
            await asyncio.to_thread(scrape, port, trusting)
        renewed = client_context(ours)
        assert await asyncio.to_thread(shown_serial, f"127.0.0.1:{port}", renewed) != before
        assert "meshnet_t_calls_total" in await asyncio.to_thread(scrape, port, renewed)
        silent.close()
        with contextlib.suppress(ConnectionError):
            await silent.wait_closed()
