"""The messages of golden.proto as the values of meshnet_gguf.protocol, and back."""

from __future__ import annotations

import numpy as np
from meshnet_gguf.protocol import (
    BoundarySchema,
    FrameExpectation,
    Limits,
    WireStep,
    dense_residual_schema,
    hyper_connection_schema,
)

from tests.golden import golden_pb2

__all__ = ["expectation_from", "expectation_to", "step_from", "step_to"]


def expectation_from(message: golden_pb2.Expectation) -> FrameExpectation:
    """A receiver's requirements, read from a golden message."""
    return FrameExpectation(
        work_id=message.work_id,
        route_session_id=bytes.fromhex(message.route_session_id),
        route_epoch=message.route_epoch,
        schema=_schema_from(message),
        applied_end=message.applied_end,
        vocabulary_size=message.vocabulary_size,
        context_tokens=message.context_tokens,
        limits=Limits.from_proto(message.limits),
    )


def _schema_from(message: golden_pb2.Expectation) -> BoundarySchema:
    if message.streams:
        return hyper_connection_schema(message.streams, message.n_embd)
    return dense_residual_schema(message.n_embd)


def expectation_to(expectation: FrameExpectation) -> golden_pb2.Expectation:
    """A receiver's requirements as a golden message."""
    *streams, n_embd = expectation.schema.tensors[0].shape[1:]
    message = golden_pb2.Expectation(
        work_id=expectation.work_id,
        route_session_id=expectation.route_session_id.hex(),
        route_epoch=expectation.route_epoch,
        n_embd=n_embd,
        streams=streams[0] if streams else 0,
        applied_end=expectation.applied_end,
        vocabulary_size=expectation.vocabulary_size,
        context_tokens=expectation.context_tokens,
    )
    limits = expectation.limits
    message.limits.max_frame_bytes = limits.max_frame_bytes
    message.limits.max_bundle_bytes = limits.max_bundle_bytes
    message.limits.max_step_tokens = limits.max_step_tokens
    message.limits.max_inflight_steps = limits.max_inflight_steps
    return message


def step_from(message: golden_pb2.Step, schema: BoundarySchema) -> WireStep:
    """A step, read from a golden message."""
    token_ids = np.array(message.token_ids, np.int32)
    residual = np.frombuffer(bytes.fromhex(message.residual), "<f4")
    return WireStep(
        work_id=message.work_id,
        route_session_id=bytes.fromhex(message.route_session_id),
        route_epoch=message.route_epoch,
        step=message.step,
        phase=message.phase,
        applied_end=message.applied_end,
        start_position=message.start_position,
        token_ids=token_ids,
        residual=residual.reshape(schema.tensors[0].shape).astype(np.float32, copy=False),
        output_rows=message.output_rows,
        sampling=message.sampling if message.HasField("sampling") else None,
        return_logits=message.return_logits,
    )


def step_to(step: WireStep) -> golden_pb2.Step:
    """A step as a golden message."""
    message = golden_pb2.Step(
        work_id=step.work_id,
        route_session_id=step.route_session_id.hex(),
        route_epoch=step.route_epoch,
        step=step.step,
        phase=step.phase,  # type: ignore[arg-type]  # enums are plain ints in WireStep
        applied_end=step.applied_end,
        start_position=step.start_position,
        token_ids=step.token_ids.tolist(),
        residual=step.residual.astype("<f4").tobytes().hex(),
        output_rows=step.output_rows,  # type: ignore[arg-type]
        return_logits=step.return_logits,
    )
    if step.sampling is not None:
        message.sampling.CopyFrom(step.sampling)
        message.sampling.SetInParent()
    return message
