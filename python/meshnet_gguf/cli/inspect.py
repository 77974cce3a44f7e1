"""Shows what a model consists of, what each stage of a split would own, and where it may be cut.

    meshnet inspect model.gguf
    meshnet inspect model-00001-of-00003.gguf --cuts 3,6 --json
    meshnet inspect model.gguf --stages 4 --svg layers.svg
    meshnet inspect model.gguf --contract deepseek-v4-flash --manifest manifest.json --json

Takes one GGUF file, or any part of a split set. Reads headers alone, so a model of any size takes
moments. A tensor that no class covers, or one that the architecture requires and the file lacks,
is an error. With --contract, so is a model other than the one that is meant, with --manifest one
whose headers are not the manifest's; the report then names the checkpoint and the exact artifact.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import rich.box
import rich.console
import rich.table
from absl import app, flags

from meshnet_gguf import inventory_picture
from meshnet_gguf.cli import output
from meshnet_gguf.contract import Contract, load_contract, require_contract
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.gguf_file import Model, read_model
from meshnet_gguf.inventory import Inventory, Layer, even_split, take_inventory
from meshnet_gguf.manifest import Manifest, check_headers, read_manifest
from proto.meshnet.shard.v1 import errors_pb2

__all__ = ["run"]

_CUTS = flags.DEFINE_list(
    "cuts", [], "Layers at which stages after the first begin, such as 12,30 for three stages."
)
_STAGES = flags.DEFINE_integer(
    "stages", None, "Number of stages; of about equal bytes.", lower_bound=1
)
_SVG = flags.DEFINE_string("svg", None, "File for a picture of the result.")

_CONTRACT = flags.DEFINE_string("contract", None, "Contract of the model; any other is refused.")

_MANIFEST = flags.DEFINE_string("manifest", None, "Manifest of the artifact; any other is refused.")

_Split = tuple[tuple[int, int], ...]


def run(arguments: Sequence[str]) -> int:
    """The command."""
    if len(arguments) != 1:
        raise app.UsageError(f"expected one GGUF file, got {len(arguments)}")
    if _CUTS.value and _STAGES.value:
        raise app.UsageError("expected --cuts or --stages, got both")
    model = read_model(output.given_path(arguments[0]))
    inventory = take_inventory(model)
    contract = load_contract(_CONTRACT.value) if _CONTRACT.value else None
    if contract:
        require_contract(contract, model, inventory)
    manifest = read_manifest(output.given_path(_MANIFEST.value)) if _MANIFEST.value else None
    if manifest:
        check_headers(manifest, model)
    if _STAGES.value:
        cuts = [begin for begin, _ in even_split(inventory, _STAGES.value)[1:]]
    else:
        cuts = _layers_of(_CUTS.value)
    split = split_at(inventory, cuts)
    if _SVG.value:
        output.given_path(_SVG.value).write_text(
            inventory_picture.render(inventory, split), encoding="utf-8"
        )
    if output.wants_json():
        output.print_json(report(model, inventory, split, contract, manifest))
    else:
        print_report(model, inventory, split, rich.console.Console(highlight=False))
    return 0


def split_at(inventory: Inventory, cuts: Sequence[int]) -> _Split:
    """The stages that begin at 0 and at the given, ascending layers.

    Raises MeshnetError: LAYER_RANGE_INVALID for a cut that is not allowed.
    """
    known = {cut.at: cut for cut in inventory.cuts}
    for at in cuts:
        cut = known.get(at)
        if cut is None or not cut.allowed:
            reason = cut.reason if cut else f"the model has {inventory.main_layers} layers"
            raise MeshnetError(
                errors_pb2.REASON_LAYER_RANGE_INVALID, f"it cannot be cut at {at}: {reason}"
            )
    return tuple(itertools.pairwise([0, *cuts, inventory.main_layers]))


def _layers_of(cuts: Sequence[str]) -> list[int]:
    if not all(cut.isascii() and cut.isdecimal() and len(cut) < 10 for cut in cuts):
        raise app.UsageError(f"expected layers such as 12,30, got {','.join(cuts)}")
    layers = [int(cut) for cut in cuts]
    if layers != sorted(set(layers)):
        raise app.UsageError(f"expected ascending layers, got {','.join(cuts)}")
    return layers


def report(
    model: Model,
    inventory: Inventory,
    split: _Split,
    contract: Contract | None = None,
    manifest: Manifest | None = None,
) -> dict[str, Any]:
    """What --json prints. Sizes are bytes, layer ranges half-open."""
    return {
        "contract": contract
        and {"name": contract.name, "sha256": contract.sha256, "source": contract.terms["source"]},
        "artifact": manifest
        and {"sha256": manifest.artifact_sha256, "origin": dataclasses.asdict(manifest.origin)},
        "files": [{"name": file.path.name, "bytes": file.bytes} for file in model.files],
        "architecture": inventory.architecture,
        "main_layers": inventory.main_layers,
        "mtp_layers": len(inventory.layers) - inventory.main_layers,
        "tied_output": inventory.has_tied_output,
        "tensor_bytes": inventory.total_bytes,
        "class_bytes": {str(kind): total for kind, total in inventory.class_bytes().items()},
        "layers": [
            {
                "index": layer.index,
                "attention": layer.attention,
                "routing": layer.routing,
                "states": list(layer.states),
                "mtp": layer.is_mtp,
                "bytes": layer.bytes,
            }
            for layer in inventory.layers
        ],
        "stages": [
            {"layers": list(layers), "bytes": inventory.stage_bytes(layers)} for layers in split
        ],
        "cuts": [
            {
                "at": cut.at,
                "allowed": cut.allowed,
                "restrictions": list(cut.restrictions),
                "reason": cut.reason,
            }
            for cut in inventory.cuts
        ],
        "ranges": [
            {"layers": list(layers), "bytes": size} for layers, size in inventory.candidate_ranges()
        ],
        "tensors": [
            {
                "name": item.tensor.name,
                "class": str(item.kind),
                "layer": item.layer,
                "stages": list(inventory.owners(item, split)),
                "type": item.tensor.type_name,
                "ne": list(item.tensor.ne),
                "file": item.tensor.file,
                "offset": item.tensor.offset,
                "bytes": item.tensor.bytes,
            }
            for item in inventory.items
        ],
    }


def print_report(
    model: Model, inventory: Inventory, split: _Split, console: rich.console.Console
) -> None:
    """The tables for people."""
    mtp = len(inventory.layers) - inventory.main_layers
    console.print(
        f"{model.architecture!a}: {inventory.main_layers} layers"
        f"{f' and {mtp} of MTP' * bool(mtp)}, "
        f"{len(inventory.items)} tensors, {_size(inventory.total_bytes)} "
        f"in {len(model.files)} file{'s' * (len(model.files) > 1)}",
        markup=False,
    )
    table = _table("class", "bytes")
    for kind, total in inventory.class_bytes().items():
        table.add_row(str(kind), _size(total))
    console.print(table)

    table = _table("layers", "attention", "routing", "bytes each", "keeps of a session")
    kinds: dict[tuple[str, str, bool], list[Layer]] = {}
    for layer in inventory.layers:
        kinds.setdefault((layer.attention, layer.routing, layer.is_mtp), []).append(layer)
    for (attention, routing, is_mtp), layers in kinds.items():
        sizes = {layer.bytes for layer in layers}
        table.add_row(
            _spans([layer.index for layer in layers]) + " (MTP)" * is_mtp,
            attention,
            routing,
            " to ".join(dict.fromkeys([_size(min(sizes)), _size(max(sizes))])),
            ", ".join(layers[0].states),
        )
    console.print(table)

    table = _table("stage", "layers", "bytes")
    for stage, (begin, end) in enumerate(split):
        table.add_row(str(stage), f"[{begin}, {end})", _size(inventory.stage_bytes((begin, end))))
    console.print(table)
    for line in _cut_lines(inventory):
        console.print(line, markup=False)


def _cut_lines(inventory: Inventory) -> list[str]:
    free = [cut.at for cut in inventory.cuts if cut.allowed and not cut.restrictions]
    restricted = [cut for cut in inventory.cuts if cut.allowed and cut.restrictions]
    lines = [f"may be cut at: {_spans(free)}"]
    if restricted:
        names = sorted({name for cut in restricted for name in cut.restrictions})
        lines.append(
            f"with {', '.join(names)} for the stage behind: {_spans([c.at for c in restricted])}"
        )
    refused = [cut for cut in inventory.cuts if not cut.allowed]
    for reason, cuts in itertools.groupby(refused, key=lambda cut: cut.reason):
        lines.append(f"not at {_spans([cut.at for cut in cuts])}: {reason}")
    return lines


def _spans(numbers: Sequence[int]) -> str:
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    text = ", ".join(f"{a}-{b}" if a < b else str(a) for a, b in spans)
    return text or "nowhere"


def _table(*titles: str) -> rich.table.Table:
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for title in titles:
        if title.startswith("bytes"):
            table.add_column(title, justify="right", no_wrap=True)
        else:
            table.add_column(title, overflow="fold")
    return table


def _size(size: int) -> str:
    value = float(size)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
