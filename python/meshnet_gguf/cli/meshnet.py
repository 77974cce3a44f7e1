"""The program meshnet; main.py says what it takes.

Ctrl-C ends it without a word while what a command needs is still being loaded, a second or two.
"""

from __future__ import annotations

import importlib
import signal
import sys

__all__ = ["run"]


def run() -> None:
    """The program."""
    usual = signal.getsignal(signal.SIGINT)
    # A shell has it ignored for what it runs in the background: that stays.
    if usual is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    main = importlib.import_module("meshnet_gguf.cli.main").main
    sys.exit(main(sys.argv, lambda: signal.signal(signal.SIGINT, usual)))


if __name__ == "__main__":
    run()
