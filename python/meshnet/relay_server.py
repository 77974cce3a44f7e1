"""The relay behind gRPC: `python -m meshnet.relay_server --listen=...`

async with serve(RelaySettings()) as (endpoint, metrics_port): ...
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from absl import flags

from meshnet import command_line
from meshnet.program import end_on_signals, log_listening, serve_until_told
from meshnet.relay import CallRecord, Relay, RelayOptions
from meshnet.telemetry import Telemetry
from meshnet.transport import Security, TlsFiles, bind, make_server

__all__ = ["RelaySettings", "run", "serve", "settings_from_flags"]

_FAREWELL_SECONDS = 2.0


@dataclass(frozen=True)
class RelaySettings:
    """What one relay process is started with."""

    listen: str = "127.0.0.1:0"
    metrics_listen: str = ""
    security: Security = Security()  # noqa: RUF009 - immutable
    options: RelayOptions = field(default_factory=RelayOptions)
    # Gets every call that is over; None: a line of JSON on stderr.
    record: Callable[[CallRecord], None] | None = None


@contextlib.asynccontextmanager
async def serve(settings: RelaySettings) -> AsyncIterator[tuple[str, int]]:
    """Serves while the block runs; gives endpoint and port of the metrics. Raises ControlError."""
    async with contextlib.AsyncExitStack() as stack:
        telemetry = Telemetry("relay")
        relay = Relay(telemetry, settings.options, settings.record)
        server = make_server()
        server.add_generic_rpc_handlers((relay.handler(),))
        port = bind(server, settings.listen, settings.security)
        metrics_port = 0
        if settings.metrics_listen:
            metrics_port = stack.enter_context(
                telemetry.serve(settings.metrics_listen, settings.security)
            )
        await server.start()
        stack.push_async_callback(server.stop, _FAREWELL_SECONDS)
        yield f"{settings.listen.rpartition(':')[0]}:{port}", metrics_port


_LISTEN = flags.DEFINE_string("listen", "127.0.0.1:7200", "Address to serve on, HOST:PORT.")
_METRICS = flags.DEFINE_string("metrics_listen", "", "Where to serve /metrics, HOST:PORT.")
_CERT = flags.DEFINE_string("tls_cert", "", "PEM file: certificate shown to the mesh.")
_KEY = flags.DEFINE_string("tls_key", "", "PEM file: its private key.")
_CA = flags.DEFINE_string("tls_ca", "", "PEM file: authorities of the mesh.")
_INSECURE = flags.DEFINE_bool("insecure", False, "Plaintext beyond loopback, in trusted networks.")


def settings_from_flags() -> RelaySettings:
    """What the command line says. Raises ControlError (CONFIGURATION_INVALID)."""
    tls = TlsFiles.named(_CERT.value, _KEY.value, _CA.value)
    return RelaySettings(
        listen=_LISTEN.value,
        metrics_listen=_METRICS.value,
        security=Security(tls, _INSECURE.value),
    )


async def run(settings: RelaySettings, serving: Callable[..., None] | None = None) -> None:
    """Serves until SIGTERM or SIGINT; `serving` is told where, as the log is."""
    ended = end_on_signals()
    async with serve(settings) as (endpoint, metrics_port):
        log_listening(serving, address=endpoint, metrics_port=metrics_port)
        await ended.wait()


def main(argv: Sequence[str]) -> int:
    """The program."""
    return serve_until_told(argv, settings_from_flags, run)


if __name__ == "__main__":
    command_line.run(main)
