"""The source that the build uses, proved again: pinned tree, each patch, reversal, rules."""

from __future__ import annotations

import json
import os
from pathlib import Path

from third_party.llama_cpp.llama_source import manifest, patch_stack


def _runfile(variable: str) -> Path:
    # The folder that the build fetched, not the link to one file of it.
    return Path(os.environ[variable]).resolve(strict=True)


def test_the_stack_is_proved_on_the_source_that_is_built() -> None:
    repository = Path(__file__).parents[2]
    source = _runfile("LLAMA_CPP_LICENSE").parent
    pin = manifest.load(repository / "third_party/llama_cpp")
    stack = patch_stack.load(repository / "patches/llama_cpp")

    proved = patch_stack.check(pin, stack, source, patched=True)

    identity = json.loads(_runfile("LLAMA_CPP_IDENTITY").read_text())
    assert proved.pinned_tree == identity["tree"]
    assert proved.patched_tree == identity["patched_tree"]
    assert proved.stack_sha256 == identity["stack_sha256"]
    assert list(proved.patches) == identity["patches"]
