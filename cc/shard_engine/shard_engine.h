// The project-owned boundary between protocol and execution: one artifact, one recipe, one layer
// range.
//
// No type of llama.cpp, ggml, gRPC or protobuf messages crosses this interface (the Reason enum
// inside absl::Status is the one shared vocabulary, see cc/common/status.h). Implementations: fake/
// (deterministic fixture, proves protocol only) and llama/. Both pass the suite in
// contract_test_suite.h.
//
//   auto engine = LoadLlamaEngine(options);            // or MakeFakeEngine(options)
//   engine->OpenSession(key, {}, &evicted);
//   engine->Execute(steps, &outputs);                  // rows of several sessions in one call
//   engine->Release(key);
//
// Threading: OpenSession, Execute, Truncate, Release, EvictIdle and WarmUp are called from one
// thread at a time (the worker's engine thread). Cancel, health(), metrics(), capability() and
// tokenizer() may be called from any thread at any time.
//
// Errors are absl::Status made by MakeError; nothing throws and nothing that a Step contains ends
// the process.
#ifndef MESHNET_CC_SHARD_ENGINE_SHARD_ENGINE_H_
#define MESHNET_CC_SHARD_ENGINE_SHARD_ENGINE_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

namespace meshnet {

// Half-open [begin, end) of main layers.
struct LayerRange {
  uint32_t begin = 0;
  uint32_t end = 0;

  friend bool operator==(const LayerRange& a, const LayerRange& b) {
    return a.begin == b.begin && a.end == b.end;
  }
  friend bool operator!=(const LayerRange& a, const LayerRange& b) { return !(a == b); }
};

// One user's conversation on one version of a route. State is keyed by it and never moves to
// another key.
struct SessionKey {
  std::string route_session_id;  // 16 bytes
  uint64_t route_epoch = 0;      // >= 1

  friend bool operator==(const SessionKey& a, const SessionKey& b) {
    return a.route_epoch == b.route_epoch && a.route_session_id == b.route_session_id;
  }
  friend bool operator<(const SessionKey& a, const SessionKey& b) {
    return std::tie(a.route_session_id, a.route_epoch) <
           std::tie(b.route_session_id, b.route_epoch);
  }
  template <typename H>
  friend H AbslHashValue(H h, const SessionKey& key) {
    return H::combine(std::move(h), key.route_session_id, key.route_epoch);
  }
};

enum class DType { kF32, kI32 };
enum class Phase { kPrefill, kDecode };
enum class BatchPolicy {
  // A session's rows never share a matrix product with another session's: its results do not depend
  // on who else is served.
  kExact,
  // Rows of all steps of a batch are computed together.
  kShared,
};
enum class Evidence { kFixture, kDark };

// -1 in `shape` stands for the step's token count.
struct TensorSpec {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;

  friend bool operator==(const TensorSpec& a, const TensorSpec& b) {
    return std::tie(a.name, a.dtype, a.shape) == std::tie(b.name, b.dtype, b.shape);
  }
};

// What crosses a seam. Dense: name "dense.residual", version 1, tensors residual f32 [-1, n_embd],
// positions i32 [-1], token_ids i32 [-1].
struct BoundarySchema {
  std::string name;
  uint32_t version = 0;
  std::vector<TensorSpec> tensors;

  // Floats of `residual` per token.
  uint64_t residual_width() const;
  friend bool operator==(const BoundarySchema& a, const BoundarySchema& b) {
    return std::tie(a.name, a.version, a.tensors) == std::tie(b.name, b.version, b.tensors);
  }
};

BoundarySchema DenseResidualSchema(uint32_t n_embd);

// DeepSeek V4: name "deepseek4.mhc", version 1, the residual with all its streams (manifold-
// constrained hyper-connections) f32 [-1, streams, n_embd], positions and token_ids as above. The
// ids cross every seam: layers with hash routing choose experts by them. No state of any layer is
// part of it.
BoundarySchema HyperConnectionSchema(uint32_t streams, uint32_t n_embd);

// Tensors of a later version of that schema, for multi-token prediction. No version that is served
// has them: a peer that sends one is refused (TENSOR_UNEXPECTED), and so is EnableMtp().
std::vector<TensorSpec> ReservedMtpTensors(uint32_t streams, uint32_t n_embd);

// Why multi-token prediction is refused, whoever asks for it: FEATURE_UNSUPPORTED.
absl::Status MtpUnsupported();

// SHA-256 in lower-case hex over name, version and tensors: the same for every quantisation and
// every cut of a model.
std::string SchemaFingerprint(const BoundarySchema& schema);

// See SamplingParams in sampling.proto for meaning, order of application and bounds.
struct SamplingParams {
  float temperature = 0.0f;
  int32_t top_k = 0;
  float top_p = 1.0f;
  float min_p = 0.0f;
  float repetition_penalty = 1.0f;
  float frequency_penalty = 0.0f;
  float presence_penalty = 0.0f;
  uint32_t penalty_last_n = 64;
  uint32_t seed = 0;
  std::vector<std::pair<int32_t, float>> logit_bias;
  uint32_t top_logprobs = 0;
  bool logprobs = false;
  // At most one of the two.
  std::string grammar;
  std::string json_schema;
};

inline constexpr size_t kMaxGrammarBytes = 64 << 10;

// SAMPLING_INVALID naming the field, its bounds and the value.
absl::Status ValidateSampling(const SamplingParams& params, uint32_t vocabulary_size);

struct TokenLogprob {
  int32_t token_id = 0;
  float logprob = 0.0f;
};

struct SampledToken {
  int32_t token_id = 0;
  std::optional<float> logprob;
  std::vector<TokenLogprob> top;
  bool end_of_generation = false;
};

enum class OutputRows {
  kNone,
  // Sample the last row (tail only).
  kLast,
  // Return the logits of every row and sample nothing (tail only; in-process parity tests, not on
  // the wire).
  kAllLogits,
};

// One forward pass of one session. The engine first drops what the session holds from
// start_position on, then appends the step's rows. The spans must outlive the call.
struct Step {
  SessionKey session;
  uint64_t step = 0;
  Phase phase = Phase::kPrefill;
  // At most the number of tokens that the session holds; more is CACHE_MISS.
  uint32_t start_position = 0;
  // [n], 1 <= n <= capability().max_step_tokens. Every stage gets them.
  absl::Span<const int32_t> token_ids;
  // [n, residual_width] row-major at a stage that is not the head; empty at the head.
  absl::Span<const float> residual;
  OutputRows output_rows = OutputRows::kNone;
  // Tail: start the session's sampler anew with these before sampling. A step that samples in a
  // session that never got any is greedy.
  std::optional<SamplingParams> sampling;
  bool return_logits = false;
};

struct StepOutput {
  // This step's own outcome. An error here says nothing about the batch's other steps. After an
  // error the session holds exactly start_position tokens, or what it held when the step was
  // refused before it began (CACHE_MISS and the like).
  absl::Status status;
  uint32_t cached_tokens = 0;
  // Not the tail: [n, residual_width] before the final norm, in row order.
  std::vector<float> residual;
  // Tail and kLast.
  std::optional<SampledToken> token;
  // Tail: [n_vocab] with return_logits, [n, n_vocab] with kAllLogits.
  std::vector<float> logits;
  // Time of the engine call that held this step, shared by all steps of one batched call.
  absl::Duration engine_time;
};

struct Capability {
  std::string engine;  // "llama", "fake"
  std::string architecture;
  std::string artifact_sha256;
  // Sorted by name; see Recipe in shard.proto.
  std::vector<std::pair<std::string, std::string>> recipe;
  std::string recipe_fingerprint;
  LayerRange range;
  uint32_t model_layers = 0;
  // Absent at the head.
  std::optional<BoundarySchema> boundary_in;
  // Absent at the tail.
  std::optional<BoundarySchema> boundary_out;
  uint32_t max_sessions = 0;
  uint32_t context_tokens = 0;  // per session
  uint32_t max_step_tokens = 0;
  BatchPolicy batch_policy = BatchPolicy::kExact;
  Evidence evidence = Evidence::kDark;
  // How far behind the last position that it ever wrote a session can go on, except at 0; any
  // distance when absent. Equal at all stages of a recipe.
  std::optional<uint32_t> rollback_tokens;
  uint32_t vocabulary_size = 0;
  uint64_t owned_tensor_bytes = 0;
  uint32_t owned_tensors = 0;

  bool is_head() const { return range.begin == 0; }
  bool is_tail() const { return range.end == model_layers; }
};

// SHA-256 in lower-case hex over the canonical "name=value\n" lines; `fields` in any order.
std::string RecipeFingerprint(std::vector<std::pair<std::string, std::string>> fields);

// Bytes. The estimate is a promise: loading and serving stay within weights + sessions x
// kv_per_session + compute.
struct MemoryEstimate {
  uint64_t weights = 0;
  uint64_t kv_per_session = 0;
  uint64_t compute = 0;
};

struct EngineMetrics {
  uint64_t kv_bytes = 0;         // held by open sessions
  uint64_t kv_budget_bytes = 0;  // what all slots together may hold
  uint32_t open_sessions = 0;
  uint64_t prefill_tokens = 0;
  uint64_t decode_tokens = 0;
  absl::Duration prefill_time;
  absl::Duration decode_time;
  uint64_t engine_calls = 0;
  uint64_t sessions_evicted = 0;
  absl::Duration warm_up_step;  // one row, measured by WarmUp(); zero before
};

// Immutable and thread-safe.
class Tokenizer {
 public:
  struct SpecialToken {
    std::string role;
    int32_t token_id = 0;
  };

  virtual ~Tokenizer() = default;

  virtual uint32_t vocabulary_size() const = 0;
  virtual bool add_bos() const = 0;
  virtual bool add_eos() const = 0;
  virtual std::vector<SpecialToken> special_tokens() const = 0;
  virtual std::vector<int32_t> end_of_generation_ids() const = 0;
  // Empty when the artifact has none.
  virtual std::string chat_template() const = 0;
  virtual std::map<std::string, std::string> named_chat_templates() const = 0;
  virtual absl::StatusOr<std::vector<int32_t>> Tokenize(absl::string_view text, bool add_special,
                                                        bool parse_special) const = 0;
  // TOKEN_OUT_OF_RANGE for an id outside the vocabulary, here and below.
  virtual absl::StatusOr<std::string> Detokenize(absl::Span<const int32_t> token_ids,
                                                 bool unparse_special) const = 0;
  virtual absl::StatusOr<std::string> Piece(int32_t token_id) const = 0;
  // Whether the token steers the model and is no text, whatever its piece. `token_id` is inside the
  // vocabulary.
  virtual bool IsControl(int32_t token_id) const = 0;
};

struct SessionOptions {
  // Evict after this long without a step. Zero = the engine's own limit; never more than that.
  absl::Duration idle_ttl = absl::ZeroDuration();
};

class ShardEngine {
 public:
  virtual ~ShardEngine() = default;

  virtual const Capability& capability() const = 0;
  virtual const Tokenizer& tokenizer() const = 0;
  virtual MemoryEstimate EstimateMemory() const = 0;

  // Runs every shape once so that the first request finds caches warm and memory in place, and
  // measures what one row takes (metrics().warm_up_step). Leaves no session behind.
  virtual absl::Status WarmUp() = 0;

  // Takes a slot. SESSION_EXISTS for the same key; STALE_EPOCH when a newer epoch of the same
  // session id is or was held; an older epoch of the same id is released first and reported in
  // `evicted`. When all slots are taken, the least recently used session that has been idle for at
  // least lru_min_idle is evicted and reported, otherwise SESSIONS_EXHAUSTED.
  virtual absl::Status OpenSession(const SessionKey& key, const SessionOptions& options,
                                   std::vector<SessionKey>* evicted) = 0;

  // Executes the steps; at most one step per session in a batch. `outputs` gets one entry per step,
  // in order. Per-step errors: SESSION_UNKNOWN, STALE_EPOCH, SESSION_EVICTED, CACHE_MISS,
  // CONTEXT_EXCEEDED, TOKEN_OUT_OF_RANGE, SHAPE_MISMATCH, NON_FINITE_VALUE (in a residual),
  // SAMPLING_INVALID, GRAMMAR_INVALID, GRAMMAR_DEAD_END, GRAMMAR_TOO_COSTLY, FEATURE_UNSUPPORTED
  // (rows asked of a stage that is not the tail), CANCELLED, ENGINE_FAILURE. The returned status is
  // non-OK only when the batch as a whole could not be looked at (two steps of one session, an
  // engine that has failed for good).
  virtual absl::Status Execute(absl::Span<const Step> batch, std::vector<StepOutput>* outputs) = 0;

  // Drops the session's tokens from `position` on. CACHE_MISS when it holds fewer.
  virtual absl::Status Truncate(const SessionKey& key, uint32_t position) = 0;

  // Frees the session's slot; its memory counts for nothing afterwards. SESSION_UNKNOWN if it is
  // not held.
  virtual absl::Status Release(const SessionKey& key) = 0;

  // Evicts sessions whose idle time has passed their TTL.
  virtual std::vector<SessionKey> EvictIdle() = 0;

  // Makes a running or queued step of this session return CANCELLED soon, and every later one until
  // the session is released. Any thread. No effect on other sessions; none at all for an unknown
  // key.
  virtual void Cancel(const SessionKey& key) = 0;

  // OK, or why the engine can serve no more (ENGINE_FAILURE).
  virtual absl::Status health() const = 0;
  virtual EngineMetrics metrics() const = 0;

  // Reserved for multi-token prediction and architecture state: engines of this version say
  // FEATURE_UNSUPPORTED.
  virtual absl::Status EnableMtp();
  virtual absl::Status ImportAuxiliaryState(const SessionKey& key, absl::string_view state);
};

}  // namespace meshnet

#endif  // MESHNET_CC_SHARD_ENGINE_SHARD_ENGINE_H_
