"""What a model consists of, and what of it a stage would own.

    inventory = take_inventory(read_model("model.gguf"))
    inventory.stage_bytes((0, 22)), inventory.cuts

Each tensor has a class, by its name alone: nothing here depends on how its numbers are stored.
A tensor that no class covers, and one that the architecture requires and the file lacks, refuse the
model: to split it would be to guess.

Ownership is that of the workers (patches/llama_cpp/0001-range-loading.patch): a layer's tensors
belong to the stage with the layer, the embedding to the head (and, where it doubles as the output
matrix, to the tail as well), the output to the tail. MTP layers stay with the tail, which does not
load them: MTP is disabled.
"""

from __future__ import annotations

import enum
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.gguf_file import Model, Tensor
from proto.meshnet.shard.v1 import errors_pb2

__all__ = [
    "SERVED_ARCHITECTURES",
    "Cut",
    "Inventory",
    "Item",
    "Layer",
    "TensorClass",
    "even_split",
    "take_inventory",
]

# What the workers load a range of; they refuse anything else.
SERVED_ARCHITECTURES = ("deepseek4", "llama")

_Range = tuple[int, int]


class TensorClass(enum.StrEnum):
    """What a tensor is for."""

    EMBEDDING = "embedding"
    HEAD = "head"  # final norm and output matrix
    MHC = "mhc"  # hyper-connections: how the residual streams are mixed
    NORM = "norm"
    ATTENTION = "attention"  # a dense model's
    ATTENTION_WINDOW = "attention.window"
    ATTENTION_CSA = "attention.csa"
    ATTENTION_HCA = "attention.hca"
    COMPRESSOR = "compressor"
    INDEXER = "indexer"
    FEED_FORWARD = "feed_forward"
    ROUTER = "router"
    EXPERT = "expert"
    SHARED_EXPERT = "shared_expert"
    ROPE = "rope"
    MTP = "mtp"


@dataclass(frozen=True)
class Layer:
    """A layer. `attention` is dense, window, csa or hca; `routing` none, hash or learned.

    `states` is what it keeps of a session between steps, all of it on its own stage.
    """

    index: int
    attention: str
    routing: str
    states: tuple[str, ...]
    bytes: int
    is_mtp: bool


@dataclass(frozen=True)
class Item:
    """A tensor with its class; `layer` is None for those of no layer."""

    tensor: Tensor
    kind: TensorClass
    layer: int | None


@dataclass(frozen=True)
class Cut:
    """A place between two layers: the stage behind it would begin at layer `at`.

    `restrictions` says what that stage needs beyond the residual; `reason` why it is not allowed.
    """

    at: int
    allowed: bool
    restrictions: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Inventory:
    """A model's tensors by class and layer. Layer ranges count main layers only."""

    architecture: str
    items: tuple[Item, ...]
    layers: tuple[Layer, ...]  # the main layers, then MTP's
    main_layers: int
    cuts: tuple[Cut, ...]
    has_tied_output: bool

    @property
    def total_bytes(self) -> int:
        """All tensors."""
        return sum(item.tensor.bytes for item in self.items)

    def class_bytes(self) -> dict[TensorClass, int]:
        """Bytes by class, in the order of the classes."""
        return {
            kind: total
            for kind in TensorClass
            if (total := sum(item.tensor.bytes for item in self.items if item.kind == kind))
        }

    def owners(self, item: Item, split: Sequence[_Range]) -> tuple[int, ...]:
        """The stages of a split that own a tensor."""
        return tuple(stage for stage, layers in enumerate(split) if self._is_owned(item, layers))

    def stage_bytes(self, layers: _Range) -> int:
        """Bytes of tensors that a stage with these layers loads."""
        begin, end = layers
        total = sum(layer.bytes for layer in self.layers[begin:end])
        return total + sum(
            item.tensor.bytes
            for item in self.items
            if item.layer is None and self._is_owned(item, layers)
        )

    def candidate_ranges(self) -> Iterator[tuple[_Range, int]]:
        """Every layer range with its bytes: n * (n + 1) / 2 of them."""
        for begin, end in itertools.combinations(range(self.main_layers + 1), 2):
            yield (begin, end), self.stage_bytes((begin, end))

    def _is_owned(self, item: Item, layers: _Range) -> bool:
        begin, end = layers
        is_head, is_tail = begin == 0, end == self.main_layers
        if item.layer is not None:
            return begin <= item.layer < end or (is_tail and item.layer >= self.main_layers)
        if item.kind == TensorClass.EMBEDDING:
            return is_head or (is_tail and self.has_tied_output)
        if item.kind == TensorClass.ROPE:
            return True
        return is_tail


@dataclass(frozen=True)
class _Rule:
    """Names, after `blk.N.` for a layer's, and what they are."""

    names: str
    kind: TensorClass
    layers: str = "all"  # on which layers they must be: a key of _has, or "optional"


_C = TensorClass
_DENSE_GLOBAL = (
    _Rule(r"token_embd\.weight", _C.EMBEDDING),
    _Rule(r"(token_embd_norm|position_embd|token_types)\.(weight|bias)", _C.EMBEDDING, "optional"),
    _Rule(r"output_norm\.weight", _C.HEAD),
    _Rule(r"output_norm\.bias|output\.(weight|bias)", _C.HEAD, "optional"),
    _Rule(r"rope_(freqs|factors_long|factors_short)\.weight", _C.ROPE, "optional"),
)
_SUFFIX = r"\.(weight|bias|scale)"
_DENSE_LAYER = (
    _Rule(
        rf"(attn_norm|attn_norm_2|attn_q_norm|attn_k_norm|post_attention_norm){_SUFFIX}", _C.NORM
    ),
    _Rule(rf"(ffn_norm|post_ffw_norm|attn_post_norm|ffn_post_norm){_SUFFIX}", _C.NORM, "optional"),
    _Rule(
        rf"attn_(q|k|v|qkv|output|gate|sinks|rel_b|q_a|q_b|kv_a_mqa|kv_b){_SUFFIX}", _C.ATTENTION
    ),
    _Rule(rf"attn_(q_a_norm|kv_a_norm|sub_norm){_SUFFIX}", _C.NORM, "optional"),
    _Rule(rf"rope_(freqs|factors_long|factors_short){_SUFFIX}", _C.ROPE, "optional"),
    _Rule(rf"ffn_(gate|up|down){_SUFFIX}", _C.FEED_FORWARD, "optional"),
    _Rule(rf"(ffn_gate_inp|exp_probs_b){_SUFFIX}", _C.ROUTER, "optional"),
    _Rule(rf"ffn_(gate|up|down|gate_up)_exps{_SUFFIX}", _C.EXPERT, "optional"),
    _Rule(
        rf"ffn_(gate|up|down)_shexp{_SUFFIX}|ffn_gate_inp_shexp{_SUFFIX}",
        _C.SHARED_EXPERT,
        "optional",
    ),
)
# What a layer of the architecture cannot do without; the rest of the names may be there.
_LLAMA_REQUIRED = ("attn_norm", "attn_output", "ffn_norm")

# llama_model_deepseek4::load_arch_tensors. One name a rule where it must be there.
_V4_GLOBAL = (
    _Rule(r"token_embd\.weight", _C.EMBEDDING),
    _Rule(r"output\.weight", _C.HEAD),
    _Rule(r"output_norm\.weight", _C.HEAD),
    _Rule(r"output_hc_fn\.weight", _C.MHC),
    _Rule(r"output_hc_base\.weight", _C.MHC),
    _Rule(r"output_hc_scale\.weight", _C.MHC),
)
_V4_LAYER = (
    *(_Rule(rf"{name}\.weight", _C.NORM) for name in ("attn_norm", "ffn_norm")),
    *(
        _Rule(rf"{name}\.weight", _C.ATTENTION)  # refined by the layer's kind of attention
        for name in (
            "attn_sinks",
            "attn_q_a",
            "attn_q_a_norm",
            "attn_q_b",
            "attn_kv",
            "attn_kv_a_norm",
            "attn_output_a",
            "attn_output_b",
        )
    ),
    *(
        _Rule(rf"hc_{part}_{name}\.weight", _C.MHC)
        for part in ("attn", "ffn")
        for name in ("fn", "base", "scale")
    ),
    *(
        _Rule(rf"attn_compressor_{name}\.weight", _C.COMPRESSOR, "compressed")
        for name in ("kv", "gate", "ape", "norm")
    ),
    *(_Rule(rf"indexer\.{name}\.weight", _C.INDEXER, "csa") for name in ("proj", "attn_q_b")),
    *(
        _Rule(rf"indexer_compressor_{name}\.weight", _C.INDEXER, "csa")
        for name in ("kv", "gate", "ape", "norm")
    ),
    _Rule(r"ffn_gate_inp\.weight", _C.ROUTER),
    _Rule(r"ffn_gate_tid2eid\.weight", _C.ROUTER, "hash"),
    _Rule(r"exp_probs_b\.bias", _C.ROUTER, "learned"),
    _Rule(r"exp_probs_b_vl\.bias", _C.ROUTER, "optional"),
    *(_Rule(rf"ffn_{name}_exps\.weight", _C.EXPERT) for name in ("gate", "up", "down")),
    *(_Rule(rf"ffn_{name}_shexp\.weight", _C.SHARED_EXPERT) for name in ("gate", "up", "down")),
    *(_Rule(rf"nextn\.{name}\.weight", _C.MTP, "mtp") for name in ("eh_proj", "enorm", "hnorm")),
    _Rule(r"nextn\.(embed_tokens|shared_head_head|shared_head_norm)\.weight", _C.MTP, "optional"),
)
_V4_STATES = {
    "window": ("raw_window",),
    "csa": ("raw_window", "csa", "csa_accumulator", "indexer", "indexer_accumulator"),
    "hca": ("raw_window", "hca", "hca_accumulator"),
}
_V4_ATTENTION = {0: "window", 4: "csa", 128: "hca"}
_V4_CLASSES = {
    "window": _C.ATTENTION_WINDOW,
    "csa": _C.ATTENTION_CSA,
    "hca": _C.ATTENTION_HCA,
}
_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.(.+)", re.DOTALL)
_MAX_LAYERS = 512  # LLAMA_MAX_LAYERS
_MAX_NAMED = 5


def take_inventory(model: Model) -> Inventory:
    """Classes, layers and cut points of a model.

    Raises MeshnetError: ARTIFACT_INVALID for a tensor without a class, a required tensor that is
    missing, and keys that contradict each other.
    """
    count = model.integer("block_count") or 0
    if not 0 < count <= _MAX_LAYERS:
        raise _invalid(f"expected {model.architecture}.block_count of 1 to 512, got {count}")
    is_v4 = model.architecture == "deepseek4"
    mtp = _mtp_layers(model, count)
    main = count - mtp
    kinds = _v4_kinds(model, count, main) if is_v4 else [("dense", "none")] * count
    items = []
    unclassified = []
    for tensor in model.tensors:
        item = _classify(tensor, kinds, main, is_v4)
        if item is None:
            unclassified.append(tensor.name)
        else:
            items.append(item)
    if unclassified:
        raise _invalid(f"no class covers {_listed(unclassified)}")
    names = {tensor.name for tensor in model.tensors}
    missing = [name for name in _required(model, kinds, main, is_v4) if name not in names]
    if missing:
        raise _invalid(f"the architecture requires {_listed(missing)}, which the file lacks")
    sizes = [0] * count
    routed = set()
    for item in items:
        if item.layer is not None:
            sizes[item.layer] += item.tensor.bytes
            if item.kind == TensorClass.ROUTER:
                routed.add(item.layer)
    layers = tuple(
        Layer(
            index,
            attention,
            routing if is_v4 else ("learned" if index in routed else "none"),
            _V4_STATES[attention] if is_v4 else ("kv",),
            sizes[index],
            index >= main,
        )
        for index, (attention, routing) in enumerate(kinds)
    )
    return Inventory(
        architecture=model.architecture,
        items=tuple(items),
        layers=layers,
        main_layers=main,
        cuts=tuple(_cuts(model.architecture, layers, main)),
        has_tied_output="output.weight" not in names,
    )


def even_split(inventory: Inventory, stages: int) -> tuple[tuple[int, int], ...]:
    """The split into this many stages whose largest stage has the fewest bytes.

    Raises MeshnetError: LAYER_RANGE_INVALID when there are fewer layers than stages.
    """
    layers = inventory.main_layers
    if not 1 <= stages <= layers:
        raise MeshnetError(
            errors_pb2.REASON_LAYER_RANGE_INVALID,
            f"expected 1 to {layers} stages for {layers} layers, got {stages}",
        )
    size = dict(inventory.candidate_ranges())
    # best[end]: the least largest stage over [0, end) with the number of stages so far, its cuts.
    best: dict[int, tuple[int, tuple[int, ...]]] = {
        end: (size[0, end], (0,)) for end in range(1, layers + 1)
    }
    for _ in range(1, stages):
        best = {
            end: min(
                (max(best[cut][0], size[cut, end]), (*best[cut][1], cut))
                for cut in range(1, end)
                if cut in best
            )
            for end in range(2, layers + 1)
            if any(cut in best for cut in range(1, end))
        }
    bounds = (*best[layers][1], layers)
    return tuple(itertools.pairwise(bounds))


def _mtp_layers(model: Model, count: int) -> int:
    declared = model.integer("nextn_predict_layers") or 0
    if not 0 <= declared < count:
        raise _invalid(f"expected fewer than {count} MTP layers, got {declared}")
    # As upstream: a file may declare MTP layers and hold none.
    probe = f"blk.{count - declared}.nextn.eh_proj.weight"
    return declared if any(tensor.name == probe for tensor in model.tensors) else 0


def _v4_kinds(model: Model, count: int, main: int) -> list[tuple[str, str]]:
    ratios = model.integers("attention.compress_ratios")
    hashed = model.integer("hash_layer_count")
    if len(ratios) < count or hashed is None:
        raise _invalid(
            f"expected {count} deepseek4.attention.compress_ratios and "
            f"deepseek4.hash_layer_count, got {len(ratios)} and {hashed}"
        )
    strange = sorted(set(ratios[:count]) - set(_V4_ATTENTION))
    if strange:
        raise _invalid(f"expected compression ratios of 0, 4 and 128, got {strange}")
    return [
        (_V4_ATTENTION[ratio], "hash" if index < hashed else "learned")
        for index, ratio in enumerate(ratios[:count])
    ]


def _classify(
    tensor: Tensor, kinds: Sequence[tuple[str, str]], main: int, is_v4: bool
) -> Item | None:
    match = _BLOCK.fullmatch(tensor.name)
    if match is None:
        for rule in _V4_GLOBAL if is_v4 else _DENSE_GLOBAL:
            if re.fullmatch(rule.names, tensor.name):
                return Item(tensor, rule.kind, None)
        return None
    layer = int(match[1])
    if layer >= len(kinds):
        return None
    for rule in _V4_LAYER if is_v4 else _DENSE_LAYER:
        if not re.fullmatch(rule.names, match[2]):
            continue
        if not (rule.layers == "optional" or _has(rule.layers, *kinds[layer], layer >= main)):
            return None
        kind = rule.kind
        if layer >= main:
            kind = TensorClass.MTP
        elif kind == TensorClass.MTP:
            return None
        elif is_v4 and kind == TensorClass.ATTENTION:
            kind = _V4_CLASSES[kinds[layer][0]]
        return Item(tensor, kind, layer)
    return None


def _has(layers: str, attention: str, routing: str, is_mtp: bool) -> bool:
    return {
        "all": True,
        "compressed": attention in ("csa", "hca"),
        "csa": attention == "csa",
        "hash": routing == "hash",
        "learned": routing == "learned",
        "mtp": is_mtp,
    }[layers]


def _required(
    model: Model, kinds: Sequence[tuple[str, str]], main: int, is_v4: bool
) -> Iterator[str]:
    for rule in _V4_GLOBAL if is_v4 else _DENSE_GLOBAL:
        if rule.layers != "optional":
            yield rule.names.replace("\\", "")
    for layer, kind in enumerate(kinds):
        if is_v4:
            for rule in _V4_LAYER:
                if rule.layers != "optional" and _has(rule.layers, *kind, layer >= main):
                    yield f"blk.{layer}." + rule.names.replace("\\", "")
        elif model.architecture == "llama":
            for name in _LLAMA_REQUIRED:
                yield f"blk.{layer}.{name}.weight"


def _cuts(architecture: str, layers: Sequence[Layer], main: int) -> Iterator[Cut]:
    served = architecture in SERVED_ARCHITECTURES
    refusal = "" if served else f"the workers do not serve the architecture {architecture}"
    for at in range(1, main):
        needs_ids = any(layer.routing == "hash" for layer in layers[at:main])
        yield Cut(at, served, ("token_ids",) if needs_ids else (), refusal)
    if main < len(layers):
        yield Cut(main, False, (), "MTP stays with the last main layer's stage")


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_MAX_NAMED])
    rest = len(names) - _MAX_NAMED
    return f"{shown} and {rest} more" if rest > 0 else shown


def _invalid(what: str) -> MeshnetError:
    return MeshnetError(errors_pb2.REASON_ARTIFACT_INVALID, f"the model cannot be split: {what}")
