from __future__ import annotations

import json

import pytest

from third_party.llama_cpp.llama_source import cli
from third_party.llama_cpp.llama_source.errors import Reason
from third_party.llama_cpp.llama_source.tests.conftest import FILES, Upstream


def _run(upstream: Upstream, *arguments: str) -> int:
    return cli.main(
        ["--json", "--manifest", str(upstream.pin), "--patches", str(upstream.patches), *arguments]
    )


def test_a_stack_from_work_tree_to_patched_source(
    upstream: Upstream, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = FILES["src/engine.c"].replace(b"line 5\n", b"line five\n")
    upstream.commit_change("first: change five", {"src/engine.c": changed})

    assert _run(upstream, "regenerate", str(upstream.work_tree)) == 0
    assert json.loads(capsys.readouterr().out) == {"ok": True, "patches": ["0001-first.patch"]}
    assert _run(upstream, "check", str(upstream.source)) == 0
    checked = json.loads(capsys.readouterr().out)
    assert checked["pinned_tree"] == upstream.tree
    out = upstream.root / "out"
    fetch = ["fetch", "--no-cache", "--patched", "--local", str(upstream.source), str(out)]
    assert _run(upstream, *fetch) == 0
    assert json.loads(capsys.readouterr().out)["patched_tree"] == checked["patched_tree"]
    assert (out / "src/engine.c").read_bytes() == changed
    assert _run(upstream, "reverse", str(out)) == 0
    assert _run(upstream, "verify", str(out)) == 0
    capsys.readouterr()
    assert _run(upstream, "identity") == 0
    identity = json.loads(capsys.readouterr().out)
    assert (identity["commit"], identity["tree"]) == (upstream.commit, upstream.tree)
    assert identity["stack_sha256"] == checked["stack_sha256"]


def test_a_refusal_is_told_to_people_and_to_programs(
    upstream: Upstream, capsys: pytest.CaptureFixture[str]
) -> None:
    (upstream.source / "README.md").unlink()
    assert _run(upstream, "verify", str(upstream.source)) == Reason.TREE_MISMATCH.value
    captured = capsys.readouterr()
    failure = json.loads(captured.out)
    assert (failure["ok"], failure["reason"]) == (False, "TREE_MISMATCH")
    assert failure["expected"] == f"git tree {upstream.tree}"
    assert failure["details"] == ["missing: README.md"]
    assert captured.err.startswith("TREE_MISMATCH: ")
    assert "  - missing: README.md\n" in captured.err


def test_help_shows_examples_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "tools/llama_cpp check --against NEW_SOURCE" in text
    assert "11 TREE_MISMATCH" in text


def test_wrong_usage_has_a_code_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["unknown"])
    assert caught.value.code == 2
    assert "invalid choice" in capsys.readouterr().err
