"""Installs a hashed lock for Bazel: one folder with a BUILD file per package.

pip installs everything in one run into a common folder; then each package's files, as its RECORD
lists them, move to NAME/site. A test that needs a package gets that one folder in its runfiles:
one link, not thousands.
"""

import argparse
import compileall
import csv
import importlib.metadata
import pathlib
import re
import shutil
import subprocess
import sys
from py_compile import PycInvalidationMode

from pip._vendor.packaging.requirements import Requirement

BUILD = """\
load("@rules_python//python:defs.bzl", "py_library")

package(default_visibility = ["//visibility:public"])

py_library(
    name = "{name}",
    data = ["site"],
    imports = ["site"],
    deps = {deps},
)

alias(
    name = "pkg",
    actual = ":{name}",
)
"""

ALL = """\
load("@rules_python//python:defs.bzl", "py_library")

py_library(
    name = "all",
    visibility = ["//visibility:public"],
    deps = {deps},
)
"""

REQUIREMENTS_BZL = '''\
"""The locked packages."""

all_requirements = {all}

def requirement(name):
    """The label of a package, as rules_python's function of this name gives it.

    Args:
      name: the package's name on PyPI.

    Returns:
      the label of its py_library.
    """
    return "@pypi//" + name.lower().replace("-", "_").replace(".", "_")
'''


def normalised(name: str) -> str:
    """The package's name as a Bazel package name, the way rules_python spells it."""
    return re.sub(r"[-_.]+", "_", name).lower()


def install(requirements: pathlib.Path, target: pathlib.Path) -> None:
    """Runs pip; only wheels that the lock's hashes name are taken."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--require-hashes", "--only-binary=:all:", "--no-compile"]
    command += [
        "--no-warn-conflicts",
        "--retries=5",
        f"--target={target}",
        f"--requirement={requirements}",
    ]
    subprocess.run(command, check=True)


def dependencies(distribution: importlib.metadata.Distribution, known: set[str]) -> list[str]:
    """Names of the locked packages that the distribution needs here, without extras."""
    found = set()
    for line in distribution.requires or []:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            found.add(normalised(requirement.name))
    return sorted(found & known)


def split(common: pathlib.Path, out: pathlib.Path) -> None:
    """Moves each distribution's files from the common folder to its own."""
    distributions = {
        normalised(distribution.name): distribution
        for distribution in importlib.metadata.distributions(path=[str(common)])
    }
    plans = {}
    for name, distribution in distributions.items():
        record = csv.reader((distribution.read_text("RECORD") or "").splitlines())
        files = [pathlib.PurePosixPath(row[0]) for row in record]
        plans[name] = (files, dependencies(distribution, set(distributions)))
    for name, (files, deps) in sorted(plans.items()):
        site = out / name / "site"
        for file in files:
            # Programs are recorded relative to a site-packages folder two levels below bin/.
            relative = pathlib.PurePosixPath(*[part for part in file.parts if part != ".."])
            source, destination = common / relative, site / relative
            if not source.is_file():
                continue
            destination.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(source, destination)
        labels = [f"//{dep}" for dep in deps]
        (out / name / "BUILD.bazel").write_text(BUILD.format(name=name, deps=labels))
        # Tests cannot write here: without compiled files each would compile all that it imports.
        # They are inputs of actions: where they were compiled must not stand in them.
        compileall.compile_dir(
            site,
            quiet=2,
            workers=2,
            stripdir=str(out.resolve()),
            invalidation_mode=PycInvalidationMode.UNCHECKED_HASH,
        )
    (out / "BUILD.bazel").write_text(ALL.format(deps=[f"//{name}" for name in sorted(plans)]))
    (out / "requirements.bzl").write_text(
        REQUIREMENTS_BZL.format(all=[f"@pypi//{name}" for name in sorted(plans)])
    )


def main() -> None:
    """Installs and splits as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requirements", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    common = arguments.out / "common"
    install(arguments.requirements, common)
    split(common, arguments.out)
    shutil.rmtree(common)


if __name__ == "__main__":
    main()
