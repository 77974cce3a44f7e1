from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.protocol import (
    BoundarySchema,
    FrameAssembler,
    FrameExpectation,
    Limits,
    TensorSpec,
    WireStep,
    canonical_sampling,
    dense_residual_schema,
    encode_step,
    recipe_fingerprint,
    validate_sampling,
)

from proto.meshnet.shard.v1 import boundary_pb2, errors_pb2, frame_pb2, sampling_pb2, shard_pb2

_N_EMBD = 8
_SCHEMA = dense_residual_schema(_N_EMBD)
_SMALL = Limits(4096, 1 << 20, 512, 4)


def make_step(tokens: int, **changes: Any) -> WireStep:
    values: dict[str, Any] = {
        "work_id": "work-1",
        "route_session_id": b"s" * 16,
        "route_epoch": 5,
        "step": 1,
        "applied_end": 3,
        "start_position": 0,
        "token_ids": np.arange(tokens, dtype=np.int32),
        "residual": np.arange(tokens * _N_EMBD, dtype=np.float32).reshape(tokens, _N_EMBD),
    }
    return WireStep(**{**values, **changes})


def make_assembler(**changes: Any) -> FrameAssembler:
    expectation = FrameExpectation("work-1", b"s" * 16, 5, _SCHEMA, 3, 1000, 2048, _SMALL)
    return FrameAssembler(dataclasses.replace(expectation, **changes))


def test_fragments_are_equal_and_within_the_frame_limit() -> None:
    step = make_step(512)
    frames = encode_step(step, _SCHEMA, _SMALL)
    assert len(frames) == 6
    sizes = [len(frame.fragment.data) for frame in frames]
    assert len(set(sizes[:-1])) == 1
    assert sum(sizes) == 512 * (_N_EMBD * 4 + 8)
    assembler = make_assembler()
    for frame in frames[:-1]:
        assert len(shard_pb2.SeamMessage(frame=frame).SerializeToString()) <= 4096
        assert assembler.add(frame) is None
        assert assembler.buffered_bytes == sum(sizes)
    got = assembler.add(frames[-1])
    assert got is not None
    np.testing.assert_array_equal(got.residual, step.residual)
    assert assembler.buffered_bytes == 0


def test_an_error_empties_the_assembler_and_the_next_bundle_passes() -> None:
    frames = encode_step(make_step(300), _SCHEMA, _SMALL)
    assembler = make_assembler()
    assert assembler.add(frames[0]) is None
    with pytest.raises(MeshnetError, match="FRAGMENT_OUT_OF_ORDER"):
        assembler.add(frames[2])
    assert assembler.buffered_bytes == 0
    (frame,) = encode_step(make_step(1, step=2), _SCHEMA, _SMALL)
    assert assembler.add(frame) is not None


def test_the_end_inside_a_bundle_is_refused_once() -> None:
    assembler = make_assembler()
    assert assembler.add(encode_step(make_step(300), _SCHEMA, _SMALL)[0]) is None
    with pytest.raises(MeshnetError, match="FRAGMENT_MISSING"):
        assembler.finish()
    assembler.finish()


def test_a_schema_with_a_tensor_of_a_later_version_is_refused() -> None:
    later = BoundarySchema(
        _SCHEMA.name, 1, (*_SCHEMA.tensors, TensorSpec("hyper", boundary_pb2.DTYPE_F32, (-1,)))
    )
    with pytest.raises(MeshnetError, match="BOUNDARY_SCHEMA_MISMATCH"):
        encode_step(make_step(1), later, _SMALL)
    (frame,) = encode_step(make_step(1), _SCHEMA, _SMALL)
    frame.tensors.add(name="hyper")
    with pytest.raises(MeshnetError, match="BOUNDARY_SCHEMA_MISMATCH"):
        make_assembler(schema=later).add(frame)


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("FIELD_OUT_OF_BOUNDS", {"work_id": ""}),
        ("FIELD_OUT_OF_BOUNDS", {"work_id": "a\n"}),
        ("FIELD_OUT_OF_BOUNDS", {"route_session_id": b"short"}),
        ("FIELD_OUT_OF_BOUNDS", {"route_epoch": 0}),
        ("FIELD_OUT_OF_BOUNDS", {"route_epoch": 2**64}),
        ("FIELD_OUT_OF_BOUNDS", {"step": 0}),
        ("FIELD_OUT_OF_BOUNDS", {"applied_end": 0}),
        ("FIELD_OUT_OF_BOUNDS", {"token_ids": np.zeros(0, np.int32)}),
        ("FIELD_OUT_OF_BOUNDS", {"token_ids": np.zeros(513, np.int32)}),
        ("FIELD_OUT_OF_BOUNDS", {"start_position": -1}),
        ("FIELD_OUT_OF_BOUNDS", {"start_position": 2**31 - 4}),
        ("FIELD_OUT_OF_BOUNDS", {"output_rows": frame_pb2.OUTPUT_ROWS_UNSPECIFIED}),
        ("FIELD_OUT_OF_BOUNDS", {"phase": frame_pb2.PHASE_UNSPECIFIED}),
        ("SAMPLING_INVALID", {"sampling": sampling_pb2.SamplingParams()}),
        ("SHAPE_MISMATCH", {"residual": np.zeros((4, _N_EMBD + 1), np.float32)}),
        ("SHAPE_MISMATCH", {"residual": np.zeros(4 * _N_EMBD, np.float32)}),
        ("NON_FINITE_VALUE", {"residual": np.full((4, _N_EMBD), np.nan, np.float32)}),
    ],
)
def test_steps_that_do_not_fit_are_not_encoded(reason: str, changes: dict[str, Any]) -> None:
    with pytest.raises(MeshnetError) as refused:
        encode_step(make_step(4, **changes), _SCHEMA, _SMALL)
    assert refused.value.reason_name == reason


def test_steps_beyond_the_limits_are_not_encoded() -> None:
    payload = 4 * (_N_EMBD * 4 + 8)
    assert encode_step(make_step(4), _SCHEMA, Limits(4096, payload, 512, 4))
    with pytest.raises(MeshnetError, match="BUNDLE_TOO_LARGE"):
        encode_step(make_step(4), _SCHEMA, Limits(4096, payload - 1, 512, 4))
    with pytest.raises(MeshnetError, match="FRAME_TOO_LARGE"):
        encode_step(make_step(4), _SCHEMA, Limits(1024, payload, 512, 4))


def test_limits_take_the_smaller_offer() -> None:
    ours = Limits(1 << 20, 8 << 20, 512, 4)
    assert ours.negotiate(shard_pb2.Limits()) == ours
    offer = shard_pb2.Limits(
        max_frame_bytes=4096, max_bundle_bytes=16 << 20, max_step_tokens=16, max_inflight_steps=8
    )
    assert ours.negotiate(offer) == Limits(4096, 8 << 20, 16, 4)


@pytest.mark.parametrize(
    "offer",
    [
        {"max_frame_bytes": 4095},
        {"max_frame_bytes": (64 << 20) + 1},
        {"max_bundle_bytes": 1},
        {"max_bundle_bytes": (1 << 30) + 1},
        {"max_step_tokens": 65537},
        {"max_inflight_steps": 1025},
    ],
)
def test_offers_out_of_bounds_are_refused(offer: dict[str, int]) -> None:
    with pytest.raises(MeshnetError) as refused:
        Limits().negotiate(shard_pb2.Limits(**offer))
    assert refused.value.reason == errors_pb2.REASON_FIELD_OUT_OF_BOUNDS
    assert next(iter(offer)) in refused.value.message


def test_what_is_off_is_unset_in_canonical_sampling() -> None:
    params = sampling_pb2.SamplingParams(top_p=1, repetition_penalty=1, penalty_last_n=64, seed=3)
    assert canonical_sampling(params) == sampling_pb2.SamplingParams(seed=3)
    validate_sampling(sampling_pb2.SamplingParams(), 10)


def test_sampling_refusals_name_the_field() -> None:
    with pytest.raises(MeshnetError, match=r"sampling\.top_k must be in \[0, 10\], got 11"):
        validate_sampling(sampling_pb2.SamplingParams(top_k=11), 10)


def test_recipe_fingerprints_are_those_of_cpp() -> None:
    # The value that cc/shard_engine/shard_engine_test.cc expects of the same fields.
    fields = [("quant", "Q4_1"), ("artifact", "a b%\né=:/+,-._")]
    expected = "167b0a20d5c6c90e5148ec9d5066459104fbe7bfbeead85a32e33b95f4840630"
    assert recipe_fingerprint(fields) == expected
    assert recipe_fingerprint(reversed(fields)) == expected
