"""What may be wrong with a machine and its mesh, each as a check with a name, a word and a cure.

    for check in [*check_machine(), check_ports(["127.0.0.1:8080"])]:
        print(check.level, check.name, check.message, check.cure)

A check never raises: what it could not find out is its message. Names are stable.
"""

from __future__ import annotations

import asyncio
import datetime
import enum
import errno
import json
import os
import pathlib
import platform
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from cryptography import x509
from meshnet.certificates import describe
from meshnet.errors import ControlError
from meshnet.tracker_client import TrackerClient
from meshnet.transport import Security, TlsFiles, check_listen

from meshnet_gguf.client import WorkerClient, WorkerState
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.local_cluster import worker_binary
from meshnet_gguf.machine import cores, free_memory
from meshnet_gguf.route_source import model_sessions
from meshnet_gguf.storage import free_bytes, storage_root
from proto.meshnet.control.v1 import tracker_pb2

__all__ = [
    "Check",
    "Level",
    "check_certificates",
    "check_clock",
    "check_machine",
    "check_memory",
    "check_mesh",
    "check_ports",
    "check_storage",
]

_GIB: Final = 1 << 30
# Less than that holds no model that is worth several machines.
_LITTLE_MEMORY: Final = 1 * _GIB
_LITTLE_STORAGE: Final = 2 * _GIB
_EXPIRES_SOON: Final = datetime.timedelta(days=14)
# A route token lives for a minute, and is dated by the tracker's clock.
_CLOCK_WARN_MS: Final = 5_000
_CLOCK_FAIL_MS: Final = 30_000
_PROGRAM_SECONDS: Final = 10.0
_LEVELS: Final = {
    "armv8-a": "asimd",
    "x86-64-v2": "sse4_2",
    "x86-64-v3": "avx2",
    "x86-64-v4": "avx512f",
}


class Level(enum.StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """One finding; `cure` says what to do, empty when all is well."""

    name: str
    level: Level
    message: str
    cure: str = ""


def _ok(name: str, message: str) -> Check:
    return Check(name, Level.OK, message)


# ---- This machine ----


def check_machine() -> list[Check]:
    """Processor and worker program."""
    identity: dict[str, Any] = {}
    try:
        binary = worker_binary()
        done = subprocess.run(
            [str(binary), "--version", "--json"],
            capture_output=True,
            timeout=_PROGRAM_SECONDS,
            check=True,
        )
        identity = json.loads(done.stdout)
        found = _ok("worker.program", f"{binary}, version {identity.get('version')}")
    except MeshnetError as error:
        found = Check(
            "worker.program",
            Level.FAIL,
            error.message,
            "install a release, or build //cc/worker and set MESHNET_WORKER",
        )
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        found = Check(
            "worker.program",
            Level.FAIL,
            f"{binary} does not run here: {error}",
            "install the release for this machine's processor and system",
        )
    baseline = str(identity.get("toolchain", {}).get("baseline", "x86-64-v2"))
    return [check_cpu(_cpu_flags(), baseline), found]


def check_cpu(flags: frozenset[str], baseline: str) -> Check:
    """Whether a processor with these flags runs a program that was built for a baseline."""
    name = "cpu.baseline"
    needed = _LEVELS.get(baseline)
    if needed is None or not flags:
        return Check(
            name,
            Level.WARN,
            f"{platform.machine()} with {cores()} cores: whether it is a {baseline} is not known",
            "start a worker: it refuses with CPU_UNSUPPORTED what it cannot run on",
        )
    if needed not in flags:
        return Check(
            name,
            Level.FAIL,
            f"the worker is built for {baseline}, this processor lacks {needed}",
            "use a release for an older processor, or another machine",
        )
    return _ok(name, f"{baseline}, {cores()} cores")


def _cpu_flags() -> frozenset[str]:
    try:
        for line in pathlib.Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            # The second is how Linux says it on Arm.
            if line.startswith(("flags", "Features")):
                return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()


def check_memory(needed_bytes: int = 0) -> Check:
    """Whether there is memory, for so much where it is known."""
    free = free_memory()
    message = f"{free / _GIB:.1f} GiB are free"
    wanted = needed_bytes or _LITTLE_MEMORY
    if free >= wanted:
        return _ok("memory.free", message)
    return Check(
        "memory.free",
        Level.FAIL if needed_bytes else Level.WARN,
        f"{message}, {wanted / _GIB:.1f} GiB are wanted",
        "end other programs, or share the model with other machines: meshnet serve --join",
    )


def check_storage(needed_bytes: int = 0) -> Check:
    """Whether models can be stored."""
    name = "disk.storage"
    try:
        root = storage_root()
    except MeshnetError as error:
        return Check(name, Level.FAIL, error.message, "set MESHNET_STORAGE to a folder of yours")
    free = free_bytes(root)
    wanted = needed_bytes or _LITTLE_STORAGE
    message = f"{free / _GIB:.1f} GiB are free at {root}"
    if free >= wanted:
        return _ok(name, message)
    return Check(
        name,
        Level.FAIL if needed_bytes else Level.WARN,
        f"{message}, {wanted / _GIB:.1f} GiB are wanted",
        "remove models that nobody uses (meshnet models), or set MESHNET_STORAGE",
    )


def check_ports(addresses: Sequence[str]) -> list[Check]:
    """Whether a server could listen there."""
    found = []
    for address in addresses:
        name = f"port.{address.rpartition(':')[2]}"
        try:
            check_listen(address, secured=True, insecure=False)
        except ControlError as error:
            cure = "give --ports addresses such as 127.0.0.1:8080"
            found.append(Check(name, Level.FAIL, error.message, cure))
            continue
        problem = _why_not_listen(address)
        if problem is None:
            found.append(_ok(name, f"{address} is free"))
        elif problem == errno.EADDRINUSE:
            found.append(
                Check(
                    name,
                    Level.WARN,
                    f"somebody listens on {address}",
                    "if that is no meshnet, choose another address: --listen, --mesh-listen",
                )
            )
        else:
            found.append(
                Check(
                    name,
                    Level.FAIL,
                    f"cannot listen on {address}: {os.strerror(problem)}",
                    "choose one of this machine's addresses, and a port above 1023",
                )
            )
    return found


def _why_not_listen(address: str) -> int | None:
    host, _, port = address.rpartition(":")
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
            probe.listen(1)
    except socket.gaierror:
        return errno.EADDRNOTAVAIL
    except OSError as error:
        return error.errno or errno.EADDRNOTAVAIL
    return None


# ---- Certificates ----


def check_certificates(
    tls: TlsFiles, hosts: Sequence[str], now: datetime.datetime | None = None
) -> list[Check]:
    """Whether the files fit each other, are good for long enough, and name `hosts`."""
    now = now or datetime.datetime.now(datetime.UTC)
    try:
        certificate, _, authority = tls.checked()
        ours = describe(certificate)[0]
        authorities = describe(authority)
    except ControlError as error:
        cure = "meshnet certs issue FOLDER NAME --host=HOST makes a certificate and its key"
        return [Check("certificates.files", Level.FAIL, error.message, cure)]
    found = [_ok("certificates.files", f"{tls.certificate} and its key")]
    issue = f"meshnet certs issue FOLDER {ours.common_name} --host=HOST"
    if _is_issued(certificate, authority):
        found.append(_ok("certificates.authority", f"issued by {ours.issuer}"))
    else:
        found.append(
            Check(
                "certificates.authority",
                Level.FAIL,
                f"{tls.certificate} is issued by {ours.issuer}, which is none of {tls.authority}",
                "copy the authority's newest authorities.pem here, or issue the certificate anew",
            )
        )
    ends = [(ours.common_name, ours.expires), *((a.common_name, a.expires) for a in authorities)]
    who, first = min(ends, key=lambda end: end[1])
    left = first - now
    if left <= datetime.timedelta(0):
        level, message = Level.FAIL, f"{who} expired on {first:%Y-%m-%d}"
    elif left < _EXPIRES_SOON:
        level, message = Level.WARN, f"{who} expires on {first:%Y-%m-%d}"
    else:
        level, message = Level.OK, f"until {first:%Y-%m-%d}"
    cure = "" if level is Level.OK else f"{issue}; for an authority: meshnet certs rotate FOLDER"
    found.append(Check("certificates.expiry", level, message, cure))
    names = {ours.common_name, *ours.names}
    missing = [host for host in hosts if host not in names]
    if missing:
        found.append(
            Check(
                "certificates.names",
                Level.FAIL,
                f"others dial {', '.join(missing)}, the certificate names {', '.join(names)}",
                issue.replace("HOST", missing[0]),
            )
        )
    else:
        found.append(_ok("certificates.names", ", ".join(sorted(names))))
    return found


def _is_issued(certificate: bytes, authority: bytes) -> bool:
    ours = x509.load_pem_x509_certificate(certificate)
    for one in x509.load_pem_x509_certificates(authority):
        try:
            ours.verify_directly_issued_by(one)
        except Exception:  # noqa: S112 - it has many ways to say no
            continue
        return True
    return False


# ---- The mesh ----


async def check_mesh(trackers: Sequence[str], security: Security) -> list[Check]:
    """Trackers and their clocks, workers as they are reached from here, lanes, routes."""
    found: list[Check] = []
    answer: tracker_pb2.ListWorkersResponse | None = None
    for endpoint in trackers:
        try:
            async with TrackerClient([endpoint], security=security) as tracker:
                began = time.time()
                status = await tracker.get_status()
                took_ms = (time.time() - began) * 1000
                found.append(_ok(f"tracker.{endpoint}", f"answers in {took_ms:.0f} ms"))
                found.append(check_clock(status.time_ms, time.time() * 1000 - took_ms / 2))
                answer = answer or await tracker.list_workers(tracker_pb2.ListWorkersRequest())
        except ControlError as error:
            found.append(
                Check(
                    f"tracker.{endpoint}",
                    Level.FAIL,
                    str(error),
                    "start it (meshnet serve, meshnet tracker), open its port, or give the "
                    "certificates that it wants",
                )
            )
    if answer is not None:
        workers = list(answer.workers)
        seen = await asyncio.gather(*(_check_worker(worker, security) for worker in workers))
        found += [*seen, _check_versions(workers), *_check_measured(workers), *_check_lanes(answer)]
        # The tracker may not know yet that one is gone.
        del answer.workers[:]
        answer.workers.extend(
            worker
            for worker, check in zip(workers, seen, strict=True)
            if check.level is not Level.FAIL
        )
        models = {worker.registration.model_id for worker in workers}
        found += [_check_route(model, answer) for model in sorted(models)]
    return found


def check_clock(tracker_ms: float, own_ms: float) -> Check:
    """Whether a tracker's clock and this machine's agree, both in milliseconds since 1970."""
    name = "clock.tracker"
    if not tracker_ms:
        return Check(name, Level.WARN, "the tracker does not tell its time", "upgrade the tracker")
    ahead = (own_ms - tracker_ms) / 1000
    words = (
        f"this clock is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} the tracker's"
    )
    if abs(ahead) * 1000 < _CLOCK_WARN_MS:
        return _ok(name, words)
    level = Level.FAIL if abs(ahead) * 1000 >= _CLOCK_FAIL_MS else Level.WARN
    return Check(name, level, words, "let NTP set both clocks: route tokens live for a minute")


async def _check_worker(worker: tracker_pb2.WorkerStatus, security: Security) -> Check:
    registration = worker.registration
    name = f"worker.{registration.worker_id}"
    where = f"layers [{registration.span.begin}, {registration.span.end}) at "
    if registration.relay:
        return _ok(name, f"{where}relay {registration.relay}, not dialled from here")
    where += registration.endpoint
    try:
        async with WorkerClient(registration.endpoint, security=security) as client:
            health = await client.health()
    except MeshnetError as error:
        return Check(
            name,
            Level.FAIL,
            f"{where}: {error}",
            "see that its node runs; open its port to this machine and to the other workers, or "
            "let it listen at a relay",
        )
    if health.state is not WorkerState.READY:
        message = f"{where} is {health.state.name} ({health.message})"
        return Check(name, Level.WARN, message, "wait, or read the log of its node")
    return _ok(name, where)


def _check_versions(workers: Sequence[tracker_pb2.WorkerStatus]) -> Check:
    """All workers of a model should be of one release."""
    versions: dict[str, set[str]] = {}
    for worker in workers:
        registration = worker.registration
        version = registration.labels.get("worker_version", "unknown")
        versions.setdefault(registration.model_id, set()).add(version)
    mixed = {model: found for model, found in versions.items() if len(found) > 1}
    if mixed:
        said = "; ".join(f"{model}: {', '.join(sorted(found))}" for model, found in mixed.items())
        return Check(
            "versions.workers",
            Level.WARN,
            f"workers of several versions ({said})",
            "install one release everywhere: only workers of one recipe serve together",
        )
    known = sorted({version for found in versions.values() for version in found})
    return _ok("versions.workers", ", ".join(known) or "no workers")


def _check_measured(workers: Sequence[tracker_pb2.WorkerStatus]) -> list[Check]:
    """Neighbours measure the line to each other: who is not reached back is behind a wall."""
    towards: dict[str, set[str]] = {}
    touching: set[tuple[str, str]] = set()
    for worker in workers:
        registration = worker.registration
        seams = worker.load.seams or registration.seams
        measured = towards.setdefault(registration.node_id, set())
        measured.update(seam.peer_node_id for seam in seams)
        for other in workers:
            theirs = other.registration
            if (
                theirs.node_id != registration.node_id
                and theirs.fingerprint == registration.fingerprint
                and registration.span.end == theirs.span.begin
            ):
                touching.add((registration.node_id, theirs.node_id))
    found = []
    for left, right in sorted(touching):
        forth, back = right in towards[left], left in towards[right]
        name = f"reach.{left}.{right}"
        if forth and back:
            found.append(_ok(name, f"{left} and {right} reach each other"))
        elif forth or back:
            who, whom = (right, left) if forth else (left, right)
            # A node measures once a minute: one that has just joined is not known to all.
            found.append(
                Check(
                    name,
                    Level.WARN,
                    f"{who} has not reached {whom} yet, which reaches it",
                    f"ask again in a minute; if it stays so, open {whom}'s ports to {who}, or let "
                    f"{whom} listen at a relay",
                )
            )
        else:
            found.append(
                Check(
                    name,
                    Level.WARN,
                    f"{left} and {right} have not measured the line between them yet",
                    "ask again in a minute; if it stays so, neither reaches the other",
                )
            )
    return found


def _check_lanes(answer: tracker_pb2.ListWorkersResponse) -> list[Check]:
    """Dark lanes and mixtures."""
    found: list[Check] = []
    lanes: dict[tuple[str, str], list[tracker_pb2.WorkerStatus]] = {}
    for worker in answer.workers:
        registration = worker.registration
        lanes.setdefault((registration.model_id, registration.fingerprint), []).append(worker)
    for (model, fingerprint), members in sorted(lanes.items()):
        name = f"lane.{model}.{fingerprint[:12]}"
        dark = [w for w in members if w.admission == tracker_pb2.ADMISSION_DARK]
        if dark:
            found.append(
                Check(
                    name,
                    Level.FAIL,
                    f"never routed: {dark[0].unroutable}",
                    "certify it and `meshnet certification import` the record, or start the "
                    "tracker with --admit-dark",
                )
            )
        elif any(w.admission == tracker_pb2.ADMISSION_DARK_ADMITTED for w in members):
            found.append(
                Check(
                    name,
                    Level.WARN,
                    "not certified, and routed because the tracker admits dark lanes",
                    "certify it and `meshnet certification import` the record",
                )
            )
        else:
            found.append(_ok(name, "certified"))
    for mixture in answer.mixtures:
        if mixture.admission == tracker_pb2.ADMISSION_DARK:
            pair = f"{mixture.head_fingerprint[:12]}-{mixture.tail_fingerprint[:12]}"
            found.append(
                Check(
                    f"mixture.{mixture.model_id}.{pair}",
                    Level.WARN,
                    f"never routed: {mixture.admission_reason}",
                    "add workers of one lane, or measure the mixture (`meshnet certify --mixed`) "
                    "and `meshnet certification import` the record",
                )
            )
    return found


def _check_route(model: str, usable: tracker_pb2.ListWorkersResponse) -> Check:
    """Whether a model has a route over workers that are reached from here."""
    # One that is full is no less complete.
    if model_sessions(usable).get(model, 0) > 0:
        return _ok(f"route.{model}", "all layers are served")
    return Check(
        f"route.{model}",
        Level.FAIL,
        "no chain of usable workers that answer here holds all layers",
        "meshnet status names the layers; add a machine: meshnet serve --join",
    )
