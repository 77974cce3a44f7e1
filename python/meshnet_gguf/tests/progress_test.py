"""What is said of work under way: on a terminal, in a log, and of work that is done at once."""

import contextlib
import os
import sys

import pytest
from meshnet_gguf import progress


def test_a_log_gets_a_line_and_then_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_PATIENCE_SECONDS", 0)
    with progress.bytes_bar("fetching m", 98_000_000) as advance:
        advance(49_000_000)
        monkeypatch.setattr(progress, "_LINE_SECONDS", 0)
    with progress.bytes_bar("reading m", 98_000_000) as advance:
        advance(24_500_000)
        advance(98_000_000)
    with progress.counting_bar("measuring m", 4, "times") as show:
        show(1)
    with progress.working("asking"):
        pass
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "fetching m (98 MB) ...",
        "reading m (98 MB) ...",
        "reading m (98 MB): 25%",
        "reading m (98 MB): 100%",
        "measuring m (4 times) ...",
        "measuring m (4 times): 25%",
        "asking ...",
    ]


def test_of_what_is_done_at_once_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_PATIENCE_SECONDS", 3600)
    with progress.working("asking"), progress.counting_bar("measuring m", 4, "times") as show:
        show(4)
    assert capsys.readouterr() == ("", "")


def written_to(terminal: int) -> str:
    """All that was written before its other end was closed."""
    parts: list[bytes] = []
    with open(terminal, "rb", buffering=0) as ours, contextlib.suppress(OSError):
        while part := ours.read(65536):
            parts.append(part)
    return b"".join(parts).decode()


def test_a_terminal_gets_a_bar_with_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with open(theirs, "w") as terminal:  # noqa: PTH123 - a descriptor
        monkeypatch.setattr(sys, "stderr", terminal)
        with progress.counting_bar("measuring m", 4, "times") as show:
            show(3)
    shown = written_to(ours)
    assert "measuring m" in shown
    assert "3/4" in shown
