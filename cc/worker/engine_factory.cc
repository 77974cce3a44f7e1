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

ABSL_FLAG(std::string, engine, "llama", "llama, or fake for a fixture without a model.");
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

absl::StatusOr<FakeEngineOptions::Malformed> ParseMalformed(absl::string_view text) {
  using Malformed = FakeEngineOptions::Malformed;
  if (text == "none") return Malformed::kNone;
  if (text == "nan") return Malformed::kNonFinite;
  if (text == "width") return Malformed::kWrongWidth;
  if (text == "token") return Malformed::kBadToken;
  return Invalid(
      absl::StrCat("expected --fake_malformed none, nan, width or token, got '", text, "'"));
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
  const std::string engine = absl::GetFlag(FLAGS_engine);
  if (engine == "fake") return FakeOptions().status();
  return Invalid(absl::StrCat("expected --engine llama or fake, got '", engine, "'"));
}

absl::StatusOr<std::unique_ptr<ShardEngine>> MakeEngineFromFlags(const Logger*) {
  const auto options = FakeOptions();
  if (!options.ok()) return options.status();
  return MakeFakeEngine(*options);
}

}  // namespace meshnet::worker
