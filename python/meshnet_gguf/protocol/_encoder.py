"""Cuts a step into frames."""

from __future__ import annotations

from typing import Final, cast

import numpy as np
import xxhash

from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.protocol._sampling import canonical_sampling
from meshnet_gguf.protocol._values import (
    SCHEMA_VERSION,
    BoundarySchema,
    Limits,
    WireStep,
    validate_work_id,
)
from proto.meshnet.shard.v1 import boundary_pb2, errors_pb2, frame_pb2

__all__ = ["encode_step"]

_SESSION_ID_BYTES: Final = 16
_MAX_POSITION: Final = 2**31 - 1
# As in cc/protocol/frame_codec.cc: what a fragment costs beside its data, the unit of its length,
# and the least data that a frame must have room for.
_FRAGMENT_OVERHEAD_BYTES: Final = 64
_FRAGMENT_UNIT_BYTES: Final = 64
_MIN_FRAGMENT_BYTES: Final = 1 << 10


def encode_step(step: WireStep, schema: BoundarySchema, limits: Limits) -> list[frame_pb2.Frame]:
    """The frames of a step, byte for byte those that C++ makes of it.

    Raises:
        MeshnetError: FIELD_OUT_OF_BOUNDS, SAMPLING_INVALID, SHAPE_MISMATCH, NON_FINITE_VALUE,
            BOUNDARY_SCHEMA_MISMATCH, BUNDLE_TOO_LARGE or FRAME_TOO_LARGE when `step` does not fit
            itself, schema or limits.
    """
    _check(step, schema, limits)
    payload = _payload(step, schema)
    if not payload:
        raise MeshnetError(
            errors_pb2.REASON_BOUNDARY_SCHEMA_MISMATCH,
            f"expected a schema with tensors, got none in {schema.name!r}",
        )
    if len(payload) > limits.max_bundle_bytes:
        raise MeshnetError(
            errors_pb2.REASON_BUNDLE_TOO_LARGE,
            f"expected at most {limits.max_bundle_bytes} bytes in a bundle, got {len(payload)}; "
            "cut smaller steps",
        )
    first = _header(step, schema)
    spent = first.ByteSize() + _FRAGMENT_OVERHEAD_BYTES
    if spent + _MIN_FRAGMENT_BYTES > limits.max_frame_bytes:
        raise MeshnetError(
            errors_pb2.REASON_FRAME_TOO_LARGE,
            f"expected room for {_MIN_FRAGMENT_BYTES} bytes of data in a frame of at most "
            f"{limits.max_frame_bytes} bytes, got a header of {spent}",
        )
    room = limits.max_frame_bytes - spent
    length = len(payload) if len(payload) <= room else room - room % _FRAGMENT_UNIT_BYTES
    count = -(-len(payload) // length)
    frames = [first, *(_identity(step) for _ in range(count - 1))]
    for index, frame in enumerate(frames):
        data = payload[index * length : (index + 1) * length]
        frame.fragment.index = index
        frame.fragment.count = count
        frame.fragment.offset = index * length
        frame.fragment.data = data
        frame.fragment.checksum = xxhash.xxh3_64_intdigest(data)
    return frames


def _check(step: WireStep, schema: BoundarySchema, limits: Limits) -> None:
    validate_work_id(step.work_id)
    if len(step.route_session_id) != _SESSION_ID_BYTES:
        raise _out_of_bounds("the size of route_session_id", "[16, 16]", len(step.route_session_id))
    for name, value in (("route_epoch", step.route_epoch), ("step", step.step)):
        if not 1 <= value < 2**64:
            raise _out_of_bounds(name, "[1, 2^64)", value)
    if not 1 <= step.applied_end < 2**32:
        raise _out_of_bounds("applied_end", "[1, 2^32)", step.applied_end)
    tokens = step.token_ids.size
    if not 1 <= tokens <= limits.max_step_tokens or step.token_ids.ndim != 1:
        raise _out_of_bounds("token_count", f"[1, {limits.max_step_tokens}]", tokens)
    if not 0 <= step.start_position <= _MAX_POSITION - tokens:
        raise _out_of_bounds("start_position", f"[0, 2^31 - {tokens})", step.start_position)
    if step.output_rows not in (frame_pb2.OUTPUT_ROWS_NONE, frame_pb2.OUTPUT_ROWS_LAST):
        raise _out_of_bounds("output_rows", "NONE and LAST", step.output_rows)
    if step.phase not in (frame_pb2.PHASE_PREFILL, frame_pb2.PHASE_DECODE):
        raise _out_of_bounds("phase", "PREFILL and DECODE", step.phase)
    if step.sampling is not None and step.output_rows != frame_pb2.OUTPUT_ROWS_LAST:
        raise MeshnetError(
            errors_pb2.REASON_SAMPLING_INVALID,
            "expected sampling only in a step whose last row is sampled",
        )
    shapes = [spec.shape_of(tokens) for spec in schema.tensors if spec.name == "residual"]
    expected = shapes[0] if shapes else (0,)
    if step.residual.shape != expected:
        raise MeshnetError(
            errors_pb2.REASON_SHAPE_MISMATCH,
            f"expected a residual of shape {expected}, got {step.residual.shape}",
        )
    if not np.isfinite(step.residual).all():
        raise MeshnetError(
            errors_pb2.REASON_NON_FINITE_VALUE, "expected finite residuals, got NaN or infinity"
        )


def _payload(step: WireStep, schema: BoundarySchema) -> bytes:
    parts = []
    for spec in schema.tensors:
        if not spec.carried:
            raise MeshnetError(
                errors_pb2.REASON_BOUNDARY_SCHEMA_MISMATCH,
                "expected a schema of residual (f32), positions and token_ids (i32), got "
                f"{spec.name!r}",
            )
        if spec.name == "residual":
            parts.append(step.residual.astype("<f4", copy=False).tobytes())
        elif spec.name == "positions":
            start = step.start_position
            parts.append(np.arange(start, start + step.token_ids.size, dtype="<i4").tobytes())
        else:
            parts.append(step.token_ids.astype("<i4", copy=False).tobytes())
    return b"".join(parts)


def _identity(step: WireStep) -> frame_pb2.Frame:
    return frame_pb2.Frame(
        schema_version=SCHEMA_VERSION,
        work_id=step.work_id,
        route_session_id=step.route_session_id,
        route_epoch=step.route_epoch,
        step=step.step,
    )


def _header(step: WireStep, schema: BoundarySchema) -> frame_pb2.Frame:
    tokens = step.token_ids.size
    frame = _identity(step)
    frame.phase = cast("frame_pb2.Phase", step.phase)
    frame.applied.end = step.applied_end
    frame.start_position = step.start_position
    frame.token_count = tokens
    frame.cache.SetInParent()
    frame.cache.cached_tokens = step.start_position
    frame.output_rows = cast("frame_pb2.OutputRows", step.output_rows)
    if step.sampling is not None:
        frame.sampling.CopyFrom(canonical_sampling(step.sampling))
        frame.sampling.SetInParent()
    frame.return_logits = step.return_logits
    frame.boundary_schema = schema.name
    frame.boundary_version = schema.version
    for spec in schema.tensors:
        frame.tensors.add(
            name=spec.name,
            dtype=cast("boundary_pb2.DType", spec.dtype),
            byte_order=boundary_pb2.BYTE_ORDER_LITTLE_ENDIAN,
            compression=boundary_pb2.COMPRESSION_NONE,
            shape=spec.shape_of(tokens),
            byte_length=spec.bytes_of(tokens),
        )
    return frame


def _out_of_bounds(name: str, bounds: str, value: int) -> MeshnetError:
    return MeshnetError(
        errors_pb2.REASON_FIELD_OUT_OF_BOUNDS, f"expected {name} in {bounds}, got {value}"
    )
