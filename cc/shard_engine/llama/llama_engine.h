// ShardEngine on the pinned, patched llama.cpp: one GGUF, one layer range, the CPU or the
// accelerator of the lane that the program was built for.
//
//   LlamaEngineOptions options;
//   options.model_path = "/models/smollm2.gguf";
//   options.range = {0, 15};
//   auto engine = LoadLlamaEngine(options);
//
// One llama_model and one llama_context per engine; a session is one of the context's sequences.
//
// Every slot has a KV stream of its own, so placement in memory and padding depend on nothing but
// the session.
//
//   BatchPolicy::kExact   every step is a llama_decode of its own: its batch shape is its own, too.
//   BatchPolicy::kShared  steps with equally many rows (all decode steps, above all) are one
//                         llama_decode, sorted by slot.
//
// Architectures: `llama` (dense) and `deepseek4`. The graph, kernels and caches of both are
// llama.cpp's own; of DeepSeek V4 a stage keeps the raw keys of the window, the compressed keys of
// CSA and HCA layers, the indexer's keys and the compressors' accumulators of its own layers, in
// the slot of the session. They are no list of tokens that can be cut anywhere: a session can go
// back by rollback_tokens from the last position that it ever wrote, or to 0. Anything else is a
// CACHE_MISS before execution, the same at every stage, and the prompt is prefilled again from
// position 0.
//
// Not executed: multi-token prediction. llama.cpp's logger is process-wide: the sink of
// the engine loaded last gets every line.
#ifndef MESHNET_CC_SHARD_ENGINE_LLAMA_LLAMA_ENGINE_H_
#define MESHNET_CC_SHARD_ENGINE_LLAMA_LLAMA_ENGINE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cc/shard_engine/llama/llama_log.h"
#include "cc/shard_engine/shard_engine.h"

namespace meshnet {

struct LlamaEngineOptions {
  enum class KvType { kF16, kF32, kQ8_0 };

  // A GGUF file, or a part of a split set.
  std::string model_path;
  // The artifact's manifest; its files lie beside `model_path`, or beside it where that is empty.
  // Then the manifest's hash is the artifact's identity, what the range reads is compared with it,
  // and the rest of the files may be missing. Without one the identity is the content of all files.
  std::string manifest_path;
  // ARTIFACT_MISMATCH when the artifact hashes to something else. Lower-case hex; empty = any.
  std::string expected_artifact_sha256;
  // end 0 = the model's last layer.
  LayerRange range;
  // Slots, at most 256.
  uint32_t max_sessions = 4;
  // Per session. The KV memory of all slots is taken at load, rounded up to 256 tokens a slot.
  uint32_t context_tokens = 2048;
  // Rows of the largest step: the prefill chunk.
  uint32_t max_step_tokens = 512;
  // Rows of a step with OutputRows::kAllLogits. Their logits take 4 bytes x vocabulary each in two
  // buffers, so serving leaves it at 0; more than that many rows are refused (FEATURE_UNSUPPORTED).
  uint32_t max_logit_rows = 0;
  BatchPolicy batch_policy = BatchPolicy::kExact;
  // 0 = one per hardware thread.
  uint32_t threads = 0;
  // How long ggml's threads spin between graphs before they sleep, [0, 100]. Spinning saves
  // wake-ups where the cores are the stage's own and steals them from other stages where they are
  // not.
  uint32_t poll = 0;
  // DeepSeek V4: see above; dense models can always go back. Part of the recipe, because all stages
  // have to answer alike.
  uint32_t rollback_tokens = 64;
  // Multi-token prediction: reserved, FEATURE_UNSUPPORTED when asked for.
  bool mtp = false;
  // With as many threads as this process may use CPUs: keep each thread, the caller of Execute()
  // included, to one CPU. Wrong where something else keeps a CPU busy for long.
  bool pin_threads = false;
  bool flash_attention = true;
  KvType kv_type = KvType::kF16;
  // Rearrange weights for the CPU's matrix instructions where it has any.
  bool repack = true;
  // ggml CPU variant to use; empty = the best that this CPU runs.
  std::string cpu_variant;
  // The lane's device to compute on; empty = the first. Only the head's embeddings stay with the
  // CPU. "cpu" = the CPU as on the cpu lane, which has no other device; the recipe is that lane's.
  std::string device;
  absl::Duration idle_ttl = absl::Minutes(30);
  absl::Duration lru_min_idle = absl::Seconds(10);
  // MEMORY_BUDGET_EXCEEDED when EstimateMemory() sums up to more. 0 = no bound.
  uint64_t memory_budget_bytes = 0;
  std::function<absl::Time()> now = absl::Now;
  LlamaLogSink log = nullptr;
  // For tests: called on the engine thread before a batch that passed its checks runs.
  std::function<void()> before_batch = nullptr;
};

// ARTIFACT_UNREADABLE, ARTIFACT_INVALID, ARTIFACT_MISMATCH, ARCHITECTURE_UNSUPPORTED (naming it),
// LAYER_RANGE_INVALID, CPU_UNSUPPORTED, CONFIGURATION_INVALID (also for a lane
// without driver or device), MEMORY_BUDGET_EXCEEDED.
absl::StatusOr<std::unique_ptr<ShardEngine>> LoadLlamaEngine(const LlamaEngineOptions& options);

}  // namespace meshnet

#endif  // MESHNET_CC_SHARD_ENGINE_LLAMA_LLAMA_ENGINE_H_
