"""Stands in for a virtual environment's pip, and for the registry that it would fetch from.

    stand_in_pip.py VENV install --require-hashes -r requirements.txt
    stand_in_pip.py VENV install --no-deps some.whl
    stand_in_pip.py VENV check

The packages of a list are those that the test itself was given, in the folders of SITE_PACKAGES:
each must be there in the very version of the list. With SITE_PACKAGES_COPIED=1 they are copied, for
who may not see those folders. A wheel is installed, and all is checked, by pip itself.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys

_COPIED = os.environ.get("SITE_PACKAGES_COPIED") == "1"
_SILENT = ("--quiet", "--disable-pip-version-check")
_COMPILE = "from meshnet_gguf.cli.commands import COMMANDS, describe; [*map(describe, COMMANDS)]"
_LINE = re.compile(r"^([\w.-]+)==(\S+)(?: ; (.*?))? \\$", re.MULTILINE)


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _provided(sites: list[pathlib.Path], name: str, version: str) -> pathlib.Path | None:
    """The folder of sites that holds this package."""
    for site in sites:
        for found in site.glob("*.dist-info"):
            there, _, its_version = found.stem.rpartition("-")
            if (_plain(there), its_version) == (_plain(name), version):
                return site
    return None


def _packages(venv: pathlib.Path, file: pathlib.Path) -> None:
    sites = [pathlib.Path(site) for site in os.environ["SITE_PACKAGES"].split(os.pathsep)]
    [target] = venv.glob("lib/python3*/site-packages")
    wanted = {}
    for name, version, marker in _LINE.findall(file.read_text()):
        found = _provided(sites, name, version)
        if found is not None:
            wanted[name] = found
        else:
            # A lock for every Python has other versions for other ones.
            assert "python_full_version" in marker, f"{name}=={version}: not what the test has"
    assert len(wanted) > 20, wanted
    if _COPIED:
        for site in dict.fromkeys(wanted.values()):
            there = [path.name for path in site.glob("*.dist-info")]
            if not all((target / each).exists() for each in there):
                shutil.copytree(site, target, dirs_exist_ok=True)
    else:
        lines = "".join(f"{site}\n" for site in dict.fromkeys(wanted.values()))
        (target / "provided.pth").write_text(lines)


def main(arguments: list[str]) -> int:
    """Installs; the exit code of pip."""
    venv = pathlib.Path(arguments[0]).absolute()
    pip = ["/usr/bin/python3", "-m", "pip", f"--python={venv}/bin/python3", "--quiet"]
    match [word for word in arguments[1:] if word not in _SILENT]:
        case ["install", "--require-hashes", "-r", file]:
            _packages(venv, pathlib.Path(file))
            return 0
        case ["check"]:
            return subprocess.run([*pip, "check"], check=False).returncode
        case ["install", "--no-deps", wheel]:
            subprocess.run([*pip, "install", "--no-index", "--no-deps", wheel], check=True)
            if _COPIED:
                # As pip compiles what it installs; here what the commands import.
                subprocess.run([f"{venv}/bin/python3", "-c", _COMPILE], check=True)
            return 0
    sys.stderr.write(f"no stand-in for: pip {' '.join(arguments[1:])}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
