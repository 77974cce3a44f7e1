"""Python and C++ against each other: equal bytes, equal steps, equal refusals."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_st
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.protocol import (
    FrameAssembler,
    FrameExpectation,
    Limits,
    WireStep,
    canonical_sampling,
    dense_residual_schema,
    encode_step,
    parse_message,
)

from proto.meshnet.shard.v1 import frame_pb2, sampling_pb2, shard_pb2
from tests.golden.cases import EXPECTATION, malformed_frames
from tests.golden.conversion import step_to
from tests.golden.oracle import Oracle

_VOCABULARY = 1000
_CONTEXT = 4096
_LIMITS = Limits(4096, 1 << 20, 64, 4)
_SETTINGS = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def _f32(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, width=32)


@st.composite
def samplings(draw: st.DrawFn) -> sampling_pb2.SamplingParams:
    """Sampling parameters within their bounds."""
    tokens = draw(st.lists(st.integers(0, _VOCABULARY - 1), unique=True, max_size=20))
    biases = _f32(-100, 100) | st.just(float("-inf"))
    return sampling_pb2.SamplingParams(
        temperature=draw(_f32(0, 10)),
        top_k=draw(st.integers(0, _VOCABULARY)),
        top_p=draw(_f32(0, 1)),
        min_p=draw(_f32(0, 1)),
        repetition_penalty=draw(_f32(0, 10)),
        frequency_penalty=draw(_f32(-2, 2)),
        presence_penalty=draw(_f32(-2, 2)),
        penalty_last_n=draw(st.integers(0, 4096)),
        seed=draw(st.integers(0, 2**32 - 1)),
        top_logprobs=draw(st.integers(0, 20)),
        logprobs=draw(st.booleans()),
        **{draw(st.sampled_from(("grammar", "json_schema"))): draw(st.text(max_size=40))},
        logit_bias=[sampling_pb2.LogitBias(token_id=t, bias=draw(biases)) for t in tokens],
    )


@st.composite
def steps(draw: st.DrawFn) -> WireStep:
    """Any step that the protocol carries."""
    tokens = draw(st.integers(1, 64))
    n_embd = draw(st.integers(1, 40))
    sampled = draw(st.booleans())
    finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
    return WireStep(
        work_id=draw(st.from_regex(r"\A[A-Za-z0-9._:-]{1,64}\Z")),
        route_session_id=draw(st.binary(min_size=16, max_size=16)),
        route_epoch=draw(st.integers(1, 2**64 - 1)),
        step=draw(st.integers(1, 2**64 - 1)),
        applied_end=draw(st.integers(1, 2**32 - 1)),
        start_position=draw(st.integers(0, _CONTEXT - tokens)),
        token_ids=draw(numpy_st.arrays(np.int32, tokens, elements=st.integers(0, _VOCABULARY - 1))),
        residual=draw(numpy_st.arrays(np.float32, (tokens, n_embd), elements=finite, fill=finite)),
        phase=draw(st.sampled_from([frame_pb2.PHASE_PREFILL, frame_pb2.PHASE_DECODE])),
        output_rows=frame_pb2.OUTPUT_ROWS_LAST if sampled else frame_pb2.OUTPUT_ROWS_NONE,
        sampling=draw(st.none() | samplings()) if sampled else None,
        return_logits=draw(st.booleans()),
    )


def receiver_of(step: WireStep) -> FrameExpectation:
    """A receiver that must take the step."""
    return FrameExpectation(
        work_id=step.work_id,
        route_session_id=step.route_session_id,
        route_epoch=step.route_epoch,
        schema=dense_residual_schema(step.residual.shape[1]),
        applied_end=step.applied_end,
        vocabulary_size=_VOCABULARY,
        context_tokens=_CONTEXT,
        limits=_LIMITS,
    )


def assemble(expectation: FrameExpectation, frames: list[bytes]) -> WireStep | None:
    """Takes frames with the Python implementation."""
    assembler = FrameAssembler(expectation)
    step = None
    for data in frames:
        message = parse_message(data, expectation.limits.max_frame_bytes, frame_pb2.Frame)
        step = assembler.add(message)
    assembler.finish()
    return step


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    with Oracle() as running:
        yield running


@_SETTINGS
@given(step=steps())
def test_steps_survive_python(step: WireStep) -> None:
    expectation = receiver_of(step)
    frames = [f.SerializeToString() for f in encode_step(step, expectation.schema, _LIMITS)]
    assert all(len(frame) <= _LIMITS.max_frame_bytes for frame in frames)
    got = assemble(expectation, frames)
    assert got is not None
    np.testing.assert_array_equal(got.token_ids, step.token_ids)
    assert got.residual.tobytes() == step.residual.tobytes()
    sampling = None if step.sampling is None else canonical_sampling(step.sampling)
    assert got.sampling == sampling
    assert (got.work_id, got.step, got.start_position) == (
        step.work_id,
        step.step,
        step.start_position,
    )
    assert (got.phase, got.output_rows, got.return_logits) == (
        step.phase,
        step.output_rows,
        step.return_logits,
    )


@_SETTINGS
@given(step=steps())
def test_steps_survive_cpp_and_get_the_same_bytes_there(oracle: Oracle, step: WireStep) -> None:
    expectation = receiver_of(step)
    frames = [f.SerializeToString() for f in encode_step(step, expectation.schema, _LIMITS)]
    *earlier, last, end = oracle.take(expectation, frames, finish=True)
    assert [outcome.reason for outcome in [*earlier, last, end]] == [""] * (len(frames) + 1)
    assert list(last.encoded) == frames
    got = assemble(expectation, frames)
    assert got is not None
    assert last.step == step_to(got)


@_SETTINGS
@given(step=steps(), data=st.data())
def test_a_relay_forwards_bytes_that_it_never_reads(
    oracle: Oracle, step: WireStep, data: st.DataObject
) -> None:
    expectation = receiver_of(step)
    frames = encode_step(step, expectation.schema, _LIMITS)
    # On a seam a frame lies in one piece inside its message: what a relay carries is what both
    # ends check.
    messages = [shard_pb2.SeamMessage(frame=f).SerializeToString() for f in frames]
    for message, frame in zip(messages, frames, strict=True):
        assert len(message) <= _LIMITS.max_frame_bytes
        assert message.endswith(frame.SerializeToString())
    # The relay sees a stream of bytes in pieces of any size, each message behind its length.
    stream = b"".join(len(m).to_bytes(4, "little") + m for m in messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    received = b"".join(pieces)
    arrived = []
    while received:
        size = int.from_bytes(received[:4], "little")
        arrived.append(received[4 : 4 + size])
        received = received[4 + size :]
    assert arrived == messages
    direct = [f.SerializeToString() for f in frames]
    relayed = [
        parse_message(m, _LIMITS.max_frame_bytes, shard_pb2.SeamMessage).frame.SerializeToString()
        for m in arrived
    ]
    assert relayed == direct
    assert oracle.take(expectation, relayed) == oracle.take(expectation, direct)


def refusals(
    expectation: FrameExpectation, frames: list[bytes], *, finish: bool
) -> list[tuple[str, bytes]]:
    """The reason for each frame and for the end, with the step that it completed."""
    assembler = FrameAssembler(expectation)
    outcomes = []
    for data in frames:
        try:
            step = assembler.add(
                parse_message(data, expectation.limits.max_frame_bytes, frame_pb2.Frame)
            )
            encoded = b"" if step is None else step_to(step).SerializeToString(deterministic=True)
            outcomes.append(("", encoded))
        except MeshnetError as error:
            outcomes.append((error.reason_name, b""))
    if finish:
        try:
            assembler.finish()
            outcomes.append(("", b""))
        except MeshnetError as error:
            outcomes.append((error.reason_name, b""))
    return outcomes


def _corrupt(random_: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    kind = random_.randrange(5)
    if kind == 0 or not out:
        return random_.randbytes(random_.randrange(200))
    if kind == 1:
        del out[random_.randrange(len(out)) :]
    elif kind == 2:
        at = random_.randrange(len(out))
        out[at:at] = random_.randbytes(random_.randrange(1, 9))
    elif kind == 3:
        at = random_.randrange(len(out))
        del out[at : at + random_.randrange(1, 9)]
    else:
        for _ in range(random_.randrange(1, 9)):
            out[random_.randrange(len(out))] ^= 1 << random_.randrange(8)
    return bytes(out)


def test_both_refuse_corrupted_frames_for_the_same_reason(oracle: Oracle) -> None:
    random_ = random.Random(20240607)
    bases = [case.frames for case in malformed_frames() if case.frames]
    reasons: set[str] = set()
    for _ in range(3000):
        frames = list(random_.choice(bases))
        which = random_.randrange(len(frames))
        frames[which] = _corrupt(random_, frames[which])
        ours = refusals(EXPECTATION, frames, finish=True)
        theirs = [
            (
                outcome.reason,
                outcome.step.SerializeToString(deterministic=True)
                if outcome.HasField("step")
                else b"",
            )
            for outcome in oracle.take(EXPECTATION, frames, finish=True)
        ]
        assert theirs == ours, [frame.hex() for frame in frames]
        reasons.update(reason for reason, _ in ours)
    assert len(reasons) > 20
