"""What sessions hold between steps, by layer: keys and values, or DeepSeek V4's several states.

    held = session_bytes(model, take_inventory(model), context_tokens=4096)

The same sums as the engine's own (cc/shard_engine/llama/state_size.h), which its kv_bytes reports;
a test compares the two on a running worker.
"""

from __future__ import annotations

from typing import Final

from meshnet_gguf.gguf_file import Model
from meshnet_gguf.inventory import Inventory

__all__ = ["session_bytes"]

# As the worker's flags are unless somebody gives them.
_CHUNK_TOKENS: Final = 256
_ROLLBACK_TOKENS: Final = 64
_ELEMENT_BYTES: Final = 2  # F16
_FLOAT_BYTES: Final = 4
_RING_ROWS: Final = 256  # rings are as long as a multiple of it
_CSA_RATIO, _HCA_RATIO = 4, 128
_ACCUMULATOR_TENSORS: Final = 2  # what is compressed, and its scores


def session_bytes(
    model: Model,
    inventory: Inventory,
    context_tokens: int,
    *,
    chunk_tokens: int = _CHUNK_TOKENS,
    rollback_tokens: int = _ROLLBACK_TOKENS,
) -> list[int] | None:
    """Bytes of one session that fills its context, for each main layer.

    `chunk_tokens` and `rollback_tokens` as the worker's flags --prefill_chunk_tokens and
    --rollback_tokens. None for an architecture whose layers keep anything else.
    """
    if all(layer.states == ("kv",) for layer in inventory.layers):
        return _dense(model, inventory, context_tokens)
    if model.architecture == "deepseek4":
        room = chunk_tokens + 2 * rollback_tokens
        return _deepseek4(model, inventory, context_tokens, room, rollback_tokens)
    return None


def _dense(model: Model, inventory: Inventory, tokens: int) -> list[int] | None:
    heads = max(model.integers("attention.head_count"), default=0)
    kept = max(model.integers("attention.head_count_kv"), default=heads)
    width = model.integer("embedding_length") or 0
    key = model.integer("attention.key_length") or (width // heads if heads else 0)
    value = model.integer("attention.value_length") or key
    if not key:
        return None
    return [kept * (key + value) * _ELEMENT_BYTES * tokens] * inventory.main_layers


def _deepseek4(
    model: Model, inventory: Inventory, tokens: int, room: int, rollback: int
) -> list[int] | None:
    width = model.integer("attention.key_length") or 0
    indexer_width = model.integer("attention.indexer.key_length") or 0
    window = model.integer("attention.sliding_window") or 0
    ratios = model.integers("attention.compress_ratios")
    if not (width and indexer_width and window) or len(ratios) < inventory.main_layers:
        return None
    key, indexer_key = width * _ELEMENT_BYTES, indexer_width * _ELEMENT_BYTES
    accumulated = _ACCUMULATOR_TENSORS * _FLOAT_BYTES * width
    indexer_accumulated = _ACCUMULATOR_TENSORS * _FLOAT_BYTES * indexer_width
    ring = -(-min(tokens, window + room) // _RING_ROWS) * _RING_ROWS
    raw = key * min(tokens, ring)
    # Neighbouring CSA blocks overlap: their accumulators hold two of them, twice as wide.
    csa = (key + indexer_key) * (tokens // _CSA_RATIO) + 2 * (
        accumulated + indexer_accumulated
    ) * min(tokens, 2 * _CSA_RATIO + rollback)
    hca = key * (tokens // _HCA_RATIO) + accumulated * min(tokens, _HCA_RATIO + rollback)
    extra = {_CSA_RATIO: csa, _HCA_RATIO: hca}
    return [raw + extra.get(ratio, 0) for ratio in ratios[: inventory.main_layers]]
