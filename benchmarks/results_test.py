from __future__ import annotations

from typing import Any

import pytest

from benchmarks.results import (
    Sample,
    Setting,
    Stage,
    evaluate_bars,
    floor_ms_per_token,
    hop_ms,
    paired_ratio,
    spread,
    summarise,
)

MIB = 1 << 20


def stage(
    *,
    calls: int = 10,
    us: int = 50_000,
    resident: int = 90,
    owned: int = 50,
    kv: int = 12,
    queued: int | None = None,
    failed: int = 0,
) -> Stage:
    queued_bytes = None if queued is None else queued * 1000
    return Stage(calls, us, resident * MIB, owned * MIB, kv * MIB, queued, queued_bytes, failed)


def sample(
    decode: float,
    *,
    prompt: float = 300.0,
    seam: float = 2400.0,
    stages: tuple[Stage, ...] = (),
    boundary: float | None = None,
    proxied: float | None = None,
    others: float | None = None,
) -> Sample:
    return Sample(
        prompt_tokens_per_s=prompt,
        decode_tokens_per_s=decode,
        ttft_ms=1000 * 512 / prompt,
        seam_bytes_per_token=seam,
        resident_mib={"client": 10.0},
        proxy_bytes_per_token=proxied,
        boundary_bytes_per_token=boundary,
        stages=stages,
        others_busy=others,
    )


def row(system: str, rtt_ms: float, sessions: int, *samples: Sample) -> dict[str, Any]:
    stages = 1 if system == "whole" else 2
    return summarise(Setting(system, stages, rtt_ms, sessions), samples)


def test_spread_is_median_minimum_and_maximum() -> None:
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}
    assert spread([1.0, 4.0]) == {"median": 2.5, "min": 1.0, "max": 4.0}
    assert spread([1.23456], 1) == {"median": 1.2, "min": 1.2, "max": 1.2}


def test_floor_is_every_stages_compute_and_a_one_way_latency_per_seam_and_return() -> None:
    # 50,000 us over 10 calls are 5 ms.
    assert floor_ms_per_token([stage(), stage(us=30_000)], 40) == 5 + 3 + 2 * 20
    assert floor_ms_per_token([stage(), stage(), stage()], 10) == 15 + 3 * 5


def test_floor_of_a_stage_that_did_nothing_has_no_compute() -> None:
    assert floor_ms_per_token([stage(calls=0, us=0), stage()], 40) == 45


def test_a_row_holds_medians_with_their_range() -> None:
    summary = row(
        "meshnet",
        40,
        2,
        sample(
            25.0,
            prompt=256.0,
            seam=2500.0,
            stages=(stage(queued=1), stage(us=30_000, kv=16, queued=0)),
            boundary=2312,
            proxied=2700.0,
            others=0.0,
        ),
        sample(
            20.0,
            prompt=512.0,
            seam=2520.0,
            stages=(stage(us=70_000, queued=3), stage(us=30_000, kv=16, queued=0, failed=1)),
            boundary=2312,
            proxied=2760.0,
            others=0.125,
        ),
    )
    assert summary == {
        "system": "meshnet",
        "stages": 2,
        "rtt_ms": 40,
        "sessions": 2,
        "samples": 2,
        "prompt_tokens_per_s": {"median": 384.0, "min": 256.0, "max": 512.0},
        "decode_tokens_per_s": {"median": 22.5, "min": 20.0, "max": 25.0},
        "prompt_samples": [256.0, 512.0],
        "decode_samples": [25.0, 20.0],
        "ttft_ms": {"median": 1500.0, "min": 1000.0, "max": 2000.0},
        "seam_bytes_per_token": {"median": 2510.0, "min": 2500.0, "max": 2520.0},
        "resident_mib": {"client": {"median": 10.0, "min": 10.0, "max": 10.0}},
        "ms_per_token": {"median": 90.0, "min": 80.0, "max": 100.0},
        "proxy_bytes_per_token": {"median": 2730.0, "min": 2700.0, "max": 2760.0},
        "boundary_bytes_per_token": 2312,
        "stage_ms_per_call": [
            {"median": 6.0, "min": 5.0, "max": 7.0},
            {"median": 3.0, "min": 3.0, "max": 3.0},
        ],
        "stage_memory_mib": [
            {
                "resident": {"median": 90.0, "min": 90.0, "max": 90.0},
                "owned_tensors": 50.0,
                "kv": {"median": 12.0, "min": 12.0, "max": 12.0},
            },
            {
                "resident": {"median": 90.0, "min": 90.0, "max": 90.0},
                "owned_tensors": 50.0,
                "kv": {"median": 16.0, "min": 16.0, "max": 16.0},
            },
        ],
        "floor_ms_per_token": {"median": 49.0, "min": 48.0, "max": 50.0},
        "stage_queue": [{"steps": 3, "bytes": 3000}, {"steps": 0, "bytes": 0}],
        "sessions_failed": 1,
        "others_busy": {"median": 0.062, "min": 0.0, "max": 0.125},
    }


def test_a_hop_takes_what_no_stage_computed() -> None:
    # 20 ms for a token, 5 and 3 of them in the engines: a seam and the return share the rest.
    assert hop_ms([stage(), stage(us=30_000)], 20.0) == 6.0
    one = row("meshnet", 0, 1, sample(50.0, stages=(stage(), stage(us=30_000))))
    assert one["hop_ms"] == {"median": 6.0, "min": 6.0, "max": 6.0}
    # The sessions of a row share batches: whose time a hop took, it does not tell.
    assert "hop_ms" not in row("meshnet", 0, 4, sample(50.0, stages=(stage(), stage())))


def test_a_row_without_chain_or_proxy_has_no_figures_of_them() -> None:
    summary = row("whole", 0, 1, sample(100.0, seam=0.0))
    assert "floor_ms_per_token" not in summary
    assert "proxy_bytes_per_token" not in summary
    assert "stage_ms_per_call" not in summary


def chain_rows(**changes: float) -> list[dict[str, Any]]:
    """Rows in which every bar is met exactly, but for `changes`."""
    figures = {
        "near": 90.0,
        "whole": 100.0,
        "default": 69.0,
        "near_prompt": 285.0,
        "far": 20.0,
        "far_default": 8.0,
        "far_tuned": 10.0,
        "far_four": 60.0,
        "seam": 2312.0 + 256.0,
        "resident": 126.0,
        **changes,
    }
    memory = int(figures["resident"])
    near = (stage(resident=memory), stage())
    # Two stages of 2 ms and 40 ms of latency: a floor of 44 ms against 50.
    far = (stage(us=20_000), stage(us=20_000))
    seam = figures["seam"]
    return [
        row("whole", 0, 1, sample(figures["whole"], prompt=300.0, seam=0.0)),
        row("rpc-default", 0, 1, sample(figures["default"], seam=213_000.0)),
        row("rpc-default", 40, 1, sample(figures["far_default"], seam=213_000.0)),
        row("rpc-tuned", 40, 1, sample(figures["far_tuned"], seam=213_000.0)),
        row(
            "meshnet",
            0,
            1,
            sample(
                figures["near"],
                prompt=figures["near_prompt"],
                stages=near,
                seam=seam,
                boundary=2312,
            ),
        ),
        row("meshnet", 40, 1, sample(figures["far"], stages=far, seam=2400.0, boundary=2312)),
        row("meshnet", 40, 4, sample(figures["far_four"], stages=far, seam=2400.0)),
    ]


def test_bars_that_are_just_met() -> None:
    bars = {bar.name: bar for bar in evaluate_bars(chain_rows())}
    assert {name: bar.verdict for name, bar in bars.items()} == {
        "near_decode_of_whole": "met",
        "near_decode_of_rpc_default": "met",
        "near_prefill_of_whole": "met",
        "far_time_of_floor": "met",
        "far_decode_of_rpc": "met",
        "far_four_sessions_of_one": "met",
        "seam_bytes": "met",
        "resident_memory": "met",
    }
    assert bars["near_decode_of_whole"].to_json() == {
        "name": "near_decode_of_whole",
        "what": "two local stages, one session: decode speed of the whole model's in one process",
        "at_least": 0.9,
        "at_most": None,
        "measured": 0.9,
        "verdict": "met",
        "figures": "90.0 against 100.0",
        "paired": {"median": 0.9, "min": 0.9, "max": 0.9},
    }
    assert bars["far_four_sessions_of_one"].paired is None
    assert bars["far_time_of_floor"].measured == pytest.approx(50 / 44)
    assert bars["far_time_of_floor"].figures == "50.0 ms against 44.0"
    # The better of the two RPC settings counts.
    assert bars["far_decode_of_rpc"].measured == 2.0
    assert bars["seam_bytes"].measured == 256.0
    assert bars["seam_bytes"].figures == "256 bytes at 0 ms, 88 bytes at 40 ms"
    assert bars["resident_memory"].measured == 64.0
    assert (
        bars["resident_memory"].figures
        == "stage 0 with 1 sessions: 126.0 resident, 50.0 owned, 12.0 KV"
    )


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({"near": 89.9}, {"near_decode_of_whole"}),
        ({"default": 69.3}, {"near_decode_of_rpc_default"}),
        ({"near_prompt": 284.0}, {"near_prefill_of_whole"}),
        ({"far": 19.7}, {"far_time_of_floor", "far_decode_of_rpc"}),
        ({"far_tuned": 10.1}, {"far_decode_of_rpc"}),
        ({"far_default": 10.1}, {"far_decode_of_rpc"}),
        ({"far_four": 59.9}, {"far_four_sessions_of_one"}),
        ({"seam": 2312.0 + 256.5}, {"seam_bytes"}),
        ({"resident": 127}, {"resident_memory"}),
    ],
)
def test_bars_that_are_just_missed(changes: dict[str, float], missed: set[str]) -> None:
    bars = evaluate_bars(chain_rows(**changes))
    assert {bar.name for bar in bars if bar.verdict == "missed"} == missed
    assert {bar.verdict for bar in bars} == {"met", "missed"}


def test_what_the_rows_do_not_tell_is_not_measured() -> None:
    bars = evaluate_bars([row("whole", 0, 1, sample(100.0))])
    assert {bar.verdict for bar in bars} == {"not measured"}
    assert {bar.measured for bar in bars} == {None}


def test_bars_compare_medians() -> None:
    rows = [
        row("whole", 0, 1, sample(100.0), sample(10.0), sample(110.0)),
        row("meshnet", 0, 1, sample(95.0), sample(1.0), sample(200.0)),
    ]
    bar = evaluate_bars(rows)[0]
    assert bar.measured == 0.95


def test_paired_ratios_stand_beside_the_medians() -> None:
    # The machine was half as fast for the second pair, which both rows show and no pair does.
    rows = [
        row("whole", 0, 1, sample(100.0), sample(50.0), sample(100.0)),
        row("meshnet", 0, 1, sample(92.0), sample(47.0), sample(96.0)),
    ]
    bar = evaluate_bars(rows)[0]
    assert bar.measured == 0.92
    assert bar.paired == {"median": 0.94, "min": 0.92, "max": 0.96}
    assert paired_ratio([1.0, 3.0], [2.0, 2.0]) == {"median": 1.0, "min": 0.5, "max": 1.5}
