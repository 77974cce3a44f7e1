"""Measures long contexts over a chain of workers, and checks them against the whole model.

    tools/bazel run //benchmarks:long_context -- --json long.json
    tools/bazel run //benchmarks:long_context -- --model V4.gguf --stages 4

Lengths, chunk and number of decoded tokens are fixed beforehand, in benchmarks/long_context.json.
Without --model a small random DeepSeek V4 runs, whose every figure but correctness is about the
machinery and not about the real model. Each prompt takes several prefill chunks; decoding then goes
over ends of the ring of raw keys and of the blocks that compressors end. Every token and every
compared logit must be the whole model's.

The chain runs first, the whole model after it. Writes rows to --json and a picture beside it. Exit
status: 0; 1 when something failed or differs.
"""

from __future__ import annotations

import asyncio
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
from meshnet import command_line
from meshnet_gguf.chart import Line, render_lines
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.machine import machine_facts
from meshnet_gguf.measurement import SPAN, Plan, is_identical, measure

_JSON = flags.DEFINE_string("json", None, "File for the results; the picture goes beside it (.svg)")
_MODEL = flags.DEFINE_string("model", None, "GGUF file; default: the small DeepSeek V4")
_STAGES = flags.DEFINE_integer(
    "stages", None, "Workers of the chain; default: as fixed", lower_bound=1
)
_QUICK = flags.DEFINE_bool("quick", False, "See that it works, with two short prompts")
_THREADS = flags.DEFINE_integer("threads", 0, "Threads of every worker; 0 = the cores' share")

_HERE = pathlib.Path(__file__).parent
_FIXTURE = _HERE.parent / "tests" / "fixtures" / "deepseek4_tiny_text.gguf"
_MIB = 1024 * 1024


def _say(message: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {message}", file=sys.stderr, flush=True)


def _quick(plan: Plan) -> Plan:
    """Prompts longer than a chunk, decoded over the end of a block, as in the plan itself."""
    return dataclasses.replace(
        plan,
        prompt_tokens=(260, 600),
        decode_tokens=136,
        compared_logit_rows=8,
        cancellations=1,
    )


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
                    line(f"first {SPAN}", "first_ms_per_token"),
                    line(f"last {SPAN}", "last_ms_per_token"),
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
    # `bazel run` starts elsewhere: a relative path is meant from where the user is.
    here = pathlib.Path(os.environ.get("BUILD_WORKING_DIRECTORY", "."))
    model = (here / _MODEL.value).absolute() if _MODEL.value else _FIXTURE
    try:
        plan = Plan.load(_HERE / "long_context.json")
        if _QUICK.value:
            plan = _quick(plan)
        measured = asyncio.run(
            measure(model, plan, stages=_STAGES.value, threads=_THREADS.value, say=_say)
        )
    except MeshnetError as error:
        print(f"long_context: {error}", file=sys.stderr)
        return 1
    results: dict[str, Any] = {
        "benchmark": "long_context",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "model": model.stem,
        "evidence": "dark" if _MODEL.value else "fixture",
        "machine": machine_facts(),
        "quick": _QUICK.value,
        "plan": dataclasses.asdict(plan),
        **measured,
    }
    print(_table(results))
    if _JSON.value:
        target = here / _JSON.value
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(results, indent=2) + "\n", "utf-8")
        target.with_suffix(".svg").write_text(picture(results), "utf-8")
        _say(f"wrote {target} and {target.with_suffix('.svg')}")
    return 0 if is_identical(results) else 1


if __name__ == "__main__":
    command_line.run(main)
