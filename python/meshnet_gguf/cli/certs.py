"""Makes the certificates by which the programs of a mesh know each other.

    meshnet certs init mesh-ca                              # an authority in this folder
    meshnet certs issue mesh-ca worker-a --host=10.0.0.5    # mesh-ca/worker-a.pem and .key
    meshnet certs show mesh-ca/worker-a.pem
    meshnet certs rotate mesh-ca                            # a new authority beside the old one
    meshnet certs retire mesh-ca                            # the old one is trusted no more

Trackers, relays, nodes and workers are given a certificate, its key and authorities.pem as
--tls_cert, --tls_key and --tls_ca. NAME is what the program is known by: the worker's id at a
relay, for example. To replace an authority: rotate, and bring authorities.pem to all machines;
issue every certificate anew; retire, and bring authorities.pem to all machines again. All of them
take up changed files with the next connection; what is open stays open.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from absl import app, flags
from meshnet.certificates import Authority, CertificateFacts, describe
from meshnet.errors import ControlError

from meshnet_gguf.cli import output
from meshnet_gguf.errors import MeshnetError
from proto.meshnet.shard.v1 import errors_pb2

__all__ = ["ACTIONS", "run"]

# With so many arguments, itself included.
ACTIONS = {"init": 2, "issue": 3, "rotate": 2, "retire": 2, "show": 2}

_HOST = flags.DEFINE_multi_string(
    "host", [], "Name by which others dial a program; issue: DNS or IP; repeatable."
)
_DAYS = flags.DEFINE_integer(
    "days",
    None,
    "Days of life of what is made; unless set, 3650 for an authority and 90 for a certificate.",
    lower_bound=1,
)


def run(arguments: Sequence[str]) -> int:
    """The command."""
    if not arguments or ACTIONS.get(arguments[0]) != len(arguments):
        raise app.UsageError(
            "expected init FOLDER, issue FOLDER NAME, rotate FOLDER, retire FOLDER or show FILE, "
            f"got {' '.join(arguments)!r}"
        )
    try:
        return _run(arguments)
    except (ControlError, OSError) as error:
        message = error.message if isinstance(error, ControlError) else str(error)
        raise MeshnetError(errors_pb2.REASON_CONFIGURATION_INVALID, message) from error


def _run(arguments: Sequence[str]) -> int:
    action, path = arguments[0], output.given_path(arguments[1])
    of_authority, of_certificate = _DAYS.value or 3650, _DAYS.value or 90
    written = [path / "authorities.pem"]
    if action == "init":
        Authority.create(path, days=of_authority)
    elif action == "issue":
        written = list(Authority.load(path).issue(arguments[2], _HOST.value, of_certificate))
    elif action == "rotate":
        Authority.load(path).rotate(of_authority)
    elif action == "retire":
        Authority.load(path).retire()
    else:
        written = []
    facts = describe((written[0] if written else path).read_bytes())
    if output.wants_json():
        output.print_json(
            {
                "written": [str(file) for file in written],
                "certificates": [_as_json(item) for item in facts],
            }
        )
        return 0
    for file in written:
        sys.stdout.write(f"wrote {file}\n")
    for item in facts:
        kind = "authority" if item.is_authority else "certificate"
        names = f" ({', '.join(item.names)})" if item.names else ""
        sys.stdout.write(
            f"{kind} {item.common_name}{names}, issued by {item.issuer}, "
            f"until {item.expires:%Y-%m-%d}, serial {item.serial}\n"
        )
    return 0


def _as_json(item: CertificateFacts) -> dict[str, object]:
    return vars(item) | {"expires": item.expires.isoformat(), "names": list(item.names)}
