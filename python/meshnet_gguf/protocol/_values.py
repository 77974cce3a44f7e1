"""What the codec works on: schemas, limits, steps and what a receiver requires."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from meshnet_gguf.errors import MeshnetError
from proto.meshnet.shard.v1 import boundary_pb2, errors_pb2, frame_pb2, sampling_pb2, shard_pb2

__all__ = [
    "SCHEMA_VERSION",
    "BoundarySchema",
    "FrameExpectation",
    "Limits",
    "TensorSpec",
    "WireStep",
    "dense_residual_schema",
    "hyper_connection_schema",
    "validate_work_id",
]

SCHEMA_VERSION: Final = 1

_WORK_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_MIN_BYTES: Final = 4 << 10
_MAX_FRAME_BYTES: Final = 64 << 20
_MAX_BUNDLE_BYTES: Final = 1 << 30
_MAX_STEP_TOKENS: Final = 1 << 16
_MAX_INFLIGHT_STEPS: Final = 1024
# The tensors that this version carries.
_CARRIED: Final = {
    "residual": boundary_pb2.DTYPE_F32,
    "positions": boundary_pb2.DTYPE_I32,
    "token_ids": boundary_pb2.DTYPE_I32,
}
_ELEMENT_BYTES: Final = 4


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a schema; -1 in `shape` stands for the step's token count.

    `dtype` is a value of `boundary_pb2.DType`.
    """

    name: str
    dtype: int
    shape: tuple[int, ...]

    def shape_of(self, tokens: int) -> tuple[int, ...]:
        """The shape in a step of `tokens` rows."""
        return tuple(tokens if extent < 0 else extent for extent in self.shape)

    def bytes_of(self, tokens: int) -> int:
        """The bytes in a step of `tokens` rows."""
        return math.prod(self.shape_of(tokens)) * _ELEMENT_BYTES

    @property
    def carried(self) -> bool:
        """Whether this version of the protocol knows the tensor."""
        return _CARRIED.get(self.name) == self.dtype


@dataclass(frozen=True)
class BoundarySchema:
    """What crosses a seam, see BoundarySchema in boundary.proto."""

    name: str
    version: int
    tensors: tuple[TensorSpec, ...]


def dense_residual_schema(n_embd: int) -> BoundarySchema:
    """The boundary of dense models: residual f32 [n, n_embd], positions and token ids i32 [n]."""
    return _schema("dense.residual", (-1, n_embd))


def hyper_connection_schema(streams: int, n_embd: int) -> BoundarySchema:
    """The boundary of DeepSeek V4: residual f32 [n, streams, n_embd], the rest as for dense."""
    return _schema("deepseek4.mhc", (-1, streams, n_embd))


def _schema(name: str, residual: tuple[int, ...]) -> BoundarySchema:
    return BoundarySchema(
        name,
        1,
        (
            TensorSpec("residual", boundary_pb2.DTYPE_F32, residual),
            TensorSpec("positions", boundary_pb2.DTYPE_I32, (-1,)),
            TensorSpec("token_ids", boundary_pb2.DTYPE_I32, (-1,)),
        ),
    )


@dataclass(frozen=True)
class Limits:
    """Bounds of one stream, see Limits in shard.proto."""

    max_frame_bytes: int = 1 << 20
    max_bundle_bytes: int = 64 << 20
    max_step_tokens: int = 512
    max_inflight_steps: int = 4

    @classmethod
    def from_proto(cls, message: shard_pb2.Limits) -> Limits:
        """The message's values as they are."""
        return cls(
            message.max_frame_bytes,
            message.max_bundle_bytes,
            message.max_step_tokens,
            message.max_inflight_steps,
        )

    def negotiate(self, offer: shard_pb2.Limits) -> Limits:
        """The smaller of both offers, field by field; a zero in `offer` takes ours.

        Raises:
            MeshnetError: FIELD_OUT_OF_BOUNDS when an offer is above the documented bounds or the
                result is outside them.
        """

        def pick(name: str, offered: int, own: int, low: int, high: int) -> int:
            result = min(offered, own) if offered else own
            if offered > high or not low <= result <= high:
                wrong = offered if offered > high else result
                raise MeshnetError(
                    errors_pb2.REASON_FIELD_OUT_OF_BOUNDS,
                    f"expected limits.{name} in [{low}, {high}], got {wrong}",
                )
            return result

        return Limits(
            pick(
                "max_frame_bytes",
                offer.max_frame_bytes,
                self.max_frame_bytes,
                _MIN_BYTES,
                _MAX_FRAME_BYTES,
            ),
            pick(
                "max_bundle_bytes",
                offer.max_bundle_bytes,
                self.max_bundle_bytes,
                _MIN_BYTES,
                _MAX_BUNDLE_BYTES,
            ),
            pick(
                "max_step_tokens", offer.max_step_tokens, self.max_step_tokens, 1, _MAX_STEP_TOKENS
            ),
            pick(
                "max_inflight_steps",
                offer.max_inflight_steps,
                self.max_inflight_steps,
                1,
                _MAX_INFLIGHT_STEPS,
            ),
        )


@dataclass(frozen=True, eq=False)
class WireStep:
    """A whole step as it crosses a seam.

    `residual` holds the rows behind layers [0, applied_end): f32, n rows. `token_ids` is i32 [n].
    `phase` and `output_rows` are values of the enums in frame.proto.
    """

    work_id: str
    route_session_id: bytes
    route_epoch: int
    step: int
    applied_end: int
    start_position: int
    token_ids: npt.NDArray[np.int32]
    residual: npt.NDArray[np.float32]
    phase: int = frame_pb2.PHASE_PREFILL
    output_rows: int = frame_pb2.OUTPUT_ROWS_NONE
    sampling: sampling_pb2.SamplingParams | None = None
    return_logits: bool = False


@dataclass(frozen=True)
class FrameExpectation:
    """What a receiver requires of every frame on its seam.

    `applied_end` is where the receiver's own layers begin.
    """

    work_id: str
    route_session_id: bytes
    route_epoch: int
    schema: BoundarySchema
    applied_end: int
    vocabulary_size: int
    context_tokens: int
    limits: Limits = field(default_factory=Limits)


def validate_work_id(work_id: str) -> None:
    """Raises FIELD_OUT_OF_BOUNDS unless it is 1-64 bytes of [A-Za-z0-9._:-]."""
    if _WORK_ID.fullmatch(work_id) is None:
        raise MeshnetError(
            errors_pb2.REASON_FIELD_OUT_OF_BOUNDS,
            f"expected a work_id of 1-64 bytes of [A-Za-z0-9._:-], got {work_id[:64]!r}",
        )
