"""Target contracts: which checkpoint is meant, and how another one is recognised and refused.

    contract = load_contract("deepseek-v4-flash")
    differences(contract, model, take_inventory(model))    # [] for the model that is meant

A contract is a data file in contracts/, in the form of contract.schema.json. Its bytes are locked
by hash in contracts/lock.json: what a model is measured against never changes silently. A contract
of class `fixture` is for generated models, and evidence under it is fixture evidence.

Generated models say so by a key of their own, FIXTURE_KEY, whatever they are called: a contract of
class `fixture` takes none without it, any other contract none with it.

Nothing in a contract depends on how the numbers are stored, so every quantisation of a checkpoint
satisfies it. GGUF files do not prove where their weights come from; which artifact was meant is
settled by its manifest's hash in the evidence.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jsonschema

from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.gguf_file import Model
from meshnet_gguf.inventory import Inventory
from proto.meshnet.shard.v1 import errors_pb2

__all__ = [
    "FIXTURE_KEY",
    "Contract",
    "contract_names",
    "differences",
    "load_contract",
    "require_contract",
]

FIXTURE_KEY = "meshnet.fixture"
"""In the metadata of models that were generated: the shape they were made in."""

_FLOAT_TOLERANCE = 1e-6  # GGUF stores 32-bit numbers


@dataclass(frozen=True)
class Contract:
    """A contract's content, as its schema describes it, and the hash of its file."""

    name: str
    sha256: str
    terms: Mapping[str, Any]

    @property
    def evidence_class(self) -> str:
        """What a run under the contract is evidence of: real-model or fixture."""
        return str(self.terms["evidence_class"])


def contract_names() -> tuple[str, ...]:
    """All contracts."""
    return tuple(sorted(_lock()))


def load_contract(name: str) -> Contract:
    """A contract by its name.

    Raises MeshnetError: CONFIGURATION_INVALID for an unknown name, and for a file that is not the
    locked one.
    """
    locked = _lock().get(name)
    if locked is None:
        raise _configuration(f"expected a contract of {', '.join(contract_names())}, got {name!r}")
    content = _folder().joinpath(f"{name}.json").read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != locked:
        raise _configuration(
            f"the contract {name} has the SHA-256 {found}, expected the locked {locked}; "
            "restore the file, or lock the new one with its reason"
        )
    terms = json.loads(content)
    schema = json.loads(_folder().joinpath("contract.schema.json").read_bytes())
    try:
        jsonschema.validate(terms, schema)
    except jsonschema.ValidationError as error:
        raise _configuration(f"the contract {name} is malformed: {error.message}") from error
    return Contract(name, found, terms)


def require_contract(contract: Contract, model: Model, inventory: Inventory) -> None:
    """Raises MeshnetError (ARTIFACT_MISMATCH) for a model other than the one that is meant."""
    found = differences(contract, model, inventory)
    if found:
        raise MeshnetError(
            errors_pb2.REASON_ARTIFACT_MISMATCH,
            f"the model is not the one of the contract {contract.name}: {'; '.join(found)}",
        )


def differences(contract: Contract, model: Model, inventory: Inventory) -> list[str]:
    """What tells the model from the one that is meant; known others by name first."""
    return list(_differences(contract.terms, model, inventory))


def _differences(terms: Mapping[str, Any], model: Model, inventory: Inventory) -> Iterator[str]:
    if terms["evidence_class"] == "fixture":
        if FIXTURE_KEY not in model.metadata:
            yield f"it is no generated fixture: those have the key {FIXTURE_KEY}"
    elif FIXTURE_KEY in model.metadata:
        yield f"it is a generated fixture (random weights), by its {FIXTURE_KEY}"
    for other in terms["others"]:
        if sign := _sign_of(other, model):
            yield f"it is {other['name']} ({other['why']}), by its {sign}"
    if model.architecture != terms["architecture"]:
        yield f"expected the architecture {terms['architecture']}, got {model.architecture!a}"
        return
    layers = terms["layers"]
    mtp = len(inventory.layers) - inventory.main_layers
    if inventory.main_layers != layers["main"] or mtp not in layers["mtp"]:
        yield (
            f"expected {layers['main']} main layers and {' or '.join(map(str, layers['mtp']))} of "
            f"MTP, got {inventory.main_layers} and {mtp}"
        )
    main = inventory.layers[: inventory.main_layers]
    if [layer.attention for layer in main] != layers["attention"]:
        yield "the kinds of attention lie on other layers"
    hashed = [layer.index for layer in main if layer.routing == "hash"]
    if hashed != layers["hash_routed"]:
        yield f"expected hash routing on the layers {layers['hash_routed']}, got {hashed}"
    for key, expected in terms["keys"].items():
        found = model.metadata.get(f"{terms['architecture']}.{key}")
        if not _is_equal(found, expected):
            yield f"expected {key} to be {expected}, got {found!a}"
    shapes = {item.tensor.name: item.tensor.ne for item in inventory.items}
    for name, ne in terms["tensors"].items():
        if shapes.get(name) != tuple(ne):
            yield f"expected {name} of {ne}, got {list(shapes.get(name, ()))}"


def _sign_of(other: Mapping[str, Any], model: Model) -> str:
    """By what the model is recognised as another one; empty when it is not."""
    if model.architecture in other.get("architectures", ()):
        return "architecture"
    for key in ("general.name", "general.basename", "general.finetune", "general.version"):
        value = str(model.metadata.get(key, "")).lower()
        if any(part in value for part in other.get("name_contains", ())):
            return key
    template = model.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        digest = hashlib.sha256(template.encode("utf-8", "surrogateescape")).hexdigest()
        if digest in other.get("chat_template_sha256", ()):
            return "chat template"
    name = other.get("tensor")
    if name and any(tensor.name == name for tensor in model.tensors):
        return f"tensor {name}"
    return ""


def _is_equal(found: object, expected: object) -> bool:
    if isinstance(expected, bool) or isinstance(found, bool):
        return found is expected
    if isinstance(expected, float) and isinstance(found, int | float):
        return abs(found - expected) <= _FLOAT_TOLERANCE * abs(expected)
    return found == expected


def _folder() -> Any:
    return importlib.resources.files("meshnet_gguf").joinpath("contracts")


def _lock() -> dict[str, str]:
    locked: dict[str, str] = json.loads(_folder().joinpath("lock.json").read_bytes())
    return locked


def _configuration(message: str) -> MeshnetError:
    return MeshnetError(errors_pb2.REASON_CONFIGURATION_INVALID, message)
