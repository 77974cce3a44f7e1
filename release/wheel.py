"""The wheel `meshnet_gguf`, the same bytes for the same content.

    wheel --out OUT.whl --version 0.1.0 --requirements runtime.in --list FILES \\
        --notice NOTICE --sbom sbom.json --licence LICENSE

FILES has one line a file: its path in the source tree, a tab, and where it lies. What is below
python/ is imported from there, everything else from the tree's root.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import pathlib
import sys
import zipfile
from collections.abc import Mapping, Sequence

__all__ = ["main", "wheel"]

NAME = "meshnet_gguf"
_EPOCH = (1980, 1, 1, 0, 0, 0)


def _digest(content: bytes) -> str:
    raw = base64.urlsafe_b64encode(hashlib.sha256(content).digest())
    return "sha256=" + raw.rstrip(b"=").decode()


def _metadata(version: str, requirements: Sequence[str]) -> str:
    lines = [
        "Metadata-Version: 2.4",
        f"Name: {NAME}",
        f"Version: {version}",
        "Summary: Run one GGUF model across several ordinary machines",
        "License-Expression: Apache-2.0",
        "License-File: LICENSE",
        "License-File: NOTICE",
        "Requires-Python: >=3.11",
        *(f"Requires-Dist: {name}" for name in requirements),
        "",
        "Client, gateway, tracker and tools around the shard workers of meshnet-gguf.",
        "",
    ]
    return "\n".join(lines)


def wheel(version: str, files: Mapping[str, bytes], requirements: Sequence[str]) -> bytes:
    """The wheel's bytes. `files` by their path in the wheel; licences below `licenses/`."""
    info = f"{NAME}-{version}.dist-info"
    content = {
        (f"{info}/{name}" if name.startswith(("licenses/", "sboms/")) else name): data
        for name, data in files.items()
    }
    content[f"{info}/METADATA"] = _metadata(version, requirements).encode()
    content[f"{info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: meshnet\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    content[f"{info}/entry_points.txt"] = (
        f"[console_scripts]\nmeshnet = {NAME}.cli.meshnet:run\n".encode()
    )
    record = f"{info}/RECORD"
    lines = [f"{name},{_digest(content[name])},{len(content[name])}" for name in sorted(content)]
    content[record] = ("\n".join([*lines, f"{record},,"]) + "\n").encode()
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name in sorted(content):
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.external_attr = 0o100644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, content[name])
    return out.getvalue()


def main(arguments: Sequence[str]) -> int:
    """Writes the wheel."""
    parser = argparse.ArgumentParser(prog="wheel", description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--version", required=True)
    parser.add_argument("--requirements", type=pathlib.Path, required=True)
    parser.add_argument("--list", type=pathlib.Path, required=True)
    for name in ("notice", "sbom", "licence"):
        parser.add_argument(f"--{name}", type=pathlib.Path, required=True)
    options = parser.parse_args(arguments)
    files = {
        "licenses/LICENSE": options.licence.read_bytes(),
        "licenses/NOTICE": options.notice.read_bytes(),
        f"sboms/{NAME}.cdx.json": options.sbom.read_bytes(),
    }
    for line in options.list.read_text("utf-8").splitlines():
        name, _, path = line.partition("\t")
        files[name.removeprefix("python/")] = pathlib.Path(path).read_bytes()
    requirements = [
        line
        for line in options.requirements.read_text("utf-8").splitlines()
        if line and not line.startswith("#")
    ]
    options.out.write_bytes(wheel(options.version, files, requirements))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
