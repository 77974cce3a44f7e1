"""A release's tarball, the same bytes for the same content.

    pack --out NAME.tar.gz --root NAME bin/meshnet-worker=PATH licenses=FOLDER LICENSE=PATH ...

Names are sorted, owners, times and modes are fixed (0755 in bin/ and for *.sh, 0644 elsewhere). A
file SHA256SUMS over all others is added, in the form that `sha256sum --check` reads. Programs in
bin/ look for libraries in the system's places and beside themselves, no more where they were built.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import pathlib
import sys
import tarfile
from collections.abc import Mapping, Sequence

from release.search_path import only_beside_itself

__all__ = ["SUMS", "main", "pack"]

SUMS = "SHA256SUMS"


def _mode(name: str) -> int:
    return 0o755 if name.startswith("bin/") or name.endswith(".sh") else 0o644


def pack(root: str, files: Mapping[str, bytes], level: int = 9) -> bytes:
    """The gzipped tar of `files` (by name) within a folder `root`; `level` is gzip's."""
    sums = "".join(f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n" for name in sorted(files))
    content = {**files, SUMS: sums.encode()}
    tar_bytes = io.BytesIO()
    with tarfile.open(fileobj=tar_bytes, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in sorted(content):
            info = tarfile.TarInfo(f"{root}/{name}")
            info.size = len(content[name])
            info.mode = _mode(name)
            info.uname = info.gname = "root"
            tar.addfile(info, io.BytesIO(content[name]))
    out = io.BytesIO()
    with gzip.GzipFile(filename="", fileobj=out, mode="wb", compresslevel=level, mtime=0) as zipped:
        zipped.write(tar_bytes.getvalue())
    return out.getvalue()


def main(arguments: Sequence[str]) -> int:
    """Writes the tarball."""
    parser = argparse.ArgumentParser(prog="pack", description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--root", required=True)
    parser.add_argument("files", nargs="+", metavar="NAME=PATH")
    options = parser.parse_args(arguments)
    files = {}
    for entry in options.files:
        name, _, path = entry.partition("=")
        given = pathlib.Path(path)
        for file in sorted(given.iterdir()) if given.is_dir() else [given]:
            inside = f"{name}/{file.name}" if given.is_dir() else name
            if inside in files:
                parser.error(f"{inside} is given twice")
            content = file.read_bytes()
            files[inside] = only_beside_itself(content) if inside.startswith("bin/") else content
    options.out.write_bytes(pack(options.root, files))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
