from __future__ import annotations

import pytest
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.protocol import MAX_MESSAGE_ELEMENTS, parse_message

from proto.meshnet.shard.v1 import frame_pb2, shard_pb2


def reason_of(data: bytes, max_bytes: int = 1 << 20) -> str:
    with pytest.raises(MeshnetError) as refused:
        parse_message(data, max_bytes, frame_pb2.Frame)
    return refused.value.reason_name


def test_a_message_of_exactly_the_limit_is_parsed() -> None:
    data = frame_pb2.Frame(work_id="w" * 10).SerializeToString()
    assert parse_message(data, len(data), frame_pb2.Frame).work_id == "w" * 10
    assert reason_of(data, len(data) - 1) == "FRAME_TOO_LARGE"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x98\x01\x05", "UNKNOWN_FIELD"),  # field 19
        (b"\x3a\x02\x18\x05", "UNKNOWN_FIELD"),  # field 3 in `applied`
        (b"\x42\x01\x05", "UNKNOWN_FIELD"),  # start_position as bytes
        (b"\x43\x44", "MALFORMED_MESSAGE"),  # a group
        (b"\x00", "MALFORMED_MESSAGE"),  # field 0
        (b"\x12\x01\xff", "MALFORMED_MESSAGE"),  # work_id that is no UTF-8
        (b"\x12\x05ab", "MALFORMED_MESSAGE"),  # truncated
        (b"\x08" + b"\xff" * 10, "MALFORMED_MESSAGE"),  # a varint of more than ten bytes
        (b"\xff\xff\xff\xff\x10\x00", "MALFORMED_MESSAGE"),  # a tag beyond 32 bits
        (b"\x82\x01\x03\x2a\x01\x80", "MALFORMED_MESSAGE"),  # a packed shape cut off
    ],
)
def test_faults_are_refused_before_parsing(data: bytes, reason: str) -> None:
    assert reason_of(data) == reason


def test_packed_and_unpacked_shapes_are_both_read() -> None:
    packed = parse_message(b"\x82\x01\x04\x2a\x02\x03\x04", 100, frame_pb2.Frame)
    unpacked = parse_message(b"\x82\x01\x04\x28\x03\x28\x04", 100, frame_pb2.Frame)
    assert list(packed.tensors[0].shape) == list(unpacked.tensors[0].shape) == [3, 4]


def test_elements_are_bounded() -> None:
    tensor = b"\x82\x01\x00"
    parsed = parse_message(tensor * MAX_MESSAGE_ELEMENTS, 1 << 20, frame_pb2.Frame)
    assert len(parsed.tensors) == MAX_MESSAGE_ELEMENTS
    assert reason_of(tensor * (MAX_MESSAGE_ELEMENTS + 1)) == "FIELD_OUT_OF_BOUNDS"
    shape = b"\x01" * MAX_MESSAGE_ELEMENTS
    # One element is the tensor itself.
    content = b"\x2a\x80\x10" + shape
    assert reason_of(b"\x82\x01\x83\x10" + content) == "FIELD_OUT_OF_BOUNDS"


def test_many_token_ids_are_fine() -> None:
    request = shard_pb2.SessionRequest()
    request.generate.token_ids.extend(range(100_000))
    data = request.SerializeToString()
    assert parse_message(data, 1 << 20, shard_pb2.SessionRequest) == request


def test_map_entries_are_walked() -> None:
    metrics = shard_pb2.Metrics(refusals={"STALE_EPOCH": 3})
    data = metrics.SerializeToString()
    assert parse_message(data, 1 << 20, shard_pb2.Metrics) == metrics
    broken = data.replace(b"STALE_EPOCH", b"STALE_EPOC\xff")
    with pytest.raises(MeshnetError, match="MALFORMED_MESSAGE"):
        parse_message(broken, 1 << 20, shard_pb2.Metrics)
