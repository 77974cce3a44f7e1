"""What a command is started with beside its command line: a settings file and the environment.

    apply("serve", ["listen", "stages"], COMMANDS, os.environ)

A flag's value comes from the command line, else from $MESHNET_SERVE_LISTEN, else $MESHNET_LISTEN,
else from the settings file, where a command's own section goes before `all`:

    all:
      tls-ca: /etc/meshnet/authorities.pem
    serve:
      listen: 127.0.0.1:9000
      join: [10.0.0.5:7100, 10.0.0.6:7100]

The file is $MESHNET_SETTINGS, else meshnet/settings.yaml in $XDG_CONFIG_HOME or ~/.config, which
may be missing.
"""

from __future__ import annotations

import pathlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

from absl import flags

from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.strict_yaml import read_file, read_yaml
from proto.meshnet.shard.v1 import errors_pb2

__all__ = ["apply", "settings_file"]

_VARIABLE: Final = "MESHNET_SETTINGS"
_ALL: Final = "all"
_SCALAR: Final = {"type": ["string", "number", "boolean"]}
_SECTION: Final = {
    "type": ["object", "null"],
    "propertyNames": {"pattern": "^[a-z][a-z0-9_-]*$"},
    "additionalProperties": {"anyOf": [_SCALAR, {"type": "array", "items": _SCALAR}]},
}


def settings_file(environment: Mapping[str, str]) -> pathlib.Path | None:
    """Where the settings are; None where there are none and nobody said that there are."""
    named = environment.get(_VARIABLE)
    if named:
        return pathlib.Path(named)
    home = environment.get("XDG_CONFIG_HOME") or environment.get("HOME", "") + "/.config"
    path = pathlib.Path(home) / "meshnet" / "settings.yaml"
    return path if path.is_absolute() and path.is_file() else None


def apply(
    command: str, names: Collection[str], commands: Collection[str], environment: Mapping[str, str]
) -> None:
    """Makes settings the defaults of a command's flags, whose names are with underscores.

    Raises MeshnetError (CONFIGURATION_INVALID) with the place of what is wrong.
    """
    for name, value, place in (
        *_of_file(command, names, commands, environment),
        *_of_environment(command, names, environment),
    ):
        flag = flags.FLAGS[name]
        given: Any = value
        if isinstance(value, bool):
            given = str(value).lower()
        elif not isinstance(value, list):
            given = str(value)
        if isinstance(flag, flags.MultiFlag) and not isinstance(given, list):
            given = [given]
        try:
            flags.FLAGS.set_default(name, given)
        except flags.Error as error:
            raise _invalid(f"{place}: {error}") from error


def _of_file(
    command: str, names: Collection[str], commands: Collection[str], environment: Mapping[str, str]
) -> Iterator[tuple[str, object, str]]:
    path = settings_file(environment)
    if path is None:
        return
    schema = {
        "type": ["object", "null"],
        "properties": dict.fromkeys((_ALL, *commands), _SECTION),
        "additionalProperties": False,
    }
    try:
        sections = read_yaml(read_file(path), schema) or {}
    except MeshnetError as error:
        raise _invalid(f"{path}: {error.message}") from error
    for section in (_ALL, command):
        for key, value in (sections.get(section) or {}).items():
            name = key.replace("-", "_")
            if name in names:
                yield name, value, f"{path}: {section}.{key}"
            elif section == command:
                raise _invalid(f"{path}: {section}.{key}: meshnet {command} has no such flag")


def _of_environment(
    command: str, names: Collection[str], environment: Mapping[str, str]
) -> Iterator[tuple[str, object, str]]:
    own = command.upper().replace("-", "_")
    for name in names:
        for variable in (f"MESHNET_{name.upper()}", f"MESHNET_{own}_{name.upper()}"):
            if variable in environment:
                yield name, environment[variable], f"${variable}"


def _invalid(message: str) -> MeshnetError:
    return MeshnetError(errors_pb2.REASON_CONFIGURATION_INVALID, message)
