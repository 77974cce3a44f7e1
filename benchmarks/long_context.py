"""Measures long contexts over a chain of workers, and checks them against the whole model.

    tools/bazel run //benchmarks:long_context -- --json results.json
    tools/bazel run //benchmarks:long_context -- --model V4.gguf --stages 4

Lengths, chunk and number of decoded tokens are fixed beforehand, in benchmarks/long_context.json.
Without --model a small random DeepSeek V4 runs, whose every figure but correctness is about the
machinery and not about the real model. Each prompt takes several prefill chunks; decoding then goes
over ends of the ring of raw keys and of the blocks that compressors end. Every token and every
compared logit must be the whole model's.

Writes rows to --json and a picture beside it. Exit status: 0; 1 when something failed or differs.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from absl import app, flags
from meshnet_gguf.client import PrefillProgress, Route, Session, Token, open_route
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.local_cluster import LocalCluster, WorkerSpec, share_of_cores, split_layers

from benchmarks.chart import Line, render_lines

_JSON = flags.DEFINE_string("json", None, "File for the results; the picture goes beside it (.svg)")
_MODEL = flags.DEFINE_string("model", None, "GGUF file; default: the small DeepSeek V4")
_STAGES = flags.DEFINE_integer(
    "stages", None, "Workers of the chain; default: as fixed", lower_bound=1
)
_THREADS = flags.DEFINE_integer("threads", 0, "Threads of every worker; 0 = the cores' share")

_HERE = pathlib.Path(__file__).parent
_FIXTURE = _HERE.parent / "tests" / "fixtures" / "deepseek4_tiny_text.gguf"
# Of the decoded tokens, for a first and a last figure: a client gets them in bursts, which a mean
# over many of them does not see.
_SPAN = 160
_WINDOW = 128
_CSA, _HCA = 4, 128
_MIB = 1024 * 1024


@dataclasses.dataclass(frozen=True)
class Plan:
    """benchmarks/long_context.json: what is measured, fixed before the run."""

    stages: int
    context_tokens: int
    prefill_chunk_tokens: int
    rollback_tokens: int
    prompt_tokens: tuple[int, ...]
    decode_tokens: int
    compared_logit_rows: int
    cancellations: int

    @classmethod
    def load(cls, path: pathlib.Path) -> Plan:
        """Raises ValueError when a prompt and its tokens do not fit the context."""
        values = json.loads(path.read_text("utf-8"))
        plan = cls(**{**values, "prompt_tokens": tuple(values["prompt_tokens"])})
        longest = max(plan.prompt_tokens) + plan.decode_tokens + plan.compared_logit_rows
        if longest > plan.context_tokens:
            raise ValueError(
                f"expected prompt and decoded tokens within {plan.context_tokens}, got {longest}"
            )
        return plan

    @property
    def ring_cells(self) -> int:
        """Cells of the ring of raw keys: window, micro-batch and room to go back, padded."""
        cells = _WINDOW + self.prefill_chunk_tokens + 2 * self.rollback_tokens
        return -(-cells // 256) * 256

    def crossings(self, prompt: int) -> dict[str, int]:
        """How many ends of rings and blocks the decoded tokens go over."""

        def within(step: int) -> int:
            return (prompt + self.decode_tokens) // step - prompt // step

        return {
            "ring_wraps": within(self.ring_cells),
            "csa_blocks": within(_CSA),
            "hca_blocks": within(_HCA),
        }


def _say(message: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {message}", file=sys.stderr, flush=True)


def _prompt(length: int, vocabulary: int) -> list[int]:
    """Some token ids, the same in every run."""
    return [300 + (7919 * i + 104729) % (vocabulary - 300) for i in range(length)]


@dataclasses.dataclass
class _Decoded:
    token_ids: list[int]
    logits: list[bytes]
    seconds: list[float]
    """Between two tokens each."""
    first: float
    """From sending the prompt to its first token, seconds."""


async def _decode(session: Session, prompt: Sequence[int], plan: Plan) -> _Decoded:
    decoded = _Decoded([], [], [], 0.0)
    generation = session.generate(
        prompt, max_tokens=plan.decode_tokens, ignore_end_of_generation=True
    )
    last = time.perf_counter()
    async for event in generation:
        if not isinstance(event, Token):
            continue
        now = time.perf_counter()
        decoded.seconds.append(now - last)
        last = now
        decoded.token_ids.append(event.token_id)
    decoded.first = generation.time_to_first_token
    # Logits are large: the tokens that bring them are not those that are timed.
    compared = await session.generate(
        decoded.token_ids[-1:],
        max_tokens=plan.compared_logit_rows,
        start_position=len(prompt) + plan.decode_tokens - 1,
        ignore_end_of_generation=True,
        return_logits=True,
    ).result()
    decoded.token_ids += compared.token_ids
    decoded.logits += compared.logits
    return decoded


async def _measure(chain: Route, whole: Route, plan: Plan, prompt: int) -> dict[str, Any]:
    vocabulary = (await chain.head.vocabulary()).size
    token_ids = _prompt(prompt, vocabulary)
    before = await chain.metrics()
    async with chain.session() as session:
        decoded = await _decode(session, token_ids, plan)
        after = await chain.metrics()
    async with whole.session() as session:
        reference = await _decode(session, token_ids, plan)
    sent = [
        new.seam_bytes_sent - old.seam_bytes_sent for old, new in zip(before, after, strict=True)
    ]
    tokens = prompt + plan.decode_tokens + plan.compared_logit_rows - 1
    frame = session.limits.max_frame_bytes if session.limits is not None else 0
    chunk_bytes = max(sent[:-1], default=0) / tokens * min(prompt, plan.prefill_chunk_tokens)
    return {
        "prompt_tokens": prompt,
        **plan.crossings(prompt),
        "identical": decoded.token_ids == reference.token_ids
        and decoded.logits == reference.logits,
        "compared_logit_rows": len(decoded.logits),
        "ttft_ms": 1000 * decoded.first,
        "prompt_tokens_per_s": prompt / decoded.first,
        "first_ms_per_token": 1000 * statistics.fmean(decoded.seconds[1 : _SPAN + 1]),
        "last_ms_per_token": 1000 * statistics.fmean(decoded.seconds[-_SPAN:]),
        "worst_ms_per_token": 1000 * max(decoded.seconds[1:]),
        "whole_ms_per_token": 1000 * statistics.fmean(reference.seconds[1:]),
        "stage_decode_ms_per_token": [
            (new.decode_engine_us - old.decode_engine_us)
            / 1000
            / (new.decode_tokens - old.decode_tokens)
            for old, new in zip(before, after, strict=True)
        ],
        "seam_bytes_per_token": [bytes_ / tokens for bytes_ in sent[:-1]],
        "chunk_bytes": chunk_bytes,
        "fragments_per_chunk": -(-int(chunk_bytes) // frame) if frame else 0,
        "resident_bytes": [metrics.resident_bytes for metrics in after],
        "kv_bytes": [metrics.kv_bytes for metrics in after],
        "kv_budget_bytes": [metrics.kv_budget_bytes for metrics in after],
    }


async def _cancel(chain: Route, plan: Plan) -> dict[str, float]:
    """Milliseconds until a running prefill has ended, and until every stage has freed it."""
    prompt = _prompt(max(plan.prompt_tokens), (await chain.head.vocabulary()).size)
    async with chain.session() as session:
        generation = session.generate(prompt, max_tokens=1)
        async for event in generation:
            if isinstance(event, PrefillProgress) and event.tokens_done > 0:
                break
        started = time.perf_counter()
        await generation.cancel()
        ended = time.perf_counter()
    while any(metrics.open_sessions for metrics in await chain.metrics()):
        pass
    return {
        "cancel_ms": 1000 * (ended - started),
        "release_ms": 1000 * (time.perf_counter() - ended),
    }


async def _run(plan: Plan, model: pathlib.Path, stages: int, threads: int) -> dict[str, Any]:
    worker_flags = (
        "--max_sessions=1",
        f"--context_tokens={plan.context_tokens}",
        f"--prefill_chunk_tokens={plan.prefill_chunk_tokens}",
        f"--rollback_tokens={plan.rollback_tokens}",
        f"--threads={threads or share_of_cores(stages)}",
    )
    async with contextlib.AsyncExitStack() as stack:
        _say("starting the whole model, for comparison")
        whole = await stack.enter_async_context(
            LocalCluster([WorkerSpec(model=model, flags=worker_flags)])
        )
        reference = await stack.enter_async_context(await open_route(whole.endpoints))
        layers = split_layers(reference.capabilities[0].model_layers, stages)
        _say(f"starting {stages} workers")
        cluster = await stack.enter_async_context(
            LocalCluster([WorkerSpec(part, model, worker_flags) for part in layers])
        )
        chain = await stack.enter_async_context(await open_route(cluster.endpoints))
        rows = []
        for prompt in plan.prompt_tokens:
            rows.append(await _measure(chain, reference, plan, prompt))
            _say(f"{prompt} + {plan.decode_tokens} tokens: identical {rows[-1]['identical']}")
        cancelled = [await _cancel(chain, plan) for _ in range(plan.cancellations)]
        head = chain.capabilities[0]
        return {
            "architecture": head.architecture,
            "layers": [[part.begin, part.end] for part in layers],
            "recipe": dict(head.recipe),
            "rows": rows,
            "cancellations": cancelled,
        }


def picture(results: dict[str, Any]) -> str:
    """The SVG of a run."""
    rows = results["rows"]

    def line(name: str, key: str) -> Line:
        return Line(name, [(row["prompt_tokens"], row[key]) for row in rows])

    resident = [
        Line(
            f"stage {stage}",
            [(r["prompt_tokens"], r["resident_bytes"][stage] / _MIB) for r in rows],
        )
        for stage in range(len(results["layers"]))
    ]
    return render_lines(
        [
            (
                "Decode by context, ms/token",
                [
                    line(f"first {_SPAN}", "first_ms_per_token"),
                    line(f"last {_SPAN}", "last_ms_per_token"),
                    line("whole model", "whole_ms_per_token"),
                ],
            ),
            ("Time to first token by context, ms", [line("chain", "ttft_ms")]),
            ("Prompt by context, tokens/s", [line("chain", "prompt_tokens_per_s")]),
            ("Resident memory by context, MiB", resident),
        ],
        title=f"{results['model']} over {len(results['layers'])} workers",
    )


def _table(results: dict[str, Any]) -> str:
    lines = [
        f"{'prompt':>7} {'wraps':>5} {'CSA':>4} {'HCA':>4} {'ttft ms':>8} {'prompt t/s':>10} "
        f"{'first':>6} {'last':>6} {'worst':>6} {'whole':>6}  ms/token"
    ]
    lines += [
        f"{row['prompt_tokens']:>7} {row['ring_wraps']:>5} {row['csa_blocks']:>4} "
        f"{row['hca_blocks']:>4} {row['ttft_ms']:>8.0f} {row['prompt_tokens_per_s']:>10.0f} "
        f"{row['first_ms_per_token']:>6.2f} {row['last_ms_per_token']:>6.2f} "
        f"{row['worst_ms_per_token']:>6.1f} {row['whole_ms_per_token']:>6.2f}  "
        f"{'identical' if row['identical'] else 'DIFFERENT'}"
        for row in results["rows"]
    ]
    for key in ("cancel_ms", "release_ms"):
        values = sorted(sample[key] for sample in results["cancellations"])
        if values:
            lines.append(
                f"{key}: {statistics.median(values):.1f} ({values[0]:.1f}-{values[-1]:.1f})"
            )
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """The command."""
    if len(argv) > 1:
        raise app.UsageError(f"expected flags only, got {argv[1:]}")
    plan = Plan.load(_HERE / "long_context.json")
    # `bazel run` starts elsewhere: a relative path is meant from where the user is.
    here = pathlib.Path(os.environ.get("BUILD_WORKING_DIRECTORY", "."))
    model = (here / _MODEL.value).absolute() if _MODEL.value else _FIXTURE
    results: dict[str, Any] = {
        "benchmark": "long_context",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "model": model.stem,
        "evidence": "dark" if _MODEL.value else "fixture",
        "plan": dataclasses.asdict(plan),
    }
    try:
        stages = _STAGES.value or plan.stages
        results |= asyncio.run(_run(plan, model, stages, _THREADS.value))
    except MeshnetError as error:
        print(f"long_context: {error}", file=sys.stderr)
        return 1
    print(_table(results))
    if _JSON.value:
        target = here / _JSON.value
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(results, indent=2) + "\n", "utf-8")
        target.with_suffix(".svg").write_text(picture(results), "utf-8")
        _say(f"wrote {target} and {target.with_suffix('.svg')}")
    return 0 if all(row["identical"] for row in results["rows"]) else 1


if __name__ == "__main__":
    app.run(main)
