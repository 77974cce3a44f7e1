#include "cc/shard_engine/llama/llama_engine.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <new>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "cc/common/cpu_baseline/cpu_baseline.h"
#include "cc/common/status.h"
#include "cc/common/system/memory.h"
#include "cc/common/system/threads.h"
#include "cc/shard_engine/grammar/grammar.h"
#include "cc/shard_engine/llama/artifact.h"
#include "cc/shard_engine/llama/llama_tokenizer.h"
#include "cc/shard_engine/llama/manifest.h"
#include "cc/shard_engine/llama/state_size.h"
#include "cc/shard_engine/sampler.h"
#include "cc/shard_engine/session_table.h"
#include "cc/shard_engine/step_check.h"
#include "ggml-backend.h"
#include "llama-ext.h"
#include "llama.h"
#include "llama_cpp_build_options.h"
#include "llama_cpp_identity.h"
#include "third_party/llama_cpp/accelerator.h"
#include "third_party/llama_cpp/cpu_backend.h"

// Of llama.cpp's src/llama-model.h, where its own tools look at what is loaded.
const std::vector<std::pair<std::string, ggml_tensor*>>& llama_internal_get_tensor_map(
    const llama_model* model);

namespace meshnet {
namespace {

constexpr absl::string_view kDeepSeek4 = "deepseek4";
constexpr uint32_t kMaxSlots = 256;
constexpr uint32_t kMaxRollback = 4096;
constexpr uint32_t kContextMultiple = 256;
// llama.cpp's fixed parts outside its buffers: graph and scheduler metadata, the batch, thread
// stacks.
constexpr uint64_t kFixedBytes = 24u << 20;
// Strings, hash tables and merges of a vocabulary, per token.
constexpr uint64_t kVocabularyBytesPerToken = 320;

struct ModelDeleter {
  void operator()(llama_model* model) const { llama_model_free(model); }
};
struct ContextDeleter {
  void operator()(llama_context* context) const { llama_free(context); }
};
using ModelPtr = std::unique_ptr<llama_model, ModelDeleter>;
using ContextPtr = std::unique_ptr<llama_context, ContextDeleter>;

// ggml's thread pool, through the CPU variant that runs. With `pin`, and as many threads as there
// are CPUs, each thread keeps to one of them: woken for a step, all threads would else often begin
// on the same CPU and wait for each other there until the kernel moves one.
class ThreadPool {
 public:
  ThreadPool(uint32_t threads, uint32_t poll, bool pin) {
    ggml_backend_reg_t reg =
        ggml_backend_dev_backend_reg(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU));
    const auto create = reinterpret_cast<decltype(&ggml_threadpool_new)>(
        ggml_backend_reg_get_proc_address(reg, "ggml_threadpool_new"));
    free_ = reinterpret_cast<decltype(&ggml_threadpool_free)>(
        ggml_backend_reg_get_proc_address(reg, "ggml_threadpool_free"));
    ggml_threadpool_params params = ggml_threadpool_params_default(static_cast<int>(threads));
    params.poll = poll;
    // Keeps ggml from placing the thread that loads.
    params.paused = true;
    const std::vector<int> cpus = AllowedCpus();
    if (pin && threads > 1 && cpus.size() == threads && cpus.back() < GGML_MAX_N_THREADS) {
      params.strict_cpu = true;
      allowed_ = cpus;
      // ggml deals them out in ascending order, its caller comes last.
      for (const int cpu : cpus) params.cpumask[cpu] = true;
      caller_cpu_ = cpus.back();
    }
    pool_ = create(&params);
  }
  ~ThreadPool() {
    if (pool_ != nullptr) free_(pool_);
  }
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  ggml_threadpool_t get() const { return pool_; }

  // The thread that computes a graph is the pool's first; to be called on it before.
  void PlaceCaller() {
    if (caller_cpu_ < 0 || caller_ == std::this_thread::get_id()) return;
    caller_ = std::this_thread::get_id();
    KeepToCpus({caller_cpu_});
  }

  // Undoes PlaceCaller on a thread that goes on to other things than steps.
  void FreeCaller() {
    if (caller_cpu_ < 0 || caller_ != std::this_thread::get_id()) return;
    caller_ = std::thread::id();
    KeepToCpus(allowed_);
  }

 private:
  // -1: threads go where the kernel puts them.
  int caller_cpu_ = -1;
  std::vector<int> allowed_;
  std::thread::id caller_;
  decltype(&ggml_threadpool_free) free_ = nullptr;
  ggml_threadpool_t pool_ = nullptr;
};

// One llama_batch worth of arrays, made once.
class Rows {
 public:
  explicit Rows(uint32_t capacity)
      : tokens_(capacity),
        positions_(capacity),
        counts_(capacity, 1),
        slots_(capacity),
        slot_pointers_(capacity),
        outputs_(capacity) {
    for (uint32_t i = 0; i < capacity; ++i) slot_pointers_[i] = &slots_[i];
  }

  void Clear() {
    size_ = 0;
    flagged_ = 0;
  }

  void Add(int32_t token, uint32_t position, uint32_t slot, bool output) {
    tokens_[size_] = token;
    positions_[size_] = static_cast<llama_pos>(position);
    slots_[size_] = static_cast<llama_seq_id>(slot);
    outputs_[size_] = output ? 1 : 0;
    flagged_ += output ? 1 : 0;
    ++size_;
  }

  uint32_t size() const { return size_; }
  uint32_t flagged() const { return flagged_; }

  // `residual` may be null at a head. llama.cpp only reads what the batch points to.
  llama_batch Batch(const float* residual, bool tail) {
    llama_batch batch = {};
    batch.n_tokens = static_cast<int32_t>(size_);
    batch.token = tokens_.data();
    batch.embd = const_cast<float*>(residual);
    batch.pos = positions_.data();
    batch.n_seq_id = counts_.data();
    batch.seq_id = slot_pointers_.data();
    batch.logits = tail ? outputs_.data() : nullptr;
    return batch;
  }

 private:
  uint32_t size_ = 0;
  uint32_t flagged_ = 0;
  std::vector<llama_token> tokens_;
  std::vector<llama_pos> positions_;
  std::vector<int32_t> counts_;
  std::vector<llama_seq_id> slots_;
  std::vector<llama_seq_id*> slot_pointers_;
  std::vector<int8_t> outputs_;
};

// What the engine keeps per slot beside llama.cpp's cells.
struct SlotState {
  // Of the cached positions: the penalties' window.
  std::vector<int32_t> tokens;
  Sampler sampler;
  // The end of everything that was written since the slot was last empty, cut off or not.
  uint32_t written = 0;
};

// Everything that LoadLlamaEngine found and made before there is an engine.
struct Loaded {
  LlamaEngineOptions options;
  ModelPtr model;
  // Outlives the context that it is attached to.
  std::unique_ptr<ThreadPool> threads;
  ContextPtr context;
  Capability capability;
  MemoryEstimate memory;
  StateSize state_size;
  uint32_t batch_rows = 0;
  uint32_t batch_outputs = 0;
};

class LlamaEngine : public ShardEngine {
 public:
  explicit LlamaEngine(Loaded loaded)
      : options_(std::move(loaded.options)),
        model_(std::move(loaded.model)),
        threads_(std::move(loaded.threads)),
        context_(std::move(loaded.context)),
        capability_(std::move(loaded.capability)),
        memory_(loaded.memory),
        state_size_(std::move(loaded.state_size)),
        batch_outputs_(loaded.batch_outputs),
        width_in_(llama_model_boundary_n_embd_in(model_.get())),
        width_out_(llama_model_boundary_n_embd_out(model_.get())),
        bounded_rollback_(capability_.architecture == kDeepSeek4),
        tokenizer_(model_.get()),
        rows_(loaded.batch_rows),
        batch_rows_(loaded.batch_rows),
        slots_(options_.max_sessions),
        table_(TableOptions()) {
    for (SlotState& slot : slots_) slot.tokens.reserve(options_.context_tokens);
    llama_set_abort_callback(context_.get(), &LlamaEngine::ShouldAbort, this);
  }

  const Capability& capability() const override { return capability_; }
  const Tokenizer& tokenizer() const override { return tokenizer_; }
  MemoryEstimate EstimateMemory() const override { return memory_; }

  absl::Status WarmUp() override;

  absl::Status OpenSession(const SessionKey& key, const SessionOptions& options,
                           std::vector<SessionKey>* evicted) override {
    const absl::Status usable = health();
    if (!usable.ok()) return usable;
    return table_.Open(key, options, evicted).status();
  }

  absl::Status Execute(absl::Span<const Step> batch, std::vector<StepOutput>* outputs) override;
  absl::Status Truncate(const SessionKey& key, uint32_t position) override;
  absl::Status Release(const SessionKey& key) override { return table_.Release(key); }
  std::vector<SessionKey> EvictIdle() override { return table_.EvictIdle(); }
  void Cancel(const SessionKey& key) override { table_.Cancel(key); }

  absl::Status health() const override {
    absl::MutexLock lock(&mu_);
    return health_;
  }

  EngineMetrics metrics() const override {
    EngineMetrics metrics;
    {
      absl::MutexLock lock(&mu_);
      metrics = metrics_;
    }
    metrics.kv_bytes = table_.held_bytes();
    metrics.kv_budget_bytes = memory_.kv_per_session * options_.max_sessions;
    metrics.open_sessions = table_.open_sessions();
    metrics.sessions_evicted = table_.evictions();
    return metrics;
  }

 private:
  // A step that runs: the request, its session and where its answer goes.
  struct Running {
    const Step* step = nullptr;
    SessionTable::Session* session = nullptr;
    StepOutput* output = nullptr;
    uint32_t first_row = 0;
  };
  using Group = std::vector<Running>;

  SessionTable::Options TableOptions();
  absl::Status Admit(const Step& step, SessionTable::Session** session);
  uint32_t OutputsOf(const Step& step) const;
  // Cuts the admitted steps into llama_decode calls as the batch policy says; may reorder them.
  std::vector<Group> Plan(Group* running) const;
  void RunGroup(Group* group);
  absl::Status Decode(Group* group);
  absl::Status DecodeRows(const float* residual);
  void Finish(Running* running);
  absl::Status Answer(const Running& running);
  absl::StatusOr<std::unique_ptr<TokenConstraint>> MakeConstraint(const SamplingParams& params);
  // Logits of a row of the last decode; ENGINE_OUTPUT_INVALID when they are not numbers.
  absl::StatusOr<absl::Span<const float>> LogitsOf(uint32_t row) const;
  // CACHE_MISS when the state of `slot` cannot go back to `position`.
  absl::Status CheckRollback(uint32_t slot, uint32_t position) const;
  // Makes the session hold `position` tokens, never more than it has.
  void Shrink(SessionTable::Session* session, uint32_t position);
  // Removes what a failed step left behind: the session holds what it held before, or nothing where
  // its state cannot go back that far.
  void Undo(const Running& running);
  bool ClearCells(uint32_t slot, uint32_t position);
  void Fail(absl::string_view what);

  static bool ShouldAbort(void* self);

  const LlamaEngineOptions options_;
  const ModelPtr model_;
  const std::unique_ptr<ThreadPool> threads_;
  const ContextPtr context_;
  const Capability capability_;
  const MemoryEstimate memory_;
  const StateSize state_size_;
  const uint32_t batch_outputs_;
  const uint32_t width_in_;
  const uint32_t width_out_;
  // Only the last so many positions can be cut off.
  const bool bounded_rollback_;
  const LlamaTokenizer tokenizer_;
  // Made when the first grammar comes.
  std::shared_ptr<const GrammarVocabulary> grammar_vocabulary_;
  Rows rows_;
  const uint32_t batch_rows_;
  // Residual rows of several steps, one after the other.
  std::vector<float> gathered_;
  std::vector<SlotState> slots_;
  SessionTable table_;
  // The group that runs, for the abort callback; only the engine thread changes it, and ggml calls
  // back on that thread.
  const Group* decoding_ = nullptr;

  mutable absl::Mutex mu_;
  absl::Status health_ ABSL_GUARDED_BY(mu_);
  EngineMetrics metrics_ ABSL_GUARDED_BY(mu_);
};

SessionTable::Options LlamaEngine::TableOptions() {
  SessionTable::Options table;
  table.slots = options_.max_sessions;
  table.idle_ttl = options_.idle_ttl;
  table.lru_min_idle = options_.lru_min_idle;
  table.bytes = [this](uint32_t tokens) { return state_size_.Bytes(tokens); };
  table.now = options_.now;
  table.on_free = [this](uint32_t slot) {
    ClearCells(slot, 0);
    slots_[slot].tokens.clear();
    slots_[slot].sampler = Sampler();
  };
  return table;
}

absl::Status LlamaEngine::Admit(const Step& step, SessionTable::Session** session) {
  const auto found = table_.Use(step.session);
  if (!found.ok()) return found.status();
  *session = *found;
  absl::Status status = CheckStep(step, capability_);
  if (!status.ok()) return status;
  status = CheckPosition(step, capability_, (*session)->cached_tokens);
  if (!status.ok()) return status;
  if (step.start_position < (*session)->cached_tokens) {
    status = CheckRollback((*session)->slot, step.start_position);
    if (!status.ok()) return status;
  }
  if (OutputsOf(step) > batch_outputs_) {
    return MakeError(v1::REASON_FEATURE_UNSUPPORTED,
                     absl::StrCat("logits of ", OutputsOf(step),
                                  " rows asked for, this engine was "
                                  "loaded for ",
                                  batch_outputs_, "; load it with max_logit_rows"));
  }
  if ((*session)->cancelled) {
    return MakeError(v1::REASON_CANCELLED, "the session was cancelled; release it");
  }
  return absl::OkStatus();
}

uint32_t LlamaEngine::OutputsOf(const Step& step) const {
  if (step.output_rows == OutputRows::kAllLogits) {
    return static_cast<uint32_t>(step.token_ids.size());
  }
  return step.output_rows == OutputRows::kLast || step.return_logits ? 1 : 0;
}

std::vector<LlamaEngine::Group> LlamaEngine::Plan(Group* running) const {
  std::vector<Group> groups;
  if (options_.batch_policy == BatchPolicy::kShared) {
    // llama.cpp computes the same number of rows of every sequence at once, and wants ascending
    // sequences.
    std::sort(running->begin(), running->end(), [](const Running& a, const Running& b) {
      const size_t rows_a = a.step->token_ids.size();
      const size_t rows_b = b.step->token_ids.size();
      return rows_a != rows_b ? rows_a < rows_b : a.session->slot < b.session->slot;
    });
  }
  uint32_t rows = 0;
  uint32_t outputs = 0;
  for (const Running& next : *running) {
    const auto more_rows = static_cast<uint32_t>(next.step->token_ids.size());
    const uint32_t more_outputs = OutputsOf(*next.step);
    const bool fits = !groups.empty() && options_.batch_policy == BatchPolicy::kShared &&
                      groups.back().back().step->token_ids.size() == more_rows &&
                      rows + more_rows <= batch_rows_ && outputs + more_outputs <= batch_outputs_;
    if (!fits) {
      groups.emplace_back();
      rows = 0;
      outputs = 0;
    }
    groups.back().push_back(next);
    rows += more_rows;
    outputs += more_outputs;
  }
  return groups;
}

absl::Status LlamaEngine::Execute(absl::Span<const Step> batch, std::vector<StepOutput>* outputs) {
  outputs->clear();
  outputs->resize(batch.size());
  absl::Status usable = health();
  if (usable.ok()) usable = CheckBatch(batch);
  if (!usable.ok()) return usable;
  Group running;
  for (size_t i = 0; i < batch.size(); ++i) {
    SessionTable::Session* session = nullptr;
    StepOutput& output = (*outputs)[i];
    output.status = Admit(batch[i], &session);
    if (session != nullptr) output.cached_tokens = session->cached_tokens;
    if (!output.status.ok()) continue;
    session->pinned = true;
    running.push_back({&batch[i], session, &output, 0});
  }
  if (running.empty()) return absl::OkStatus();
  if (options_.before_batch) options_.before_batch();
  std::vector<Group> groups = Plan(&running);
  for (Group& group : groups) RunGroup(&group);
  for (const Running& step : running) step.session->pinned = false;
  return absl::OkStatus();
}

void LlamaEngine::RunGroup(Group* group) {
  const absl::Time begin = absl::Now();
  absl::Status status = Decode(group);
  if (!status.ok() && group->size() > 1 && health().ok()) {
    // Whatever one step did to the call is no other step's fault.
    for (const Running& step : *group) Undo(step);
    for (const Running& step : *group) {
      Group alone = {step};
      RunGroup(&alone);
    }
    return;
  }
  for (Running& step : *group) {
    step.output->status = status;
    Finish(&step);
  }
  const absl::Duration took = absl::Now() - begin;
  absl::MutexLock lock(&mu_);
  ++metrics_.engine_calls;
  for (const Running& step : *group) {
    step.output->engine_time = took;
    if (!step.output->status.ok()) continue;
    const bool decode = step.step->phase == Phase::kDecode;
    (decode ? metrics_.decode_tokens : metrics_.prefill_tokens) += step.step->token_ids.size();
    (decode ? metrics_.decode_time : metrics_.prefill_time) += took / group->size();
  }
}

absl::Status LlamaEngine::Decode(Group* group) {
  rows_.Clear();
  const float* residual = group->front().step->residual.data();
  if (width_in_ > 0 && group->size() > 1) {
    gathered_.clear();
    for (Running& running : *group) {
      gathered_.insert(gathered_.end(), running.step->residual.begin(),
                       running.step->residual.end());
    }
    residual = gathered_.data();
  }
  if (width_in_ == 0) residual = nullptr;
  for (Running& running : *group) {
    const Step& step = *running.step;
    Shrink(running.session, step.start_position);
    running.first_row = rows_.size();
    const size_t count = step.token_ids.size();
    uint32_t& written = slots_[running.session->slot].written;
    written = std::max(written, step.start_position + static_cast<uint32_t>(count));
    const bool last = OutputsOf(step) > 0;
    const bool all = step.output_rows == OutputRows::kAllLogits;
    for (size_t i = 0; i < count; ++i) {
      rows_.Add(step.token_ids[i], step.start_position + static_cast<uint32_t>(i),
                running.session->slot, all || (last && i + 1 == count));
    }
  }
  decoding_ = group;
  const absl::Status status = DecodeRows(residual);
  decoding_ = nullptr;
  return status;
}

absl::Status LlamaEngine::DecodeRows(const float* residual) {
  int32_t result = 0;
  threads_->PlaceCaller();
  try {
    result = llama_decode(context_.get(), rows_.Batch(residual, capability_.is_tail()));
    if (result == 0) llama_synchronize(context_.get());
  } catch (const std::exception& error) {
    // llama.cpp's own state may be half changed: nothing that it says later could be trusted.
    Fail(absl::StrCat("llama_decode threw: ", error.what()));
    return health();
  }
  switch (result) {
    case 0:
      return absl::OkStatus();
    case 1:
      return MakeError(v1::REASON_ENGINE_FAILURE,
                       "expected room for the step's rows in the KV cache, found none; release "
                       "sessions or send shorter steps");
    case 2:
      TakeLlamaErrors();  // it logs an abort as an error
      return MakeError(v1::REASON_CANCELLED, "the session was cancelled while its step ran");
    default:
      return MakeError(v1::REASON_ENGINE_FAILURE,
                       absl::StrCat("expected llama_decode to return 0, it returned ", result, ": ",
                                    TakeLlamaErrors(), "; open a new session"));
  }
}

void LlamaEngine::Finish(Running* running) {
  const Step& step = *running->step;
  SessionTable::Session* session = running->session;
  StepOutput& output = *running->output;
  if (output.status.ok() && session->cancelled) {
    output.status = MakeError(v1::REASON_CANCELLED, "the session was cancelled while its step ran");
  }
  if (output.status.ok()) {
    std::vector<int32_t>& tokens = slots_[session->slot].tokens;
    tokens.insert(tokens.end(), step.token_ids.begin(), step.token_ids.end());
    output.status = table_.SetCached(session, static_cast<uint32_t>(tokens.size()));
  }
  if (output.status.ok()) output.status = Answer(*running);
  if (!output.status.ok()) {
    output.residual.clear();
    output.logits.clear();
    output.token.reset();
    Undo(*running);
  }
  output.cached_tokens = session->cached_tokens;
}

absl::Status LlamaEngine::Answer(const Running& running) {
  const Step& step = *running.step;
  StepOutput& output = *running.output;
  const size_t count = step.token_ids.size();
  if (!capability_.is_tail()) {
    const float* boundary = llama_get_boundary(context_.get());
    if (boundary == nullptr) {
      return MakeError(v1::REASON_ENGINE_OUTPUT_INVALID,
                       "expected a boundary from llama.cpp, got none; open a new session");
    }
    boundary += size_t{running.first_row} * width_out_;
    output.residual.assign(boundary, boundary + count * width_out_);
    return absl::OkStatus();
  }
  SlotState& slot = slots_[running.session->slot];
  if (step.sampling.has_value()) {
    auto constraint = MakeConstraint(*step.sampling);
    if (!constraint.ok()) return constraint.status();
    slot.sampler = Sampler(*step.sampling, *std::move(constraint));
  }
  if (OutputsOf(step) == 0) return absl::OkStatus();
  const bool all = step.output_rows == OutputRows::kAllLogits;
  if (all) output.logits.reserve(count * capability_.vocabulary_size);
  for (size_t i = all ? 0 : count - 1; i < count; ++i) {
    const auto logits = LogitsOf(running.first_row + static_cast<uint32_t>(i));
    if (!logits.ok()) return logits.status();
    if (all || step.return_logits) {
      output.logits.insert(output.logits.end(), logits->begin(), logits->end());
    }
    if (step.output_rows == OutputRows::kLast) {
      absl::StatusOr<SampledToken> token = slot.sampler.Sample(*logits, slot.tokens);
      if (!token.ok()) return token.status();
      output.token = *std::move(token);
      output.token->end_of_generation = tokenizer_.IsEndOfGeneration(output.token->token_id);
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<TokenConstraint>> LlamaEngine::MakeConstraint(
    const SamplingParams& params) {
  const bool constrained = !params.grammar.empty() || !params.json_schema.empty();
  if (constrained && grammar_vocabulary_ == nullptr) {
    grammar_vocabulary_ = std::make_shared<const GrammarVocabulary>(tokenizer_);
  }
  return MakeGrammarConstraint(params, grammar_vocabulary_);
}

absl::StatusOr<absl::Span<const float>> LlamaEngine::LogitsOf(uint32_t row) const {
  const float* logits = llama_get_logits_ith(context_.get(), static_cast<int32_t>(row));
  if (logits == nullptr) {
    return MakeError(v1::REASON_ENGINE_OUTPUT_INVALID,
                     absl::StrCat("expected logits of row ", row,
                                  " from llama.cpp, got none; open a new session"));
  }
  const absl::Span<const float> span(logits, capability_.vocabulary_size);
  if (!AllFinite(span)) {
    return MakeError(v1::REASON_ENGINE_OUTPUT_INVALID,
                     "expected finite logits, got NaN or infinity; open a new session, and check "
                     "the stages before this one if it happens again");
  }
  return span;
}

absl::Status LlamaEngine::CheckRollback(uint32_t slot, uint32_t position) const {
  const uint32_t written = slots_[slot].written;
  if (!bounded_rollback_ || position == 0 || position + options_.rollback_tokens >= written) {
    return absl::OkStatus();
  }
  return MakeError(v1::REASON_CACHE_MISS,
                   absl::StrCat("the session wrote up to position ", written,
                                " and can go back by at most ", options_.rollback_tokens,
                                " tokens, not to ", position, "; prefill again from position 0"));
}

void LlamaEngine::Shrink(SessionTable::Session* session, uint32_t position) {
  if (session->cached_tokens <= position) return;
  if (!ClearCells(session->slot, position)) Fail("llama.cpp could not drop a session's cells");
  slots_[session->slot].tokens.resize(position);
  // Shrinking needs no memory and cannot fail.
  table_.SetCached(session, position).IgnoreError();
}

void LlamaEngine::Undo(const Running& running) {
  SessionTable::Session* session = running.session;
  uint32_t position = running.step->start_position;
  if (!CheckRollback(session->slot, position).ok() || !ClearCells(session->slot, position)) {
    position = 0;
  }
  Shrink(session, position);
  // Also what llama.cpp wrote and the session was not yet said to hold.
  if (position == 0) ClearCells(session->slot, 0);
}

bool LlamaEngine::ClearCells(uint32_t slot, uint32_t position) {
  const bool whole = position == 0;
  if (whole) slots_[slot].written = 0;
  return llama_memory_seq_rm(llama_get_memory(context_.get()), static_cast<llama_seq_id>(slot),
                             whole ? -1 : static_cast<llama_pos>(position), -1);
}

void LlamaEngine::Fail(absl::string_view what) {
  absl::MutexLock lock(&mu_);
  health_ = MakeError(
      v1::REASON_ENGINE_FAILURE,
      absl::StrCat("the engine has failed and serves no more: ", what, "; restart the worker"));
}

bool LlamaEngine::ShouldAbort(void* self) {
  const Group* group = static_cast<const LlamaEngine*>(self)->decoding_;
  if (group == nullptr) return false;
  return std::all_of(group->begin(), group->end(),
                     [](const Running& step) { return step.session->cancelled.load(); });
}

absl::Status LlamaEngine::Truncate(const SessionKey& key, uint32_t position) {
  const auto session = table_.Use(key);
  if (!session.ok()) return session.status();
  if (position > (*session)->cached_tokens) {
    return MakeError(v1::REASON_CACHE_MISS,
                     absl::StrCat("cannot truncate to position ", position, ": the session holds ",
                                  (*session)->cached_tokens, " tokens"));
  }
  if (position < (*session)->cached_tokens) {
    const absl::Status possible = CheckRollback((*session)->slot, position);
    if (!possible.ok()) return possible;
  }
  Shrink(*session, position);
  return health();
}

absl::Status LlamaEngine::WarmUp() {
  const SessionKey key{std::string(16, '\xff'), std::numeric_limits<uint64_t>::max()};
  const auto session = table_.Open(key, {}, nullptr);
  if (!session.ok()) return session.status();
  const uint32_t rows = std::min(options_.max_step_tokens, options_.context_tokens);
  const std::vector<float> residual(size_t{rows} * width_in_, 0.01f);
  absl::Status status;
  // The largest step first, then one row, then the row again: the graph that decoding reuses.
  for (const uint32_t count : {rows, 1u, 1u}) {
    rows_.Clear();
    ClearCells((*session)->slot, 0);
    for (uint32_t i = 0; i < count; ++i) {
      rows_.Add(static_cast<int32_t>(i % capability_.vocabulary_size), i, (*session)->slot,
                capability_.is_tail() && i + 1 == count);
    }
    const absl::Time begin = absl::Now();
    status.Update(DecodeRows(width_in_ > 0 ? residual.data() : nullptr));
    absl::MutexLock lock(&mu_);
    metrics_.warm_up_step = absl::Now() - begin;
  }
  // Threads that the caller starts would inherit its CPU.
  threads_->FreeCaller();
  status.Update(table_.Release(key));
  return status;
}

// --- Loading ---

absl::Status CheckOptions(const LlamaEngineOptions& options) {
  const auto invalid = [](absl::string_view what) {
    return MakeError(v1::REASON_CONFIGURATION_INVALID, what);
  };
  if (options.max_sessions == 0 || options.max_sessions > kMaxSlots) {
    return invalid(
        absl::StrCat("expected 1 to ", kMaxSlots, " sessions, got ", options.max_sessions));
  }
  constexpr uint32_t kMaxContext = 1u << 24;
  if (options.context_tokens == 0 || options.context_tokens > kMaxContext) {
    return invalid(absl::StrCat("expected a context of 1 to ", kMaxContext, " tokens, got ",
                                options.context_tokens));
  }
  constexpr uint32_t kMaxStep = 1u << 16;
  if (options.max_step_tokens == 0 || options.max_step_tokens > kMaxStep) {
    return invalid(absl::StrCat("expected steps of 1 to ", kMaxStep, " tokens, got ",
                                options.max_step_tokens));
  }
  if (options.mtp) return MtpUnsupported();
  if (options.poll > 100) {
    return invalid(absl::StrCat("expected a polling level in [0, 100], got ", options.poll));
  }
  if (options.rollback_tokens > kMaxRollback) {
    return invalid(absl::StrCat("expected to go back by 0 to ", kMaxRollback, " tokens, got ",
                                options.rollback_tokens));
  }
  if (options.kv_type == LlamaEngineOptions::KvType::kQ8_0 && !options.flash_attention) {
    return invalid("a quantised KV cache needs flash attention; turn it on or use f16");
  }
  return absl::OkStatus();
}

// llama.cpp's range check would do, but says nothing that a caller can match on.
absl::StatusOr<LayerRange> ResolveRange(const LayerRange& asked, const ArtifactHeader& header) {
  LayerRange range = asked;
  if (range.end == 0) range.end = header.layers;
  if (range.begin >= range.end || range.end > header.layers) {
    return MakeError(
        v1::REASON_LAYER_RANGE_INVALID,
        absl::StrCat("expected 0 <= begin < end <= ", header.layers, " (the model's layers), got [",
                     range.begin, ", ", range.end, ")"));
  }
  return range;
}

ggml_type KvGgmlType(LlamaEngineOptions::KvType type) {
  switch (type) {
    case LlamaEngineOptions::KvType::kF16:
      return GGML_TYPE_F16;
    case LlamaEngineOptions::KvType::kF32:
      return GGML_TYPE_F32;
    case LlamaEngineOptions::KvType::kQ8_0:
      return GGML_TYPE_Q8_0;
  }
  return GGML_TYPE_F16;
}

// Nothing when the CPU computes.
using Device = std::optional<llama_cpp::AcceleratorDevice>;

absl::StatusOr<Device> ChooseDevice(const LlamaEngineOptions& options) {
  constexpr absl::string_view kCpu = "cpu";
  if (options.device == kCpu) return Device();
  if (llama_cpp::kLane == kCpu && options.device.empty()) return Device();
  const auto device = llama_cpp::FindAcceleratorDevice(options.device);
  if (device.ok()) return Device(*device);
  return MakeError(v1::REASON_CONFIGURATION_INVALID, device.status().message());
}

absl::StatusOr<ModelPtr> LoadModel(const LlamaEngineOptions& options,
                                   const std::vector<std::string>& files, const LayerRange& range,
                                   const Device& device) {
  llama_model_params params = llama_model_default_params();
  params.layer_begin = static_cast<int32_t>(range.begin);
  params.layer_end = static_cast<int32_t>(range.end);
  params.load_mode = LLAMA_LOAD_MODE_MMAP;
  params.use_extra_bufts = options.repack;
  // Never llama.cpp's own choice among what is registered.
  ggml_backend_dev_t devices[] = {device.has_value() ? device->device : nullptr, nullptr};
  params.devices = devices;
  params.n_gpu_layers = device.has_value() ? std::numeric_limits<int32_t>::max() : 0;
  TakeLlamaErrors();
  std::vector<const char*> paths;
  for (const std::string& file : files) paths.push_back(file.c_str());
  ModelPtr model;
  std::string reason;
  try {
    model.reset(llama_model_load_from_splits(paths.data(), paths.size(), params));
  } catch (const std::exception& error) {
    reason = error.what();
  }
  if (model == nullptr) {
    return MakeError(v1::REASON_ARTIFACT_INVALID,
                     absl::StrCat("llama.cpp cannot load layers [", range.begin, ", ", range.end,
                                  ") of ", options.model_path, ": ", reason, TakeLlamaErrors()));
  }
  return model;
}

// ggml lays out a graph's tensors for the largest batch, one behind the other at multiples of 32
// bytes. With a count of rows that is no multiple of 16, those behind the positions and output
// numbers (4 bytes a row) begin in the middle of a cache line: prefill takes a sixth longer.
uint32_t AlignedRows(uint32_t rows) { return (rows + 15) / 16 * 16; }

uint32_t SlotCells(const LlamaEngineOptions& options) {
  return (options.context_tokens + kContextMultiple - 1) / kContextMultiple * kContextMultiple;
}

absl::StatusOr<ContextPtr> MakeContext(const LlamaEngineOptions& options, llama_model* model,
                                       const Capability& capability, uint32_t batch_rows,
                                       uint32_t batch_outputs) {
  const bool tail = capability.is_tail();
  const bool deepseek4 = capability.architecture == kDeepSeek4;
  llama_context_params params = llama_context_default_params();
  params.n_ctx = SlotCells(options) * options.max_sessions;
  params.n_batch = AlignedRows(batch_rows);
  // DeepSeek V4 keeps the keys of its window in a ring as long as window, micro-batch and rollback:
  // the number of sessions must not change where a key lies.
  params.n_ubatch = deepseek4 ? AlignedRows(options.max_step_tokens) : params.n_batch;
  params.n_rs_seq = deepseek4 ? options.rollback_tokens : 0;
  // Otherwise it would be as long as the context.
  params.swa_full = !deepseek4;
  params.n_seq_max = options.max_sessions;
  // A stream per slot: attention walks over a session's own cells only, and their placement depends
  // on nothing else.
  params.kv_unified = false;
  // Bounds the compute buffer: the logits of a whole chunk would dwarf everything else in it.
  params.n_outputs_max = tail ? AlignedRows(batch_outputs) : 0;
  params.n_threads = static_cast<int32_t>(options.threads);
  params.n_threads_batch = static_cast<int32_t>(options.threads);
  params.flash_attn_type =
      options.flash_attention ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
  params.type_k = KvGgmlType(options.kv_type);
  params.type_v = KvGgmlType(options.kv_type);
  params.no_perf = true;
  TakeLlamaErrors();
  ContextPtr context;
  std::string reason;
  try {
    context.reset(llama_init_from_model(model, params));
  } catch (const std::exception& error) {
    reason = error.what();
  }
  if (context == nullptr) {
    return MakeError(v1::REASON_CONFIGURATION_INVALID,
                     absl::StrCat("llama.cpp makes no context of ", options.max_sessions, " x ",
                                  options.context_tokens, " tokens: ", reason, TakeLlamaErrors()));
  }
  return context;
}

BoundarySchema Boundary(const ArtifactHeader& header) {
  return header.architecture == kDeepSeek4 ? HyperConnectionSchema(header.streams, header.embedding)
                                           : DenseResidualSchema(header.embedding);
}

// The compiler and its flags: what the kernels' sums are made of besides their source.
std::string BuildOptions(const Device& device) {
#if defined(__clang__)
  constexpr absl::string_view kCompiler = "clang";
#else
  constexpr absl::string_view kCompiler = "gcc";
#endif
  return absl::StrCat(kCompiler, " ", __VERSION__, " -march=", kCpuBaseline, " ",
                      llama_cpp::kKernelOptions, device.has_value() ? " " : "",
                      device.has_value() ? llama_cpp::AcceleratorBuild() : "");
}

// What can change a bit of a result, and nothing else. Not here: the range, the number of slots and
// the context's length (a slot's cells and padding do not depend on them), polling, limits and
// budgets.
std::vector<std::pair<std::string, std::string>> MakeRecipe(const LlamaEngineOptions& options,
                                                            const ArtifactHeader& header,
                                                            const std::string& artifact_sha256,
                                                            const std::string& cpu_variant,
                                                            const Device& device,
                                                            const llama_model* model) {
  const bool exact = options.batch_policy == BatchPolicy::kExact;
  const char* kv_type = ggml_type_name(KvGgmlType(options.kv_type));
  const bool deepseek4 = header.architecture == kDeepSeek4;
  const BoundarySchema boundary = Boundary(header);
  std::vector<std::pair<std::string, std::string>> recipe = {
      {"activation_dtype", "f32"},
      {"adapter", deepseek4 ? "deepseek4/1" : "dense-llama/1"},
      {"architecture", header.architecture},
      {"artifact_sha256", artifact_sha256},
      {"backend", device.has_value() ? llama_cpp::kLane : "cpu"},
      {"batch_policy", exact ? "exact" : "shared"},
      {"boundary_schema", absl::StrCat(boundary.name, "/", boundary.version)},
      {"build_options", BuildOptions(device)},
      // The kernels that run, and whether weights are rearranged for them: each sums in its own
      // order.
      {"cpu_variant", cpu_variant},
      {"cpu_repack", options.repack ? "on" : "off"},
      {"flash_attention", options.flash_attention ? "on" : "off"},
      // One row against a long cache is split into as many parts as there are threads, and only
      // then.
      {"flash_attention_threads",
       options.flash_attention ? absl::StrCat(options.threads) : std::string("any")},
      {"kv_layout", "slot"},
      {"kv_type", kv_type},
      {"llama_cpp_commit", llama_cpp::kCommit},
      {"llama_cpp_patches_sha256", llama_cpp::kPatchStackSha256},
      // A prompt is cut into chunks of this size, and a chunk's size chooses kernels.
      {"prefill_chunk", absl::StrCat(options.max_step_tokens)},
      {"quantization", llama_ftype_name(llama_model_ftype(model))},
      {"tokenizer_sha256", header.tokenizer_sha256},
      {"wire_dtype", "f32"},
  };
  if (device.has_value()) {
    // Kernels are chosen by what the device can do, and its driver compiles them.
    recipe.emplace_back("accelerator", device->description);
    recipe.emplace_back("accelerator_driver", device->driver);
  }
  if (deepseek4) {
    recipe.emplace_back("boundary_sha256", SchemaFingerprint(boundary));
    recipe.emplace_back("mtp", "off");
    // The length of the rings that the window and the compressors keep.
    recipe.emplace_back("rollback_tokens", absl::StrCat(options.rollback_tokens));
  }
  return recipe;
}

MemoryEstimate Measure(const Loaded& loaded) {
  MemoryEstimate memory;
  uint64_t kv = 0;
  uint64_t compute = 0;
  for (const auto& [type, bytes] : llama_get_memory_breakdown(loaded.context.get())) {
    kv += bytes.context;
    compute += bytes.compute;
  }
  const Capability& c = loaded.capability;
  memory.weights = llama_model_loaded_size(loaded.model.get());
  memory.kv_per_session = kv / loaded.options.max_sessions;
  const uint64_t output_rows =
      AlignedRows(std::max(loaded.batch_outputs, loaded.options.max_sessions));
  const uint64_t output_floats = c.is_tail() ? output_rows * c.vocabulary_size
                                             : uint64_t{AlignedRows(loaded.batch_rows)} *
                                                   llama_model_n_embd_out(loaded.model.get());
  memory.compute = compute + output_floats * sizeof(float) +
                   kVocabularyBytesPerToken * c.vocabulary_size + kFixedBytes;
  if (c.is_tail()) memory.compute += GrammarVocabulary::kBytesPerToken * c.vocabulary_size;
  return memory;
}

StateSize MakeStateSize(const Loaded& loaded, const ArtifactHeader& header) {
  const LlamaEngineOptions& options = loaded.options;
  if (header.architecture != kDeepSeek4) {
    return DenseStateSize(loaded.memory.kv_per_session, SlotCells(options));
  }
  DeepSeek4Geometry geometry;
  geometry.slot_cells = SlotCells(options);
  geometry.micro_batch = AlignedRows(options.max_step_tokens);
  geometry.rollback_tokens = options.rollback_tokens;
  return DeepSeek4StateSize(header, loaded.capability.range, KvGgmlType(options.kv_type), geometry);
}

absl::Status CheckBudget(const LlamaEngineOptions& options, const MemoryEstimate& memory) {
  const uint64_t total =
      memory.weights + memory.kv_per_session * options.max_sessions + memory.compute;
  if (options.memory_budget_bytes == 0 || total <= options.memory_budget_bytes) {
    return absl::OkStatus();
  }
  return MakeError(
      v1::REASON_MEMORY_BUDGET_EXCEEDED,
      absl::StrCat("the range needs ", memory.weights, " bytes of weights + ", options.max_sessions,
                   " x ", memory.kv_per_session, " of KV + ", memory.compute,
                   " of compute = ", total, ", the budget is ", options.memory_budget_bytes,
                   "; take fewer layers, sessions or context"));
}

Capability MakeCapability(const LlamaEngineOptions& options, const ArtifactHeader& header,
                          const std::string& artifact_sha256, const std::string& cpu_variant,
                          const Device& device, const llama_model* model) {
  Capability c;
  c.engine = "llama";
  c.architecture = header.architecture;
  c.artifact_sha256 = artifact_sha256;
  c.recipe = MakeRecipe(options, header, artifact_sha256, cpu_variant, device, model);
  std::sort(c.recipe.begin(), c.recipe.end());
  c.recipe_fingerprint = RecipeFingerprint(c.recipe);
  c.range = {static_cast<uint32_t>(llama_model_layer_begin(model)),
             static_cast<uint32_t>(llama_model_layer_end(model))};
  c.model_layers = static_cast<uint32_t>(llama_model_n_layer(model));
  if (!c.is_head()) c.boundary_in = Boundary(header);
  if (!c.is_tail()) c.boundary_out = Boundary(header);
  c.max_sessions = options.max_sessions;
  c.context_tokens = options.context_tokens;
  c.max_step_tokens = options.max_step_tokens;
  c.batch_policy = options.batch_policy;
  c.evidence = device.has_value() && device->software ? Evidence::kFixture : Evidence::kDark;
  if (header.architecture == kDeepSeek4) c.rollback_tokens = options.rollback_tokens;
  c.vocabulary_size = static_cast<uint32_t>(llama_vocab_n_tokens(llama_model_get_vocab(model)));
  c.owned_tensors = static_cast<uint32_t>(llama_model_loaded_n_tensors(model));
  c.owned_tensor_bytes = llama_model_loaded_size(model);
  return c;
}

// What is to be loaded, and which artifact that is.
struct Identified {
  ArtifactHeader header;
  LayerRange range;
  std::string sha256;
  // By a manifest: the tensors that were compared with it.
  std::optional<std::set<std::string>> verified;
};

absl::Status CheckServed(const ArtifactHeader& header) {
  if (IsServedArchitecture(header.architecture)) return absl::OkStatus();
  return MakeError(v1::REASON_ARCHITECTURE_UNSUPPORTED,
                   absl::StrCat("expected a model of the `llama` or `deepseek4` architecture, "
                                "this one is `",
                                header.architecture, "`"));
}

absl::Status CheckExpected(const LlamaEngineOptions& options, const std::string& sha256,
                           const std::string& path) {
  if (options.expected_artifact_sha256.empty() || options.expected_artifact_sha256 == sha256) {
    return absl::OkStatus();
  }
  return MakeError(v1::REASON_ARTIFACT_MISMATCH,
                   absl::StrCat("expected an artifact with SHA-256 ",
                                options.expected_artifact_sha256, ", ", path, " has ", sha256));
}

// By the content of all files.
absl::StatusOr<Identified> Identify(const LlamaEngineOptions& options) {
  Identified found;
  absl::StatusOr<ArtifactHeader> header = ReadArtifactHeader(options.model_path);
  if (!header.ok()) return header.status();
  found.header = *std::move(header);
  absl::Status status = CheckServed(found.header);
  if (!status.ok()) return status;
  const absl::StatusOr<LayerRange> range = ResolveRange(options.range, found.header);
  if (!range.ok()) return range.status();
  found.range = *range;
  absl::StatusOr<std::string> sha256 = ArtifactSha256(found.header.files);
  if (!sha256.ok()) return sha256.status();
  found.sha256 = *std::move(sha256);
  status = CheckExpected(options, found.sha256, options.model_path);
  if (!status.ok()) return status;
  return found;
}

// By the manifest, as far as the range reads the files: what is cheap to refuse comes first.
absl::StatusOr<Identified> IdentifyByManifest(const LlamaEngineOptions& options) {
  const absl::StatusOr<Manifest> manifest = ReadManifest(options.manifest_path);
  if (!manifest.ok()) return manifest.status();
  absl::Status status = CheckExpected(options, manifest->artifact_sha256, options.manifest_path);
  if (!status.ok()) return status;
  const std::string& beside =
      options.model_path.empty() ? options.manifest_path : options.model_path;
  const size_t slash = beside.rfind('/');
  const absl::StatusOr<std::vector<std::string>> paths = VerifyHeaders(
      *manifest, slash == std::string::npos ? "" : beside.substr(0, slash), options.threads);
  if (!paths.ok()) return paths.status();
  Identified found;
  found.sha256 = manifest->artifact_sha256;
  absl::StatusOr<ArtifactHeader> header = ReadArtifactHeader(paths->front());
  if (!header.ok()) return header.status();
  found.header = *std::move(header);
  const bool is_named = options.model_path.empty() ||
                        std::find(paths->begin(), paths->end(), options.model_path) != paths->end();
  if (!is_named || found.header.files != *paths) {
    return MakeError(
        v1::REASON_ARTIFACT_MISMATCH,
        absl::StrCat("expected one of the ", paths->size(), " files of ", options.manifest_path,
                     ", ", paths->front(), " first, got ", options.model_path));
  }
  if (found.header.tokenizer_sha256 != manifest->tokenizer_sha256) {
    return MakeError(
        v1::REASON_ARTIFACT_MISMATCH,
        absl::StrCat("expected the tokenizer ", manifest->tokenizer_sha256, " by ",
                     options.manifest_path, ", the file has ", found.header.tokenizer_sha256));
  }
  status = CheckServed(found.header);
  if (!status.ok()) return status;
  const absl::StatusOr<LayerRange> range = ResolveRange(options.range, found.header);
  if (!range.ok()) return range.status();
  found.range = *range;
  absl::StatusOr<std::set<std::string>> verified =
      VerifyLayers(*manifest, *paths, *range, found.header.layers, options.threads);
  if (!verified.ok()) return verified.status();
  found.verified = *std::move(verified);
  return found;
}

// That llama.cpp holds nothing that was not compared with the manifest.
absl::Status CheckLoaded(const Identified& artifact, const llama_model* model) {
  if (!artifact.verified.has_value()) return absl::OkStatus();
  for (const auto& [name, tensor] : llama_internal_get_tensor_map(model)) {
    if (artifact.verified->count(ggml_get_name(tensor)) == 0) {
      return MakeError(
          v1::REASON_ARTIFACT_INVALID,
          absl::StrCat("the tensor ", name, " was loaded for layers [", artifact.range.begin, ", ",
                       artifact.range.end, ") and not compared with the manifest"));
    }
  }
  return absl::OkStatus();
}

// The header and llama.cpp have to agree on what crosses the seams.
absl::Status CheckBoundary(const Capability& c, const llama_model* model) {
  const uint64_t in = c.is_head() ? 0 : c.boundary_in->residual_width();
  const uint64_t out = c.is_tail() ? 0 : c.boundary_out->residual_width();
  const auto llama_in = static_cast<uint64_t>(llama_model_boundary_n_embd_in(model));
  const auto llama_out = static_cast<uint64_t>(llama_model_boundary_n_embd_out(model));
  if (in == llama_in && out == llama_out) return absl::OkStatus();
  return MakeError(v1::REASON_ARTIFACT_INVALID,
                   absl::StrCat("expected seams of ", in, " and ", out,
                                " floats a token by the file's header, llama.cpp has ", llama_in,
                                " and ", llama_out));
}

}  // namespace

absl::StatusOr<std::unique_ptr<ShardEngine>> LoadLlamaEngine(const LlamaEngineOptions& options) {
  absl::Status status = CheckOptions(options);
  if (!status.ok()) return status;
  SetLlamaLogSink(options.log);
  const absl::StatusOr<std::string> variant = llama_cpp::RegisterCpuBackend(options.cpu_variant);
  if (!variant.ok()) {
    return MakeError(absl::IsFailedPrecondition(variant.status())
                         ? v1::REASON_CPU_UNSUPPORTED
                         : v1::REASON_CONFIGURATION_INVALID,
                     variant.status().message());
  }

  Loaded loaded;
  loaded.options = options;
  if (loaded.options.threads == 0) {
    loaded.options.threads = std::max(1u, std::thread::hardware_concurrency());
  }
  const absl::StatusOr<Identified> artifact =
      options.manifest_path.empty() ? Identify(options) : IdentifyByManifest(loaded.options);
  if (!artifact.ok()) return artifact.status();
  const absl::StatusOr<Device> device = ChooseDevice(options);
  if (!device.ok()) return device.status();
  absl::StatusOr<ModelPtr> model =
      LoadModel(loaded.options, artifact->header.files, artifact->range, *device);
  if (!model.ok()) return model.status();
  loaded.model = *std::move(model);
  status = CheckLoaded(*artifact, loaded.model.get());
  if (!status.ok()) return status;
  loaded.capability = MakeCapability(loaded.options, artifact->header, artifact->sha256, *variant,
                                     *device, loaded.model.get());
  status = CheckBoundary(loaded.capability, loaded.model.get());
  if (!status.ok()) return status;
  // A prefill chunk, or a decode row of every session.
  loaded.batch_rows = std::max(options.max_step_tokens, options.max_sessions);
  loaded.batch_outputs = std::max(options.max_logit_rows, options.max_sessions);
  absl::StatusOr<ContextPtr> context =
      MakeContext(loaded.options, loaded.model.get(), loaded.capability, loaded.batch_rows,
                  loaded.batch_outputs);
  if (!context.ok()) return context.status();
  loaded.threads =
      std::make_unique<ThreadPool>(loaded.options.threads, options.poll, options.pin_threads);
  loaded.context = *std::move(context);
  if (loaded.threads->get() == nullptr) {
    return MakeError(v1::REASON_CONFIGURATION_INVALID,
                     absl::StrCat("cannot start ", loaded.options.threads, " threads"));
  }
  llama_attach_threadpool(loaded.context.get(), loaded.threads->get(), loaded.threads->get());
  loaded.memory = Measure(loaded);
  loaded.state_size = MakeStateSize(loaded, artifact->header);
  status = CheckBudget(options, loaded.memory);
  if (!status.ok()) return status;
  // Reading headers, vocabulary and hash left free pages behind.
  ReleaseFreeMemory();
  return std::make_unique<LlamaEngine>(std::move(loaded));
}

}  // namespace meshnet
