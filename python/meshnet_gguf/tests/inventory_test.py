import dataclasses
import os
import xml.etree.ElementTree as ET

import pytest
from meshnet_gguf import inventory_picture
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.gguf_file import Model, ModelFile, Tensor, Value, read_model
from meshnet_gguf.inventory import Inventory, TensorClass, even_split, take_inventory

from proto.meshnet.shard.v1 import errors_pb2

TINY = os.environ["FIXTURE_TINY"]


def dense(
    layers: int = 3, *, tied: bool = True, extra: tuple[str, ...] = (), architecture: str = "llama"
) -> Model:
    names = ["token_embd.weight", "output_norm.weight", *extra]
    names += [] if tied else ["output.weight"]
    for layer in range(layers):
        for name in ("attn_norm", "attn_q", "attn_output", "ffn_norm", "ffn_up"):
            names.append(f"blk.{layer}.{name}.weight")
    metadata: dict[str, Value] = {
        "general.architecture": architecture,
        f"{architecture}.block_count": layers,
    }
    return Model(
        metadata,
        tuple(Tensor(name, (10,), "F32", 0, 40 * i, 40) for i, name in enumerate(names)),
        (),
    )


def without(model: Model, name: str) -> Model:
    return dataclasses.replace(model, tensors=tuple(t for t in model.tensors if t.name != name))


def renamed(model: Model, name: str, new: str) -> Model:
    tensors = (dataclasses.replace(t, name=new) if t.name == name else t for t in model.tensors)
    return dataclasses.replace(model, tensors=tuple(tensors))


def refusal(model: Model) -> str:
    with pytest.raises(MeshnetError) as caught:
        take_inventory(model)
    assert caught.value.reason == errors_pb2.REASON_ARTIFACT_INVALID
    return caught.value.message


@pytest.fixture(scope="module")
def tiny() -> Inventory:
    return take_inventory(read_model(TINY))


def classes_of(inventory: Inventory, names: list[str]) -> list[str]:
    by_name = {item.tensor.name: str(item.kind) for item in inventory.items}
    return [by_name[name] for name in names]


def test_classes_of_v4(tiny: Inventory) -> None:
    assert classes_of(
        tiny,
        [
            "token_embd.weight",
            "output.weight",
            "output_hc_fn.weight",
            "blk.0.attn_q_a.weight",
            "blk.2.attn_q_a.weight",
            "blk.3.attn_q_a.weight",
            "blk.3.attn_compressor_kv.weight",
            "blk.2.indexer.proj.weight",
            "blk.2.indexer_compressor_ape.weight",
            "blk.0.ffn_gate_tid2eid.weight",
            "blk.3.exp_probs_b.bias",
            "blk.1.ffn_up_exps.weight",
            "blk.1.ffn_up_shexp.weight",
            "blk.1.hc_ffn_base.weight",
            "blk.8.attn_q_a.weight",
            "blk.8.nextn.eh_proj.weight",
        ],
    ) == [
        "embedding",
        "head",
        "mhc",
        "attention.window",
        "attention.csa",
        "attention.hca",
        "compressor",
        "indexer",
        "indexer",
        "router",
        "router",
        "expert",
        "shared_expert",
        "mhc",
        "mtp",
        "mtp",
    ]


def test_layers_of_v4(tiny: Inventory) -> None:
    assert tiny.main_layers == 8
    assert [(layer.attention, layer.routing) for layer in tiny.layers] == [
        ("window", "hash"),
        ("window", "hash"),
        ("csa", "hash"),
        ("hca", "learned"),
        ("csa", "learned"),
        ("hca", "learned"),
        ("csa", "learned"),
        ("window", "learned"),
        ("window", "learned"),
    ]
    assert [layer.is_mtp for layer in tiny.layers] == [False] * 8 + [True]
    assert tiny.layers[3].states == ("raw_window", "hca", "hca_accumulator")


def test_cuts_of_v4(tiny: Inventory) -> None:
    assert [(cut.at, cut.allowed, cut.restrictions) for cut in tiny.cuts] == [
        (1, True, ("token_ids",)),
        (2, True, ("token_ids",)),
        (3, True, ()),
        (4, True, ()),
        (5, True, ()),
        (6, True, ()),
        (7, True, ()),
        (8, False, ()),
    ]


@pytest.mark.parametrize(
    "split", [((0, 8),), ((0, 3), (3, 8)), tuple((i, i + 1) for i in range(8))]
)
def test_stages_own_everything_once(tiny: Inventory, split: tuple[tuple[int, int], ...]) -> None:
    assert {len(tiny.owners(item, split)) for item in tiny.items} == {1}
    mtp = tiny.layers[8].bytes
    assert sum(tiny.stage_bytes(layers) for layers in split) == tiny.total_bytes - mtp


def test_ends_belong_to_head_and_tail(tiny: Inventory) -> None:
    split = ((0, 3), (3, 8))
    owners = {item.tensor.name: tiny.owners(item, split) for item in tiny.items}
    assert owners["token_embd.weight"] == (0,)
    assert owners["output_hc_fn.weight"] == (1,)
    assert owners["blk.2.ffn_norm.weight"] == (0,)
    assert owners["blk.8.nextn.eh_proj.weight"] == (1,)


def test_classes_do_not_depend_on_the_weight_type(tiny: Inventory) -> None:
    quantised = take_inventory(read_model(os.environ["FIXTURE_TINY_Q4_0"]))
    assert {(i.tensor.name, i.kind) for i in quantised.items} == {
        (i.tensor.name, i.kind) for i in tiny.items
    }
    assert quantised.total_bytes < tiny.total_bytes


def test_every_candidate_range_has_its_bytes(tiny: Inventory) -> None:
    ranges = dict(tiny.candidate_ranges())
    assert len(ranges) == 36
    assert ranges[3, 4] == tiny.layers[3].bytes
    assert ranges[0, 8] == tiny.total_bytes - tiny.layers[8].bytes


def test_even_split_has_the_smallest_largest_stage(tiny: Inventory) -> None:
    ranges = dict(tiny.candidate_ranges())
    split = even_split(tiny, 3)
    largest = max(ranges[layers] for layers in split)
    assert largest == min(
        max(ranges[0, a], ranges[a, b], ranges[b, 8]) for b in range(2, 8) for a in range(1, b)
    )
    with pytest.raises(MeshnetError, match="expected 1 to 8 stages for 8 layers, got 9"):
        even_split(tiny, 9)


def test_tied_embedding_is_owned_by_both_ends() -> None:
    inventory = take_inventory(dense())
    split = ((0, 1), (1, 2), (2, 3))
    (embedding,) = (i for i in inventory.items if i.kind == TensorClass.EMBEDDING)
    assert inventory.owners(embedding, split) == (0, 2)
    assert [inventory.stage_bytes(layers) for layers in split] == [240, 200, 280]
    assert take_inventory(dense(tied=False)).stage_bytes((1, 2)) == 200
    assert take_inventory(dense(tied=False)).stage_bytes((2, 3)) == 280


def test_rope_factors_are_owned_by_every_stage() -> None:
    inventory = take_inventory(dense(extra=("rope_freqs.weight",)))
    assert inventory.stage_bytes((1, 2)) == 240


def test_architecture_that_no_worker_serves_cannot_be_cut() -> None:
    cuts = take_inventory(dense(architecture="qwen2")).cuts
    assert [cut.allowed for cut in cuts] == [False, False]
    assert cuts[0].reason == "the workers do not serve the architecture qwen2"


@pytest.mark.parametrize(
    "name",
    [
        "blk.0.attn_strange.weight",
        "blk.9.attn_norm.weight",  # beyond the last layer
        "blk.00.attn_norm.weight",
        "blk.3.ffn_gate_tid2eid.weight",  # that layer is not hash-routed
        "blk.3.indexer.proj.weight",  # HCA has no indexer
        "blk.7.nextn.eh_proj.weight",  # no MTP layer
        "output_hc_fn.bias",
        "",
    ],
)
def test_tensor_without_a_class_is_an_error(name: str) -> None:
    model = read_model(TINY)
    extra = dataclasses.replace(model.tensors[0], name=name)
    strange = dataclasses.replace(model, tensors=(*model.tensors, extra))
    assert refusal(strange) == f"the model cannot be split: no class covers {name!r}"


@pytest.mark.parametrize(
    "name", [t.name for t in read_model(TINY).tensors if ".8.nextn" not in t.name]
)
def test_every_tensor_of_v4_is_required(name: str) -> None:
    assert refusal(without(read_model(TINY), name)) == (
        f"the model cannot be split: the architecture requires {name!r}, which the file lacks"
    )


def test_model_without_its_mtp_layer_counts_all_layers_as_upstream_does() -> None:
    model = without(read_model(TINY), "blk.8.nextn.eh_proj.weight")
    assert "no class covers 'blk.8.nextn" in refusal(model)
    metadata = {**model.metadata, "deepseek4.nextn_predict_layers": 0}
    plain = Model(metadata, tuple(t for t in model.tensors if ".nextn." not in t.name), model.files)
    inventory = take_inventory(plain)
    assert inventory.main_layers == 9
    assert all(cut.allowed for cut in inventory.cuts)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("block_count", 0, "block_count of 1 to 512, got 0"),
        ("block_count", 513, "block_count of 1 to 512, got 513"),
        ("block_count", "nine", "to be a whole number"),
        ("nextn_predict_layers", 9, "fewer than 9 MTP layers, got 9"),
        ("attention.compress_ratios", (0, 4), "got 2 and 3"),
        ("attention.compress_ratios", (8,) * 9, "of 0, 4 and 128, got [8]"),
        ("attention.compress_ratios", ("x",) * 9, "to hold whole numbers"),
    ],
)
def test_keys_that_make_no_sense(key: str, value: Value, message: str) -> None:
    model = read_model(TINY)
    files = (ModelFile(model.files[0].path, 0, 0),)
    metadata = {**model.metadata, f"deepseek4.{key}": value}
    assert message in refusal(Model(metadata, model.tensors, files))


def test_dense_model_lacking_a_norm_is_refused() -> None:
    assert "'blk.1.attn_norm.weight'" in refusal(without(dense(), "blk.1.attn_norm.weight"))
    assert "no class covers" in refusal(renamed(dense(), "blk.1.attn_q.weight", "blk.1.ssm_a"))


def test_picture_shows_every_layer_and_stage(tiny: Inventory) -> None:
    svg = inventory_picture.render(tiny, ((0, 3), (3, 8)))
    assert svg == inventory_picture.render(tiny, ((0, 3), (3, 8)))
    root = ET.fromstring(svg)
    texts = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert [str(n) for n in range(9)] == [text for text in texts if text.isdecimal()]
    assert [text.split(":")[0] for text in texts if text.startswith("stage")] == [
        "stage 0",
        "stage 1",
    ]
    titles = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert sum(title.startswith("2, indexer: ") for title in titles) == 1
