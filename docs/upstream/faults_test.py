"""Faults, on the tree without their patch: the programs that pass with it fail."""

import os
import pathlib
import signal
import subprocess

HERE = pathlib.Path(__file__).parent


def run(name: str, model: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [HERE / f"test-{name}-without", os.environ[model]],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_an_empty_indexer_cache_divides_by_zero() -> None:
    ended = run("empty-indexer-cache", "EMPTY_INDEXER_CACHE_MODEL")
    assert ended.returncode == -signal.SIGFPE, ended.stderr


def test_nextn_rows_are_overwritten() -> None:
    ended = run("nextn-output", "NEXTN_OUTPUT_MODEL")
    assert ended.returncode == 1, ended.stderr
    assert "rows do not depend on when they were switched on" in ended.stderr
    assert "masked rows, largest difference: 0\n" not in ended.stdout
