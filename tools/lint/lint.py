"""Runs linters over the whole work tree.

`tools/bazel test //tools/lint/...` checks, and `tools/bazel run //tools/lint:fix` repairs what can
be repaired.
"""

import argparse
import hashlib
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable

STARLARK = (".bzl", ".bazel")
CXX = (".cc", ".h", ".cpp", ".hpp")
PYTHON = (".py", ".pyi")

# Older caches go, those of work trees that are gone among them.
MYPY_CACHE_DAYS = 14


def work_tree() -> pathlib.Path:
    """The work tree: the folder of the MODULE.bazel that our runfiles link to."""
    if directory := os.environ.get("BUILD_WORKSPACE_DIRECTORY"):
        return pathlib.Path(directory)
    runfiles = pathlib.Path(os.environ["TEST_SRCDIR"]) / os.environ["TEST_WORKSPACE"]
    return (runfiles / "MODULE.bazel").resolve().parent


def tracked(root: pathlib.Path, suffixes: tuple[str, ...]) -> list[str]:
    """Files that git knows or would add, relative to the work tree."""
    command = ["git", "-c", f"safe.directory={root}", "ls-files", "-z"]
    command += ["--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    return sorted(
        name
        for name in set(listed.split("\0"))
        if name.endswith(suffixes) and (root / name).is_file()
    )


def packaged(package: str, program: str) -> str:
    """A program that a Python package brings in its bin folder."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"the Python package {package} is not there")
    return str(pathlib.Path(spec.origin).parent.parent / "bin" / program)


def buildifier(root: pathlib.Path, tool: str, fix: bool) -> list[str]:
    """Format and warnings of Starlark files."""
    mode = ["-mode=fix", "-lint=fix"] if fix else ["-mode=check", "-lint=warn"]
    return [tool, *mode, *tracked(root, STARLARK)]


def clang_format(root: pathlib.Path, _tool: str, fix: bool) -> list[str]:
    """Format of C++ files."""
    mode = ["-i"] if fix else ["--dry-run", "-Werror"]
    package = importlib.util.find_spec("clang_format")
    if package is None or package.origin is None:
        raise SystemExit("the Python package clang_format is not there")
    program = pathlib.Path(package.origin).parent / "data" / "bin" / "clang-format"
    return [str(program), "--style=file", *mode, *tracked(root, CXX)]


def ruff_check(root: pathlib.Path, _tool: str, fix: bool) -> list[str]:
    """Faults in Python files."""
    mode = ["--fix"] if fix else []
    return [packaged("ruff", "ruff"), "check", "--no-cache", *mode, *tracked(root, PYTHON)]


def ruff_format(root: pathlib.Path, _tool: str, fix: bool) -> list[str]:
    """Format of Python files."""
    mode = [] if fix else ["--check", "--diff"]
    return [packaged("ruff", "ruff"), "format", "--no-cache", *mode, *tracked(root, PYTHON)]


def import_linter(root: pathlib.Path, _tool: str, _fix: bool) -> list[str]:
    """Layers between the Python packages."""
    path = f"PYTHONPATH={root / 'python'}:{os.environ.get('PYTHONPATH', '')}"
    program = packaged("importlinter", "lint-imports")
    return ["env", path, program, "--no-cache", "--no-logo", str(root / "pyproject.toml")]


def mypy(root: pathlib.Path, _tool: str, _fix: bool) -> list[str]:
    """Types of Python files."""
    cache = os.devnull
    if folder := os.environ.get("MESHNET_CACHE"):
        # One for each work tree: two that check at once would spoil each other's.
        trees = pathlib.Path(folder) / "mypy"
        cache = str(trees / hashlib.sha256(os.fsencode(root)).hexdigest()[:16])
        for left in trees.glob("*"):
            if left.is_dir() and time.time() - left.stat().st_mtime > MYPY_CACHE_DAYS * 86400:
                shutil.rmtree(left, ignore_errors=True)
    options = [f"--config-file={root / 'pyproject.toml'}", f"--cache-dir={cache}"]
    return [sys.executable, "-m", "mypy", *options, *tracked(root, PYTHON)]


LINTERS: dict[str, Callable[[pathlib.Path, str, bool], list[str]]] = {
    "buildifier": buildifier,
    "clang_format": clang_format,
    "import_linter": import_linter,
    "mypy": mypy,
    "ruff_check": ruff_check,
    "ruff_format": ruff_format,
}


def main() -> int:
    """Runs the linters that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("linters", nargs="+", choices=sorted(LINTERS))
    parser.add_argument("--buildifier", default="", help="path of the buildifier program")
    parser.add_argument("--fix", action="store_true", help="repair instead of reporting")
    arguments = parser.parse_args()
    root = work_tree()
    program = str(pathlib.Path(arguments.buildifier).resolve())
    runfiles = pathlib.Path(__file__).absolute().parents[2]
    # Generated protobuf stubs lie in our runfiles, hand-written code in the work tree.
    environment = os.environ | {"MYPYPATH": f"{root / 'python'}:{root}:{runfiles}"}
    worst = 0
    for name in arguments.linters:
        command = LINTERS[name](root, program, arguments.fix)
        worst |= subprocess.run(command, cwd=root, env=environment, check=False).returncode
    return worst


if __name__ == "__main__":
    sys.exit(main())
