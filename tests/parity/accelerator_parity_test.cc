// A dense model on the lane's accelerator against the same model on the CPU, within a stated
// tolerance; and split against whole on the accelerator, bit for bit.
//
// Without PARITY_MODEL on a tiny random model; with it on that file. Tolerance: the squared error
// of all logits of a prompt over their squares (NMSE). Kernels round differently, so no bit is
// equal; how much that may be follows from what they round (below), and faults in the model or the
// positions are shown to lie beyond it.
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

// Mean square of the error of rounding to f16, over the value's: steps of 2^-10 of a mantissa that
// is between 1 and 2, evenly in its logarithm.
constexpr double kF16Rounding = 0.541 / 12 / (1 << 20);
// Of weights in 16 bits with sums in 32 bits: both sides round activations or the attention's
// probabilities to f16, in other places. The CPU differs from itself, with and without flash
// attention, by 4e-6; lavapipe from the CPU by 4e-6 to 5e-6.
constexpr double kPlainTolerance = 1e-5;
// More than one row goes through matrix products that also sum in f16, unless the driver has no
// f16: a sum of K terms is rounded K times, on average at half its size. A layer's attention ends
// in two products of 64 terms, its feed-forward in one of 64, twice over, and one of 128; the
// residual has equal parts of both. Layers add up, at most; the output matrix comes last.
constexpr double kLayers = 6;
constexpr double kHalfSumsTolerance =
    kPlainTolerance +
    kF16Rounding * (kLayers * ((32 + 32) + (32 + 32 + 64)) / 2 + 32);  // lavapipe: 1.85e-5
// Of quantised weights: the CPU rounds activations to 8 bits in front of them, a GPU may do so or
// not. One layer of that is 2.6e-4 (the input of the last matrix is a product, whose largest value
// of 32 is 6 times the deviation: (6 / 127)^2 / 12 = 1.9e-4, the rest are 2 / 127 each), and layers
// add up, at most: 1.6e-3 of six, 7.8e-3 of SmolLM2's thirty. Of six the CPU differs from itself,
// with and without flash attention, by 7e-4, lavapipe from the CPU by 8e-4; of thirty by 1.8e-3.
constexpr double kQuantizedLayer = 2.6e-4;
// Rows of one step: a whole chunk uses other kernels than one row.
constexpr size_t kChunks[] = {32, 1};
constexpr size_t kPromptTokens = 48;

const char* RealModel() { return std::getenv("PARITY_MODEL"); }

// Whether the driver was told to do without f16 (GGML_VK_DISABLE_F16).
bool SumsInF32() { return std::getenv("PARITY_SUMS_IN_F32") != nullptr; }

double Tolerance(bool quantized, size_t chunk, double layers = kLayers) {
  if (quantized) return kQuantizedLayer * layers;
  return chunk == 1 || SumsInF32() ? kPlainTolerance : kHalfSumsTolerance;
}

using Edit = decltype(TinyLlamaOptions::edit);

std::string TinyModel(bool quantized, const Edit& edit) {
  TinyLlamaOptions options;
  options.quantized = quantized;
  options.edit = edit;
  const std::string path = absl::StrCat(testing::TempDir(), "/accelerator_", quantized,
                                        edit == nullptr ? "" : "_faulty", ".gguf");
  EXPECT_TRUE(WriteTinyLlama(path, options).ok());
  return path;
}

std::string Model(bool quantized) {
  return RealModel() != nullptr ? RealModel() : TinyModel(quantized, nullptr);
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

constexpr char kLane[] = "";  // its first device
constexpr char kCpu[] = "cpu";

EngineChain Whole(const std::string& model, const std::string& device) {
  LlamaEngineOptions options = Options(model);
  options.device = device;
  return LoadStages(options, {});
}

void ExpectParity(bool quantized) {
  const std::string model = Model(quantized);
  const EngineChain fast = Whole(model, kLane);
  const EngineChain plain = Whole(model, kCpu);
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
    const double tolerance = Tolerance(quantized, chunk, plain.front()->capability().model_layers);
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

TEST(AcceleratorParityTest, LogitsAreTheCpusWithinTheTolerance) { ExpectParity(true); }

TEST(AcceleratorParityTest, WithoutQuantisationTheyAreMuchCloser) {
  if (RealModel() != nullptr) GTEST_SKIP() << "the real model is quantised";
  ExpectParity(false);
}

bool IsOf(const std::string& name, int layer) {
  return name.rfind(absl::StrCat("blk.", layer, "."), 0) == 0;
}

struct Fault {
  const char* what;
  // Whether it is larger than what quantisation does.
  bool is_coarse;
  Edit edit;
};

// What a backend that goes wrong in one place computes.
std::vector<Fault> Faults() {
  return {
      {"two layers in each other's place", true,
       [](std::string* name, std::vector<float>*) {
         const int layer = IsOf(*name, 2) ? 3 : IsOf(*name, 3) ? 2 : -1;
         if (layer >= 0) name->replace(4, 1, absl::StrCat(layer));
       }},
      {"one head of one layer is empty", true,
       [](std::string* name, std::vector<float>* values) {
         if (*name != "blk.4.attn_q.weight") return;
         std::fill(values->begin(), values->begin() + values->size() / 2, 0.0f);
       }},
      {"the weights of one layer's norm are left out", false,
       [](std::string* name, std::vector<float>* values) {
         if (*name == "blk.5.attn_norm.weight") std::fill(values->begin(), values->end(), 1.0f);
       }},
      {"the weights of the last norm are left out", true,
       [](std::string* name, std::vector<float>* values) {
         if (*name == "output_norm.weight") std::fill(values->begin(), values->end(), 1.0f);
       }},
  };
}

TEST(AcceleratorParityTest, AFaultInOnePlaceIsBeyondTheTolerance) {
  if (RealModel() != nullptr) GTEST_SKIP() << "faults are made in the random model";
  for (const bool quantized : {false, true}) {
    const EngineChain plain = Whole(Model(quantized), kCpu);
    ASSERT_EQ(plain.size(), 1u);
    const std::vector<int32_t> prompt = Prompt(*plain.front());
    for (const Fault& fault : Faults()) {
      if (quantized && !fault.is_coarse) continue;
      SCOPED_TRACE(fault.what);
      const EngineChain faulty = Whole(TinyModel(quantized, fault.edit), kLane);
      ASSERT_EQ(faulty.size(), 1u);
      for (const size_t chunk : kChunks) {
        const double nmse = Nmse(RunSession(faulty, Key('a'), prompt, chunk, 0).prompt_logits,
                                 RunSession(plain, Key('a'), prompt, chunk, 0).prompt_logits);
        std::printf("%s: chunk %zu, NMSE %.3g\n", fault.what, chunk, nmse);
        EXPECT_GT(nmse, Tolerance(quantized, chunk));
      }
    }
  }
}

TEST(AcceleratorParityTest, TwoTokensInEachOthersPositionAreBeyondTheTolerance) {
  if (RealModel() != nullptr) GTEST_SKIP() << "the tolerance is that of the random model";
  constexpr size_t kAt = 20;
  for (const bool quantized : {false, true}) {
    const EngineChain fast = Whole(Model(quantized), kLane);
    const EngineChain plain = Whole(Model(quantized), kCpu);
    ASSERT_EQ(fast.size(), 1u);
    ASSERT_EQ(plain.size(), 1u);
    const std::vector<int32_t> prompt = Prompt(*plain.front());
    std::vector<int32_t> exchanged = prompt;
    ASSERT_NE(exchanged[kAt], exchanged[kAt + 1]);
    std::swap(exchanged[kAt], exchanged[kAt + 1]);
    const size_t behind = (kAt + 2) * plain.front()->capability().vocabulary_size;
    for (const size_t chunk : kChunks) {
      std::vector<float> found = RunSession(fast, Key('a'), exchanged, chunk, 0).prompt_logits;
      std::vector<float> right = RunSession(plain, Key('a'), prompt, chunk, 0).prompt_logits;
      ASSERT_GT(right.size(), behind);
      found.erase(found.begin(), found.begin() + behind);
      right.erase(right.begin(), right.begin() + behind);
      const double nmse = Nmse(found, right);
      std::printf("exchanged tokens: chunk %zu, NMSE of the rows behind %.3g\n", chunk, nmse);
      EXPECT_GT(nmse, Tolerance(quantized, chunk));
    }
  }
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
