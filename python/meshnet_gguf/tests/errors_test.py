import grpc
import grpc.aio
import pytest
from google.protobuf import any_pb2
from meshnet_gguf.errors import MeshnetError, from_rpc_error, options_of, reason_name

from proto.meshnet.shard.v1 import errors_pb2


def rpc_error(
    code: grpc.StatusCode, text: str = "text", details: bytes | None = None
) -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata()
    if details is not None:
        trailing.add("grpc-status-details-bin", details)
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, text, None)


def details(reason: str, domain: str = "meshnet", url: str = "google.rpc.ErrorInfo") -> bytes:
    info = errors_pb2.ErrorInfo(reason=reason, domain=domain, metadata={"retry_after_ms": "20"})
    packed = any_pb2.Any(type_url=f"type.googleapis.com/{url}", value=info.SerializeToString())
    return errors_pb2.RpcStatus(code=9, message="why", details=[packed]).SerializeToString()


def test_every_reason_has_a_code_and_a_recovery() -> None:
    for value in errors_pb2.Reason.DESCRIPTOR.values:
        if value.number:
            options = options_of(value.number)
            assert 1 <= options.grpc_code <= 16, value.name
            assert options.recovery != errors_pb2.RECOVERY_UNSPECIFIED, value.name
            assert reason_name(value.number) == value.name.removeprefix("REASON_")


def test_what_an_error_tells() -> None:
    error = MeshnetError(errors_pb2.REASON_STALE_EPOCH, "too old", stage=(4, 8))
    assert error.reason_name == "STALE_EPOCH"
    assert error.recovery == errors_pb2.RECOVERY_RESTART_SESSION
    assert error.grpc_code == 10
    assert str(error) == "STALE_EPOCH (stage [4, 8)): too old"
    assert str(MeshnetError(errors_pb2.REASON_CANCELLED, "")) == "CANCELLED: "


@pytest.mark.parametrize("reason", [errors_pb2.REASON_UNSPECIFIED, 99999])
def test_an_unknown_reason_is_our_own_fault(reason: int) -> None:
    assert MeshnetError(reason, "").reason == errors_pb2.REASON_ENGINE_FAILURE
    assert options_of(reason).grpc_code == 13


def test_an_error_in_a_stream_goes_both_ways() -> None:
    error = MeshnetError(
        errors_pb2.REASON_SESSIONS_EXHAUSTED, "full", retry_after_ms=5, stage=(0, 2)
    )
    again = MeshnetError.from_proto(error.to_proto())
    assert (again.reason, again.message, again.retry_after_ms, again.stage) == (
        errors_pb2.REASON_SESSIONS_EXHAUSTED,
        "full",
        5,
        (0, 2),
    )
    assert MeshnetError.from_proto(errors_pb2.Error()).stage is None


def test_messages_are_cut_at_a_character() -> None:
    assert MeshnetError(errors_pb2.REASON_CANCELLED, "a" + "ä" * 600).message == "a" + "ä" * 511


def test_the_reason_comes_from_the_details_of_a_call() -> None:
    error = from_rpc_error(
        rpc_error(grpc.StatusCode.FAILED_PRECONDITION, "why", details("RECIPE_MISMATCH"))
    )
    assert error.reason == errors_pb2.REASON_RECIPE_MISMATCH
    assert error.message == "why"
    assert error.retry_after_ms == 20


@pytest.mark.parametrize("where", ["ipv4:127.0.0.1:1: ", "ipv6:%5B::1%5D:1: ", ""])
def test_what_grpc_says_before_the_cause_is_left_away(where: str) -> None:
    text = f"failed to connect to all addresses; last error: UNKNOWN: {where}Connection refused"
    error = from_rpc_error(rpc_error(grpc.StatusCode.UNAVAILABLE, text, None))
    assert error.message == "Connection refused (gRPC status UNAVAILABLE)"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors_pb2.REASON_PEER_LOST),
        (grpc.StatusCode.CANCELLED, errors_pb2.REASON_CANCELLED),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors_pb2.REASON_DEADLINE_EXCEEDED),
        (grpc.StatusCode.INTERNAL, errors_pb2.REASON_ENGINE_FAILURE),
        (grpc.StatusCode.UNIMPLEMENTED, errors_pb2.REASON_ENGINE_FAILURE),
    ],
)
@pytest.mark.parametrize(
    "found",
    [
        None,
        b"\xff\xff",
        details("RECIPE_MISMATCH", domain="elsewhere"),
        details("NO_SUCH_REASON"),
        details("RECIPE_MISMATCH", url="other.Type"),
    ],
)
def test_a_call_that_failed_without_our_details(
    code: grpc.StatusCode, reason: int, found: bytes | None
) -> None:
    error = from_rpc_error(rpc_error(code, "text", found))
    assert error.reason == reason
    assert error.message == f"text (gRPC status {code.name})"
