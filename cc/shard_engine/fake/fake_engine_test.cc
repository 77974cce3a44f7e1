#include "cc/shard_engine/fake/fake_engine.h"

#include <cmath>
#include <memory>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "cc/shard_engine/contract_test_suite.h"
#include "gtest/gtest.h"

namespace meshnet {
namespace {

FakeEngineOptions OptionsFor(const ContractConfig& config) {
  FakeEngineOptions options;
  options.layers = 6;
  options.range = config.range;
  options.batch_policy = config.batch_policy;
  options.max_sessions = config.max_sessions;
  options.context_tokens = config.context_tokens;
  options.max_step_tokens = config.max_step_tokens;
  options.idle_ttl = config.idle_ttl;
  options.lru_min_idle = config.lru_min_idle;
  options.now = config.now;
  options.before_batch = config.before_batch;
  return options;
}

EngineUnderTest FakeUnderTest() {
  EngineUnderTest engine;
  engine.name = "Fake";
  engine.model_layers = 6;
  engine.evidence = Evidence::kFixture;
  engine.make = [](const ContractConfig& config) { return MakeFakeEngine(OptionsFor(config)); };
  return engine;
}

INSTANTIATE_TEST_SUITE_P(Engines, EngineContractTest, testing::Values(FakeUnderTest()), NameOf);

class FakeEngineTest : public testing::Test {
 protected:
  void Make(const FakeEngineOptions& options) {
    auto engine = MakeFakeEngine(options);
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
    ASSERT_TRUE(engine_->OpenSession(Key('a'), {}, nullptr).ok());
  }

  StepOutput Run(uint32_t start, std::vector<int32_t> tokens, OutputRows rows = OutputRows::kNone) {
    Step step;
    step.session = Key('a');
    step.start_position = start;
    step.token_ids = tokens;
    step.output_rows = rows;
    std::vector<StepOutput> outputs;
    EXPECT_TRUE(engine_->Execute({step}, &outputs).ok());
    return std::move(outputs.at(0));
  }

  std::unique_ptr<ShardEngine> engine_;
};

TEST_F(FakeEngineTest, FailingStepsLeaveTheSessionAtItsStart) {
  FakeEngineOptions options;
  options.fail_from_step = 2;
  options.fail_steps = 2;
  Make(options);
  EXPECT_TRUE(Run(0, {1, 2, 3}).status.ok());
  const StepOutput failed = Run(2, {4});
  EXPECT_EQ(ReasonOf(failed.status), v1::REASON_ENGINE_FAILURE);
  EXPECT_EQ(failed.cached_tokens, 2u);
  EXPECT_EQ(ReasonOf(Run(2, {4}).status), v1::REASON_ENGINE_FAILURE);
  EXPECT_EQ(Run(2, {4}).cached_tokens, 3u);
}

TEST_F(FakeEngineTest, MemoryPressureRefusesAndEvictionMakesRoom) {
  absl::Time now = absl::UnixEpoch();
  FakeEngineOptions options;
  options.layers = 2;
  options.width = 4;
  options.memory_budget_bytes = 10 * 2 * 4 * sizeof(float);  // ten tokens
  options.now = [&now] { return now; };
  Make(options);
  ASSERT_TRUE(engine_->OpenSession(Key('b'), {}, nullptr).ok());
  EXPECT_EQ(engine_->metrics().kv_budget_bytes, options.memory_budget_bytes);
  EXPECT_TRUE(Run(0, {1, 2, 3, 4, 5, 6}).status.ok());
  Step step;
  step.session = Key('b');
  const std::vector<int32_t> tokens = {1, 2, 3, 4, 5};
  step.token_ids = tokens;
  std::vector<StepOutput> outputs;
  ASSERT_TRUE(engine_->Execute({step}, &outputs).ok());
  EXPECT_EQ(ReasonOf(outputs[0].status), v1::REASON_MEMORY_BUDGET_EXCEEDED);
  EXPECT_EQ(outputs[0].cached_tokens, 0u);
  now += absl::Seconds(10);
  ASSERT_TRUE(engine_->Execute({step}, &outputs).ok());
  EXPECT_TRUE(outputs[0].status.ok()) << outputs[0].status;
  EXPECT_THAT(engine_->EvictIdle(), testing::ElementsAre(Key('a')));
  EXPECT_EQ(ReasonOf(Run(6, {7}).status), v1::REASON_SESSION_EVICTED);
}

TEST_F(FakeEngineTest, MalformedResiduals) {
  FakeEngineOptions options;
  options.range = {0, 4};
  options.malformed = FakeEngineOptions::Malformed::kNonFinite;
  options.malformed_from_step = 2;
  Make(options);
  EXPECT_FALSE(std::isnan(Run(0, {1}).residual.back()));
  EXPECT_TRUE(std::isnan(Run(1, {1}).residual.back()));
  options.malformed = FakeEngineOptions::Malformed::kWrongWidth;
  options.malformed_from_step = 1;
  Make(options);
  EXPECT_EQ(Run(0, {1, 2}).residual.size(), 2 * options.width - 1);
}

TEST_F(FakeEngineTest, MalformedTokens) {
  FakeEngineOptions options;
  options.malformed = FakeEngineOptions::Malformed::kBadToken;
  Make(options);
  EXPECT_EQ(Run(0, {1}, OutputRows::kLast).token->token_id, 320);
}

TEST_F(FakeEngineTest, CancelEndsADelay) {
  FakeEngineOptions options;
  options.delay = absl::InfiniteDuration();
  absl::Notification running;
  options.before_batch = [&running] { running.Notify(); };
  Make(options);
  std::thread canceller([&] {
    running.WaitForNotification();
    engine_->Cancel(Key('a'));
  });
  EXPECT_EQ(ReasonOf(Run(0, {1, 2}).status), v1::REASON_CANCELLED);
  canceller.join();
}

TEST_F(FakeEngineTest, CrashEndsTheProcess) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  FakeEngineOptions options;
  options.crash_at_step = 2;
  Make(options);
  EXPECT_TRUE(Run(0, {1}).status.ok());
  EXPECT_EXIT(Run(1, {1}), testing::KilledBySignal(SIGABRT), "");
}

TEST_F(FakeEngineTest, GreedyTextIsPrintableAndEndsWhenAsked) {
  FakeEngineOptions options;
  options.end_of_generation_one_in = 10;
  Make(options);
  int32_t token = 65;
  uint32_t position = 0;
  bool ended = false;
  while (!ended && position < 200) {
    const StepOutput output = Run(position++, {token}, OutputRows::kLast);
    token = output.token->token_id;
    ended = output.token->end_of_generation;
    EXPECT_TRUE(ended || (token >= 0x20 && token < 0x7f)) << token;
  }
  EXPECT_TRUE(ended);
  EXPECT_EQ(token, 257);
}

TEST_F(FakeEngineTest, TheChatTemplateNamesTheSpecialTokens) {
  Make({});
  const Tokenizer& tokenizer = engine_->tokenizer();
  EXPECT_THAT(tokenizer.chat_template(), testing::HasSubstr("<|assistant|>"));
  EXPECT_THAT(*tokenizer.Tokenize("<|user|>a<|assistant|>", true, true),
              testing::ElementsAre(256, 258, 'a', 259));
  EXPECT_THAT(*tokenizer.Tokenize("<eos>", false, false),
              testing::ElementsAre('<', 'e', 'o', 's', '>'));
  EXPECT_EQ(*tokenizer.Detokenize({258, 'a', 257}, false), "a");
  EXPECT_EQ(*tokenizer.Detokenize({258, 'a', 257}, true), "<|user|>a<eos>");
}

TEST_F(FakeEngineTest, ImpossibleOptionsAreRefused) {
  FakeEngineOptions options;
  options.vocabulary_size = 259;
  EXPECT_EQ(ReasonOf(MakeFakeEngine(options).status()), v1::REASON_CONFIGURATION_INVALID);
  options = {};
  options.max_sessions = 0;
  EXPECT_EQ(ReasonOf(MakeFakeEngine(options).status()), v1::REASON_CONFIGURATION_INVALID);
}

}  // namespace
}  // namespace meshnet
