// DeepSeek V4 split into layer ranges against the same model whole, bit for bit: the logits of
// every row of a prompt, and of every token of the text that follows.
//
// Whole and split run the same batch shapes with the same settings: that is what parity means on a
// CPU. The model is a random one with every kind of layer (window only, CSA, HCA; hash layers 0-2).
#include <cstdint>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "cc/shard_engine/engine_chain.h"
#include "cc/shard_engine/llama/llama_engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/parity/trace.h"

namespace meshnet {
namespace {

LlamaEngineOptions BaseOptions() {
  LlamaEngineOptions options;
  options.model_path = std::getenv("DEEPSEEK4_MODEL");
  options.max_sessions = 1;
  options.context_tokens = 512;
  options.max_step_tokens = 64;
  options.max_logit_rows = 64;
  options.threads = 1;
  options.poll = 0;
  return options;
}

void Append(std::vector<float>* all, const std::vector<float>& more) {
  all->insert(all->end(), more.begin(), more.end());
}

std::vector<int32_t> Prompt(const EngineChain& chain, size_t n, uint32_t seed = 11) {
  return RandomTokens(chain[0]->capability().vocabulary_size, n, seed);
}

// Compression ratios of the layers: 0, 0, 4, 128, 4, 128, 4, 0. Cuts at 1 and 2 lie within the hash
// layers, the one at 3 behind them, and each one lies at another transition.
TEST(DeepSeek4ParityTest, EverySingleCut) {
  const LlamaEngineOptions options = BaseOptions();
  std::vector<int32_t> prompt;
  Trace whole;
  uint32_t layers = 0;
  {
    const EngineChain chain = LoadStages(options, {});
    layers = chain[0]->capability().model_layers;
    prompt = Prompt(chain, 200);
    whole = RunSession(chain, Key('w'), prompt, 64, 64);
  }
  ASSERT_EQ(layers, 8u);
  ASSERT_EQ(whole.text.size(), 65u);
  for (uint32_t cut = 1; cut < layers; ++cut) {
    SCOPED_TRACE(cut);
    ExpectEqual(RunSession(LoadStages(options, {cut}), Key('s'), prompt, 64, 64), whole);
  }
}

TEST(DeepSeek4ParityTest, TwoToEightStages) {
  const LlamaEngineOptions options = BaseOptions();
  const EngineChain reference = LoadStages(options, {});
  const std::vector<int32_t> prompt = Prompt(reference, 200);
  const Trace whole = RunSession(reference, Key('w'), prompt, 64, 32);
  for (const Cuts& cuts : {Cuts{4}, Cuts{2, 5}, Cuts{1, 2, 3}, Cuts{2, 4, 6}, Cuts{1, 3, 4, 6},
                           Cuts{1, 2, 3, 4, 5, 6, 7}}) {
    SCOPED_TRACE(testing::PrintToString(cuts));
    ExpectEqual(RunSession(LoadStages(options, cuts), Key('s'), prompt, 64, 32), whole);
  }
}

class PromptLengthTest : public testing::TestWithParam<std::pair<size_t, size_t>> {};

TEST_P(PromptLengthTest, LongPromptsInChunks) {
  const auto [length, chunk] = GetParam();
  LlamaEngineOptions options = BaseOptions();
  options.context_tokens = 2304;
  options.max_step_tokens = static_cast<uint32_t>(chunk);
  options.max_logit_rows = static_cast<uint32_t>(chunk);
  const EngineChain reference = LoadStages(options, {});
  const std::vector<int32_t> prompt = Prompt(reference, length);
  const Trace whole = RunSession(reference, Key('w'), prompt, chunk, 64);
  ASSERT_EQ(whole.text.size(), 65u);
  ExpectEqual(RunSession(LoadStages(options, {2, 3, 5}), Key('s'), prompt, chunk, 64), whole);
}

INSTANTIATE_TEST_SUITE_P(
    DeepSeek4, PromptLengthTest,
    testing::Values(std::pair<size_t, size_t>(200, 17), std::pair<size_t, size_t>(200, 256),
                    std::pair<size_t, size_t>(600, 64), std::pair<size_t, size_t>(600, 250),
                    std::pair<size_t, size_t>(2000, 128), std::pair<size_t, size_t>(2000, 512)),
    [](const auto& test) {
      return std::to_string(test.param.first) + "TokensBy" + std::to_string(test.param.second);
    });

// Four sessions in turns, against each of them alone on the whole model.
TEST(DeepSeek4ParityTest, InterleavedSessionsEqualTheWholeModelAlone) {
  LlamaEngineOptions options = BaseOptions();
  options.max_sessions = 4;
  const EngineChain reference = LoadStages(options, {});
  const EngineChain chain = LoadStages(options, {2, 5});
  constexpr size_t kSessions = 4;
  constexpr size_t kTokens = 24;
  std::vector<std::vector<int32_t>> prompts;
  std::vector<Trace> alone;
  for (size_t i = 0; i < kSessions; ++i) {
    prompts.push_back(Prompt(reference, 30 + 41 * i, static_cast<uint32_t>(i)));
    alone.push_back(RunSession(reference, Key('w'), prompts[i], 64, kTokens));
    for (const auto& engine : chain) {
      ASSERT_TRUE(engine->OpenSession(Key(static_cast<char>('a' + i)), {}, nullptr).ok());
    }
  }
  const size_t vocabulary = reference[0]->capability().vocabulary_size;
  std::vector<uint32_t> positions(kSessions, 0);
  std::vector<int32_t> next(kSessions);
  std::vector<Trace> together(kSessions);
  bool busy = true;
  while (busy) {
    busy = false;
    for (size_t i = 0; i < kSessions; ++i) {
      const auto& prompt = prompts[i];
      if (positions[i] >= prompt.size() + kTokens) continue;
      busy = true;
      const bool in_prompt = positions[i] < prompt.size();
      const absl::Span<const int32_t> rows =
          in_prompt ? absl::MakeConstSpan(prompt).subspan(positions[i], 64)
                    : absl::MakeConstSpan(next).subspan(i, 1);
      const StepOutput output = RunThrough(
          chain,
          MakeStep(Key(static_cast<char>('a' + i)), positions[i], rows, OutputRows::kAllLogits));
      ASSERT_TRUE(output.status.ok()) << output.status;
      Append(in_prompt ? &together[i].prompt_logits : &together[i].text_logits, output.logits);
      positions[i] += static_cast<uint32_t>(rows.size());
      next[i] = Best(absl::MakeConstSpan(output.logits).last(vocabulary));
      if (positions[i] >= prompt.size()) together[i].text.push_back(next[i]);
    }
  }
  for (size_t i = 0; i < kSessions; ++i) {
    SCOPED_TRACE(i);
    ExpectEqual(together[i], alone[i]);
  }
}

// The rows of all sessions in one call, the same way on both sides.
TEST(DeepSeek4ParityTest, SharedBatchesEqualTheWholeModel) {
  LlamaEngineOptions options = BaseOptions();
  options.batch_policy = BatchPolicy::kShared;
  options.max_sessions = 4;
  std::vector<std::vector<int32_t>> texts;
  for (const Cuts& cuts : {Cuts{}, Cuts{1, 3, 6}}) {
    const EngineChain chain = LoadStages(options, cuts);
    std::vector<std::vector<int32_t>> rows;
    std::vector<uint32_t> positions(4, 0);
    for (uint32_t i = 0; i < 4; ++i) {
      rows.push_back(Prompt(chain, 16, i));
      for (const auto& engine : chain) {
        ASSERT_TRUE(engine->OpenSession(Key(static_cast<char>('a' + i)), {}, nullptr).ok());
      }
    }
    std::vector<int32_t> text;
    for (int round = 0; round < 140; ++round) {
      std::vector<Step> steps;
      for (size_t i = 0; i < 4; ++i) {
        steps.push_back(
            MakeStep(Key(static_cast<char>('a' + i)), positions[i], rows[i], OutputRows::kLast));
      }
      const std::vector<StepOutput> outputs = RunBatchThrough(chain, steps);
      for (size_t i = 0; i < 4; ++i) {
        ASSERT_TRUE(outputs[i].token.has_value());
        positions[i] += static_cast<uint32_t>(rows[i].size());
        rows[i] = {outputs[i].token->token_id};
        text.push_back(rows[i][0]);
      }
    }
    texts.push_back(text);
  }
  EXPECT_EQ(texts[0], texts[1]);
}

// Drafts of five tokens, of which 0 to 5 are kept, past the end of the window, of CSA blocks and of
// an HCA block.
TEST(DeepSeek4ParityTest, RolledBackDraftsEqualTheWholeModel) {
  const LlamaEngineOptions options = BaseOptions();
  std::vector<std::vector<float>> logits;
  for (const Cuts& cuts : {Cuts{}, Cuts{3}, Cuts{1, 2, 3, 4, 5, 6, 7}}) {
    const EngineChain chain = LoadStages(options, cuts);
    for (const auto& engine : chain) ASSERT_TRUE(engine->OpenSession(Key('d'), {}, nullptr).ok());
    const std::vector<int32_t> prompt = Prompt(chain, 60);
    ASSERT_TRUE(RunThrough(chain, MakeStep(Key('d'), 0, prompt)).status.ok());
    uint32_t position = 60;
    logits.emplace_back();
    for (uint32_t round = 0; round < 60; ++round) {
      const std::vector<int32_t> draft = Prompt(chain, 5, round);
      const StepOutput output =
          RunThrough(chain, MakeStep(Key('d'), position, draft, OutputRows::kAllLogits));
      ASSERT_TRUE(output.status.ok()) << output.status;
      Append(&logits.back(), output.logits);
      position += round % 6;
    }
    ASSERT_GT(position, 200u);
  }
  EXPECT_EQ(MaxDifference(logits[1], logits[0]), 0.0);
  EXPECT_EQ(MaxDifference(logits[2], logits[0]), 0.0);
}

// What was drafted and dropped leaves no trace: single tokens, so that batch shapes are equal.
TEST(DeepSeek4ParityTest, ARolledBackSessionEqualsOneThatNeverDrafted) {
  const LlamaEngineOptions options = BaseOptions();
  const EngineChain chain = LoadStages(options, {2, 4});
  const std::vector<int32_t> prompt = Prompt(chain, 60);
  const std::vector<int32_t> text = Prompt(chain, 150, 3);
  std::vector<std::vector<float>> logits;
  for (const bool drafts : {false, true}) {
    for (const auto& engine : chain) ASSERT_TRUE(engine->OpenSession(Key('d'), {}, nullptr).ok());
    ASSERT_TRUE(RunThrough(chain, MakeStep(Key('d'), 0, prompt)).status.ok());
    logits.emplace_back();
    for (uint32_t i = 0; i < text.size(); ++i) {
      const uint32_t position = 60 + i;
      if (drafts && i % 3 == 0) {
        const std::vector<int32_t> draft = Prompt(chain, 7, i);
        ASSERT_TRUE(RunThrough(chain, MakeStep(Key('d'), position, draft)).status.ok());
      }
      const StepOutput output =
          RunThrough(chain, MakeStep(Key('d'), position, {&text[i], 1}, OutputRows::kAllLogits));
      ASSERT_TRUE(output.status.ok()) << output.status;
      Append(&logits.back(), output.logits);
    }
    for (const auto& engine : chain) ASSERT_TRUE(engine->Release(Key('d')).ok());
  }
  EXPECT_EQ(MaxDifference(logits[1], logits[0]), 0.0);
}

TEST(DeepSeek4ParityTest, AReusedSlotHoldsNothingOfItsFormerSession) {
  const LlamaEngineOptions options = BaseOptions();
  const EngineChain chain = LoadStages(options, {3, 6});
  const std::vector<int32_t> prompt = Prompt(chain, 200);
  const Trace first = RunSession(chain, Key('a'), prompt, 64, 16);
  RunSession(chain, Key('b'), Prompt(chain, 333, 77), 64, 16);
  ExpectEqual(RunSession(chain, Key('c'), prompt, 64, 16), first);
}

}  // namespace
}  // namespace meshnet
