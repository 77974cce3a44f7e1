"""What to do about each reason: kept by name beside the tables of reasons, complete by a test.

The tables are proto/meshnet/shard/v1/errors.proto and meshnet.errors.Reason (ADR 0003); a message
says what was expected and what came in the case at hand, a cure what helps in general.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = ["CONTROL_CURES", "CURES"]

_PEER = "the other side speaks another version or is broken: run one release everywhere"
_LINE = (
    "the bytes were damaged or cut on the way: look at the network between the two, then "
    "at the peer's log"
)
_SAME = (
    "load the same file under the same flags everywhere; `meshnet recipe A B` says where "
    "two workers differ"
)

CURES: Final[Mapping[str, str]] = {
    "MALFORMED_MESSAGE": _PEER,
    "UNKNOWN_FIELD": _PEER,
    "UNKNOWN_ENUM_VALUE": _PEER,
    "RESERVED_FIELD_SET": _PEER,
    "FIELD_OUT_OF_BOUNDS": "ask for a value within the bounds that the message names",
    "FRAME_TOO_LARGE": "give all workers the same `--max_frame_bytes`",
    "BUNDLE_TOO_LARGE": (
        "give all workers the same `--max_bundle_bytes`, or a smaller `--prefill_chunk_tokens`"
    ),
    "TENSOR_MISSING": _PEER,
    "TENSOR_UNEXPECTED": _PEER,
    "TENSOR_DUPLICATE": _PEER,
    "DTYPE_MISMATCH": _PEER,
    "SHAPE_MISMATCH": _PEER,
    "SIZE_MISMATCH": _PEER,
    "BYTE_ORDER_UNSUPPORTED": "use machines of little-endian byte order",
    "COMPRESSION_UNSUPPORTED": _PEER,
    "FRAGMENT_OUT_OF_ORDER": _PEER,
    "FRAGMENT_DUPLICATE": _PEER,
    "FRAGMENT_MISSING": _LINE,
    "FRAGMENT_SIZE_MISMATCH": _PEER,
    "CHECKSUM_MISMATCH": _LINE,
    "NON_FINITE_VALUE": (
        "check the model file (`meshnet manifest`), then the machine's memory; try another prompt"
    ),
    "POSITION_MISMATCH": _PEER,
    "TOKEN_OUT_OF_RANGE": "send token ids of this model's own vocabulary",
    "SAMPLING_INVALID": "change the sampling parameter that the message names",
    "ROUTE_INVALID": (
        "name workers that hold all layers once: `meshnet status` shows who holds which"
    ),
    "GRAMMAR_INVALID": "simplify the JSON schema or grammar as the message says",
    "SCHEMA_VERSION_UNSUPPORTED": "run one release everywhere",
    "RECIPE_MISMATCH": (
        f"{_SAME}; two lanes want a certification record for both (`meshnet certify --mixed`)"
    ),
    "ARTIFACT_MISMATCH": "load the same model everywhere, from the same manifest or the same file",
    "RANGE_MISMATCH": "ask the tracker again; a worker has been started with other layers",
    "BOUNDARY_SCHEMA_MISMATCH": _SAME,
    "ARCHITECTURE_UNSUPPORTED": "use a model of an architecture that the message names",
    "LAYER_RANGE_INVALID": "cut where `meshnet inspect MODEL` says that one may",
    "FEATURE_UNSUPPORTED": "leave away what the message names",
    "LIFECYCLE_VIOLATION": _PEER,
    "ARTIFACT_UNREADABLE": (
        "check the path and who may read it; `meshnet models` lists what is here and known"
    ),
    "ARTIFACT_INVALID": "fetch the file again; `meshnet inspect` shows what is in it",
    "CPU_UNSUPPORTED": "use a release for this processor, or the `--cpu_variant` that it has",
    "STEP_CONFLICT": "begin a new session: two callers used one",
    "CONTEXT_EXCEEDED": (
        "shorten the prompt, ask for fewer tokens, or start with more `--context-tokens`"
    ),
    "INSECURE_TRANSPORT": "make certificates (`meshnet certs`) and name them, or stay on loopback",
    "CONFIGURATION_INVALID": (
        "correct what the message names; `--help` and docs/reference.md list the flags"
    ),
    "MANIFEST_INVALID": "make the manifest again (`meshnet manifest`)",
    "ARTIFACT_INCOMPLETE": (
        "`meshnet provision` with these layers, or with a source that has the file"
    ),
    "SOURCE_CHANGED": "make a new manifest for the new file, or name a source that has the old one",
    "SOURCE_ANSWER_INVALID": "name another source; a proxy may be in the way",
    "SPLIT_USELESS": "use fewer stages, or `--accept-slower`",
    "GRAMMAR_DEAD_END": "allow more in the grammar or schema: no token continues the answer",
    "NOT_SERVED": (
        "ask for a model of `/v1/models` (`meshnet models` lists them); other names of the gateway "
        "than its address go into `serve --allowed-hosts`"
    ),
    "STALE_EPOCH": "ask the tracker for the session's newest route",
    "STEP_OUT_OF_ORDER": "begin a new session",
    "SESSION_UNKNOWN": "begin a new session; it ended, or nobody used it for too long",
    "SESSION_EXISTS": "begin a session under a new id",
    "CACHE_MISS": "send the conversation again from its beginning",
    "SESSION_EVICTED": (
        "send the conversation again; give workers more `--max_sessions` or a longer `--idle_ttl`"
    ),
    "SESSIONS_EXHAUSTED": "come again later, or add machines: `meshnet serve --join`",
    "QUEUE_FULL": "come again later, or add machines: `meshnet serve --join`",
    "MEMORY_BUDGET_EXCEEDED": (
        "free memory, ask for fewer sessions or less context, or add machines"
    ),
    "FLOW_CONTROL_VIOLATION": _PEER,
    "STORAGE_FULL": "free disk space, or set MESHNET_STORAGE to another file system",
    "RATE_LIMITED": "come again later, or have the key's limits raised (`meshnet api-keys`)",
    "GRAMMAR_TOO_COSTLY": "simplify the grammar or JSON schema",
    "NOT_READY": "wait until it has loaded; its log says how far it is",
    "DRAINING": "use another worker: this one ends",
    "PEER_UNREACHABLE": (
        "start the other side, check address and firewall; `meshnet doctor` looks at both"
    ),
    "PEER_LOST": (
        "ask again; `meshnet status` shows the stage that is gone, its node's log says why"
    ),
    "SOURCE_UNAVAILABLE": "run it again once a source answers: what was fetched is kept",
    "NO_ROUTE": (
        "`meshnet status` names the layers that nobody serves, and lanes and mixtures that are "
        "dark; add a machine: `meshnet serve --join`"
    ),
    "CANCELLED": "nothing: the caller wanted it so",
    "DEADLINE_EXCEEDED": "ask for less, allow more time, or add machines",
    "ENGINE_FAILURE": "begin a new session; if it comes again, report it with the worker's log",
    "ENGINE_OUTPUT_INVALID": (
        "begin a new session; if it comes again, report it with the worker's log"
    ),
    "UNAUTHENTICATED": "present an API key, or a certificate of the mesh's authority",
    "TOKEN_MALFORMED": "open sessions through the tracker that the worker trusts",
    "TOKEN_UNTRUSTED": "give the worker the tracker's public key (`--route_token_keys`)",
    "TOKEN_EXPIRED": (
        "ask the tracker again; let NTP set the clocks (`meshnet doctor` compares them)"
    ),
    "TOKEN_WRONG_WORKER": "ask the tracker again, and dial the worker that it names",
    "TOKEN_WRONG_SESSION": "ask the tracker again",
    "TOKEN_WRONG_EPOCH": "ask the tracker for the session's newest route",
    "TOKEN_WRONG_HOP": "ask the tracker again, and keep the order of its hops",
    "TOKEN_REPLAYED": "ask the tracker for the session's next epoch",
}

# Where the control plane has a reason of its own, or means something else.
CONTROL_CURES: Final[Mapping[str, str]] = {
    "SPAN_INVALID": "register layers that the model has",
    "CERTIFICATION_INVALID": "issue the record again: it is malformed or contradicts itself",
    "CERTIFICATION_UNTRUSTED": "start the tracker with the certifier's `--trusted-key`",
    "RECEIPT_CONFLICT": "report another piece of work under another name",
    "WORKER_UNKNOWN": "register anew: the lease ran out",
    "CALL_UNKNOWN": "call again: the relay knows no such call any more",
    "STORAGE_UNAVAILABLE": "see that the tracker reaches its database, and that its disk has room",
    "UNAUTHENTICATED": "present a certificate of the mesh's authority that names this peer",
}
