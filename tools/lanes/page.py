"""docs/lanes.md, from what was recorded of each lane's build and from certification records.

    tools/bazel run //tools/lanes -- page           # writes docs/lanes.md
    tools/lane_record vulkan                        # builds a lane and records it

docs/lanes/LANE.json says what a build was, or why there is none. docs/lanes/certified.records holds
certification records, one a line, and docs/lanes/trusted/*.pem the public keys that they count
from. A lane is

    unavailable   its SDK is not there, or nobody has built it
    dark          built; nothing says that it works on hardware, and trackers do not route it
    certified     built, and a record by a trusted key certifies it for a model and recipe

Evidence in docs/lanes/LANE.certify.json names the backend of a certified fingerprint.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from meshnet.certification import CertificationBook, read_records
from meshnet.signing import TrustedKeys

__all__ = ["LANES", "LaneStatus", "render", "statuses"]

LANES: Final = ("cpu", "cuda", "rocm", "vulkan", "metal")
_SCHEMA: Final = "meshnet.lane/1"


@dataclass(frozen=True)
class LaneStatus:
    """A lane, its build record and what certifies it."""

    lane: str
    record: Mapping[str, Any]
    # Of each evidence file that a record in force is signed over: what it is of.
    certified: tuple[str, ...]

    @property
    def word(self) -> str:
        """unavailable, dark or certified."""
        if self.record["status"] != "built":
            return "unavailable"
        return "certified" if self.certified else "dark"


def statuses(folder: pathlib.Path, now_ms: int | None = None) -> list[LaneStatus]:
    """All lanes by the records in a folder. Raises ValueError for a record that is none."""
    now = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    certified = _certified(folder, now)
    found = []
    for lane in LANES:
        file = folder / f"{lane}.json"
        record = json.loads(file.read_text("utf-8"))
        if record.get("schema") != _SCHEMA or record.get("lane") != lane:
            raise ValueError(f"{file} is no record of the lane {lane}")
        found.append(LaneStatus(lane, record, tuple(certified.get(lane, ()))))
    return found


def _certified(folder: pathlib.Path, now_ms: int) -> dict[str, list[str]]:
    """By backend, what certification records in force are about."""
    records = folder / "certified.records"
    if not records.exists():
        return {}
    book = CertificationBook(TrustedKeys.load(sorted((folder / "trusted").glob("*.pem"))))
    signed = [book.check(line) for line in read_records(records)]
    for record in signed:
        book.add(record)
    evidence = {}
    for file in folder.glob("*.certify.json"):
        content = file.read_bytes()
        evidence[hashlib.sha256(content).hexdigest()] = json.loads(content)
    found: dict[str, list[str]] = {}
    for record in signed:
        measured = evidence.get(record.evidence_sha256)
        if measured is None or record.status != "certified" or book.refusal(record.lane, now_ms):
            continue
        if measured["fingerprint"] != record.lane.fingerprint:
            continue
        recipe = measured["recipe"]
        hardware = recipe.get("accelerator") or measured["machine"]["cpu"]
        found.setdefault(recipe["backend"], []).append(f"{record.lane.model_id} on {hardware}")
    return found


def render(lanes: Sequence[LaneStatus]) -> str:
    """The page."""
    table = [
        "| lane | status | compiler | SDK | worker | wall time | certified for |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    details = []
    for status in lanes:
        record = status.record
        if record["status"] != "built":
            table.append(f"| {status.lane} | unavailable | | | | | {record['reason']} |")
            continue
        cells = [
            status.lane,
            status.word,
            record["compiler"],
            record["sdk"] or "none",
            f"{record['worker_bytes'] / 1e6:.1f} MB",
            _wall(record),
            ", ".join(status.certified) or "nothing",
        ]
        table.append(f"| {' | '.join(cells)} |")
        details += _details(status)
    template = pathlib.Path(__file__).with_name("page.template.md").read_text("utf-8")
    return template.format(table="\n".join(table), details="\n".join(details))


def _wall(record: Mapping[str, Any]) -> str:
    if not record["compiled_actions"] + record["cached_actions"]:
        return "it was built already"
    minutes = record["wall_s"] / 60
    return (
        f"{minutes:.1f} min; of {record['actions']} actions {record['compiled_actions']} ran, "
        f"{record['cached_actions']} came from a cache"
    )


def _details(status: LaneStatus) -> list[str]:
    record = status.record
    lines = [
        f"### {status.lane}",
        "",
        f"- recorded {record['recorded_at']}: `{record['command']}`",
        f"- llama.cpp {record['llama_cpp']['release']}, commit `{record['llama_cpp']['commit']}`, "
        f"patch stack `{record['llama_cpp']['patches_sha256']}`",
        f"- machine: {record['machine']}",
        f"- worker: {record['worker_bytes']} bytes, SHA-256 `{record['worker_sha256']}`",
    ]
    lines += [
        f"- {took['actions']} actions {name} took {took['sum_s'] / 60:.1f} min together, the "
        f"longest {took['longest_s']:.0f} s"
        for name, took in record["compile_s"].items()
    ]
    if record["options"]:
        lines.append(f"- accelerator: `{record['options']}`")
    if record["needs"]:
        lines.append(f"- shared libraries that it needs: {', '.join(record['needs'])}")
    lines += [f"- {note}" for note in record["notes"]]
    return [*lines, ""]
