"""Shows certification records, and gives them to trackers.

    meshnet certification show lane.records --trusted-key certifier.pem.pub
    meshnet certification import lane.records --tracker 127.0.0.1:7100

A file holds one record a line. `show` says of each which lane it is for, what it says and whether a
key given with --trusted-key signed it; the exit code is 1 when one is not to be believed. `import`
gives the records to a tracker, which refuses those that none of its own trusted keys signed.
Importing again changes nothing. A record that revokes a lane is imported the same way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc.aio
import rich.box
import rich.console
import rich.table
from absl import app, flags
from meshnet.certification import Certification, CertificationBook, read_records
from meshnet.errors import ControlError, error_from_rpc
from meshnet.signing import TrustedKeys
from meshnet.transport import dial

from meshnet_gguf.cli import output, security_flags
from proto.meshnet.control.v1 import tracker_pb2, tracker_pb2_grpc

__all__ = ["FLAG_MODULES", "run"]

FLAG_MODULES = (security_flags.__name__,)

_TRACKER = flags.DEFINE_string("tracker", "127.0.0.1:7100", "The tracker, HOST:PORT.")
_TRUSTED = flags.DEFINE_multi_string(
    "trusted_key", [], "PEM file of public keys to believe; repeatable."
)
_TIMEOUT_SECONDS = 30.0


def run(arguments: Sequence[str]) -> int:
    """The command."""
    actions = {"show": _show, "import": _import}
    if len(arguments) < 2 or arguments[0] not in actions:
        raise app.UsageError(
            f"expected show FILE... or import FILE..., got {' '.join(arguments)!r}"
        )
    with output.control_errors():
        records = [r for name in arguments[1:] for r in read_records(output.given_path(name))]
        return actions[arguments[0]](records)


def _show(records: Sequence[bytes]) -> int:
    trusted = TrustedKeys.load(output.given_path(name) for name in _TRUSTED.value)
    rows = [_row(record, CertificationBook(trusted)) for record in records]
    if output.wants_json():
        output.print_json({"records": rows})
    else:
        table = rich.table.Table(*rows[0], box=rich.box.SIMPLE)
        for row in rows:
            table.add_row(*(str(value) for value in row.values()))
        rich.console.Console(highlight=False, soft_wrap=True).print(table)
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
        "status": found.status,
        "issued_ms": found.issued_ms,
        "expires_ms": found.expires_ms,
        "evidence_sha256": found.evidence_sha256,
        "key_id": found.key_id,
        "trusted": trusted,
    }


def _import(records: Sequence[bytes]) -> int:
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
