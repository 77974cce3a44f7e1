#include "cc/common/status.h"

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "cc/common/utf8.h"
#include "grpcpp/support/status.h"
#include "proto/meshnet/shard/v1/errors.pb.h"

namespace meshnet {
namespace {

constexpr absl::string_view kPayloadUrl = "meshnet/reason";
constexpr absl::string_view kRetryUrl = "meshnet/retry_after_ms";
constexpr absl::string_view kErrorInfoUrl = "type.googleapis.com/google.rpc.ErrorInfo";
constexpr absl::string_view kDomain = "meshnet";
constexpr absl::string_view kPrefix = "REASON_";
constexpr absl::string_view kRetryKey = "retry_after_ms";
constexpr size_t kMaxMessageBytes = 1024;

bool IsKnown(v1::Reason reason) {
  return reason != v1::REASON_UNSPECIFIED && v1::Reason_IsValid(reason);
}

uint32_t PayloadNumber(const absl::Status& status, absl::string_view url) {
  uint32_t number = 0;
  const auto payload = status.GetPayload(url);
  if (!payload.has_value() || !absl::SimpleAtoi(std::string(*payload), &number)) return 0;
  return number;
}

// At most kMaxMessageBytes of valid UTF-8, which protobuf strings must be. Other bytes become '?'.
std::string WireText(absl::string_view message) {
  std::string text;
  while (!message.empty()) {
    const size_t length = Utf8CharacterBytes(message);
    const absl::string_view character = length == 0 ? "?" : message.substr(0, length);
    if (text.size() + character.size() > kMaxMessageBytes) break;
    text.append(character.data(), character.size());
    message.remove_prefix(length == 0 ? 1 : length);
  }
  return text;
}

}  // namespace

absl::Status MakeError(v1::Reason reason, absl::string_view message, uint32_t retry_after_ms) {
  if (!IsKnown(reason)) reason = v1::REASON_ENGINE_FAILURE;
  absl::Status status(static_cast<absl::StatusCode>(OptionsOf(reason).grpc_code()),
                      WireText(message));
  status.SetPayload(kPayloadUrl, absl::Cord(absl::StrCat(static_cast<int>(reason))));
  if (retry_after_ms > 0) status.SetPayload(kRetryUrl, absl::Cord(absl::StrCat(retry_after_ms)));
  return status;
}

v1::Reason ReasonOf(const absl::Status& status) {
  if (status.ok()) return v1::REASON_UNSPECIFIED;
  const auto reason = static_cast<v1::Reason>(PayloadNumber(status, kPayloadUrl));
  return IsKnown(reason) ? reason : v1::REASON_ENGINE_FAILURE;
}

uint32_t RetryAfterMsOf(const absl::Status& status) { return PayloadNumber(status, kRetryUrl); }

std::string ReasonName(v1::Reason reason) {
  const std::string& name = v1::Reason_Name(reason);
  if (name.empty()) return absl::StrCat(static_cast<int>(reason));
  return std::string(absl::StripPrefix(name, kPrefix));
}

const v1::ReasonOptions& OptionsOf(v1::Reason reason) {
  const auto* value = v1::Reason_descriptor()->FindValueByNumber(reason);
  if (value == nullptr || value->number() == v1::REASON_UNSPECIFIED) {
    value = v1::Reason_descriptor()->FindValueByNumber(v1::REASON_ENGINE_FAILURE);
  }
  return value->options().GetExtension(v1::reason_options);
}

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const v1::Reason reason = ReasonOf(status);
  v1::ErrorInfo info;
  info.set_reason(ReasonName(reason));
  info.set_domain(std::string(kDomain));
  if (const uint32_t retry = RetryAfterMsOf(status); retry > 0) {
    (*info.mutable_metadata())[std::string(kRetryKey)] = absl::StrCat(retry);
  }
  v1::RpcStatus details;
  details.set_code(static_cast<int>(OptionsOf(reason).grpc_code()));
  details.set_message(WireText(status.message()));
  auto* any = details.add_details();
  any->set_type_url(std::string(kErrorInfoUrl));
  any->set_value(info.SerializeAsString());
  return grpc::Status(static_cast<grpc::StatusCode>(details.code()), details.message(),
                      details.SerializeAsString());
}

absl::Status FromGrpcStatus(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  v1::RpcStatus details;
  if (details.ParseFromString(status.error_details())) {
    for (const auto& any : details.details()) {
      v1::ErrorInfo info;
      v1::Reason reason;
      if (any.type_url() != kErrorInfoUrl || !info.ParseFromString(any.value())) continue;
      if (info.domain() != kDomain) continue;
      if (!v1::Reason_Parse(absl::StrCat(kPrefix, info.reason()), &reason)) continue;
      uint32_t retry = 0;
      const auto hint = info.metadata().find(std::string(kRetryKey));
      if (hint != info.metadata().end() && !absl::SimpleAtoi(hint->second, &retry)) retry = 0;
      return MakeError(reason, status.error_message(), retry);
    }
  }
  v1::Reason reason = v1::REASON_ENGINE_FAILURE;
  switch (status.error_code()) {
    case grpc::StatusCode::UNAVAILABLE:
      reason = v1::REASON_PEER_LOST;
      break;
    case grpc::StatusCode::CANCELLED:
      reason = v1::REASON_CANCELLED;
      break;
    case grpc::StatusCode::DEADLINE_EXCEEDED:
      reason = v1::REASON_DEADLINE_EXCEEDED;
      break;
    default:
      break;
  }
  return MakeError(reason, status.error_message());
}

v1::Error ToProto(const absl::Status& status, uint32_t stage_begin, uint32_t stage_end) {
  v1::Error error;
  error.set_reason(ReasonOf(status));
  error.set_message(WireText(status.message()));
  error.set_stage_begin(stage_begin);
  error.set_stage_end(stage_end);
  error.set_retry_after_ms(RetryAfterMsOf(status));
  return error;
}

absl::Status FromProto(const v1::Error& error) {
  return MakeError(error.reason(), error.message(), error.retry_after_ms());
}

}  // namespace meshnet
