"""Streams a chat answer through a chain of shard workers and checks it against the whole model.

Starts one worker process per stage, each with only its own layers, asks them a question and ends
them, then runs the whole model in one more worker with the same batch shapes and compares. Without
--model it fetches SmolLM2 (98 MB) by hash into $MESHNET_STORAGE or /var/tmp/meshnet-<uid>.
--fixture takes a small random model that the build makes: it writes gibberish, and parity is the
point. --tracker starts a tracker and a node for each stage as well: the nodes start and register
the workers, the tracker chooses the route, and its ledger has every stage's receipt in the end. The
second stage is reached through a relay then, as a worker is that can only dial out.

Example:

    tools/bazel run //:demo -- --stages 3 --prompt "Name three planets." --max-tokens 48
    tools/bazel run //:demo -- --stages 4 --fixture deepseek4
    tools/bazel run //:demo -- --stages 3 --tracker

Exit code: 0; 1 when anything fails or the two answers differ; 2 for a command line that makes no
sense.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass

import rich.box
import rich.console
import rich.table
from absl import app, flags
from meshnet import command_line
from meshnet.errors import ControlError

from meshnet_gguf import progress
from meshnet_gguf.client import (
    ChatMessage,
    Finished,
    GenerationResult,
    LayerRange,
    Metrics,
    PrefillProgress,
    Route,
    Session,
    chat_token_ids,
    open_route,
)
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.gguf_file import read_model
from meshnet_gguf.inventory import take_inventory
from meshnet_gguf.local_cluster import LocalCluster, WorkerSpec, share_of_cores, split_layers
from meshnet_gguf.local_mesh import LocalMesh
from meshnet_gguf.logged_process import PythonProgram
from meshnet_gguf.models import fetch_model
from meshnet_gguf.parity import max_logit_difference
from meshnet_gguf.route_source import Outcome, TrackerRouteSource
from proto.meshnet.control.v1 import tracker_pb2
from proto.meshnet.shard.v1 import errors_pb2

__all__ = ["DemoResult", "MeshResult", "StageResult", "main", "run_demo"]

_MIB = 1024 * 1024
_TEMPLATE_TOKENS = 512
# Logits of that many sampled rows are compared on top of all token ids.
_LOGIT_ROWS = 32
_FAKE_LAYERS = 8  # of the fake engine's model

_STAGES = flags.DEFINE_integer("stages", 2, "Worker processes in the chain.", lower_bound=1)
_PROMPT = flags.DEFINE_string("prompt", "What is gravity?", "The question.")
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 64, "Longest answer, in tokens.", lower_bound=1)
_MODEL = flags.DEFINE_string("model", None, "A GGUF file to use instead of the fetched SmolLM2.")
_FIXTURE = flags.DEFINE_enum("fixture", None, ["deepseek4"], "A model of the build instead.")
_THREADS = flags.DEFINE_integer(
    "threads", 0, "Compute threads of each worker, 0 = the cores' share of a stage.", lower_bound=0
)
_TRACKER = flags.DEFINE_bool("tracker", False, "Run the chain through a tracker and nodes.")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object and nothing else on stdout.")


@dataclass(frozen=True)
class StageResult:
    """One stage of the chain. Speeds are of the stage's own compute."""

    stage: int
    layers: tuple[int, int]
    owned_tensors: int
    owned_bytes: int
    resident_bytes: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    seam_bytes_received: int
    seam_bytes_sent: int
    seam_bytes_sent_per_token: float
    return_bytes_sent: int


@dataclass(frozen=True)
class MeshResult:
    """What the tracker had to do with it.

    `nodes` are the route's hops in order, `reckoned_us` what routing reckoned with for a token;
    `relayed` are those of the nodes that are reached through the relay, which has carried so many
    bytes in calls that are over.
    `receipts` counts those of the ledger for the demo's sessions, `completed` those that say so.
    """

    admission: str
    nodes: tuple[str, ...]
    relayed: tuple[str, ...]
    relayed_bytes: int
    reckoned_us: int
    sessions: int
    receipts: int
    completed: int


@dataclass(frozen=True)
class DemoResult:
    """What --json prints."""

    model: str
    text: str
    token_ids: tuple[int, ...]
    reference_token_ids: tuple[int, ...]
    parity: str
    compared_logit_rows: int
    max_logit_difference: float
    prompt_tokens: int
    ttft_ms: float
    decode_tokens_per_s: float
    stages: tuple[StageResult, ...]
    mesh: MeshResult | None = None

    @property
    def identical(self) -> bool:
        """Whether chain and whole model agreed in every token and every compared logit."""
        return self.parity == "identical"


async def run_demo(
    model: pathlib.Path | None,
    *,
    stages: int,
    prompt: str,
    max_tokens: int,
    show_text: Callable[[str], None],
    threads: int = 0,
    tracker: bool = False,
) -> DemoResult:
    """Runs chain and whole model; `show_text` gets the answer as it comes.

    Without `model` it is the fake engine's, which proves no more than the way. With `tracker` nodes
    run the chain's workers, and the route is the tracker's.

    Raises MeshnetError, with `tracker` also ControlError.
    """
    # A token is at least a byte; the rest is room for what the chat template adds.
    context = max_tokens + len(prompt.encode()) + _TEMPLATE_TOKENS
    # Equal on all workers, as part of the recipe. One session at a time needs one slot's memory;
    # a tracker hears of a slot that is free again with the next heartbeat.
    worker_flags = {
        "max_sessions": 2 if tracker else 1,
        "context_tokens": context,
        "threads": threads or share_of_cores(stages),
    }
    specs = _Specs(model, worker_flags)
    rows = min(_LOGIT_ROWS, max_tokens)
    ranges = split_layers(
        take_inventory(read_model(model)).main_layers if model else _FAKE_LAYERS, stages
    )
    # One after the other, so that memory need hold the weights once.
    async with _tracked_chain(specs, ranges) if tracker else _direct_chain(specs, ranges) as chain:
        token_ids = await _prompt_token_ids(chain.route, prompt)
        before = await chain.route.metrics()
        async with chain.session() as session:
            answer = await _stream(session, token_ids, max_tokens, show_text)
        after = await chain.route.metrics()
        async with chain.session() as session:
            again = await session.generate(token_ids, max_tokens=rows, return_logits=True).result()
        mesh = await chain.mesh_result()
    with progress.working("checking against the whole model"):
        async with (
            LocalCluster([specs.worker(None)]) as whole_cluster,
            await open_route(whole_cluster.endpoints) as whole,
            whole.session() as session,
        ):
            reference = await session.generate(
                token_ids, max_tokens=max_tokens, return_logits=True
            ).result()
    difference = max_logit_difference(again.logits, reference.logits[:rows])
    identical = (
        answer.token_ids == reference.token_ids
        and again.token_ids == reference.token_ids[:rows]
        and difference == 0.0
    )
    return DemoResult(
        model=model.name if model else "fake",
        text=answer.text,
        token_ids=answer.token_ids,
        reference_token_ids=reference.token_ids,
        parity="identical" if identical else "different",
        compared_logit_rows=len(again.logits),
        max_logit_difference=difference,
        prompt_tokens=len(token_ids),
        ttft_ms=1000 * answer.time_to_first_token,
        decode_tokens_per_s=answer.decode_tokens_per_second,
        stages=tuple(_stages(chain.route, before, after, len(token_ids), len(answer.token_ids))),
        mesh=mesh,
    )


@dataclass(frozen=True)
class _Specs:
    """What all workers have in common."""

    model: pathlib.Path | None
    flags: Mapping[str, int]

    def worker(self, layers: LayerRange | None) -> WorkerSpec:
        return WorkerSpec(layers, self.model, tuple(f"--{k}={v}" for k, v in self.flags.items()))


async def _no_mesh() -> None:
    return None


@dataclass(frozen=True)
class _Chain:
    """All stages' workers, and how a session on them is opened."""

    route: Route
    session: Callable[[], AbstractAsyncContextManager[Session]]
    mesh_result: Callable[[], Awaitable[MeshResult | None]] = _no_mesh


@contextlib.asynccontextmanager
async def _direct_chain(specs: _Specs, ranges: Sequence[LayerRange]) -> AsyncIterator[_Chain]:
    cluster = LocalCluster([specs.worker(layers) for layers in ranges])
    with progress.working(f"starting {len(ranges)} workers"):
        await cluster.__aenter__()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_exit(cluster)
        route = await stack.enter_async_context(await open_route(cluster.endpoints))
        yield _Chain(route, route.session)


async def _relayed_bytes(relay: PythonProgram | None) -> int:
    """What the relay carried; its books have a call once it is over."""
    if relay is None:
        return 0
    await relay.wait_event("call")
    return sum(
        int(str(call[f"bytes_to_{side}"]))
        for call in relay.events("call")
        for side in ("callee", "caller")
    )


@contextlib.asynccontextmanager
async def _tracked_chain(specs: _Specs, ranges: Sequence[LayerRange]) -> AsyncIterator[_Chain]:
    relayed = [1] if len(ranges) > 1 else []
    mesh = LocalMesh(ranges, model=specs.model, worker_flags=specs.flags, relayed=relayed)
    with progress.working(f"starting a tracker and {len(ranges)} nodes"):
        await mesh.__aenter__()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_exit(mesh)
        source = await stack.enter_async_context(TrackerRouteSource(mesh.trackers, mesh.model_id))
        # For the table; the sessions go where the tracker says.
        route = await stack.enter_async_context(await open_route(mesh.worker_endpoints()))
        chosen: list[tracker_pb2.RouteResponse] = []

        @contextlib.asynccontextmanager
        async def tracked_session() -> AsyncIterator[Session]:
            async with source.open() as tracked:
                chosen.append(tracked.chosen)
                async with tracked.session() as session:
                    yield session
                await tracked.report(session, Outcome.COMPLETED)

        async def mesh_result() -> MeshResult:
            receipts: list[tracker_pb2.Receipt] = []
            for one in chosen:
                request = tracker_pb2.ListReceiptsRequest(session_id=one.session_id)
                receipts += (await source.tracker.list_receipts(request)).receipts
            return MeshResult(
                admission=tracker_pb2.Admission.Name(chosen[0].admission),
                nodes=tuple(hop.node_id for hop in chosen[0].hops),
                relayed=tuple(hop.node_id for hop in chosen[0].hops if hop.relay),
                relayed_bytes=await _relayed_bytes(mesh.relay),
                reckoned_us=chosen[0].total_us,
                sessions=len(chosen),
                receipts=len(receipts),
                completed=sum(
                    receipt.outcome == tracker_pb2.OUTCOME_COMPLETED for receipt in receipts
                ),
            )

        yield _Chain(route, tracked_session, mesh_result)


async def _prompt_token_ids(route: Route, prompt: str) -> list[int]:
    # A model without a chat template gets the bare text and continues it.
    if (await route.head.vocabulary()).chat_template:
        return await chat_token_ids(route.head, [ChatMessage("user", prompt)])
    return await route.head.tokenize(prompt)


async def _stream(
    session: Session, token_ids: Sequence[int], max_tokens: int, show_text: Callable[[str], None]
) -> GenerationResult:
    generation = session.generate(token_ids, max_tokens=max_tokens)
    text: list[str] = []
    with contextlib.ExitStack() as bar:
        show = bar.enter_context(
            progress.counting_bar("reading the prompt", len(token_ids), "tokens")
        )
        async for event in generation:
            if isinstance(event, PrefillProgress):
                show(event.tokens_done)
                continue
            bar.close()  # before the answer's own text appears
            text.append(event.text)
            show_text(event.text)
            if isinstance(event, Finished):
                return generation.summary(event, "".join(text))
    raise AssertionError("a generation ends with Finished or an error")


def _stages(
    chain: Route, before: Sequence[Metrics], after: Sequence[Metrics], prompt: int, answer: int
) -> list[StageResult]:
    def rate(tokens: int, microseconds: int) -> float:
        return 1e6 * tokens / microseconds if microseconds else 0.0

    results = []
    for index, (capability, old, new) in enumerate(
        zip(chain.capabilities, before, after, strict=True)
    ):
        seam_sent = new.seam_bytes_sent - old.seam_bytes_sent
        results.append(
            StageResult(
                stage=index,
                layers=(capability.layers.begin, capability.layers.end),
                owned_tensors=capability.owned_tensors,
                owned_bytes=capability.owned_tensor_bytes,
                resident_bytes=new.resident_bytes,
                prefill_tokens_per_s=rate(
                    new.prefill_tokens - old.prefill_tokens,
                    new.prefill_engine_us - old.prefill_engine_us,
                ),
                decode_tokens_per_s=rate(
                    new.decode_tokens - old.decode_tokens,
                    new.decode_engine_us - old.decode_engine_us,
                ),
                seam_bytes_received=new.seam_bytes_received - old.seam_bytes_received,
                seam_bytes_sent=seam_sent,
                # Every prompt token and every generated one but the last crosses each seam.
                seam_bytes_sent_per_token=seam_sent / max(1, prompt + answer - 1),
                return_bytes_sent=new.return_bytes_sent - old.return_bytes_sent,
            )
        )
    return results


def print_table(result: DemoResult, console: rich.console.Console) -> None:
    """The table for people, and the verdict."""
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("stage", no_wrap=True)
    table.add_column("range", no_wrap=True)
    for title in ("tensors owned", "resident", "tokens/s", "seam bytes", "first token"):
        table.add_column(title, justify="right", no_wrap=True)
    for stage in result.stages:
        per_token = f"{stage.seam_bytes_sent_per_token:.0f}/token"
        table.add_row(
            str(stage.stage),
            f"[{stage.layers[0]}, {stage.layers[1]})",
            f"{stage.owned_tensors}, {stage.owned_bytes / _MIB:.1f} MiB",
            f"{stage.resident_bytes / _MIB:.0f} MiB",
            f"{stage.decode_tokens_per_s:.1f}",
            per_token if stage is not result.stages[-1] else "",
            "",
        )
    tensors = sum(stage.owned_tensors for stage in result.stages)
    owned = sum(stage.owned_bytes for stage in result.stages)
    table.add_section()
    table.add_row(
        "chain",
        f"[{result.stages[0].layers[0]}, {result.stages[-1].layers[1]})",
        f"{tensors}, {owned / _MIB:.1f} MiB",
        f"{sum(stage.resident_bytes for stage in result.stages) / _MIB:.0f} MiB",
        f"{result.decode_tokens_per_s:.1f}",
        f"{sum(stage.seam_bytes_sent for stage in result.stages)}",
        f"{result.ttft_ms:.0f} ms",
    )
    console.print(table)
    if result.mesh is not None:
        console.print(
            f"tracker: {' - '.join(result.mesh.nodes)}, {result.mesh.admission}; "
            f"{', '.join(result.mesh.relayed) or 'nobody'} through the relay, "
            f"{result.mesh.relayed_bytes} bytes; "
            f"{result.mesh.receipts} receipts of {result.mesh.sessions} sessions, "
            f"{result.mesh.completed} of them completed",
            highlight=False,
        )
    console.print(
        f"parity: {result.parity} ({len(result.token_ids)} tokens; logits of "
        f"{result.compared_logit_rows} rows, largest difference {result.max_logit_difference:g})",
        highlight=False,
    )


def _printable(text: str) -> str:
    # A model may write anything, also what would steer a terminal.
    return "".join(char for char in text if char.isprintable() or char in "\n\t")


def _show_on_stdout(text: str) -> None:
    sys.stdout.write(_printable(text))
    sys.stdout.flush()


async def _run(model: pathlib.Path, show_text: Callable[[str], None]) -> DemoResult:
    task = asyncio.current_task()
    assert task is not None
    # Ended by its terminal or a supervisor, the demo still stops its workers.
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    return await run_demo(
        model,
        stages=_STAGES.value,
        prompt=_PROMPT.value,
        max_tokens=_MAX_TOKENS.value,
        show_text=show_text,
        threads=_THREADS.value,
        tracker=bool(_TRACKER.value),
    )


def _model() -> pathlib.Path:
    if _FIXTURE.value is not None and _MODEL.value is not None:
        raise MeshnetError(
            errors_pb2.REASON_CONFIGURATION_INVALID, "expected --model or --fixture, got both"
        )
    if _FIXTURE.value is not None:
        files = pathlib.Path(__file__).parents[2] / "tests" / "fixtures"
        return files / f"{_FIXTURE.value}_tiny_text.gguf"
    if _MODEL.value is None:
        return fetch_model("smollm2")
    # `bazel run` starts programs elsewhere and says where it was called.
    called_in = pathlib.Path(os.environ.get("BUILD_WORKING_DIRECTORY", ""))
    return (called_in / pathlib.Path(_MODEL.value).expanduser()).absolute()


def main(argv: Sequence[str]) -> int:
    """Runs the demo by its flags; the exit code."""
    if len(argv) > 1:
        raise app.UsageError(f"expected flags only, got {argv[1]!r}")
    try:
        result = asyncio.run(_run(_model(), (lambda _: None) if _JSON.value else _show_on_stdout))
    except (MeshnetError, ControlError) as error:
        sys.stderr.write(f"\ndemo: {error}\n")
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.stderr.write("\ndemo: interrupted\n")
        return 130
    if _JSON.value:
        sys.stdout.write(json.dumps(asdict(result)) + "\n")
    else:
        sys.stdout.write("\n\n")
        print_table(result, rich.console.Console())
    return 0 if result.identical else 1


def run() -> None:
    """The program."""
    command_line.run(main)


if __name__ == "__main__":
    run()
