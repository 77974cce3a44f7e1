"""A candidate for the next pin: verified, patched, written into a clone, and taken back."""

import dataclasses
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from third_party.llama_cpp.llama_source import manifest, patch_stack, regenerate
from third_party.llama_cpp.llama_source.errors import LlamaSourceError, Reason
from third_party.llama_cpp.llama_source.tests.conftest import (
    FILES,
    HEADER,
    Upstream,
    git,
    write_files,
)
from third_party.llama_cpp.update import candidate, compare, isolation, main
from third_party.llama_cpp.update.candidate import Candidate, Outcome, Trial

ENGINE = FILES["src/engine.c"]
# The line that the first patch changes, as a newer upstream has it.
THEIRS = ENGINE.replace(b"line 10\n", b"line ten of theirs\n")
HUNK = "src/engine.c, hunk 1 (@@ -7,7 +7,7 @@ line 6)"


def quiet(_: str) -> None:
    """Says nothing."""


@pytest.fixture
def stack(upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> Upstream:
    """Two patches: one of line 10 of the engine, one of the small model."""
    git(upstream.work_tree, "tag", "pinned")
    upstream.commit_change(
        "ten: count better", {"src/engine.c": ENGINE.replace(b"line 10\n", b"ten\n")}
    )
    small = FILES["src/models/small.c"].replace(b"small;", b"small = 1;")
    upstream.commit_change("small: say one", {"src/models/small.c": small})
    pin = manifest.load(upstream.pin)
    regenerate.regenerate(pin, upstream.work_tree, upstream.patches)
    monkeypatch.setenv("MESHNET_LLAMA_CPP_SOURCE", str(upstream.source))
    monkeypatch.setenv("MESHNET_CACHE", str(upstream.root / "cache"))
    return upstream


def newer(upstream: Upstream, changes: dict[str, bytes]) -> tuple[Path, str]:
    """A repository of upstream's, one commit behind the pin."""
    repository = write_files(upstream.root / "newer", {**FILES, **changes})
    git(repository, "init", "--quiet", "--initial-branch=main")
    git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "--message", "newer upstream")
    return repository, git(repository, "rev-parse", "HEAD")


def obtained(upstream: Upstream, changes: dict[str, bytes]) -> Candidate:
    repository, commit = newer(upstream, changes)
    out = upstream.root / "out"
    out.mkdir()
    return candidate.obtain(commit, repository, "", out, quiet)


def tried(upstream: Upstream, found: Candidate, ported: Path | None = None) -> list[Trial]:
    pin = manifest.load(upstream.pin)
    repository = upstream.root / "out/stack"
    return candidate.try_stack(pin, upstream.patches, found, repository, quiet, ported)


def ported(upstream: Upstream, subject: str, before: bytes) -> Path:
    """A folder with the first patch for an engine that was `before`, and with `subject`."""
    repository = write_files(upstream.root / "porting", {**FILES, "src/engine.c": before})
    git(repository, "init", "--quiet", "--initial-branch=main")
    git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "--message", "before")
    write_files(repository, {"src/engine.c": before.replace(b"line ten of theirs", b"ten")})
    git(repository, "commit", "--quiet", "--all", "--message", subject + HEADER)
    text = (
        git(
            repository,
            "format-patch",
            "--full-index",
            "--no-signature",
            "--no-stat",
            "--stdout",
            "-1",
        )
        + "\n"
    )
    return write_files(upstream.root / "ported", {"0001-ten.patch": text.encode()})


def repository_of(upstream: Upstream) -> Path:
    """A repository that has the pin and the patches where this one has them."""
    repo = upstream.root / "repo"
    for source, name in [
        (upstream.pin, isolation.PIN),
        (upstream.patches, isolation.STACK),
    ]:
        write_files(repo / name, {file.name: file.read_bytes() for file in source.iterdir()})
    git(repo, "init", "--quiet", "--initial-branch=main")
    git(repo, "add", "--all")
    git(repo, "commit", "--quiet", "--message", "with a pin")
    return repo


def test_a_commit_comes_out_of_a_source_package(upstream: Upstream) -> None:
    repository, commit = newer(upstream, {"src/new.c": b"int fresh;\n"})
    package = upstream.root / "package-1.0.tar.gz"
    with tarfile.open(package, "w:gz") as tar:
        tar.add(repository / ".git/objects", "package-1.0/.git/modules/vendor/x/objects")
        tar.addfile(tarfile.TarInfo("package-1.0/.git/modules/vendor/x/HEAD"), io.BytesIO())
    (upstream.root / "out").mkdir()
    found = candidate.obtain(commit[:12], package, "", upstream.root / "out", quiet)
    assert (found.commit, found.title) == (commit, "newer upstream")
    assert (found.source / "src/new.c").read_bytes() == b"int fresh;\n"
    assert found.tree == git(repository, "rev-parse", "HEAD^{tree}")


def test_a_commit_comes_out_of_a_bundle(upstream: Upstream) -> None:
    repository, commit = newer(upstream, {})
    git(repository, "bundle", "create", "--quiet", "../x.bundle", "HEAD")
    (upstream.root / "out").mkdir()
    found = candidate.obtain(commit, upstream.root / "x.bundle", "", upstream.root / "out", quiet)
    assert found.tree == upstream.tree


@pytest.mark.parametrize("commit", ["main", "v1.0", "0" * 41, "12345678"])
def test_what_can_move_is_refused(upstream: Upstream, commit: str) -> None:
    with pytest.raises(LlamaSourceError) as refused:
        candidate.obtain(commit, upstream.work_tree, "", upstream.root, quiet)
    assert refused.value.reason is Reason.SOURCE_UNAVAILABLE


def test_files_without_their_commit_are_refused(upstream: Upstream) -> None:
    with pytest.raises(LlamaSourceError, match="holds the commit"):
        candidate.obtain("1" * 40, upstream.source, "", upstream.root, quiet)


def test_changed_source_is_refused(upstream: Upstream) -> None:
    repository, commit = newer(upstream, {})
    (upstream.root / "out").mkdir()
    found = candidate.obtain(commit, repository, "", upstream.root / "out", quiet)
    (found.source / "src/engine.c").write_text("other")
    with pytest.raises(LlamaSourceError) as refused:
        candidate.obtain(commit, repository, "", upstream.root / "out", quiet)
    assert refused.value.reason is Reason.TREE_MISMATCH


def test_patches_that_apply_and_that_git_merges(stack: Upstream) -> None:
    beside = ENGINE.replace(b"line 7\n", b"seven\n").replace(b"line 1\n", b"line 0\nline 1\n")
    found = obtained(stack, {"src/engine.c": beside})
    assert tried(stack, found) == [
        Trial("0001-ten.patch", Outcome.MERGED),
        Trial("0002-small.patch", Outcome.APPLIES),
    ]
    # The same again does nothing again.
    assert [trial.outcome for trial in tried(stack, found)] == [Outcome.MERGED, Outcome.APPLIES]


def test_a_conflict_waits_for_a_person_and_then_goes_on(stack: Upstream) -> None:
    found = obtained(stack, {"src/engine.c": THEIRS})
    assert tried(stack, found) == [
        Trial("0001-ten.patch", Outcome.CONFLICT, ("src/engine.c",), HUNK),
        Trial("0002-small.patch", Outcome.NOT_TRIED),
    ]
    repository = stack.root / "out/stack"
    with pytest.raises(LlamaSourceError, match="nobody has resolved"):
        tried(stack, found)
    (repository / "src/engine.c").write_bytes(THEIRS.replace(b"line ten of theirs", b"ten"))
    git(repository, "add", "--update")
    git(repository, "-c", "core.editor=true", "cherry-pick", "--continue")
    assert [trial.outcome for trial in tried(stack, found)] == [Outcome.RESOLVED, Outcome.APPLIES]

    # The ported stack becomes a pin of its own, in a clone of a repository that has the old one.
    repo = repository_of(stack)
    production = isolation.fingerprint(repo)
    tree = stack.root / "out/tree"
    isolation.clone(repo, tree)
    pin = candidate.pin_of(manifest.load(stack.pin), found, "v2")
    names = isolation.set_pin(tree, pin, repository, "v2")
    assert names == ["0001-ten.patch", "0002-small.patch"]
    written = manifest.load(tree / isolation.PIN)
    assert (written.commit, written.tree, written.release) == (found.commit, found.tree, "v2")
    proved = patch_stack.check(written, patch_stack.load(tree / isolation.STACK), found.source)
    assert proved.patched_tree == git(repository, "rev-parse", "candidate^{tree}")

    # Adopted and taken back, and never written to.
    isolation.adoption(tree, stack.root / "adopt.patch")
    assert (
        isolation.check_rollback(repo, stack.root / "adopt.patch", stack.root / "back")
        == production
    )
    assert isolation.fingerprint(repo) == production
    assert git(repo, "status", "--porcelain") == ""


def test_a_ported_patch_takes_the_place_of_one_that_conflicts(stack: Upstream) -> None:
    found = obtained(stack, {"src/engine.c": THEIRS})
    folder = ported(stack, "ten: count better", THEIRS)
    assert tried(stack, found, folder) == [
        Trial("0001-ten.patch", Outcome.PORTED, ("src/engine.c",), HUNK),
        Trial("0002-small.patch", Outcome.APPLIES),
    ]
    assert b"\nten\n" in (stack.root / "out/stack/src/engine.c").read_bytes()
    assert [trial.outcome for trial in tried(stack, found)] == [Outcome.PORTED, Outcome.APPLIES]


@pytest.mark.parametrize(
    ("subject", "before", "reason", "said"),
    [
        ("eleven: another", THEIRS, Reason.PATCH_INVALID, "is of another patch"),
        (
            "ten: count better",
            THEIRS.replace(b"line 9\n", b"nine\n"),
            Reason.PATCH_CONFLICT,
            "0001-ten.patch does not apply: src/engine.c, hunk 1 (@@ -7,7 +7,7 @@ line 6)",
        ),
    ],
)
def test_a_ported_patch_that_does_not_fit_is_refused(
    stack: Upstream, subject: str, before: bytes, reason: Reason, said: str
) -> None:
    found = obtained(stack, {"src/engine.c": THEIRS})
    with pytest.raises(LlamaSourceError) as refused:
        tried(stack, found, ported(stack, subject, before))
    assert refused.value.reason is reason
    assert said in refused.value.message
    # Nothing of it stays: the same call with a better one goes on.
    better = ported(
        Upstream(**{**vars(stack), "root": stack.root / "b"}), "ten: count better", THEIRS
    )
    assert tried(stack, found, better)[0].outcome is Outcome.PORTED


def test_a_clone_has_the_edits_and_stays_what_it_was(stack: Upstream) -> None:
    repo = repository_of(stack)
    (repo / "BUILD").write_text("old\n")
    git(repo, "add", "--all")
    git(repo, "commit", "--quiet", "--message", "with a build")
    (repo / "BUILD").write_text("new\n")
    edits = write_files(stack.root, {"edits.patch": (git(repo, "diff") + "\n").encode()})
    edits /= "edits.patch"
    git(repo, "checkout", "--quiet", ".")
    tree = stack.root / "tree"
    isolation.clone(repo, tree, edits)
    assert (tree / "BUILD").read_text() == "new\n"
    (tree / "BUILD").write_text("by hand\n")
    isolation.clone(repo, tree, edits)
    assert (tree / "BUILD").read_text() == "by hand\n"

    git(repo, "commit", "--quiet", "--allow-empty", "--message", "later")
    with pytest.raises(LlamaSourceError, match="a clone of another commit"):
        isolation.clone(repo, tree, edits)
    edits.write_text(edits.read_text().replace("-old", "-other"))
    with pytest.raises(LlamaSourceError, match="git apply"):
        isolation.clone(repo, stack.root / "second", edits)
    assert not (stack.root / "second").exists()


def called(
    stack: Upstream, monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[int, str, str]:
    """The command in a repository with the pin: exit code, and the pin's hash before and after."""
    repo = repository_of(stack)
    monkeypatch.setenv("BUILD_WORKSPACE_DIRECTORY", str(repo))
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(stack.root))
    before = isolation.fingerprint(repo)
    code = main.main([*arguments, "--out=out", "--stack_only", "--json"])
    return code, before, isolation.fingerprint(repo)


@pytest.mark.parametrize(
    ("engine", "code", "outcomes"),
    [(ENGINE, 0, ["applies", "applies"]), (THEIRS, 1, ["conflict", "not tried"])],
)
def test_the_command_says_what_becomes_of_the_stack(
    stack: Upstream,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    engine: bytes,
    code: int,
    outcomes: list[str],
) -> None:
    repository, commit = newer(stack, {"src/engine.c": engine})
    found, before, after = called(stack, monkeypatch, commit, f"--from={repository}")
    report = json.loads(capsys.readouterr().out)
    assert (found, report["holds"]) == (code, code == 0)
    assert [patch["outcome"] for patch in report["stack"]] == outcomes
    assert report["stack"][0]["hunk"] == (HUNK if code else "")
    assert report["candidate"]["commit"] == commit
    assert before == after
    assert json.loads((stack.root / "out/report.json").read_text()) == report
    page = (stack.root / "out/report.md").read_text()
    assert page.startswith(
        f"# Candidate {commit}: the stack {'does not hold' if code else 'holds'}"
    )


def test_the_command_refuses_a_source_by_its_reason(
    stack: Upstream, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, before, after = called(stack, monkeypatch, "1" * 40, f"--from={stack.source}")
    assert (code, before) == (3, after)
    said = json.loads(capsys.readouterr().out)
    assert (said["holds"], said["error"]["reason"]) == (False, "SOURCE_UNAVAILABLE")
    assert "holds the commit" in said["error"]["message"]


def test_a_pin_that_changes_meanwhile_is_reported(
    stack: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository, commit = newer(stack, {})

    def writes(*_: object) -> None:
        pin = stack.root / "repo" / isolation.PIN / "manifest.json"
        pin.write_text(pin.read_text() + "\n")

    monkeypatch.setattr(compare, "invalidated", writes)
    with pytest.raises(SystemExit, match="production pin has changed"):
        called(stack, monkeypatch, commit, f"--from={repository}")


def test_files_that_differ_by_area(upstream: Upstream) -> None:
    pin = manifest.load(upstream.pin)
    entry = pin.listing["README.md"]
    new = {**pin.listing, "ggml/src/ggml-cpu/ops.cpp": entry, "src/llama-kv-cache.cpp": entry}
    new["LICENSE"] = dataclasses.replace(entry)
    del new["tests/test.c"]
    areas = compare.area_changes(pin.listing, new)
    assert [(a.area, a.changed, a.added, a.removed) for a in areas] == [
        ("licence", 1, 0, 0),
        ("cpu kernels", 0, 1, 0),
        ("cache layout", 0, 1, 0),
        ("rest", 0, 0, 1),
    ]
    lines = compare.invalidated(areas, ["docs/x.md"])
    assert "docs/x.md names the current pin" in lines
    assert any(line.startswith("cache layout: memory figures") for line in lines)
    assert not any(line.startswith("rest") for line in lines)
    assert compare.sources_of_backend(new) == {"ops.cpp"}


def test_tests_that_did_not_run_have_not_passed() -> None:
    def event(identity: dict[str, Any], **body: Any) -> str:
        return json.dumps({"id": identity, **body})

    lines = [
        event({"targetConfigured": {"label": "//a"}}, configured={"testSize": "SMALL"}),
        event({"targetConfigured": {"label": "//b"}}, configured={"testSize": "SMALL"}),
        event({"targetConfigured": {"label": "//lib"}}, configured={}),
        event({"targetConfigured": {"label": "//gpu"}}, configured={"testSize": "SMALL"}),
        event({"targetCompleted": {"label": "//gpu"}}, aborted={"reason": "SKIPPED"}),
        event({"targetConfigured": {"label": "//c"}}, configured={"testSize": "SMALL"}),
        event({"targetCompleted": {"label": "//c"}}, aborted={"reason": "ANALYSIS_FAILURE"}),
        event({"testSummary": {"label": "//a"}}, testSummary={"overallStatus": "PASSED"}),
    ]
    assert isolation.read_tests(lines) == {"//a": True, "//b": False, "//c": False}


def measured(decode: float, tensors: int, commit: str) -> dict[str, Any]:
    recipe = {"boundary_schema": "dense/1", "kv_layout": "slot", "llama_cpp_commit": commit}
    row = {
        "identical": True,
        "kv_bytes": [1, 2],
        "kv_budget_bytes": [3, 4],
        "seam_bytes_per_token": [5.0],
        "fragments_per_chunk": 1,
        "last_ms_per_token": 1000 / decode,
        "whole_ms_per_token": 10.0,
        "prompt_tokens_per_s": 50.0,
    }
    stages = [{"recipe": recipe, "owned_tensors": tensors, "owned_tensor_bytes": 7}]
    return {"workers": stages, "rows": [row]}


def test_two_pins_side_by_side() -> None:
    current = [measured(speed, 9, "old") for speed in (100, 80, 90)]
    found = compare.compare_model(current, [measured(45, 10, "new")])
    assert found["parity"] is True
    assert found["differences"] == {"owned_tensors": {"current": [9], "candidate": [10]}}
    assert found["recipe"] == {"llama_cpp_commit": {"current": "old", "candidate": "new"}}
    assert found["speed"]["decode_tokens_per_s"]["ratio"] == pytest.approx(0.5)


def test_what_ends_a_certification() -> None:
    current = measured(90, 9, "old")
    newer = measured(90, 9, "new")
    newer["workers"][0]["recipe"] |= {"kv_layout": "ring", "unheard_of": "1"}
    models = {"m.gguf": compare.compare_model([current], [newer])}
    assert main.ended_certification(models) == [
        "m.gguf, cache layout: kv_layout",
        "m.gguf, pin: llama_cpp_commit",
        "m.gguf, recipe: unheard_of",
    ]
