"""Steps of a session as frames on a seam, and back; the counterpart of cc/protocol/frame_codec.h.

    frames = encode_step(step, dense_residual_schema(576), Limits())
    assembler = FrameAssembler(expectation)
    for data in received:
        step = assembler.add(parse_message(data, limits.max_frame_bytes, frame_pb2.Frame))

Both implementations write the same bytes and refuse the same frames for the same reasons, in the
order that proto/meshnet/shard/v1/frame.proto gives; tests/golden holds the shared evidence. Every
refusal is a MeshnetError.
"""

from meshnet_gguf.protocol._assembler import FrameAssembler
from meshnet_gguf.protocol._encoder import encode_step
from meshnet_gguf.protocol._messages import MAX_MESSAGE_ELEMENTS, parse_message, scan_message
from meshnet_gguf.protocol._recipe import recipe_fingerprint
from meshnet_gguf.protocol._sampling import canonical_sampling, validate_sampling
from meshnet_gguf.protocol._values import (
    SCHEMA_VERSION,
    BoundarySchema,
    FrameExpectation,
    Limits,
    TensorSpec,
    WireStep,
    dense_residual_schema,
    hyper_connection_schema,
    validate_work_id,
)

__all__ = [
    "MAX_MESSAGE_ELEMENTS",
    "SCHEMA_VERSION",
    "BoundarySchema",
    "FrameAssembler",
    "FrameExpectation",
    "Limits",
    "TensorSpec",
    "WireStep",
    "canonical_sampling",
    "dense_residual_schema",
    "encode_step",
    "hyper_connection_schema",
    "parse_message",
    "recipe_fingerprint",
    "scan_message",
    "validate_sampling",
    "validate_work_id",
]
