"""A program that starts on an old CPU refuses before any of its own code runs."""

import os
import pathlib
import subprocess


def run(program: str) -> "subprocess.CompletedProcess[str]":
    path = pathlib.Path(os.environ[program]).absolute()
    return subprocess.run([path], capture_output=True, text=True, check=False, timeout=60)


def test_old_cpu_is_refused_before_constructors() -> None:
    result = run("ON_OLD_CPU")
    assert result.returncode == 78
    assert result.stdout == ""
    assert f"needs a CPU of level {os.environ['NEEDED']} " in result.stderr
    assert f"this one has no {os.environ['MISSING']}" in result.stderr


def test_this_cpu_is_accepted() -> None:
    result = run("ON_THIS_CPU")
    assert (result.returncode, result.stdout, result.stderr) == (0, "constructor\nmain\n", "")
