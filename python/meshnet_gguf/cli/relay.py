"""Serves the relay: joins the streams of peers that can only dial out, without looking into them.

    meshnet relay --listen 127.0.0.1:7200
    meshnet relay --listen 0.0.0.0:7200 --tls-cert me.pem --tls-key me.key --tls-ca fleet.pem

Runs until SIGTERM or SIGINT; the log goes to stderr, one JSON object a line, and with --json the
address to stdout once it serves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from absl import app
from meshnet import relay_server

from meshnet_gguf.cli import output

__all__ = ["FLAG_MODULES", "run"]

FLAG_MODULES = (relay_server.__name__,)


def run(arguments: Sequence[str]) -> int:
    """The command."""
    if arguments:
        raise app.UsageError(f"expected flags only, got {arguments[0]!r}")
    with output.control_errors():
        asyncio.run(relay_server.run(relay_server.settings_from_flags(), output.serving))
    return 0
