"""Progress for people, on stderr, so that stdout stays a program's result.

A terminal gets bars that appear only for what takes longer than a moment; anything else (a log, a
pipe) gets a line once such a thing has taken a moment, and how far it is now and then.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import rich.console
import rich.progress

__all__ = ["bytes_bar", "counting_bar", "growing_bar", "say", "working"]

_PATIENCE_SECONDS = 0.5
_LINE_SECONDS = 10.0


def _console() -> rich.console.Console:
    # Made anew: whoever captures sys.stderr (a test) gets what is written from then on.
    return rich.console.Console(file=sys.stderr, highlight=False)


def say(message: str) -> None:
    """One line."""
    _console().print(message, markup=False, soft_wrap=True)


@contextlib.contextmanager
def growing_bar(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar for a total in bytes; the function given takes how many there are by now."""
    with _bar(
        what,
        total_bytes,
        f"{total_bytes / 1e6:.0f} MB",
        [rich.progress.DownloadColumn(), rich.progress.TransferSpeedColumn()],
    ) as show:
        yield show


@contextlib.contextmanager
def counting_bar(what: str, total: int, of: str) -> Iterator[Callable[[int], None]]:
    """A bar for a number `of` tokens, say; the function given takes how many there are by now."""
    with _bar(what, total, f"{total} {of}", [rich.progress.MofNCompleteColumn()]) as show:
        yield show


@contextlib.contextmanager
def _bar(
    what: str, total: int, total_text: str, columns: Sequence[rich.progress.ProgressColumn]
) -> Iterator[Callable[[int], None]]:
    console = _console()
    if not console.is_terminal:
        due = time.monotonic() + _PATIENCE_SECONDS + _LINE_SECONDS

        def show_line(done: int) -> None:
            nonlocal due
            now = time.monotonic()
            if now >= due:
                due = now + _LINE_SECONDS
                say(f"{what} ({total_text}): {min(done, total) / max(total, 1):.0%}")

        with _a_line_soon(f"{what} ({total_text}) ..."):
            yield show_line
        return
    with rich.progress.Progress(
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        *columns,
        console=console,
        transient=True,
    ) as bar:
        task = bar.add_task(what, total=total)

        def show_bar(done: int) -> None:
            bar.update(task, completed=min(done, total))

        yield show_bar


@contextlib.contextmanager
def _a_line_soon(line: str) -> Iterator[None]:
    """Says it if the block takes longer than a moment."""
    if not _PATIENCE_SECONDS:
        say(line)
        yield
        return
    timer = threading.Timer(_PATIENCE_SECONDS, say, (line,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def bytes_bar(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar for a total in bytes; the function given takes how many more there are."""
    done = 0
    with growing_bar(what, total_bytes) as show:

        def advance(more: int) -> None:
            nonlocal done
            done += more
            show(done)

        yield advance


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """A spinner with the seconds gone by, for work of unknown length."""
    console = _console()
    if not console.is_terminal:
        with _a_line_soon(f"{what} ..."):
            yield
        return
    with rich.progress.Progress(
        rich.progress.SpinnerColumn(),
        rich.progress.TextColumn("{task.description}"),
        rich.progress.TimeElapsedColumn(),
        console=console,
        transient=True,
    ) as bar:
        bar.add_task(what, total=None)
        yield
