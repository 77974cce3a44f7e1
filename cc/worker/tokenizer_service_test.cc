#include "cc/worker/tokenizer_service.h"

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "cc/common/status.h"
#include "cc/shard_engine/fake/fake_engine.h"
#include "cc/worker/authorizer.h"
#include "cc/worker/grpc_events.h"
#include "cc/worker/grpc_transport.h"
#include "cc/worker/json_log.h"
#include "cc/worker/shard_server.h"
#include "gmock/gmock.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/support/channel_arguments.h"
#include "gtest/gtest.h"
#include "proto/meshnet/shard/v1/shard.grpc.pb.h"
#include "proto/meshnet/shard/v1/tokenizer.grpc.pb.h"

namespace meshnet::worker {
namespace {

using ::testing::ElementsAre;

// Holds every text until it is let go.
class HeldTokenizer : public Tokenizer {
 public:
  explicit HeldTokenizer(const Tokenizer* tokenizer) : tokenizer_(tokenizer) {}

  uint32_t vocabulary_size() const override { return tokenizer_->vocabulary_size(); }
  bool add_bos() const override { return tokenizer_->add_bos(); }
  bool add_eos() const override { return tokenizer_->add_eos(); }
  std::vector<SpecialToken> special_tokens() const override { return tokenizer_->special_tokens(); }
  std::vector<int32_t> end_of_generation_ids() const override {
    return tokenizer_->end_of_generation_ids();
  }
  std::string chat_template() const override { return tokenizer_->chat_template(); }
  std::map<std::string, std::string> named_chat_templates() const override {
    return tokenizer_->named_chat_templates();
  }
  absl::StatusOr<std::vector<int32_t>> Tokenize(absl::string_view text, bool add_special,
                                                bool parse_special) const override {
    if (!busy_.HasBeenNotified()) busy_.Notify();
    let_go_.WaitForNotification();
    return tokenizer_->Tokenize(text, add_special, parse_special);
  }
  absl::StatusOr<std::string> Detokenize(absl::Span<const int32_t> token_ids,
                                         bool unparse_special) const override {
    return tokenizer_->Detokenize(token_ids, unparse_special);
  }
  absl::StatusOr<std::string> Piece(int32_t token_id) const override {
    return tokenizer_->Piece(token_id);
  }
  bool IsControl(int32_t token_id) const override { return tokenizer_->IsControl(token_id); }

  void WaitUntilBusy() const { busy_.WaitForNotification(); }
  void LetGo() { let_go_.Notify(); }

 private:
  const Tokenizer* const tokenizer_;
  mutable absl::Notification busy_;
  absl::Notification let_go_;
};

// The fake engine with that tokenizer.
class Engine : public ShardEngine {
 public:
  Engine() : fake_(*MakeFakeEngine({})), tokenizer_(&fake_->tokenizer()) {}

  HeldTokenizer* held() { return &tokenizer_; }

  const Capability& capability() const override { return fake_->capability(); }
  const Tokenizer& tokenizer() const override { return tokenizer_; }
  MemoryEstimate EstimateMemory() const override { return fake_->EstimateMemory(); }
  absl::Status WarmUp() override { return fake_->WarmUp(); }
  absl::Status OpenSession(const SessionKey& key, const SessionOptions& options,
                           std::vector<SessionKey>* evicted) override {
    return fake_->OpenSession(key, options, evicted);
  }
  absl::Status Execute(absl::Span<const Step> batch, std::vector<StepOutput>* outputs) override {
    return fake_->Execute(batch, outputs);
  }
  absl::Status Truncate(const SessionKey& key, uint32_t position) override {
    return fake_->Truncate(key, position);
  }
  absl::Status Release(const SessionKey& key) override { return fake_->Release(key); }
  std::vector<SessionKey> EvictIdle() override { return fake_->EvictIdle(); }
  void Cancel(const SessionKey& key) override { fake_->Cancel(key); }
  absl::Status health() const override { return fake_->health(); }
  EngineMetrics metrics() const override { return fake_->metrics(); }

 private:
  const std::unique_ptr<ShardEngine> fake_;
  HeldTokenizer tokenizer_;
};

class TokenizerServiceTest : public ::testing::Test {
 protected:
  TokenizerServiceTest()
      : logger_([](const std::string&) {}),
        dialer_(MakeGrpcDialer(&events_, {})),
        worker_({}, dialer_.get(), &allow_all_, &logger_) {
    auto engine = std::make_unique<Engine>();
    held_ = engine->held();
    ShardServerOptions options;
    // A busy machine under a sanitizer is slow, not dead.
    options.transport.keepalive_timeout = absl::Minutes(1);
    server_ = *ShardServer::Start(options, &events_, &worker_);
    EXPECT_TRUE(worker_.AttachEngine(std::move(engine)).ok());
    worker_.Start();
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(-1);
    channel_ = grpc::CreateCustomChannel(server_->address(), grpc::InsecureChannelCredentials(),
                                         arguments);
    stub_ = v1::TokenizerService::NewStub(channel_);
  }

  ~TokenizerServiceTest() override {
    stub_.reset();
    channel_.reset();
    server_->Shutdown(absl::ZeroDuration());
    worker_.Stop();
  }

  struct Call {
    grpc::ClientContext context;
    v1::TokenizeRequest request;
    v1::TokenizeResponse response;
    grpc::Status status;
    bool done = false;
  };

  void Tokenize(std::string text) {
    Call& call = calls_.emplace_back();
    call.request.set_text(std::move(text));
    stub_->async()->Tokenize(&call.context, &call.request, &call.response,
                             [this, &call](grpc::Status status) {
                               absl::MutexLock lock(&mu_);
                               call.status = std::move(status);
                               call.done = true;
                             });
  }

  // Waits until at least `count` calls are done; how many of them were refused with QUEUE_FULL.
  size_t Refused(size_t count) {
    const auto done = [&] {
      size_t finished = 0;
      for (const Call& call : calls_) finished += call.done ? 1 : 0;
      return finished >= count;
    };
    absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(&done));
    size_t refused = 0;
    for (const Call& call : calls_) {
      if (!call.done || call.status.ok()) continue;
      EXPECT_EQ(ReasonOf(FromGrpcStatus(call.status)), v1::REASON_QUEUE_FULL);
      EXPECT_EQ(call.status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
      ++refused;
    }
    return refused;
  }

  Logger logger_;
  AllowAll allow_all_;
  HeldTokenizer* held_ = nullptr;
  GrpcEvents events_;
  std::unique_ptr<Dialer> dialer_;
  Worker worker_;
  std::unique_ptr<ShardServer> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::TokenizerService::Stub> stub_;
  absl::Mutex mu_;
  // Stay where they are: callbacks point at them.
  std::deque<Call> calls_;
};

TEST_F(TokenizerServiceTest, SoManyCallsWaitAndNoMore) {
  Tokenize("0");
  held_->WaitUntilBusy();
  for (size_t i = 0; i < kMaxWaitingCalls + 3; ++i) Tokenize(absl::StrCat(i % 10));
  EXPECT_EQ(Refused(3), 3u);

  // Meanwhile the rest of the worker answers.
  const auto shard = v1::ShardService::NewStub(channel_);
  grpc::ClientContext context;
  v1::Health health;
  ASSERT_TRUE(shard->GetHealth(&context, {}, &health).ok());
  EXPECT_EQ(health.state(), v1::WORKER_STATE_READY);

  held_->LetGo();
  EXPECT_EQ(Refused(calls_.size()), 3u);
  Tokenize("again");
  EXPECT_EQ(Refused(calls_.size()), 3u);
  EXPECT_THAT(calls_.back().response.token_ids(), ElementsAre('a', 'g', 'a', 'i', 'n'));
}

TEST_F(TokenizerServiceTest, SoManyBytesWaitAndNoMore) {
  Tokenize("0");
  held_->WaitUntilBusy();
  const std::string text(kMaxTextBytes - 1024, 'x');
  for (size_t i = 0; i < kMaxWaitingBytes / kMaxTextBytes + 2; ++i) Tokenize(text);
  EXPECT_EQ(Refused(2), 2u);
  Tokenize("a short one fits");
  held_->LetGo();
  EXPECT_EQ(Refused(calls_.size()), 2u);
}

}  // namespace
}  // namespace meshnet::worker
