// Drives engines in tests: one step, one step through all stages of a model, a whole generation.
#ifndef MESHNET_CC_SHARD_ENGINE_ENGINE_CHAIN_H_
#define MESHNET_CC_SHARD_ENGINE_ENGINE_CHAIN_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/types/span.h"
#include "cc/shard_engine/shard_engine.h"

namespace meshnet {

// The stages of one model, head first.
using EngineChain = std::vector<std::unique_ptr<ShardEngine>>;

SessionKey Key(char id, uint64_t epoch = 1);

// `n` token ids in [0, vocabulary) that follow from `seed`.
std::vector<int32_t> RandomTokens(uint32_t vocabulary, size_t n, uint32_t seed);

// One row is a decode step, several are a prefill step. The tokens must outlive the step.
Step MakeStep(const SessionKey& key, uint32_t start, absl::Span<const int32_t> tokens,
              OutputRows rows = OutputRows::kNone);

// One step as a batch of its own. A failed batch is a test failure.
StepOutput RunStep(ShardEngine& engine, const Step& step);

// One step through all stages: the first error or the tail's output.
StepOutput RunThrough(const EngineChain& chain, const Step& step);

// A batch of steps through all stages, in the same order at every stage; all must succeed.
std::vector<StepOutput> RunBatchThrough(const EngineChain& chain, const std::vector<Step>& batch);

// Opens `key`, prefills `prompt` in chunks of `chunk` rows, decodes until `count` tokens are
// sampled, releases `key`: the sampled ids.
std::vector<int32_t> Generate(const EngineChain& chain, const SessionKey& key,
                              const std::vector<int32_t>& prompt, size_t chunk, size_t count,
                              const SamplingParams& sampling = {});

}  // namespace meshnet

#endif  // MESHNET_CC_SHARD_ENGINE_ENGINE_CHAIN_H_
