"""Moves shaders from a C++ source of upstream's generator into an object file.

    embed_spirv --source mul_mm.comp.cpp --rest rest.cpp --object mul_mm.comp.o -- gcc ...

A compiler takes minutes and gigabytes for a hundred megabytes of `0x12,0x34,...`, an assembler no
time for a file. What follows `--` is the compiler with flags that hold for any source.
"""

import argparse
import pathlib
import re
import subprocess
import sys
import tempfile

ARRAY = re.compile(rb"const unsigned char (\w+)\[(\d+)\] = \{\n(.*?)\n\};\n", re.S)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("source", "rest", "object"):
        parser.add_argument(f"--{name}", type=pathlib.Path, required=True)
    parser.add_argument("compiler", nargs="+")
    options = parser.parse_args()
    assembly = ['.section .note.GNU-stack,"",@progbits', ".section .rodata"]
    content = bytearray()
    with tempfile.TemporaryDirectory() as folder:
        blob = pathlib.Path(folder) / "shaders.bin"

        def take_out(match: re.Match[bytes]) -> bytes:
            name, size = match[1].decode(), int(match[2])
            data = bytes([int(value, 16) for value in match[3].split(b",") if value.strip()])
            if len(data) != size:
                sys.exit(f"{name}: expected {size} bytes, found {len(data)}")
            # SPIR-V is made of words.
            content.extend(bytes(-len(content) % 16))
            assembly.extend(
                [
                    ".balign 16",
                    f".global {name}",
                    f".type {name}, @object",
                    f".size {name}, {size}",
                    f'{name}: .incbin "{blob}", {len(content)}, {size}',
                ]
            )
            content.extend(data)
            return b""

        rest = ARRAY.sub(take_out, options.source.read_bytes())
        if b"const unsigned char" in rest:
            sys.exit(f"{options.source} has an array of another form than expected")
        options.rest.write_bytes(rest)
        blob.write_bytes(content)
        code = pathlib.Path(folder) / "shaders.s"
        code.write_text("\n".join(assembly) + "\n")
        subprocess.run([*options.compiler, "-c", code, "-o", options.object], check=True)


if __name__ == "__main__":
    main()
