"""Measures a dense model whole, over llama.cpp's RPC and over a chain of workers, in one run.

    tools/bazel run //benchmarks:dense -- --json results.json
    tools/bazel run //benchmarks:dense -- --quick
    tools/bazel run //benchmarks:dense -- --filter meshnet --rtt_ms 0,40 --sessions 1,4

Writes the rows and the verdict on every bar to --json and a picture beside it. See
benchmarks/README.md for the method. Progress goes to stderr, a table to stdout.

Exit status: 0 when everything was measured, whatever the bars say; 1 when a system failed; 3 with
--check when a bar is missed.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import itertools
import json
import os
import pathlib
import re
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from absl import app, flags
from meshnet import command_line
from meshnet_gguf.chart import render
from meshnet_gguf.client import LayerRange
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.local_cluster import LocalCluster, WorkerSpec, split_layers
from meshnet_gguf.machine import cores, machine_facts
from meshnet_gguf.models import fetch_model

from benchmarks.results import Bar, Sample, Setting, Stage, evaluate_bars, summarise
from benchmarks.systems import BenchmarkError, Binaries, Interference, System, settle

_JSON = flags.DEFINE_string("json", None, "File for the results; the picture goes beside it (.svg)")
_MODEL = flags.DEFINE_string("model", None, "GGUF of the llama architecture; default: SmolLM2-135M")
_QUICK = flags.DEFINE_bool("quick", False, "Two rounds over fewer settings: a few minutes")
_CHECK = flags.DEFINE_bool("check", False, "Exit status 3 when a bar is missed")
_REPEATS = flags.DEFINE_integer("repeats", 3, "Rounds over all settings", lower_bound=1)
_FILTER = flags.DEFINE_string("filter", "", "Only systems whose name matches this expression")
_SESSIONS = flags.DEFINE_list("sessions", ["1", "2", "4", "8"], "Numbers of concurrent sessions")
_RTT_MS = flags.DEFINE_list("rtt_ms", ["0", "10", "40"], "Round trips; 0 = direct, without proxy")
_MBIT = flags.DEFINE_float("mbit", 100.0, "Bandwidth of the proxy's links, Mbit/s")
_STAGES = flags.DEFINE_integer("stages", 2, "Workers of the chain", lower_bound=1)
_SPLIT = flags.DEFINE_list("split", [], "First layers of the stages after the head; default: even")
_PROMPT = flags.DEFINE_integer("prompt_tokens", 512, "Prompt that the prompt speed is measured on")
_CONTEXT_PROMPT = flags.DEFINE_integer(
    "session_prompt_tokens", 128, "Prompt of each session before its decode speed is measured"
)
_TOKENS = flags.DEFINE_integer(
    "decode_tokens", 64, "Decoded tokens of each session; half of them behind the proxy"
)
_THREADS = flags.DEFINE_integer("threads", 0, "Threads of every process; 0 = one per core")
_WORKER_FLAGS = flags.DEFINE_list("worker_flags", [], "Further flags of every worker")
_BINARIES = flags.DEFINE_string("binaries", None, "Folder with the programs, for builds by hand")

_CONTEXT_TOKENS = 1024
# llama.cpp's own default for the rows of one graph.
_CHUNK_TOKENS = 512
_BUSY = 0.1


def _say(message: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {message}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    systems: re.Pattern[str]
    sessions: tuple[int, ...]
    round_trips_ms: tuple[float, ...]
    mbit: float
    repeats: int
    stages: int
    prompt_tokens: int
    session_prompt_tokens: int
    decode_tokens: int
    threads: int

    @classmethod
    def from_flags(cls) -> Plan:
        """--quick takes less of what was not asked for explicitly."""
        quick = _QUICK.value
        return cls(
            systems=re.compile(_FILTER.value),
            sessions=_given(_SESSIONS, (1, 4) if quick else None, int),
            round_trips_ms=_given(_RTT_MS, (0.0, 40.0) if quick else None, float),
            mbit=_MBIT.value,
            repeats=2 if quick and not _REPEATS.present else _REPEATS.value,
            stages=len(_SPLIT.value) + 1 if _SPLIT.value else _STAGES.value,
            prompt_tokens=_PROMPT.value,
            session_prompt_tokens=_CONTEXT_PROMPT.value,
            decode_tokens=32 if quick and not _TOKENS.present else _TOKENS.value,
            threads=_THREADS.value or cores(),
        )

    def measures(self, name: str) -> bool:
        """Whether --filter lets this system through."""
        return self.systems.search(name) is not None

    def prompt(self, length: int, session: int) -> list[int]:
        """Some token ids, different for each session, the same in every run."""
        return [1000 + (7919 * i + 104729 * session) % 40000 for i in range(length)]

    def rounds(self, setting: Setting) -> int:
        """Tokens that each session decodes."""
        return self.decode_tokens if setting.rtt_ms == 0 else max(8, self.decode_tokens // 2)


def _given(
    flag: flags.FlagHolder[Any], quick: tuple[Any, ...] | None, kind: Any
) -> tuple[Any, ...]:
    if quick is not None and not flag.present:
        return quick
    return tuple(sorted({kind(value) for value in flag.value}))


async def _measure(
    system: System, setting: Setting, plan: Plan, interference: Interference
) -> Sample:
    """One sample. With one session the prompt speed comes from a prompt of its own length."""
    prompts = [
        plan.prompt(plan.session_prompt_tokens, session) for session in range(setting.sessions)
    ]
    if setting.sessions == 1:
        prompted = await system.prefill([plan.prompt(plan.prompt_tokens, 0)])
        prompt_tokens = plan.prompt_tokens
        await system.prefill(prompts)
    else:
        prompted = await system.prefill(prompts)
        prompt_tokens = plan.session_prompt_tokens * setting.sessions
    proxy = system.proxy
    carried = await proxy.bytes_carried() if proxy else 0
    decoded = await system.decode(plan.rounds(setting))
    carried = await proxy.bytes_carried() - carried if proxy else 0

    computed = decoded.get("computed_tokens", decoded["decode_tokens"])
    stages = decoded.get("stages", [])
    if stages:
        payload = sum(stage["seam_bytes_sent"] + stage["return_bytes_sent"] for stage in stages)
    else:
        payload = decoded["link_bytes"]
    return Sample(
        prompt_tokens_per_s=prompt_tokens / prompted["prefill_s"],
        decode_tokens_per_s=decoded["decode_tokens"] / decoded["decode_s"],
        ttft_ms=statistics.median(prompted["ttft_ms"]),
        seam_bytes_per_token=payload / computed,
        resident_mib=system.resident_mib(),
        proxy_bytes_per_token=carried / computed if proxy else None,
        boundary_bytes_per_token=system.tool.hello.get("boundary_bytes_per_token"),
        stages=tuple(
            Stage(
                engine_calls=stage["engine_calls"],
                engine_us=stage["engine_us"],
                resident_bytes=stage["resident_bytes"],
                owned_tensor_bytes=stage["owned_tensor_bytes"],
                kv_bytes=stage["kv_bytes"],
                queued_steps=None if setting.sessions == 1 else stage["queued_steps"],
                queued_bytes=None if setting.sessions == 1 else stage["queued_bytes"],
                sessions_failed=stage["sessions_failed"],
            )
            for stage in stages
        ),
        others_busy=interference.share(),
    )


async def _tune_rpc(binaries: Binaries, model: pathlib.Path, plan: Plan) -> dict[str, Any]:
    """The rpc-server thread setting with the fastest decode here, by trying them all."""
    tried: dict[int, float] = {}
    for threads in sorted({1, *(2**i for i in range(1, 8) if 2**i < plan.threads), plan.threads}):
        system = await System.rpc(
            "rpc-tuning", binaries, model, ["-t", str(threads)], through_proxy=False
        )
        try:
            speeds = []
            for _ in range(3):
                await system.prefill([plan.prompt(plan.session_prompt_tokens, 0)])
                decoded = await system.decode(plan.decode_tokens)
                speeds.append(decoded["decode_tokens"] / decoded["decode_s"])
        finally:
            await system.stop()
        tried[threads] = round(statistics.median(speeds), 1)
        _say(f"rpc-server -t {threads}: {tried[threads]} tokens/s")
    best = max(tried, key=lambda threads: tried[threads])
    return {"threads": best, "decode_tokens_per_s_by_threads": tried}


@contextlib.asynccontextmanager
async def _fleet(
    binaries: Binaries,
    model: pathlib.Path,
    plan: Plan,
    workers: Sequence[tuple[str, int]],
    tuned_threads: int,
    *,
    through_proxy: bool,
) -> AsyncIterator[list[System]]:
    """All systems that are measured, side by side; only one is ever asked at a time."""
    async with contextlib.AsyncExitStack() as stack:
        systems: list[System] = []

        def add(system: System) -> None:
            stack.push_async_callback(system.stop)
            systems.append(system)

        if plan.measures("whole") and not through_proxy:
            add(await System.whole(binaries, model, plan.threads))
        for name, server_flags in (
            ("rpc-default", []),
            ("rpc-tuned", ["-t", str(tuned_threads)]),
        ):
            if plan.measures(name):
                add(
                    await System.rpc(
                        name, binaries, model, server_flags, through_proxy=through_proxy
                    )
                )
        # A chain of one stage has no seam that the proxy could stand in.
        if workers and not (through_proxy and plan.stages == 1):
            add(await System.meshnet(binaries, workers, through_proxy=through_proxy))
        yield systems


async def _run(plan: Plan, binaries: Binaries, model: pathlib.Path) -> dict[str, Any]:
    tuning: dict[str, Any] = {"threads": plan.threads}
    if plan.measures("rpc-tuned"):
        tuning = await _tune_rpc(binaries, model, plan)
    samples: dict[Setting, list[Sample]] = {}
    chain: dict[str, Any] = {}
    async with contextlib.AsyncExitStack() as stack:
        workers: list[tuple[str, int]] = []
        if plan.measures("meshnet"):
            layers = await _layers(binaries, model, plan)
            cluster = await stack.enter_async_context(
                LocalCluster(_worker_specs(plan, model, layers))
            )
            workers = [(worker.endpoint, worker.pid) for worker in cluster.workers]
        for through_proxy in (False, True):
            round_trips = [rtt for rtt in plan.round_trips_ms if (rtt > 0) == through_proxy]
            if not round_trips:
                continue
            _say(f"starting systems {'behind the proxy' if through_proxy else 'side by side'}")
            async with _fleet(
                binaries, model, plan, workers, tuning["threads"], through_proxy=through_proxy
            ) as systems:
                for system in systems:
                    if system.name == "meshnet":
                        chain = system.tool.hello
                for turn in range(plan.repeats):
                    await _turn(turn, systems, round_trips, plan, samples)
    return {
        "rows": [summarise(setting, samples[setting]) for setting in sorted(samples)],
        "rpc_tuning": tuning,
        "chain": chain,
    }


def _repeats_in_turn(rtt_ms: float, sessions: int) -> int:
    """Ratios of two close speeds need more samples than those that differ by a factor."""
    if sessions > 1:
        return 1
    return 4 if rtt_ms == 0 else 2


async def _turn(
    turn: int,
    systems: Sequence[System],
    round_trips: Sequence[float],
    plan: Plan,
    samples: dict[Setting, list[Sample]],
) -> None:
    """Every setting once, what the bars look at oftener; each turn begins with another system."""
    settings = [
        (rtt_ms, sessions)
        for rtt_ms in round_trips
        for sessions in plan.sessions
        for _ in range(_repeats_in_turn(rtt_ms, sessions))
    ]
    own = [os.getpid(), *(pid for system in systems for pid in system.all_pids())]
    for position, (rtt_ms, sessions) in enumerate(settings):
        for offset in range(len(systems)):
            system = systems[(turn + position + offset) % len(systems)]
            setting = Setting(system.name, system.stages, rtt_ms, sessions)
            if system.proxy is not None:
                await system.proxy.shape(rtt_ms, plan.mbit)
            await settle(pid for other in systems for pid in other.pids.values())
            sample = await _measure(system, setting, plan, Interference(own))
            samples.setdefault(setting, []).append(sample)
            _say(
                f"{turn + 1}/{plan.repeats} {rtt_ms:g} ms, {sessions} sessions, {system.name}: "
                f"prompt {sample.prompt_tokens_per_s:.0f}, decode {sample.decode_tokens_per_s:.1f} "
                f"tokens/s, first token {sample.ttft_ms:.0f} ms, others {sample.others_busy:.0%}"
            )


async def _layers(binaries: Binaries, model: pathlib.Path, plan: Plan) -> int:
    whole = await System.whole(binaries, model, plan.threads)
    await whole.stop()
    return int(whole.tool.hello["layers"])


def _worker_specs(plan: Plan, model: pathlib.Path, layers: int) -> list[WorkerSpec]:
    if _SPLIT.value:
        cuts = [0, *(int(cut) for cut in _SPLIT.value), layers]
        ranges = [LayerRange(begin, end) for begin, end in itertools.pairwise(cuts)]
    else:
        ranges = split_layers(layers, plan.stages)
    worker_flags = (
        f"--threads={plan.threads}",
        # Threads that spin while they wait take the cores from the other stages.
        "--poll=0",
        f"--max_sessions={max(plan.sessions)}",
        f"--context_tokens={_CONTEXT_TOKENS}",
        f"--prefill_chunk_tokens={_CHUNK_TOKENS}",
        "--batch_policy=shared",
        "--die_with_parent",
        *_WORKER_FLAGS.value,
    )
    return [WorkerSpec(layer_range, model, worker_flags) for layer_range in ranges]


def _busy() -> float:
    """How much of the cores others use, from one second."""

    interference = Interference([os.getpid()])
    time.sleep(1)
    busy = interference.share()
    if busy > _BUSY:
        _say(f"others use {busy:.0%} of this machine: the figures will not mean much")
    return busy


def _table(rows: Sequence[dict[str, Any]], bars: Sequence[Bar]) -> str:
    lines = [
        f"{'system':<12} {'rtt':>5} {'sessions':>8} {'prompt t/s':>11} {'decode t/s':>11} "
        f"{'range':>15} {'ttft ms':>8} {'ms/token':>8} {'floor':>6} {'bytes/token':>11}"
    ]
    for row in rows:
        decode = row["decode_tokens_per_s"]
        floor = f"{row['floor_ms_per_token']['median']:.1f}" if "floor_ms_per_token" in row else ""
        lines.append(
            f"{row['system']:<12} {row['rtt_ms']:>5g} {row['sessions']:>8} "
            f"{row['prompt_tokens_per_s']['median']:>11.1f} {decode['median']:>11.1f} "
            f"{decode['min']:>7.1f}-{decode['max']:<7.1f} {row['ttft_ms']['median']:>8.0f} "
            f"{row['ms_per_token']['median']:>8.1f} {floor:>6} "
            f"{row['seam_bytes_per_token']['median']:>11.0f}"
        )
    lines.append("")
    for bar in bars:
        bound = f">= {bar.at_least:g}" if bar.at_least is not None else f"<= {bar.at_most:g}"
        measured = "-" if bar.measured is None else f"{bar.measured:.3f}"
        lines.append(f"{bar.verdict:<12} {bar.name}: {measured} ({bound}) {bar.figures}")
        if bar.paired is not None:
            low, middle, high = (bar.paired[key] for key in ("min", "median", "max"))
            lines[-1] += f", side by side {middle:.3f} ({low:.3f}-{high:.3f})"
    return "\n".join(lines)


def _write(target: pathlib.Path, results: dict[str, Any]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(results, indent=2) + "\n", "utf-8")
    picture = target.with_suffix(".svg")
    machine = results["machine"]
    title = f"{results['model']}, {machine['cores']} cores ({machine['cpu']})"
    picture.write_text(render(results["rows"], title=title), "utf-8")
    _say(f"wrote {target} and {picture}")


def main(argv: Sequence[str]) -> int:
    """The command."""
    if len(argv) > 1:
        raise app.UsageError(f"expected flags only, got {argv[1:]}")
    plan = Plan.from_flags()
    # `bazel run` starts elsewhere: a relative path is meant from where the user is.
    here = pathlib.Path(os.environ.get("BUILD_WORKING_DIRECTORY", "."))
    binaries = Binaries.in_folder(pathlib.Path(_BINARIES.value)) if _BINARIES.value else Binaries()
    started = time.monotonic()
    try:
        model = here / _MODEL.value if _MODEL.value else fetch_model("smollm2")
        results: dict[str, Any] = {
            "benchmark": "dense",
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "model": model.stem,
            "machine": {**machine_facts(), "busy_before": round(_busy(), 3)},
            "plan": {
                "repeats": plan.repeats,
                "prompt_tokens": plan.prompt_tokens,
                "session_prompt_tokens": plan.session_prompt_tokens,
                "decode_tokens": plan.decode_tokens,
                "threads": plan.threads,
                "mbit": plan.mbit,
            },
        }
        results.update(asyncio.run(_run(plan, binaries, model)))
    except (BenchmarkError, MeshnetError) as error:
        print(f"dense: {error}", file=sys.stderr)
        return 1
    bars = evaluate_bars(results["rows"])
    results["bars"] = [bar.to_json() for bar in bars]
    results["seconds"] = round(time.monotonic() - started)
    print(_table(results["rows"], bars))
    if _JSON.value:
        _write(here / _JSON.value, results)
    return 3 if _CHECK.value and any(bar.verdict == "missed" for bar in bars) else 0


if __name__ == "__main__":
    command_line.run(main)
