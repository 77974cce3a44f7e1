"""Bounds and canonical form of sampling parameters on the wire."""

from __future__ import annotations

import math
from typing import Final

from meshnet_gguf.errors import MeshnetError
from proto.meshnet.shard.v1 import errors_pb2, sampling_pb2

__all__ = ["canonical_sampling", "validate_sampling"]

_MAX_PENALTY_TOKENS: Final = 4096
_MAX_TOP_LOGPROBS: Final = 20
_MAX_LOGIT_BIASES: Final = 1024
_DEFAULT_PENALTY_TOKENS: Final = 64
_MAX_GRAMMAR_BYTES: Final = 64 << 10


def canonical_sampling(params: sampling_pb2.SamplingParams) -> sampling_pb2.SamplingParams:
    """A copy in which what is off is unset, so that equal parameters have equal bytes."""
    copy = sampling_pb2.SamplingParams()
    copy.CopyFrom(params)
    if copy.top_p in (0.0, 1.0):
        copy.top_p = 0.0
    if copy.repetition_penalty in (0.0, 1.0):
        copy.repetition_penalty = 0.0
    if copy.penalty_last_n == _DEFAULT_PENALTY_TOKENS:
        copy.penalty_last_n = 0
    return copy


def validate_sampling(params: sampling_pb2.SamplingParams, vocabulary_size: int) -> None:
    """Raises SAMPLING_INVALID naming the field, its bounds and the value."""
    _within("temperature", params.temperature, 0.0, 10.0)
    if not 0 <= params.top_k <= vocabulary_size:
        raise _invalid("top_k", f"[0, {vocabulary_size}]", params.top_k)
    _within("top_p", params.top_p, 0.0, 1.0)
    _within("min_p", params.min_p, 0.0, 1.0)
    _within("repetition_penalty", params.repetition_penalty, 0.0, 10.0)
    _within("frequency_penalty", params.frequency_penalty, -2.0, 2.0)
    _within("presence_penalty", params.presence_penalty, -2.0, 2.0)
    if params.penalty_last_n > _MAX_PENALTY_TOKENS:
        raise _invalid("penalty_last_n", "[0, 4096]", params.penalty_last_n)
    if params.top_logprobs > _MAX_TOP_LOGPROBS:
        raise _invalid("top_logprobs", "[0, 20]", params.top_logprobs)
    for field in ("grammar", "json_schema"):
        size = len(getattr(params, field).encode())
        if size > _MAX_GRAMMAR_BYTES:
            raise _invalid(field, f"[0, {_MAX_GRAMMAR_BYTES}] bytes", size)
    if params.grammar and params.json_schema:
        raise MeshnetError(
            errors_pb2.REASON_SAMPLING_INVALID,
            "sampling.grammar and sampling.json_schema must not both be set; write what the text"
            " must be in one of them",
        )
    if len(params.logit_bias) > _MAX_LOGIT_BIASES:
        raise _invalid("logit_bias", "[0, 1024] entries", len(params.logit_bias))
    for entry in params.logit_bias:
        if not 0 <= entry.token_id < vocabulary_size:
            raise _invalid("logit_bias.token_id", f"[0, {vocabulary_size})", entry.token_id)
        if math.isnan(entry.bias) or entry.bias == math.inf:
            raise _invalid("logit_bias.bias", "finite numbers and -inf", entry.bias)
    if len({entry.token_id for entry in params.logit_bias}) < len(params.logit_bias):
        raise MeshnetError(
            errors_pb2.REASON_SAMPLING_INVALID,
            "sampling.logit_bias must name a token once; add the biases of one token up",
        )


def _within(field: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise _invalid(field, f"[{low:g}, {high:g}]", value)


def _invalid(field: str, bounds: str, value: float) -> MeshnetError:
    return MeshnetError(
        errors_pb2.REASON_SAMPLING_INVALID,
        f"sampling.{field} must be in {bounds}, got {value}",
    )
