"""The page about lanes equals its records, and only a trusted signature makes a lane certified."""

import gzip
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import pytest
from meshnet.certification import Lane, issue
from meshnet.errors import ControlError
from meshnet.signing import SigningKey

from tools.lanes.page import LANES, render, statuses

DOCS = pathlib.Path("docs")


def test_the_page_is_that_of_the_records() -> None:
    found = statuses(DOCS / "lanes")
    assert tuple(status.lane for status in found) == LANES
    assert render(found) == (DOCS / "lanes.md").read_text(), (
        "run tools/bazel run //tools/lanes -- page"
    )


def built(lane: str) -> dict[str, Any]:
    return {
        "schema": "meshnet.lane/1",
        "lane": lane,
        "status": "built",
        "recorded_at": "2026-01-01T00:00:00+00:00",
        "command": "build",
        "compiler": "gcc 12.2, glibc 2.36",
        "sdk": "glslc 1",
        "options": "glslc 1 -DX",
        "llama_cpp": {"release": "v1", "commit": "c", "patches_sha256": "p"},
        "worker_bytes": 20_000_000,
        "worker_sha256": "s",
        "needs": ["libc.so.6"],
        "wall_s": 90.0,
        "actions": 10,
        "compiled_actions": 9,
        "cached_actions": 1,
        "compile_s": {"GpuCompile": {"actions": 8, "sum_s": 150.0, "longest_s": 30.4}},
        "machine": "m",
        "notes": [],
    }


@pytest.fixture(name="folder")
def records(tmp_path: pathlib.Path) -> pathlib.Path:
    for lane in LANES:
        record = built(lane)
        if lane == "metal":
            record = {
                "schema": "meshnet.lane/1",
                "lane": lane,
                "status": "unavailable",
                "reason": "build on macos",
            }
        (tmp_path / f"{lane}.json").write_text(json.dumps(record))
    return tmp_path


def words(folder: pathlib.Path, now_ms: int = 10) -> dict[str, str]:
    return {status.lane: status.word for status in statuses(folder, now_ms)}


def sign(folder: pathlib.Path, key: SigningKey, status: str = "certified", **changes: Any) -> None:
    evidence = {
        "fingerprint": "f",
        "recipe": {"backend": "cuda", "accelerator": "NVIDIA H200"},
        "machine": {"cpu": "x"},
    }
    content = json.dumps(evidence).encode()
    (folder / "cuda.certify.json").write_bytes(content)
    issued = issue(
        key,
        Lane("m", changes.pop("fingerprint", "f")),
        evidence_sha256=hashlib.sha256(content).hexdigest(),
        status=status,
        **{"issued_ms": 1, **changes},
    )
    with (folder / "certified.records").open("ab") as file:
        file.write(issued.encode() + b"\n")


def trust(folder: pathlib.Path, key: SigningKey) -> None:
    (folder / "trusted").mkdir(exist_ok=True)
    (folder / "trusted/key.pem").write_text(key.public_pem())


def test_what_is_built_is_dark_and_what_is_not_says_why(folder: pathlib.Path) -> None:
    assert words(folder) == dict.fromkeys(LANES, "dark") | {"metal": "unavailable"}
    page = render(statuses(folder))
    assert "| metal | unavailable | | | | | build on macos |" in page
    row = "| cuda | dark | gcc 12.2, glibc 2.36 | glslc 1 | 20.0 MB | 1.5 min; of 10 actions 9 ran"
    assert row in page
    assert "- 8 actions GpuCompile took 2.5 min together, the longest 30 s" in page


def test_no_time_is_told_of_a_build_with_nothing_to_do(folder: pathlib.Path) -> None:
    record = built("cuda") | {"wall_s": 0.4, "compiled_actions": 0, "cached_actions": 0}
    (folder / "cuda.json").write_text(json.dumps(record))
    assert "| 20.0 MB | it was built already |" in render(statuses(folder))


def test_a_trusted_signature_over_the_evidence_certifies(folder: pathlib.Path) -> None:
    key = SigningKey.generate()
    trust(folder, key)
    sign(folder, key, expires_ms=100)
    assert words(folder)["cuda"] == "certified"
    assert words(folder)["vulkan"] == "dark"
    assert "m on NVIDIA H200" in render(statuses(folder, 10))
    assert words(folder, 100)["cuda"] == "dark"
    sign(folder, key, status="revoked", issued_ms=2)
    assert words(folder)["cuda"] == "dark"


def test_another_signature_is_refused(folder: pathlib.Path) -> None:
    trust(folder, SigningKey.generate())
    sign(folder, SigningKey.generate())
    with pytest.raises(ControlError, match="trusted keys"):
        statuses(folder)


def test_a_record_of_other_evidence_certifies_nothing(folder: pathlib.Path) -> None:
    key = SigningKey.generate()
    trust(folder, key)
    sign(folder, key, fingerprint="other")
    assert words(folder)["cuda"] == "dark"
    (folder / "cuda.certify.json").write_text("{}")
    assert words(folder)["cuda"] == "dark"


FAKE_BAZEL = """\
#!/usr/bin/env bash
case "$*" in
  *"--config=rocm"*)
    echo "    //cc/worker:worker   <-- target platform didn't satisfy constraint" \
      "@@rocm_sdk//:the_rocm_sdk_is_not_installed__run__tools_sdk_install_rocm" >&2
    exit 1 ;;
  *"build"*"--config=vulkan"*)
    for flag; do case "$flag" in --profile=*) cp "${0%/*}/profile.gz" "${flag#*=}" ;; esac; done
    echo "INFO: Elapsed time: 61.25s, Critical Path: 5.00s" >&2
    echo "INFO: 7 processes: 3 disk cache hit, 1 internal, 3 linux-sandbox." >&2 ;;
  *"cquery"*"--config=vulkan @vulkan_sdk//:runtime_libraries"*) echo "external/sdk/lib/x.so.1" ;;
  *"run"*"--config=vulkan --run_under=env LD_LIBRARY_PATH="*"/external/sdk/lib //cc/worker"*)
    echo '{"toolchain": {"compiler": "gcc 12.2", "glibc": "2.36", "accelerator": "glslc 1 -DX"},' \
      '"engine": {"llama_cpp": {"release": "v1", "commit": "c", "patches_sha256": "p"}},' \
      '"fingerprint": "f"}' ;;
  *"info"*) echo "${0%/*}/.." ;;
  *) echo "ERROR: something else" >&2; exit 1 ;;
esac
"""


def action(seconds: float) -> dict[str, Any]:
    return {
        "cat": "action processing",
        "dur": seconds * 1e6,
        "args": {"mnemonic": "GpuCompile"},
    }


def record(tmp_path: pathlib.Path, lane: str, *more: str) -> subprocess.CompletedProcess[str]:
    """The recorder in a tree of its own, where Bazel is a stand-in."""
    (tmp_path / "tools").mkdir(exist_ok=True)
    (tmp_path / "docs").mkdir(exist_ok=True)
    script = tmp_path / "tools/lane_record"
    script.write_bytes(pathlib.Path("tools/lane_record").read_bytes())
    (tmp_path / "tools/bazel").write_text(FAKE_BAZEL)
    (tmp_path / "tools/bazel").chmod(0o755)
    with gzip.open(tmp_path / "tools/profile.gz", "wt") as file:
        json.dump({"traceEvents": [action(2.5), action(60.0), action(0.1)]}, file)
    program = tmp_path / "cc/worker/worker"
    program.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(sys.executable, program)
    return subprocess.run(
        [sys.executable, script, lane, *more],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": os.environ["PATH"]},
    )


def test_a_missing_sdk_is_recorded_with_its_reason(tmp_path: pathlib.Path) -> None:
    done = record(tmp_path, "rocm")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "docs/lanes/rocm.json").read_text())
    assert (found["status"], found["reason"]) == (
        "unavailable",
        "the rocm sdk is not installed: run: tools sdk install rocm",
    )


def test_a_build_is_recorded_with_what_ran_and_what_a_cache_had(tmp_path: pathlib.Path) -> None:
    done = record(tmp_path, "vulkan", "--note=n")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "docs/lanes/vulkan.json").read_text())
    assert found["wall_s"] == 61.2
    assert (found["actions"], found["compiled_actions"], found["cached_actions"]) == (7, 3, 3)
    assert found["compile_s"] == {"GpuCompile": {"actions": 2, "sum_s": 62.5, "longest_s": 60.0}}
    assert found["worker_bytes"] == (tmp_path / "cc/worker/worker").stat().st_size
    assert found["sdk"] == "glslc 1"
    assert found["notes"] == ["n"]


def test_an_earlier_build_is_recorded_by_what_it_left(tmp_path: pathlib.Path) -> None:
    log = tmp_path / "build.log"
    log.write_text("INFO: Elapsed time: 100.0s\nINFO: 9 processes: 1 internal, 8 linux-sandbox.\n")
    with gzip.open(tmp_path / "earlier.gz", "wt") as file:
        json.dump({"traceEvents": [action(90.0)]}, file)
    done = record(tmp_path, "vulkan", f"--log={log}", f"--profile={tmp_path / 'earlier.gz'}")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "docs/lanes/vulkan.json").read_text())
    assert (found["wall_s"], found["compiled_actions"], found["cached_actions"]) == (100.0, 8, 0)
    assert found["compile_s"]["GpuCompile"]["sum_s"] == 90.0
    # Of a single process Bazel speaks otherwise.
    log.write_text("INFO: Elapsed time: 0.4s\nINFO: 1 process: 1 internal.\n")
    record(tmp_path, "vulkan", f"--log={log}", f"--profile={tmp_path / 'earlier.gz'}")
    found = json.loads((tmp_path / "docs/lanes/vulkan.json").read_text())
    assert (found["actions"], found["compiled_actions"], found["cached_actions"]) == (1, 0, 0)


def test_another_failure_is_no_record(tmp_path: pathlib.Path) -> None:
    done = record(tmp_path, "cuda")
    assert done.returncode == 1
    assert "nothing is recorded" in done.stderr
    assert not (tmp_path / "docs/lanes/cuda.json").exists()
