"""Parses the messages of a stream; walks their bytes first, so that hostile ones are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from meshnet_gguf.errors import MeshnetError
from proto.meshnet.shard.v1 import errors_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["MAX_MESSAGE_ELEMENTS", "parse_message", "scan_message"]

M = TypeVar("M", bound=Message)
# A message's descriptor: protobuf's stubs have several classes for it, its backends others.
Descriptor = Any

# Submessages and repeated elements (other than 32-bit numbers) that one message may hold.
MAX_MESSAGE_ELEMENTS: Final = 2048

_VARINT: Final = 0
_FIXED64: Final = 1
_DELIMITED: Final = 2
_FIXED32: Final = 5
_MAX_FIELD_NUMBER: Final = 2**29 - 1
# Tags and lengths are 32-bit numbers, values 64-bit ones.
_SHORT: Final = 5
_LONG: Final = 10

_F = FieldDescriptor
_WIRE_TYPES: Final = {
    _F.TYPE_DOUBLE: _FIXED64,
    _F.TYPE_FIXED64: _FIXED64,
    _F.TYPE_SFIXED64: _FIXED64,
    _F.TYPE_FLOAT: _FIXED32,
    _F.TYPE_FIXED32: _FIXED32,
    _F.TYPE_SFIXED32: _FIXED32,
    _F.TYPE_STRING: _DELIMITED,
    _F.TYPE_BYTES: _DELIMITED,
    _F.TYPE_MESSAGE: _DELIMITED,
    _F.TYPE_GROUP: _DELIMITED,
}
# What a parser keeps in 4 bytes or fewer.
_NARROW: Final = frozenset(
    {_F.CPPTYPE_INT32, _F.CPPTYPE_UINT32, _F.CPPTYPE_FLOAT, _F.CPPTYPE_BOOL, _F.CPPTYPE_ENUM}
)


def parse_message(data: bytes, max_bytes: int, message_type: type[M]) -> M:
    """Parses one message of a stream.

    Raises:
        MeshnetError: FRAME_TOO_LARGE, MALFORMED_MESSAGE, UNKNOWN_FIELD (at any depth),
            FIELD_OUT_OF_BOUNDS (more than MAX_MESSAGE_ELEMENTS).
    """
    if len(data) > max_bytes:
        raise MeshnetError(
            errors_pb2.REASON_FRAME_TOO_LARGE,
            f"expected at most {max_bytes} bytes in a message, got {len(data)}; "
            "cut smaller fragments",
        )
    scan_message(data, message_type.DESCRIPTOR)
    try:
        return message_type.FromString(data)
    except DecodeError:
        raise MeshnetError(
            errors_pb2.REASON_MALFORMED_MESSAGE,
            f"expected a serialised {message_type.DESCRIPTOR.full_name}, got {len(data)} bytes "
            "that cannot be parsed",
        ) from None


def scan_message(data: bytes, descriptor: Descriptor) -> None:
    """Walks serialised bytes along a descriptor and refuses the first fault in their order.

    Raises:
        MeshnetError: MALFORMED_MESSAGE, UNKNOWN_FIELD or FIELD_OUT_OF_BOUNDS.
    """
    _Scanner(data).scan(0, len(data), descriptor)


class _Scanner:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._elements = 0

    def scan(self, at: int, end: int, descriptor: Descriptor) -> None:
        while at < end:
            tag, at = self._varint(at, end, _SHORT, descriptor)
            number, wire_type = tag >> 3, tag & 7
            if not 0 < number <= _MAX_FIELD_NUMBER:
                raise _malformed(descriptor, f"field number {number}")
            start, at = self._value(at, end, wire_type, descriptor)
            field = descriptor.fields_by_number.get(number)
            if field is None:
                raise MeshnetError(
                    errors_pb2.REASON_UNKNOWN_FIELD,
                    "expected only fields that schema version 1 defines, got field "
                    f"{number} of {descriptor.full_name}; negotiate a version that both ends speak",
                )
            self._field(start, at, wire_type, field)

    def _field(self, start: int, end: int, wire_type: int, field: FieldDescriptor) -> None:
        expected = _WIRE_TYPES.get(field.type, _VARINT)
        repeated = field.is_repeated
        if wire_type != expected:
            if wire_type == _DELIMITED and repeated:
                for _ in self._packed(start, end, expected, field):
                    if field.cpp_type not in _NARROW:
                        self._count(field)
                return
            raise MeshnetError(
                errors_pb2.REASON_UNKNOWN_FIELD,
                f"expected {field.full_name} with wire type {expected}, got wire type {wire_type}",
            )
        if field.type == _F.TYPE_MESSAGE:
            self._count(field)
            self.scan(start, end, field.message_type)
            return
        if field.type == _F.TYPE_STRING:
            try:
                self._data[start:end].decode("utf-8")
            except UnicodeDecodeError:
                raise _malformed(
                    field.containing_type, f"a {field.name} that is not UTF-8"
                ) from None
        if repeated and field.cpp_type not in _NARROW:
            self._count(field)

    def _packed(self, at: int, end: int, wire_type: int, field: FieldDescriptor) -> Iterator[None]:
        while at < end:
            _, at = self._value(at, end, wire_type, field.containing_type)
            yield

    def _count(self, field: FieldDescriptor) -> None:
        self._elements += 1
        if self._elements > MAX_MESSAGE_ELEMENTS:
            raise MeshnetError(
                errors_pb2.REASON_FIELD_OUT_OF_BOUNDS,
                f"expected at most {MAX_MESSAGE_ELEMENTS} elements in one message, got more at "
                f"{field.full_name}",
            )

    def _value(self, at: int, end: int, wire_type: int, where: Descriptor) -> tuple[int, int]:
        """Where the value's content begins and where the next field does."""
        if wire_type == _VARINT:
            return at, self._varint(at, end, _LONG, where)[1]
        if wire_type == _FIXED64:
            size = 8
        elif wire_type == _FIXED32:
            size = 4
        elif wire_type == _DELIMITED:
            size, at = self._varint(at, end, _SHORT, where)
        else:
            raise _malformed(where, f"wire type {wire_type}")
        if size > end - at:
            raise _malformed(where, f"a field of {size} bytes, {end - at} bytes before the end")
        return at, at + size

    def _varint(self, at: int, end: int, max_bytes: int, where: Descriptor) -> tuple[int, int]:
        value = 0
        for i in range(min(max_bytes, end - at)):
            byte = self._data[at + i]
            if (i == _LONG - 1 and byte > 1) or (max_bytes == _SHORT == i + 1 and byte > 0x0F):
                break
            value |= (byte & 0x7F) << (7 * i)
            if byte < 0x80:
                return value, at + i + 1
        raise _malformed(where, "a number that ends early or is too long")


def _malformed(descriptor: Descriptor, what: str) -> MeshnetError:
    return MeshnetError(
        errors_pb2.REASON_MALFORMED_MESSAGE,
        f"expected a serialised {descriptor.full_name}, got {what}",
    )
