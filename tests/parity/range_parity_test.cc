// A model split into layer ranges against the same model whole, bit for bit.
//
// Without PARITY_MODEL on a tiny random model; with it on that file (fixture proof and real-model
// proof are two targets). Whole and split run the same batch shapes with the same settings: that is
// what parity means on a CPU.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "cc/shard_engine/engine_chain.h"
#include "cc/shard_engine/llama/llama_engine.h"
#include "cc/shard_engine/llama/testing/tiny_llama.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace meshnet {
namespace {

// PARITY_MODEL set: the cuts that are worth their time on a model of 30 layers.
bool IsRealModel() { return std::getenv("PARITY_MODEL") != nullptr; }

const std::string& ModelPath() {
  static const auto* path = new std::string([] {
    if (IsRealModel()) return std::string(std::getenv("PARITY_MODEL"));
    std::string tiny = testing::TempDir() + "/parity.gguf";
    TinyLlamaOptions options;
    options.tied_output = true;
    const absl::Status status = WriteTinyLlama(tiny, options);
    EXPECT_TRUE(status.ok()) << status;
    return tiny;
  }());
  return *path;
}

LlamaEngineOptions BaseOptions() {
  LlamaEngineOptions options;
  options.model_path = ModelPath();
  options.max_sessions = 8;
  options.context_tokens = 256;
  options.max_step_tokens = 64;
  options.max_logit_rows = 64;
  options.threads = 1;
  options.poll = 0;
  return options;
}

std::unique_ptr<ShardEngine> Load(LlamaEngineOptions options, LayerRange range) {
  options.range = range;
  auto engine = LoadLlamaEngine(options);
  EXPECT_TRUE(engine.ok()) << engine.status();
  return engine.ok() ? *std::move(engine) : nullptr;
}

EngineChain LoadChain(const LlamaEngineOptions& options, const std::vector<uint32_t>& cuts) {
  EngineChain chain;
  uint32_t begin = 0;
  for (const uint32_t cut : cuts) {
    chain.push_back(Load(options, {begin, cut}));
    begin = cut;
  }
  chain.push_back(Load(options, {begin, 0}));
  return chain;
}

std::vector<std::vector<uint32_t>> AllCuts(uint32_t layers) {
  std::vector<std::vector<uint32_t>> cuts;
  if (IsRealModel()) {
    cuts = {{1}, {layers / 3}, {layers / 2}, {layers - 1}};
  } else {
    for (uint32_t cut = 1; cut < layers; ++cut) cuts.push_back({cut});
  }
  cuts.push_back({layers / 3, 2 * layers / 3});
  std::vector<uint32_t> five;
  for (uint32_t i = 1; i < 5; ++i) five.push_back(i * layers / 5);
  cuts.push_back(five);
  return cuts;
}

double MaxDifference(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.empty() || a.size() != b.size()) return std::numeric_limits<double>::infinity();
  double max = 0.0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double difference = std::abs(static_cast<double>(a[i]) - b[i]);
    if (!(difference <= max)) max = difference;  // also for NaN
  }
  return max;
}

std::vector<float> PrefillLogits(const EngineChain& chain, const std::vector<int32_t>& prompt) {
  for (const auto& engine : chain) {
    EXPECT_TRUE(engine->OpenSession(Key('p'), {}, nullptr).ok());
  }
  StepOutput output = RunThrough(chain, MakeStep(Key('p'), 0, prompt, OutputRows::kAllLogits));
  EXPECT_TRUE(output.status.ok()) << output.status;
  for (const auto& engine : chain) EXPECT_TRUE(engine->Release(Key('p')).ok());
  return std::move(output.logits);
}

std::vector<int32_t> Prompt(const ShardEngine& engine) {
  auto prompt = engine.tokenizer().Tokenize(
      "The quick brown fox jumps over the lazy dog. Once upon a time, in a land of rivers and "
      "mills, there lived a clockmaker who",
      /*add_special=*/true, /*parse_special=*/false);
  EXPECT_TRUE(prompt.ok()) << prompt.status();
  // A prefill chunk of 64 and a rest.
  if (prompt->size() > 64) prompt->resize(64);
  return *prompt;
}

uint64_t ResidentBytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (!absl::StartsWith(line, "VmRSS:")) continue;
    const std::vector<std::string> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
    uint64_t kib = 0;
    for (const std::string& word : words) {
      if (absl::SimpleAtoi(word, &kib)) return kib * 1024;
    }
  }
  return 0;
}

struct Footprint {
  uint64_t resident = 0;
  uint64_t owned = 0;
  uint64_t kv = 0;
};

// In a process of its own, warmed up; the first test, so that it starts from a small process.
Footprint Measure(LayerRange range) {
  int ends[2] = {};
  EXPECT_EQ(pipe(ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    LlamaEngineOptions options = BaseOptions();
    options.range = range;
    options.max_logit_rows = 0;
    const auto engine = LoadLlamaEngine(options);
    Footprint footprint;
    if (engine.ok() && (*engine)->WarmUp().ok()) {
      footprint.resident = ResidentBytes();
      footprint.owned = (*engine)->capability().owned_tensor_bytes;
      footprint.kv = (*engine)->EstimateMemory().kv_per_session * options.max_sessions;
    }
    const ssize_t wrote = write(ends[1], &footprint, sizeof(footprint));
    _exit(wrote == sizeof(footprint) ? 0 : 1);
  }
  Footprint footprint;
  EXPECT_EQ(read(ends[0], &footprint, sizeof(footprint)), static_cast<ssize_t>(sizeof(footprint)));
  int outcome = 0;
  EXPECT_EQ(waitpid(child, &outcome, 0), child);
  close(ends[0]);
  close(ends[1]);
  return footprint;
}

TEST(RangeMemoryTest, ResidentMemoryIsWhatTheRangeOwns) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers keep memory of their own";
#endif
  constexpr uint64_t kOverhead = 64u << 20;
  const Footprint whole = Measure({0, 0});
  for (const LayerRange range : {LayerRange{0, 3}, LayerRange{3, 5}, LayerRange{5, 0}}) {
    const Footprint part = Measure(range);
    ASSERT_GT(part.resident, 0u);
    EXPECT_LT(part.owned, whole.owned);
    EXPECT_LE(part.resident, part.owned + part.kv + kOverhead)
        << "[" << range.begin << ", " << range.end << "): owned " << part.owned << ", KV "
        << part.kv;
  }
  EXPECT_LE(whole.resident, whole.owned + whole.kv + kOverhead);
}

TEST(RangeParityTest, EveryCutEqualsTheWholeModel) {
  const LlamaEngineOptions options = BaseOptions();
  std::vector<int32_t> prompt;
  std::vector<float> logits;
  std::vector<int32_t> text;
  uint32_t layers = 0;
  {
    const EngineChain whole = LoadChain(options, {});
    layers = whole[0]->capability().model_layers;
    prompt = Prompt(*whole[0]);
    logits = PrefillLogits(whole, prompt);
    text = Generate(whole, Key('g'), prompt, 64, 40);
    ASSERT_EQ(logits.size(), prompt.size() * whole[0]->capability().vocabulary_size);
    ASSERT_EQ(text.size(), 40u);
  }
  for (const std::vector<uint32_t>& cuts : AllCuts(layers)) {
    SCOPED_TRACE(testing::PrintToString(cuts));
    const EngineChain chain = LoadChain(options, cuts);
    EXPECT_EQ(MaxDifference(PrefillLogits(chain, prompt), logits), 0.0);
    EXPECT_EQ(Generate(chain, Key('g'), prompt, 64, 40), text);
  }
}

TEST(RangeParityTest, LongContextsAndSeveralThreads) {
  LlamaEngineOptions options = BaseOptions();
  // From 512 cached tokens on, flash attention splits one row's work between the threads.
  options.threads = 2;
  options.context_tokens = 1024;
  options.max_sessions = 1;
  options.max_step_tokens = 256;
  const EngineChain whole = LoadChain(options, {});
  const EngineChain chain = LoadChain(options, {whole[0]->capability().model_layers / 2});
  const std::vector<int32_t> prompt = RandomTokens(whole[0]->capability().vocabulary_size, 530, 5);
  EXPECT_EQ(Generate(chain, Key('g'), prompt, 256, 4), Generate(whole, Key('g'), prompt, 256, 4));
}

// Alone, with seven others beside it, and after a restart of every stage.
TEST(RangeParityTest, ASessionDoesNotDependOnItsNeighbours) {
  const LlamaEngineOptions options = BaseOptions();
  EngineChain chain = LoadChain(options, {2});
  const uint32_t vocabulary = chain[0]->capability().vocabulary_size;
  SamplingParams sampling;
  sampling.temperature = 0.9f;
  sampling.top_p = 0.95f;
  sampling.repetition_penalty = 1.1f;
  sampling.seed = 42;
  constexpr size_t kSessions = 8;
  constexpr size_t kTokens = 12;
  const std::vector<int32_t> prompt = Prompt(*chain[0]);
  const std::vector<int32_t> alone = Generate(chain, Key('z'), prompt, 64, kTokens, sampling);
  ASSERT_EQ(alone.size(), kTokens);

  chain = LoadChain(options, {2});
  std::vector<std::vector<int32_t>> next;
  std::vector<uint32_t> positions(kSessions, 0);
  for (size_t i = 0; i < kSessions; ++i) {
    for (const auto& engine : chain) {
      ASSERT_TRUE(engine->OpenSession(Key(static_cast<char>('a' + i)), {}, nullptr).ok());
    }
    next.push_back(i == 3 ? prompt : RandomTokens(vocabulary, 3 + 7 * i, 60 + i));
  }
  std::vector<int32_t> beside;
  for (size_t round = 0; round < kTokens; ++round) {
    std::vector<Step> steps;
    for (size_t i = 0; i < kSessions; ++i) {
      steps.push_back(
          MakeStep(Key(static_cast<char>('a' + i)), positions[i], next[i], OutputRows::kLast));
      if (round == 0) steps.back().sampling = sampling;
    }
    const std::vector<StepOutput> outputs = RunBatchThrough(chain, steps);
    for (size_t i = 0; i < kSessions; ++i) {
      ASSERT_TRUE(outputs[i].token.has_value());
      positions[i] += static_cast<uint32_t>(next[i].size());
      next[i] = {outputs[i].token->token_id};
    }
    beside.push_back(next[3][0]);
  }
  EXPECT_EQ(beside, alone);
}

}  // namespace
}  // namespace meshnet
