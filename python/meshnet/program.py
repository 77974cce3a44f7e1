"""What programs that serve until a signal have in common: their log, their end, their exit code.

async def run(settings) -> None:
    ended = end_on_signals()
    ...
    log("listening", address=endpoint)
    await ended.wait()

def main(argv):
    return serve_until_told(argv, settings_from_flags, run)
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import TypeVar

from absl import app

from meshnet.errors import ControlError

__all__ = ["end_on_signals", "log", "log_listening", "serve_until_told"]

_Settings = TypeVar("_Settings")


def log(event: str, **fields: object) -> None:
    """A line of JSON on stderr."""
    print(json.dumps({"event": event, **fields}), file=sys.stderr, flush=True)


def log_listening(serving: Callable[..., None] | None = None, **fields: object) -> None:
    """That a program serves, and where: in the log, and to `serving` if somebody waits for it."""
    log("listening", **fields)
    if serving is not None:
        serving(**fields)


def end_on_signals() -> asyncio.Event:
    """Set by SIGTERM and SIGINT, which end nothing by themselves any more."""
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    return ended


def serve_until_told(
    argv: Sequence[str],
    settings: Callable[[], _Settings],
    run: Callable[[_Settings], Coroutine[None, None, None]],
) -> int:
    """Runs a program that takes flags only; its exit code: 1, with a last line, on ControlError."""
    if len(argv) > 1:
        raise app.UsageError(f"expected flags only, got {argv[1]}")
    try:
        asyncio.run(run(settings()))
    except ControlError as error:
        log("failed", reason=error.reason.name, message=error.message)
        return 1
    return 0
