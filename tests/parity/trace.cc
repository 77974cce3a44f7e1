#include "tests/parity/trace.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "gtest/gtest.h"

namespace meshnet {

EngineChain LoadStages(LlamaEngineOptions options, const Cuts& cuts) {
  EngineChain chain;
  options.range.begin = 0;
  for (size_t i = 0; i <= cuts.size(); ++i) {
    options.range.end = i < cuts.size() ? cuts[i] : 0;
    auto engine = LoadLlamaEngine(options);
    EXPECT_TRUE(engine.ok()) << engine.status();
    if (!engine.ok()) return {};
    chain.push_back(*std::move(engine));
    options.range.begin = options.range.end;
  }
  return chain;
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

int32_t Best(absl::Span<const float> logits) {
  return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

namespace {

void Append(std::vector<float>* all, const std::vector<float>& more) {
  all->insert(all->end(), more.begin(), more.end());
}

}  // namespace

Trace RunSession(const EngineChain& chain, const SessionKey& key,
                 const std::vector<int32_t>& prompt, size_t chunk, size_t count) {
  for (const auto& engine : chain) EXPECT_TRUE(engine->OpenSession(key, {}, nullptr).ok());
  const size_t vocabulary = chain[0]->capability().vocabulary_size;
  Trace trace;
  uint32_t position = 0;
  int32_t next = 0;
  while (position < prompt.size() + count) {
    const bool in_prompt = position < prompt.size();
    const absl::Span<const int32_t> rows =
        in_prompt ? absl::MakeConstSpan(prompt).subspan(position, chunk)
                  : absl::Span<const int32_t>(&next, 1);
    const StepOutput output =
        RunThrough(chain, MakeStep(key, position, rows, OutputRows::kAllLogits));
    EXPECT_TRUE(output.status.ok()) << output.status;
    if (!output.status.ok()) break;
    Append(in_prompt ? &trace.prompt_logits : &trace.text_logits, output.logits);
    position += static_cast<uint32_t>(rows.size());
    next = Best(absl::MakeConstSpan(output.logits).last(vocabulary));
    if (position >= prompt.size()) trace.text.push_back(next);
  }
  for (const auto& engine : chain) EXPECT_TRUE(engine->Release(key).ok());
  return trace;
}

void ExpectEqual(const Trace& split, const Trace& whole) {
  EXPECT_EQ(MaxDifference(split.prompt_logits, whole.prompt_logits), 0.0);
  EXPECT_EQ(MaxDifference(split.text_logits, whole.text_logits), 0.0);
  EXPECT_EQ(split.text, whole.text);
}

}  // namespace meshnet
