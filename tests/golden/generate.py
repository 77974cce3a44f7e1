"""Writes the golden files of the frame protocol.

    tools/bazel run //tests/golden:generate

writes frames.textproto, malformed_frames.textproto and descriptors.textproto into the work tree. A
test compares them with what this program would write.
"""

from __future__ import annotations

import os
import pathlib
import sys

from google.protobuf import descriptor_pb2, text_format
from meshnet_gguf.protocol import encode_step

from proto.meshnet.shard.v1 import (
    boundary_pb2,
    errors_pb2,
    frame_pb2,
    sampling_pb2,
    shard_pb2,
    tokenizer_pb2,
)
from tests.golden import golden_pb2
from tests.golden.cases import EXPECTATION, good_steps, malformed_frames
from tests.golden.conversion import expectation_to, step_to

_NOTICE = "# Written by `tools/bazel run //tests/golden:generate`; change tests/golden/cases.py.\n"
_NOTICE_DESCRIPTORS = """\
# Version 1 of the protocol. A peer refuses fields that it does not know, so a change here changes
# what peers of version 1 understand: write it again (tools/bazel run //tests/golden:generate) only
# while no such peer is out there, or together with a new version.
"""


def frames_text() -> str:
    """The content of frames.textproto."""
    message = golden_pb2.EncodedSteps()
    for good in good_steps():
        frames = encode_step(good.step, good.expectation.schema, good.expectation.limits)
        message.steps.add(
            name=good.name,
            expectation=expectation_to(good.expectation),
            step=step_to(good.step),
            frames=[frame.SerializeToString().hex() for frame in frames],
        )
    return _NOTICE + text_format.MessageToString(message)


def malformed_frames_text() -> str:
    """The content of malformed_frames.textproto."""
    message = golden_pb2.MalformedFrames(expectation=expectation_to(EXPECTATION))
    for case in malformed_frames():
        message.cases.add(
            name=case.name,
            frames=[frame.hex() for frame in case.frames],
            finish=case.finish,
            reason=case.reason,
            expectation=None if case.receiver is None else expectation_to(case.receiver),
        )
    return _NOTICE + text_format.MessageToString(message)


def descriptors() -> descriptor_pb2.FileDescriptorSet:
    """The protocol's files as this language has them."""
    message = descriptor_pb2.FileDescriptorSet()
    for module in (
        boundary_pb2,
        errors_pb2,
        frame_pb2,
        sampling_pb2,
        shard_pb2,
        tokenizer_pb2,
    ):
        message.file.add().ParseFromString(module.DESCRIPTOR.serialized_pb)
    return message


def descriptors_text() -> str:
    """The content of descriptors.textproto."""
    return _NOTICE_DESCRIPTORS + text_format.MessageToString(descriptors())


def main() -> int:
    """Writes the files."""
    root = os.environ.get("BUILD_WORKSPACE_DIRECTORY")
    if root is None:
        sys.stderr.write("expected to be run by Bazel: tools/bazel run //tests/golden:generate\n")
        return 2
    folder = pathlib.Path(root) / "tests" / "golden"
    (folder / "frames.textproto").write_text(frames_text(), encoding="utf-8")
    (folder / "malformed_frames.textproto").write_text(malformed_frames_text(), encoding="utf-8")
    (folder / "descriptors.textproto").write_text(descriptors_text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
