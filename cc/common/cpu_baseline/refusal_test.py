"""A program that starts on an old CPU refuses before any of its own code runs."""

import pathlib
import subprocess

HERE = pathlib.Path(__file__).parent


def run(program: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([HERE / program], capture_output=True, text=True, check=False, timeout=60)


def test_old_cpu_is_refused_before_constructors() -> None:
    result = run("on_old_cpu")
    assert result.returncode == 78
    assert result.stdout == ""
    assert "needs a CPU of level x86-64-v2 " in result.stderr
    assert "this one has no sse4.2" in result.stderr


def test_this_cpu_is_accepted() -> None:
    result = run("on_this_cpu")
    assert (result.returncode, result.stdout, result.stderr) == (0, "constructor\nmain\n", "")
