"""The release after this one, for tests of upgrades: the same programs under another version.

    next_release([tarball, wheel, requirements], "0.1.0", "0.2.0", folder)

Its worker says that it has another patch stack, as one that computes in another way would. So it
has another recipe, too, and workers of both releases are never of one route.
"""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable

from release import pack, wheel

__all__ = ["next_release"]

_PROGRAM = "bin/meshnet-worker"
_IDENTITY = "identity.json"


def _identity(program: bytes) -> bytes:
    """What a worker's program says of itself."""
    with tempfile.NamedTemporaryFile(suffix="worker", delete=False) as file:
        file.write(program)
    path = pathlib.Path(file.name)
    try:
        path.chmod(0o700)
        return subprocess.run([path, "--version", "--json"], capture_output=True, check=True).stdout
    finally:
        path.unlink()


def _tarball(path: pathlib.Path, old: str, new: str) -> bytes:
    with tarfile.open(path) as tar:
        files = {
            member.name.partition("/")[2]: content.read()
            for member in tar
            if (content := tar.extractfile(member)) is not None
        }
    del files[pack.SUMS]
    stack = json.loads(files[_IDENTITY])["engine"]["llama_cpp"]["patches_sha256"].encode()
    assert len(new) == len(old), "the program has room for no other length"
    program = files[_PROGRAM].replace(stack, stack[::-1])
    for size in (len(old) - 1, len(old)):
        # The compiler also puts a short text into instructions, four bytes and the rest.
        text = rb"(?<![0-9.])" + re.escape(old[:size].encode()) + rb"(?![0-9])"
        program = re.sub(text, new[:size].encode(), program)
    files[_PROGRAM], files[_IDENTITY] = program, _identity(program)
    identity = json.loads(files[_IDENTITY])
    assert identity["version"] == new, identity
    assert identity["engine"]["llama_cpp"]["patches_sha256"] == stack[::-1].decode(), identity
    return pack.pack(path.name.removesuffix(".tar.gz").replace(old, new), files, level=1)


def _wheel(path: pathlib.Path, old: str, new: str) -> bytes:
    own = f"{wheel.NAME}-{old}.dist-info/"
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    needed = re.findall(r"^Requires-Dist: (.*)$", files[own + "METADATA"].decode(), re.MULTILINE)
    # What else is in that folder, wheel() makes.
    kept = {
        name.removeprefix(own): content
        for name, content in files.items()
        if not name.startswith(own) or name.startswith((own + "licenses/", own + "sboms/"))
    }
    return wheel.wheel(new, kept, needed)


def next_release(artifacts: Iterable[pathlib.Path], old: str, new: str, out: pathlib.Path) -> None:
    """Writes each artifact of release `old` to `out` as one of release `new`."""
    for path in artifacts:
        make = {".gz": _tarball, ".whl": _wheel}.get(path.suffix)
        content = make(path, old, new) if make else path.read_bytes()
        (out / path.name.replace(old, new)).write_bytes(content)
