"""Runs the given test files with pytest under Bazel: the main program of every py_pytest target."""

import os
import pathlib
import sys

import pytest


class Shard:
    """Keeps this shard's part of the tests when Bazel shards a target."""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Drops the other shards' tests."""
        total = int(os.environ.get("TEST_TOTAL_SHARDS", "1"))
        index = int(os.environ.get("TEST_SHARD_INDEX", "0"))
        items[:] = items[index::total]


def main() -> int:
    """Runs pytest; its exit code is the test's."""
    if status := os.environ.get("TEST_SHARD_STATUS_FILE"):
        pathlib.Path(status).touch()
    scratch = pathlib.Path(os.environ["TEST_TMPDIR"])
    os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(scratch / "hypothesis"))
    runfiles = pathlib.Path(os.environ["TEST_SRCDIR"]) / os.environ["TEST_WORKSPACE"]
    arguments = [
        f"--config-file={runfiles / 'pyproject.toml'}",
        f"--rootdir={runfiles}",
        f"--basetemp={scratch / 'pytest'}",
        "--import-mode=importlib",
        "-p",
        "no:cacheprovider",
    ]
    if report := os.environ.get("XML_OUTPUT_FILE"):
        arguments.append(f"--junitxml={report}")
    if only := os.environ.get("TESTBRIDGE_TEST_ONLY"):
        arguments.append(f"-k={only}")
    return pytest.main(arguments + sys.argv[1:], plugins=[Shard()])


if __name__ == "__main__":
    sys.exit(main())
