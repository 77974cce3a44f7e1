"""Recipes for people: what each field is, and where two recipes differ.

    for field in explain(capability.recipe):
        print(field.name, field.value, field.meaning)
    differences(first, second)      # [("kv_type", "f16", "q8_0"), ...]

A recipe's canonical serialisation is documented at Recipe in proto/meshnet/shard/v1/shard.proto;
meshnet_gguf.protocol.recipe_fingerprint computes its fingerprint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshnet.fingerprints import Mixture

from meshnet_gguf.protocol import recipe_fingerprint

__all__ = [
    "LANE_FIELDS",
    "LANE_KINDS",
    "RecipeEntry",
    "differences",
    "explain",
    "mixture_of",
    "shared_fingerprint",
]

# What belongs to a lane alone, by kinds of change: by which kernels it computes, and where.
LANE_KINDS: Mapping[str, tuple[str, ...]] = {
    "backend build": (
        "backend",
        "build_options",
        "cpu_repack",
        "cpu_variant",
        "flash_attention",
        "flash_attention_threads",
    ),
    "hardware": ("accelerator",),
    "driver": ("accelerator_driver",),
}
# In nothing else may the two lanes of a mixture differ. Workers have the same list
# (cc/worker/mixtures.cc).
LANE_FIELDS = frozenset(name for names in LANE_KINDS.values() for name in names)

# Why a field is part of the recipe. Fields that are not here are shown without a meaning.
_MEANINGS = {
    "accelerator": "the device that computes, where it is not the CPU",
    "accelerator_driver": "its driver, which compiles kernels for it",
    "activation_dtype": "number format of the residual between layers",
    "adapter": "our code that runs an architecture by layer ranges, and its version",
    "architecture": "which computation the layers are",
    "artifact_sha256": "the artifact: its manifest, or every byte of its files",
    "backend": "which kind of device computes",
    "batch_policy": "whether rows of several sessions share matrix products",
    "boundary_schema": "which tensors cross a seam, and their version",
    "boundary_sha256": "those tensors' names, types and shapes",
    "build_options": "the compiler of the kernels, and its flags",
    "cpu_repack": "whether weights are rearranged for the kernels, which sum in another order then",
    "cpu_variant": "the instruction set whose kernels run",
    "flash_attention": "which attention kernel runs",
    "flash_attention_threads": "in how many parts a long cache is summed",
    "kv_layout": "how cached tokens lie in memory",
    "kv_type": "number format of cached tokens",
    "layers": "layers of the pretended model",
    "llama_cpp_commit": "the upstream source that computes",
    "llama_cpp_patches_sha256": "our patches on it, in their order",
    "max_step_tokens": "rows of one step",
    "mtp": "whether draft tokens are predicted, and how many",
    "prefill_chunk": "rows of a prompt that are computed at once; a chunk's size chooses kernels",
    "quantization": "number format of the weights",
    "rollback_tokens": "tokens by which a session can go back",
    "tokenizer_sha256": "text to tokens and back",
    "vocabulary_size": "number of tokens",
    "width": "numbers in one row of the residual",
    "wire_dtype": "number format on seams",
}


@dataclass(frozen=True)
class RecipeEntry:
    """One field; `meaning` is empty for one that this version does not know."""

    name: str
    value: str
    meaning: str


def explain(recipe: Mapping[str, str]) -> list[RecipeEntry]:
    """All fields, sorted by name."""
    return [RecipeEntry(name, recipe[name], _MEANINGS.get(name, "")) for name in sorted(recipe)]


def differences(
    first: Mapping[str, str], second: Mapping[str, str]
) -> list[tuple[str, str | None, str | None]]:
    """Name and both values of every field that differs, sorted; None where a side lacks it."""
    return [
        (name, first.get(name), second.get(name))
        for name in sorted(first.keys() | second.keys())
        if first.get(name) != second.get(name)
    ]


def shared_fingerprint(recipe: Mapping[str, str]) -> str:
    """The fingerprint of a recipe without what belongs to its lane alone."""
    return recipe_fingerprint((n, v) for n, v in recipe.items() if n not in LANE_FIELDS)


def mixture_of(head: Mapping[str, str], tail: Mapping[str, str]) -> Mixture | None:
    """What a route from stages of one recipe to stages of another is.

    None when the recipes are equal, or differ in more than their lanes.
    """
    shared = shared_fingerprint(head)
    if head == tail or shared != shared_fingerprint(tail):
        return None
    return Mixture(shared, *(recipe_fingerprint(recipe.items()) for recipe in (head, tail)))
