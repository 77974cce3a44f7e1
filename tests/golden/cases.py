"""The steps and the malformed frames of the golden files, with the reason each must get.

Reasons are written down here, beside the fault, from the order of checks that frame.proto gives;
nothing in this file asks an implementation for them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import xxhash
from meshnet_gguf.protocol import (
    FrameExpectation,
    Limits,
    WireStep,
    dense_residual_schema,
    encode_step,
    hyper_connection_schema,
)

from proto.meshnet.shard.v1 import boundary_pb2, frame_pb2, sampling_pb2

__all__ = ["EXPECTATION", "GoodStep", "Malformed", "good_steps", "malformed_frames"]

_SESSION: Final = bytes(range(16))
_N_EMBD: Final = 4
_ROW_BYTES: Final = 4 * (_N_EMBD + 2)

# The receiver that all malformed frames go to.
EXPECTATION: Final = FrameExpectation(
    work_id="golden-1",
    route_session_id=_SESSION,
    route_epoch=5,
    schema=dense_residual_schema(_N_EMBD),
    applied_end=2,
    vocabulary_size=100,
    context_tokens=64,
    limits=Limits(4096, 4096, 8, 4),
)


@dataclass(frozen=True)
class GoodStep:
    """A step that must be encoded to the same frames everywhere, and accepted."""

    name: str
    step: WireStep
    expectation: FrameExpectation


@dataclass(frozen=True)
class Malformed:
    """Frames of which the last, or the end of the stream after it, is refused."""

    name: str
    reason: str
    frames: list[bytes] = field(default_factory=list)
    finish: bool = False
    receiver: FrameExpectation | None = None
    """None: EXPECTATION."""


# ---- Good steps ----


def _step(
    tokens: int, n_embd: int, seed: int, *, start: int = 0, vocabulary: int = 100, **changes: Any
) -> WireStep:
    """A step whose residual is made of small integers' quotients, exact in f32."""
    numbers = np.arange(tokens * n_embd, dtype=np.int64) * 7919 + seed
    values: dict[str, Any] = {
        "work_id": "golden-1",
        "route_session_id": _SESSION,
        "route_epoch": 5,
        "step": 1,
        "applied_end": 2,
        "start_position": start,
        "token_ids": ((np.arange(tokens) * 31 + seed) % vocabulary).astype(np.int32),
        "residual": ((numbers % 4099 - 2049) / 64).astype(np.float32).reshape(tokens, n_embd),
    }
    return WireStep(**{**values, **changes})


def _streams(step: WireStep, streams: int) -> WireStep:
    """The same numbers as several residual streams a token, as DeepSeek V4 has them."""
    tokens, width = step.residual.shape
    return replace(step, residual=step.residual.reshape(tokens, streams, width // streams))


def _receiver(step: WireStep, **changes: Any) -> FrameExpectation:
    *streams, n_embd = step.residual.shape[1:]
    values: dict[str, Any] = {
        "work_id": step.work_id,
        "route_session_id": step.route_session_id,
        "route_epoch": step.route_epoch,
        "schema": (
            hyper_connection_schema(streams[0], n_embd)
            if streams
            else dense_residual_schema(n_embd)
        ),
        "applied_end": step.applied_end,
        "vocabulary_size": 50000,
        "context_tokens": 2048,
        "limits": Limits(4096, 1 << 20, 512, 4),
    }
    return FrameExpectation(**{**values, **changes})


def good_steps() -> Iterator[GoodStep]:
    """Steps of every kind: phases, sampling, fragment counts, extreme values."""
    decode = {"phase": frame_pb2.PHASE_DECODE, "output_rows": frame_pb2.OUTPUT_ROWS_LAST}

    def good(name: str, step: WireStep, **receiver: Any) -> GoodStep:
        return GoodStep(name, step, _receiver(step, **receiver))

    yield good("decode", _step(1, 8, 1, start=17, step=9, **decode))
    yield good("decode_with_logits", _step(1, 8, 2, return_logits=True, **decode))
    yield good(
        "decode_greedy_from_here", _step(1, 8, 3, sampling=sampling_pb2.SamplingParams(), **decode)
    )
    sampling = sampling_pb2.SamplingParams(
        temperature=0.75,
        top_k=40,
        top_p=0.875,
        min_p=0.0625,
        repetition_penalty=1.125,
        frequency_penalty=-0.5,
        presence_penalty=2,
        penalty_last_n=256,
        seed=4294967295,
        top_logprobs=20,
        logprobs=True,
        logit_bias=[
            sampling_pb2.LogitBias(token_id=7, bias=float("-inf")),
            sampling_pb2.LogitBias(token_id=3, bias=1.5),
            sampling_pb2.LogitBias(token_id=0),
        ],
    )
    yield good("decode_with_sampling", _step(1, 8, 4, sampling=sampling, **decode))
    grammar = sampling_pb2.SamplingParams(grammar='root ::= "j" | "\u0142"')
    yield good("decode_with_grammar", _step(1, 8, 4, sampling=grammar, **decode))
    schema = sampling_pb2.SamplingParams(json_schema='{"type": "integer"}', seed=1)
    yield good("decode_with_json_schema", _step(1, 8, 4, sampling=schema, **decode))
    yield good("prefill_in_one_frame", _step(4, 8, 5))
    yield good(
        "last_prefill_chunk", _step(5, 8, 6, start=32, output_rows=frame_pb2.OUTPUT_ROWS_LAST)
    )
    yield good("prefill_in_two_fragments", _step(48, 20, 7))
    yield good("prefill_in_three_fragments", _step(100, 24, 8, step=2, start=512))
    # The header takes 206 bytes, the fragment's reserve 64: 3826 bytes fit, in units of 64: 3776.
    yield good("payload_of_whole_fragments", _step(118, 14, 9))
    yield good(
        "extreme_numbers",
        _step(
            1,
            2,
            10,
            start=2**31 - 2,
            route_session_id=b"\xff" * 16,
            route_epoch=2**64 - 1,
            step=2**64 - 1,
            applied_end=2**32 - 1,
            work_id="A-z0.9_:" * 8,
            token_ids=np.array([2**31 - 1], np.int32),
            residual=np.array([[np.finfo(np.float32).max, -np.finfo(np.float32).max]], np.float32),
            **decode,
        ),
        vocabulary_size=2**31,
        context_tokens=2**31,
    )
    yield good("deepseek4_decode", _streams(_step(1, 32, 12, start=200, step=3, **decode), 4))
    yield good("deepseek4_prefill_in_two_fragments", _streams(_step(20, 64, 13), 4))
    yield good(
        "smallest_floats",
        _step(1, 4, 11, residual=np.array([[0.0, -0.0, 2**-149, -(2**-126)]], np.float32)),
    )


# ---- Malformed frames ----


def _seal(frame: frame_pb2.Frame) -> None:
    frame.fragment.checksum = xxhash.xxh3_64_intdigest(frame.fragment.data)


def _payload(tokens: int, start: int) -> bytes:
    residual = np.arange(tokens * _N_EMBD, dtype="<f4").tobytes()
    positions = np.arange(start, start + tokens, dtype="<i4").tobytes()
    return residual + positions + np.arange(tokens, dtype="<i4").tobytes()


def _identity(step: int) -> frame_pb2.Frame:
    return frame_pb2.Frame(
        schema_version=1,
        work_id="golden-1",
        route_session_id=_SESSION,
        route_epoch=5,
        step=step,
    )


def _bundle(
    tokens: int = 1, *, start: int = 3, step: int = 1, length: int | None = None
) -> list[frame_pb2.Frame]:
    """Good frames, made by hand from the contract; `length` is that of a fragment's data."""
    frame = _identity(step)
    frame.phase = frame_pb2.PHASE_PREFILL
    frame.applied.end = 2
    frame.start_position = start
    frame.token_count = tokens
    frame.cache.SetInParent()
    frame.cache.cached_tokens = start
    frame.output_rows = frame_pb2.OUTPUT_ROWS_LAST
    frame.boundary_schema = "dense.residual"
    frame.boundary_version = 1
    for name, dtype, shape in (
        ("residual", boundary_pb2.DTYPE_F32, [tokens, _N_EMBD]),
        ("positions", boundary_pb2.DTYPE_I32, [tokens]),
        ("token_ids", boundary_pb2.DTYPE_I32, [tokens]),
    ):
        frame.tensors.add(
            name=name,
            dtype=dtype,
            byte_order=boundary_pb2.BYTE_ORDER_LITTLE_ENDIAN,
            compression=boundary_pb2.COMPRESSION_NONE,
            shape=shape,
            byte_length=4 * int(np.prod(shape)),
        )
    payload = _payload(tokens, start)
    length = length or len(payload)
    frames = [frame]
    frames += [_identity(step) for _ in range(length, len(payload), length)]
    for index, part in enumerate(frames):
        part.fragment.index = index
        part.fragment.count = len(frames)
        part.fragment.offset = index * length
        part.fragment.data = payload[index * length : (index + 1) * length]
        _seal(part)
    return frames


Change = Callable[[frame_pb2.Frame], object]


def _with_data(offset: int, data: bytes) -> Change:
    """Overwrites payload bytes and seals the fragment again."""

    def change(frame: frame_pb2.Frame) -> None:
        payload = bytearray(frame.fragment.data)
        payload[offset : offset + len(data)] = data
        frame.fragment.data = bytes(payload)
        _seal(frame)

    return change


def _extended(**lengths: int) -> Change:
    """Makes the data longer or shorter by a number of bytes and seals it again."""

    def change(frame: frame_pb2.Frame) -> None:
        data = frame.fragment.data
        by = lengths["by"]
        frame.fragment.data = data + bytes(by) if by > 0 else data[:by]
        _seal(frame)

    return change


def _number(field_number: int, value: int) -> bytes:
    """A varint field, as bytes."""
    return _varint(field_number << 3) + _varint(value)


def _delimited(field_number: int, data: bytes) -> bytes:
    return _varint(field_number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def malformed_frames() -> Iterator[Malformed]:
    """All cases, grouped by what is wrong."""
    yield from _malformed_bytes()
    yield from _unknown_fields()
    yield from _changed_identities()
    yield from _changed_headers()
    yield from _changed_samplings()
    yield from _changed_tensors()
    yield from _changed_deepseek4()
    yield from _changed_fragments()
    yield from _sequences()
    yield from _changed_content()
    yield from _several_faults()


def _one(name: str, reason: str, change: Change, tokens: int = 1) -> Malformed:
    """A good one-frame bundle with one change."""
    (frame,) = _bundle(tokens)
    change(frame)
    return Malformed(name, reason, [frame.SerializeToString()])


def _malformed_bytes() -> Iterator[Malformed]:
    good = _bundle()[0].SerializeToString()
    bad = "MALFORMED_MESSAGE"
    yield Malformed("truncated_in_fragment", bad, [good[:-1]])
    yield Malformed("truncated_in_header", bad, [good[:20]])
    yield Malformed("truncated_after_tag", bad, [good + b"\x08"])
    yield Malformed("random_bytes", bad, [bytes.fromhex("9f3c07d1e4aa5b7780ff1c2233445566")])
    yield Malformed("text", bad, [b"GET / HTTP/1.1\r\n\r\n"])
    yield Malformed("field_number_zero", bad, [good + b"\x00\x01"])
    yield Malformed("start_of_a_group", bad, [good + b"\x0b\x0c"])
    yield Malformed("end_of_a_group", bad, [good + b"\x0c"])
    yield Malformed("wire_type_six", bad, [good + b"\x0e"])
    yield Malformed("varint_of_eleven_bytes", bad, [b"\x08" + b"\xff" * 10 + b"\x01"])
    yield Malformed("varint_beyond_64_bits", bad, [b"\x08" + b"\xff" * 9 + b"\x02"])
    yield Malformed("tag_beyond_32_bits", bad, [good + b"\xff\xff\xff\xff\x1f\x01"])
    yield Malformed("length_beyond_the_end", bad, [good + b"\x12" + b"\xff\xff\xff\x7f"])
    yield Malformed("length_beyond_32_bits", bad, [good + b"\x12\xff\xff\xff\xff\x1f"])
    yield Malformed("work_id_is_no_utf8", bad, [good + _delimited(2, b"\xff\xfe")])
    yield Malformed("work_id_is_a_surrogate", bad, [good + _delimited(2, b"\xed\xa0\x80")])
    tensor = _delimited(1, b"residual") + b"\x10"
    yield Malformed("truncated_in_a_tensor", bad, [good + _delimited(16, tensor)])
    shape = _delimited(5, b"\x01\x80")
    yield Malformed("truncated_in_a_packed_shape", bad, [good + _delimited(16, shape)])
    yield Malformed("larger_than_the_frame_limit", "FRAME_TOO_LARGE", [good + bytes(4096)])
    yield Malformed("empty_message", "SCHEMA_VERSION_UNSUPPORTED", [b""])


def _unknown_fields() -> Iterator[Malformed]:
    good = _bundle()[0].SerializeToString()
    unknown = "UNKNOWN_FIELD"
    yield Malformed("unknown_number", unknown, [good + _number(19, 1)])
    yield Malformed("unknown_bytes", unknown, [good + _delimited(1000, b"later version")])
    yield Malformed("unknown_fixed64", unknown, [good + _varint(50 << 3 | 1) + bytes(8)])
    yield Malformed("unknown_fixed32", unknown, [good + _varint(50 << 3 | 5) + bytes(4)])
    yield Malformed("unknown_in_applied", unknown, [good + _delimited(7, _number(3, 1))])
    yield Malformed("unknown_in_cache", unknown, [good + _delimited(10, _number(2, 1))])
    yield Malformed("unknown_in_tensor", unknown, [good + _delimited(16, _number(7, 1))])
    yield Malformed("unknown_in_fragment", unknown, [good + _delimited(17, _number(6, 1))])
    bias = _delimited(10, _number(3, 1))
    yield Malformed("unknown_in_logit_bias", unknown, [good + _delimited(12, bias)])
    yield Malformed("number_as_bytes", unknown, [good + _delimited(5, b"\x01")])
    yield Malformed("bytes_as_number", unknown, [good + _number(3, 1)])
    yield Malformed("message_as_fixed32", unknown, [good + _varint(7 << 3 | 5) + bytes(4)])
    yield Malformed("checksum_as_varint", unknown, [good + _delimited(17, _number(5, 1))])
    yield Malformed("unknown_before_truncated", unknown, [_number(19, 1) + good[:-1]])


def _changed_identities() -> Iterator[Malformed]:
    bounds = "FIELD_OUT_OF_BOUNDS"
    for version in (0, 2, 2**32 - 1):
        yield _one(
            f"schema_version_{version}",
            "SCHEMA_VERSION_UNSUPPORTED",
            lambda f, version=version: setattr(f, "schema_version", version),  # type: ignore[misc]
        )
    for name in ("architecture_state", "recurrent_state"):
        yield _one(
            f"reserved_{name}",
            "RESERVED_FIELD_SET",
            lambda f, name=name: setattr(f.reserved_state, name, b"\x01"),  # type: ignore[misc]
        )
    # Typed and reserved for multi-token prediction (docs/deepseek-v4-mtp.md).
    hidden = _reserved_tensor("mtp.hidden", boundary_pb2.DTYPE_F32, [1, 4, 2])
    drafts = _reserved_tensor("mtp.draft_token_ids", boundary_pb2.DTYPE_I32, [1])
    for case, boundary in (
        ("reserved_mtp", frame_pb2.MtpBoundary()),
        ("reserved_mtp_hidden_field", frame_pb2.MtpBoundary(hidden=hidden)),
        ("reserved_mtp_draft_token_ids_field", frame_pb2.MtpBoundary(draft_token_ids=drafts)),
        (
            "reserved_mtp_round",
            frame_pb2.MtpBoundary(hidden=hidden, draft_token_ids=drafts, draft_position=4),
        ),
    ):
        yield _one(
            case,
            "RESERVED_FIELD_SET",
            lambda f, boundary=boundary: f.reserved_state.mtp.CopyFrom(  # type: ignore[misc]
                boundary
            ),
        )
    yield _one(
        "reserved_state_without_content",
        "RESERVED_FIELD_SET",
        lambda f: f.reserved_state.SetInParent(),
    )
    yield _one("no_work_id", bounds, lambda f: f.ClearField("work_id"))
    yield _one("long_work_id", bounds, lambda f: setattr(f, "work_id", "x" * 65))
    yield _one("work_id_with_a_space", bounds, lambda f: setattr(f, "work_id", "golden 1"))
    yield _one("work_id_of_another_session", bounds, lambda f: setattr(f, "work_id", "golden-2"))
    yield _one("no_session_id", bounds, lambda f: f.ClearField("route_session_id"))
    yield _one("short_session_id", bounds, lambda f: setattr(f, "route_session_id", _SESSION[:15]))
    yield _one(
        "long_session_id", bounds, lambda f: setattr(f, "route_session_id", _SESSION + b"\x00")
    )
    yield _one("epoch_zero", bounds, lambda f: setattr(f, "route_epoch", 0))
    yield _one("step_zero", bounds, lambda f: setattr(f, "step", 0))
    yield _one(
        "foreign_session", "SESSION_UNKNOWN", lambda f: setattr(f, "route_session_id", b"x" * 16)
    )
    yield _one("stale_epoch", "STALE_EPOCH", lambda f: setattr(f, "route_epoch", 4))
    yield _one("first_epoch_again", "STALE_EPOCH", lambda f: setattr(f, "route_epoch", 1))
    yield _one("later_epoch", "SESSION_UNKNOWN", lambda f: setattr(f, "route_epoch", 6))


def _reserved_tensor(
    name: str, dtype: boundary_pb2.DType, shape: list[int]
) -> boundary_pb2.TensorHeader:
    return boundary_pb2.TensorHeader(
        name=name,
        dtype=dtype,
        byte_order=boundary_pb2.BYTE_ORDER_LITTLE_ENDIAN,
        compression=boundary_pb2.COMPRESSION_NONE,
        shape=shape,
        byte_length=4 * math.prod(shape),
    )


def _changed_deepseek4() -> Iterator[Malformed]:
    """Frames for a stage of DeepSeek V4, whose residual has an axis for its streams."""
    step = _streams(_step(2, 32, 14), 4)
    receiver = _receiver(step)

    def changed(name: str, reason: str, change: Change) -> Malformed:
        (frame,) = encode_step(step, receiver.schema, receiver.limits)
        change(frame)
        return Malformed(f"deepseek4_{name}", reason, [frame.SerializeToString()], False, receiver)

    def shaped(name: str, index: int, shape: list[int]) -> Malformed:
        def change(frame: frame_pb2.Frame) -> None:
            frame.tensors[index].shape[:] = shape

        return changed(name, "SHAPE_MISMATCH", change)

    yield shaped("streams_flattened", 0, [2, 32])
    yield shaped("streams_transposed", 0, [2, 8, 4])
    yield shaped("other_streams", 0, [2, 2, 16])
    yield shaped("fewer_token_ids", 2, [1])
    yield changed("no_token_ids", "TENSOR_MISSING", lambda f: f.tensors.pop())
    mtp = _reserved_tensor("mtp.hidden", boundary_pb2.DTYPE_F32, [2, 4, 8])
    yield changed("mtp_hidden", "TENSOR_UNEXPECTED", lambda f: f.tensors.append(mtp))
    schema = "BOUNDARY_SCHEMA_MISMATCH"
    yield changed("dense_schema", schema, lambda f: setattr(f, "boundary_schema", "dense.residual"))
    yield changed("later_version", schema, lambda f: setattr(f, "boundary_version", 2))
    yield changed(
        "architecture_state",
        "RESERVED_FIELD_SET",
        lambda f: setattr(f.reserved_state, "architecture_state", b"\x01"),
    )


def _changed_headers() -> Iterator[Malformed]:
    bounds = "FIELD_OUT_OF_BOUNDS"
    enum = "UNKNOWN_ENUM_VALUE"
    for value in (0, 3, -1):
        yield _one(
            f"phase_{value}",
            enum,
            lambda f, value=value: setattr(f, "phase", value),  # type: ignore[misc]
        )
        yield _one(
            f"output_rows_{value}",
            enum,
            lambda f, value=value: setattr(f, "output_rows", value),  # type: ignore[misc]
        )
    yield _one("no_applied", "RANGE_MISMATCH", lambda f: f.ClearField("applied"))
    yield _one("applied_too_short", "RANGE_MISMATCH", lambda f: setattr(f.applied, "end", 1))
    yield _one("applied_too_long", "RANGE_MISMATCH", lambda f: setattr(f.applied, "end", 3))
    yield _one("applied_from_one", "RANGE_MISMATCH", lambda f: setattr(f.applied, "begin", 1))
    yield _one("no_tokens", bounds, lambda f: setattr(f, "token_count", 0))
    yield _one("too_many_tokens", bounds, lambda f: setattr(f, "token_count", 9))
    yield _one("huge_token_count", bounds, lambda f: setattr(f, "token_count", 2**32 - 1))

    def start(position: int) -> Change:
        def change(frame: frame_pb2.Frame) -> None:
            frame.start_position = position
            frame.cache.cached_tokens = position

        return change

    yield _one("starts_behind_the_context", "CONTEXT_EXCEEDED", start(64))
    yield _one("ends_behind_the_context", "CONTEXT_EXCEEDED", start(63), tokens=2)
    yield _one("start_that_would_wrap_around", "CONTEXT_EXCEEDED", start(2**32 - 1))
    yield _one("no_cache_expectation", bounds, lambda f: f.ClearField("cache"))
    yield _one("other_cache_expectation", bounds, lambda f: setattr(f.cache, "cached_tokens", 2))
    schema = "BOUNDARY_SCHEMA_MISMATCH"
    yield _one("no_schema", schema, lambda f: f.ClearField("boundary_schema"))
    yield _one("other_schema", schema, lambda f: setattr(f, "boundary_schema", "v4.mhc"))
    yield _one("other_schema_version", schema, lambda f: setattr(f, "boundary_version", 2))


def _changed_samplings() -> Iterator[Malformed]:
    def sampled(name: str, **fields: Any) -> Malformed:
        params = sampling_pb2.SamplingParams(**fields)
        return _one(name, "SAMPLING_INVALID", lambda f: f.sampling.CopyFrom(params))

    nan, inf = float("nan"), float("inf")
    yield sampled("temperature_nan", temperature=nan)
    yield sampled("temperature_negative", temperature=-1)
    yield sampled("temperature_too_high", temperature=10.5)
    yield sampled("top_k_negative", top_k=-1)
    yield sampled("top_k_beyond_the_vocabulary", top_k=101)
    yield sampled("top_p_above_one", top_p=1.5)
    yield sampled("top_p_nan", top_p=nan)
    yield sampled("min_p_above_one", min_p=2)
    yield sampled("repetition_penalty_infinite", repetition_penalty=inf)
    yield sampled("frequency_penalty_too_low", frequency_penalty=-2.5)
    yield sampled("presence_penalty_too_high", presence_penalty=2.5)
    yield sampled("penalty_window_too_long", penalty_last_n=4097)
    yield sampled("too_many_logprobs", top_logprobs=21)
    bias = sampling_pb2.LogitBias
    yield sampled("grammar_and_json_schema", grammar='root ::= "a"', json_schema="{}")
    yield sampled("bias_for_a_negative_token", logit_bias=[bias(token_id=-1)])
    yield sampled("bias_beyond_the_vocabulary", logit_bias=[bias(token_id=100)])
    yield sampled("bias_nan", logit_bias=[bias(token_id=1, bias=nan)])
    yield sampled("bias_infinite", logit_bias=[bias(token_id=1, bias=inf)])
    yield sampled("bias_twice", logit_bias=[bias(token_id=1), bias(token_id=2), bias(token_id=1)])

    def unsampled(frame: frame_pb2.Frame) -> None:
        frame.sampling.SetInParent()
        frame.output_rows = frame_pb2.OUTPUT_ROWS_NONE

    yield _one("sampling_without_a_sampled_row", "SAMPLING_INVALID", unsampled)


def _changed_tensors() -> Iterator[Malformed]:
    def tensor(case: str, reason: str, index: int, **values: Any) -> Malformed:
        def change(frame: frame_pb2.Frame) -> None:
            for key, value in values.items():
                setattr(frame.tensors[index], key, value)

        return _one(case, reason, change)

    def listed(name: str, reason: str, order: list[int]) -> Malformed:
        def change(frame: frame_pb2.Frame) -> None:
            original = frame_pb2.Frame()
            original.CopyFrom(frame)
            del frame.tensors[:]
            frame.tensors.extend(original.tensors[i] for i in order)

        return _one(name, reason, change)

    def shaped(name: str, index: int, shape: list[int]) -> Malformed:
        def change(frame: frame_pb2.Frame) -> None:
            frame.tensors[index].shape[:] = shape

        return _one(name, "SHAPE_MISMATCH", change)

    yield listed("no_tensors", "TENSOR_MISSING", [])
    yield listed("no_residual", "TENSOR_MISSING", [1, 2])
    yield listed("no_positions", "TENSOR_MISSING", [0, 2])
    yield listed("no_token_ids", "TENSOR_MISSING", [0, 1])
    yield listed("tensors_in_another_order", "TENSOR_UNEXPECTED", [1, 0, 2])
    yield listed("residual_twice", "TENSOR_DUPLICATE", [0, 0, 1, 2])
    yield listed("token_ids_twice", "TENSOR_DUPLICATE", [0, 1, 2, 2])
    yield tensor("foreign_tensor", "TENSOR_UNEXPECTED", 1, name="attention_mask")
    yield tensor("tensor_without_name", "TENSOR_UNEXPECTED", 0, name="")
    yield _one(
        "one_tensor_more", "TENSOR_UNEXPECTED", lambda f: f.tensors.add(name="recurrent_state")
    )
    # Reserved for multi-token prediction (docs/deepseek-v4-mtp.md); no schema has them.
    for header in (
        _reserved_tensor("mtp.hidden", boundary_pb2.DTYPE_F32, [1, 4, 2]),
        _reserved_tensor("mtp.draft_token_ids", boundary_pb2.DTYPE_I32, [1]),
    ):
        yield _one(
            f"reserved_{header.name.replace('.', '_')}",
            "TENSOR_UNEXPECTED",
            lambda f, header=header: f.tensors.append(header),  # type: ignore[misc]
        )
    enum = "UNKNOWN_ENUM_VALUE"
    yield tensor("dtype_unspecified", enum, 0, dtype=0)
    yield tensor("dtype_unknown", enum, 0, dtype=5)
    yield tensor("byte_order_unspecified", enum, 0, byte_order=0)
    yield tensor("compression_unspecified", enum, 2, compression=0)
    yield tensor("residual_as_f16", "DTYPE_MISMATCH", 0, dtype=boundary_pb2.DTYPE_F16)
    yield tensor("residual_as_i32", "DTYPE_MISMATCH", 0, dtype=boundary_pb2.DTYPE_I32)
    # Positions that could be NaN.
    yield tensor("positions_as_f32", "DTYPE_MISMATCH", 1, dtype=boundary_pb2.DTYPE_F32)
    yield tensor("big_endian", "BYTE_ORDER_UNSUPPORTED", 0, byte_order=2)
    yield tensor("compressed", "COMPRESSION_UNSUPPORTED", 0, compression=2)
    large = "BUNDLE_TOO_LARGE"
    yield tensor("declares_64_bits_of_bytes", large, 0, byte_length=2**64 - 1)
    yield tensor("declares_a_tebibyte", large, 0, byte_length=2**40)
    yield tensor("declares_one_byte_too_many", large, 1, byte_length=4096 - 15)
    shape = [2**32, 2**32]
    yield shaped("shape_whose_product_wraps_around", 0, shape)
    yield shaped("shape_of_another_width", 0, [1, _N_EMBD + 1])
    yield shaped("shape_of_other_rows", 0, [2, _N_EMBD])
    yield shaped("shape_without_rows", 0, [_N_EMBD])
    yield shaped("shape_with_another_axis", 0, [1, 1, _N_EMBD])
    yield shaped("shape_transposed", 0, [_N_EMBD, 1])
    yield shaped("no_shape", 1, [])
    yield shaped("shape_of_zero", 2, [0])
    yield tensor("declares_one_byte_less", "SIZE_MISMATCH", 0, byte_length=4 * _N_EMBD - 1)
    yield tensor("declares_two_rows", "SIZE_MISMATCH", 2, byte_length=8)
    yield tensor("declares_nothing", "SIZE_MISMATCH", 1, byte_length=0)


def _changed_fragments() -> Iterator[Malformed]:
    size = "FRAGMENT_SIZE_MISMATCH"
    yield _one("no_fragment", "FRAGMENT_MISSING", lambda f: f.ClearField("fragment"))
    yield _one("count_zero", size, lambda f: setattr(f.fragment, "count", 0))
    yield _one("index_beyond_count", size, lambda f: setattr(f.fragment, "index", 1))
    yield _one("count_too_high", size, lambda f: setattr(f.fragment, "count", 2))
    yield _one("huge_count", size, lambda f: setattr(f.fragment, "count", 2**32 - 1))
    yield _one("offset_in_one_fragment", size, lambda f: setattr(f.fragment, "offset", 1))
    yield _one("no_data", size, lambda f: f.fragment.ClearField("data"))
    yield _one("data_too_long", size, _extended(by=1))
    yield _one("data_too_short", size, _extended(by=-1))
    checksum = "CHECKSUM_MISMATCH"
    yield _one("no_checksum", checksum, lambda f: f.fragment.ClearField("checksum"))
    yield _one(
        "wrong_checksum",
        checksum,
        lambda f: setattr(f.fragment, "checksum", f.fragment.checksum ^ 1),
    )
    yield _one(
        "one_bit_of_data_flipped",
        checksum,
        lambda f: setattr(
            f.fragment, "data", bytes([f.fragment.data[0] ^ 1]) + f.fragment.data[1:]
        ),
    )


def _sequences() -> Iterator[Malformed]:
    """Bundles of three fragments: 48, 48 and 24 bytes."""

    def frames(step: int = 1, **changes: dict[str, Any]) -> list[frame_pb2.Frame]:
        bundle = _bundle(5, step=step, length=48)
        for place, values in changes.items():
            for key, value in values.items():
                setattr(bundle[int(place[1:])].fragment, key, value)
        return bundle

    def sequence(
        name: str, reason: str, *parts: frame_pb2.Frame, finish: bool = False
    ) -> Malformed:
        return Malformed(name, reason, [part.SerializeToString() for part in parts], finish)

    order, twice, size = "FRAGMENT_OUT_OF_ORDER", "FRAGMENT_DUPLICATE", "FRAGMENT_SIZE_MISMATCH"
    a, b, c = frames()
    x, y, _ = frames(step=2)
    yield sequence("starts_with_the_second", order, b)
    yield sequence("starts_with_the_last", order, c)
    yield sequence("second_is_missing", order, a, c)
    yield sequence("first_twice", twice, a, a)
    yield sequence("second_twice", twice, a, b, b)
    yield sequence("first_again_at_the_end", twice, a, b, a)
    yield sequence("last_again_after_the_end", twice, a, b, c, c)
    yield sequence("second_again_after_the_end", twice, a, b, c, b)
    yield sequence("another_bundle_begins", order, a, x)
    yield sequence("fragment_of_another_bundle", order, a, y)
    yield sequence("other_bundle_after_the_end", order, a, b, c, y)
    missing = "FRAGMENT_MISSING"
    yield sequence("ends_after_the_first", missing, a, finish=True)
    yield sequence("ends_before_the_last", missing, a, b, finish=True)

    yield sequence("count_changes", size, a, frames(_1={"count": 4})[1])
    yield sequence("offset_too_low", size, a, frames(_1={"offset": 47})[1])
    yield sequence("offset_of_the_last", size, a, frames(_1={"offset": 96})[1])
    yield sequence("huge_offset", size, a, frames(_1={"offset": 2**64 - 48})[1])
    first_with_offset = frames(_0={"offset": 48})[0]
    yield sequence("first_with_an_offset", size, first_with_offset)
    yield sequence("declares_two_fragments", size, frames(_0={"count": 2})[0])
    yield sequence("declares_four_fragments", size, frames(_0={"count": 4})[0])

    def resized(by: int, place: int) -> frame_pb2.Frame:
        frame = frames()[place]
        _extended(by=by)(frame)
        return frame

    yield sequence("second_too_short", size, a, resized(-1, 1))
    yield sequence("second_too_long", size, a, resized(1, 1))
    yield sequence("last_too_short", size, a, b, resized(-1, 2))
    yield sequence("last_too_long", size, a, b, resized(1, 2))
    yield sequence("second_is_corrupt", "CHECKSUM_MISMATCH", a, frames(_1={"data": bytes(48)})[1])

    def later(change: Change) -> frame_pb2.Frame:
        frame = frames()[1]
        change(frame)
        return frame

    bounds = "FIELD_OUT_OF_BOUNDS"
    yield sequence("later_phase", bounds, a, later(lambda f: setattr(f, "phase", 1)))
    yield sequence("later_token_count", bounds, a, later(lambda f: setattr(f, "token_count", 5)))
    yield sequence("later_tensor", bounds, a, later(lambda f: f.tensors.add()))
    yield sequence("later_empty_cache", bounds, a, later(lambda f: f.cache.SetInParent()))
    yield sequence(
        "later_epoch_is_stale", "STALE_EPOCH", a, later(lambda f: setattr(f, "route_epoch", 4))
    )
    yield sequence(
        "later_schema_version",
        "SCHEMA_VERSION_UNSUPPORTED",
        a,
        later(lambda f: setattr(f, "schema_version", 2)),
    )

    broken = frames()
    _with_data(0, struct.pack("<f", float("nan")))(broken[0])
    yield sequence("nan_seen_at_the_end", "NON_FINITE_VALUE", *broken)
    broken = frames()
    _with_data(80 - 48, struct.pack("<i", 99))(broken[1])
    yield sequence("position_seen_at_the_end", "POSITION_MISMATCH", *broken)
    broken = frames()
    _with_data(116 - 96, struct.pack("<i", 100))(broken[2])
    yield sequence("token_seen_at_the_end", "TOKEN_OUT_OF_RANGE", *broken)


def _changed_content() -> Iterator[Malformed]:
    positions, token_ids = 2 * 4 * _N_EMBD, 2 * 4 * (_N_EMBD + 1)

    def content(name: str, reason: str, offset: int, data: bytes) -> Malformed:
        return _one(name, reason, _with_data(offset, data), tokens=2)

    not_finite = "NON_FINITE_VALUE"
    yield content("residual_nan", not_finite, 0, struct.pack("<f", float("nan")))
    yield content("residual_signalling_nan", not_finite, 8, bytes.fromhex("0100a0ff"))
    yield content("residual_infinite", not_finite, 12, struct.pack("<f", float("inf")))
    yield content("residual_minus_infinite", not_finite, 28, struct.pack("<f", float("-inf")))
    position = "POSITION_MISMATCH"
    yield content("positions_one_too_low", position, positions, struct.pack("<ii", 2, 3))
    yield content("positions_descend", position, positions, struct.pack("<ii", 3, 2))
    yield content("position_repeated", position, positions, struct.pack("<ii", 3, 3))
    yield content("position_negative", position, positions, struct.pack("<ii", -3, 4))
    yield content("position_nan_bits", position, positions + 4, struct.pack("<f", float("nan")))
    outside = "TOKEN_OUT_OF_RANGE"
    yield content("token_negative", outside, token_ids, struct.pack("<i", -1))
    yield content("token_beyond_the_vocabulary", outside, token_ids + 4, struct.pack("<i", 100))
    yield content("token_lowest", outside, token_ids, struct.pack("<i", -(2**31)))


def _several_faults() -> Iterator[Malformed]:
    """The order of checks decides."""

    def both(first: Change, second: Change) -> Change:
        return lambda f: (first(f), second(f))

    def version(frame: frame_pb2.Frame) -> None:
        frame.schema_version = 7

    def corrupt(frame: frame_pb2.Frame) -> None:
        frame.fragment.checksum ^= 1

    def huge(frame: frame_pb2.Frame) -> None:
        frame.tensors[0].byte_length = 2**50

    def narrow(frame: frame_pb2.Frame) -> None:
        frame.tensors[0].shape[:] = [1, 3]

    def stale(frame: frame_pb2.Frame) -> None:
        frame.route_epoch = 1

    def phase(frame: frame_pb2.Frame) -> None:
        frame.phase = 77  # type: ignore[assignment]

    nan = _with_data(0, struct.pack("<f", float("nan")))
    yield _one(
        "version_before_reserved",
        "SCHEMA_VERSION_UNSUPPORTED",
        both(version, lambda f: f.reserved_state.SetInParent()),
    )
    yield _one("epoch_before_phase", "STALE_EPOCH", both(phase, stale))
    yield _one("phase_before_sizes", "UNKNOWN_ENUM_VALUE", both(huge, phase))
    yield _one("limit_before_shape", "BUNDLE_TOO_LARGE", both(narrow, huge))
    yield _one("shape_before_checksum", "SHAPE_MISMATCH", both(corrupt, narrow))
    yield _one("checksum_before_content", "CHECKSUM_MISMATCH", both(nan, corrupt))
    positions = _with_data(4 * _N_EMBD, struct.pack("<i", 9))
    yield _one("residual_before_positions", "NON_FINITE_VALUE", both(positions, nan))
    assert len(_payload(1, 0)) == _ROW_BYTES
