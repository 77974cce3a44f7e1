"""How tables and lines look: in a terminal, in a narrow one, in a pipe."""

import io
import sys

import pytest
import rich.console
from meshnet_gguf.cli import terminal

TITLES = ("machine", "where", "MB")
ROWS = [("attic", "/var/tmp/" + "x" * 90, "98"), ("[bold]cellar", "\x1b[31m[/nothing]\n", "")]
TABLE = terminal.table(TITLES, ROWS, numbers=("MB",))


def shown_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> str:
    terminal.show("a [line] of\x07 words", TABLE)
    return capsys.readouterr().out


def on_a_terminal(width: int) -> list[str]:
    file = io.StringIO()
    console = rich.console.Console(
        file=file, force_terminal=True, color_system=None, width=width, soft_wrap=True
    )
    console.print(TABLE)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_a_pipe_gets_everything(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    lines = [line.rstrip() for line in shown_in_a_pipe(capsys).splitlines()]
    assert lines[0] == "a [line] of  words"
    assert lines[4].split() == ["attic", "/var/tmp/" + "x" * 90, "98"]
    assert lines[5].split() == ["[bold]cellar", "[31m[/nothing]"]


def test_a_wide_terminal() -> None:
    lines = on_a_terminal(130)
    assert lines[1].split() == ["machine", "where", "MB"]
    assert lines[3].split() == ["attic", "/var/tmp/" + "x" * 90, "98"]
    assert lines[4].split() == ["[bold]cellar", "[31m[/nothing]"]


def test_a_terminal_that_is_too_narrow_for_a_word() -> None:
    assert on_a_terminal(60) == [
        "",
        "machine  attic",
        "where    /var/tmp/" + "x" * 90,
        "MB       98",
        "",
        "machine  [bold]cellar",
        "where     [31m[/nothing]",
        "",
    ]


def test_stdout_is_looked_at_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    other = io.StringIO()
    monkeypatch.setattr(sys, "stdout", other)
    terminal.show("one")
    assert other.getvalue() == "one\n"
