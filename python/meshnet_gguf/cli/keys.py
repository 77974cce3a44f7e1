"""Makes Ed25519 keys, and shows the ids of keys.

    meshnet keys make certifier.pem
    meshnet keys show certifier.pem.pub

`make` writes the private key (readable by its owner only) and, beside it with .pub, the public one,
which trackers are given as --trusted_key. Keys sign certification records and route tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from absl import app
from meshnet.signing import SigningKey, TrustedKeys

from meshnet_gguf.cli import output

__all__ = ["ACTIONS", "run"]

ACTIONS = ("make", "show")


def run(arguments: Sequence[str]) -> int:
    """The command."""
    if len(arguments) != 2 or arguments[0] not in ACTIONS:
        raise app.UsageError(f"expected make FILE or show FILE, got {' '.join(arguments)!r}")
    path = output.given_path(arguments[1])
    with output.control_errors():
        if arguments[0] == "make":
            key = SigningKey.generate()
            key.save(path)
            ids = [key.key_id]
        else:
            ids = sorted(TrustedKeys.load([path]).keys)
    if output.wants_json():
        output.print_json({"key_ids": ids})
    else:
        sys.stdout.write("".join(f"{name}\n" for name in ids))
    return 0
