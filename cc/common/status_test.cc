#include "cc/common/status.h"

#include <string>

#include "absl/status/status.h"
#include "google/protobuf/descriptor.h"
#include "grpcpp/support/status.h"
#include "gtest/gtest.h"

namespace meshnet {
namespace {

TEST(StatusTest, EveryReasonHasACodeARecoveryAndSurvivesBothWires) {
  const auto* table = v1::Reason_descriptor();
  for (int i = 0; i < table->value_count(); ++i) {
    const auto reason = static_cast<v1::Reason>(table->value(i)->number());
    if (reason == v1::REASON_UNSPECIFIED) continue;
    EXPECT_NE(OptionsOf(reason).grpc_code(), 0u) << ReasonName(reason);
    EXPECT_NE(OptionsOf(reason).recovery(), v1::RECOVERY_UNSPECIFIED) << ReasonName(reason);

    const absl::Status status = MakeError(reason, "what, got, do", 250);
    EXPECT_EQ(static_cast<uint32_t>(status.code()), OptionsOf(reason).grpc_code());
    const absl::Status over_rpc = FromGrpcStatus(ToGrpcStatus(status));
    const absl::Status over_stream = FromProto(ToProto(status, 2, 4));
    for (const absl::Status& got : {over_rpc, over_stream}) {
      EXPECT_EQ(ReasonOf(got), reason);
      EXPECT_EQ(got.message(), "what, got, do");
      EXPECT_EQ(RetryAfterMsOf(got), 250u);
    }
  }
}

TEST(StatusTest, DetailsAreAnErrorInfo) {
  const grpc::Status status = ToGrpcStatus(MakeError(v1::REASON_QUEUE_FULL, "full", 30));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  v1::RpcStatus details;
  ASSERT_TRUE(details.ParseFromString(status.error_details()));
  EXPECT_EQ(details.code(), 8);
  ASSERT_EQ(details.details_size(), 1);
  EXPECT_EQ(details.details(0).type_url(), "type.googleapis.com/google.rpc.ErrorInfo");
  v1::ErrorInfo info;
  ASSERT_TRUE(info.ParseFromString(details.details(0).value()));
  EXPECT_EQ(info.reason(), "QUEUE_FULL");
  EXPECT_EQ(info.domain(), "meshnet");
  EXPECT_EQ(info.metadata().at("retry_after_ms"), "30");
}

TEST(StatusTest, WhatCarriesNoReasonGetsOne) {
  EXPECT_EQ(ReasonOf(absl::OkStatus()), v1::REASON_UNSPECIFIED);
  EXPECT_EQ(ReasonOf(absl::InternalError("x")), v1::REASON_ENGINE_FAILURE);
  EXPECT_EQ(ReasonOf(MakeError(v1::REASON_UNSPECIFIED, "x")), v1::REASON_ENGINE_FAILURE);
  EXPECT_EQ(ReasonOf(MakeError(static_cast<v1::Reason>(9999), "x")), v1::REASON_ENGINE_FAILURE);
  using grpc::StatusCode;
  const auto from = [](StatusCode code) { return ReasonOf(FromGrpcStatus({code, "x"})); };
  EXPECT_EQ(from(StatusCode::UNAVAILABLE), v1::REASON_PEER_LOST);
  EXPECT_EQ(from(StatusCode::CANCELLED), v1::REASON_CANCELLED);
  EXPECT_EQ(from(StatusCode::DEADLINE_EXCEEDED), v1::REASON_DEADLINE_EXCEEDED);
  EXPECT_EQ(from(StatusCode::UNKNOWN), v1::REASON_ENGINE_FAILURE);
  EXPECT_TRUE(FromGrpcStatus(grpc::Status::OK).ok());
  EXPECT_TRUE(ToGrpcStatus(absl::OkStatus()).ok());
}

TEST(StatusTest, NamesAreStable) {
  EXPECT_EQ(ReasonName(v1::REASON_STALE_EPOCH), "STALE_EPOCH");
  EXPECT_EQ(ReasonName(static_cast<v1::Reason>(9999)), "9999");
}

TEST(StatusTest, MessagesAreBoundedUtf8) {
  EXPECT_EQ(MakeError(v1::REASON_CACHE_MISS, std::string(5000, 'x')).message().size(), 1024u);
  // A character of two bytes does not fit into the last one.
  EXPECT_EQ(MakeError(v1::REASON_CACHE_MISS, std::string(1023, 'x') + "\xC3\xA9").message(),
            std::string(1023, 'x'));
  EXPECT_EQ(MakeError(v1::REASON_CACHE_MISS, "a\xFF\xC0\x80\xED\xA0\x80z").message(), "a??????z");
  EXPECT_EQ(MakeError(v1::REASON_CACHE_MISS, "\xE2\x82\xAC\xF0\x9F\x98\x80").message(),
            "\xE2\x82\xAC\xF0\x9F\x98\x80");
  v1::Error error;
  EXPECT_TRUE(error.ParseFromString(ToProto(absl::InternalError("\xFF")).SerializeAsString()));
}

}  // namespace
}  // namespace meshnet
