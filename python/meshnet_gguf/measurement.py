"""Measures a chain of workers on this machine and checks it against the whole model.

    results = await measure(model, Plan.load(path), say=print)

What is run is fixed beforehand in a plan. The chain runs first and has ended when the whole model
starts, so that memory need hold the weights once. Every token and every compared logit must be the
whole model's; `is_identical(results)` says whether.

    results = await measure_mixture(model, plan, LaneWorkers(("--device=cpu",)), LaneWorkers())

measures a chain whose first stages are of one lane and whose last are of another. It cannot give
any whole model's bits. What both lanes' whole models say behind the same tokens, and how far the
chain is from either, is in the results.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import pathlib
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from meshnet.certification import Lane, issue
from meshnet.fingerprints import Mixture
from meshnet.signing import SigningKey

from meshnet_gguf.client import (
    LayerRange,
    Metrics,
    PrefillProgress,
    Route,
    Session,
    Token,
    open_route,
)
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.gguf_file import Model, read_model
from meshnet_gguf.inventory import take_inventory
from meshnet_gguf.local_cluster import LocalCluster, WorkerSpec, share_of_cores, split_layers
from meshnet_gguf.parity import max_logit_difference, same_choices, squared_error
from meshnet_gguf.recipe import differences, mixture_of
from proto.meshnet.shard.v1 import errors_pb2

__all__ = ["SPAN", "LaneWorkers", "Plan", "is_identical", "measure", "measure_mixture"]

# Of the decoded tokens, for a first and a last figure: a client gets them in bursts, which a mean
# over many of them does not see.
SPAN = 160
_WINDOW = 128
_CSA, _HCA = 4, 128
# A worker reads and hashes its model before it is ready, and computes a whole chunk, for which a
# driver may have to compile every kernel first. One that fails ends sooner by itself.
_READY_SECONDS = 900.0
_READY_BYTES_PER_SECOND = 50e6
_FREE_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is measured, fixed before the run. Numbers of tokens unless said otherwise."""

    stages: int
    context_tokens: int
    prefill_chunk_tokens: int
    rollback_tokens: int
    prompt_tokens: tuple[int, ...]
    decode_tokens: int
    compared_logit_rows: int
    # How often a running prefill is cancelled.
    cancellations: int
    # Sessions that decode at the same time, each compared with itself alone.
    sessions: int = 1

    @classmethod
    def load(cls, path: pathlib.Path) -> Plan:
        """A plan from a JSON file.

        Raises MeshnetError (CONFIGURATION_INVALID) for a file that is none, and when a prompt and
        its tokens do not fit the context.
        """
        try:
            values = json.loads(path.read_text("utf-8"))
            plan = cls(**{**values, "prompt_tokens": tuple(values["prompt_tokens"])})
            longest = max(plan.prompt_tokens) + plan.decode_tokens + plan.compared_logit_rows
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise MeshnetError(
                errors_pb2.REASON_CONFIGURATION_INVALID, f"{path} is no plan: {error}"
            ) from error
        if longest > plan.context_tokens:
            raise MeshnetError(
                errors_pb2.REASON_CONFIGURATION_INVALID,
                f"expected prompt and decoded tokens within {plan.context_tokens}, got {longest}",
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


@dataclasses.dataclass
class _Decoded:
    token_ids: list[int]
    logits: list[bytes]
    seconds: list[float]
    """Between two tokens each."""
    first: float = 0.0
    """From sending the prompt to its first token, seconds."""
    max_frame_bytes: int = 0


@dataclasses.dataclass
class _Run:
    """What one chain (or the whole model) did, by prompt length, and by session."""

    vocabulary: int
    decoded: dict[int, _Decoded] = dataclasses.field(default_factory=dict)
    # Logits behind tokens that are the same in all runs.
    given: dict[int, list[bytes]] = dataclasses.field(default_factory=dict)
    metrics: dict[int, tuple[list[Metrics], list[Metrics]]] = dataclasses.field(
        default_factory=dict
    )
    together: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    cancellations: list[dict[str, float]] = dataclasses.field(default_factory=list)
    left_behind: list[dict[str, int]] = dataclasses.field(default_factory=list)
    capabilities: list[dict[str, Any]] = dataclasses.field(default_factory=list)


async def measure(
    model: pathlib.Path,
    plan: Plan,
    *,
    stages: int | None = None,
    threads: int = 0,
    manifest: pathlib.Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Runs `plan`: figures by name, as they are written to a record.

    `stages` is another number of them than the plan's, `threads` that of every worker; 0 is the
    cores' share of a stage. By a `manifest` workers verify what they load and nothing else. `say`
    gets a line now and then.

    Raises MeshnetError.
    """
    gguf = read_model(model)
    count = stages or plan.stages
    ranges: list[LayerRange] = split_layers(take_inventory(gguf).main_layers, count)
    cluster = _cluster(gguf, plan, count, threads, manifest)
    say(f"starting {count} workers")
    async with cluster.running(ranges) as route:
        chain = await _run(route, plan, say, at_once=True, cancellations=plan.cancellations)
    say("starting the whole model, for comparison")
    async with cluster.running([None]) as route:
        whole = await _run(route, plan, say, at_once=False, cancellations=0)
    return {
        "architecture": gguf.architecture,
        "layers": [[part.begin, part.end] for part in ranges],
        "workers": chain.capabilities,
        "rows": [_row(chain, whole, plan, prompt) for prompt in plan.prompt_tokens],
        "sessions": {
            "together": plan.sessions,
            "tokens": plan.decode_tokens,
            "identical": chain.together == whole.together,
        },
        "cancellations": chain.cancellations,
        "left_behind": chain.left_behind,
    }


@dataclasses.dataclass(frozen=True)
class LaneWorkers:
    """How the workers of a lane are started: more flags, and another program than the usual."""

    flags: tuple[str, ...] = ()
    program: pathlib.Path | None = None


async def measure_mixture(
    model: pathlib.Path,
    plan: Plan,
    head: LaneWorkers,
    tail: LaneWorkers,
    *,
    threads: int = 0,
    manifest: pathlib.Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Runs `plan` over a chain of two lanes, `head`'s stages first, and over both whole models.

    Half of the stages, rounded down, are the head's. The chain's workers believe a record that is
    signed for this run alone, by a key that nobody else has.

    Raises MeshnetError: RECIPE_MISMATCH when the lanes are one, or differ in more than their lane.
    """
    gguf = read_model(model)
    ranges: list[LayerRange] = split_layers(take_inventory(gguf).main_layers, plan.stages)
    cluster = _cluster(gguf, plan, plan.stages, threads, manifest)
    wholes = []
    for name, lane in (("head", head), ("tail", tail)):
        say(f"starting the whole model on the {name}'s lane")
        async with cluster.running([None], [lane]) as route:
            whole = await _run(route, plan, say, at_once=False, cancellations=0, given=True)
        wholes.append(whole)
    recipes = [whole.capabilities[0]["recipe"] for whole in wholes]
    mixture = mixture_of(*recipes)
    if mixture is None:
        raise MeshnetError(
            errors_pb2.REASON_RECIPE_MISMATCH,
            "expected two lanes whose recipes differ in nothing but their lane, they differ in "
            + (", ".join(name for name, _, _ in differences(*recipes)) or "nothing at all"),
        )
    lanes = [head] * (plan.stages // 2) + [tail] * (plan.stages - plan.stages // 2)
    say(f"starting {plan.stages} workers of both lanes")
    with tempfile.TemporaryDirectory(prefix="meshnet-mixture-") as folder:
        proven = _prove(mixture, pathlib.Path(folder))
        lanes = [dataclasses.replace(lane, flags=(*lane.flags, *proven)) for lane in lanes]
        async with cluster.running(ranges, lanes, mixture.fingerprint) as route:
            chain = await _run(
                route, plan, say, at_once=True, cancellations=plan.cancellations, given=True
            )
            alone = await _sessions(route, plan, chain.vocabulary, at_once=False)
    return {
        "architecture": gguf.architecture,
        "layers": [[part.begin, part.end] for part in ranges],
        "mixture": dataclasses.asdict(mixture),
        "recipes": {"head": recipes[0], "tail": recipes[1]},
        "workers": chain.capabilities,
        "rows": [_mixed_row(chain, wholes, prompt) for prompt in plan.prompt_tokens],
        "sessions": {
            "together": plan.sessions,
            "tokens": plan.decode_tokens,
            # Of the same chain: what others do changes nothing.
            "identical": chain.together == alone,
        },
        "cancellations": chain.cancellations,
        "left_behind": chain.left_behind,
    }


def _prove(mixture: Mixture, folder: pathlib.Path) -> tuple[str, str]:
    """A worker's flags for records that nobody but the workers of this run believe."""
    key = SigningKey.generate()
    record = issue(
        key,
        Lane("measurement", mixture.fingerprint),
        issued_ms=time.time_ns() // 1_000_000,
        evidence_sha256=hashlib.sha256(b"").hexdigest(),
        mixture=mixture,
    )
    keys, records = folder / "key.pub", folder / "mixture.records"
    keys.write_text(key.public_pem(), "utf-8")
    records.write_bytes(record.encode() + b"\n")
    return f"--mixtures={records}", f"--mixture_keys={keys}"


def is_identical(results: Mapping[str, Any]) -> bool:
    """Whether everything that measure() compared was equal, and nothing was left behind."""
    return (
        all(row["identical"] for row in results["rows"])
        and bool(results["sessions"]["identical"])
        and not any(value for stage in results["left_behind"] for value in stage.values())
    )


def _cluster(
    gguf: Model, plan: Plan, count: int, threads: int, manifest: pathlib.Path | None
) -> _Cluster:
    """How `count` workers are started."""
    size = sum(file.bytes for file in gguf.files)
    return _Cluster(
        gguf.files[0].path,
        (
            f"--max_sessions={plan.sessions}",
            f"--context_tokens={plan.context_tokens}",
            f"--prefill_chunk_tokens={plan.prefill_chunk_tokens}",
            f"--rollback_tokens={plan.rollback_tokens}",
            f"--threads={threads or share_of_cores(count)}",
            *((f"--manifest={manifest}",) if manifest else ()),
        ),
        _READY_SECONDS + count * size / _READY_BYTES_PER_SECOND,
    )


@dataclasses.dataclass(frozen=True)
class _Cluster:
    model: pathlib.Path
    flags: tuple[str, ...]
    ready_within: float

    @contextlib.asynccontextmanager
    async def running(
        self,
        ranges: Sequence[LayerRange | None],
        lanes: Sequence[LaneWorkers] | None = None,
        mixture: str = "",
    ) -> AsyncIterator[Route]:
        """Workers for the ranges, None being the whole model, and the route over them."""
        specs = [
            WorkerSpec(part, self.model, (*self.flags, *lane.flags), lane.program)
            for part, lane in zip(ranges, lanes or [LaneWorkers()] * len(ranges), strict=True)
        ]
        async with (
            LocalCluster(specs, ready_within=self.ready_within) as workers,
            await open_route(workers.endpoints, mixture=mixture) as route,
        ):
            yield route


async def _run(
    route: Route,
    plan: Plan,
    say: Callable[[str], None],
    *,
    at_once: bool,
    cancellations: int,
    given: bool = False,
) -> _Run:
    vocabulary = (await route.head.vocabulary()).size
    run = _Run(
        vocabulary,
        capabilities=[
            {
                "engine": capability.engine,
                "evidence": capability.evidence,
                "artifact_sha256": capability.artifact_sha256,
                "recipe": dict(capability.recipe),
                "recipe_fingerprint": capability.recipe_fingerprint,
                "layers": [capability.layers.begin, capability.layers.end],
                "owned_tensors": capability.owned_tensors,
                "owned_tensor_bytes": capability.owned_tensor_bytes,
                "worker_version": capability.worker_version,
            }
            for capability in route.capabilities
        ],
    )
    for prompt in plan.prompt_tokens:
        before = await route.metrics()
        async with route.session() as session:
            run.decoded[prompt] = await _decode(session, _prompt(prompt, vocabulary), plan)
            run.metrics[prompt] = before, await route.metrics()
        if given:
            async with route.session() as session:
                tokens = _prompt(prompt + plan.compared_logit_rows - 1, vocabulary)
                run.given[prompt] = await _behind(session, tokens, prompt)
        say(f"{prompt} + {plan.decode_tokens} tokens done")
    run.together = await _sessions(route, plan, vocabulary, at_once=at_once)
    for _ in range(cancellations):
        run.cancellations.append(await _cancel(route, _prompt(max(plan.prompt_tokens), vocabulary)))
    await _until_free(route)
    run.left_behind = [
        {
            "open_sessions": metrics.open_sessions,
            "kv_bytes": metrics.kv_bytes,
            "queued_steps": metrics.queued_steps,
        }
        for metrics in await route.metrics()
    ]
    return run


def _prompt(length: int, vocabulary: int, salt: int = 0) -> list[int]:
    """Some token ids, the same in every run."""
    return [300 + (7919 * (i + salt) + 104729) % (vocabulary - 300) for i in range(length)]


async def _decode(session: Session, prompt: Sequence[int], plan: Plan) -> _Decoded:
    decoded = _Decoded([], [], [])
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
    decoded.max_frame_bytes = session.limits.max_frame_bytes if session.limits else 0
    return decoded


async def _behind(session: Session, tokens: Sequence[int], prompt: int) -> list[bytes]:
    """The logits behind the prompt, and behind each token that follows, whatever was likelier."""
    logits: list[bytes] = []
    begin = 0
    for end in range(prompt, len(tokens) + 1):
        result = await session.generate(
            tokens[begin:end],
            max_tokens=1,
            start_position=begin,
            ignore_end_of_generation=True,
            return_logits=True,
        ).result()
        logits += result.logits
        begin = end
    return logits


async def _sessions(
    route: Route, plan: Plan, vocabulary: int, *, at_once: bool
) -> list[tuple[int, ...]]:
    """The texts of sessions with prompts of their own, at the same time or in turns."""

    async def one(salt: int) -> tuple[int, ...]:
        async with route.session() as session:
            result = await session.generate(
                _prompt(min(plan.prompt_tokens), vocabulary, salt),
                max_tokens=plan.decode_tokens,
                ignore_end_of_generation=True,
            ).result()
            return result.token_ids

    salts = [1000 * (number + 1) for number in range(plan.sessions)]
    if at_once:
        return list(await asyncio.gather(*(one(salt) for salt in salts)))
    return [await one(salt) for salt in salts]


def _row(chain: _Run, whole: _Run, plan: Plan, prompt: int) -> dict[str, Any]:
    decoded, reference = chain.decoded[prompt], whole.decoded[prompt]
    before, after = chain.metrics[prompt]
    sent = [
        new.seam_bytes_sent - old.seam_bytes_sent for old, new in zip(before, after, strict=True)
    ]
    tokens = prompt + plan.decode_tokens + plan.compared_logit_rows - 1
    chunk_bytes = max(sent[:-1], default=0) / tokens * min(prompt, plan.prefill_chunk_tokens)
    frame = decoded.max_frame_bytes
    difference = max_logit_difference(decoded.logits, reference.logits)
    return {
        "prompt_tokens": prompt,
        **plan.crossings(prompt),
        "identical": decoded.token_ids == reference.token_ids and difference == 0.0,
        "compared_tokens": len(decoded.token_ids),
        "compared_logit_rows": len(decoded.logits),
        "max_logit_difference": difference,
        "ttft_ms": 1000 * decoded.first,
        "prompt_tokens_per_s": prompt / decoded.first,
        "first_ms_per_token": 1000 * statistics.fmean(decoded.seconds[1 : SPAN + 1]),
        "last_ms_per_token": 1000 * statistics.fmean(decoded.seconds[1:][-SPAN:]),
        "worst_ms_per_token": 1000 * max(decoded.seconds[1:]),
        "whole_ms_per_token": 1000 * statistics.fmean(reference.seconds[1:]),
        "whole_ttft_ms": 1000 * reference.first,
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
        "whole_resident_bytes": whole.metrics[prompt][1][0].resident_bytes,
        "kv_bytes": [metrics.kv_bytes for metrics in after],
        "kv_budget_bytes": [metrics.kv_budget_bytes for metrics in after],
    }


def _mixed_row(chain: _Run, wholes: Sequence[_Run], prompt: int) -> dict[str, Any]:
    """How far the chain is from either lane's whole model, and they from each other."""
    decoded, found = chain.decoded[prompt], chain.given[prompt]
    head, tail = (whole.given[prompt] for whole in wholes)
    references = [whole.decoded[prompt] for whole in wholes]
    return {
        "prompt_tokens": prompt,
        "compared_logit_rows": len(found),
        "squared_error": {
            "head": squared_error(found, head),
            "tail": squared_error(found, tail),
            "of_lanes": squared_error(tail, head),
        },
        "same_choices": {
            "head": same_choices(found, head),
            "tail": same_choices(found, tail),
            "of_lanes": same_choices(tail, head),
        },
        "ttft_ms": 1000 * decoded.first,
        "last_ms_per_token": 1000 * statistics.fmean(decoded.seconds[1:][-SPAN:]),
        "whole_ttft_ms": [1000 * one.first for one in references],
        "whole_ms_per_token": [1000 * statistics.fmean(one.seconds[1:]) for one in references],
    }


async def _cancel(route: Route, prompt: Sequence[int]) -> dict[str, float]:
    """Milliseconds until a running prefill has ended, and until every stage has freed it."""
    async with route.session() as session:
        generation = session.generate(prompt, max_tokens=1)
        async for event in generation:
            if isinstance(event, PrefillProgress) and event.tokens_done > 0:
                break
        started = time.perf_counter()
        await generation.cancel()
        ended = time.perf_counter()
    await _until_free(route)
    return {
        "cancel_ms": 1000 * (ended - started),
        "release_ms": 1000 * (time.perf_counter() - ended),
    }


async def _until_free(route: Route) -> None:
    """Waits until no stage holds a session; not for ever, the record then says what is left."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_FREE_SECONDS):
            while any(metrics.open_sessions for metrics in await route.metrics()):
                pass
