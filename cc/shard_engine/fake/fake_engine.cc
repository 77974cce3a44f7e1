#include "cc/shard_engine/fake/fake_engine.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "cc/common/status.h"
#include "cc/shard_engine/fake/fake_tokenizer.h"
#include "cc/shard_engine/grammar/grammar.h"
#include "cc/shard_engine/sampler.h"
#include "cc/shard_engine/session_table.h"
#include "cc/shard_engine/step_check.h"

namespace meshnet {
namespace {

using Malformed = FakeEngineOptions::Malformed;

constexpr uint64_t kEmbeddingSalt = 0x656d62;
constexpr uint64_t kLayerSalt = 0x6c61796572;
constexpr uint64_t kHeadSalt = 0x68656164;

uint64_t Mix(uint64_t a, uint64_t b) {
  uint64_t value = a * 0x9e3779b97f4a7c15ull + b + 0x632be59bd9b4e019ull;
  value = (value ^ (value >> 31)) * 0xbf58476d1ce4e5b9ull;
  value = (value ^ (value >> 29)) * 0x94d049bb133111ebull;
  return value ^ (value >> 32);
}

// In [-1, 1), exact in binary: the same on every machine.
float UnitFloat(uint64_t hash) {
  return static_cast<float>(static_cast<int32_t>(hash >> 40) - (1 << 23)) * 0x1.0p-23f;
}

uint64_t HashRow(uint64_t seed, absl::Span<const float> row) {
  for (const float value : row) {
    uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof(bits));
    seed = Mix(seed, bits);
  }
  return seed;
}

void FillRow(uint64_t seed, absl::Span<float> row) {
  for (size_t i = 0; i < row.size(); ++i) row[i] = UnitFloat(Mix(seed, i));
}

// One slot's state. chain[l][p] is the state of owned layer l after position p.
struct SlotState {
  std::vector<std::vector<uint64_t>> chain;
  std::vector<int32_t> tokens;
  Sampler sampler;

  void Truncate(uint32_t position) {
    for (auto& layer : chain) layer.resize(std::min<size_t>(layer.size(), position));
    tokens.resize(std::min<size_t>(tokens.size(), position));
  }
};

class FakeEngine : public ShardEngine {
 public:
  FakeEngine(const FakeEngineOptions& options, LayerRange range)
      : options_(options),
        tokenizer_(options.vocabulary_size),
        grammar_vocabulary_(std::make_shared<const GrammarVocabulary>(tokenizer_)),
        capability_(MakeCapability(options, range)),
        bytes_per_token_(uint64_t{range.end - range.begin} * options.width * sizeof(float)),
        slots_(options.max_sessions),
        table_(TableOptions()) {
    for (SlotState& slot : slots_) slot.chain.resize(range.end - range.begin);
  }

  const Capability& capability() const override { return capability_; }
  const Tokenizer& tokenizer() const override { return tokenizer_; }

  MemoryEstimate EstimateMemory() const override {
    MemoryEstimate estimate;
    estimate.weights = capability_.owned_tensor_bytes;
    estimate.kv_per_session = bytes_per_token_ * options_.context_tokens;
    estimate.compute = uint64_t{options_.max_step_tokens} *
                       std::max(options_.width, options_.vocabulary_size) * sizeof(float);
    return estimate;
  }

  // There is nothing to warm, and a step takes what the options say.
  absl::Status WarmUp() override {
    {
      absl::MutexLock lock(&metrics_mu_);
      metrics_.warm_up_step = std::max(options_.delay, absl::Microseconds(1));
    }
    return options_.warm_up ? options_.warm_up() : absl::OkStatus();
  }

  absl::Status OpenSession(const SessionKey& key, const SessionOptions& options,
                           std::vector<SessionKey>* evicted) override {
    const auto session = table_.Open(key, options, evicted);
    return session.status();
  }

  absl::Status Execute(absl::Span<const Step> batch, std::vector<StepOutput>* outputs) override;

  absl::Status Truncate(const SessionKey& key, uint32_t position) override {
    const auto session = table_.Use(key);
    if (!session.ok()) return session.status();
    if (position > (*session)->cached_tokens) {
      return MakeError(v1::REASON_CACHE_MISS,
                       absl::StrCat("cannot truncate to position ", position,
                                    ": the session holds ", (*session)->cached_tokens, " tokens"));
    }
    slots_[(*session)->slot].Truncate(position);
    return table_.SetCached(*session, position);
  }

  absl::Status Release(const SessionKey& key) override { return table_.Release(key); }
  std::vector<SessionKey> EvictIdle() override { return table_.EvictIdle(); }

  void Cancel(const SessionKey& key) override {
    table_.Cancel(key);
    absl::MutexLock lock(&delay_mu_);
    delay_changed_.SignalAll();
  }

  absl::Status health() const override { return absl::OkStatus(); }

  EngineMetrics metrics() const override {
    absl::MutexLock lock(&metrics_mu_);
    EngineMetrics metrics = metrics_;
    metrics.kv_bytes = table_.held_bytes();
    metrics.kv_budget_bytes = options_.memory_budget_bytes > 0
                                  ? options_.memory_budget_bytes
                                  : bytes_per_token_ * options_.context_tokens * slots_.size();
    metrics.open_sessions = table_.open_sessions();
    metrics.sessions_evicted = table_.evictions();
    return metrics;
  }

 private:
  static Capability MakeCapability(const FakeEngineOptions& options, LayerRange range) {
    Capability c;
    c.engine = "fake";
    c.architecture = "fake";
    // Hex digits of a 64-bit hash, four times over: an identity, not a digest of anything.
    uint64_t name_hash = 0;
    for (const char letter : options.artifact_name) {
      name_hash = Mix(name_hash, static_cast<unsigned char>(letter));
    }
    for (uint64_t i = 0; i < 4; ++i) {
      absl::StrAppendFormat(&c.artifact_sha256, "%016x", Mix(name_hash, i));
    }
    c.range = range;
    c.model_layers = options.layers;
    if (!c.is_head()) c.boundary_in = DenseResidualSchema(options.width);
    if (!c.is_tail()) c.boundary_out = DenseResidualSchema(options.width);
    c.max_sessions = options.max_sessions;
    c.context_tokens = options.context_tokens;
    c.max_step_tokens = options.max_step_tokens;
    c.batch_policy = options.batch_policy;
    c.evidence = Evidence::kFixture;
    c.vocabulary_size = options.vocabulary_size;
    const uint64_t row_bytes = uint64_t{options.width} * sizeof(float);
    c.owned_tensors = range.end - range.begin + (c.is_head() ? 1 : 0) + (c.is_tail() ? 1 : 0);
    c.owned_tensor_bytes = (range.end - range.begin) * row_bytes;
    if (c.is_head()) c.owned_tensor_bytes += options.vocabulary_size * row_bytes;
    if (c.is_tail()) c.owned_tensor_bytes += options.vocabulary_size * row_bytes;
    c.recipe = {
        {"adapter", "fake/1"},
        {"artifact_sha256", c.artifact_sha256},
        {"backend", "fake"},
        {"batch_policy", options.batch_policy == BatchPolicy::kExact ? "exact" : "shared"},
        {"boundary_schema", "dense.residual/1"},
        {"layers", absl::StrCat(options.layers)},
        {"max_step_tokens", absl::StrCat(options.max_step_tokens)},
        {"vocabulary_size", absl::StrCat(options.vocabulary_size)},
        {"width", absl::StrCat(options.width)},
    };
    if (!options.recipe.empty()) c.recipe = options.recipe;
    c.recipe_fingerprint = RecipeFingerprint(c.recipe);
    return c;
  }

  SessionTable::Options TableOptions() {
    SessionTable::Options table;
    table.slots = options_.max_sessions;
    table.idle_ttl = options_.idle_ttl;
    table.lru_min_idle = options_.lru_min_idle;
    table.bytes = [bytes = bytes_per_token_](uint32_t tokens) { return bytes * tokens; };
    table.budget_bytes = options_.memory_budget_bytes;
    table.now = options_.now;
    table.on_free = [this](uint32_t slot) {
      slots_[slot].Truncate(0);
      slots_[slot].sampler = Sampler();
    };
    return table;
  }

  absl::StatusOr<SessionTable::Session*> Admit(const Step& step);
  // True when every session of `running` was cancelled before the delay was over.
  void Delay(absl::Span<SessionTable::Session* const> running);
  void Run(const Step& step, SessionTable::Session* session, StepOutput* output);
  void Forward(const Step& step, SlotState* slot, std::vector<float>* residual) const;
  absl::Status Tail(const Step& step, SlotState* slot, absl::Span<const float> residual,
                    StepOutput* output);
  std::vector<float> Logits(absl::Span<const float> row) const;
  void Corrupt(StepOutput* output) const;

  const FakeEngineOptions options_;
  const FakeTokenizer tokenizer_;
  const std::shared_ptr<const GrammarVocabulary> grammar_vocabulary_;
  const Capability capability_;
  const uint64_t bytes_per_token_;
  std::vector<SlotState> slots_;
  SessionTable table_;
  uint64_t steps_ = 0;

  absl::Mutex delay_mu_;
  absl::CondVar delay_changed_;
  mutable absl::Mutex metrics_mu_;
  EngineMetrics metrics_ ABSL_GUARDED_BY(metrics_mu_);
};

absl::StatusOr<SessionTable::Session*> FakeEngine::Admit(const Step& step) {
  auto session = table_.Use(step.session);
  if (!session.ok()) return session;
  absl::Status status = CheckStep(step, capability_);
  if (status.ok()) status = CheckPosition(step, capability_, (*session)->cached_tokens);
  if (status.ok() && (*session)->cancelled) {
    status = MakeError(v1::REASON_CANCELLED, "the session was cancelled; release it");
  }
  if (!status.ok()) return status;
  return session;
}

absl::Status FakeEngine::Execute(absl::Span<const Step> batch, std::vector<StepOutput>* outputs) {
  outputs->clear();
  outputs->resize(batch.size());
  const absl::Status batch_status = CheckBatch(batch);
  if (!batch_status.ok()) return batch_status;
  const absl::Time begin = absl::Now();
  std::vector<SessionTable::Session*> sessions(batch.size(), nullptr);
  std::vector<SessionTable::Session*> running;
  for (size_t i = 0; i < batch.size(); ++i) {
    const auto session = Admit(batch[i]);
    (*outputs)[i].status = session.status();
    if (!session.ok()) continue;
    sessions[i] = *session;
    sessions[i]->pinned = true;
    running.push_back(*session);
  }
  if (!running.empty()) {
    if (options_.before_batch) options_.before_batch();
    Delay(running);
  }
  for (size_t i = 0; i < batch.size(); ++i) {
    if (sessions[i] != nullptr) Run(batch[i], sessions[i], &(*outputs)[i]);
  }
  for (SessionTable::Session* session : running) session->pinned = false;

  const absl::Duration took = absl::Now() - begin;
  absl::MutexLock lock(&metrics_mu_);
  ++metrics_.engine_calls;
  for (size_t i = 0; i < batch.size(); ++i) {
    StepOutput& output = (*outputs)[i];
    output.engine_time = took;
    if (!output.status.ok()) continue;
    const bool decode = batch[i].phase == Phase::kDecode;
    (decode ? metrics_.decode_tokens : metrics_.prefill_tokens) += batch[i].token_ids.size();
    (decode ? metrics_.decode_time : metrics_.prefill_time) += took / running.size();
  }
  return absl::OkStatus();
}

void FakeEngine::Delay(absl::Span<SessionTable::Session* const> running) {
  if (options_.delay <= absl::ZeroDuration()) return;
  const absl::Time until = absl::Now() + options_.delay;
  const auto all_cancelled = [&] {
    return std::all_of(running.begin(), running.end(),
                       [](const SessionTable::Session* s) { return s->cancelled.load(); });
  };
  absl::MutexLock lock(&delay_mu_);
  while (!all_cancelled() && !delay_changed_.WaitWithDeadline(&delay_mu_, until)) {
  }
}

void FakeEngine::Run(const Step& step, SessionTable::Session* session, StepOutput* output) {
  SlotState& slot = slots_[session->slot];
  const auto end = static_cast<uint32_t>(step.start_position + step.token_ids.size());
  ++steps_;
  if (steps_ == options_.crash_at_step) std::abort();
  slot.Truncate(step.start_position);
  absl::Status status = table_.SetCached(session, step.start_position);
  if (session->cancelled) {
    status = MakeError(v1::REASON_CANCELLED, "the session was cancelled while its step ran");
  } else if (options_.fail_from_step != 0 && steps_ >= options_.fail_from_step &&
             steps_ - options_.fail_from_step < options_.fail_steps) {
    status =
        MakeError(v1::REASON_ENGINE_FAILURE, absl::StrCat("injected failure at step ", steps_));
  } else {
    status.Update(table_.SetCached(session, end));
  }
  if (status.ok()) {
    std::vector<float> residual(step.residual.begin(), step.residual.end());
    Forward(step, &slot, &residual);
    if (capability_.is_tail()) {
      status = Tail(step, &slot, residual, output);
    } else {
      output->residual = std::move(residual);
    }
    Corrupt(output);
  }
  if (!status.ok()) {
    // Shrinking needs no memory and cannot fail.
    slot.Truncate(step.start_position);
    table_.SetCached(session, step.start_position).IgnoreError();
    output->residual.clear();
    output->logits.clear();
  }
  output->status = status;
  output->cached_tokens = session->cached_tokens;
}

void FakeEngine::Forward(const Step& step, SlotState* slot, std::vector<float>* residual) const {
  const uint32_t width = options_.width;
  if (capability_.is_head()) residual->resize(step.token_ids.size() * width);
  for (size_t i = 0; i < step.token_ids.size(); ++i) {
    const absl::Span<float> row(residual->data() + i * width, width);
    const auto token = static_cast<uint64_t>(step.token_ids[i]);
    const uint64_t position = step.start_position + i;
    if (capability_.is_head()) FillRow(Mix(kEmbeddingSalt, token), row);
    for (size_t l = 0; l < slot->chain.size(); ++l) {
      std::vector<uint64_t>& chain = slot->chain[l];
      uint64_t state = Mix(kLayerSalt, capability_.range.begin + l);
      if (!chain.empty()) state = Mix(state, chain.back());
      state = HashRow(Mix(Mix(state, token), position), row);
      chain.push_back(state);
      FillRow(state, row);
    }
    slot->tokens.push_back(step.token_ids[i]);
  }
}

std::vector<float> FakeEngine::Logits(absl::Span<const float> row) const {
  const uint64_t hash = HashRow(kHeadSalt, row);
  std::vector<float> logits(options_.vocabulary_size);
  for (size_t id = 0; id < logits.size(); ++id) {
    // Greedy text is printable ASCII; other ids appear when sampling is warm enough.
    const bool printable = id >= 0x20 && id < 0x7f;
    logits[id] = 4.0f * (UnitFloat(Mix(hash, id)) + (printable ? 1.0f : -1.0f));
  }
  if (options_.end_of_generation_one_in > 0 && hash % options_.end_of_generation_one_in == 0) {
    logits[FakeTokenizer::kEos] = 16.0f;
  }
  return logits;
}

absl::Status FakeEngine::Tail(const Step& step, SlotState* slot, absl::Span<const float> residual,
                              StepOutput* output) {
  if (step.sampling.has_value()) {
    auto constraint = MakeGrammarConstraint(*step.sampling, grammar_vocabulary_);
    if (!constraint.ok()) return constraint.status();
    slot->sampler = Sampler(*step.sampling, *std::move(constraint));
  }
  const uint32_t width = options_.width;
  if (step.output_rows == OutputRows::kAllLogits) {
    for (size_t i = 0; i < step.token_ids.size(); ++i) {
      const std::vector<float> logits = Logits(residual.subspan(i * width, width));
      output->logits.insert(output->logits.end(), logits.begin(), logits.end());
    }
  }
  if (step.output_rows != OutputRows::kLast && !step.return_logits) return absl::OkStatus();
  std::vector<float> logits = Logits(residual.last(width));
  if (step.output_rows == OutputRows::kLast) {
    absl::StatusOr<SampledToken> token = slot->sampler.Sample(logits, slot->tokens);
    if (!token.ok()) return token.status();
    output->token = *std::move(token);
    output->token->end_of_generation = output->token->token_id == FakeTokenizer::kEos;
  }
  if (step.return_logits && output->logits.empty()) output->logits = std::move(logits);
  return absl::OkStatus();
}

void FakeEngine::Corrupt(StepOutput* output) const {
  if (options_.malformed == Malformed::kNone || steps_ < options_.malformed_from_step) return;
  switch (options_.malformed) {
    case Malformed::kNone:
      break;
    case Malformed::kNonFinite:
      if (!output->residual.empty()) {
        output->residual.back() = std::numeric_limits<float>::quiet_NaN();
      }
      if (!output->logits.empty()) output->logits.back() = std::numeric_limits<float>::quiet_NaN();
      break;
    case Malformed::kWrongWidth:
      if (!output->residual.empty()) output->residual.pop_back();
      if (!output->logits.empty()) output->logits.pop_back();
      break;
    case Malformed::kBadToken:
      if (output->token.has_value()) {
        output->token->token_id = static_cast<int32_t>(options_.vocabulary_size);
      }
      break;
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<ShardEngine>> MakeFakeEngine(const FakeEngineOptions& options) {
  LayerRange range = options.range;
  if (range.end == 0) range.end = options.layers;
  if (range.begin >= range.end || range.end > options.layers) {
    return MakeError(v1::REASON_LAYER_RANGE_INVALID,
                     absl::StrCat("expected 0 <= begin < end <= ", options.layers, ", got [",
                                  range.begin, ", ", range.end, ")"));
  }
  if (options.width == 0 || options.vocabulary_size < FakeTokenizer::kMinVocabulary ||
      options.max_sessions == 0 || options.context_tokens == 0 || options.max_step_tokens == 0) {
    return MakeError(v1::REASON_CONFIGURATION_INVALID,
                     absl::StrCat("expected width, max_sessions, context_tokens and "
                                  "max_step_tokens >= 1 and vocabulary_size >= ",
                                  FakeTokenizer::kMinVocabulary));
  }
  return std::make_unique<FakeEngine>(options, range);
}

}  // namespace meshnet
