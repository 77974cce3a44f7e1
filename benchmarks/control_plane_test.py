"""What README.md says of the benchmark, quickly; its numbers are not looked at."""

from __future__ import annotations

import json
import pathlib
import xml.etree.ElementTree as ET

from benchmarks.readme import commands, run

WHOLE, RELAY = commands()


def test_all_sections(tmp_path: pathlib.Path) -> None:
    done = run(WHOLE, tmp_path, "--quick", "--check")
    target = tmp_path / "control.json"
    results = json.loads(target.read_text())
    missed = [metric for metric in results["metrics"] if not metric["holds"]]
    assert done.returncode == (3 if missed else 0), done.stderr
    assert results["quick"] is True
    found = {metric["name"]: metric for metric in results["metrics"]}
    for metric in found.values():
        assert set(metric) == {"name", "value", "unit", "bar", "holds"}
    barred = {name: metric["bar"] for name, metric in found.items() if metric["bar"]}
    never = {
        "chaos_broken_requests",
        "chaos_ghost_registrations",
        "chaos_leaked_sessions",
        "chaos_ledger_faults",
        "chaos_orphans",
    }
    may_be_nothing = never | {
        "relay_added_p99_ms",
        "provision_resume_refetched_bytes",
        "provision_resume_reread_mb",
    }
    assert (
        barred.items()
        >= {
            "tracker_heartbeats_per_s_sqlite": ">= 2000",
            "tracker_heartbeats_per_s_postgresql": ">= 2000",
            "tracker_heartbeats_sqlite_by_postgresql": "<= 3",
            "tracker_select_p99_ms_sqlite": "<= 20",
            "tracker_select_p99_ms_postgresql": "<= 20",
            "relay_mb_per_s": ">= 200",
            "relay_added_p99_ms": "<= 1",
            "provision_of_plain_copy": ">= 0.8",
            "provision_resume_refetched_bytes": "<= 0",
            "provision_resume_reread_mb": "<= 1",
            "chaos_slowest_s": "<= 20",
            **dict.fromkeys(never, "<= 0"),
        }.items()
    )
    assert [name for name in never if found[name]["value"]] == []
    assert all(found[name]["value"] > 0 for name in barred if name not in may_be_nothing)
    picture = ET.parse(target.with_suffix(".svg")).getroot()
    shown = {element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")}
    assert shown >= set(barred)


def test_one_section(tmp_path: pathlib.Path) -> None:
    done = run(RELAY, tmp_path, "--quick")
    assert done.returncode == 0, done.stderr
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert names
    assert [name for name in names if not name.startswith("relay_")] == []
    assert list(tmp_path.iterdir()) == []
