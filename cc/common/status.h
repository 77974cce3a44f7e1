// Errors of the data plane: absl::Status with one stable meshnet Reason.
//
//   return MakeError(v1::REASON_STALE_EPOCH,
//                    absl::StrCat("expected epoch >= ", held, " for this session, got ", epoch,
//                                 "; open a new session with a newer epoch"));
//
// The Reason decides the status code (table: proto/meshnet/shard/v1/errors.proto). Everything that
// a peer, a file or a user can cause is made with MakeError; a status without a reason is an
// internal fault and travels as ENGINE_FAILURE.
#ifndef MESHNET_CC_COMMON_STATUS_H_
#define MESHNET_CC_COMMON_STATUS_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "grpcpp/support/status.h"
#include "proto/meshnet/shard/v1/errors.pb.h"

namespace meshnet {

namespace v1 = ::meshnet::shard::v1;

// A status with `reason`'s code, `message` (cut to 1024 bytes, what is no UTF-8 replaced) and the
// reason attached. REASON_UNSPECIFIED or an unknown value becomes ENGINE_FAILURE. `retry_after_ms`
// 0 = no hint.
absl::Status MakeError(v1::Reason reason, absl::string_view message, uint32_t retry_after_ms = 0);

// The attached reason; REASON_UNSPECIFIED for OK, ENGINE_FAILURE for a non-OK status that carries
// none.
v1::Reason ReasonOf(const absl::Status& status);
uint32_t RetryAfterMsOf(const absl::Status& status);

// "STALE_EPOCH" for REASON_STALE_EPOCH; the number for a value that is not in the table.
std::string ReasonName(v1::Reason reason);

// The options that the table attaches to `reason`.
const v1::ReasonOptions& OptionsOf(v1::Reason reason);

// For RPC ends: code, message, and RpcStatus{ErrorInfo{reason, "meshnet"}} in the details.
grpc::Status ToGrpcStatus(const absl::Status& status);
// The inverse. A gRPC status without meshnet details becomes PEER_LOST (UNAVAILABLE), CANCELLED,
// DEADLINE_EXCEEDED or ENGINE_FAILURE (anything else), with the original text kept.
absl::Status FromGrpcStatus(const grpc::Status& status);

// For stream errors. `begin`/`end` name the refusing stage, 0/0 = unknown.
v1::Error ToProto(const absl::Status& status, uint32_t stage_begin = 0, uint32_t stage_end = 0);
absl::Status FromProto(const v1::Error& error);

}  // namespace meshnet

#endif  // MESHNET_CC_COMMON_STATUS_H_
