"""The tracker as a program: `python -m meshnet.tracker_program --listen=... --database=...`

Its flags, and serving until a signal.
"""

from __future__ import annotations

import asyncio
import pathlib
from collections.abc import Callable, Sequence

from absl import flags

from meshnet import command_line
from meshnet.clock import SystemClock
from meshnet.collection import collect_in_small_steps
from meshnet.program import end_on_signals, log, log_listening, serve_until_told
from meshnet.signing import SigningKey, TrustedKeys
from meshnet.tasks import cancel
from meshnet.tracker import TrackerOptions
from meshnet.tracker_server import TrackerServer, TrackerSettings
from meshnet.transport import Security, TlsFiles

__all__ = ["run", "settings_from_flags"]

_LISTEN = flags.DEFINE_string("listen", "127.0.0.1:7100", "Address to serve on, HOST:PORT.")
_DATABASE = flags.DEFINE_string(
    "database", "sqlite:///tracker.db", "sqlite:///FILE, or postgresql://USER@HOST/NAME."
)
_METRICS = flags.DEFINE_string("metrics_listen", "", "Where to serve /metrics, HOST:PORT.")
_ID = flags.DEFINE_string("tracker_id", "", "This tracker's name; the default is a new one.")
_LEASE = flags.DEFINE_integer("lease_ms", 10_000, "Life of a registration without a heartbeat.")
_TTL = flags.DEFINE_integer("session_ttl_ms", 300_000, "Life of an untouched route session.")
_KEEP = flags.DEFINE_integer(
    "keep_ms", 86_400_000, "How long to keep workers and sessions that are over; receipts stay."
)
_TRUSTED = flags.DEFINE_multi_string(
    "trusted_key", [], "PEM file of public keys that count; repeatable."
)
_TOKEN_KEY = flags.DEFINE_string("token_key", "", "PEM file of the key that signs route tokens.")
_ADMIT_DARK = flags.DEFINE_bool(
    "admit_dark", False, "Route lanes that no record certifies; every answer will say so."
)
_CERT = flags.DEFINE_string("tls_cert", "", "PEM file: certificate shown to the mesh.")
_KEY = flags.DEFINE_string("tls_key", "", "PEM file: its private key.")
_CA = flags.DEFINE_string("tls_ca", "", "PEM file: authorities of the mesh.")
_INSECURE = flags.DEFINE_bool("insecure", False, "Plaintext beyond loopback, in trusted networks.")


def settings_from_flags() -> TrackerSettings:
    """What the command line says. Raises ControlError (CONFIGURATION_INVALID)."""
    tls = TlsFiles.named(_CERT.value, _KEY.value, _CA.value)
    options = TrackerOptions(
        lease_ms=_LEASE.value,
        session_ttl_ms=_TTL.value,
        keep_ms=_KEEP.value,
        admit_dark=_ADMIT_DARK.value,
        trusted=TrustedKeys.load(pathlib.Path(name) for name in _TRUSTED.value),
        token_key=SigningKey.load(pathlib.Path(_TOKEN_KEY.value)) if _TOKEN_KEY.value else None,
    )
    return TrackerSettings(
        database=_DATABASE.value,
        listen=_LISTEN.value,
        metrics_listen=_METRICS.value,
        security=Security(tls, _INSECURE.value),
        tracker_id=_ID.value,
        options=options,
    )


async def run(settings: TrackerSettings, serving: Callable[..., None] | None = None) -> None:
    """Serves until SIGTERM or SIGINT; `serving` is told where, as the log is."""
    ended = end_on_signals()
    async with TrackerServer.start(settings) as server:
        if settings.options.admit_dark:
            log("warning", message="dark lanes are admitted: routes may be uncertified")
        log_listening(serving, address=server.endpoint, metrics_port=server.metrics_port)
        collecting = asyncio.create_task(collect_in_small_steps(SystemClock()))
        await ended.wait()
        await cancel(collecting)
        log("stopping")


def main(argv: Sequence[str]) -> int:
    """The program."""
    return serve_until_told(argv, settings_from_flags, run)


if __name__ == "__main__":
    command_line.run(main)
