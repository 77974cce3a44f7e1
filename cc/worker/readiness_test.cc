// When a worker says that it is ready: after the warm-up, in all three places that say so.
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

// grpc.health.v1.HealthCheckResponse on the wire: field 1, a varint.
constexpr char kServing[] = "\x08\x01";
constexpr char kNotServing[] = "\x08\x02";

class ReadinessTest : public ::testing::Test {
 protected:
  ReadinessTest()
      : logger_([](const std::string&) {}),
        dialer_(MakeGrpcDialer({})),
        worker_({}, dialer_.get(), &allow_all_, &logger_) {
    ShardServerOptions options;
    options.listen = "127.0.0.1:0";
    server_ = *ShardServer::Start(options, &worker_);
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

  // The answer of grpc.health.v1.Health/Check, about all services.
  std::string GrpcHealth() {
    grpc::GenericStub stub(channel_);
    grpc::ClientContext context;
    const grpc::Slice nothing;
    const grpc::ByteBuffer request(&nothing, 1);
    grpc::ByteBuffer response;
    grpc::Status status;
    absl::Notification done;
    stub.UnaryCall(&context, "/grpc.health.v1.Health/Check", grpc::StubOptions(), &request,
                   &response, [&](grpc::Status result) {
                     status = std::move(result);
                     done.Notify();
                   });
    done.WaitForNotification();
    EXPECT_TRUE(status.ok()) << status.error_message();
    std::vector<grpc::Slice> slices;
    EXPECT_TRUE(response.Dump(&slices).ok());
    std::string bytes;
    for (const grpc::Slice& slice : slices) {
      bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
    }
    return bytes;
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
  std::unique_ptr<Dialer> dialer_;
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
