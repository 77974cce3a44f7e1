"""Evidence records: a model's run over a chain of workers, and what the run is evidence of.

    subject = identify(path, "deepseek-v4-flash")
    record = await collect(subject, plan, stages=4)
    write(record, target)

The class of a record is its contract's: a model that satisfies the contract of the real checkpoint
gives `real-model`, a generated one `fixture`, and there is no other way to either: a name plays no
part in it. A record is what
a certification is signed over; it lights no lane by itself.
"""

from __future__ import annotations

import datetime
import json
import pathlib
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from meshnet_gguf.contract import Contract, load_contract, require_contract
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.gguf_file import Model, read_model
from meshnet_gguf.inventory import take_inventory
from meshnet_gguf.machine import machine_facts
from meshnet_gguf.manifest import read_manifest
from meshnet_gguf.measurement import Plan, is_identical, measure
from proto.meshnet.shard.v1 import errors_pb2

__all__ = ["SCHEMA", "Subject", "collect", "identify", "wanted", "write"]

SCHEMA = "meshnet.evidence/1"


@dataclass(frozen=True)
class Subject:
    """A model that has been found to be the one of a contract."""

    contract: Contract
    model: Model

    @property
    def path(self) -> pathlib.Path:
        """The model's file, or the first of its split set."""
        return self.model.files[0].path


def wanted(contract: Contract) -> str:
    """The weights that a contract is about, in words."""
    source = contract.terms["source"]
    origin = ", ".join(f"{name} {value}" for name, value in sorted(source.items()))
    return (
        f"a GGUF file or split set, however quantised, of the contract {contract.name} "
        f"({origin}; {contract.terms['layers']['main']} main layers)"
    )


def identify(path: pathlib.Path, contract_name: str) -> Subject:
    """The model at `path`, if it is the one of the contract.

    Raises MeshnetError: CONFIGURATION_INVALID for the contract, ARTIFACT_UNREADABLE saying which
    weights are missing, ARTIFACT_INVALID, ARTIFACT_MISMATCH with every difference.
    """
    contract = load_contract(contract_name)
    try:
        model = read_model(path)
    except MeshnetError as error:
        if error.reason != errors_pb2.REASON_ARTIFACT_UNREADABLE:
            raise
        raise MeshnetError(
            error.reason, f"the weights are missing: {error.message}; wanted is {wanted(contract)}"
        ) from error
    require_contract(contract, model, take_inventory(model))
    return Subject(contract, model)


async def collect(
    subject: Subject,
    plan: Plan,
    *,
    stages: int | None = None,
    threads: int = 0,
    manifest: pathlib.Path | None = None,
    expected_artifact_sha256: str = "",
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Runs chain and whole model by `plan`, one after the other, and makes the record of it.

    Raises MeshnetError; ARTIFACT_MISMATCH when the workers loaded another artifact than expected.
    """
    started = _now()
    results = await measure(
        subject.path, plan, stages=stages, threads=threads, manifest=manifest, say=say
    )
    workers = results["workers"]
    if any(worker["engine"] != "llama" for worker in workers):
        raise MeshnetError(
            errors_pb2.REASON_CONFIGURATION_INVALID,
            "expected workers with the llama engine: a fixture engine is evidence of no model",
        )
    artifact = str(workers[0]["artifact_sha256"])
    if expected_artifact_sha256 not in ("", artifact):
        raise MeshnetError(
            errors_pb2.REASON_ARTIFACT_MISMATCH,
            f"expected the artifact {expected_artifact_sha256}, the workers loaded {artifact}; "
            "give the files that are meant, or leave the expectation out",
        )
    return {
        "schema": SCHEMA,
        "class": subject.contract.evidence_class,
        # Nothing but a signed certification makes it anything else.
        "lane": "dark",
        "outcome": "identical" if is_identical(results) else "different",
        "started": started,
        "finished": _now(),
        "contract": {"name": subject.contract.name, "sha256": subject.contract.sha256},
        "artifact": {
            "sha256": artifact,
            "name": subject.model.metadata.get("general.name"),
            "manifest": manifest.name if manifest else None,
            # Where the file's weights come from, as far as somebody has bound it to their hash.
            "origin": asdict(read_manifest(manifest).origin) if manifest else None,
            "files": [
                {"name": file.path.name, "bytes": file.bytes} for file in subject.model.files
            ],
        },
        "recipe": workers[0]["recipe"],
        "recipe_fingerprint": workers[0]["recipe_fingerprint"],
        "machine": machine_facts(),
        "plan": asdict(plan),
        "results": results,
    }


def write(record: Mapping[str, Any], target: pathlib.Path) -> None:
    """Writes a record, wholly or not at all.

    Raises MeshnetError (CONFIGURATION_INVALID) when it cannot be written there.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=target.parent, prefix=target.name, delete=False
        ) as file:
            file.write(json.dumps(record, indent=2, sort_keys=True) + "\n")
        pathlib.Path(file.name).replace(target)
    except OSError as error:
        raise MeshnetError(
            errors_pb2.REASON_CONFIGURATION_INVALID,
            f"cannot write the record {target}: {error}; name a file that can be written",
        ) from error


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
