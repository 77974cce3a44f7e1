// A dense model on the lane's accelerator against the same model on the CPU, within a stated
// tolerance; and split against whole on the accelerator, bit for bit.
//
// Without PARITY_MODEL on a tiny random model; with it on that file. Tolerance: the squared error
// of all logits of a prompt over their squares (NMSE). Kernels round activations differently (the
// CPU to 8 bits in front of quantised weights, a GPU to 16 bits or not at all), so no bit is equal.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/shard_engine/engine_chain.h"
#include "cc/shard_engine/llama/llama_engine.h"
#include "cc/shard_engine/llama/testing/tiny_llama.h"
#include "gtest/gtest.h"
#include "tests/parity/trace.h"

namespace meshnet {
namespace {

// Of quantised weights, and of weights in 16 bits.
constexpr double kQuantizedTolerance = 2e-3;
constexpr double kPlainTolerance = 1e-5;
// Rows of one step: a whole chunk uses other kernels than one row.
constexpr size_t kChunks[] = {32, 1};
constexpr size_t kPromptTokens = 48;

const char* RealModel() { return std::getenv("PARITY_MODEL"); }

std::string Model(bool quantized) {
  if (RealModel() != nullptr) return RealModel();
  TinyLlamaOptions options;
  options.quantized = quantized;
  const std::string path = absl::StrCat(testing::TempDir(), "/accelerator_", quantized, ".gguf");
  EXPECT_TRUE(WriteTinyLlama(path, options).ok());
  return path;
}

LlamaEngineOptions Options(const std::string& model) {
  LlamaEngineOptions options;
  options.model_path = model;
  options.max_sessions = 2;
  options.context_tokens = 256;
  options.max_step_tokens = 32;
  options.max_logit_rows = 32;
  options.threads = 2;
  return options;
}

std::vector<int32_t> Prompt(const ShardEngine& engine) {
  auto prompt = engine.tokenizer().Tokenize(
      "The quick brown fox jumps over the lazy dog. Once upon a time, in a land of rivers and "
      "mills, there lived a clockmaker who built a clock that could not be wound, and everybody "
      "who came to see it asked the same thing: what is it for?",
      /*add_special=*/true, /*parse_special=*/false);
  EXPECT_TRUE(prompt.ok()) << prompt.status();
  prompt->resize(std::min(prompt->size(), kPromptTokens));
  return *prompt;
}

double Nmse(const std::vector<float>& found, const std::vector<float>& expected) {
  EXPECT_EQ(found.size(), expected.size());
  double error = 0.0, square = 0.0;
  for (size_t i = 0; i < std::min(found.size(), expected.size()); ++i) {
    const double difference = static_cast<double>(found[i]) - expected[i];
    error += difference * difference;
    square += static_cast<double>(expected[i]) * expected[i];
  }
  return error / square;
}

// Rows whose likeliest token is the same, of all.
double Agreement(const std::vector<float>& a, const std::vector<float>& b, size_t vocabulary) {
  size_t rows = 0, same = 0;
  for (size_t at = 0; at + vocabulary <= std::min(a.size(), b.size()); at += vocabulary) {
    ++rows;
    same += Best({&a[at], vocabulary}) == Best({&b[at], vocabulary});
  }
  return static_cast<double>(same) / static_cast<double>(rows);
}

void ExpectParity(const std::string& model, double tolerance) {
  LlamaEngineOptions options = Options(model);
  const EngineChain fast = LoadStages(options, {});
  options.accelerate = false;
  const EngineChain plain = LoadStages(options, {});
  ASSERT_EQ(fast.size(), 1u);
  ASSERT_EQ(plain.size(), 1u);
  const std::vector<int32_t> prompt = Prompt(*plain.front());
  const size_t vocabulary = plain.front()->capability().vocabulary_size;
  for (const size_t chunk : kChunks) {
    SCOPED_TRACE(chunk);
    const Trace found = RunSession(fast, Key('a'), prompt, chunk, 8);
    const Trace expected = RunSession(plain, Key('a'), prompt, chunk, 8);
    const double nmse = Nmse(found.prompt_logits, expected.prompt_logits);
    const double agreement = Agreement(found.prompt_logits, expected.prompt_logits, vocabulary);
    std::printf(
        "chunk %zu: NMSE %.3g (tolerance %.3g), same likeliest token in %.1f %% of %zu rows\n",
        chunk, nmse, tolerance, 100 * agreement, prompt.size());
    // They are different kernels: equal bits would mean that the CPU computed both.
    EXPECT_GT(nmse, 0.0);
    EXPECT_LE(nmse, tolerance);
    if (RealModel() != nullptr) {
      EXPECT_GE(agreement, 0.9);
    }
  }
}

TEST(AcceleratorParityTest, LogitsAreTheCpusWithinTheTolerance) {
  ExpectParity(Model(true), kQuantizedTolerance);
}

TEST(AcceleratorParityTest, WithoutQuantisationTheyAreMuchCloser) {
  if (RealModel() != nullptr) GTEST_SKIP() << "the real model is quantised";
  ExpectParity(Model(false), kPlainTolerance);
}

TEST(AcceleratorParityTest, SplitIsWholeBitForBit) {
  const LlamaEngineOptions options = Options(Model(true));
  const EngineChain whole = LoadStages(options, {});
  ASSERT_EQ(whole.size(), 1u);
  const std::vector<int32_t> prompt = Prompt(*whole.front());
  const Trace expected = RunSession(whole, Key('a'), prompt, 32, 8);
  const uint32_t layers = whole.front()->capability().model_layers;
  for (const Cuts& cuts : {Cuts{1}, Cuts{layers / 2}, Cuts{layers / 3, layers - 1}}) {
    SCOPED_TRACE(cuts.front());
    ExpectEqual(RunSession(LoadStages(options, cuts), Key('a'), prompt, 32, 8), expected);
  }
}

}  // namespace
}  // namespace meshnet
