"""Makes, lists and removes the API keys of a gateway.

    meshnet api-keys add keys.json alice --requests-per-minute 60
    meshnet api-keys list keys.json
    meshnet api-keys remove keys.json alice

The file holds hashes alone: a key is shown once, when it is made. A gateway that runs with
--api-keys keys.json sees changes at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from absl import app, flags

from meshnet_gguf.cli import output
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.gateway.admission import KeyLimits
from meshnet_gguf.gateway.api_keys import ApiKeys
from proto.meshnet.shard.v1 import errors_pb2

__all__ = ["ACTIONS", "run"]

ACTIONS = {"add": 3, "list": 2, "remove": 3}  # with so many arguments, itself included

_ACTIVE = flags.DEFINE_integer(
    "max_active", 0, "Answers at once with this key, 0 = no limit.", lower_bound=0
)
_PER_MINUTE = flags.DEFINE_integer(
    "requests_per_minute", 0, "Requests a minute with this key, 0 = no limit.", lower_bound=0
)


def run(arguments: Sequence[str]) -> int:
    """The command."""
    if not arguments or ACTIONS.get(arguments[0]) != len(arguments):
        raise app.UsageError(
            f"expected add FILE NAME, list FILE or remove FILE NAME, got {' '.join(arguments)!r}"
        )
    action, file = arguments[0], output.given_path(arguments[1])
    keys = ApiKeys(file)
    if action == "add":
        secret = keys.add(arguments[2], KeyLimits(_ACTIVE.value, _PER_MINUTE.value))
        _answer({"name": arguments[2], "key": secret}, f"{secret}\n")
    elif action == "remove":
        keys.remove(arguments[2])
        _answer({"removed": arguments[2]}, "")
    else:
        if not file.exists():
            raise MeshnetError(
                errors_pb2.REASON_CONFIGURATION_INVALID,
                f"expected a file of API keys, there is no {file}; "
                f"`meshnet api-keys add {arguments[1]} NAME` makes it",
            )
        found = [{"name": key.name, **vars(key.limits)} for key in keys.all()]
        _answer({"keys": found}, "".join(f"{key['name']}\n" for key in found))
    return 0


def _answer(value: dict[str, object], text: str) -> None:
    if output.wants_json():
        output.print_json(value)
    else:
        sys.stdout.write(text)
