"""A small work tree, for tests of tools that start Bazel: Bazel is real, the targets are small.

    files = {"a/BUILD.bazel": 'genrule(name = "a", outs = ["b"], cmd = "echo 1 >$@")'}
    tree = SmallWorkTree(tmp_path, files, ["tools/reproducible"])
    reader = tree.reader()
    for block in blocks_for_this_test(document):
        await reader.do(block)
    await reader.end()
    tree.end()

Of our own work tree it has the entry point, what is to be copied, and some of .bazelrc's configs.
It is the reader's machine; what Bazel writes lies beside it.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from tests.docs.reader import Programs, Reader

__all__ = ["SmallWorkTree"]

_KEY = pathlib.Path("/opt/sysroot/.meshnet-key")
_BAZEL = (
    "/usr/bin/bazel --nosystem_rc --nohome_rc --install_base=/usr/share/bazel --trust_install_base"
)
# What bazel_tools itself depends on; in the build root, or of no use to small targets.
_MODULES = (
    *("bazel_features", "bazel_skylib", "platforms", "rules_cc", "rules_java", "rules_license"),
    *("rules_proto", "rules_python"),
)
_UNUSED_MODULES = ("apple_support", "buildozer", "protobuf", "zlib")
# Which it has of .bazelrc; that of the cpu lane is of use where //platforms:cpu is among the files.
_CONFIGS = ("cache", "cache_write", "cpu", "real_model")
_SETTINGS = """
common --noenable_workspace --lockfile_mode=off
# It lives for seconds.
startup --host_jvm_args=-Xmx400m --host_jvm_args=-XX:+UseSerialGC
startup --host_jvm_args=-XX:TieredStopAtLevel=1
# Within the sandbox of the test.
build --spawn_strategy=local
build --incompatible_strict_action_env
build --build_tag_filters=-real_model
test --test_tag_filters=-real_model --test_output=errors
"""


class SmallWorkTree:
    """One, committed, for a reader of documents in `folder`."""

    def __init__(
        self, folder: pathlib.Path, files: Mapping[str, str], copied: Sequence[str] = ()
    ) -> None:
        self._folder = folder
        self.place = folder / "a"
        self.cache = folder / "cache"
        beside = folder / "beside"
        beside.mkdir()
        rc = pathlib.Path(".bazelrc").read_text("utf-8")
        everything = {
            "MODULE.bazel": 'bazel_dep(name = "platforms", version = "0.0.11")\n',
            ".bazelrc": "\n".join([*_overrides(rc, beside), *_configs(rc), _SETTINGS]),
            ".gitignore": "/bazel-*\n",
            **files,
        }
        for name, text in everything.items():
            path = self.place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
            path.chmod(0o755 if text.startswith("#!") else 0o644)
        for name in ("tools/bazel", *copied):
            path = self.place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(name, path)
        git = ["git", "-c", "user.name=Ada Lovelace", "-c", "user.email=ada@example.org"]
        for arguments in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "All"]):
            subprocess.run([*git, *arguments], cwd=self.place, check=True)
        bazel = beside / "bazel"
        bazel.write_text(f'#!/bin/sh\nexec {_BAZEL} --output_user_root={beside}/files "$@"\n')
        bazel.chmod(0o755)
        self._environment = {
            # As tools/bazel finds it in the build root.
            "BAZEL_REAL": str(bazel),
            "MESHNET_BUILD_ROOT_KEY": _KEY.read_text("utf-8").strip(),
            "MESHNET_CACHE": str(self.cache),
            "TMPDIR": str(beside),
        }

    def reader(self, words: Mapping[str, str] | None = None) -> Reader:
        """Who does here what a document says."""
        nothing = Programs(run={}, build={})
        return Reader(self._folder, nothing, words=words or {}, environment=self._environment)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """A command that no document tells to type."""
        environment = {**os.environ, **self._environment}
        return subprocess.run(
            command, cwd=self.place, env=environment, capture_output=True, text=True, check=False
        )

    def end(self) -> None:
        """Ends Bazel's server."""
        self.run("tools/bazel", "shutdown")


def _overrides(rc: str, beside: pathlib.Path) -> list[str]:
    places = {}
    for module in _MODULES:
        [places[module]] = re.findall(
            rf"^common:buildroot --override_module={module}=(/.*)$", rc, re.M
        )
    for module in _UNUSED_MODULES:
        places[module] = f"{beside}/{module}"
        (beside / module).mkdir()
        (beside / module / "MODULE.bazel").write_text(f'module(name = "{module}")\n')
    return [f"common --override_module={module}={place}" for module, place in places.items()]


def _configs(rc: str) -> list[str]:
    names = "|".join(_CONFIGS)
    return re.findall(rf"^(?:build|test):(?:{names}) .*$", rc, re.MULTILINE)
