// When a worker says that it is ready: after the warm-up, in all three places that say so. And how
// its server answers calls that are not as they should be.
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "cc/common/status.h"
#include "cc/shard_engine/fake/fake_engine.h"
#include "cc/worker/grpc_events.h"
#include "cc/worker/grpc_transport.h"
#include "cc/worker/shard_server.h"
#include "cc/worker/test_cluster.h"
#include "cc/worker/worker.h"
#include "gmock/gmock.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/security/credentials.h"
#include "gtest/gtest.h"

namespace meshnet::worker {
namespace {

using ::testing::ElementsAre;

// grpc.health.v1.HealthCheckResponse on the wire: field 1, a varint.
constexpr char kServing[] = "\x08\x01";
constexpr char kNotServing[] = "\x08\x02";

class ReadinessTest : public ::testing::Test {
 protected:
  ReadinessTest()
      : logger_([](const std::string&) {}),
        dialer_(MakeGrpcDialer(&events_, {})),
        worker_({}, dialer_.get(), &allow_all_, &logger_) {
    ShardServerOptions options;
    options.listen = "127.0.0.1:0";
    server_ = *ShardServer::Start(options, &events_, &worker_);
    channel_ = grpc::CreateChannel(server_->address(), grpc::InsecureChannelCredentials());
  }
  ~ReadinessTest() override {
    worker_.Stop();
    server_->Shutdown(absl::ZeroDuration());
  }

  absl::Status Attach(std::function<absl::Status()> warm_up) {
    FakeEngineOptions options;
    options.warm_up = std::move(warm_up);
    return worker_.AttachEngine(*MakeFakeEngine(options));
  }

  struct Answer {
    grpc::Status status;
    std::string bytes;
  };

  Answer Call(const std::string& path, const std::string& bytes) {
    grpc::GenericStub stub(channel_);
    grpc::ClientContext context;
    const grpc::Slice slice(bytes);
    const grpc::ByteBuffer request(&slice, 1);
    grpc::ByteBuffer response;
    Answer answer;
    absl::Notification done;
    stub.UnaryCall(&context, path, grpc::StubOptions(), &request, &response,
                   [&](grpc::Status result) {
                     answer.status = std::move(result);
                     done.Notify();
                   });
    done.WaitForNotification();
    std::vector<grpc::Slice> slices;
    if (!answer.status.ok() || !response.Dump(&slices).ok()) return answer;
    for (const grpc::Slice& part : slices) {
      answer.bytes.append(reinterpret_cast<const char*>(part.begin()), part.size());
    }
    return answer;
  }

  // The answer of grpc.health.v1.Health/Check, about all services.
  std::string GrpcHealth() {
    const Answer answer = Call("/grpc.health.v1.Health/Check", "");
    EXPECT_TRUE(answer.status.ok()) << answer.status.error_message();
    return answer.bytes;
  }

  TestStream Watch() {
    TestStream stream;
    stream.handler = std::make_shared<RecordingHandler>();
    ByteCall call;
    call.endpoint = server_->address();
    call.path = "/grpc.health.v1.Health/Watch";
    const absl::Status status = dialer_->Call(call, stream.handler, &stream.stream);
    EXPECT_TRUE(status.ok()) << status;
    return stream;
  }

  // What a session that is opened now is refused with.
  v1::Error SessionError() {
    TestStream stream;
    stream.handler = std::make_shared<RecordingHandler>();
    DialTarget target;
    target.endpoint = server_->address();
    const absl::Status status =
        dialer_->Dial(Method::kSession, target, stream.handler, &stream.stream);
    EXPECT_TRUE(status.ok()) << status;
    v1::SessionRequest request;
    request.mutable_open()->set_schema_version(kSchemaVersion);
    stream.Send(request);
    while (!stream.closed()) absl::SleepFor(absl::Milliseconds(1));
    const auto events = stream.Received<v1::SessionEvent>();
    EXPECT_THAT(events, ::testing::SizeIs(1));
    return events.empty() ? v1::Error() : events[0].error().error();
  }

  Logger logger_;
  AllowAll allow_all_;
  GrpcEvents events_;
  std::unique_ptr<GrpcDialer> dialer_;
  Worker worker_;
  std::unique_ptr<ShardServer> server_;
  std::shared_ptr<grpc::Channel> channel_;
};

TEST_F(ReadinessTest, LoadingIsNotReady) {
  EXPECT_EQ(worker_.GetHealth().state(), v1::WORKER_STATE_LOADING);
  EXPECT_FALSE(worker_.GetHealth().has_range());
  EXPECT_EQ(GrpcHealth(), kNotServing);
  EXPECT_EQ(SessionError().reason(), v1::REASON_NOT_READY);
}

TEST_F(ReadinessTest, ReadyComesAfterTheWarmUp) {
  absl::Notification begun;
  absl::Notification go_on;
  std::thread loader([&] {
    EXPECT_TRUE(Attach([&] {
                  begun.Notify();
                  go_on.WaitForNotification();
                  return absl::OkStatus();
                }).ok());
  });
  begun.WaitForNotification();
  const v1::Health health = worker_.GetHealth();
  EXPECT_EQ(health.state(), v1::WORKER_STATE_WARMING_UP);
  EXPECT_EQ(health.error().reason(), v1::REASON_NOT_READY);
  EXPECT_EQ(GrpcHealth(), kNotServing);
  const v1::Error error = SessionError();
  EXPECT_EQ(error.reason(), v1::REASON_NOT_READY);
  EXPECT_GT(error.retry_after_ms(), 0);
  go_on.Notify();
  loader.join();
  EXPECT_EQ(worker_.GetHealth().state(), v1::WORKER_STATE_READY);
  EXPECT_FALSE(worker_.GetHealth().has_error());
  EXPECT_EQ(GrpcHealth(), kServing);
  // Admitted, and refused for what it asks.
  EXPECT_NE(SessionError().reason(), v1::REASON_NOT_READY);
}

TEST_F(ReadinessTest, AWatcherIsToldOfEachChange) {
  const TestStream watch = Watch();
  watch.SendBytes("");
  const auto wait_for = [&](size_t count) {
    while (watch.handler->messages().size() < count) absl::SleepFor(absl::Milliseconds(1));
  };
  wait_for(1);
  EXPECT_TRUE(Attach([] { return absl::OkStatus(); }).ok());
  // Warming up, then ready.
  wait_for(3);
  EXPECT_THAT(watch.handler->messages(), ElementsAre(kNotServing, kNotServing, kServing));
  watch.stream->Abort();
}

TEST_F(ReadinessTest, WhatDoesNotExistIsSaidInGrpcsCodes) {
  EXPECT_EQ(Call("/grpc.health.v1.Health/Check", "\x0a\x03rpc").status.error_code(),
            grpc::StatusCode::NOT_FOUND);
  for (const char* path : {"/meshnet.shard.v1.ShardService/Mine", "/ggml.Rpc/Session", "/",
                           "/meshnet.shard.v1.TokenizerService/Session"}) {
    const grpc::Status status = Call(path, "").status;
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNIMPLEMENTED) << path;
    EXPECT_EQ(status.error_details(), "") << path;
  }
}

TEST_F(ReadinessTest, ARequestThatCannotBeReadIsRefusedByName) {
  // Field 1 is a string of five bytes, of which two are there.
  const grpc::Status status =
      Call("/meshnet.shard.v1.ShardService/CancelSession", "\x0a\x05no").status;
  EXPECT_EQ(ReasonOf(FromGrpcStatus(status)), v1::REASON_MALFORMED_MESSAGE);
}

TEST_F(ReadinessTest, ACallHasOneRequest) {
  for (const size_t requests : {0, 2}) {
    const TestStream stream = Watch();
    for (size_t i = 0; i < requests; ++i) stream.SendBytes("");
    stream.stream->HalfClose();
    while (!stream.closed()) absl::SleepFor(absl::Milliseconds(1));
    EXPECT_EQ(stream.closed_reason(), v1::REASON_LIFECYCLE_VIOLATION) << requests;
  }
}

TEST_F(ReadinessTest, AWarmUpThatFailsIsTheReasonFromThenOn) {
  const absl::Status status =
      Attach([] { return MakeError(v1::REASON_ENGINE_FAILURE, "the first batch gave NaN"); });
  EXPECT_EQ(ReasonOf(status), v1::REASON_ENGINE_FAILURE);
  const v1::Health health = worker_.GetHealth();
  EXPECT_EQ(health.state(), v1::WORKER_STATE_FAILED);
  EXPECT_EQ(health.error().reason(), v1::REASON_ENGINE_FAILURE);
  EXPECT_EQ(health.error().message(), "the first batch gave NaN");
  EXPECT_EQ(GrpcHealth(), kNotServing);
  EXPECT_EQ(SessionError().reason(), v1::REASON_ENGINE_FAILURE);
}

}  // namespace
}  // namespace meshnet::worker
