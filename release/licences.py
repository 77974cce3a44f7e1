"""Collects the licences' texts of what the worker of a lane contains.

licences --deps third_party/deps.yaml --lane cpu --out FOLDER llama.cpp=PATH ...
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence

import yaml

from release.notice import components_of

_DOCUMENTATION = pathlib.Path("/opt/sysroot/usr/share/doc")


def main(arguments: Sequence[str]) -> int:
    """Writes one file for each component."""
    parser = argparse.ArgumentParser(prog="licences", description=__doc__)
    parser.add_argument("--deps", type=pathlib.Path, required=True)
    parser.add_argument("--lane", required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("more", nargs="*", metavar="NAME=PATH")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    texts = dict(entry.split("=", 1) for entry in options.more)
    dependencies = yaml.safe_load(options.deps.read_text("utf-8"))
    for entry in components_of(dependencies, "worker", options.lane):
        name = entry["name"]
        if entry["source"] == "debian":
            texts[name] = str(_DOCUMENTATION / entry["copyright"] / "copyright")
        if name not in texts:
            sys.stderr.write(f"licences: nobody gives the text of {name}'s licence\n")
            return 1
    for name, path in texts.items():
        target = options.out / (name.replace(" ", "-").replace("/", "-") + ".txt")
        target.write_bytes(pathlib.Path(path).read_bytes())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
