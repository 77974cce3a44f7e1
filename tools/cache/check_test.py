"""tools/remote_cache, as docs/remote-cache.md tells to run it, in a small work tree.

Bazel and nginx are real.
"""

import os
import pathlib
import re

import pytest

from tests.docs.blocks import blocks_for_this_test
from tools.testing.work_tree import SmallWorkTree

SERVE, CHECK = blocks_for_this_test(pathlib.Path("docs/remote-cache.md").read_text())
NGINX = pathlib.Path(os.environ["NGINX_PROGRAM"]).absolute()
FILES = {
    "cc/worker/BUILD.bazel": 'genrule(name = "worker", outs = ["w"], cmd = "echo 1 >$@")\n',
    "proto/BUILD.bazel": 'genrule(name = "proto", outs = ["p"], cmd = "echo 2 >$@")\n',
}
TOOLS = ["tools/remote_cache", "tools/cache/remote_cache.py"]
ALL = "2 remote hits of 2 actions: 100.00%, enough"
WORKER = "1 remote hits of 1 actions: 100.00%, enough"


async def test_what_the_document_says_serves_fills_and_checks_a_cache(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHNET_NGINX", str(NGINX))
    tree = SmallWorkTree(tmp_path, FILES, TOOLS)
    reader = tree.reader({"/srv/bazel-cache": str(tmp_path / "served")})
    try:
        await reader.do(SERVE)
        flags = dict(re.findall(r"^(reader|writer): (--.*)$", reader.said, re.MULTILINE))
        # Somebody's work until now: the served cache and this machine's own are filled, and used.
        build = ("tools/bazel", "build", "//...")
        filled = tree.run(*build, *flags["writer"].split(), f"--disk_cache={tree.cache}/disk")
        assert filled.returncode == 0, filled.stderr
        tree.run("tools/bazel", "clean")
        used = tree.run(*build, *flags["reader"].split(), "--build_event_json_file=events.json")
        assert used.returncode == 0, used.stderr
        tree.end()
        await reader.do(CHECK)
        assert re.findall(r"\d+ remote hits .*", reader.said) == [ALL, WORKER, ALL]
        assert reader.said.count("first clone: builds, and writes the cache") == 1
    finally:
        await reader.end()
        tree.end()
