"""A released program looks for libraries in no folder of the build."""

import os
import pathlib
import re
import subprocess
import tarfile

import pytest

from release import pack
from release.search_path import only_beside_itself

PROGRAM = pathlib.Path(os.environ["PROGRAM"]).absolute()
BUILD_FOLDER = "$ORIGIN/../../_solib_k8/sdk"


def search_paths(program: pathlib.Path) -> list[str]:
    dynamic = subprocess.run(
        ["readelf", "--wide", "--dynamic", program], capture_output=True, text=True, check=True
    ).stdout
    return re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", dynamic)


def test_what_is_packed_looks_beside_itself_alone(tmp_path: pathlib.Path) -> None:
    assert search_paths(PROGRAM) == [f"{BUILD_FOLDER}:$ORIGIN/../lib"]
    tarball = tmp_path / "r.tar.gz"
    content = [f"bin/worker={PROGRAM}", f"share/worker={PROGRAM}"]
    assert pack.main(["--out", str(tarball), "--root", "r", *content]) == 0
    with tarfile.open(tarball) as tar:
        tar.extractall(tmp_path, filter="data")
    packed = tmp_path / "r/bin/worker"
    assert search_paths(packed) == ["$ORIGIN/../lib"]
    assert subprocess.run([packed], check=False).returncode == 0
    assert (tmp_path / "r/share/worker").read_bytes() == PROGRAM.read_bytes()


def test_a_program_that_looks_elsewhere_is_refused() -> None:
    elsewhere = PROGRAM.read_bytes().replace(b":$ORIGIN/../lib\0", b":$ORIGIN/../lob\0")
    with pytest.raises(
        ValueError, match=r"expected a search path that ends with \$ORIGIN/\.\./lib"
    ):
        only_beside_itself(elsewhere)


@pytest.mark.parametrize(
    "content", [b"", b"#!/bin/sh\n", b"\x7fELF", pathlib.Path("/bin/true").read_bytes()]
)
def test_what_has_no_search_path_stays_as_it_is(content: bytes) -> None:
    assert only_beside_itself(content) == content
