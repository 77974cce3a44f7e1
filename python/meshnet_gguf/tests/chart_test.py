from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Any

import pytest
from meshnet_gguf.chart import Line, render, render_bars, render_lines

SVG = "{http://www.w3.org/2000/svg}"


def row(system: str, rtt_ms: float, sessions: int, decode: float, prompt: float) -> dict[str, Any]:
    return {
        "system": system,
        "rtt_ms": rtt_ms,
        "sessions": sessions,
        "decode_tokens_per_s": {"median": decode, "min": decode / 2, "max": decode * 1.25},
        "prompt_tokens_per_s": {"median": prompt, "min": prompt, "max": prompt},
    }


ROWS = [
    row("meshnet", 0, 1, 80, 300),
    row("whole", 0, 1, 100, 320),
    row("meshnet", 40, 1, 20, 250),
    row("meshnet", 40, 4, 64, 250),
]


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(svg).iter(f"{SVG}text")]


def bars(svg: str) -> list[tuple[str, float, float]]:
    """(title, y, height) of every bar."""
    return [
        (title.text or "", float(rect.attrib["y"]), float(rect.attrib["height"]))
        for rect in ET.fromstring(svg).iter(f"{SVG}rect")
        for title in rect.iter(f"{SVG}title")
    ]


def test_every_panel_shows_its_rows_in_the_systems_order() -> None:
    assert [title for title, _, _ in bars(render(ROWS, title="t"))] == [
        # Decode of one session by round trip.
        "whole: 100 (50 to 125)",
        "meshnet: 80 (40 to 100)",
        "meshnet: 20 (10 to 25)",
        # Its prompt speed.
        "whole: 320 (320 to 320)",
        "meshnet: 300 (300 to 300)",
        "meshnet: 250 (250 to 250)",
        # Sessions together, direct and far.
        "whole: 100 (50 to 125)",
        "meshnet: 80 (40 to 100)",
        "meshnet: 20 (10 to 25)",
        "meshnet: 64 (32 to 80)",
    ]


def test_bars_are_to_scale() -> None:
    # The highest whisker of the first panel is 125, so its axis of 170 pixels ends at 200; it
    # stands on y = 56 + 34 + 170.
    _, y, height = bars(render(ROWS, title="t"))[0]
    assert (y, height) == (260 - 85.0, 85.0)
    _, y, height = bars(render(ROWS, title="t"))[1]
    assert (y, height) == (260 - 68.0, 68.0)


def test_groups_and_axes_are_labelled() -> None:
    found = texts(render(ROWS, title="a <b> & c"))
    assert found[0] == "a <b> & c"
    assert found[1:5] == ["whole", "rpc-default", "rpc-tuned", "meshnet"]
    assert found[5:11] == ["Decode, one session, tokens/s", "0", "50", "100", "150", "200"]
    assert "direct" in found
    assert "40 ms" in found
    assert "4 sessions" in found
    assert "Decode, all sessions together, 40 ms, tokens/s" in found


def test_without_far_rows_there_is_no_panel_for_them() -> None:
    found = texts(render(ROWS[:2], title="t"))
    assert sum("tokens/s" in text for text in found) == 3


def test_no_rows_make_an_empty_picture() -> None:
    assert bars(render([], title="t")) == []


def test_equal_rows_give_equal_bytes() -> None:
    assert render(ROWS, title="t") == render(list(ROWS), title="t")


@pytest.mark.parametrize(
    ("highest", "top"), [(0.4, "0.5"), (3.0, "5"), (80.0, "100"), (101, "200")]
)
def test_an_axis_ends_at_a_round_number(highest: float, top: str) -> None:
    svg = render([row("whole", 0, 1, highest / 1.25, 1)], title="t")
    axis = texts(svg)
    first_panel = axis.index("Decode, one session, tokens/s")
    assert axis[first_panel + 5] == top


def test_lines_lie_where_their_values_are() -> None:
    svg = render_lines(
        [("ms", [Line("a<b", [(0, 0), (50, 5), (100, 10)])]), ("MiB", [])], title="x & y"
    )
    root = ET.fromstring(svg)
    (line,) = root.iter(f"{SVG}polyline")
    points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    assert points == [(52, 260), (238, 175), (424, 90)]
    assert [title.text for title in line.iter(f"{SVG}title")] == ["a<b"]
    assert {"x & y", "ms", "MiB", "a<b", "50", "100"} <= set(texts(svg))


def test_metrics_are_drawn_in_units_of_their_bars() -> None:
    rows = [("a", 100.0, "1/s", 200.0, False), ("b", 1000.0, "1/s", 200.0, True)]
    svg = render_bars(rows, title="t")
    # From x = 330, three bars long at most; a bar is a third of 880 - 330 - 110 pixels.
    widths = [
        float(rect.attrib["width"])
        for rect in ET.fromstring(svg).iter(f"{SVG}rect")
        if list(rect.iter(f"{SVG}title"))
    ]
    assert widths == [73.3, 440.0]
    assert {"a", "b", "100 1/s", "1000 1/s", "bar", "t"} <= set(texts(svg))
