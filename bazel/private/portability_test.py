"""Tests of one program, named by the environment: see //bazel:portability.bzl."""

import json
import os
import pathlib
import re
import subprocess

PROGRAM = (
    pathlib.Path(os.environ["TEST_SRCDIR"])
    / os.environ["TEST_WORKSPACE"]
    / os.environ["PORTABILITY_BINARY"]
)
NEWEST_GLIBC = (2, 36)
LIBRARIES = {"libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2"}


def readelf(*options: str) -> str:
    return subprocess.run(
        ["readelf", "--wide", *options, PROGRAM], capture_output=True, text=True, check=True
    ).stdout


def test_needs_only_the_c_library() -> None:
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", readelf("--dynamic")))
    assert "libc.so.6" in needed
    assert needed <= LIBRARIES


def test_needs_no_newer_symbol_than_debian_12_has() -> None:
    versions = {
        tuple(int(part) for part in version.split("."))
        for version in re.findall(r"@GLIBC_([0-9.]+)", readelf("--dyn-syms"))
    }
    assert versions
    assert max(versions) <= NEWEST_GLIBC


def test_has_no_search_path_of_its_own() -> None:
    assert not re.search(r"\((RPATH|RUNPATH)\)", readelf("--dynamic"))


def test_checks_the_cpu_first() -> None:
    assert ".preinit_array" in readelf("--section-headers")


def test_runs() -> None:
    arguments = json.loads(os.environ["PORTABILITY_ARGS"])
    result = subprocess.run(
        [PROGRAM, *arguments], capture_output=True, text=True, check=False, timeout=60
    )
    assert result.returncode == int(os.environ["PORTABILITY_EXIT_CODE"]), result.stderr
