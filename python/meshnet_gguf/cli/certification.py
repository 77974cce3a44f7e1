"""Shows certification records, gives them to trackers, and tells whether they still hold.

    meshnet certification show lane.records --trusted-key certifier.pem.pub
    meshnet certification import lane.records --tracker 127.0.0.1:7100
    meshnet certification check lane.json --worker 127.0.0.1:7001
    meshnet certification check mixture.json --worker 127.0.0.1:7001,127.0.0.1:7002

A file holds one record a line. `show` says of each which lane it is for, what it says and whether a
key given with --trusted-key signed it; the exit code is 1 when one is not to be believed. `import`
gives the records to a tracker, which refuses those that none of its own trusted keys signed.
Importing again changes nothing. A record that revokes a lane is imported the same way.

`check` compares evidence that `meshnet certify` wrote with a worker of today and the contract of
today: another pin, patch stack, boundary, cache layout, backend build, hardware, driver or
threshold ends a certification. Every change is shown, and the exit code is 1. With --key and
--records a line that revokes the lane is added there. Evidence of a mixture of two lanes is
compared with a worker of each, the head's lane first.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from typing import Any

import grpc.aio
from absl import app, flags
from meshnet.certification import Certification, CertificationBook, Lane, issue, read_records
from meshnet.errors import ControlError, error_from_rpc
from meshnet.signing import SigningKey, TrustedKeys
from meshnet.transport import dial

from meshnet_gguf import certify, progress
from meshnet_gguf.cli import output, security_flags, terminal
from meshnet_gguf.client import WorkerClient
from meshnet_gguf.performance_contract import PerformanceContract, default_folder
from proto.meshnet.control.v1 import tracker_pb2, tracker_pb2_grpc

__all__ = ["ACTIONS", "FLAG_MODULES", "run"]

ACTIONS = ("show", "import", "check")

FLAG_MODULES = (security_flags.__name__,)

_TRACKER = flags.DEFINE_string(
    "tracker", "127.0.0.1:7100", "Trackers of the mesh, HOST:PORT; one of them."
)
_TRUSTED = flags.DEFINE_multi_string(
    "trusted_key", [], "PEM file of public keys that count; repeatable."
)
_WORKER = flags.DEFINE_list(
    "worker", [], "The worker of today, HOST:PORT, to check against; of a mixture one of each lane."
)
_LANE_CONTRACT = flags.DEFINE_string(
    "contract", None, "Contract of the model; another than this project's for lanes."
)
_SIGNING_KEY = flags.DEFINE_string(
    "key", None, "PEM file of the private key that signs; a revocation."
)
_REVOCATIONS = flags.DEFINE_string(
    "records", None, "File that gets signed records; the revocation as a line."
)
_TIMEOUT_SECONDS = 30.0


def run(arguments: Sequence[str]) -> int:
    """The command."""
    actions = {"show": _show, "import": _import}
    if len(arguments) < 2 or arguments[0] not in ACTIONS:
        raise app.UsageError(
            f"expected show, import or check with FILE..., got {' '.join(arguments)!r}"
        )
    with output.control_errors():
        if arguments[0] == "check":
            return _check(arguments[1:])
        records = [r for name in arguments[1:] for r in read_records(output.given_path(name))]
        return actions[arguments[0]](records)


def _show(records: Sequence[bytes]) -> int:
    trusted = TrustedKeys.load(output.given_path(name) for name in _TRUSTED.value)
    rows = [_row(record, CertificationBook(trusted)) for record in records]
    if output.wants_json():
        output.print_json({"records": rows})
    else:
        titles = tuple(rows[0]) if rows else ()
        shown = [tuple(map(str, row.values())) for row in rows]
        terminal.show(terminal.table(titles, shown) if rows else "no records")
    return 0 if all(row["trusted"] for row in rows) else 1


def _row(record: bytes, book: CertificationBook) -> dict[str, Any]:
    try:
        found, trusted = book.check(record), True
    except ControlError:
        found, trusted = Certification.decode(record), False
    return {
        "record_id": found.record_id,
        "model_id": found.lane.model_id,
        "fingerprint": found.lane.fingerprint,
        "head": found.mixture.head if found.mixture else "",
        "tail": found.mixture.tail if found.mixture else "",
        "status": found.status,
        "issued_ms": found.issued_ms,
        "expires_ms": found.expires_ms,
        "evidence_sha256": found.evidence_sha256,
        "key_id": found.key_id,
        "trusted": trusted,
    }


def _check(names: Sequence[str]) -> int:
    if not _WORKER.value:
        raise app.UsageError("expected --worker=HOST:PORT, whose recipe is that of today")
    if bool(_SIGNING_KEY.value) != bool(_REVOCATIONS.value):
        raise app.UsageError("expected --key and --records together")
    with progress.working(f"asking {' and '.join(_WORKER.value)}"):
        recipes = asyncio.run(_recipes_of(_WORKER.value))
    answers = []
    for name in names:
        record = certify.read_record(output.given_path(name))
        lanes = certify.recipes_in(record)
        if len(lanes) != len(recipes):
            raise app.UsageError(
                f"expected --worker with {len(lanes)} of HOST:PORT for {name}, got {len(recipes)}"
            )
        own = "lane.v1.yaml" if len(lanes) == 1 else "mixture.v1.yaml"
        contract = PerformanceContract.read(
            output.given_path(_LANE_CONTRACT.value)
            if _LANE_CONTRACT.value
            else default_folder() / own
        )
        changes = certify.stale(record, recipes, contract)
        answers.append({"evidence": name, "changes": [vars(change) for change in changes]})
        if not output.wants_json():
            print(f"{name}: {'ended' if changes else 'holds'}")
            print("".join(f"  {change}\n" for change in changes), end="")
        if changes and _SIGNING_KEY.value:
            _revoke(record)
    if output.wants_json():
        output.print_json({"checked": answers})
    return 1 if any(answer["changes"] for answer in answers) else 0


async def _recipes_of(endpoints: Sequence[str]) -> list[dict[str, str]]:
    recipes = []
    for endpoint in endpoints:
        async with WorkerClient(endpoint, security=security_flags.security()) as worker:
            recipes.append(dict((await worker.capability()).recipe))
    return recipes


def _revoke(record: dict[str, Any]) -> None:
    line = issue(
        SigningKey.load(output.given_path(str(_SIGNING_KEY.value))),
        Lane(record["model_id"], record["fingerprint"]),
        issued_ms=time.time_ns() // 1_000_000,
        evidence_sha256=hashlib.sha256(certify.encode(record)).hexdigest(),
        status="revoked",
        mixture=certify.mixture_in(record),
    )
    with output.given_path(str(_REVOCATIONS.value)).open("ab") as records:
        records.write(line.encode() + b"\n")


def _import(records: Sequence[bytes]) -> int:
    with progress.working(f"giving {_TRACKER.value} {len(records)} records"):
        ids = asyncio.run(_give(records))
    if output.wants_json():
        output.print_json({"record_ids": ids})
    else:
        print("\n".join(ids))
    return 0


async def _give(records: Sequence[bytes]) -> list[str]:
    channel = dial(_TRACKER.value, security_flags.security())
    try:
        stub = tracker_pb2_grpc.TrackerServiceStub(channel)
        ids = []
        for record in records:
            request = tracker_pb2.PutCertificationRequest(record=record)
            answer = await stub.PutCertification(request, timeout=_TIMEOUT_SECONDS)
            ids.append(answer.record_id)
        return ids
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from error
    finally:
        await channel.close(None)
