"""What a candidate changes: files by area, and models by what workers say of them."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from third_party.llama_cpp.llama_source import git_tree

# A part of upstream, the beginnings of its paths, and what a change there makes void. The first
# that fits counts.
_AREAS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("licence", ("LICENSE", "licenses/", "AUTHORS"), "NOTICE, SBOM and third_party/deps.yaml"),
    ("cpu kernels", ("ggml/src/ggml-cpu/",), "numbers and speed of every CPU lane"),
    ("cuda", ("ggml/src/ggml-cuda/",), "builds and certification of the CUDA and ROCm lanes"),
    ("hip", ("ggml/src/ggml-hip/",), "builds and certification of the ROCm lane"),
    ("vulkan", ("ggml/src/ggml-vulkan/",), "builds and certification of the Vulkan lane"),
    ("metal", ("ggml/src/ggml-metal/",), "builds and certification of the Metal lane"),
    ("other backends", ("ggml/src/ggml-",), ""),
    ("ggml", ("ggml/",), "numbers and speed of every lane"),
    (
        "cache layout",
        ("src/llama-kv-", "src/llama-memory"),
        "memory figures, limits and rollback of sessions",
    ),
    (
        "loader",
        ("src/llama-model", "src/llama-arch", "src/llama-mmap", "src/llama-hparams", "gguf-py/"),
        "tensor inventories, ownership and fixtures",
    ),
    (
        "graphs",
        (
            "src/models/llama.cpp",
            "src/models/deepseek4.cpp",
            "src/llama-graph",
            "src/llama-context",
            "src/llama-batch",
        ),
        "parity evidence of every model",
    ),
    ("other models", ("src/models/",), ""),
    (
        "grammars",
        ("src/llama-grammar", "common/json", "common/trie", "common/unicode"),
        "answers to grammars and schemas",
    ),
    ("llama", ("src/", "include/"), "parity evidence of every model"),
    ("templates", ("common/jinja/", "models/templates/"), "the reference of chat templates"),
    ("rest", ("",), ""),
)


@dataclasses.dataclass(frozen=True)
class AreaChange:
    """Files that differ in one part of upstream, and what that makes void ("": nothing)."""

    area: str
    changed: int
    added: int
    removed: int
    voids: str


def area_changes(
    old: Mapping[str, git_tree.Entry], new: Mapping[str, git_tree.Entry]
) -> list[AreaChange]:
    """The areas with a difference, in the table's order."""
    found: dict[str, AreaChange] = {
        name: AreaChange(name, 0, 0, 0, voids) for name, _, voids in _AREAS
    }
    for path in old.keys() | new.keys():
        if old.get(path) == new.get(path):
            continue
        name = next(name for name, starts, _ in _AREAS if path.startswith(starts))
        area = found[name]
        found[name] = dataclasses.replace(
            area,
            changed=area.changed + (path in old and path in new),
            added=area.added + (path not in old),
            removed=area.removed + (path not in new),
        )
    return [area for area in found.values() if area.changed or area.added or area.removed]


def sources_of_backend(listing: Mapping[str, git_tree.Entry]) -> set[str]:
    """The CPU backend's sources, which the BUILD overlay lists by name."""
    start = "ggml/src/ggml-cpu/"
    return {
        path.removeprefix(start)
        for path in listing
        if path.startswith(start)
        and path.endswith((".c", ".cpp"))
        and not path.startswith((start + "arch/", start + "kleidiai/", start + "spacemit/"))
    }


def _stable(result: Mapping[str, Any]) -> dict[str, Any]:
    """Of what measure() found, what a pin should not change; by name."""
    stages = result["workers"]
    row = result["rows"][-1]
    recipe = stages[0]["recipe"]
    return {
        "boundary": recipe["boundary_schema"],
        "owned_tensors": [stage["owned_tensors"] for stage in stages],
        "owned_tensor_bytes": [stage["owned_tensor_bytes"] for stage in stages],
        "cache_bytes": row["kv_bytes"],
        "cache_budget_bytes": row["kv_budget_bytes"],
        "cache_layout": recipe["kv_layout"],
        "seam_bytes_per_token": row["seam_bytes_per_token"],
        "fragments_per_chunk": row["fragments_per_chunk"],
    }


_SPEEDS: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "decode_tokens_per_s": lambda row: 1000 / row["last_ms_per_token"],
    "prefill_tokens_per_s": lambda row: row["prompt_tokens_per_s"],
    "whole_decode_tokens_per_s": lambda row: 1000 / row["whole_ms_per_token"],
}


def compare_model(
    current: Sequence[Mapping[str, Any]], candidate: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Results of measure() of one model, several under each pin, side by side."""
    old, new = _stable(current[0]), _stable(candidate[0])
    old_recipe = current[0]["workers"][0]["recipe"]
    new_recipe = candidate[0]["workers"][0]["recipe"]
    speeds = {}
    for name, of in _SPEEDS.items():
        before = statistics.median(of(result["rows"][-1]) for result in current)
        after = statistics.median(of(result["rows"][-1]) for result in candidate)
        speeds[name] = {"current": before, "candidate": after, "ratio": after / before}
    return {
        "parity": all(row["identical"] for result in candidate for row in result["rows"]),
        "differences": {
            name: {"current": old[name], "candidate": new[name]}
            for name in old
            if old[name] != new[name]
        },
        "recipe": {
            name: {"current": old_recipe.get(name), "candidate": new_recipe.get(name)}
            for name in sorted(old_recipe.keys() | new_recipe.keys())
            if old_recipe.get(name) != new_recipe.get(name)
        },
        "speed": speeds,
    }


def invalidated(areas: Sequence[AreaChange], named_in: Sequence[str]) -> list[str]:
    """What adopting the candidate ends, for people."""
    lines = [
        "every certification record: each lane is dark until it is certified on the new pin",
        "every evidence record and benchmark: they name the current pin",
        "routes that mix workers of both pins: their recipes differ in llama_cpp_commit",
    ]
    lines += [f"{change.area}: {change.voids}" for change in areas if change.voids]
    lines += [f"{name} names the current pin" for name in named_in]
    return lines
