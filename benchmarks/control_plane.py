"""Measures the control plane against its bars: tracker, relay and what else has a section.

    tools/bazel run //benchmarks:control_plane -- --json results.json
    tools/bazel run //benchmarks:control_plane -- --section relay

Writes {"metrics": [{name, value, unit, bar, holds}, ...]} to --json and a picture beside it (.svg).
Leave the machine alone while it runs. Exit status: 0; 1 when something failed; 3 with --check when
a bar is missed.

A new section is a module beside benchmarks/control/relay_section.py and a line in SECTIONS.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import pathlib
import platform
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from absl import app, flags
from meshnet import command_line
from meshnet.errors import ControlError
from meshnet_gguf.chart import render_bars
from meshnet_gguf.errors import MeshnetError

from benchmarks.control import chaos_section, provisioning_section, relay_section, tracker_section
from benchmarks.control.cores import reserve_core
from benchmarks.control.metrics import Metric, Section, Settings, say

SECTIONS: Mapping[str, Section] = {
    "tracker": tracker_section.measure,
    "relay": relay_section.measure,
    "provisioning": provisioning_section.measure,
    "chaos": chaos_section.measure,
}

_JSON = flags.DEFINE_string("json", None, "File for the results; the picture goes beside it (.svg)")
_SECTION = flags.DEFINE_multi_enum("section", [], list(SECTIONS), "Only this one; repeatable")
_QUICK = flags.DEFINE_bool("quick", False, "See that it works; the numbers say nothing")
_CHECK = flags.DEFINE_bool("check", False, "Exit status 3 when a bar is missed")


async def _run(names: Sequence[str], settings: Settings) -> list[Metric]:
    found = []
    for name in names:
        say(f"section {name}")
        async for metric in SECTIONS[name](settings):
            say(_line(metric))
            found.append(metric)
    return found


def _line(metric: Metric) -> str:
    bar = "" if metric.bar is None else f"  {metric.bar}: {'holds' if metric.holds else 'MISSED'}"
    return f"{metric.name:42} {metric.value:>12.3f} {metric.unit:7}{bar}"


def _results(metrics: Sequence[Metric], names: Sequence[str], *, quick: bool) -> dict[str, Any]:
    return {
        "benchmark": "control_plane",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "sections": list(names),
        "quick": quick,
        "metrics": [metric.to_json() for metric in metrics],
    }


def main(argv: Sequence[str]) -> int:
    """The command."""
    if len(argv) > 1:
        raise app.UsageError(f"expected flags only, got {argv[1:]}")
    names = _SECTION.value or list(SECTIONS)
    with tempfile.TemporaryDirectory(prefix="control-") as folder:
        try:
            settings = Settings(pathlib.Path(folder), reserve_core(), quick=_QUICK.value)
            metrics = asyncio.run(_run(names, settings))
        except (ControlError, MeshnetError) as error:
            print(f"control_plane: {error}", file=sys.stderr)
            return 1
    print("\n".join(_line(metric) for metric in metrics))
    if _JSON.value:
        # `bazel run` starts elsewhere: a relative path is meant from where the user is.
        target = pathlib.Path(os.environ.get("BUILD_WORKING_DIRECTORY", "."), _JSON.value)
        target.parent.mkdir(parents=True, exist_ok=True)
        results = _results(metrics, names, quick=_QUICK.value)
        target.write_text(json.dumps(results, indent=2) + "\n", "utf-8")
        bars = [(m.name, m.value, m.unit, m.bar.value, m.holds) for m in metrics if m.bar]
        target.with_suffix(".svg").write_text(render_bars(bars, title="Control plane"), "utf-8")
    return 3 if _CHECK.value and not all(metric.holds for metric in metrics) else 0


if __name__ == "__main__":
    command_line.run(main)
