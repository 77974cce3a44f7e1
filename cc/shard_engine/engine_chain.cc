#include "cc/shard_engine/engine_chain.h"

#include <string>
#include <utility>

#include "gtest/gtest.h"

namespace meshnet {
namespace {

// What the stage `engine` gets of a step that is meant for the whole model.
Step LocalStep(const ShardEngine& engine, const Step& step, absl::Span<const float> residual) {
  Step local = step;
  local.residual = residual;
  if (!engine.capability().is_tail()) {
    local.output_rows = OutputRows::kNone;
    local.return_logits = false;
    local.sampling.reset();
  }
  return local;
}

}  // namespace

SessionKey Key(char id, uint64_t epoch) { return {std::string(16, id), epoch}; }

std::vector<int32_t> RandomTokens(uint32_t vocabulary, size_t n, uint32_t seed) {
  std::vector<int32_t> tokens(n);
  for (int32_t& token : tokens) {
    seed = seed * 1664525u + 1013904223u;
    token = static_cast<int32_t>((seed >> 8) % vocabulary);
  }
  return tokens;
}

Step MakeStep(const SessionKey& key, uint32_t start, absl::Span<const int32_t> tokens,
              OutputRows rows) {
  Step step;
  step.session = key;
  step.phase = tokens.size() == 1 ? Phase::kDecode : Phase::kPrefill;
  step.start_position = start;
  step.token_ids = tokens;
  step.output_rows = rows;
  return step;
}

StepOutput RunStep(ShardEngine& engine, const Step& step) {
  std::vector<StepOutput> outputs;
  const absl::Status status = engine.Execute({step}, &outputs);
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(outputs.size(), 1u);
  return outputs.empty() ? StepOutput() : std::move(outputs.front());
}

StepOutput RunThrough(const EngineChain& chain, const Step& step) {
  StepOutput output;
  std::vector<float> residual;
  for (const auto& engine : chain) {
    output = RunStep(*engine, LocalStep(*engine, step, residual));
    if (!output.status.ok()) return output;
    residual = output.residual;
  }
  return output;
}

std::vector<StepOutput> RunBatchThrough(const EngineChain& chain, const std::vector<Step>& batch) {
  std::vector<StepOutput> outputs(batch.size());
  for (const auto& engine : chain) {
    std::vector<Step> local;
    for (size_t i = 0; i < batch.size(); ++i) {
      local.push_back(LocalStep(*engine, batch[i], outputs[i].residual));
    }
    std::vector<StepOutput> next;
    const absl::Status status = engine->Execute(local, &next);
    EXPECT_TRUE(status.ok()) << status;
    for (const StepOutput& output : next) EXPECT_TRUE(output.status.ok()) << output.status;
    outputs = std::move(next);
  }
  return outputs;
}

std::vector<int32_t> Generate(const EngineChain& chain, const SessionKey& key,
                              const std::vector<int32_t>& prompt, size_t chunk, size_t count,
                              const SamplingParams& sampling) {
  for (const auto& engine : chain) EXPECT_TRUE(engine->OpenSession(key, {}, nullptr).ok());
  uint32_t position = 0;
  StepOutput output;
  while (position < prompt.size()) {
    const auto rows = absl::MakeConstSpan(prompt).subspan(position, chunk);
    const bool last = position + rows.size() == prompt.size();
    Step step = MakeStep(key, position, rows, last ? OutputRows::kLast : OutputRows::kNone);
    if (last) step.sampling = sampling;
    output = RunThrough(chain, step);
    EXPECT_TRUE(output.status.ok()) << output.status;
    position += static_cast<uint32_t>(rows.size());
  }
  std::vector<int32_t> ids;
  while (output.token.has_value()) {
    ids.push_back(output.token->token_id);
    if (ids.size() == count) break;
    const int32_t last = ids.back();
    output = RunThrough(chain, MakeStep(key, position++, {&last, 1}, OutputRows::kLast));
    EXPECT_TRUE(output.status.ok()) << output.status;
  }
  for (const auto& engine : chain) EXPECT_TRUE(engine->Release(key).ok());
  return ids;
}

}  // namespace meshnet
