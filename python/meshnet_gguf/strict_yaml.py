"""YAML files of ours: plain values, every key once, in the form of a JSON Schema.

values = read_yaml(read_file(path), schema)
"""

from __future__ import annotations

import pathlib
from collections.abc import Hashable, Mapping
from typing import Any, Final

import jsonschema
import yaml

from meshnet_gguf.errors import MeshnetError
from proto.meshnet.shard.v1 import errors_pb2

__all__ = ["read_file", "read_yaml"]

_MAX_BYTES: Final = 1 << 20


class _UniqueKeys(yaml.SafeLoader):
    """Plain YAML values; a key that is there twice is a mistake, not an override."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable) or key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"expected every key once, got {key!r} again", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def read_file(path: pathlib.Path) -> bytes:
    """A file's content, at most 1 MiB of it. Raises MeshnetError (CONFIGURATION_INVALID)."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise _invalid(f"expected a readable file: {error}") from error
    if len(content) > _MAX_BYTES:
        raise _invalid(f"expected {path} of at most {_MAX_BYTES} bytes")
    return content


def read_yaml(content: bytes | str, schema: Mapping[str, Any]) -> Any:
    """A file's values.

    Raises MeshnetError (CONFIGURATION_INVALID) with the place of what is wrong.
    """
    try:
        values = yaml.load(content, Loader=_UniqueKeys)  # noqa: S506 - a safe loader
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise _invalid(f"expected YAML: {' '.join(str(error).split())}") from error
    try:
        problems = jsonschema.Draft202012Validator(schema).iter_errors(values)
        problem = jsonschema.exceptions.best_match(problems)
    except RecursionError as error:
        raise _invalid("expected YAML that is not nested as deeply") from error
    if problem is not None:
        place = ".".join(str(part) for part in problem.absolute_path) or "the file"
        raise _invalid(f"{place}: {problem.message[:300]}")
    return values


def _invalid(message: str) -> MeshnetError:
    return MeshnetError(errors_pb2.REASON_CONFIGURATION_INVALID, message)
