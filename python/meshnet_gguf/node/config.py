"""A node's YAML file: node.sample.yaml shows all of it, node.schema.json says what is allowed.

    config = load_config(pathlib.Path("node.yaml"))

A key that is not in the schema, one that is there twice, or a value out of its bounds refuses the
file, with the place.
"""

from __future__ import annotations

import importlib.resources
import json
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from meshnet.transport import Security, TlsFiles

from meshnet_gguf.client import LayerRange
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.strict_yaml import read_file, read_yaml
from proto.meshnet.shard.v1 import errors_pb2

__all__ = ["NodeConfig", "Supervision", "load_config", "parse_config"]

# What the node itself tells the worker.
_OWN_FLAGS: Final = frozenset(
    {
        "artifact_sha256",
        "die_with_parent",
        "engine",
        "insecure",
        "layers",
        "listen",
        "manifest",
        "model",
        "parent_pid",
        "port_file",
        "recipe_fingerprint",
        "relay",
        "relay_peer_id",
        "route_token_keys",
        "tls_ca",
        "tls_cert",
        "tls_key",
        "worker_id",
    }
)


@dataclass(frozen=True)
class Supervision:
    """How a worker is watched and restarted, milliseconds."""

    ready_within_ms: int = 600_000
    probe_every_ms: int = 500
    probe_timeout_ms: int = 2_000
    probe_failures: int = 2
    backoff_first_ms: int = 500
    backoff_most_ms: int = 30_000
    stable_after_ms: int = 60_000
    drain_ms: int = 30_000


@dataclass(frozen=True)
class NodeConfig:
    """What one node is started with."""

    node_id: str
    folder: pathlib.Path
    trackers: tuple[str, ...]
    model_id: str
    model_file: pathlib.Path | None = None
    manifest: pathlib.Path | None = None
    sources: tuple[str, ...] = ()
    storage: pathlib.Path | None = None
    sources_ca: pathlib.Path | None = None
    layers: LayerRange | None = None
    artifact_sha256: str = ""
    recipe_fingerprint: str = ""
    engine: str = "llama"
    binary: pathlib.Path | None = None
    binary_sha256: str = ""
    worker_listen: str = "127.0.0.1:0"
    worker_advertise: str = ""
    worker_relay: str = ""
    route_token_keys: pathlib.Path | None = None
    worker_flags: Mapping[str, str] = field(default_factory=dict)
    listen: str = "127.0.0.1:0"
    advertise: str = ""
    metrics_listen: str = ""
    uplink_bytes_per_second: int = 0
    keep_logs: int = 10
    tracker_timeout_ms: int = 5_000
    security: Security = Security()  # noqa: RUF009 - immutable
    supervision: Supervision = field(default_factory=Supervision)
    measure_every_ms: int = 60_000
    measure_bytes: int = 1 << 20


def load_config(path: pathlib.Path) -> NodeConfig:
    """Reads a file. Raises MeshnetError (CONFIGURATION_INVALID)."""
    content = read_file(path)
    try:
        return parse_config(content, base=path.absolute().parent)
    except MeshnetError as error:
        raise _invalid(f"{path}: {error.message}") from error


def parse_config(content: bytes | str, base: pathlib.Path) -> NodeConfig:
    """Checks a file's content; its relative paths start at `base`.

    Raises MeshnetError (CONFIGURATION_INVALID) with the place of what is wrong.
    """
    folder = importlib.resources.files("meshnet_gguf.node")
    schema = json.loads(folder.joinpath("node.schema.json").read_bytes())
    values = read_yaml(content, schema)
    return _config(values, base)


def _config(values: Mapping[str, Any], base: pathlib.Path) -> NodeConfig:
    node, model, tracker = values["node"], values["model"], values["tracker"]
    worker, measurement = values.get("worker", {}), values.get("measurement", {})
    layers = None
    if "layers" in model:
        layers = LayerRange(*model["layers"])
        if layers.begin >= layers.end:
            raise _invalid(f"model.layers: expected a range that is not empty, got {layers}")
    for section, part in (("worker", worker), ("node", node)):
        if part.get("listen", "").startswith(("0.0.0.0:", "[::]:")) and "advertise" not in part:
            raise _invalid(
                f"{section}.advertise: expected where others dial what listens on all addresses"
            )
    engine = worker.get("engine", "llama")
    if (engine == "llama") != (("file" in model) != ("manifest" in model)):
        raise _invalid(
            "model: expected either file or manifest for the engine llama, and none for fake"
        )
    if len({name in model for name in ("manifest", "sources", "storage")}) != 1 or (
        "sources_ca" in model and "manifest" not in model
    ):
        raise _invalid("model: expected manifest, sources and storage together")
    flags = {name: _flag(value) for name, value in worker.get("flags", {}).items()}
    if own := sorted(flags.keys() & _OWN_FLAGS):
        raise _invalid(f"worker.flags: {', '.join(own)} follow from the rest of the file")
    supervision = Supervision(**values.get("supervision", {}))
    if supervision.backoff_first_ms > supervision.backoff_most_ms:
        raise _invalid("supervision: expected backoff_first_ms of at most backoff_most_ms")
    tls = None
    if "tls" in values:
        tls = TlsFiles(
            *(base / values["tls"][name] for name in ("certificate", "key", "authority"))
        )
    binary = worker.get("binary")
    token_keys = worker.get("route_token_keys")
    paths = {
        name: base / model[name] if name in model else None
        for name in ("file", "manifest", "storage", "sources_ca")
    }
    return NodeConfig(
        node_id=node["id"],
        folder=base / node["folder"],
        trackers=tuple(tracker["endpoints"]),
        model_id=model["id"],
        model_file=paths["file"],
        manifest=paths["manifest"],
        sources=tuple(
            place if "://" in place else str(base / place) for place in model.get("sources", [])
        ),
        storage=paths["storage"],
        sources_ca=paths["sources_ca"],
        layers=layers,
        artifact_sha256=model.get("artifact_sha256", ""),
        recipe_fingerprint=model.get("recipe_fingerprint", ""),
        engine=engine,
        binary=None if binary is None else base / binary,
        binary_sha256=worker.get("binary_sha256", ""),
        worker_listen=worker.get("listen", "127.0.0.1:0"),
        worker_advertise=worker.get("advertise", ""),
        worker_relay=worker.get("relay", ""),
        route_token_keys=base / token_keys if token_keys else None,
        worker_flags=flags,
        listen=node.get("listen", "127.0.0.1:0"),
        advertise=node.get("advertise", ""),
        metrics_listen=node.get("metrics_listen", ""),
        uplink_bytes_per_second=node.get("uplink_bytes_per_second", 0),
        keep_logs=node.get("keep_logs", 10),
        tracker_timeout_ms=tracker.get("timeout_ms", 5_000),
        security=Security(tls, values.get("insecure", False)),
        supervision=supervision,
        measure_every_ms=measurement.get("every_ms", 60_000),
        measure_bytes=measurement.get("payload_bytes", 1 << 20),
    )


def _flag(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _invalid(message: str) -> MeshnetError:
    return MeshnetError(errors_pb2.REASON_CONFIGURATION_INVALID, message)
