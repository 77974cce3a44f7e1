"""Where a program looks for its libraries, beside the system's own places."""

from __future__ import annotations

import struct

__all__ = ["BESIDE_ITSELF", "only_beside_itself"]

# The one place of a released program that is not the system's: where the installer links to the
# libraries of a GPU's maker.
BESIDE_ITSELF = "$ORIGIN/../lib"

# Of the ELF specification: 64 bits, little endian.
_MAGIC = b"\x7fELF\x02\x01"
_PROGRAM_HEADER = struct.Struct("<IIQQQQQQ")
_DYNAMIC_ENTRY = struct.Struct("<QQ")
_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_STRTAB, _DT_RPATH, _DT_RUNPATH = 5, 15, 29


def only_beside_itself(program: bytes) -> bytes:
    """`program` without the folders in front of BESIDE_ITSELF; what is no ELF file as it is.

    The entry is made to begin later in its text, which is not touched: the linker lets other names
    share the end of it. Raises ValueError for a search path that does not end with BESIDE_ITSELF.
    """
    if not program.startswith(_MAGIC):
        return program
    (table,) = struct.unpack_from("<Q", program, 0x20)
    (count,) = struct.unpack_from("<H", program, 0x38)
    segments = [
        _PROGRAM_HEADER.unpack_from(program, table + number * _PROGRAM_HEADER.size)
        for number in range(count)
    ]
    edited = bytearray(program)
    for kind, _, offset, *_, size, _, _ in segments:
        if kind != _PT_DYNAMIC:
            continue
        entries = list(_DYNAMIC_ENTRY.iter_unpack(program[offset : offset + size]))
        address = dict(entries).get(_DT_STRTAB, 0)
        texts = next(
            begin + address - low
            for load, _, begin, low, _, length, _, _ in segments
            if load == _PT_LOAD and low <= address < low + length
        )
        for number, (tag, value) in enumerate(entries):
            if tag not in (_DT_RPATH, _DT_RUNPATH):
                continue
            text = program[texts + value : program.index(b"\0", texts + value)].decode()
            if f":{text}".rpartition(":")[2] != BESIDE_ITSELF:
                raise ValueError(f"expected a search path that ends with {BESIDE_ITSELF}: {text}")
            _DYNAMIC_ENTRY.pack_into(
                edited,
                offset + number * _DYNAMIC_ENTRY.size,
                tag,
                value + len(text) - len(BESIDE_ITSELF),
            )
    return bytes(edited)
