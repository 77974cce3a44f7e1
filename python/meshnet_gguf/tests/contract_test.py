import hashlib
import json
import os
import pathlib
from typing import Any

import pytest
from meshnet_gguf import contract as contracts
from meshnet_gguf.contract import (
    FIXTURE_KEY,
    contract_names,
    differences,
    load_contract,
    require_contract,
)
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.gguf_file import Model, Tensor, Value, read_model
from meshnet_gguf.inventory import take_inventory

from proto.meshnet.shard.v1 import errors_pb2

FLASH = "deepseek-v4-flash"
TINY = "deepseek4-tiny-fixture"
_0731_TEMPLATE = pathlib.Path(os.environ["TEMPLATE_0731"])


def tiny() -> Model:
    return read_model(os.environ["FIXTURE_TINY"])


def changed(model: Model, **metadata: Value) -> Model:
    return Model({**model.metadata, **metadata}, model.tensors, model.files)


def differences_of(model: Model, name: str = TINY) -> list[str]:
    return differences(load_contract(name), model, take_inventory(model))


def test_contracts_are_locked_and_well_formed() -> None:
    assert contract_names() == (FLASH, TINY)
    assert load_contract(FLASH).evidence_class == "real-model"
    assert load_contract(TINY).evidence_class == "fixture"


def test_target_is_the_official_revision_on_the_pinned_llama_cpp() -> None:
    terms = load_contract(FLASH).terms
    pin = json.loads(pathlib.Path(os.environ["LLAMA_CPP_IDENTITY"]).read_text())
    assert terms["source"]["revision"] == "60d8d70770c6776ff598c94bb586a859a38244f1"
    assert (terms["upstream"]["release"], terms["upstream"]["commit"]) == (
        pin["release"],
        pin["commit"],
    )
    assert terms["layers"]["main"] == len(terms["layers"]["attention"]) == 43
    assert terms["layers"]["attention"].count("csa") == 21


def test_every_state_is_named_in_the_upstream_source() -> None:
    source = pathlib.Path(os.environ["UPSTREAM_CACHE"]).read_text()
    header = pathlib.Path(os.environ["UPSTREAM_CACHE_HEADER"]).read_text()
    for state in load_contract(FLASH).terms["states"]:
        for function in state["upstream"]["functions"]:
            assert function in source or function in header


def test_states_are_those_of_the_inventory() -> None:
    obliged: dict[str, set[str]] = {"window": set(), "csa": set(), "hca": set()}
    for state in load_contract(TINY).terms["states"]:
        for attention in state["attention"]:
            obliged[attention].add(state["name"])
    for layer in take_inventory(tiny()).layers:
        assert set(layer.states) == obliged[layer.attention]


def test_model_that_is_meant_is_accepted() -> None:
    assert differences_of(tiny()) == []
    require_contract(load_contract(TINY), tiny(), take_inventory(tiny()))


def test_fixture_is_not_the_real_model() -> None:
    found = differences_of(tiny(), FLASH)
    assert found[0].startswith("it is a generated fixture (random weights)")
    assert found[0].endswith("by its meshnet.fixture")
    assert found[1] == "expected 43 main layers and 0 or 1 of MTP, got 8 and 1"
    assert "expected expert_count to be 256, got 16" in found
    assert "expected token_embd.weight of [4096, 129280], got [128, 512]" in found
    with pytest.raises(MeshnetError) as caught:
        require_contract(load_contract(FLASH), tiny(), take_inventory(tiny()))
    assert caught.value.reason == errors_pb2.REASON_ARTIFACT_MISMATCH


@pytest.mark.parametrize("name", ["DeepSeek V4 Flash", "DeepSeek V4 fixture, tiny", ""])
def test_a_name_makes_no_fixture_and_hides_none(name: str) -> None:
    fixture = changed(tiny(), **{"general.name": name})
    assert differences_of(fixture) == []
    assert differences_of(fixture, FLASH)[0].startswith("it is a generated fixture (")
    metadata = {key: value for key, value in fixture.metadata.items() if key != FIXTURE_KEY}
    unmarked = Model(metadata, fixture.tensors, fixture.files)
    assert differences_of(unmarked) == [
        "it is no generated fixture: those have the key meshnet.fixture"
    ]
    assert not any("generated fixture" in found for found in differences_of(unmarked, FLASH))


@pytest.mark.parametrize(
    ("key", "value", "name", "sign"),
    [
        ("general.name", "DeepSeek V4 Flash 0731", "DeepSeek V4 Flash 0731", "general.name"),
        ("general.version", "V4.1", "DeepSeek V4.1", "general.version"),
        ("general.basename", "x-DSpark", "a DSpark draft head", "general.basename"),
        ("general.finetune", "Vision-Exp", "DeepSeek V4 Flash Vision", "general.finetune"),
        (
            "tokenizer.chat_template",
            _0731_TEMPLATE.read_text(),
            "DeepSeek V4 Flash 0731",
            "chat template",
        ),
    ],
)
def test_other_checkpoints_are_recognised(key: str, value: str, name: str, sign: str) -> None:
    (found,) = differences_of(changed(tiny(), **{key: value}))
    assert found.startswith(f"it is {name} (")
    assert found.endswith(f"by its {sign}")


def test_vision_variant_is_recognised_by_its_tensor() -> None:
    model = tiny()
    extra = Tensor("blk.0.exp_probs_b_vl.bias", (16,), "F32", 0, 0, 64)
    (found,) = differences_of(Model(model.metadata, (*model.tensors, extra), model.files))
    assert found.startswith("it is DeepSeek V4 Flash Vision (")


def test_other_architecture_is_refused() -> None:
    names = ["token_embd.weight", "output_norm.weight", "blk.0.attn_norm.weight"]
    names += ["blk.0.attn_output.weight", "blk.0.ffn_norm.weight"]
    model = Model(
        {"general.architecture": "llama", "llama.block_count": 1},
        tuple(Tensor(name, (4,), "F32", 0, 0, 16) for name in names),
        (),
    )
    assert differences_of(model, FLASH) == ["expected the architecture deepseek4, got 'llama'"]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("expert_used_count", 8, "expected expert_used_count to be 6, got 8"),
        ("expert_used_count", True, "expected expert_used_count to be 6, got True"),
        ("hash_layer_count", 2, ""),
    ],
)
def test_changed_keys(key: str, value: Value, message: str) -> None:
    model = changed(tiny(), **{f"deepseek4.{key}": value})
    if not message:  # the tensors contradict the key before any contract is looked at
        with pytest.raises(MeshnetError, match="no class covers"):
            take_inventory(model)
        return
    assert differences_of(model) == [message]


def test_mtp_is_reserved_and_disabled() -> None:
    mtp = load_contract(FLASH).terms["mtp"]
    assert mtp["enabled"] is False
    assert mtp["refusal"] == "FEATURE_UNSUPPORTED"
    assert mtp["reserved_tensors"] == {
        "mtp.hidden": {"dtype": "f32", "shape": [-1, 4, 4096]},
        "mtp.draft_token_ids": {"dtype": "i32", "shape": [-1]},
    }


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    for file in contracts._folder().iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr(contracts, "_folder", lambda: tmp_path)
    return tmp_path


def refusal(name: str) -> str:
    with pytest.raises(MeshnetError) as caught:
        load_contract(name)
    assert caught.value.reason == errors_pb2.REASON_CONFIGURATION_INVALID
    return caught.value.message


def test_changed_contract_is_refused(folder: pathlib.Path) -> None:
    file = folder / f"{TINY}.json"
    file.write_bytes(file.read_bytes().replace(b'"expert_count": 16', b'"expert_count": 17'))
    assert "expected the locked" in refusal(TINY)


def test_malformed_contract_is_refused(folder: pathlib.Path) -> None:
    terms: dict[str, Any] = json.loads((folder / f"{TINY}.json").read_text())
    terms["mtp"]["enabled"] = True
    content = json.dumps(terms).encode()
    (folder / f"{TINY}.json").write_bytes(content)
    lock = json.loads((folder / "lock.json").read_text())
    lock[TINY] = hashlib.sha256(content).hexdigest()
    (folder / "lock.json").write_text(json.dumps(lock))
    assert refusal(TINY) == f"the contract {TINY} is malformed: False was expected"


def test_unknown_contract_is_refused() -> None:
    assert refusal("../lock") == f"expected a contract of {FLASH}, {TINY}, got '../lock'"
