"""Fakes of two kinds of backend, so different that whoever handles both knows neither.

Neither computes anything: they only make the registrations that such a backend's workers would.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from proto.meshnet.control.v1 import tracker_pb2 as pb

__all__ = ["FakeBackend", "FakeGgufBackend", "FakeTransformersBackend"]


class FakeBackend(Protocol):
    """What makes workers of one kind."""

    @property
    def units(self) -> int:
        """Of the whole model."""

    def workers(self, parts: int, **fields: Any) -> list[pb.RegisterRequest]:
        """A complete chain of them."""


def _request(
    name: str, span: tuple[int, int], base: dict[str, Any], fields: dict[str, Any]
) -> pb.RegisterRequest:
    values: dict[str, Any] = {
        "worker_id": name,
        "node_id": f"node-{name}",
        "endpoint": f"{name}.example:7000",
        "model_id": "model",
        "span": pb.Span(begin=span[0], end=span[1]),
        "max_sessions": 8,
    }
    return pb.RegisterRequest(
        registration=pb.Registration(**(values | base | fields)), load=pb.Load(ready=True)
    )


@dataclass(frozen=True)
class FakeGgufBackend:
    """Layers of one file, cut anywhere; the fingerprint is the hash of a recipe."""

    layers: int = 12
    quantisation: str = "Q4_K_M"

    @property
    def units(self) -> int:
        """Layers."""
        return self.layers

    def workers(self, parts: int, **fields: Any) -> list[pb.RegisterRequest]:
        """See FakeBackend."""
        recipe = {"artifact": "a" * 64, "kv": "f16", "quantisation": self.quantisation}
        base = {
            "fingerprint": hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest(),
            "model_units": self.layers,
            "step_us": 1000 * self.layers // parts,
            "labels": {"backend": "gguf", "quantisation": self.quantisation},
        }
        cuts = [self.layers * part // parts for part in range(parts + 1)]
        return [
            _request(f"gguf-{begin}", (begin, end), base, fields)
            for begin, end in itertools.pairwise(cuts)
        ]


@dataclass(frozen=True)
class FakeTransformersBackend:
    """Modules of a graph in eager mode: an embedding, blocks of several modules, norm and head.

    It counts modules, not layers, cuts only between blocks, and its fingerprint is a readable
    name of revision and device map rather than a hash.
    """

    blocks: int = 6
    modules_per_block: int = 7
    dtype: str = "bfloat16"

    @property
    def units(self) -> int:
        """Modules."""
        return 1 + self.blocks * self.modules_per_block + 2

    def _cuts(self, parts: int) -> Sequence[int]:
        inner = [1 + self.modules_per_block * (self.blocks * p // parts) for p in range(1, parts)]
        return [0, *inner, self.units]

    def workers(self, parts: int, **fields: Any) -> list[pb.RegisterRequest]:
        """See FakeBackend."""
        base = {
            "fingerprint": f"eager:rev-1.2:{self.dtype}:sdpa",
            "model_units": self.units,
            "step_us": 18_000 // parts,
            "labels": {"backend": "transformers", "device_map": "sequential"},
        }
        cuts = self._cuts(parts)
        return [
            _request(f"eager-{begin}", (begin, end), base, fields)
            for begin, end in itertools.pairwise(cuts)
        ]
