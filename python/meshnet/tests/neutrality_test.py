"""The control plane knows nothing of what its workers compute with."""

from __future__ import annotations

import ast
import pathlib
import re
import tokenize

import pytest

PACKAGE = pathlib.Path(__file__).parents[1]
PROTOS = PACKAGE.parents[1] / "proto" / "meshnet" / "control" / "v1"
MODULES = sorted(
    file for file in PACKAGE.rglob("*.py") if "tests" not in file.relative_to(PACKAGE).parts
)
FILES = [*MODULES, *sorted(PROTOS.glob("*.proto"))]

# Quantisation, architectures, engines and their backends, file formats, fixed topologies.
WORDS = re.compile(
    r"gguf|ggml|llama|quant|\bq\d_|deepseek|qwen|gemma|mistral|transformer|safetensor|pytorch|tensor"
    r"|architecture|backend|cuda|rocm|vulkan|\bmetal\b|\bcpu\b|\bgpu\b|\bkv\b|\blayers?\b|attention"
    r"|\bexperts?\b|stage_?count|num_?stages|(two|three|four|ten) stages",
    re.IGNORECASE,
)


def test_there_is_something_to_look_at() -> None:
    names = {file.name for file in FILES}
    assert {"tracker.py", "routing.py", "storage.py", "tracker.proto", "relay.proto"} <= names


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_no_word_of_what_workers_are(file: pathlib.Path) -> None:
    with tokenize.open(file) as text:
        found = [
            f"{file.name}:{number}: {line.strip()}"
            for number, line in enumerate(text, 1)
            if WORDS.search(line)
        ]
    assert found == []


@pytest.mark.parametrize("file", MODULES, ids=lambda file: file.name)
def test_imports_nothing_of_the_data_plane(file: pathlib.Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide what is imported"
            imported.add(node.module or "")
    forbidden = {n for n in imported if n.startswith(("meshnet_gguf", "proto.meshnet.shard"))}
    assert forbidden == set()


@pytest.mark.parametrize(
    "word", ["GGUF", "quantised", "q4_K", "Llama", "layer", "backend", "CUDA", "num_stages"]
)
def test_the_search_would_find_it(word: str) -> None:
    assert WORDS.search(f"a {word} b")
