"""Runs what documents say of llama.cpp's source: fetched, patched, changed, proved, moved.

The source is the one that the build has fetched, without its patches; the editor of whoever changes
the stack changes nothing. So the patches come out of it as they went in.

A trial of a new pin is real but for Bazel: the candidate is a commit of that source with another
README, so what is built of it is what is built already, and one of its tests runs.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from typing import Any

from tests.docs.blocks import blocks_of
from tests.docs.reader import Programs, Reader
from third_party.llama_cpp.llama_source import manifest, patch_stack

DOCUMENTS = [pathlib.Path(path) for path in os.environ["DOCUMENTS"].split()]
PIN = pathlib.Path("third_party/llama_cpp")
STACK = pathlib.Path("patches/llama_cpp")
PATCHES = {path.name: path.read_bytes() for path in STACK.iterdir()}
PATCHED = pathlib.Path(os.environ["LLAMA_CPP_LICENSE"]).resolve().parent
UPDATE, WORKER, FIXTURE, MODEL, ENGINE_TEST = (
    pathlib.Path(os.environ[name]).absolute()
    for name in ("UPDATE", "WORKER", "UPDATE_FIXTURE", "MODEL", "ENGINE_TEST")
)
IDENTITY = {
    **{f"GIT_{who}_NAME": "Ada Lovelace" for who in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{who}_EMAIL": "ada@example.org" for who in ("AUTHOR", "COMMITTER")},
}
TEST = "//third_party/llama_cpp:cpu_backend_test"
EVENT = {"id": {"testSummary": {"label": TEST}}, "testSummary": {"overallStatus": "PASSED"}}
BAZEL = f"""#!/bin/bash
[[ $1 == --output_base=* ]] && shift
case "$1" in
run) exec stand_in_bazel "$@" ;;
build)
    [ "${{!#}}" = //cc/worker ] || exit 1
    mkdir -p bazel-bin/cc/worker
    ln -sf "{WORKER}" bazel-bin/cc/worker/worker
    ;;
test)
    for word; do [[ $word == --build_event_json_file=* ]] && events=${{word#*=}}; done
    [ "${{!#}}" = {TEST} ] || exit 1
    "{ENGINE_TEST}" || exit 1
    echo '{json.dumps(EVENT)}' >"$events"
    ;;
shutdown) ;;
*) exit 1 ;;
esac
"""


def git(folder: pathlib.Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments],
        cwd=folder,
        env={**os.environ, **IDENTITY},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def commit_all(folder: pathlib.Path) -> str:
    """A repository of a folder as it is; the value is its only commit."""
    git(folder, "init", "--quiet", "--initial-branch=main")
    git(folder, "add", "--all", "--force")
    git(folder, "commit", "--quiet", "--message", "as it is")
    return git(folder, "rev-parse", "HEAD")


def newer_upstream(source: pathlib.Path, folder: pathlib.Path) -> str:
    """A repository with a commit whose files are the pinned ones, but for one."""
    shutil.copytree(source, folder)
    readme = folder / "README.md"
    readme.write_text(readme.read_text() + "\nMore is known by now.\n")
    return commit_all(folder)


def this_repository(here: pathlib.Path, upstream: pathlib.Path) -> None:
    """What these tools need of it, as a repository; upstream is another folder."""
    for folder in (PIN / "llama_source", STACK):
        shutil.copytree(folder, here / folder, ignore=shutil.ignore_patterns("tests"))
    shutil.copy(PIN / "pinned_tree.txt", here / PIN)
    pin = json.loads((PIN / "manifest.json").read_text())
    (here / PIN / "manifest.json").write_text(json.dumps(pin | {"upstream": str(upstream)}))
    shutil.copy("tools/llama_cpp", here / "tools")
    (here / "tools/bazel").unlink()
    (here / "tools/bazel").write_text(BAZEL)
    (here / "tools/bazel").chmod(0o755)
    (here / ".gitignore").write_text("/bazel-*\n/build/\n__pycache__/\n")
    commit_all(here)
    (here / "models").mkdir()
    (here / "models/a.gguf").symlink_to(MODEL)


def check_report(report: dict[str, Any], commit: str) -> None:
    """Holds the report of a trial against what there was to find."""
    assert report["holds"] is True
    assert report["candidate"]["commit"] == commit
    assert {trial["outcome"] for trial in report["stack"]} == {"applies"}
    assert report["areas"] == [
        {"area": "rest", "changed": 1, "added": 0, "removed": 0, "voids": ""}
    ]
    assert report["tests"] == {TEST: True}
    assert set(report["models"]) == {FIXTURE.name, "a.gguf"}
    for model in report["models"].values():
        assert (model["parity"], model["differences"], model["recipe"]) == (True, {}, {})


async def test_all_that_the_documents_say(tmp_path: pathlib.Path) -> None:
    source, upstream = tmp_path / "source", tmp_path / "upstream"
    shutil.copytree(PATCHED, source)
    patch_stack.reverse_in_folder(manifest.load(PIN), patch_stack.load(STACK), source)
    commit = newer_upstream(source, upstream)
    candidate = tmp_path / "candidate"
    reader = Reader(
        tmp_path,
        Programs(
            run={"//third_party/llama_cpp:update": ["update"]},
            build={},
            path={
                # Once with each model, and only the test that is at hand.
                "update": f"""
                    export BUILD_WORKSPACE_DIRECTORY="$HOME" UPDATE_FIXTURE="{FIXTURE}"
                    export PYTHONPATH="{os.pathsep.join(sys.path)}"
                    exec "{UPDATE}" "$@" --runs 1 --test {TEST}
                """,
            },
        ),
        words={"COMMIT": commit, "/var/tmp/candidate": str(candidate)},
        environment={
            "MESHNET_LLAMA_CPP_SOURCE": str(source),
            "MESHNET_CACHE": str(tmp_path / "cache"),
            "GIT_SEQUENCE_EDITOR": "true",
            **IDENTITY,
        },
    )
    here = reader.machine("a")
    this_repository(here, upstream)
    ran = 0
    for document in DOCUMENTS:
        for block in blocks_of(document.read_text()):
            if block.treatment == "run":
                started = time.monotonic()
                await reader.do(block)
                print(f"{document.name}:{block.line}: {time.monotonic() - started:.1f} s")
                if "--model" in block.text:
                    check_report(json.loads((candidate / "report.json").read_text()), commit)
                ran += 1
    assert ran >= len(DOCUMENTS)
    for name, content in PATCHES.items():
        assert (here / STACK / name).read_bytes() == content, name

    # Adopted, and taken back.
    adopted, back = git(here, "log", "--format=%s", "-2").splitlines()[::-1]
    assert (adopted, back) == (
        "Move the pin of llama.cpp",
        'Revert "Move the pin of llama.cpp"',
    )
    pin = json.loads(git(here, "show", f"HEAD~1:{PIN}/manifest.json"))
    assert (pin["commit"], pin["tree"]) == (commit, git(upstream, "rev-parse", "HEAD^{tree}"))
    assert git(here, "diff", "HEAD~2", "--stat") == ""
