"""From samples to rows, and from rows to verdicts: the benchmark's arithmetic, without processes.

    rows = [summarise(setting, samples) for setting, samples in measured.items()]
    bars = evaluate_bars(rows)

A row is a JSON object; see benchmarks/README.md for its fields. Every figure in it is a median with
the smallest and the largest sample beside it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "Bar",
    "Sample",
    "Setting",
    "Stage",
    "evaluate_bars",
    "floor_ms_per_token",
    "hop_ms",
    "paired_ratio",
    "spread",
    "summarise",
]

Row = dict[str, Any]

_MIB = 1 << 20

DECODE_OF_WHOLE = 0.90
DECODE_OF_RPC_DEFAULT = 1.3
PREFILL_OF_WHOLE = 0.95
TIME_OF_FLOOR = 1.15
DECODE_OF_RPC_FAR = 2.0
FOUR_SESSIONS_OF_ONE = 3.0
SEAM_OVERHEAD_BYTES = 256
RESIDENT_OVERHEAD_MIB = 64.0
FAR_RTT_MS = 40.0


@dataclass(frozen=True, order=True)
class Setting:
    """What one row is about. `rtt_ms` is 0 for connections without the proxy."""

    system: str
    stages: int
    rtt_ms: float
    sessions: int


@dataclass(frozen=True)
class Stage:
    """What one worker counted while decoding, and its memory afterwards."""

    engine_calls: int
    engine_us: int
    resident_bytes: int
    owned_tensor_bytes: int
    kv_bytes: int
    # The most that waited for the engine; None beside a single session, which never waits.
    queued_steps: int | None = None
    queued_bytes: int | None = None
    sessions_failed: int = 0

    @property
    def ms_per_call(self) -> float:
        """Engine time of one batch: with one session, of one token."""
        return self.engine_us / 1000 / self.engine_calls if self.engine_calls else 0.0


@dataclass(frozen=True)
class Sample:
    """One measurement of one setting. Bytes per token are None where there is no seam."""

    prompt_tokens_per_s: float
    decode_tokens_per_s: float
    ttft_ms: float
    seam_bytes_per_token: float
    resident_mib: Mapping[str, float]
    # Bytes that the proxy carried per token, protocol framing included; None without the proxy.
    proxy_bytes_per_token: float | None = None
    boundary_bytes_per_token: float | None = None
    stages: tuple[Stage, ...] = ()
    # Share of the machine's cores that none of the benchmark's own processes used.
    others_busy: float | None = None
    details: Mapping[str, float] = field(default_factory=dict)


def spread(values: Iterable[float], digits: int = 3) -> dict[str, float]:
    """Median, smallest and largest of at least one value."""
    items = list(values)
    return {
        "median": round(statistics.median(items), digits),
        "min": round(min(items), digits),
        "max": round(max(items), digits),
    }


def floor_ms_per_token(stages: Sequence[Stage], rtt_ms: float) -> float:
    """The least time between two tokens of a session over a chain behind the proxy.

    Every stage computes once, and one one-way latency is paid for each seam and for the return.
    """
    seams = len(stages) - 1
    return sum(stage.ms_per_call for stage in stages) + (seams + 1) * rtt_ms / 2


def hop_ms(stages: Sequence[Stage], ms_per_token: float) -> float:
    """What one of a token's hops takes: each seam, and the return from the last stage to the first.

    That is all of one session's time per token in which no stage computed.
    """
    return (ms_per_token - sum(stage.ms_per_call for stage in stages)) / len(stages)


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Of samples that were taken one after the other: what disturbs both, the ratio forgets."""
    return spread(a / b for a, b in zip(ours, theirs, strict=False))


def summarise(setting: Setting, samples: Sequence[Sample]) -> Row:
    """The row of a setting from its samples (at least one)."""
    row: Row = {
        "system": setting.system,
        "stages": setting.stages,
        "rtt_ms": setting.rtt_ms,
        "sessions": setting.sessions,
        "samples": len(samples),
        "prompt_tokens_per_s": spread(s.prompt_tokens_per_s for s in samples),
        "decode_tokens_per_s": spread(s.decode_tokens_per_s for s in samples),
        # In the order of measuring: the same place in two systems' rows was measured side by side.
        "prompt_samples": [round(s.prompt_tokens_per_s, 3) for s in samples],
        "decode_samples": [round(s.decode_tokens_per_s, 3) for s in samples],
        "ttft_ms": spread(s.ttft_ms for s in samples),
        "seam_bytes_per_token": spread(s.seam_bytes_per_token for s in samples),
        "resident_mib": {
            name: spread((s.resident_mib[name] for s in samples), 1)
            for name in samples[0].resident_mib
        },
        # Of one session: what `floor_ms_per_token` compares with.
        "ms_per_token": spread(setting.sessions * 1000 / s.decode_tokens_per_s for s in samples),
    }
    if all(s.proxy_bytes_per_token is not None for s in samples):
        row["proxy_bytes_per_token"] = spread(s.proxy_bytes_per_token or 0.0 for s in samples)
    if all(s.boundary_bytes_per_token is not None for s in samples):
        row["boundary_bytes_per_token"] = samples[0].boundary_bytes_per_token
    if all(s.stages for s in samples):
        row["stage_ms_per_call"] = [
            spread(stage.ms_per_call for stage in stage_samples)
            for stage_samples in zip(*(s.stages for s in samples), strict=True)
        ]
        row["stage_memory_mib"] = [
            {
                "resident": spread((stage.resident_bytes / _MIB for stage in stage_samples), 1),
                "owned_tensors": round(stage_samples[0].owned_tensor_bytes / _MIB, 1),
                "kv": spread((stage.kv_bytes / _MIB for stage in stage_samples), 1),
            }
            for stage_samples in zip(*(s.stages for s in samples), strict=True)
        ]
        row["sessions_failed"] = sum(stage.sessions_failed for s in samples for stage in s.stages)
        if setting.sessions == 1:
            row["hop_ms"] = spread(hop_ms(s.stages, 1000 / s.decode_tokens_per_s) for s in samples)
        else:
            row["stage_queue"] = [
                {
                    "steps": max(stage.queued_steps or 0 for stage in stage_samples),
                    "bytes": max(stage.queued_bytes or 0 for stage in stage_samples),
                }
                for stage_samples in zip(*(s.stages for s in samples), strict=True)
            ]
        if setting.rtt_ms > 0:
            row["floor_ms_per_token"] = spread(
                floor_ms_per_token(s.stages, setting.rtt_ms) for s in samples
            )
    if all(s.others_busy is not None for s in samples):
        row["others_busy"] = spread(s.others_busy or 0.0 for s in samples)
    for name in samples[0].details:
        row[name] = spread(s.details[name] for s in samples)
    return row


@dataclass(frozen=True)
class Bar:
    """One bar: what is compared, the bound, what was measured (None: the rows do not tell)."""

    name: str
    what: str
    at_least: float | None
    at_most: float | None
    measured: float | None
    figures: str
    # The ratio of each two samples taken side by side; beside the verdict, which is the medians'.
    paired: Mapping[str, float] | None = None

    @property
    def verdict(self) -> str:
        """met, missed or not measured."""
        if self.measured is None:
            return "not measured"
        if self.at_least is not None and self.measured < self.at_least:
            return "missed"
        if self.at_most is not None and self.measured > self.at_most:
            return "missed"
        return "met"

    def to_json(self) -> Row:
        """As it stands in the results file."""
        return {
            "name": self.name,
            "what": self.what,
            "at_least": self.at_least,
            "at_most": self.at_most,
            "measured": None if self.measured is None else round(self.measured, 3),
            "verdict": self.verdict,
            "figures": self.figures,
            **({} if self.paired is None else {"paired": dict(self.paired)}),
        }


class _Rows:
    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows

    def find(self, system: str, rtt_ms: float, sessions: int, stages: int = 2) -> Row | None:
        for row in self._rows:
            if (row["system"], row["rtt_ms"], row["sessions"]) == (system, rtt_ms, sessions) and (
                system != "meshnet" or row["stages"] == stages
            ):
                return row
        return None

    def meshnet(self) -> list[Row]:
        return [row for row in self._rows if row["system"] == "meshnet"]


def _ratio(
    name: str,
    what: str,
    at_least: float,
    metric: str,
    ours: Row | None,
    theirs: Row | None,
) -> Bar:
    if ours is None or theirs is None:
        return Bar(name, what, at_least, None, None, "")
    a = float(ours[metric]["median"])
    b = float(theirs[metric]["median"])
    paired = None
    # Behind another proxy or with other sessions, nothing was measured side by side.
    if (ours["rtt_ms"], ours["sessions"]) == (theirs["rtt_ms"], theirs["sessions"]):
        samples = f"{metric.partition('_')[0]}_samples"
        paired = paired_ratio(ours[samples], theirs[samples])
    figures = f"{a:.1f} against {b:.1f}"
    return Bar(name, what, at_least, None, a / b, figures, paired)


def _far_time(row: Row | None) -> Bar:
    name = "far_time_of_floor"
    what = (
        "meshnet, 40 ms, one session: time per decoded token of the stages' compute and one "
        "one-way latency per seam and for the return"
    )
    if row is None or "floor_ms_per_token" not in row:
        return Bar(name, what, None, TIME_OF_FLOOR, None, "")
    time = float(row["ms_per_token"]["median"])
    floor = float(row["floor_ms_per_token"]["median"])
    return Bar(name, what, None, TIME_OF_FLOOR, time / floor, f"{time:.1f} ms against {floor:.1f}")


def _seam_bytes(rows: Sequence[Row]) -> Bar:
    name = "seam_bytes"
    what = "meshnet, one session: seam and return payload per decoded token beyond the boundary"
    known = [row for row in rows if row["sessions"] == 1 and "boundary_bytes_per_token" in row]
    if not known:
        return Bar(name, what, None, SEAM_OVERHEAD_BYTES, None, "")
    # One boundary crosses each seam.
    beyond = {
        row["rtt_ms"]: row["seam_bytes_per_token"]["median"]
        - row["boundary_bytes_per_token"] * (row["stages"] - 1)
        for row in known
    }
    figures = ", ".join(f"{over:.0f} bytes at {rtt:g} ms" for rtt, over in sorted(beyond.items()))
    return Bar(name, what, None, SEAM_OVERHEAD_BYTES, max(beyond.values()), figures)


def _resident(rows: Sequence[Row]) -> Bar:
    name = "resident_memory"
    what = "meshnet: resident MiB of a stage beyond the tensors that it owns and its KV cache"
    beyond: list[float] = []
    figures = ""
    for row in rows:
        for index, stage in enumerate(row.get("stage_memory_mib", ())):
            over = stage["resident"]["max"] - stage["owned_tensors"] - float(stage["kv"]["median"])
            if not beyond or over > max(beyond):
                figures = (
                    f"stage {index} with {row['sessions']} sessions: {stage['resident']['max']:.1f}"
                    f" resident, {stage['owned_tensors']:.1f} owned, {stage['kv']['median']:.1f} KV"
                )
            beyond.append(over)
    measured = max(beyond) if beyond else None
    return Bar(name, what, None, RESIDENT_OVERHEAD_MIB, measured, figures)


def evaluate_bars(rows: Sequence[Row]) -> list[Bar]:
    """Every bar that this benchmark can measure, from the medians of `rows`."""
    index = _Rows(rows)
    near = index.find("meshnet", 0, 1)
    far = index.find("meshnet", FAR_RTT_MS, 1)
    whole = index.find("whole", 0, 1)
    rpc_far = [
        row
        for row in (index.find(name, FAR_RTT_MS, 1) for name in ("rpc-default", "rpc-tuned"))
        if row is not None
    ]
    best_rpc_far = max(
        rpc_far, key=lambda row: float(row["decode_tokens_per_s"]["median"]), default=None
    )
    return [
        _ratio(
            "near_decode_of_whole",
            "two local stages, one session: decode speed of the whole model's in one process",
            DECODE_OF_WHOLE,
            "decode_tokens_per_s",
            near,
            whole,
        ),
        _ratio(
            "near_decode_of_rpc_default",
            "two local stages, one session: decode speed of llama.cpp RPC's as it comes",
            DECODE_OF_RPC_DEFAULT,
            "decode_tokens_per_s",
            near,
            index.find("rpc-default", 0, 1),
        ),
        _ratio(
            "near_prefill_of_whole",
            "two local stages, one prompt: prompt speed of the whole model's in one process",
            PREFILL_OF_WHOLE,
            "prompt_tokens_per_s",
            near,
            whole,
        ),
        _far_time(far),
        _ratio(
            "far_decode_of_rpc",
            "40 ms, one session: decode speed of llama.cpp RPC's, the better of its two settings",
            DECODE_OF_RPC_FAR,
            "decode_tokens_per_s",
            far,
            best_rpc_far,
        ),
        _ratio(
            "far_four_sessions_of_one",
            "meshnet, 40 ms: decode speed of four sessions together of one session's",
            FOUR_SESSIONS_OF_ONE,
            "decode_tokens_per_s",
            index.find("meshnet", FAR_RTT_MS, 4),
            far,
        ),
        _seam_bytes(index.meshnet()),
        _resident(index.meshnet()),
    ]
