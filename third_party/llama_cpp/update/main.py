"""Tries a commit of llama.cpp as the next pin, away from the one that is in use.

    tools/bazel run //third_party/llama_cpp:update -- COMMIT --from SOURCE --out DIR
    tools/bazel run //third_party/llama_cpp:update -- COMMIT --out DIR       # fetched from upstream
    tools/bazel run //third_party/llama_cpp:update -- COMMIT --out DIR --stack_only
    tools/bazel run //third_party/llama_cpp:update -- COMMIT --out DIR --patches FOLDER --edits FILE

Step by step: gets the source and verifies it (commit, tree, every file); applies the patch stack,
patch by patch; builds a clone of what is committed here with the candidate as its pin; runs its
tests; runs models under both pins and compares; says what adopting it would make void. DIR holds
the work tree with the patches (stack), the clone (tree), report.json and report.md, and, when all
holds, adopt.patch. Called again with the same DIR it goes on: after a conflict that you resolved in
DIR/stack, or an edit of the BUILD files in DIR/tree. --patches and --edits give both beforehand.

The stack takes a minute. Everything is compiled once: two idle cores build the worker in about five
minutes, and are done with its tests somewhat later (--test names fewer). On two cores that had much
else to do each took half an hour.

The production pin is read and compared at the end, and never written.

exit codes: 0 the candidate holds (with --stack_only: the stack does), 1 it does not (the report
says why), 2 wrong usage, 3 it could not be tried: source, patches or folders were refused
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshnet_gguf.certify import BINDINGS
from meshnet_gguf.errors import MeshnetError, reason_name
from meshnet_gguf.measurement import Plan, measure

from third_party.llama_cpp.llama_source import manifest, regenerate
from third_party.llama_cpp.llama_source.errors import LlamaSourceError, Reason
from third_party.llama_cpp.update import candidate, compare, isolation
from third_party.llama_cpp.update.candidate import Outcome

WORKER = "//cc/worker"
# Upstream's own test and the stack, the contract of the engine, ranges against the whole model,
# workers with a real engine, the proposals. What is the same whatever llama.cpp does is left out.
TESTS = (
    "//third_party/llama_cpp:all",
    "//cc/shard_engine/...",
    "//tests/parity/...",
    "//tests/integration:cpu_variant_test",
    "//tests/integration:demo_test",
    "//tests/integration:long_context_test",
    "//tests/integration:partial_artifact_test",
    "//docs/upstream/...",
)
_WORKER_VARIABLE = "MESHNET_WORKER"


def _say(text: str) -> None:
    sys.stderr.write(f"update: {text}\n")
    sys.stderr.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="update", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit", help="of upstream (9 to 40 digits; all 40 to fetch it)")
    parser.add_argument(
        "--from",
        dest="given",
        type=Path,
        metavar="SOURCE",
        help="repository, git bundle, or an archive or folder that holds either",
    )
    parser.add_argument("--out", type=Path, required=True, help="where everything is done")
    parser.add_argument(
        "--release", help="the candidate's name (default: its commit's first digits)"
    )
    parser.add_argument("--stack_only", action="store_true", help="stop after the patch stack")
    parser.add_argument(
        "--patches",
        type=Path,
        metavar="FOLDER",
        help="ported patches, by name, for those of the stack that conflict",
    )
    parser.add_argument(
        "--edits",
        type=Path,
        metavar="FILE",
        help="a patch of this repository that the candidate needs: BUILD files, expectations",
    )
    parser.add_argument(
        "--model",
        type=Path,
        action="append",
        default=[],
        help="a GGUF file to compare with, besides the fixture; may be repeated",
    )
    parser.add_argument("--runs", type=int, default=3, help="of each model and pin (%(default)s)")
    parser.add_argument(
        "--test",
        action="append",
        help=f"test these instead of {' '.join(TESTS)}; may be repeated",
    )
    parser.add_argument("--bazel_flag", action="append", default=[], help="for the tests")
    parser.add_argument("--json", action="store_true", help="the report on stdout as JSON")
    return parser


async def _models(
    models: Sequence[Path], plan: Plan, workers: dict[str, Path], runs: int
) -> dict[str, Any]:
    """Each model under both pins, in turns, so that a slow minute hits both."""
    found = {}
    for model in models:
        results: dict[str, list[dict[str, Any]]] = {name: [] for name in workers}
        for number in range(runs):
            for name, worker in workers.items():
                _say(f"{model.name}: {name} pin, run {number + 1} of {runs}")
                os.environ[_WORKER_VARIABLE] = str(worker)
                results[name].append(await measure(model, plan))
        found[model.name] = compare.compare_model(results["current"], results["candidate"])
    return found


def _holds(report: dict[str, Any], *, stack_only: bool) -> bool:
    stack = all(trial["outcome"] not in ("conflict", "not tried") for trial in report["stack"])
    if stack_only:
        return stack
    return (
        stack
        and report.get("built") is True
        and bool(report.get("tests"))
        and all(report["tests"].values())
        and bool(report.get("models"))
        and all(model["parity"] and not model["differences"] for model in report["models"].values())
        and "rollback" in report
    )


def ended_certification(models: dict[str, Any]) -> list[str]:
    """What ends a certification of each model's lane, by the kinds that `meshnet certify` knows."""
    kinds = {field: kind for kind, fields in BINDINGS.items() for field in fields}
    lines = []
    for name, model in models.items():
        ended: dict[str, list[str]] = {}
        for field in model["recipe"]:
            ended.setdefault(kinds.get(field, "recipe"), []).append(field)
        lines += [f"{name}, {kind}: {', '.join(fields)}" for kind, fields in sorted(ended.items())]
    return lines


def _named_in(repo: Path, pin: manifest.Manifest) -> list[str]:
    """Files that name the pin, besides those that are it."""
    names = []
    for name in regenerate.git(repo, "ls-files").decode().splitlines():
        if name.startswith((isolation.PIN + "/pinned_tree", isolation.PIN + "/manifest.json")):
            continue
        text = (repo / name).read_bytes() if (repo / name).is_file() else b""
        if any(value.encode() in text for value in (pin.commit, pin.tree)):
            names.append(name)
    return names


def _code(text: str) -> str:
    return "`" + text.replace("|", "\\|") + "`" if text else ""


def _markdown(report: dict[str, Any]) -> str:
    verdict = "holds" if report["holds"] else "does not hold"
    if report["stack_only"]:
        verdict = f"the stack {verdict}, nothing else was tried"
    lines = [f"# Candidate {report['candidate']['commit']}: {verdict}", "",
             f"{report['candidate']['title']}", "",
             f"git tree `{report['candidate']['tree']}`; current pin "
             f"`{report['current']['commit']}`, untouched.", "",
             "| patch | outcome | conflicts in | first hunk without a place |",
             "| --- | --- | --- | --- |"]  # fmt: skip
    lines += [
        f"| {trial['name']} | {trial['outcome']} | {', '.join(trial['files'])} |"
        f" {_code(trial['hunk'])} |"
        for trial in report["stack"]
    ]
    if "built" in report:
        lines += ["", f"Builds: {'yes' if report['built'] else 'no'}."]
    if "tests" in report:
        failed = [name for name, passed in report["tests"].items() if not passed]
        lines += ["", f"Tests: {len(report['tests']) - len(failed)} pass, {len(failed)} do not."]
        lines += [f"- {name}" for name in failed]
    for name, model in report.get("models", {}).items():
        lines += ["", f"## {name}", "", f"Parity of stages and whole model: {model['parity']}.", ""]
        lines += ["| | current | candidate |", "| --- | --- | --- |"]
        for field, both in {**model["differences"], **model["recipe"]}.items():
            lines.append(f"| {field} | {both['current']} | {both['candidate']} |")
        for field, both in model["speed"].items():
            lines.append(f"| {field} | {both['current']:.1f} | {both['candidate']:.1f} "
                         f"({both['ratio']:.2f}) |")  # fmt: skip
    lines += ["", "## Files of upstream that differ", "", "| area | changed | added | removed |",
              "| --- | --- | --- | --- |"]  # fmt: skip
    lines += [
        f"| {area['area']} | {area['changed']} | {area['added']} | {area['removed']} |"
        for area in report["areas"]
    ]
    lines += ["", "The BUILD overlay lists the CPU backend's sources by name. Gone: "
              f"{', '.join(report['backend_sources']['gone']) or 'none'}; new: "
              f"{', '.join(report['backend_sources']['new']) or 'none'}."]  # fmt: skip
    lines += ["", "## What adopting it makes void", ""]
    lines += [f"- {line}" for line in report["invalidated"]]
    if "ends_certification" in report:
        lines += ["", "Recipe fields that end a certification, by kind:", ""]
        lines += [f"- {line}" for line in report["ends_certification"]]
    return "\n".join(lines) + "\n"


def _try(options: argparse.Namespace, repo: Path, here: Path) -> dict[str, Any]:
    out = here / options.out
    out.mkdir(parents=True, exist_ok=True)
    current = manifest.load(repo / isolation.PIN)
    found = candidate.obtain(
        options.commit, here / options.given if options.given else None, current.upstream, out, _say
    )
    release = options.release or found.commit[:12]
    areas = compare.area_changes(current.listing, found.listing)
    backend = [compare.sources_of_backend(listing) for listing in (current.listing, found.listing)]
    report: dict[str, Any] = {
        "candidate": {"commit": found.commit, "tree": found.tree, "title": found.title},
        "current": {"commit": current.commit, "tree": current.tree},
        "stack_only": options.stack_only,
        "licence_changed": found.licence_sha256 != current.licence_sha256,
        "areas": [dataclasses.asdict(area) for area in areas],
        "backend_sources": {
            "gone": sorted(backend[0] - backend[1]),
            "new": sorted(backend[1] - backend[0]),
        },
        "invalidated": compare.invalidated(areas, _named_in(repo, current)),
    }
    _say("the patch stack")
    trials = candidate.try_stack(
        current,
        repo / isolation.STACK,
        found,
        out / "stack",
        _say,
        here / options.patches if options.patches else None,
    )
    report["stack"] = [
        dataclasses.asdict(trial) | {"outcome": trial.outcome.value} for trial in trials
    ]
    if any(trial.outcome is Outcome.CONFLICT for trial in trials):
        _say(f"resolve it in {out / 'stack'}: edit, git add --update, git cherry-pick --continue "
             "--no-edit; then call this again")  # fmt: skip
    elif not options.stack_only:
        _build_and_compare(options, repo, here, out, report, current, found, release)
    report["holds"] = _holds(report, stack_only=options.stack_only)
    return report


def _build_and_compare(
    options: argparse.Namespace,
    repo: Path,
    here: Path,
    out: Path,
    report: dict[str, Any],
    current: manifest.Manifest,
    found: candidate.Candidate,
    release: str,
) -> None:
    tree = out / "tree"
    isolation.clone(repo, tree, here / options.edits if options.edits else None)
    pin = candidate.pin_of(current, found, release)
    isolation.set_pin(tree, pin, out / "stack", release)
    bazel = isolation.Bazel(tree, found.source, out / "base")
    try:
        _say("building it")
        report["built"] = bazel.build([WORKER])
        if not report["built"]:
            _say(f"it does not build (see above); mend the BUILD files in {tree}, call this again")
            return
        tests = options.test or TESTS
        _say(f"its tests: {' '.join(tests)}")
        report["tests"] = bazel.test(tests, out / "events.json", options.bazel_flag)
        _say("the current pin's worker, from this work tree")
        if not isolation.Bazel(repo).build([WORKER]):
            raise LlamaSourceError(
                Reason.WORK_TREE_INVALID, "the current pin does not build here (see above)"
            )
        workers = {
            "current": (repo / "bazel-bin/cc/worker/worker").resolve(),
            "candidate": (tree / "bazel-bin/cc/worker/worker").resolve(),
        }
        fixture = Path(os.environ["UPDATE_FIXTURE"]).absolute()
        plan = Plan.load(Path(__file__).with_name("update_plan.json"))
        models = [fixture, *(here / model for model in options.model)]
        report["models"] = asyncio.run(_models(models, plan, workers, options.runs))
        report["ends_certification"] = ended_certification(report["models"])
        isolation.adoption(tree, out / "adopt.patch")
        isolation.check_rollback(repo, out / "adopt.patch", out / "rollback")
        report["rollback"] = "adopted in a clone and reverted: the pin is what it was"
    finally:
        bazel.shutdown()


def main(arguments: Sequence[str]) -> int:
    """Tries one candidate; the value is the exit code."""
    options = _parser().parse_args(arguments)
    workspace = os.environ.get("BUILD_WORKSPACE_DIRECTORY")
    if workspace is None:
        _say("start it with: tools/bazel run //third_party/llama_cpp:update -- COMMIT --out DIR")
        return 2
    repo, here = Path(workspace), Path(os.environ["BUILD_WORKING_DIRECTORY"])
    before = isolation.fingerprint(repo)
    try:
        report = _try(options, repo, here)
    except (LlamaSourceError, MeshnetError) as error:
        _say(str(error))
        if options.json:
            reason = (
                error.reason.name
                if isinstance(error, LlamaSourceError)
                else reason_name(error.reason)
            )
            refusal = {"reason": reason, "message": str(error)}
            sys.stdout.write(json.dumps({"holds": False, "error": refusal}) + "\n")
        return 3
    finally:
        if isolation.fingerprint(repo) != before:
            raise SystemExit(
                "update: the production pin has changed meanwhile: not by this program"
            )
    out = here / options.out
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n", "utf-8")
    (out / "report.md").write_text(_markdown(report), "utf-8")
    sys.stdout.write(json.dumps(report) + "\n" if options.json else _markdown(report))
    if report["holds"] and not options.stack_only:
        _say(
            f"to adopt it: git apply --index {out / 'adopt.patch'}, say in manifest.json where it"
            " is fetched from, commit; to go back: git revert"
        )
    return 0 if report["holds"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
