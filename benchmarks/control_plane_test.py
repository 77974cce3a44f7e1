"""The benchmark runs through and writes what it says; its numbers are not looked at."""

from __future__ import annotations

import json
import pathlib
import subprocess
import xml.etree.ElementTree as ET


def test_quick_run(tmp_path: pathlib.Path) -> None:
    target = tmp_path / "out" / "results.json"
    command = [f"{pathlib.Path(__file__).parent}/control_plane", "--quick", f"--json={target}"]
    subprocess.run(command, check=True)
    results = json.loads(target.read_text())
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
