"""Frozen values that the client speaks in, and their conversions from and to protobuf.

Bytes are bytes, times are seconds unless a name ends in _us (microseconds) or _ms.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from meshnet_gguf.errors import MeshnetError
from proto.meshnet.shard.v1 import boundary_pb2, errors_pb2, sampling_pb2, shard_pb2, tokenizer_pb2

SCHEMA_VERSION = 1


@dataclass(frozen=True, order=True)
class LayerRange:
    """Half-open range [begin, end) of main layers."""

    begin: int
    end: int

    def __str__(self) -> str:
        return f"[{self.begin}, {self.end})"

    @classmethod
    def from_proto(cls, message: boundary_pb2.LayerRange) -> LayerRange:
        return cls(message.begin, message.end)

    def to_proto(self) -> boundary_pb2.LayerRange:
        return boundary_pb2.LayerRange(begin=self.begin, end=self.end)


@dataclass(frozen=True)
class Limits:
    """Bounds of one stream, see Limits in shard.proto."""

    max_frame_bytes: int
    max_bundle_bytes: int
    max_step_tokens: int
    max_inflight_steps: int

    @classmethod
    def from_proto(cls, message: shard_pb2.Limits) -> Limits:
        return cls(
            message.max_frame_bytes,
            message.max_bundle_bytes,
            message.max_step_tokens,
            message.max_inflight_steps,
        )

    def to_proto(self) -> shard_pb2.Limits:
        return shard_pb2.Limits(
            max_frame_bytes=self.max_frame_bytes,
            max_bundle_bytes=self.max_bundle_bytes,
            max_step_tokens=self.max_step_tokens,
            max_inflight_steps=self.max_inflight_steps,
        )


@dataclass(frozen=True)
class Capability:
    """What a worker has loaded and can do, see Capability in shard.proto.

    Enumerations are their names without prefix ("EXACT", "FIXTURE"). A boundary is its schema's
    name and version, None where the stage has none (the head's input, the tail's output).
    """

    engine: str
    architecture: str
    artifact_sha256: str
    recipe: Mapping[str, str]
    recipe_fingerprint: str
    layers: LayerRange
    model_layers: int
    boundary_in: tuple[str, int] | None
    boundary_out: tuple[str, int] | None
    limits: Limits
    max_sessions: int
    context_tokens: int
    batch_policy: str
    evidence: str
    vocabulary_size: int
    prefill_chunk_tokens: int
    owned_tensor_bytes: int
    owned_tensors: int
    worker_version: str

    @classmethod
    def from_proto(cls, message: shard_pb2.Capability) -> Capability:
        """Raises MeshnetError (SCHEMA_VERSION_UNSUPPORTED) for another protocol version's."""
        if message.schema_version != SCHEMA_VERSION:
            raise MeshnetError(
                errors_pb2.REASON_SCHEMA_VERSION_UNSUPPORTED,
                f"expected protocol version {SCHEMA_VERSION}, got {message.schema_version}",
            )

        def boundary(schema: boundary_pb2.BoundarySchema) -> tuple[str, int] | None:
            return (schema.name, schema.version) if schema.name else None

        return cls(
            engine=message.engine,
            architecture=message.architecture,
            artifact_sha256=message.artifact_sha256,
            recipe={line.name: line.value for line in message.recipe.fields},
            recipe_fingerprint=message.recipe.fingerprint,
            layers=LayerRange.from_proto(message.range),
            model_layers=message.model_layers,
            boundary_in=boundary(message.boundary_in),
            boundary_out=boundary(message.boundary_out),
            limits=Limits.from_proto(message.limits),
            max_sessions=message.max_sessions,
            context_tokens=message.context_tokens,
            batch_policy=_enum_name(shard_pb2.BatchPolicy, message.batch_policy, "BATCH_POLICY_"),
            evidence=_enum_name(shard_pb2.Evidence, message.evidence, "EVIDENCE_"),
            vocabulary_size=message.vocabulary_size,
            prefill_chunk_tokens=message.prefill_chunk_tokens,
            owned_tensor_bytes=message.owned_tensor_bytes,
            owned_tensors=message.owned_tensors,
            worker_version=message.worker_version,
        )


def _enum_name(enumeration: Any, value: int, prefix: str) -> str:
    descriptor = enumeration.DESCRIPTOR.values_by_number.get(value)
    return str(value) if descriptor is None else str(descriptor.name).removeprefix(prefix)


_Enum = TypeVar("_Enum", bound=enum.Enum)


def known(enumeration: type[_Enum], value: int) -> _Enum:
    """The member with this number.

    Raises MeshnetError (UNKNOWN_ENUM_VALUE) for one that this version does not know.
    """
    try:
        return enumeration(value)
    except ValueError as error:
        raise MeshnetError(
            errors_pb2.REASON_UNKNOWN_ENUM_VALUE,
            f"expected a {enumeration.__name__} that this version knows, got {value}",
        ) from error


class WorkerState(enum.Enum):
    """States of a worker; it only moves forward through them."""

    UNSPECIFIED = shard_pb2.WORKER_STATE_UNSPECIFIED
    LOADING = shard_pb2.WORKER_STATE_LOADING
    WARMING_UP = shard_pb2.WORKER_STATE_WARMING_UP
    READY = shard_pb2.WORKER_STATE_READY
    DRAINING = shard_pb2.WORKER_STATE_DRAINING
    FAILED = shard_pb2.WORKER_STATE_FAILED


@dataclass(frozen=True)
class Health:
    """A worker's state, with the reason's name and a message when it is not ready.

    The rest is what it has loaded, as in Capability: None and empty before that.
    """

    state: WorkerState
    reason: str
    message: str
    layers: LayerRange | None
    artifact_sha256: str
    recipe_fingerprint: str


@dataclass(frozen=True)
class Histogram:
    """How long things took: how many up to each bound (microseconds), more above them all."""

    bounds_us: tuple[int, ...]
    counts: tuple[int, ...]
    sum_us: int

    @classmethod
    def from_proto(cls, message: shard_pb2.Histogram) -> Histogram:
        """Raises MeshnetError (SIZE_MISMATCH) unless there is one count more than bounds."""
        if message.bounds_us and len(message.counts) != len(message.bounds_us) + 1:
            raise MeshnetError(
                errors_pb2.REASON_SIZE_MISMATCH,
                f"expected a count for each of {len(message.bounds_us)} bounds and one more, "
                f"got {len(message.counts)}",
            )
        return cls(tuple(message.bounds_us), tuple(message.counts), message.sum_us)

    @property
    def count(self) -> int:
        """All of them."""
        return sum(self.counts)


@dataclass(frozen=True)
class Metrics:
    """A worker's gauges and its counters since start, see Metrics in shard.proto."""

    resident_bytes: int
    owned_tensor_bytes: int
    kv_bytes: int
    kv_budget_bytes: int
    open_sessions: int
    queued_steps: int
    queued_bytes: int
    prefill_tokens: int
    decode_tokens: int
    prefill_engine_us: int
    decode_engine_us: int
    engine_calls: int
    seam_bytes_received: int
    seam_bytes_sent: int
    return_bytes_sent: int
    sessions_opened: int
    sessions_completed: int
    sessions_cancelled: int
    sessions_failed: int
    sessions_evicted: int
    refusals: Mapping[str, int]
    warm_up_step_us: int
    prefill_stay: Histogram
    decode_stay: Histogram
    seam_connect: Histogram
    decode_round_trip: Histogram

    @classmethod
    def from_proto(cls, message: shard_pb2.Metrics) -> Metrics:
        return cls(
            resident_bytes=message.resident_bytes,
            owned_tensor_bytes=message.owned_tensor_bytes,
            kv_bytes=message.kv_bytes,
            kv_budget_bytes=message.kv_budget_bytes,
            open_sessions=message.open_sessions,
            queued_steps=message.queued_steps,
            queued_bytes=message.queued_bytes,
            prefill_tokens=message.prefill_tokens,
            decode_tokens=message.decode_tokens,
            prefill_engine_us=message.prefill_engine_us,
            decode_engine_us=message.decode_engine_us,
            engine_calls=message.engine_calls,
            seam_bytes_received=message.seam_bytes_received,
            seam_bytes_sent=message.seam_bytes_sent,
            return_bytes_sent=message.return_bytes_sent,
            sessions_opened=message.sessions_opened,
            sessions_completed=message.sessions_completed,
            sessions_cancelled=message.sessions_cancelled,
            sessions_failed=message.sessions_failed,
            sessions_evicted=message.sessions_evicted,
            refusals=dict(message.refusals),
            warm_up_step_us=message.warm_up_step_us,
            prefill_stay=Histogram.from_proto(message.prefill_stay),
            decode_stay=Histogram.from_proto(message.decode_stay),
            seam_connect=Histogram.from_proto(message.seam_connect),
            decode_round_trip=Histogram.from_proto(message.decode_round_trip),
        )


@dataclass(frozen=True)
class SpecialToken:
    """A token with a role ("bos", "eos", "eot", ...) and its bytes."""

    role: str
    token_id: int
    piece: bytes


@dataclass(frozen=True)
class Vocabulary:
    """A model's vocabulary, without its pieces."""

    size: int
    add_bos: bool
    add_eos: bool
    special_tokens: tuple[SpecialToken, ...]
    end_of_generation_ids: frozenset[int]
    chat_template: str
    named_chat_templates: Mapping[str, str]

    @classmethod
    def from_proto(cls, message: tokenizer_pb2.Vocabulary) -> Vocabulary:
        return cls(
            size=message.size,
            add_bos=message.add_bos,
            add_eos=message.add_eos,
            special_tokens=tuple(
                SpecialToken(token.role, token.token_id, token.piece)
                for token in message.special_tokens
            ),
            end_of_generation_ids=frozenset(message.end_of_generation_ids),
            chat_template=message.chat_template,
            named_chat_templates=dict(message.named_chat_templates),
        )

    @property
    def control_tokens(self) -> tuple[SpecialToken, ...]:
        """The special tokens that are no text: the line feed has a role, and is text."""
        return tuple(token for token in self.special_tokens if token.role != "nl")

    def special_text(self, role: str) -> str:
        """The text of the special token with this role, empty when there is none."""
        for token in self.special_tokens:
            if token.role == role:
                return token.piece.decode("utf-8", "replace")
        return ""


@dataclass(frozen=True)
class SamplingParams:
    """How the tail turns logits into tokens; meaning, order and bounds as in sampling.proto.

    The default is greedy: the token with the highest logit, the lowest id among equals.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_last_n: int = 64
    seed: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    top_logprobs: int = 0
    logprobs: bool = False
    grammar: str = ""
    """What the text must be, in llama.cpp's notation (GBNF) with a rule `root`; empty = any."""
    json_schema: str = ""
    """As `grammar`: a JSON schema, itself as JSON text."""

    def to_proto(self) -> sampling_pb2.SamplingParams:
        return sampling_pb2.SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            penalty_last_n=self.penalty_last_n,
            seed=self.seed,
            logit_bias=[
                sampling_pb2.LogitBias(token_id=token_id, bias=bias)
                for token_id, bias in sorted(self.logit_bias.items())
            ],
            top_logprobs=self.top_logprobs,
            logprobs=self.logprobs,
            grammar=self.grammar,
            json_schema=self.json_schema,
        )


@dataclass(frozen=True)
class StageReceipt:
    """What one stage contributed to a session."""

    layers: LayerRange
    prefill_tokens: int
    decode_tokens: int
    engine_us: int
    bytes_received: int
    bytes_sent: int

    @classmethod
    def from_proto(cls, message: shard_pb2.StageReceipt) -> StageReceipt:
        return cls(
            layers=LayerRange.from_proto(message.range),
            prefill_tokens=message.prefill_tokens,
            decode_tokens=message.decode_tokens,
            engine_us=message.engine_us,
            bytes_received=message.bytes_received,
            bytes_sent=message.bytes_sent,
        )


@dataclass(frozen=True)
class PrefillProgress:
    """So many of the prompt's tokens have gone through the head."""

    tokens_done: int
    tokens_total: int


@dataclass(frozen=True)
class Token:
    """One sampled token.

    `text` is what it completes: empty while a character is split over tokens, and for the tokens
    that end a generation. `piece` is the token's own bytes. `logits` are little-endian float32
    [vocabulary], empty unless asked for.
    """

    token_id: int
    position: int
    text: str
    piece: bytes
    end_of_generation: bool
    logprob: float | None
    top_logprobs: tuple[tuple[int, float], ...]
    logits: bytes


class FinishReason(enum.Enum):
    """Why a generation ended."""

    STOP = shard_pb2.FINISH_REASON_STOP
    LENGTH = shard_pb2.FINISH_REASON_LENGTH
    CANCELLED = shard_pb2.FINISH_REASON_CANCELLED


@dataclass(frozen=True)
class Finished:
    """The last event of a generation. `text` is what an unfinished character leaves behind."""

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    prefill_us: int
    decode_us: int
    text: str


Event = PrefillProgress | Token | Finished


@dataclass(frozen=True)
class GenerationResult:
    """A whole generation. Times as the client saw them, from its sending."""

    token_ids: tuple[int, ...]
    text: str
    finished: Finished
    time_to_first_token: float
    decode_tokens_per_second: float
    logits: tuple[bytes, ...]
