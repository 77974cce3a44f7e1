#include "cc/worker/engine_factory.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "cc/common/status.h"
#include "cc/shard_engine/fake/fake_engine.h"
#include "cc/shard_engine/llama/llama_engine.h"

ABSL_FLAG(std::string, engine, "llama", "llama, or fake for a fixture without a model.");
ABSL_FLAG(
    std::string, model, "",
    "GGUF file of the whole model, or the first part of a split set; only the range's tensors "
    "are loaded.");
ABSL_FLAG(
    std::string, manifest, "",
    "The artifact's manifest (see `meshnet provision`): what the layers read is compared with "
    "it, the rest may be missing, and its hash is the artifact. --model is then its first file, "
    "beside it if not given.");
ABSL_FLAG(std::string, layers, "",
          "Layer range BEGIN:END, half-open, for example 0:15. Empty = the whole model.");
ABSL_FLAG(std::string, batch_policy, "exact",
          "exact: a session's results never depend on others; shared: rows of all sessions are "
          "batched.");
ABSL_FLAG(uint32_t, max_sessions, 8, "Sessions that may be open at once.");
ABSL_FLAG(uint32_t, context_tokens, 4096, "Tokens that one session may hold.");
ABSL_FLAG(uint32_t, prefill_chunk_tokens, 256,
          "Rows of one prefill step. Part of the recipe: equal on all stages of a route.");
ABSL_FLAG(absl::Duration, idle_ttl, absl::Minutes(10),
          "A session without work for this long is evicted.");
ABSL_FLAG(absl::Duration, lru_min_idle, absl::Seconds(10),
          "When all slots are taken, a session idle for this long gives way to a new one.");

ABSL_FLAG(uint32_t, threads, 0, "Compute threads, 0 = one per hardware thread.");
ABSL_FLAG(uint32_t, poll, 0,
          "How long compute threads spin between steps before they sleep, 0-100. Spinning saves "
          "wake-ups where the cores are this worker's own.");
ABSL_FLAG(bool, pin_threads, true,
          "With a compute thread for every core, keep each thread to its core. Turn it off where "
          "something else keeps a core busy.");
ABSL_FLAG(std::string, kv_type, "f16", "Cache element type: f16, f32 or q8_0.");
ABSL_FLAG(std::string, cpu_variant, "", "ggml CPU variant; empty = the best that this CPU runs.");
ABSL_FLAG(
    std::string, device, "",
    "Device to compute on, of the lane that this worker was built for; empty = its first; cpu "
    "= none of them, with the recipe of the cpu lane.");
ABSL_FLAG(uint32_t, rollback_tokens, 64,
          "DeepSeek V4: how far back a session can go without a new prefill. Part of the recipe: "
          "equal on all stages of a route.");
ABSL_FLAG(std::string, mtp, "off",
          "Multi-token prediction: reserved, only off. Asking for anything else is refused.");
ABSL_FLAG(uint64_t, memory_budget, 0,
          "Refuse to load when weights, caches and compute buffers need more bytes. 0 = no bound.");

ABSL_FLAG(uint32_t, fake_layers, 8, "Fake engine: layers of the whole model.");
ABSL_FLAG(uint32_t, fake_width, 16, "Fake engine: floats per token at a seam.");
ABSL_FLAG(uint32_t, fake_vocabulary, 320, "Fake engine: vocabulary size, at least 260.");
ABSL_FLAG(std::string, fake_artifact, "fixture",
          "Fake engine: name of the pretended artifact; another name, another identity.");
ABSL_FLAG(absl::Duration, fake_delay, absl::ZeroDuration(),
          "Fake engine: every engine call takes this long.");
ABSL_FLAG(uint64_t, fake_memory_budget, 0,
          "Fake engine: bytes of cache for all sessions, 0 = all.");
ABSL_FLAG(std::string, fake_malformed, "none",
          "Fake engine: output that breaks the contract: none, nan, width or token.");
ABSL_FLAG(uint64_t, fake_malformed_from_step, 1, "Fake engine: first step with such an output.");
ABSL_FLAG(uint64_t, fake_crash_at_step, 0, "Fake engine: abort before this step, 0 = never.");
ABSL_FLAG(uint64_t, fake_fail_from_step, 0, "Fake engine: first step that fails, 0 = none.");
ABSL_FLAG(uint64_t, fake_fail_steps, 1, "Fake engine: how many steps fail.");
ABSL_FLAG(uint32_t, fake_eog_one_in, 0,
          "Fake engine: a greedy token is <eos> once in this many, 0 = never.");

namespace meshnet::worker {
namespace {

absl::Status Invalid(absl::string_view message) {
  return MakeError(v1::REASON_CONFIGURATION_INVALID, message);
}

absl::StatusOr<BatchPolicy> ParseBatchPolicy(absl::string_view text) {
  if (text == "exact") return BatchPolicy::kExact;
  if (text == "shared") return BatchPolicy::kShared;
  return Invalid(absl::StrCat("expected --batch_policy exact or shared, got '", text, "'"));
}

absl::StatusOr<LlamaEngineOptions::KvType> ParseKvType(absl::string_view text) {
  using KvType = LlamaEngineOptions::KvType;
  if (text == "f16") return KvType::kF16;
  if (text == "f32") return KvType::kF32;
  if (text == "q8_0") return KvType::kQ8_0;
  return Invalid(absl::StrCat("expected --kv_type f16, f32 or q8_0, got '", text, "'"));
}

absl::StatusOr<FakeEngineOptions::Malformed> ParseMalformed(absl::string_view text) {
  using Malformed = FakeEngineOptions::Malformed;
  if (text == "none") return Malformed::kNone;
  if (text == "nan") return Malformed::kNonFinite;
  if (text == "width") return Malformed::kWrongWidth;
  if (text == "token") return Malformed::kBadToken;
  return Invalid(
      absl::StrCat("expected --fake_malformed none, nan, width or token, got '", text, "'"));
}

absl::Status CheckMtp() {
  return absl::GetFlag(FLAGS_mtp) == "off" ? absl::OkStatus() : MtpUnsupported();
}

absl::StatusOr<FakeEngineOptions> FakeOptions() {
  FakeEngineOptions options;
  const auto range = ParseLayers(absl::GetFlag(FLAGS_layers));
  if (!range.ok()) return range.status();
  const auto policy = ParseBatchPolicy(absl::GetFlag(FLAGS_batch_policy));
  if (!policy.ok()) return policy.status();
  const auto malformed = ParseMalformed(absl::GetFlag(FLAGS_fake_malformed));
  if (!malformed.ok()) return malformed.status();
  options.layers = absl::GetFlag(FLAGS_fake_layers);
  options.range = *range;
  options.width = absl::GetFlag(FLAGS_fake_width);
  options.vocabulary_size = absl::GetFlag(FLAGS_fake_vocabulary);
  options.batch_policy = *policy;
  options.max_sessions = absl::GetFlag(FLAGS_max_sessions);
  options.context_tokens = absl::GetFlag(FLAGS_context_tokens);
  options.max_step_tokens = absl::GetFlag(FLAGS_prefill_chunk_tokens);
  options.idle_ttl = absl::GetFlag(FLAGS_idle_ttl);
  options.lru_min_idle = absl::GetFlag(FLAGS_lru_min_idle);
  options.artifact_name = absl::GetFlag(FLAGS_fake_artifact);
  options.delay = absl::GetFlag(FLAGS_fake_delay);
  options.memory_budget_bytes = absl::GetFlag(FLAGS_fake_memory_budget);
  options.malformed = *malformed;
  options.malformed_from_step = absl::GetFlag(FLAGS_fake_malformed_from_step);
  options.crash_at_step = absl::GetFlag(FLAGS_fake_crash_at_step);
  options.fail_from_step = absl::GetFlag(FLAGS_fake_fail_from_step);
  options.fail_steps = absl::GetFlag(FLAGS_fake_fail_steps);
  options.end_of_generation_one_in = absl::GetFlag(FLAGS_fake_eog_one_in);
  return options;
}

absl::StatusOr<LlamaEngineOptions> LlamaOptions() {
  LlamaEngineOptions options;
  const auto range = ParseLayers(absl::GetFlag(FLAGS_layers));
  if (!range.ok()) return range.status();
  const auto policy = ParseBatchPolicy(absl::GetFlag(FLAGS_batch_policy));
  if (!policy.ok()) return policy.status();
  const auto kv_type = ParseKvType(absl::GetFlag(FLAGS_kv_type));
  if (!kv_type.ok()) return kv_type.status();
  options.model_path = absl::GetFlag(FLAGS_model);
  options.manifest_path = absl::GetFlag(FLAGS_manifest);
  if (options.model_path.empty() && options.manifest_path.empty()) {
    return Invalid(
        "expected --model=FILE.gguf or --manifest=FILE.json, got none; or --engine=fake for a "
        "fixture");
  }
  options.poll = absl::GetFlag(FLAGS_poll);
  if (options.poll > 100) {
    return Invalid(absl::StrCat("expected --poll in [0, 100], got ", options.poll));
  }
  options.range = *range;
  options.batch_policy = *policy;
  options.kv_type = *kv_type;
  options.max_sessions = absl::GetFlag(FLAGS_max_sessions);
  options.context_tokens = absl::GetFlag(FLAGS_context_tokens);
  options.max_step_tokens = absl::GetFlag(FLAGS_prefill_chunk_tokens);
  options.threads = absl::GetFlag(FLAGS_threads);
  options.pin_threads = absl::GetFlag(FLAGS_pin_threads);
  options.cpu_variant = absl::GetFlag(FLAGS_cpu_variant);
  options.device = absl::GetFlag(FLAGS_device);
  options.rollback_tokens = absl::GetFlag(FLAGS_rollback_tokens);
  options.memory_budget_bytes = absl::GetFlag(FLAGS_memory_budget);
  options.idle_ttl = absl::GetFlag(FLAGS_idle_ttl);
  options.lru_min_idle = absl::GetFlag(FLAGS_lru_min_idle);
  return options;
}

// Warnings and errors of llama.cpp become log lines; the rest is its own affair.
LlamaLogSink SinkTo(const Logger* logger) {
  return [logger](LlamaLogLevel level, absl::string_view line) {
    if (level != LlamaLogLevel::kWarning && level != LlamaLogLevel::kError) return;
    logger->Log(level == LlamaLogLevel::kError ? Severity::kError : Severity::kWarning, "llama",
                {{"message", line}});
  };
}

}  // namespace

absl::StatusOr<LayerRange> ParseLayers(absl::string_view text) {
  LayerRange range;
  if (text.empty()) return range;
  const std::vector<absl::string_view> parts = absl::StrSplit(text, ':');
  if (parts.size() != 2 || !absl::SimpleAtoi(parts[0], &range.begin) ||
      !absl::SimpleAtoi(parts[1], &range.end) || range.begin >= range.end) {
    return Invalid(absl::StrCat("expected --layers=BEGIN:END with BEGIN < END, got '", text, "'"));
  }
  return range;
}

absl::Status CheckEngineFlags() {
  if (absl::Status status = CheckMtp(); !status.ok()) return status;
  const std::string engine = absl::GetFlag(FLAGS_engine);
  if (engine == "fake") return FakeOptions().status();
  if (engine == "llama") return LlamaOptions().status();
  return Invalid(absl::StrCat("expected --engine llama or fake, got '", engine, "'"));
}

absl::StatusOr<std::unique_ptr<ShardEngine>> MakeEngineFromFlags(const Logger* logger) {
  if (absl::GetFlag(FLAGS_engine) == "fake") {
    const auto options = FakeOptions();
    if (!options.ok()) return options.status();
    return MakeFakeEngine(*options);
  }
  auto options = LlamaOptions();
  if (!options.ok()) return options.status();
  options->log = SinkTo(logger);
  return LoadLlamaEngine(*options);
}

}  // namespace meshnet::worker
