"""The wheel `meshnet_gguf`, the same bytes for the same content.

    wheel --out OUT.whl --version 0.1.0 --requirements runtime.in --list FILES \\
        --notice NOTICE --sbom sbom.json --licence LICENSE

FILES has one line a file: its path in the source tree, a tab, and where it lies. What is below
python/ is imported from there. The generated messages, in the tree below proto/, are put into the
package that they belong to, and so are the imports of them: a package named `proto` would be
anybody's.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import pathlib
import re
import sys
import zipfile
from collections.abc import Mapping, Sequence

__all__ = ["main", "wheel"]

NAME = "meshnet_gguf"
_EPOCH = (1980, 1, 1, 0, 0, 0)


# Whose messages are whose, by the folder below proto/meshnet.
_OWNERS = {"control": "meshnet", "shard": NAME}
_MESSAGES = re.compile(r"\bproto([./])meshnet[./](control|shard)\b(?=[./]v\d)")
# Names of modules: in imports, and as what a generated module says of itself.
_IMPORT = re.compile(r"^(\s*(?:from|import) )(proto\.\S+)", re.MULTILINE)
_OWN_NAME = re.compile(r"(BuildTopDescriptorsAndMessages\(DESCRIPTOR, ')(proto\.[^']+)")


def _messages(match: re.Match[str]) -> str:
    separator = match[1]
    return separator.join((_OWNERS[match[2]], "_proto", match[2]))


def placed(name: str, content: bytes) -> tuple[str, bytes]:
    """Where a file of the source tree lies in the wheel, and what it says there.

    Raises ValueError for an import of a message that belongs to neither package.
    """
    name = _MESSAGES.sub(_messages, name.removeprefix("python/"))
    if not name.endswith((".py", ".pyi")):
        return name, content
    text = content.decode()
    for pattern in (_IMPORT, _OWN_NAME):
        text = pattern.sub(lambda match: match[1] + _MESSAGES.sub(_messages, match[2]), text)
    left = _IMPORT.search(text)
    if left or name.startswith("proto/"):
        raise ValueError(f"{name}: nobody owns {left[2] if left else name}")
    return name, text.encode()


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
        name, content = placed(name, pathlib.Path(path).read_bytes())
        files[name] = content
    requirements = [
        line
        for line in options.requirements.read_text("utf-8").splitlines()
        if line and not line.startswith("#")
    ]
    options.out.write_bytes(wheel(options.version, files, requirements))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
