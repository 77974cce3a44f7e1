"""The way of a lane, as docs/lanes.md tells to go it, for the cpu lane in a small work tree.

Bazel is real, and its few targets are programs of ours that are built already. A fixture is
certified in place of the pinned model, under a contract with less to measure.
"""

import json
import os
import pathlib
import shlex
import sys

from meshnet_gguf.testing.lane_contract import write_lane_contract

from tests.docs.blocks import blocks_for_this_test
from tools.lanes.page import render, statuses
from tools.testing.work_tree import SmallWorkTree

[BLOCK] = blocks_for_this_test(pathlib.Path("docs/lanes.md").read_text())
RECORDS = {
    str(path): path.read_text() for path in pathlib.Path("docs/lanes").iterdir() if path.is_file()
}
LANES, LANE_TESTS, MESHNET, MODEL, WORKER = (
    pathlib.Path(os.environ[name]).absolute()
    for name in ("LANES", "LANE_TESTS", "MESHNET", "MODEL", "WORKER")
)
# Where programs find their files, those of the lane's test too.
RUNFILES = {name: os.environ[name] for name in ("TEST_SRCDIR", "TEST_WORKSPACE")}
RUNFILES["RUNFILES_DIR"] = RUNFILES["TEST_SRCDIR"]


def starts(program: pathlib.Path, **environment: str) -> str:
    """A script that starts a program."""
    named = (f"export {name}={shlex.quote(value)}\n" for name, value in environment.items())
    return f'#!/bin/bash\n{"".join(named)}exec "{program}" "$@"\n'


def files() -> dict[str, str]:
    packages = os.pathsep.join(sys.path)
    meshnet = {"MESHNET_WORKER": str(WORKER), "PYTHONPATH": packages}
    return {
        **RECORDS,
        "BUILD.bazel": 'sh_binary(name = "meshnet", srcs = ["meshnet.sh"])\n',
        "meshnet.sh": starts(MESHNET, **RUNFILES, **meshnet),
        "cc/worker/BUILD.bazel": (
            'genrule(name = "made", outs = ["worker"], executable = True, '
            f'cmd = "cp {WORKER} $@")\n'
        ),
        "platforms/BUILD.bazel": (
            'platform(name = "cpu", constraint_values = '
            '["@platforms//cpu:x86_64", "@platforms//os:linux"])\n'
        ),
        "tests/BUILD.bazel": (
            'sh_test(name = "mixed_route_test", srcs = ["test.sh"], tags = ["real_model"])\n'
            'test_suite(name = "lane", tests = [":mixed_route_test"])\n'
        ),
        "tests/test.sh": starts(LANE_TESTS, **RUNFILES),
        "tools/lanes/BUILD.bazel": 'sh_binary(name = "lanes", srcs = ["lanes.sh"])\n',
        "tools/lanes/lanes.sh": starts(LANES, **RUNFILES),
    }


async def test_a_lane_is_built_tested_recorded_and_stays_dark(tmp_path: pathlib.Path) -> None:
    tree = SmallWorkTree(tmp_path, files(), ["tools/lane_record"])
    contract = write_lane_contract(tmp_path, None).file
    reader = tree.reader({"certify smollm2": f"certify {MODEL} --contract={contract} --threads=1"})
    try:
        await reader.do(BLOCK)
    finally:
        await reader.end()
        tree.end()
    assert "no trusted person has approved lane.v1" in reader.said
    record = json.loads((tree.place / "docs/lanes/cpu.json").read_text())
    assert record["status"] == "built"
    assert record["command"] == "tools/bazel build --config=cpu //cc/worker"
    assert record["worker_bytes"] == WORKER.stat().st_size
    found = statuses(tree.place / "docs/lanes")
    assert found[0].record == record
    assert (tree.place / "docs/lanes.md").read_text() == render(found)
    assert record["recorded_at"] in render(found)
    for name, text in RECORDS.items():
        assert ((tree.place / name).read_text() == text) == (name != "docs/lanes/cpu.json"), name
    evidence = json.loads((tree.place / "cpu.certify.json").read_text())
    assert evidence["recipe"]["backend"] == "cpu"
    assert evidence["fingerprint"]
