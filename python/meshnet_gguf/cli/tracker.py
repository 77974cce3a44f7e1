"""Serves the tracker: who serves which part of which model, routes over them, and the ledger.

    meshnet tracker --listen 127.0.0.1:7100 --database sqlite:////var/lib/meshnet/tracker.db
    meshnet tracker --database postgresql://meshnet@db/meshnet --trusted-key certifier.pem.pub

Runs until SIGTERM or SIGINT; the log goes to stderr, one JSON object a line, and with --json the
address to stdout once it serves. Several trackers may share a PostgreSQL. Lanes without a signed
certification record are listed, and routed only with --admit-dark.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from absl import app
from meshnet import tracker_program

from meshnet_gguf.cli import output

__all__ = ["FLAG_MODULES", "run"]

FLAG_MODULES = (tracker_program.__name__,)


def run(arguments: Sequence[str]) -> int:
    """The command."""
    if arguments:
        raise app.UsageError(f"expected flags only, got {arguments[0]!r}")
    with output.control_errors():
        asyncio.run(tracker_program.run(tracker_program.settings_from_flags(), output.serving))
    return 0
