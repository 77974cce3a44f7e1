"""Help, refusals and exit codes of a program with flags, run as one."""

import pathlib
import subprocess
import sys
import textwrap

import pytest

PROGRAM = '''
"""Adds up.

    sums 1 2
"""

from absl import app, flags
from meshnet import command_line

_TIMES = flags.DEFINE_integer("the_times", 1, "How often.", lower_bound=1)


def main(argv):
    if len(argv) < 2:
        raise app.UsageError("expected numbers, got none")
    total = _TIMES.value * sum(map(int, argv[1:]))
    print(total)
    return 3 if total < 0 else 0


command_line.run(main)
'''


@pytest.mark.parametrize(
    ("arguments", "code", "out", "err"),
    [
        ("1 2", 0, "3\n", ""),
        ("--the-times=2 1 2", 0, "6\n", ""),
        ("1 --the_times 2", 0, "2\n", ""),
        ("1 -- -2", 3, "-1\n", ""),
        ("", 2, "", "sums.py: expected numbers, got none; see --help\n"),
        ("--the-times=0 1", 2, "", "sums.py: flag --the_times=0: 0 is not"),
        ("--no-such", 2, "", "sums.py: Unknown command line flag 'no_such'"),
        ("1 --help", 0, "sums 1 2\n", ""),
        ("-h", 0, "--the_times: How often.", ""),
    ],
)
def test_runs(tmp_path: pathlib.Path, arguments: str, code: int, out: str, err: str) -> None:
    path = tmp_path / "sums.py"
    path.write_text(textwrap.dedent(PROGRAM))
    done = subprocess.run(
        [sys.executable, str(path), *arguments.split()],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert done.returncode == code, done.stderr
    assert out in done.stdout
    assert (err in done.stderr) if err else done.stderr == ""
