// What every ShardEngine must do, as tests. One instantiation per engine, in that engine's own
// test:
//
//   INSTANTIATE_TEST_SUITE_P(Fake, EngineContractTest, testing::Values(FakeUnderTest()), NameOf);
//
// Comparisons are exact: a session's results depend on its own rows, cut the same way, and on
// nothing else (BatchPolicy::kExact).
#ifndef MESHNET_CC_SHARD_ENGINE_CONTRACT_TEST_SUITE_H_
#define MESHNET_CC_SHARD_ENGINE_CONTRACT_TEST_SUITE_H_

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <ostream>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/synchronization/notification.h"
#include "cc/common/status.h"
#include "cc/shard_engine/engine_chain.h"
#include "cc/shard_engine/sampler.h"
#include "cc/shard_engine/shard_engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace meshnet {

struct ContractConfig {
  LayerRange range;  // end 0 = all
  BatchPolicy batch_policy = BatchPolicy::kExact;
  uint32_t max_sessions = 4;
  uint32_t context_tokens = 128;
  uint32_t max_step_tokens = 16;
  absl::Duration idle_ttl = absl::InfiniteDuration();
  absl::Duration lru_min_idle = absl::Seconds(10);
  std::function<absl::Time()> now = absl::Now;
  // Called on the engine thread once a batch has passed its checks, before it runs.
  std::function<void()> before_batch = nullptr;
};

struct EngineUnderTest {
  std::string name;
  uint32_t model_layers = 0;
  Evidence evidence = Evidence::kFixture;
  std::function<absl::StatusOr<std::unique_ptr<ShardEngine>>(const ContractConfig&)> make;

  friend std::ostream& operator<<(std::ostream& out, const EngineUnderTest& engine) {
    return out << engine.name;
  }
};

inline std::string NameOf(const testing::TestParamInfo<EngineUnderTest>& info) {
  return info.param.name;
}

class EngineContractTest : public testing::TestWithParam<EngineUnderTest> {
 protected:
  uint32_t layers() const { return GetParam().model_layers; }

  std::unique_ptr<ShardEngine> Make(const ContractConfig& config = {}) const {
    auto engine = GetParam().make(config);
    EXPECT_TRUE(engine.ok()) << engine.status();
    return engine.ok() ? *std::move(engine) : nullptr;
  }

  std::unique_ptr<ShardEngine> MakeRange(uint32_t begin, uint32_t end) const {
    ContractConfig config;
    config.range = {begin, end};
    return Make(config);
  }

  EngineChain MakeChain(const std::vector<uint32_t>& cuts, ContractConfig config = {}) const {
    EngineChain chain;
    uint32_t begin = 0;
    for (size_t i = 0; i <= cuts.size(); ++i) {
      const uint32_t end = i < cuts.size() ? cuts[i] : layers();
      config.range = {begin, end};
      chain.push_back(Make(config));
      begin = end;
    }
    return chain;
  }

  static std::vector<int32_t> Tokens(const ShardEngine& engine, size_t n, uint32_t seed) {
    return RandomTokens(engine.capability().vocabulary_size, n, seed);
  }

  static absl::Status Open(ShardEngine& engine, const SessionKey& key,
                           std::vector<SessionKey>* evicted = nullptr) {
    return engine.OpenSession(key, {}, evicted);
  }

  static v1::Reason ReasonAfter(ShardEngine& engine, const Step& step) {
    return ReasonOf(RunStep(engine, step).status);
  }

  // Proves that `key` holds exactly `tokens` tokens.
  static void ExpectHolds(ShardEngine& engine, const SessionKey& key, uint32_t tokens) {
    EXPECT_EQ(ReasonOf(engine.Truncate(key, tokens + 1)), v1::REASON_CACHE_MISS);
    EXPECT_TRUE(engine.Truncate(key, tokens).ok());
  }
};

// --- Identity ---

TEST_P(EngineContractTest, CapabilityNamesItsRangeAndItsSeams) {
  const uint32_t cut = layers() / 2;
  const auto head = MakeRange(0, cut);
  const auto tail = MakeRange(cut, layers());
  const auto whole = Make();
  for (const auto* engine : {&head, &tail, &whole}) {
    const Capability& c = (*engine)->capability();
    EXPECT_EQ(c.model_layers, layers());
    EXPECT_EQ(c.evidence, GetParam().evidence);
    EXPECT_EQ(c.artifact_sha256.size(), 64u);
    EXPECT_FALSE(c.architecture.empty());
    EXPECT_TRUE(std::is_sorted(c.recipe.begin(), c.recipe.end()));
    EXPECT_EQ(c.recipe_fingerprint, RecipeFingerprint(c.recipe));
    EXPECT_EQ(c.recipe_fingerprint, whole->capability().recipe_fingerprint);
    EXPECT_EQ(c.max_sessions, 4u);
    EXPECT_EQ(c.context_tokens, 128u);
    EXPECT_EQ(c.max_step_tokens, 16u);
    EXPECT_GT(c.owned_tensors, 0u);
    EXPECT_GT(c.owned_tensor_bytes, 0u);
  }
  EXPECT_EQ(head->capability().range, (LayerRange{0, cut}));
  EXPECT_EQ(tail->capability().range, (LayerRange{cut, layers()}));
  EXPECT_EQ(whole->capability().range, (LayerRange{0, layers()}));
  EXPECT_FALSE(head->capability().boundary_in.has_value());
  EXPECT_FALSE(tail->capability().boundary_out.has_value());
  ASSERT_TRUE(head->capability().boundary_out.has_value());
  ASSERT_TRUE(tail->capability().boundary_in.has_value());
  EXPECT_EQ(*head->capability().boundary_out, *tail->capability().boundary_in);
  EXPECT_LT(head->capability().owned_tensors, whole->capability().owned_tensors);
  EXPECT_LT(head->capability().owned_tensor_bytes, whole->capability().owned_tensor_bytes);
}

TEST_P(EngineContractTest, RangesOutsideTheModelAreRefused) {
  for (const LayerRange range :
       {LayerRange{2, 2}, LayerRange{3, 1}, LayerRange{0, layers() + 1},
        LayerRange{layers(), layers() + 1}, LayerRange{layers(), 0}, LayerRange{0, 0xffffffffu},
        LayerRange{0x80000000u, 0x80000001u}}) {
    ContractConfig config;
    config.range = range;
    const auto engine = GetParam().make(config);
    EXPECT_EQ(ReasonOf(engine.status()), v1::REASON_LAYER_RANGE_INVALID)
        << range.begin << ", " << range.end;
  }
}

TEST_P(EngineContractTest, MemoryEstimateFollowsTheRange) {
  const auto whole = Make();
  const auto head = MakeRange(0, 1);
  EXPECT_GE(whole->EstimateMemory().weights, whole->capability().owned_tensor_bytes);
  EXPECT_GT(head->EstimateMemory().kv_per_session, 0u);
  uint64_t kv = 0;
  for (uint32_t layer = 0; layer < layers(); ++layer) {
    kv += MakeRange(layer, layer + 1)->EstimateMemory().kv_per_session;
  }
  EXPECT_EQ(whole->EstimateMemory().kv_per_session, kv);
  EXPECT_LT(head->EstimateMemory().weights, whole->EstimateMemory().weights);
}

TEST_P(EngineContractTest, ReservedHooksRefuse) {
  const auto engine = Make();
  ASSERT_TRUE(Open(*engine, Key('a')).ok());
  EXPECT_EQ(ReasonOf(engine->EnableMtp()), v1::REASON_FEATURE_UNSUPPORTED);
  EXPECT_EQ(ReasonOf(engine->ImportAuxiliaryState(Key('a'), "state")),
            v1::REASON_FEATURE_UNSUPPORTED);
}

// --- Positions ---

TEST_P(EngineContractTest, PrefillAndDecodeAppend) {
  const auto engine = Make();
  ASSERT_TRUE(Open(*engine, Key('a')).ok());
  const auto tokens = Tokens(*engine, 18, 1);
  const auto all = absl::MakeConstSpan(tokens);
  EXPECT_EQ(RunStep(*engine, MakeStep(Key('a'), 0, all.subspan(0, 16))).cached_tokens, 16u);
  EXPECT_EQ(RunStep(*engine, MakeStep(Key('a'), 16, all.subspan(16, 1))).cached_tokens, 17u);
  const StepOutput last =
      RunStep(*engine, MakeStep(Key('a'), 17, all.subspan(17), OutputRows::kLast));
  EXPECT_EQ(last.cached_tokens, 18u);
  EXPECT_TRUE(last.token.has_value());
  EXPECT_TRUE(last.logits.empty());
  EXPECT_TRUE(last.residual.empty());
}

TEST_P(EngineContractTest, AHeadGivesOneResidualRowPerToken) {
  const auto head = MakeRange(0, 1);
  ASSERT_TRUE(Open(*head, Key('a')).ok());
  const auto tokens = Tokens(*head, 5, 2);
  const StepOutput output = RunStep(*head, MakeStep(Key('a'), 0, tokens));
  ASSERT_TRUE(output.status.ok());
  EXPECT_EQ(output.residual.size(), 5 * head->capability().boundary_out->residual_width());
  EXPECT_FALSE(output.token.has_value());
  EXPECT_TRUE(std::all_of(output.residual.begin(), output.residual.end(),
                          [](float value) { return std::isfinite(value); }));
}

TEST_P(EngineContractTest, StartPositionDropsWhatFollows) {
  const auto engine = Make();
  const auto tokens = Tokens(*engine, 12, 3);
  const auto other = Tokens(*engine, 4, 4);
  const auto all = absl::MakeConstSpan(tokens);
  ASSERT_TRUE(Open(*engine, Key('a')).ok());
  RunStep(*engine, MakeStep(Key('a'), 0, all.subspan(0, 6)));
  RunStep(*engine, MakeStep(Key('a'), 6, all.subspan(6, 6)));
  const StepOutput again = RunStep(*engine, MakeStep(Key('a'), 6, other, OutputRows::kAllLogits));
  EXPECT_EQ(again.cached_tokens, 10u);

  ASSERT_TRUE(Open(*engine, Key('b')).ok());
  RunStep(*engine, MakeStep(Key('b'), 0, all.subspan(0, 6)));
  const StepOutput fresh = RunStep(*engine, MakeStep(Key('b'), 6, other, OutputRows::kAllLogits));
  ASSERT_FALSE(fresh.logits.empty());
  EXPECT_EQ(again.logits, fresh.logits);
}

TEST_P(EngineContractTest, TruncateDropsWhatFollows) {
  const auto engine = Make();
  const auto tokens = Tokens(*engine, 10, 5);
  const auto all = absl::MakeConstSpan(tokens);
  ASSERT_TRUE(Open(*engine, Key('a')).ok());
  RunStep(*engine, MakeStep(Key('a'), 0, all.subspan(0, 7)));
  const StepOutput first =
      RunStep(*engine, MakeStep(Key('a'), 7, all.subspan(7), OutputRows::kAllLogits));
  ASSERT_TRUE(engine->Truncate(Key('a'), 7).ok());
  EXPECT_EQ(ReasonAfter(*engine, MakeStep(Key('a'), 8, all.subspan(8))), v1::REASON_CACHE_MISS);
  const StepOutput second =
      RunStep(*engine, MakeStep(Key('a'), 7, all.subspan(7), OutputRows::kAllLogits));
  ASSERT_FALSE(first.logits.empty());
  EXPECT_EQ(first.logits, second.logits);
  EXPECT_TRUE(engine->Truncate(Key('a'), 10).ok());
  EXPECT_TRUE(engine->Truncate(Key('a'), 0).ok());
  ExpectHolds(*engine, Key('a'), 0);
}

TEST_P(EngineContractTest, AStepBeyondTheCacheIsACacheMiss) {
  const auto engine = Make();
  const auto tokens = Tokens(*engine, 4, 6);
  ASSERT_TRUE(Open(*engine, Key('a')).ok());
  EXPECT_EQ(ReasonAfter(*engine, MakeStep(Key('a'), 1, tokens)), v1::REASON_CACHE_MISS);
  EXPECT_TRUE(RunStep(*engine, MakeStep(Key('a'), 0, tokens)).status.ok());
  EXPECT_EQ(ReasonAfter(*engine, MakeStep(Key('a'), 5, tokens)), v1::REASON_CACHE_MISS);
  EXPECT_EQ(ReasonAfter(*engine, MakeStep(Key('a'), 0xffffffffu, tokens)), v1::REASON_CACHE_MISS);
  EXPECT_EQ(RunStep(*engine, MakeStep(Key('a'), 4, tokens)).cached_tokens, 8u);
}

TEST_P(EngineContractTest, TheContextIsABound) {
  ContractConfig config;
  config.context_tokens = 20;
  const auto engine = Make(config);
  const auto tokens = Tokens(*engine, 16, 7);
  const auto all = absl::MakeConstSpan(tokens);
  ASSERT_TRUE(Open(*engine, Key('a')).ok());
  RunStep(*engine, MakeStep(Key('a'), 0, all));
  EXPECT_EQ(ReasonAfter(*engine, MakeStep(Key('a'), 16, all.subspan(0, 5))),
            v1::REASON_CONTEXT_EXCEEDED);
  ExpectHolds(*engine, Key('a'), 16);
  EXPECT_EQ(RunStep(*engine, MakeStep(Key('a'), 16, all.subspan(0, 4))).cached_tokens, 20u);
  EXPECT_EQ(ReasonAfter(*engine, MakeStep(Key('a'), 20, all.subspan(0, 1))),
            v1::REASON_CONTEXT_EXCEEDED);
}

// --- Steps that are wrong by themselves ---

TEST_P(EngineContractTest, RowCountsOutsideTheBoundsAreRefused) {
  const auto engine = Make();
  ASSERT_TRUE(Open(*engine, Key('a')).ok());
  const auto tokens = Tokens(*engine, 17, 8);
  EXPECT_EQ(ReasonAfter(*engine, MakeStep(Key('a'), 0, {})), v1::REASON_SHAPE_MISMATCH);
  EXPECT_EQ(ReasonAfter(*engine, MakeStep(Key('a'), 0, tokens)), v1::REASON_SHAPE_MISMATCH);
  ExpectHolds(*engine, Key('a'), 0);
}

TEST_P(EngineContractTest, TokensOutsideTheVocabularyAreRefusedAtEveryStage) {
  const auto head = MakeRange(0, 1);
  const auto tail = MakeRange(1, layers());
  ASSERT_TRUE(Open(*head, Key('a')).ok());
  ASSERT_TRUE(Open(*tail, Key('a')).ok());
  const auto vocabulary = static_cast<int32_t>(head->capability().vocabulary_size);
  const std::vector<float> residual(2 * tail->capability().boundary_in->residual_width(), 0.5f);
  for (const int32_t bad :
       {-1, vocabulary, std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()}) {
    const std::vector<int32_t> tokens = {1, bad};
    EXPECT_EQ(ReasonAfter(*head, MakeStep(Key('a'), 0, tokens)), v1::REASON_TOKEN_OUT_OF_RANGE);
    Step step = MakeStep(Key('a'), 0, tokens);
    step.residual = residual;
    EXPECT_EQ(ReasonAfter(*tail, step), v1::REASON_TOKEN_OUT_OF_RANGE);
  }
  ExpectHolds(*head, Key('a'), 0);
}

TEST_P(EngineContractTest, ResidualsOfTheWrongSizeAreRefused) {
  const auto head = MakeRange(0, 1);
  const auto tail = MakeRange(1, layers());
  ASSERT_TRUE(Open(*head, Key('a')).ok());
  ASSERT_TRUE(Open(*tail, Key('a')).ok());
  const size_t width = tail->capability().boundary_in->residual_width();
  const auto tokens = Tokens(*head, 3, 9);
  for (const size_t size : {size_t{0}, width, 3 * width - 1, 3 * width + 1, 4 * width}) {
    const std::vector<float> residual(size, 0.25f);
    Step step = MakeStep(Key('a'), 0, tokens);
    step.residual = residual;
    EXPECT_EQ(ReasonAfter(*tail, step), v1::REASON_SHAPE_MISMATCH) << size;
  }
  const std::vector<float> residual(3 * width, 0.25f);
  Step step = MakeStep(Key('a'), 0, tokens);
  step.residual = residual;
  EXPECT_EQ(ReasonAfter(*head, step), v1::REASON_SHAPE_MISMATCH) << "a head takes no residual";
  EXPECT_TRUE(RunStep(*tail, step).status.ok());
}

TEST_P(EngineContractTest, NonFiniteResidualsAreRefused) {
  const auto tail = MakeRange(1, layers());
  ASSERT_TRUE(Open(*tail, Key('a')).ok());
  const size_t width = tail->capability().boundary_in->residual_width();
  const auto tokens = Tokens(*tail, 2, 10);
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
        -std::numeric_limits<float>::infinity()}) {
    for (const size_t at : {size_t{0}, width, 2 * width - 1}) {
      std::vector<float> residual(2 * width, 0.25f);
      residual[at] = bad;
      Step step = MakeStep(Key('a'), 0, tokens);
      step.residual = residual;
      EXPECT_EQ(ReasonAfter(*tail, step), v1::REASON_NON_FINITE_VALUE);
    }
  }
  ExpectHolds(*tail, Key('a'), 0);
}

TEST_P(EngineContractTest, OnlyTheTailHasTokensAndLogits) {
  const auto head = MakeRange(0, 1);
  ASSERT_TRUE(Open(*head, Key('a')).ok());
  const auto tokens = Tokens(*head, 2, 11);
  EXPECT_EQ(ReasonAfter(*head, MakeStep(Key('a'), 0, tokens, OutputRows::kLast)),
            v1::REASON_FEATURE_UNSUPPORTED);
  EXPECT_EQ(ReasonAfter(*head, MakeStep(Key('a'), 0, tokens, OutputRows::kAllLogits)),
            v1::REASON_FEATURE_UNSUPPORTED);
  Step step = MakeStep(Key('a'), 0, tokens);
  step.return_logits = true;
  EXPECT_EQ(ReasonAfter(*head, step), v1::REASON_FEATURE_UNSUPPORTED);
  ExpectHolds(*head, Key('a'), 0);
}

TEST_P(EngineContractTest, InvalidSamplingIsRefusedBeforeTheStepRuns) {
  const auto engine = Make();
  ASSERT_TRUE(Open(*engine, Key('a')).ok());
  const auto tokens = Tokens(*engine, 2, 12);
  Step step = MakeStep(Key('a'), 0, tokens, OutputRows::kLast);
  step.sampling.emplace();
  step.sampling->temperature = -1.0f;
  EXPECT_EQ(ReasonAfter(*engine, step), v1::REASON_SAMPLING_INVALID);
  step.sampling->temperature = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(ReasonAfter(*engine, step), v1::REASON_SAMPLING_INVALID);
  ExpectHolds(*engine, Key('a'), 0);
}

// --- Sessions and epochs ---

TEST_P(EngineContractTest, UnknownSessionsAreRefusedEverywhere) {
  const auto engine = Make();
  const auto tokens = Tokens(*engine, 2, 13);
  EXPECT_EQ(ReasonAfter(*engine, MakeStep(Key('a'), 0, tokens)), v1::REASON_SESSION_UNKNOWN);
  EXPECT_EQ(ReasonOf(engine->Truncate(Key('a'), 0)), v1::REASON_SESSION_UNKNOWN);
  EXPECT_EQ(ReasonOf(engine->Release(Key('a'))), v1::REASON_SESSION_UNKNOWN);
  engine->Cancel(Key('a'));
  EXPECT_TRUE(Open(*engine, Key('a')).ok());
  EXPECT_TRUE(RunStep(*engine, MakeStep(Key('a'), 0, tokens)).status.ok())
      << "a cancel before the session existed has no effect";
}

TEST_P(EngineContractTest, ASessionOpensOnce) {
  const auto engine = Make();
  ASSERT_TRUE(Open(*engine, Key('a')).ok());
  EXPECT_EQ(ReasonOf(Open(*engine, Key('a'))), v1::REASON_SESSION_EXISTS);
  EXPECT_TRUE(engine->Release(Key('a')).ok());
  EXPECT_EQ(ReasonOf(engine->Release(Key('a'))), v1::REASON_SESSION_UNKNOWN);
  EXPECT_TRUE(Open(*engine, Key('a')).ok());
  ExpectHolds(*engine, Key('a'), 0);
}

TEST_P(EngineContractTest, ANewerEpochReplacesTheOlderOne) {
  const auto engine = Make();
  const auto tokens = Tokens(*engine, 4, 14);
  ASSERT_TRUE(Open(*engine, Key('a', 3)).ok());
  RunStep(*engine, MakeStep(Key('a', 3), 0, tokens));
  std::vector<SessionKey> evicted;
  ASSERT_TRUE(Open(*engine, Key('a', 5), &evicted).ok());
  EXPECT_THAT(evicted, testing::ElementsAre(Key('a', 3)));
  ExpectHolds(*engine, Key('a', 5), 0);
  EXPECT_EQ(engine->metrics().open_sessions, 1u);

  EXPECT_EQ(ReasonAfter(*engine, MakeStep(Key('a', 3), 4, tokens)), v1::REASON_STALE_EPOCH);
  EXPECT_EQ(ReasonOf(engine->Truncate(Key('a', 3), 0)), v1::REASON_STALE_EPOCH);
  EXPECT_EQ(ReasonOf(engine->Release(Key('a', 3))), v1::REASON_STALE_EPOCH);
  EXPECT_EQ(ReasonOf(Open(*engine, Key('a', 4))), v1::REASON_STALE_EPOCH);
  EXPECT_EQ(ReasonAfter(*engine, MakeStep(Key('a', 6), 0, tokens)), v1::REASON_SESSION_UNKNOWN);

  ASSERT_TRUE(engine->Release(Key('a', 5)).ok());
  EXPECT_EQ(ReasonOf(Open(*engine, Key('a', 4))), v1::REASON_STALE_EPOCH)
      << "epochs are remembered after a release";
  EXPECT_TRUE(Open(*engine, Key('b', 1)).ok()) << "other sessions have their own epochs";
}

TEST_P(EngineContractTest, MalformedKeysAreRefused) {
  const auto engine = Make();
  EXPECT_EQ(ReasonOf(Open(*engine, {"short", 1})), v1::REASON_FIELD_OUT_OF_BOUNDS);
  EXPECT_EQ(ReasonOf(Open(*engine, {std::string(17, 'x'), 1})), v1::REASON_FIELD_OUT_OF_BOUNDS);
  EXPECT_EQ(ReasonOf(Open(*engine, Key('a', 0))), v1::REASON_FIELD_OUT_OF_BOUNDS);
}

TEST_P(EngineContractTest, FullSlotsRefuseUntilOneIsIdleLongEnough) {
  absl::Time now = absl::UnixEpoch();
  ContractConfig config;
  config.max_sessions = 2;
  config.now = [&now] { return now; };
  const auto engine = Make(config);
  const auto tokens = Tokens(*engine, 3, 15);
  ASSERT_TRUE(Open(*engine, Key('a')).ok());
  now += absl::Seconds(1);
  ASSERT_TRUE(Open(*engine, Key('b')).ok());
  now += absl::Seconds(1);
  RunStep(*engine, MakeStep(Key('a'), 0, tokens));  // now b is the least recently used
  now += absl::Seconds(8);
  const absl::Status full = Open(*engine, Key('c'));
  EXPECT_EQ(ReasonOf(full), v1::REASON_SESSIONS_EXHAUSTED);
  EXPECT_GT(RetryAfterMsOf(full), 0u);
  now += absl::Seconds(1);
  std::vector<SessionKey> evicted;
  ASSERT_TRUE(Open(*engine, Key('c'), &evicted).ok());
  EXPECT_THAT(evicted, testing::ElementsAre(Key('b')));
  EXPECT_EQ(ReasonAfter(*engine, MakeStep(Key('b'), 0, tokens)), v1::REASON_SESSION_EVICTED);
  EXPECT_EQ(engine->metrics().sessions_evicted, 1u);
  EXPECT_EQ(RunStep(*engine, MakeStep(Key('a'), 3, tokens)).cached_tokens, 6u);
  ExpectHolds(*engine, Key('c'), 0);
}

TEST_P(EngineContractTest, IdleSessionsAreEvictedAfterTheirTtl) {
  absl::Time now = absl::UnixEpoch();
  ContractConfig config;
  config.idle_ttl = absl::Seconds(100);
  config.now = [&now] { return now; };
  const auto engine = Make(config);
  const auto tokens = Tokens(*engine, 3, 16);
  ASSERT_TRUE(Open(*engine, Key('a')).ok());
  ASSERT_TRUE(engine->OpenSession(Key('b'), {absl::Seconds(30)}, nullptr).ok());
  ASSERT_TRUE(engine->OpenSession(Key('c'), {absl::Seconds(500)}, nullptr).ok());
  now += absl::Seconds(30);
  EXPECT_TRUE(engine->EvictIdle().empty());
  now += absl::Seconds(1);
  EXPECT_THAT(engine->EvictIdle(), testing::ElementsAre(Key('b')));
  now += absl::Seconds(69);
  RunStep(*engine, MakeStep(Key('a'), 0, tokens));
  now += absl::Seconds(1);
  EXPECT_THAT(engine->EvictIdle(), testing::ElementsAre(Key('c')))
      << "a session cannot lengthen the engine's own limit";
  now += absl::Seconds(100);
  EXPECT_THAT(engine->EvictIdle(), testing::ElementsAre(Key('a')));
  EXPECT_EQ(ReasonOf(engine->Release(Key('a'))), v1::REASON_SESSION_EVICTED);
  EXPECT_EQ(engine->metrics().open_sessions, 0u);
  EXPECT_EQ(engine->metrics().kv_bytes, 0u);
  EXPECT_EQ(engine->metrics().sessions_evicted, 3u);
}

// --- Cancel ---

TEST_P(EngineContractTest, ACancelledSessionStaysCancelledUntilReleased) {
  const auto engine = Make();
  const auto tokens = Tokens(*engine, 3, 17);
  ASSERT_TRUE(Open(*engine, Key('a')).ok());
  ASSERT_TRUE(Open(*engine, Key('b')).ok());
  RunStep(*engine, MakeStep(Key('a'), 0, tokens));
  engine->Cancel(Key('a'));
  EXPECT_EQ(ReasonAfter(*engine, MakeStep(Key('a'), 3, tokens)), v1::REASON_CANCELLED);
  EXPECT_EQ(ReasonAfter(*engine, MakeStep(Key('a'), 3, tokens)), v1::REASON_CANCELLED);
  EXPECT_TRUE(RunStep(*engine, MakeStep(Key('b'), 0, tokens)).status.ok());
  ASSERT_TRUE(engine->Release(Key('a')).ok());
  ASSERT_TRUE(Open(*engine, Key('a')).ok());
  EXPECT_TRUE(RunStep(*engine, MakeStep(Key('a'), 0, tokens)).status.ok());
}

TEST_P(EngineContractTest, CancelReachesARunningBatch) {
  ShardEngine* raw = nullptr;
  bool armed = false;
  ContractConfig config;
  config.before_batch = [&] {
    if (!armed) return;
    std::thread([&] { raw->Cancel(Key('a')); }).join();
  };
  const auto engine = Make(config);
  raw = engine.get();
  const auto tokens = Tokens(*engine, 6, 18);
  const auto all = absl::MakeConstSpan(tokens);
  for (const char id : {'a', 'b', 'c'}) {
    ASSERT_TRUE(Open(*engine, Key(id)).ok());
    RunStep(*engine, MakeStep(Key(id), 0, all.subspan(0, 3)));
  }
  armed = true;
  std::vector<StepOutput> outputs;
  ASSERT_TRUE(engine
                  ->Execute({MakeStep(Key('b'), 3, all.subspan(3), OutputRows::kAllLogits),
                             MakeStep(Key('a'), 2, all.subspan(3), OutputRows::kAllLogits)},
                            &outputs)
                  .ok());
  armed = false;
  EXPECT_EQ(ReasonOf(outputs[1].status), v1::REASON_CANCELLED);
  EXPECT_TRUE(outputs[1].logits.empty());
  EXPECT_EQ(outputs[1].cached_tokens, 2u) << "exactly start_position tokens";
  ExpectHolds(*engine, Key('a'), 2);
  ASSERT_TRUE(outputs[0].status.ok()) << outputs[0].status;
  const StepOutput alone =
      RunStep(*engine, MakeStep(Key('c'), 3, all.subspan(3), OutputRows::kAllLogits));
  EXPECT_EQ(outputs[0].logits, alone.logits);
}

TEST_P(EngineContractTest, CancelFromAnotherThreadEndsALoopOfSteps) {
  const auto engine = Make();
  const auto tokens = Tokens(*engine, 16, 19);
  ASSERT_TRUE(Open(*engine, Key('a')).ok());
  absl::Notification started;
  std::thread canceller([&] {
    started.WaitForNotification();
    engine->Cancel(Key('a'));
  });
  // Ends because a cancel is never forgotten.
  absl::Status status;
  while (status.ok()) {
    status = RunStep(*engine, MakeStep(Key('a'), 0, tokens)).status;
    if (!started.HasBeenNotified()) started.Notify();
  }
  canceller.join();
  EXPECT_EQ(ReasonOf(status), v1::REASON_CANCELLED);
}

// --- Batches ---

TEST_P(EngineContractTest, OneBadStepDoesNotTouchTheOthers) {
  const auto engine = Make();
  const auto tokens = Tokens(*engine, 6, 20);
  for (const char id : {'a', 'b', 'c'}) ASSERT_TRUE(Open(*engine, Key(id)).ok());
  std::vector<int32_t> bad = tokens;
  bad[3] = -5;
  std::vector<StepOutput> outputs;
  ASSERT_TRUE(engine
                  ->Execute({MakeStep(Key('c'), 0, tokens, OutputRows::kAllLogits),
                             MakeStep(Key('b'), 0, bad, OutputRows::kAllLogits),
                             MakeStep(Key('x'), 0, tokens),
                             MakeStep(Key('a'), 0, tokens, OutputRows::kAllLogits)},
                            &outputs)
                  .ok());
  ASSERT_EQ(outputs.size(), 4u);
  EXPECT_TRUE(outputs[0].status.ok());
  EXPECT_EQ(ReasonOf(outputs[1].status), v1::REASON_TOKEN_OUT_OF_RANGE);
  EXPECT_EQ(ReasonOf(outputs[2].status), v1::REASON_SESSION_UNKNOWN);
  EXPECT_TRUE(outputs[3].status.ok());
  EXPECT_EQ(outputs[0].logits.size(), 6 * engine->capability().vocabulary_size);
  EXPECT_EQ(outputs[0].logits, outputs[3].logits);
  ExpectHolds(*engine, Key('b'), 0);
  ExpectHolds(*engine, Key('a'), 6);
}

TEST_P(EngineContractTest, TwoStepsOfOneSessionAreNoBatch) {
  const auto engine = Make();
  const auto tokens = Tokens(*engine, 2, 21);
  ASSERT_TRUE(Open(*engine, Key('a')).ok());
  std::vector<StepOutput> outputs;
  const absl::Status status =
      engine->Execute({MakeStep(Key('a'), 0, tokens), MakeStep(Key('a'), 2, tokens)}, &outputs);
  EXPECT_EQ(ReasonOf(status), v1::REASON_CONFIGURATION_INVALID);
  ExpectHolds(*engine, Key('a'), 0);
}

TEST_P(EngineContractTest, AnEmptyBatchIsFine) {
  const auto engine = Make();
  std::vector<StepOutput> outputs(3);
  EXPECT_TRUE(engine->Execute({}, &outputs).ok());
  EXPECT_TRUE(outputs.empty());
}

TEST_P(EngineContractTest, SharedBatchesKeepSessionsApart) {
  ContractConfig config;
  config.batch_policy = BatchPolicy::kShared;
  const auto engine = Make(config);
  EXPECT_EQ(engine->capability().batch_policy, BatchPolicy::kShared);
  EXPECT_NE(engine->capability().recipe_fingerprint, Make()->capability().recipe_fingerprint);
  const auto tokens = Tokens(*engine, 8, 22);
  const auto all = absl::MakeConstSpan(tokens);
  for (const char id : {'a', 'b', 'c'}) ASSERT_TRUE(Open(*engine, Key(id)).ok());
  std::vector<StepOutput> outputs;
  ASSERT_TRUE(engine
                  ->Execute({MakeStep(Key('c'), 0, all.subspan(0, 7)),
                             MakeStep(Key('a'), 0, all.subspan(0, 5)),
                             MakeStep(Key('b'), 0, all.subspan(0, 7))},
                            &outputs)
                  .ok());
  for (const StepOutput& output : outputs) ASSERT_TRUE(output.status.ok()) << output.status;
  EXPECT_EQ(outputs[0].cached_tokens, 7u);
  EXPECT_EQ(outputs[1].cached_tokens, 5u);
  ASSERT_TRUE(engine
                  ->Execute({MakeStep(Key('b'), 7, all.subspan(7), OutputRows::kAllLogits),
                             MakeStep(Key('a'), 5, all.subspan(5, 1), OutputRows::kAllLogits),
                             MakeStep(Key('c'), 7, all.subspan(7), OutputRows::kAllLogits)},
                            &outputs)
                  .ok());
  // b and c hold the same tokens and met the same batches; a differs.
  ASSERT_EQ(outputs[0].logits.size(), engine->capability().vocabulary_size);
  for (size_t i = 0; i < outputs[0].logits.size(); ++i) {
    ASSERT_NEAR(outputs[0].logits[i], outputs[2].logits[i], 1e-3f);
  }
  EXPECT_NE(outputs[0].logits, outputs[1].logits);
}

// --- Parity and isolation ---

TEST_P(EngineContractTest, EveryCutGivesTheWholeModelsNumbers) {
  const EngineChain whole = MakeChain({});
  const auto prompt = Tokens(*whole[0], 16, 23);
  ASSERT_TRUE(Open(*whole[0], Key('a')).ok());
  const StepOutput expected =
      RunThrough(whole, MakeStep(Key('a'), 0, prompt, OutputRows::kAllLogits));
  ASSERT_TRUE(expected.status.ok()) << expected.status;
  ASSERT_TRUE(whole[0]->Release(Key('a')).ok());
  const auto text = Generate(whole, Key('t'), prompt, 7, 33);
  ASSERT_EQ(text.size(), 33u);
  std::vector<std::vector<uint32_t>> cuts;
  for (uint32_t cut = 1; cut < layers(); ++cut) cuts.push_back({cut});
  cuts.push_back({1, layers() - 1});
  for (const auto& cut : cuts) {
    const EngineChain chain = MakeChain(cut);
    for (const auto& engine : chain) ASSERT_TRUE(Open(*engine, Key('a')).ok());
    const StepOutput output =
        RunThrough(chain, MakeStep(Key('a'), 0, prompt, OutputRows::kAllLogits));
    EXPECT_EQ(output.logits, expected.logits) << "cut at " << testing::PrintToString(cut);
    EXPECT_EQ(Generate(chain, Key('t'), prompt, 7, 33), text);
  }
}

TEST_P(EngineContractTest, InterleavedSessionsEqualThemselvesAlone) {
  const EngineChain chain = MakeChain({layers() / 2});
  constexpr char kIds[] = {'a', 'b', 'c', 'd'};
  std::vector<std::vector<int32_t>> alone;
  std::vector<std::vector<int32_t>> prompts;
  for (uint32_t i = 0; i < 4; ++i) {
    prompts.push_back(Tokens(*chain[0], 5 + 3 * i, 100 + i));
    alone.push_back(Generate(chain, Key('s'), prompts[i], 16, 12));
    ASSERT_EQ(alone[i].size(), 12u);
  }
  for (const char id : kIds) {
    for (const auto& engine : chain) ASSERT_TRUE(Open(*engine, Key(id)).ok());
  }
  std::vector<std::vector<int32_t>> together(4);
  std::vector<std::vector<int32_t>> next = prompts;
  std::vector<uint32_t> positions(4, 0);
  for (uint32_t round = 0; round < 12; ++round) {
    // A different order every round.
    const auto session_at = [round](uint32_t i) { return (i * 3 + round) % 4; };
    std::vector<Step> steps;
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t s = session_at(i);
      steps.push_back(MakeStep(Key(kIds[s]), positions[s], next[s], OutputRows::kLast));
    }
    const std::vector<StepOutput> outputs = RunBatchThrough(chain, steps);
    std::vector<std::vector<int32_t>> sampled(4);
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t s = session_at(i);
      ASSERT_TRUE(outputs[i].token.has_value());
      together[s].push_back(outputs[i].token->token_id);
      positions[s] += static_cast<uint32_t>(next[s].size());
      sampled[s] = {together[s].back()};
    }
    next = sampled;
  }
  EXPECT_EQ(together, alone);
}

TEST_P(EngineContractTest, AReusedSlotIsAsGoodAsNew) {
  ContractConfig config;
  config.max_sessions = 1;
  const EngineChain fresh = MakeChain({}, config);
  const EngineChain used = MakeChain({}, config);
  const auto prompt = Tokens(*used[0], 9, 24);
  Generate(used, Key('x'), Tokens(*used[0], 40, 25), 16, 20);
  EXPECT_EQ(Generate(used, Key('a'), prompt, 16, 20), Generate(fresh, Key('a'), prompt, 16, 20));
}

TEST_P(EngineContractTest, HistoryMatters) {
  const auto engine = Make();
  auto tokens = Tokens(*engine, 10, 26);
  ASSERT_TRUE(Open(*engine, Key('a')).ok());
  ASSERT_TRUE(Open(*engine, Key('b')).ok());
  const StepOutput a = RunStep(*engine, MakeStep(Key('a'), 0, tokens, OutputRows::kAllLogits));
  std::swap(tokens[2], tokens[3]);
  ASSERT_NE(tokens[2], tokens[3]);
  const StepOutput b = RunStep(*engine, MakeStep(Key('b'), 0, tokens, OutputRows::kAllLogits));
  const size_t vocabulary = engine->capability().vocabulary_size;
  for (size_t row = 0; row < 10; ++row) {
    const bool same =
        std::equal(a.logits.begin() + row * vocabulary, a.logits.begin() + (row + 1) * vocabulary,
                   b.logits.begin() + row * vocabulary);
    EXPECT_EQ(same, row < 2) << "row " << row;
  }
}

TEST_P(EngineContractTest, WarmUpLeavesNothingBehind) {
  const EngineChain cold = MakeChain({});
  const EngineChain warm = MakeChain({});
  EXPECT_EQ(warm[0]->metrics().warm_up_step, absl::ZeroDuration());
  ASSERT_TRUE(warm[0]->WarmUp().ok());
  EXPECT_GT(warm[0]->metrics().warm_up_step, absl::ZeroDuration());
  EXPECT_EQ(warm[0]->metrics().open_sessions, 0u);
  EXPECT_EQ(warm[0]->metrics().kv_bytes, 0u);
  EXPECT_EQ(warm[0]->metrics().prefill_tokens, 0u);
  EXPECT_EQ(warm[0]->metrics().decode_tokens, 0u);
  EXPECT_TRUE(warm[0]->health().ok());
  const auto prompt = Tokens(*cold[0], 9, 27);
  EXPECT_EQ(Generate(warm, Key('a'), prompt, 16, 10), Generate(cold, Key('a'), prompt, 16, 10));
  for (const auto& stage : MakeChain({1, layers() - 1})) EXPECT_TRUE(stage->WarmUp().ok());
}

// --- Sampling ---

TEST_P(EngineContractTest, GreedyTakesTheHighestLogit) {
  const auto engine = Make();
  const auto tokens = Tokens(*engine, 6, 28);
  ASSERT_TRUE(Open(*engine, Key('a')).ok());
  const StepOutput all = RunStep(*engine, MakeStep(Key('a'), 0, tokens, OutputRows::kAllLogits));
  EXPECT_FALSE(all.token.has_value());
  Step step = MakeStep(Key('a'), 0, tokens, OutputRows::kLast);
  step.return_logits = true;
  const StepOutput last = RunStep(*engine, step);
  const size_t vocabulary = engine->capability().vocabulary_size;
  ASSERT_EQ(all.logits.size(), 6 * vocabulary);
  ASSERT_EQ(last.logits.size(), vocabulary);
  ASSERT_TRUE(last.token.has_value());
  EXPECT_EQ(last.token->token_id, ArgMax(last.logits));
  EXPECT_FALSE(last.token->logprob.has_value());
  EXPECT_TRUE(last.token->top.empty());
  for (size_t i = 0; i < vocabulary; ++i) {
    ASSERT_NEAR(last.logits[i], all.logits[5 * vocabulary + i], 1e-2f);
  }
}

TEST_P(EngineContractTest, LogprobsAreOfTheUnmodifiedDistribution) {
  const auto engine = Make();
  const auto tokens = Tokens(*engine, 6, 29);
  ASSERT_TRUE(Open(*engine, Key('a')).ok());
  Step step = MakeStep(Key('a'), 0, tokens, OutputRows::kLast);
  step.return_logits = true;
  const StepOutput plain = RunStep(*engine, step);
  const int32_t best = ArgMax(plain.logits);
  step.sampling.emplace();
  step.sampling->logit_bias = {{best, -std::numeric_limits<float>::infinity()}};
  step.sampling->top_logprobs = 3;
  const StepOutput biased = RunStep(*engine, step);
  ASSERT_TRUE(biased.status.ok()) << biased.status;
  EXPECT_EQ(biased.logits, plain.logits);
  EXPECT_NE(biased.token->token_id, best);
  double total = 0.0;
  for (const float logit : plain.logits) total += std::exp(double{logit} - plain.logits[best]);
  const auto logprob = [&](int32_t id) {
    return double{plain.logits[id]} - plain.logits[best] - std::log(total);
  };
  ASSERT_TRUE(biased.token->logprob.has_value());
  EXPECT_NEAR(*biased.token->logprob, logprob(biased.token->token_id), 1e-5);
  ASSERT_EQ(biased.token->top.size(), 3u);
  EXPECT_EQ(biased.token->top[0].token_id, best);
  EXPECT_EQ(biased.token->top[1].token_id, biased.token->token_id);
  for (const TokenLogprob& top : biased.token->top) {
    EXPECT_NEAR(top.logprob, logprob(top.token_id), 1e-5);
  }
  EXPECT_GE(biased.token->top[1].logprob, biased.token->top[2].logprob);
}

TEST_P(EngineContractTest, SeededSamplingSurvivesARestart) {
  const auto prompt = Tokens(*Make(), 7, 30);
  SamplingParams sampling;
  sampling.temperature = 1.5f;
  sampling.top_p = 0.98f;
  sampling.seed = 1234;
  const auto first = Generate(MakeChain({1}), Key('a'), prompt, 16, 24, sampling);
  const auto second = Generate(MakeChain({1}), Key('b'), prompt, 16, 24, sampling);
  EXPECT_EQ(first, second);
  sampling.seed = 1235;
  EXPECT_NE(Generate(MakeChain({1}), Key('a'), prompt, 16, 24, sampling), first);
}

TEST_P(EngineContractTest, SamplingBelongsToItsSession) {
  const EngineChain chain = MakeChain({});
  const auto prompt = Tokens(*chain[0], 7, 31);
  const auto greedy = Generate(chain, Key('g'), prompt, 16, 8);
  SamplingParams sampling;
  sampling.temperature = 2.0f;
  sampling.seed = 7;
  const auto warm = Generate(chain, Key('w'), prompt, 16, 8, sampling);
  EXPECT_NE(warm, greedy);
  // The slot that the warm session used is greedy again.
  EXPECT_EQ(Generate(chain, Key('n'), prompt, 16, 8), greedy);
  // A session that never got parameters is greedy.
  ASSERT_TRUE(Open(*chain[0], Key('u')).ok());
  const StepOutput output = RunStep(*chain[0], MakeStep(Key('u'), 0, prompt, OutputRows::kLast));
  EXPECT_EQ(output.token->token_id, greedy[0]);
}

TEST_P(EngineContractTest, PenaltiesSeeTheSessionsTokensAndNoDroppedOnes) {
  const auto engine = Make();
  const auto tokens = Tokens(*engine, 6, 32);
  ASSERT_TRUE(Open(*engine, Key('a')).ok());
  Step step = MakeStep(Key('a'), 0, tokens, OutputRows::kLast);
  const int32_t best = RunStep(*engine, step).token->token_id;
  ASSERT_EQ(std::count(tokens.begin(), tokens.end(), best), 0);
  step.sampling.emplace();
  step.sampling->presence_penalty = 2.0f;
  step.sampling->frequency_penalty = 2.0f;
  step.sampling->repetition_penalty = 10.0f;
  EXPECT_EQ(RunStep(*engine, step).token->token_id, best) << "it is not among the session's tokens";
  // The same rows after a prefix full of the best token: whatever comes now, it is judged with the
  // penalty; with the prefix dropped again it is not.
  const std::vector<int32_t> repeated(8, best);
  RunStep(*engine, MakeStep(Key('a'), 6, repeated));
  step.return_logits = true;
  EXPECT_EQ(RunStep(*engine, step).token->token_id, best);
  Step longer = MakeStep(Key('a'), 6, repeated, OutputRows::kLast);
  longer.return_logits = true;
  longer.sampling = step.sampling;
  const StepOutput penalised = RunStep(*engine, longer);
  std::vector<int32_t> history = tokens;
  history.insert(history.end(), repeated.begin(), repeated.end());
  EXPECT_EQ(penalised.token->token_id,
            Sampler(*step.sampling).Sample(penalised.logits, history)->token_id);
}

TEST_P(EngineContractTest, EndOfGenerationIsMarked) {
  const auto engine = Make();
  const auto tokens = Tokens(*engine, 3, 33);
  ASSERT_TRUE(Open(*engine, Key('a')).ok());
  const std::vector<int32_t> ends = engine->tokenizer().end_of_generation_ids();
  ASSERT_FALSE(ends.empty());
  Step step = MakeStep(Key('a'), 0, tokens, OutputRows::kLast);
  EXPECT_FALSE(RunStep(*engine, step).token->end_of_generation);
  step.sampling.emplace();
  step.sampling->logit_bias = {{ends[0], 1000.0f}};
  const StepOutput output = RunStep(*engine, step);
  EXPECT_EQ(output.token->token_id, ends[0]);
  EXPECT_TRUE(output.token->end_of_generation);
}

// --- Grammars ---

// Draws a whole answer and returns its text; empty when it does not end within 24 tokens.
inline std::string ConstrainedText(ShardEngine& engine, const SessionKey& key,
                                   const std::vector<int32_t>& prompt,
                                   const SamplingParams& sampling) {
  std::vector<int32_t> drawn;
  Step step = MakeStep(key, 0, prompt, OutputRows::kLast);
  step.sampling = sampling;
  while (drawn.size() < 24) {
    const StepOutput output = RunStep(engine, step);
    EXPECT_TRUE(output.status.ok()) << output.status;
    if (!output.status.ok()) return "";
    if (output.token->end_of_generation) return *engine.tokenizer().Detokenize(drawn, true);
    drawn.push_back(output.token->token_id);
    step = MakeStep(key, static_cast<uint32_t>(prompt.size() + drawn.size() - 1),
                    absl::MakeConstSpan(drawn).last(1), OutputRows::kLast);
    step.phase = Phase::kDecode;
  }
  return "";
}

TEST_P(EngineContractTest, AnswersKeepToTheirGrammarAndEnd) {
  const auto engine = Make();
  const auto prompt = Tokens(*engine, 5, 35);
  ASSERT_TRUE(Open(*engine, Key('a')).ok());
  std::set<std::string> texts;
  for (uint32_t seed = 0; seed < 6; ++seed) {
    SamplingParams sampling;
    sampling.temperature = seed == 0 ? 0.0f : 2.0f;
    sampling.seed = seed;
    sampling.grammar =
        "root ::= colour \", \" [0-9]{2,3} \"\\u0142\"\ncolour ::= \"red\" | \"blue\"";
    const std::string text = ConstrainedText(*engine, Key('a'), prompt, sampling);
    EXPECT_THAT(text, testing::MatchesRegex("(red|blue), [0-9][0-9][0-9]?\xc5\x82"));
    EXPECT_EQ(ConstrainedText(*engine, Key('a'), prompt, sampling), text) << "seed " << seed;
    texts.insert(text);
    sampling.grammar.clear();
    sampling.json_schema = R"({"type": "integer", "minimum": 17, "maximum": 2345})";
    const int number = std::stoi(ConstrainedText(*engine, Key('a'), prompt, sampling));
    EXPECT_GE(number, 17);
    EXPECT_LE(number, 2345);
  }
  EXPECT_GT(texts.size(), 1u);
}

TEST_P(EngineContractTest, AGrammarBelongsToOneGeneration) {
  const auto engine = Make();
  const auto prompt = Tokens(*engine, 5, 36);
  ASSERT_TRUE(Open(*engine, Key('a')).ok());
  ASSERT_TRUE(Open(*engine, Key('b')).ok());
  Step free = MakeStep(Key('a'), 0, prompt, OutputRows::kLast);
  free.sampling.emplace();
  const int32_t best = RunStep(*engine, free).token->token_id;
  Step held = MakeStep(Key('b'), 0, prompt, OutputRows::kLast);
  held.sampling.emplace();
  held.sampling->grammar = "root ::= \"#\"";
  const int32_t only = RunStep(*engine, held).token->token_id;
  EXPECT_EQ(*engine->tokenizer().Piece(only), "#");
  ASSERT_NE(only, best);
  EXPECT_EQ(RunStep(*engine, free).token->token_id, best);
  held.sampling.emplace();
  EXPECT_EQ(RunStep(*engine, held).token->token_id, best);
}

TEST_P(EngineContractTest, GrammarsThatCannotBeServedEndTheirStepOnly) {
  const auto engine = Make();
  const auto prompt = Tokens(*engine, 5, 37);
  ASSERT_TRUE(Open(*engine, Key('a')).ok());
  Step step = MakeStep(Key('a'), 0, prompt, OutputRows::kLast);
  step.sampling.emplace();
  for (const char* const grammar : {"root ::= root", "nonsense", "root ::= (", "a ::= \"a\""}) {
    step.sampling->grammar = grammar;
    EXPECT_EQ(ReasonAfter(*engine, step), v1::REASON_GRAMMAR_INVALID) << grammar;
  }
  step.sampling->grammar.clear();
  step.sampling->json_schema = R"({"not": {}})";
  EXPECT_EQ(ReasonAfter(*engine, step), v1::REASON_GRAMMAR_INVALID);
  step.sampling->json_schema.clear();
  step.sampling->grammar = "root ::= \"#\"";
  for (int32_t id = 0; static_cast<uint32_t>(id) < engine->capability().vocabulary_size; ++id) {
    const std::string piece = *engine->tokenizer().Piece(id);
    if (!piece.empty() && piece[0] == '#') {
      step.sampling->logit_bias.emplace_back(id, -std::numeric_limits<float>::infinity());
    }
  }
  EXPECT_EQ(ReasonAfter(*engine, step), v1::REASON_GRAMMAR_DEAD_END);
  ExpectHolds(*engine, Key('a'), 0);
  step.sampling.emplace();
  EXPECT_TRUE(RunStep(*engine, step).status.ok());
}

// --- Metrics ---

TEST_P(EngineContractTest, MetricsCountTokensAndMemoryComesBack) {
  const auto engine = Make();
  const auto tokens = Tokens(*engine, 10, 34);
  const auto all = absl::MakeConstSpan(tokens);
  EXPECT_EQ(engine->metrics().kv_bytes, 0u);
  EXPECT_GT(engine->metrics().kv_budget_bytes, 0u);
  for (const char id : {'a', 'b'}) {
    ASSERT_TRUE(Open(*engine, Key(id)).ok());
    RunStep(*engine, MakeStep(Key(id), 0, all.subspan(0, 9)));
  }
  EXPECT_EQ(engine->metrics().open_sessions, 2u);
  EXPECT_EQ(engine->metrics().prefill_tokens, 18u);
  const uint64_t two = engine->metrics().kv_bytes;
  EXPECT_GT(two, 0u);
  EXPECT_LE(two, engine->metrics().kv_budget_bytes);
  RunStep(*engine, MakeStep(Key('a'), 9, all.subspan(9)));
  EXPECT_EQ(engine->metrics().decode_tokens, 1u);
  EXPECT_EQ(engine->metrics().engine_calls, 3u);
  // By how much depends on what an engine keeps.
  EXPECT_GT(engine->metrics().kv_bytes, two);
  EXPECT_LT(engine->metrics().kv_bytes, two / 18 * 20);
  ASSERT_TRUE(engine->Truncate(Key('a'), 9).ok());
  EXPECT_EQ(engine->metrics().kv_bytes, two);
  ASSERT_TRUE(engine->Release(Key('a')).ok());
  EXPECT_EQ(engine->metrics().kv_bytes, two / 2);
  ASSERT_TRUE(engine->Release(Key('b')).ok());
  EXPECT_EQ(engine->metrics().kv_bytes, 0u);
  EXPECT_EQ(engine->metrics().open_sessions, 0u);
  EXPECT_EQ(engine->metrics().sessions_evicted, 0u);
}

// --- Tokenizer ---

TEST_P(EngineContractTest, TheTokenizerIsServedByEveryStage) {
  const auto tail = MakeRange(1, layers());
  const Tokenizer& tokenizer = tail->tokenizer();
  EXPECT_EQ(tokenizer.vocabulary_size(), tail->capability().vocabulary_size);
  const std::string text = "Hello, w\xC3\xB6rld! \xF0\x9F\x98\x80";
  const auto ids = tokenizer.Tokenize(text, /*add_special=*/false, /*parse_special=*/false);
  ASSERT_TRUE(ids.ok());
  const auto back = tokenizer.Detokenize(*ids, /*unparse_special=*/false);
  ASSERT_TRUE(back.ok());
  EXPECT_TRUE(absl::EndsWith(*back, text)) << *back;
  std::string pieces;
  for (const int32_t id : *ids) {
    const auto piece = tokenizer.Piece(id);
    ASSERT_TRUE(piece.ok());
    pieces += *piece;
  }
  EXPECT_TRUE(absl::EndsWith(pieces, text)) << pieces;
  const auto with_bos = tokenizer.Tokenize(text, /*add_special=*/true, /*parse_special=*/false);
  ASSERT_TRUE(with_bos.ok());
  EXPECT_EQ(with_bos->size(), ids->size() + (tokenizer.add_bos() ? 1 : 0));
  EXPECT_TRUE(tokenizer.Tokenize("", false, false)->empty());

  const auto vocabulary = static_cast<int32_t>(tokenizer.vocabulary_size());
  for (const int32_t bad : {-1, vocabulary, std::numeric_limits<int32_t>::max()}) {
    EXPECT_EQ(ReasonOf(tokenizer.Piece(bad).status()), v1::REASON_TOKEN_OUT_OF_RANGE);
    EXPECT_EQ(ReasonOf(tokenizer.Detokenize({bad}, true).status()), v1::REASON_TOKEN_OUT_OF_RANGE);
  }
  for (const Tokenizer::SpecialToken& special : tokenizer.special_tokens()) {
    EXPECT_TRUE(tokenizer.Piece(special.token_id).ok()) << special.role;
  }
}

}  // namespace meshnet

#endif  // MESHNET_CC_SHARD_ENGINE_CONTRACT_TEST_SUITE_H_
