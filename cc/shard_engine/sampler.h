// Turns logits into a token as sampling.proto describes, the same for every engine.
//
// Order: logit bias, penalties, grammar, top-k, top-p, min-p, temperature, draw. The draw takes its
// random number from (seed, tokens drawn since the parameters were set) alone, so a restarted
// worker that replays a session draws the same tokens. Ties are broken by the lower id everywhere.
//
//   Sampler sampler(params);
//   absl::StatusOr<SampledToken> token = sampler.Sample(logits, session_tokens);
#ifndef MESHNET_CC_SHARD_ENGINE_SAMPLER_H_
#define MESHNET_CC_SHARD_ENGINE_SAMPLER_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cc/shard_engine/shard_engine.h"

namespace meshnet {

// What the tokens that are drawn must spell. It begins before the first of them.
class TokenConstraint {
 public:
  virtual ~TokenConstraint() = default;

  // Whether `token_id` may come next.
  virtual absl::StatusOr<bool> Allows(int32_t token_id) = 0;
  // The same of every token: `allowed` [vocabulary].
  virtual absl::Status Allowed(std::vector<bool>* allowed) = 0;
  // Goes on by a token that may come next.
  virtual absl::Status Accept(int32_t token_id) = 0;
};

class Sampler {
 public:
  // `params` has passed ValidateSampling. `constraint`, null for none, is what the caller made of
  // its grammar.
  explicit Sampler(SamplingParams params = {},
                   std::unique_ptr<TokenConstraint> constraint = nullptr);

  // `logits` [vocabulary], unmodified by anybody; `history` the session's tokens so far, prompt
  // included, newest last. Leaves end_of_generation to the engine. Fails only with a constraint:
  // GRAMMAR_DEAD_END when it and the biases leave no token, and what the constraint itself says.
  absl::StatusOr<SampledToken> Sample(absl::Span<const float> logits,
                                      absl::Span<const int32_t> history);

  const SamplingParams& params() const { return params_; }

 private:
  struct Candidate {
    int32_t id = 0;
    float logit = 0.0f;
  };

  bool IsPlainGreedy() const;
  absl::StatusOr<int32_t> Choose(absl::Span<const float> logits, absl::Span<const int32_t> history);
  absl::Status ApplyConstraint();
  void ApplyBias();
  void ApplyPenalties(absl::Span<const int32_t> history);
  // Brings the `count` best candidates to the front, best first.
  void SortBest(size_t count);
  void KeepTopK();
  void KeepTopP();
  void KeepMinP();
  int32_t Draw();
  void ReportLogprobs(absl::Span<const float> logits, SampledToken* token) const;

  SamplingParams params_;
  std::unique_ptr<TokenConstraint> constraint_;
  uint64_t drawn_ = 0;
  std::vector<Candidate> candidates_;
  size_t sorted_ = 0;  // leading candidates that are in order, best first
  std::vector<int32_t> seen_;
  std::vector<bool> allowed_;
};

// The index of the largest value, the lowest among equals; 0 for an empty span.
int32_t ArgMax(absl::Span<const float> values);

}  // namespace meshnet

#endif  // MESHNET_CC_SHARD_ENGINE_SAMPLER_H_
