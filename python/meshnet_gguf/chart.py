"""The picture beside the numbers: a small SVG, one panel for each question.

    svg = render(rows, title="...")                     # grouped bars of systems
    svg = render_lines([("ms/token", [Line("chain", points)])], title="...")
    svg = render_bars([("relay", 274.0, "MB/s", 200.0, True)], title="...")
    svg = render_groups([("decode, tokens/s", [("a", 90.0, 80.0, 95.0)])], title="...")

No drawing library: the file depends on nothing but the rows, so equal rows give equal bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

__all__ = ["Figure", "Line", "render", "render_bars", "render_groups", "render_lines"]

Row = dict[str, Any]

_SYSTEMS = ("whole", "rpc-default", "rpc-tuned", "meshnet")
_COLOURS = {
    "whole": "#7f7f7f",
    "rpc-default": "#f0b27a",
    "rpc-tuned": "#d35400",
    "meshnet": "#1f6fb2",
}
_LINE_COLOURS = ("#1f6fb2", "#d35400", "#7f7f7f", "#2e8b57", "#8e44ad", "#b7950b")
_PANEL_WIDTH = 440
_PANEL_HEIGHT = 250
_PLOT_HEIGHT = 170
_LEFT = 52
_TOP = 34
_HEADER = 56


def _number(value: float) -> str:
    """At most one digit after the point, none above 100, no trailing zero."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}".removesuffix(".0")


def _ceiling(value: float) -> float:
    """The next of 1, 2, 2.5, 5, 10 times a power of ten: where an axis ends."""
    step = 1.0
    while step * 10 <= value:
        step *= 10
    while step > value:
        step /= 10
    for factor in (1, 2, 2.5, 5, 10):
        if step * factor >= value:
            return step * factor
    return step * 10


def _text(x: float, y: float, text: str, *, anchor: str = "middle", size: int = 11) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">'
        f"{escape(text)}</text>"
    )


def _bar(
    x: float, width: float, base: float, scale: float, figure: Row, system: str, colour: str
) -> list[str]:
    height = figure["median"] * scale
    middle = x + width / 2
    low, high = base - figure["min"] * scale, base - figure["max"] * scale
    return [
        f'<rect x="{x:.1f}" y="{base - height:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'fill="{colour}"><title>{escape(system)}: {_number(figure["median"])} '
        f"({_number(figure['min'])} to {_number(figure['max'])})</title></rect>",
        f'<line x1="{middle:.1f}" y1="{low:.1f}" x2="{middle:.1f}" y2="{high:.1f}" '
        'stroke="#222222" stroke-width="1"/>',
        _text(middle, high - 3, _number(figure["median"]), size=9),
    ]


def _axis(x: float, y: float, title: str, top: float) -> list[str]:
    base = y + _TOP + _PLOT_HEIGHT
    parts = [_text(x + 8, y + 18, title, anchor="start", size=13)]
    for step in range(5):
        level = top * step / 4
        line = base - level * _PLOT_HEIGHT / top
        parts.append(
            f'<line x1="{x + _LEFT:.1f}" y1="{line:.1f}" x2="{x + _PANEL_WIDTH - 16:.1f}" '
            f'y2="{line:.1f}" stroke="#dddddd" stroke-width="1"/>'
        )
        parts.append(_text(x + _LEFT - 6, line + 4, _number(level), anchor="end", size=10))
    return parts


def _panel(
    x: float,
    y: float,
    title: str,
    groups: Sequence[tuple[str, Sequence[Row]]],
    metric: str,
) -> list[str]:
    figures = [row[metric] for _, rows in groups for row in rows]
    top = _ceiling(max((float(figure["max"]) for figure in figures), default=1.0) or 1.0)
    scale = _PLOT_HEIGHT / top
    base = y + _TOP + _PLOT_HEIGHT
    right = x + _PANEL_WIDTH - 16
    parts = _axis(x, y, title, top)
    group_width = (right - x - _LEFT) / max(1, len(groups))
    for number, (label, rows) in enumerate(groups):
        left = x + _LEFT + number * group_width
        width = group_width * 0.84 / max(1, len(rows))
        for index, row in enumerate(rows):
            bar_left = left + group_width * 0.08 + index * width
            system = row["system"]
            colour = _COLOURS[system]
            parts += _bar(bar_left, width * 0.9, base, scale, row[metric], system, colour)
        parts.append(_text(left + group_width / 2, base + 16, label))
    return parts


def _grouped(
    rows: Sequence[Row],
    keep: Callable[[Row], bool],
    key: str,
    label: Callable[[Any], str],
) -> list[tuple[str, list[Row]]]:
    kept = [row for row in rows if keep(row)]
    values = sorted({row[key] for row in kept})
    order = {system: number for number, system in enumerate(_SYSTEMS)}
    return [
        (
            label(value),
            sorted(
                (row for row in kept if row[key] == value), key=lambda row: order[row["system"]]
            ),
        )
        for value in values
    ]


def _round_trip(value: float) -> str:
    return "direct" if value == 0 else f"{value:g} ms"


def _sessions(value: int) -> str:
    return "1 session" if value == 1 else f"{value} sessions"


def _opening(panels: int, title: str) -> list[str]:
    width = 2 * _PANEL_WIDTH
    height = _HEADER + (panels + 1) // 2 * _PANEL_HEIGHT
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" fill="#222222">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(12, 22, title, anchor="start", size=15),
    ]


def render(rows: Sequence[Row], *, title: str) -> str:
    """The SVG text. Panels without rows are left out."""
    farthest = max((row["rtt_ms"] for row in rows), default=0)
    panels = [
        (
            "Decode, one session, tokens/s",
            _grouped(rows, lambda row: row["sessions"] == 1, "rtt_ms", _round_trip),
            "decode_tokens_per_s",
        ),
        (
            "Prompt of one session, tokens/s",
            _grouped(rows, lambda row: row["sessions"] == 1, "rtt_ms", _round_trip),
            "prompt_tokens_per_s",
        ),
        (
            "Decode, all sessions together, direct, tokens/s",
            _grouped(rows, lambda row: row["rtt_ms"] == 0, "sessions", _sessions),
            "decode_tokens_per_s",
        ),
    ]
    if farthest > 0:
        panels.append(
            (
                f"Decode, all sessions together, {farthest:g} ms, tokens/s",
                _grouped(rows, lambda row: row["rtt_ms"] == farthest, "sessions", _sessions),
                "decode_tokens_per_s",
            )
        )
    panels = [panel for panel in panels if panel[1]]
    parts = _opening(len(panels), title)
    for number, system in enumerate(_SYSTEMS):
        x = 12 + number * 110
        parts.append(f'<rect x="{x}" y="34" width="12" height="12" fill="{_COLOURS[system]}"/>')
        parts.append(_text(x + 17, 44, system, anchor="start"))
    for number, (panel_title, groups, metric) in enumerate(panels):
        x = number % 2 * _PANEL_WIDTH
        y = _HEADER + number // 2 * _PANEL_HEIGHT
        parts += _panel(x, y, panel_title, groups, metric)
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


@dataclass(frozen=True)
class Line:
    """One line of a panel: (x, y) points by ascending x >= 0, y >= 0."""

    name: str
    points: Sequence[tuple[float, float]]


def render_lines(panels: Sequence[tuple[str, Sequence[Line]]], *, title: str) -> str:
    """The SVG text; a panel is its title and its lines."""
    parts = _opening(len(panels), title)
    for number, (panel_title, lines) in enumerate(panels):
        x = number % 2 * _PANEL_WIDTH
        y = _HEADER + number // 2 * _PANEL_HEIGHT
        points = [point for line in lines for point in line.points]
        top = _ceiling(max((value for _, value in points), default=1.0) or 1.0)
        end = max((at for at, _ in points), default=1.0) or 1.0
        base = y + _TOP + _PLOT_HEIGHT
        across = (_PANEL_WIDTH - 16 - _LEFT) / end
        parts += _axis(x, y, panel_title, top)
        for at in sorted({at for at, _ in points}):
            parts.append(_text(x + _LEFT + at * across, base + 16, f"{at:g}", size=10))
        for index, line in enumerate(lines):
            colour = _LINE_COLOURS[index % len(_LINE_COLOURS)]
            path = " ".join(
                f"{x + _LEFT + at * across:.1f},{base - value * _PLOT_HEIGHT / top:.1f}"
                for at, value in line.points
            )
            parts.append(
                f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2">'
                f"<title>{escape(line.name)}</title></polyline>"
            )
            legend = x + _LEFT + 8 + index * 100
            parts.append(
                f'<rect x="{legend}" y="{base + 24}" width="10" height="10" fill="{colour}"/>'
            )
            parts.append(_text(legend + 14, base + 33, line.name, anchor="start", size=10))
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


# What is shown, its median, least and most.
Figure = tuple[str, float, float, float]


def render_groups(panels: Sequence[tuple[str, Sequence[Figure]]], *, title: str) -> str:
    """The SVG text; a panel is its title and a bar for each of its figures, side by side."""
    parts = _opening(len(panels), title)
    for number, (panel_title, figures) in enumerate(panels):
        x = number % 2 * _PANEL_WIDTH
        y = _HEADER + number // 2 * _PANEL_HEIGHT
        top = _ceiling(max((most for _, _, _, most in figures), default=1.0) or 1.0)
        base = y + _TOP + _PLOT_HEIGHT
        parts += _axis(x, y, panel_title, top)
        width = (_PANEL_WIDTH - 16 - _LEFT) / max(1, len(figures))
        for index, (name, median, least, most) in enumerate(figures):
            left = x + _LEFT + index * width
            row = {"median": median, "min": least, "max": most}
            colour = _LINE_COLOURS[index % len(_LINE_COLOURS)]
            scale = _PLOT_HEIGHT / top
            parts += _bar(left + width * 0.2, width * 0.6, base, scale, row, name, colour)
            parts.append(_text(left + width / 2, base + 16, name))
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def render_bars(metrics: Sequence[tuple[str, float, str, float, bool]], *, title: str) -> str:
    """The SVG text: each metric (name, value, unit, bar, holds) against its bar.

    All bars lie on one line, so that a metric's length is its value in bars; what is longer than
    three bars is cut off, and its figure says how long it is.
    """
    width, left, row, longest = 2 * _PANEL_WIDTH, 330, 26, 3.0
    height = _HEADER + row * len(metrics) + 12
    unit = (width - left - 110) / longest
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" fill="#222222">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(12, 22, title, anchor="start", size=15),
        _text(left + unit, _HEADER - 8, "bar"),
    ]
    for number, (name, value, of, bar, holds) in enumerate(metrics):
        y = _HEADER + row * number
        length = min(value / bar, longest) * unit if bar else 0.0
        colour = _COLOURS["meshnet"] if holds else _COLOURS["rpc-tuned"]
        parts += [
            _text(left - 8, y + 15, name, anchor="end"),
            f'<rect x="{left}" y="{y + 3}" width="{length:.1f}" height="{row - 8}" '
            f'fill="{colour}"><title>{escape(name)}: {value:g} {escape(of)}, bar {bar:g}'
            "</title></rect>",
            _text(left + length + 6, y + 15, f"{_number(value)} {of}", anchor="start", size=10),
        ]
    x = left + unit
    parts += [
        f'<line x1="{x:.1f}" y1="{_HEADER}" x2="{x:.1f}" y2="{height - 8}" stroke="#222222" '
        'stroke-width="1" stroke-dasharray="4 3"/>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"
