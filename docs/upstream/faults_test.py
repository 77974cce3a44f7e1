"""A fault, on the tree without its patch: the program that passes with it fails."""

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
