"""The Python implementation against the golden files; C++: cc/protocol/golden_test.cc."""

from __future__ import annotations

import pathlib

import pytest
from google.protobuf import text_format
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.protocol import (
    FrameAssembler,
    FrameExpectation,
    encode_step,
    parse_message,
)

from proto.meshnet.shard.v1 import errors_pb2, frame_pb2
from tests.golden import generate, golden_pb2
from tests.golden.conversion import expectation_from, step_from, step_to

_FOLDER = pathlib.Path(__file__).parent
_GOOD = text_format.Parse(
    (_FOLDER / "frames.textproto").read_text(encoding="utf-8"), golden_pb2.EncodedSteps()
)
_MALFORMED = text_format.Parse(
    (_FOLDER / "malformed_frames.textproto").read_text(encoding="utf-8"),
    golden_pb2.MalformedFrames(),
)
_EXPECTATION = expectation_from(_MALFORMED.expectation)


def test_generator_writes_the_committed_files() -> None:
    frames = (_FOLDER / "frames.textproto").read_text(encoding="utf-8")
    malformed = (_FOLDER / "malformed_frames.textproto").read_text(encoding="utf-8")
    assert generate.frames_text() == frames
    assert generate.malformed_frames_text() == malformed


@pytest.mark.parametrize("case", _GOOD.steps, ids=lambda case: case.name)
def test_steps_are_encoded_byte_for_byte(case: golden_pb2.EncodedStep) -> None:
    expectation = expectation_from(case.expectation)
    step = step_from(case.step, expectation.schema)
    frames = encode_step(step, expectation.schema, expectation.limits)
    assert [frame.SerializeToString().hex() for frame in frames] == list(case.frames)


@pytest.mark.parametrize("case", _GOOD.steps, ids=lambda case: case.name)
def test_frames_give_the_step_back(case: golden_pb2.EncodedStep) -> None:
    expectation = expectation_from(case.expectation)
    assembler = FrameAssembler(expectation)
    results = [
        assembler.add(
            parse_message(bytes.fromhex(frame), expectation.limits.max_frame_bytes, frame_pb2.Frame)
        )
        for frame in case.frames
    ]
    assert results[:-1] == [None] * (len(results) - 1)
    assert results[-1] is not None
    assert step_to(results[-1]) == case.step
    assembler.finish()


def receiver_of(case: golden_pb2.MalformedCase) -> FrameExpectation:
    return expectation_from(case.expectation) if case.HasField("expectation") else _EXPECTATION


def refusal_of(assembler: FrameAssembler, case: golden_pb2.MalformedCase) -> MeshnetError:
    """Feeds a case's frames; every one but the last must be accepted."""

    def feed(data: str) -> None:
        limit = receiver_of(case).limits.max_frame_bytes
        assembler.add(parse_message(bytes.fromhex(data), limit, frame_pb2.Frame))

    *good, last = case.frames
    for data in good:
        feed(data)
    if case.finish:
        feed(last)
        with pytest.raises(MeshnetError) as refused:
            assembler.finish()
    else:
        with pytest.raises(MeshnetError) as refused:
            feed(last)
    return refused.value


@pytest.mark.parametrize("case", _MALFORMED.cases, ids=lambda case: case.name)
def test_malformed_frames_are_refused_for_their_reason(case: golden_pb2.MalformedCase) -> None:
    assembler = FrameAssembler(receiver_of(case))
    error = refusal_of(assembler, case)
    assert error.reason_name == case.reason, error.message
    assert error.message
    assert assembler.buffered_bytes == 0
    assembler.finish()


def test_malformed_cases_cover_the_reasons_of_a_frame() -> None:
    reasons = {case.reason for case in _MALFORMED.cases}
    by_number = errors_pb2.Reason.DESCRIPTOR.values_by_number
    # 1 to 24 is the table's section for messages that are wrong by themselves, but for routes.
    expected = {by_number[number].name.removeprefix("REASON_") for number in range(1, 25)}
    expected |= {
        "SCHEMA_VERSION_UNSUPPORTED",
        "RANGE_MISMATCH",
        "BOUNDARY_SCHEMA_MISMATCH",
        "CONTEXT_EXCEEDED",
        "STALE_EPOCH",
        "SESSION_UNKNOWN",
    }
    assert reasons == expected
    assert len({case.name for case in _MALFORMED.cases}) == len(_MALFORMED.cases) >= 60
