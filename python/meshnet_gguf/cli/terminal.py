"""What commands show to people on stdout.

    show("m, 8 layers: served", table(["layers", "machine"], rows), "that is all")

Names and values come from files and from other machines: nothing in them steers the terminal, and
none is read as markup. Nothing is cut off either: without a terminal a table is as wide as it is,
and where a terminal is too narrow for its words each row is shown as lines of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Sequence

import rich.box
import rich.console
import rich.measure
import rich.table
import rich.text

__all__ = ["console", "line", "show", "table"]

_BOUNDLESS = 1 << 16


def console() -> rich.console.Console:
    """Stdout."""
    found = rich.console.Console(file=sys.stdout, highlight=False, soft_wrap=True)
    if not found.is_terminal:
        found.width = _BOUNDLESS
    return found


def line(text: str, style: str = "") -> rich.text.Text:
    """Text of which nothing is an instruction to the terminal."""
    return rich.text.Text("".join(char if char.isprintable() else " " for char in text), style)


def table(
    titles: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Collection[str] = ()
) -> rich.console.RenderableType:
    """A table, of which the columns titled so in `numbers` are aligned as numbers."""
    return _Table(titles, list(rows), numbers)


def show(*parts: rich.console.RenderableType) -> None:
    """Writes one after the other; a string is a line."""
    where = console()
    for part in parts:
        where.print(line(part) if isinstance(part, str) else part)


class _Table:
    def __init__(
        self, titles: Sequence[str], rows: Sequence[Sequence[str]], numbers: Collection[str]
    ) -> None:
        self._titles, self._rows, self._numbers = titles, rows, numbers

    def __rich_console__(
        self, where: rich.console.Console, options: rich.console.ConsoleOptions
    ) -> Iterator[rich.console.RenderableType]:
        made = rich.table.Table(box=rich.box.SIMPLE)
        for title in self._titles:
            made.add_column(line(title), justify="right" if title in self._numbers else "left")
        for row in self._rows:
            made.add_row(*map(line, row))
        boundless = options.update(max_width=_BOUNDLESS)
        if rich.measure.Measurement.get(where, boundless, made).minimum <= options.max_width:
            yield made
            return
        width = max(map(len, self._titles))
        for row in self._rows:
            yield line("")
            for title, value in zip(self._titles, row, strict=True):
                if value:
                    yield line(f"{title:{width}}  {value}")
        yield line("")
