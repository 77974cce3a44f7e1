// The engine on DeepSeek V4: the contract of every engine, and what this architecture adds to it.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "cc/shard_engine/contract_test_suite.h"
#include "cc/shard_engine/llama/llama_engine.h"
#include "cc/shard_engine/llama/testing/contract_options.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace meshnet {
namespace {

constexpr uint32_t kLayers = 8;
constexpr uint32_t kHashLayers = 3;
constexpr uint32_t kStreams = 4;
constexpr uint32_t kEmbedding = 128;

LlamaEngineOptions OptionsFor(const ContractConfig& config) {
  return ContractOptions(config, std::getenv("DEEPSEEK4_MODEL"));
}

EngineUnderTest DeepSeek4UnderTest() {
  EngineUnderTest engine;
  engine.name = "DeepSeek4";
  engine.model_layers = kLayers;
  engine.evidence = Evidence::kDark;
  engine.make = [](const ContractConfig& config) { return LoadLlamaEngine(OptionsFor(config)); };
  return engine;
}

INSTANTIATE_TEST_SUITE_P(DeepSeek4, EngineContractTest, testing::Values(DeepSeek4UnderTest()),
                         NameOf);

std::unique_ptr<ShardEngine> Load(const LlamaEngineOptions& options) {
  auto engine = LoadLlamaEngine(options);
  EXPECT_TRUE(engine.ok()) << engine.status();
  return engine.ok() ? *std::move(engine) : nullptr;
}

std::unique_ptr<ShardEngine> LoadRange(LayerRange range) {
  ContractConfig config;
  config.range = range;
  return Load(OptionsFor(config));
}

std::string RecipeField(const ShardEngine& engine, const std::string& name) {
  for (const auto& [field, value] : engine.capability().recipe) {
    if (field == name) return value;
  }
  return "";
}

TEST(DeepSeek4SchemaTest, StreamsAreAnAxisOfTheirOwn) {
  const auto middle = LoadRange({2, 5});
  const BoundarySchema& schema = *middle->capability().boundary_in;
  EXPECT_EQ(schema, *middle->capability().boundary_out);
  EXPECT_EQ(schema.name, "deepseek4.mhc");
  EXPECT_EQ(schema.version, 1u);
  ASSERT_EQ(schema.tensors.size(), 3u);
  EXPECT_EQ(schema.tensors[0], (TensorSpec{"residual", DType::kF32, {-1, kStreams, kEmbedding}}));
  EXPECT_EQ(schema.tensors[1], (TensorSpec{"positions", DType::kI32, {-1}}));
  EXPECT_EQ(schema.tensors[2], (TensorSpec{"token_ids", DType::kI32, {-1}}));
  EXPECT_EQ(schema.residual_width(), uint64_t{kStreams} * kEmbedding);
  EXPECT_EQ(RecipeField(*middle, "boundary_schema"), "deepseek4.mhc/1");
  EXPECT_EQ(RecipeField(*middle, "boundary_sha256"), SchemaFingerprint(schema));
}

TEST(DeepSeek4SchemaTest, TheFingerprintFollowsTheSchemaOnly) {
  const BoundarySchema schema = HyperConnectionSchema(kStreams, kEmbedding);
  const std::string fingerprint = SchemaFingerprint(schema);
  // Another quantisation, another cut.
  LlamaEngineOptions other = OptionsFor({});
  other.model_path = std::getenv("DEEPSEEK4_MODEL_Q8_0");
  other.range = {6, 8};
  const auto engine = Load(other);
  EXPECT_EQ(SchemaFingerprint(*engine->capability().boundary_in), fingerprint);
  EXPECT_NE(engine->capability().recipe_fingerprint,
            LoadRange({0, 0})->capability().recipe_fingerprint);

  EXPECT_NE(SchemaFingerprint(HyperConnectionSchema(kStreams, 2 * kEmbedding)), fingerprint);
  EXPECT_NE(SchemaFingerprint(HyperConnectionSchema(kStreams / 2, 2 * kEmbedding)), fingerprint);
  EXPECT_NE(SchemaFingerprint(DenseResidualSchema(kStreams * kEmbedding)), fingerprint);
  BoundarySchema next = schema;
  ++next.version;
  EXPECT_NE(SchemaFingerprint(next), fingerprint);
  BoundarySchema with_mtp = schema;
  for (const TensorSpec& tensor : ReservedMtpTensors(kStreams, kEmbedding)) {
    with_mtp.tensors.push_back(tensor);
  }
  EXPECT_NE(SchemaFingerprint(with_mtp), fingerprint);
}

TEST(DeepSeek4Test, MtpIsReservedAndRefused) {
  const auto tail = LoadRange({4, 0});
  EXPECT_EQ(tail->capability().model_layers, kLayers);
  EXPECT_EQ(RecipeField(*tail, "mtp"), "off");
  EXPECT_EQ(ReasonOf(tail->EnableMtp()), v1::REASON_FEATURE_UNSUPPORTED);
  LlamaEngineOptions asking = OptionsFor({});
  asking.mtp = true;
  const absl::Status refused = LoadLlamaEngine(asking).status();
  EXPECT_EQ(ReasonOf(refused), v1::REASON_FEATURE_UNSUPPORTED);
  EXPECT_THAT(std::string(refused.message()), testing::HasSubstr("MTP"));
  // The file's ninth block is no layer that a range could have.
  ContractConfig config;
  config.range = {0, kLayers + 1};
  EXPECT_EQ(ReasonOf(LoadLlamaEngine(OptionsFor(config)).status()), v1::REASON_LAYER_RANGE_INVALID);
}

TEST(DeepSeek4Test, HashLayersNeedAnIdForEveryRow) {
  for (uint32_t layer = 1; layer < kHashLayers; ++layer) {
    const auto engine = LoadRange({layer, layer + 1});
    ASSERT_TRUE(engine->OpenSession(Key('a'), {}, nullptr).ok());
    const std::vector<float> residual(size_t{3} * kStreams * kEmbedding, 0.1f);
    const std::vector<int32_t> tokens = {7, 8, 9};
    Step step = MakeStep(Key('a'), 0, {});
    step.residual = residual;
    EXPECT_EQ(ReasonOf(RunStep(*engine, step).status), v1::REASON_SHAPE_MISMATCH);
    step.token_ids = absl::MakeConstSpan(tokens).first(2);
    EXPECT_EQ(ReasonOf(RunStep(*engine, step).status), v1::REASON_SHAPE_MISMATCH);
    step.token_ids = tokens;
    const StepOutput with_ids = RunStep(*engine, step);
    EXPECT_TRUE(with_ids.status.ok()) << with_ids.status;
    // And the ids are used.
    const std::vector<int32_t> others = {9, 8, 7};
    step.token_ids = others;
    const StepOutput other_ids = RunStep(*engine, step);
    ASSERT_TRUE(other_ids.status.ok()) << other_ids.status;
    EXPECT_NE(with_ids.residual, other_ids.residual);
  }
}

TEST(DeepSeek4Test, ASessionGoesBackAsFarAsItsRingsHold) {
  LlamaEngineOptions options = OptionsFor({});
  options.context_tokens = 512;
  options.max_step_tokens = 64;
  options.rollback_tokens = 8;
  // A stage that has no compressed layer answers like all others.
  for (const LayerRange range : {LayerRange{0, 0}, LayerRange{0, 2}}) {
    options.range = range;
    const auto engine = Load(options);
    const auto tokens = RandomTokens(512, 64, 5);
    const auto all = absl::MakeConstSpan(tokens);
    ASSERT_TRUE(engine->OpenSession(Key('a'), {}, nullptr).ok());
    for (uint32_t begin = 0; begin < 192; begin += 64) {
      ASSERT_TRUE(RunStep(*engine, MakeStep(Key('a'), begin, all)).status.ok());
    }
    EXPECT_EQ(ReasonOf(engine->Truncate(Key('a'), 183)), v1::REASON_CACHE_MISS);
    const StepOutput refused = RunStep(*engine, MakeStep(Key('a'), 183, all.first(1)));
    EXPECT_EQ(ReasonOf(refused.status), v1::REASON_CACHE_MISS);
    EXPECT_EQ(refused.cached_tokens, 192u) << "refused before it began";
    EXPECT_TRUE(engine->Truncate(Key('a'), 188).ok());
    EXPECT_TRUE(engine->Truncate(Key('a'), 184).ok());
    // Counted from what was written, not from what is held.
    EXPECT_EQ(ReasonOf(engine->Truncate(Key('a'), 183)), v1::REASON_CACHE_MISS);
    EXPECT_TRUE(RunStep(*engine, MakeStep(Key('a'), 184, all.first(16))).status.ok());
    EXPECT_EQ(ReasonOf(engine->Truncate(Key('a'), 191)), v1::REASON_CACHE_MISS);
    EXPECT_TRUE(engine->Truncate(Key('a'), 192).ok());
    // To the start always.
    const StepOutput again = RunStep(*engine, MakeStep(Key('a'), 0, all));
    EXPECT_TRUE(again.status.ok()) << again.status;
    EXPECT_EQ(again.cached_tokens, 64u);
    EXPECT_TRUE(engine->health().ok());
  }
}

TEST(DeepSeek4Test, ResultsDependNeitherOnSlotsNorOnTheContextsLength) {
  const std::vector<int32_t> prompt = RandomTokens(512, 40, 9);
  std::vector<int32_t> expected;
  std::string fingerprint;
  for (const auto& change : std::vector<std::function<void(LlamaEngineOptions*)>>{
           [](LlamaEngineOptions*) {},
           [](LlamaEngineOptions* o) { o->max_sessions = 1; },
           [](LlamaEngineOptions* o) { o->max_sessions = 40; },
           [](LlamaEngineOptions* o) { o->context_tokens = 1024; },
       }) {
    LlamaEngineOptions options = OptionsFor({});
    change(&options);
    EngineChain chain;
    chain.push_back(Load(options));
    const std::vector<int32_t> ids = Generate(chain, Key('g'), prompt, 16, 24);
    ASSERT_EQ(ids.size(), 24u);
    if (expected.empty()) {
      expected = ids;
      fingerprint = chain[0]->capability().recipe_fingerprint;
    }
    EXPECT_EQ(ids, expected);
    EXPECT_EQ(chain[0]->capability().recipe_fingerprint, fingerprint);
  }
  LlamaEngineOptions options = OptionsFor({});
  options.rollback_tokens = 32;
  EXPECT_NE(Load(options)->capability().recipe_fingerprint, fingerprint);
}

// Keys are f16 numbers, 64 of them, an indexer's key has 128; accumulators and their scores are
// f32.
constexpr uint64_t kKey = 64 * 2;
constexpr uint64_t kIndexerKey = 128 * 2;
constexpr uint64_t kAccumulated = 2 * 64 * 4;
constexpr uint64_t kIndexerAccumulated = 2 * 128 * 4;
// Window 128, micro-batch 64, twice the rollback of 16: 224, padded to 256.
constexpr uint64_t kRing = 256;

struct LayerState {
  LayerRange range;
  // Of a session with so many tokens.
  std::function<uint64_t(uint64_t tokens)> bytes;
};

// What is counted for a session is what its tokens fill of what llama.cpp took for its slot.
TEST(DeepSeek4Test, HeldMemoryIsTheStateOfEveryKind) {
  LlamaEngineOptions options = OptionsFor({});
  options.max_sessions = 2;
  options.context_tokens = 1024;
  options.max_step_tokens = 64;
  options.rollback_tokens = 16;
  const auto window = [](uint64_t n) { return kKey * std::min(n, kRing); };
  const std::vector<LayerState> layers = {
      {{0, 1}, window},
      {{2, 3},
       [&](uint64_t n) {
         return window(n) + (kKey + kIndexerKey) * (n / 4) +
                2 * (kAccumulated + kIndexerAccumulated) * std::min<uint64_t>(n, 8 + 16);
       }},
      {{3, 4},
       [&](uint64_t n) {
         return window(n) + kKey * (n / 128) + kAccumulated * std::min<uint64_t>(n, 128 + 16);
       }},
  };
  for (const LayerState& layer : layers) {
    SCOPED_TRACE(layer.range.begin);
    options.range = layer.range;
    const auto engine = Load(options);
    const uint64_t width = engine->capability().is_head() ? 0 : kStreams * kEmbedding;
    const std::vector<float> residual(64 * width, 0.1f);
    const std::vector<int32_t> tokens = RandomTokens(512, 64, 7);
    const auto run = [&](char session, uint32_t start, size_t rows) {
      Step step = MakeStep(Key(session), start, absl::MakeConstSpan(tokens).first(rows));
      step.residual = absl::MakeConstSpan(residual).first(rows * width);
      ASSERT_TRUE(RunStep(*engine, step).status.ok());
    };
    ASSERT_TRUE(engine->OpenSession(Key('a'), {}, nullptr).ok());
    ASSERT_TRUE(engine->OpenSession(Key('b'), {}, nullptr).ok());
    EXPECT_EQ(engine->metrics().kv_bytes, 0u);
    uint32_t held = 0;
    for (const size_t rows : {3, 1, 4, 60, 60, 4, 64, 64, 64, 64, 64}) {
      run('a', held, rows);
      held += static_cast<uint32_t>(rows);
      EXPECT_EQ(engine->metrics().kv_bytes, layer.bytes(held)) << held;
    }
    run('b', 0, 10);
    EXPECT_EQ(engine->metrics().kv_bytes, layer.bytes(held) + layer.bytes(10));
    ASSERT_TRUE(engine->Truncate(Key('a'), held - 16).ok());
    EXPECT_EQ(engine->metrics().kv_bytes, layer.bytes(held - 16) + layer.bytes(10));
    ASSERT_TRUE(engine->Release(Key('b')).ok());
    EXPECT_EQ(engine->metrics().kv_bytes, layer.bytes(held - 16));
    ASSERT_TRUE(engine->Release(Key('a')).ok());
    EXPECT_EQ(engine->metrics().kv_bytes, 0u);
    // Compressed caches are padded to 256 rows, the HCA's 8 and the CSA's 256 of them alike.
    const uint64_t padding = layer.range.begin == 3 ? kKey * (256 - 1024 / 128) : 0;
    EXPECT_EQ(engine->EstimateMemory().kv_per_session, layer.bytes(1024) + padding);
    EXPECT_EQ(engine->metrics().kv_budget_bytes, 2 * (layer.bytes(1024) + padding));
  }
}

// The ring of raw keys is as long for a million tokens as for a thousand.
TEST(DeepSeek4Test, TheWindowTakesNoMoreInALongContext) {
  LlamaEngineOptions options = OptionsFor({});
  options.range = {0, 2};
  options.max_sessions = 1;
  options.context_tokens = 1024;
  const uint64_t bytes = Load(options)->EstimateMemory().kv_per_session;
  options.context_tokens = 1u << 20;
  EXPECT_EQ(Load(options)->EstimateMemory().kv_per_session, bytes);
}

TEST(DeepSeek4Test, IdleSessionsAreEvictedWithTheirState) {
  ContractConfig config;
  absl::Time now = absl::UnixEpoch();
  config.now = [&now] { return now; };
  config.max_sessions = 1;
  config.idle_ttl = absl::Minutes(1);
  config.lru_min_idle = absl::Seconds(10);
  EngineChain chain;
  chain.push_back(Load(OptionsFor(config)));
  ShardEngine& engine = *chain[0];
  const std::vector<int32_t> prompt = RandomTokens(512, 16, 9);
  const std::vector<int32_t> expected = Generate(chain, Key('x'), prompt, 16, 8);
  // For another session, once it has been idle for long enough.
  ASSERT_TRUE(engine.OpenSession(Key('a'), {}, nullptr).ok());
  ASSERT_TRUE(RunStep(engine, MakeStep(Key('a'), 0, RandomTokens(512, 12, 1))).status.ok());
  EXPECT_EQ(ReasonOf(engine.OpenSession(Key('b'), {}, nullptr)), v1::REASON_SESSIONS_EXHAUSTED);
  now += absl::Seconds(10);
  std::vector<SessionKey> evicted;
  ASSERT_TRUE(engine.OpenSession(Key('b'), {}, &evicted).ok());
  EXPECT_EQ(evicted, std::vector<SessionKey>{Key('a')});
  EXPECT_EQ(engine.metrics().kv_bytes, 0u);
  EXPECT_EQ(ReasonOf(RunStep(engine, MakeStep(Key('a'), 12, prompt)).status),
            v1::REASON_SESSION_EVICTED);
  // By its time to live.
  ASSERT_TRUE(RunStep(engine, MakeStep(Key('b'), 0, RandomTokens(512, 12, 2))).status.ok());
  EXPECT_GT(engine.metrics().kv_bytes, 0u);
  now += absl::Minutes(2);
  EXPECT_EQ(engine.EvictIdle(), std::vector<SessionKey>{Key('b')});
  EXPECT_EQ(engine.metrics().kv_bytes, 0u);
  // Nothing of them is left in the slot.
  EXPECT_EQ(Generate(chain, Key('c'), prompt, 16, 8), expected);
}

TEST(DeepSeek4Test, TheBudgetCountsEveryKindOfState) {
  LlamaEngineOptions options = OptionsFor({});
  const auto state = [&](LayerRange range) {
    options.range = range;
    return Load(options)->EstimateMemory().kv_per_session;
  };
  const uint64_t window = state({0, 1});
  const uint64_t csa = state({2, 3});
  const uint64_t hca = state({3, 4});
  EXPECT_GT(csa, window);
  EXPECT_GT(hca, window);
  EXPECT_EQ(state({0, 0}), 3 * window + 3 * csa + 2 * hca);
  options.range = {0, 0};
  const MemoryEstimate memory = Load(options)->EstimateMemory();
  options.memory_budget_bytes =
      memory.weights + options.max_sessions * memory.kv_per_session + memory.compute;
  EXPECT_TRUE(LoadLlamaEngine(options).ok());
  --options.memory_budget_bytes;
  EXPECT_EQ(ReasonOf(LoadLlamaEngine(options).status()), v1::REASON_MEMORY_BUDGET_EXCEEDED);
}

// A step that fails behind its layers leaves a session that can go on, whole or empty.
TEST(DeepSeek4Test, AFailedStepIsUndone) {
  LlamaEngineOptions options = OptionsFor({});
  options.range = {4, 0};
  options.context_tokens = 512;
  options.max_step_tokens = 128;
  options.rollback_tokens = 16;
  const auto engine = Load(options);
  const size_t width = engine->capability().boundary_in->residual_width();
  const std::vector<float> good(128 * width, 0.1f);
  const std::vector<float> huge(128 * width, 3e38f);
  const std::vector<int32_t> tokens = RandomTokens(512, 128, 3);
  const auto step = [&](uint32_t start, size_t rows, const std::vector<float>& residual) {
    Step made =
        MakeStep(Key('a'), start, absl::MakeConstSpan(tokens).first(rows), OutputRows::kLast);
    made.residual = absl::MakeConstSpan(residual).first(rows * width);
    return made;
  };
  ASSERT_TRUE(engine->OpenSession(Key('a'), {}, nullptr).ok());
  ASSERT_TRUE(RunStep(*engine, step(0, 128, good)).status.ok());
  const StepOutput small = RunStep(*engine, step(128, 4, huge));
  ASSERT_EQ(ReasonOf(small.status), v1::REASON_ENGINE_OUTPUT_INVALID);
  EXPECT_EQ(small.cached_tokens, 128u);
  const StepOutput large = RunStep(*engine, step(128, 100, huge));
  ASSERT_EQ(ReasonOf(large.status), v1::REASON_ENGINE_OUTPUT_INVALID);
  EXPECT_EQ(large.cached_tokens, 0u) << "more than the rings hold";
  EXPECT_EQ(ReasonOf(RunStep(*engine, step(128, 1, good)).status), v1::REASON_CACHE_MISS);
  const StepOutput again = RunStep(*engine, step(0, 128, good));
  EXPECT_TRUE(again.status.ok()) << again.status;
  EXPECT_TRUE(engine->health().ok());
}

}  // namespace
}  // namespace meshnet
