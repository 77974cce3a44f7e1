// A deterministic ShardEngine without a model: proves protocol, lifecycle and isolation, never
// numbers of a real model (its Evidence is kFixture).
//
// Every layer keeps a hash chain per session over (token, position, residual in) and turns the
// residual into floats of that hash. So a row's result depends on every row before it in the same
// session, and a lost, repeated, swapped or foreign row changes everything after it; and the layers
// of a model give the same bits however they are spread over stages.
//
//   FakeEngineOptions options;
//   options.range = {0, 4};
//   auto engine = MakeFakeEngine(options);
#ifndef MESHNET_CC_SHARD_ENGINE_FAKE_FAKE_ENGINE_H_
#define MESHNET_CC_SHARD_ENGINE_FAKE_FAKE_ENGINE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cc/shard_engine/shard_engine.h"

namespace meshnet {

struct FakeEngineOptions {
  enum class Malformed {
    kNone,
    kNonFinite,   // NaN in the residual or the logits
    kWrongWidth,  // one float too few
    kBadToken,    // a sampled id outside the vocabulary
  };

  uint32_t layers = 8;
  // end 0 = layers.
  LayerRange range;
  // Floats per token at a seam, >= 1.
  uint32_t width = 16;
  // 256 bytes, then <bos>, <eos>, <|user|>, <|assistant|>, then unused ids. >= 260.
  uint32_t vocabulary_size = 320;
  BatchPolicy batch_policy = BatchPolicy::kExact;
  uint32_t max_sessions = 4;
  uint32_t context_tokens = 1024;
  uint32_t max_step_tokens = 32;
  absl::Duration idle_ttl = absl::InfiniteDuration();
  absl::Duration lru_min_idle = absl::Seconds(10);
  // Distinguishes one pretended artifact from another: changes its hash, nothing else.
  std::string artifact_name = "fixture";
  // Another recipe than its own; empty: its own.
  std::vector<std::pair<std::string, std::string>> recipe;
  std::function<absl::Time()> now = absl::Now;

  // --- Injections. Steps are counted from 1 in the order they run, warm-up not included. ---
  // Every batch takes this long (real time); Cancel of all its sessions ends the wait.
  absl::Duration delay = absl::ZeroDuration();
  // Bytes that the cached tokens of all sessions may take; 0 = slots x context. A token takes
  // layers x width x 4 bytes.
  uint64_t memory_budget_bytes = 0;
  Malformed malformed = Malformed::kNone;
  uint64_t malformed_from_step = 1;
  // The process aborts when it is about to run this step. 0 = never.
  uint64_t crash_at_step = 0;
  // These steps return ENGINE_FAILURE and leave the session as a failed step must: start <= i <
  // start + count.
  uint64_t fail_from_step = 0;
  uint64_t fail_steps = 0;
  // Greedy decoding ends with <eos> when a residual's hash is divisible by this. 0 = never.
  uint32_t end_of_generation_one_in = 0;
  // Called on the engine thread before each batch that passed its checks; a test may block here.
  std::function<void()> before_batch = nullptr;
  // The warm-up: may block, its failure is WarmUp's. Null: succeeds at once.
  std::function<absl::Status()> warm_up = nullptr;
};

// LAYER_RANGE_INVALID for an empty, reversed or out-of-model range; CONFIGURATION_INVALID for
// anything else that cannot be.
absl::StatusOr<std::unique_ptr<ShardEngine>> MakeFakeEngine(const FakeEngineOptions& options);

}  // namespace meshnet

#endif  // MESHNET_CC_SHARD_ENGINE_FAKE_FAKE_ENGINE_H_
