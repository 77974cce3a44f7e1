"""Lanes of this project: the page about them.

tools/bazel run //tools/lanes -- page      # writes docs/lanes.md from docs/lanes
tools/bazel run //tools/lanes -- list      # lane and status, one a line
"""

import os
import pathlib
import sys

from tools.lanes.page import render, statuses

__all__ = ["main"]


def main(arguments: list[str]) -> int:
    """The command line."""
    root = pathlib.Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY", "."))
    if arguments == ["page"]:
        (root / "docs/lanes.md").write_text(render(statuses(root / "docs/lanes")), "utf-8")
    elif arguments == ["list"]:
        for status in statuses(root / "docs/lanes"):
            sys.stdout.write(f"{status.lane}\t{status.word}\t{status.record.get('reason', '')}\n")
    else:
        sys.stderr.write(__doc__ or "")
        return 0 if arguments in (["--help"], ["-h"]) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
