// A session on a chain of engines, recorded, so that a split model can be compared with the whole
// one.
#ifndef MESHNET_TESTS_PARITY_TRACE_H_
#define MESHNET_TESTS_PARITY_TRACE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "cc/shard_engine/engine_chain.h"
#include "cc/shard_engine/llama/llama_engine.h"

namespace meshnet {

// First layers of the stages behind the head.
using Cuts = std::vector<uint32_t>;

// One engine a stage; empty, and a test failure, when one does not load.
EngineChain LoadStages(LlamaEngineOptions options, const Cuts& cuts);

// Infinite when there is nothing to compare, or a number that is none.
double MaxDifference(const std::vector<float>& a, const std::vector<float>& b);

struct Trace {
  std::vector<float> prompt_logits;  // of every row
  std::vector<float> text_logits;    // of every decoded token
  std::vector<int32_t> text;
};

// The likeliest token.
int32_t Best(absl::Span<const float> logits);

// Opens `key`, prefills `prompt` in chunks, decodes `count` tokens greedily, releases `key`.
Trace RunSession(const EngineChain& chain, const SessionKey& key,
                 const std::vector<int32_t>& prompt, size_t chunk, size_t count);

// Test failures unless both are the same, bit for bit.
void ExpectEqual(const Trace& split, const Trace& whole);

}  // namespace meshnet

#endif  // MESHNET_TESTS_PARITY_TRACE_H_
