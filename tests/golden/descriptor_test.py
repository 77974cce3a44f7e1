"""Both languages speak the same protocol, and the one that was agreed on."""

from __future__ import annotations

import pathlib

from google.protobuf import descriptor_pb2, text_format
from meshnet_gguf.errors import options_of, reason_name

from proto.meshnet.shard.v1 import errors_pb2
from tests.golden import generate
from tests.golden.oracle import ask_once

_FILE = pathlib.Path(__file__).parent / "descriptors.textproto"


def test_descriptors_are_the_committed_ones() -> None:
    text = _FILE.read_text(encoding="utf-8")
    committed = text_format.Parse(text, descriptor_pb2.FileDescriptorSet())
    assert [file.name for file in committed.file] == [
        file.name for file in generate.descriptors().file
    ]
    for ours, agreed in zip(generate.descriptors().file, committed.file, strict=True):
        assert ours == agreed, f"{ours.name} has changed, see the head of descriptors.textproto"
    assert generate.descriptors_text() == text


def test_cpp_has_the_same_descriptors() -> None:
    theirs = descriptor_pb2.FileDescriptorSet.FromString(ask_once("descriptors"))
    for ours, other in zip(generate.descriptors().file, theirs.file, strict=True):
        assert ours == other
    assert len(theirs.file) == 6


def test_cpp_has_the_same_reasons() -> None:
    ours = [
        f"{reason_name(number)} {number} {options_of(number).grpc_code} "
        f"{options_of(number).recovery}"
        for number in errors_pb2.Reason.values()
        if number
    ]
    assert ask_once("reasons").decode().splitlines() == ours
    assert len(ours) > 50
