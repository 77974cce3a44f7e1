"""Checks frames and puts steps together again; trusts nothing about a frame.

The order of the checks is the contract: a frame with several faults gets the same reason here and
from cc/protocol/frame_codec.cc.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NoReturn

import numpy as np
import numpy.typing as npt
import xxhash

from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.protocol._sampling import canonical_sampling, validate_sampling
from meshnet_gguf.protocol._values import (
    SCHEMA_VERSION,
    BoundarySchema,
    FrameExpectation,
    TensorSpec,
    WireStep,
    validate_work_id,
)
from proto.meshnet.shard.v1 import boundary_pb2, errors_pb2, frame_pb2

__all__ = ["FrameAssembler"]

_SESSION_ID_BYTES: Final = 16
# Fields that only a bundle's first frame carries.
_HEADER_NUMBERS: Final = range(6, 17)


@dataclass
class _Pending:
    first: frame_pb2.Frame
    payload: bytearray
    fragment_bytes: int
    count: int
    next_fragment: int = 0


class FrameAssembler:
    """Reassembles the steps of one seam.

    After an error it is empty again and can take the next bundle. It holds at most one bundle of
    at most `limits.max_bundle_bytes`.
    """

    def __init__(self, expectation: FrameExpectation) -> None:
        self._expectation = expectation
        self._pending: _Pending | None = None
        self._completed_step = 0

    @property
    def buffered_bytes(self) -> int:
        """Payload bytes that the incomplete bundle takes; 0 without one."""
        return len(self._pending.payload) if self._pending else 0

    def add(self, frame: frame_pb2.Frame) -> WireStep | None:
        """Takes one frame; gives a completed step, or None while fragments are missing.

        Raises:
            MeshnetError: the refusal.
        """
        try:
            return self._take(frame)
        except MeshnetError:
            self._pending = None
            raise

    def finish(self) -> None:
        """Raises FRAGMENT_MISSING when the stream ends inside a bundle."""
        pending, self._pending = self._pending, None
        if pending is not None:
            _refuse(
                errors_pb2.REASON_FRAGMENT_MISSING,
                f"expected fragment {pending.next_fragment} of {pending.count} of step "
                f"{pending.first.step}, got the end of the stream",
            )

    def _take(self, frame: frame_pb2.Frame) -> WireStep | None:
        _check_identity(frame, self._expectation)
        pending = self._pending
        if pending is None:
            pending = self._pending = self._begin(frame)
        else:
            _check_continuation(frame, pending)
        fragment = frame.fragment
        pending.payload[fragment.offset : fragment.offset + len(fragment.data)] = fragment.data
        pending.next_fragment += 1
        if pending.next_fragment < pending.count:
            return None
        step = _decode(pending, self._expectation)
        self._completed_step = step.step
        self._pending = None
        return step

    def _begin(self, frame: frame_pb2.Frame) -> _Pending:
        fragment = frame.fragment
        if fragment.index > 0:
            again = frame.step == self._completed_step
            _refuse(
                errors_pb2.REASON_FRAGMENT_DUPLICATE
                if again
                else errors_pb2.REASON_FRAGMENT_OUT_OF_ORDER,
                f"expected fragment 0 of a new bundle, got fragment {fragment.index} of step "
                f"{frame.step}{', which is complete' if again else ''}",
            )
        total = _check_header(frame, self._expectation)
        length = len(fragment.data)
        if fragment.offset != 0:
            _wrong_fragment("the first fragment at offset", 0, fragment.offset)
        if length > total:
            _wrong_fragment("a payload of bytes", total, length)
        count = -(-total // length)
        if fragment.count != count:
            _wrong_fragment(
                f"for {total} bytes in fragments of {length} a count of", count, fragment.count
            )
        _check_checksum(fragment)
        header = frame_pb2.Frame()
        header.CopyFrom(frame)
        header.ClearField("fragment")
        return _Pending(header, bytearray(total), length, count)


def _check_identity(frame: frame_pb2.Frame, expected: FrameExpectation) -> None:
    if frame.schema_version != SCHEMA_VERSION:
        _refuse(
            errors_pb2.REASON_SCHEMA_VERSION_UNSUPPORTED,
            f"expected schema_version {SCHEMA_VERSION}, got {frame.schema_version}",
        )
    if frame.HasField("reserved_state"):
        _refuse(
            errors_pb2.REASON_RESERVED_FIELD_SET,
            "expected reserved_state to be absent; architecture state, recurrent state and MTP "
            "belong to a later version",
        )
    validate_work_id(frame.work_id)
    if len(frame.route_session_id) != _SESSION_ID_BYTES:
        _out_of_bounds("the size of route_session_id", "[16, 16]", len(frame.route_session_id))
    if frame.route_epoch == 0:
        _out_of_bounds("route_epoch", "[1, 2^64)", 0)
    if frame.step == 0:
        _out_of_bounds("step", "[1, 2^64)", 0)
    if frame.route_session_id != expected.route_session_id:
        _refuse(
            errors_pb2.REASON_SESSION_UNKNOWN,
            "this seam carries another route session; open a seam for this one",
        )
    if frame.route_epoch != expected.route_epoch:
        stale = frame.route_epoch < expected.route_epoch
        _refuse(
            errors_pb2.REASON_STALE_EPOCH if stale else errors_pb2.REASON_SESSION_UNKNOWN,
            f"expected epoch {expected.route_epoch} on this seam, got {frame.route_epoch}",
        )
    if frame.work_id != expected.work_id:
        _refuse(
            errors_pb2.REASON_FIELD_OUT_OF_BOUNDS,
            f"expected the work_id that opened this seam, {expected.work_id!r}, got "
            f"{frame.work_id!r}",
        )
    if not frame.HasField("fragment"):
        _refuse(
            errors_pb2.REASON_FRAGMENT_MISSING, "expected one fragment in every frame, got none"
        )
    if frame.fragment.index >= frame.fragment.count:
        _refuse(
            errors_pb2.REASON_FRAGMENT_SIZE_MISMATCH,
            f"expected a fragment index below the count {frame.fragment.count}, got "
            f"{frame.fragment.index}",
        )
    if not frame.fragment.data:
        _refuse(
            errors_pb2.REASON_FRAGMENT_SIZE_MISMATCH,
            "expected at least one byte in a fragment, got none",
        )


def _check_continuation(frame: frame_pb2.Frame, pending: _Pending) -> None:
    fragment = frame.fragment
    where = f"expected fragment {pending.next_fragment} of step {pending.first.step}, got fragment"
    if frame.step != pending.first.step:
        _refuse(
            errors_pb2.REASON_FRAGMENT_OUT_OF_ORDER,
            f"{where} {fragment.index} of step {frame.step}",
        )
    if fragment.index != pending.next_fragment:
        _refuse(
            errors_pb2.REASON_FRAGMENT_DUPLICATE
            if fragment.index < pending.next_fragment
            else errors_pb2.REASON_FRAGMENT_OUT_OF_ORDER,
            f"{where} {fragment.index}",
        )
    if any(descriptor.number in _HEADER_NUMBERS for descriptor, _ in frame.ListFields()):
        _refuse(
            errors_pb2.REASON_FIELD_OUT_OF_BOUNDS,
            "expected header fields only in a bundle's first frame, got some in fragment "
            f"{fragment.index}",
        )
    if fragment.count != pending.count:
        _wrong_fragment("a count of", pending.count, fragment.count)
    offset = pending.next_fragment * pending.fragment_bytes
    if fragment.offset != offset:
        _wrong_fragment("offset", offset, fragment.offset)
    length = min(pending.fragment_bytes, len(pending.payload) - offset)
    if len(fragment.data) != length:
        _wrong_fragment("a length of", length, len(fragment.data))
    _check_checksum(fragment)


def _check_header(frame: frame_pb2.Frame, expected: FrameExpectation) -> int:
    """Checks a bundle's first frame; gives the size of its payload."""
    _check_enum("phase", frame.phase, frame_pb2.Phase.values())
    _check_enum("output_rows", frame.output_rows, frame_pb2.OutputRows.values())
    if (
        not frame.HasField("applied")
        or frame.applied.begin != 0
        or frame.applied.end != expected.applied_end
    ):
        _refuse(
            errors_pb2.REASON_RANGE_MISMATCH,
            f"expected a boundary behind layers [0, {expected.applied_end}), got "
            f"[{frame.applied.begin}, {frame.applied.end})",
        )
    tokens = frame.token_count
    if not 1 <= tokens <= expected.limits.max_step_tokens:
        _out_of_bounds("token_count", f"[1, {expected.limits.max_step_tokens}]", tokens)
    if frame.start_position + tokens > expected.context_tokens:
        _refuse(
            errors_pb2.REASON_CONTEXT_EXCEEDED,
            f"expected positions below {expected.context_tokens}, got {tokens} tokens from "
            f"{frame.start_position} on",
        )
    if not frame.HasField("cache") or frame.cache.cached_tokens != frame.start_position:
        _refuse(
            errors_pb2.REASON_FIELD_OUT_OF_BOUNDS,
            f"expected cache.cached_tokens equal to start_position {frame.start_position}, got "
            f"{frame.cache.cached_tokens if frame.HasField('cache') else 'no cache expectation'}",
        )
    if frame.HasField("sampling"):
        if frame.output_rows != frame_pb2.OUTPUT_ROWS_LAST:
            _refuse(
                errors_pb2.REASON_SAMPLING_INVALID,
                "expected sampling only in a step whose last row is sampled",
            )
        validate_sampling(frame.sampling, expected.vocabulary_size)
    schema = expected.schema
    if frame.boundary_schema != schema.name or frame.boundary_version != schema.version:
        _refuse(
            errors_pb2.REASON_BOUNDARY_SCHEMA_MISMATCH,
            f"expected boundary {schema.name!r} version {schema.version}, got "
            f"{frame.boundary_schema[:64]!r} version {frame.boundary_version}",
        )
    return _check_tensors(frame, schema, expected.limits.max_bundle_bytes)


def _check_tensors(frame: frame_pb2.Frame, schema: BoundarySchema, max_bundle_bytes: int) -> int:
    total = 0
    for index, header in enumerate(frame.tensors):
        _check_tensor_order(frame, schema, index)
        spec = schema.tensors[index]
        if not spec.carried:
            _refuse(
                errors_pb2.REASON_BOUNDARY_SCHEMA_MISMATCH,
                "expected a schema of residual (f32), positions and token_ids (i32), got "
                f"{spec.name!r}",
            )
        total = _check_tensor(header, spec, frame.token_count, max_bundle_bytes, total)
    if len(frame.tensors) < len(schema.tensors):
        _refuse(
            errors_pb2.REASON_TENSOR_MISSING,
            f"expected tensor {schema.tensors[len(frame.tensors)].name!r}, got none",
        )
    return total


def _check_tensor_order(frame: frame_pb2.Frame, schema: BoundarySchema, index: int) -> None:
    names = [header.name for header in frame.tensors]
    name = names[index]
    if name in names[:index]:
        _refuse(
            errors_pb2.REASON_TENSOR_DUPLICATE,
            f"expected each tensor once, got {name[:64]!r} twice",
        )
    if index < len(schema.tensors):
        wanted = schema.tensors[index].name
        if name == wanted:
            return
        if wanted not in names and any(spec.name == name for spec in schema.tensors):
            _refuse(
                errors_pb2.REASON_TENSOR_MISSING,
                f"expected tensor {wanted!r} at place {index}, got none",
            )
    _refuse(
        errors_pb2.REASON_TENSOR_UNEXPECTED,
        f"expected the tensors of {schema.name!r} in their order, got {name[:64]!r} at place "
        f"{index}",
    )


def _check_tensor(
    header: boundary_pb2.TensorHeader,
    spec: TensorSpec,
    tokens: int,
    max_bundle_bytes: int,
    total: int,
) -> int:
    """Checks one tensor's header; gives the payload's size up to and with it."""
    _check_enum(f"the dtype of {spec.name}", header.dtype, boundary_pb2.DType.values())
    if header.dtype != spec.dtype:
        _refuse(
            errors_pb2.REASON_DTYPE_MISMATCH,
            f"expected {spec.name} as dtype {spec.dtype}, got {header.dtype}",
        )
    if header.byte_order != boundary_pb2.BYTE_ORDER_LITTLE_ENDIAN:
        _refuse(
            errors_pb2.REASON_BYTE_ORDER_UNSUPPORTED
            if header.byte_order
            else errors_pb2.REASON_UNKNOWN_ENUM_VALUE,
            f"expected {spec.name} little-endian, got byte order {header.byte_order}",
        )
    if header.compression != boundary_pb2.COMPRESSION_NONE:
        _refuse(
            errors_pb2.REASON_COMPRESSION_UNSUPPORTED
            if header.compression
            else errors_pb2.REASON_UNKNOWN_ENUM_VALUE,
            f"expected {spec.name} uncompressed, got compression {header.compression}",
        )
    if header.byte_length > max_bundle_bytes - total:
        _refuse(
            errors_pb2.REASON_BUNDLE_TOO_LARGE,
            f"expected at most {max_bundle_bytes} bytes in a bundle, got {header.byte_length} in "
            f"{spec.name} after {total}; send smaller steps",
        )
    if tuple(header.shape) != spec.shape_of(tokens):
        _refuse(
            errors_pb2.REASON_SHAPE_MISMATCH,
            f"expected {spec.name} with shape {spec.shape_of(tokens)}, got "
            f"{tuple(header.shape[:8])}",
        )
    if header.byte_length != spec.bytes_of(tokens):
        _refuse(
            errors_pb2.REASON_SIZE_MISMATCH,
            f"expected {spec.bytes_of(tokens)} bytes for {spec.name}, got {header.byte_length}",
        )
    return total + header.byte_length


def _check_checksum(fragment: boundary_pb2.Fragment) -> None:
    checksum = xxhash.xxh3_64_intdigest(fragment.data)
    if fragment.checksum != checksum:
        _refuse(
            errors_pb2.REASON_CHECKSUM_MISMATCH,
            f"expected checksum {checksum:016x} of the data in fragment {fragment.index}, got "
            f"{fragment.checksum:016x}",
        )


def _decode(pending: _Pending, expected: FrameExpectation) -> WireStep:
    """Reads the tensors of a whole payload and checks what only their content shows."""
    frame = pending.first
    tensors: dict[str, npt.NDArray[np.generic]] = {}
    offset = 0
    payload = bytes(pending.payload)
    for spec in expected.schema.tensors:
        shape = spec.shape_of(frame.token_count)
        size = spec.bytes_of(frame.token_count)
        dtype = "<f4" if spec.dtype == boundary_pb2.DTYPE_F32 else "<i4"
        tensor = np.frombuffer(payload[offset : offset + size], dtype)
        tensors[spec.name] = tensor.reshape(shape)
        offset += size
    residual = tensors.get("residual", np.empty(0, np.float32)).astype(np.float32, copy=False)
    token_ids = tensors.get("token_ids", np.empty(0, np.int32)).astype(np.int32, copy=False)
    if not np.isfinite(residual).all():
        _refuse(
            errors_pb2.REASON_NON_FINITE_VALUE, "expected finite residuals, got NaN or infinity"
        )
    start = frame.start_position
    positions = tensors.get("positions")
    if positions is not None:
        wrong = np.flatnonzero(positions != np.arange(start, start + frame.token_count))
        if wrong.size:
            _refuse(
                errors_pb2.REASON_POSITION_MISMATCH,
                f"expected position {start + wrong[0]} in row {wrong[0]}, got "
                f"{positions[wrong[0]]}",
            )
    outside = np.flatnonzero((token_ids < 0) | (token_ids >= expected.vocabulary_size))
    if outside.size:
        _refuse(
            errors_pb2.REASON_TOKEN_OUT_OF_RANGE,
            f"expected token ids in [0, {expected.vocabulary_size}), got "
            f"{token_ids[outside[0]]} in row {outside[0]}",
        )
    return WireStep(
        work_id=frame.work_id,
        route_session_id=frame.route_session_id,
        route_epoch=frame.route_epoch,
        step=frame.step,
        applied_end=frame.applied.end,
        start_position=start,
        token_ids=token_ids,
        residual=residual,
        phase=frame.phase,
        output_rows=frame.output_rows,
        sampling=canonical_sampling(frame.sampling) if frame.HasField("sampling") else None,
        return_logits=frame.return_logits,
    )


def _check_enum(name: str, value: int, known: list[int]) -> None:
    if value == 0 or value not in known:
        _refuse(
            errors_pb2.REASON_UNKNOWN_ENUM_VALUE,
            f"expected {name} to be a value of schema version 1 other than 0, got {value}",
        )


def _out_of_bounds(name: str, bounds: str, value: int) -> NoReturn:
    _refuse(errors_pb2.REASON_FIELD_OUT_OF_BOUNDS, f"expected {name} in {bounds}, got {value}")


def _wrong_fragment(what: str, expected: int, got: int) -> NoReturn:
    _refuse(errors_pb2.REASON_FRAGMENT_SIZE_MISMATCH, f"expected {what} {expected}, got {got}")


def _refuse(reason: int, message: str) -> NoReturn:
    raise MeshnetError(reason, message)
