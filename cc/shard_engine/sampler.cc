#include "cc/shard_engine/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "cc/common/status.h"

namespace meshnet {
namespace {

// SplitMix64's output function over a counter: random access, no state to lose.
uint64_t Mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15ull;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
  return value ^ (value >> 31);
}

// Uniform in [0, 1).
double Uniform(uint32_t seed, uint64_t index) {
  return static_cast<double>(Mix(Mix(seed) ^ index) >> 11) * 0x1.0p-53;
}

double LogSumExp(absl::Span<const float> logits) {
  const float max = logits[ArgMax(logits)];
  double sum = 0.0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit) - max);
  return static_cast<double>(max) + std::log(sum);
}

}  // namespace

int32_t ArgMax(absl::Span<const float> values) {
  // Blocks keep the inner loop a plain maximum, which vectorises; the position is looked for once.
  constexpr size_t kBlock = 1024;
  float best = -std::numeric_limits<float>::infinity();
  size_t best_block = 0;
  for (size_t begin = 0; begin < values.size(); begin += kBlock) {
    const size_t end = std::min(values.size(), begin + kBlock);
    float max = values[begin];
    for (size_t i = begin; i < end; ++i) max = values[i] > max ? values[i] : max;
    if (max > best) {
      best = max;
      best_block = begin;
    }
  }
  for (size_t i = best_block; i < values.size(); ++i) {
    if (values[i] == best) return static_cast<int32_t>(i);
  }
  return 0;
}

Sampler::Sampler(SamplingParams params, std::unique_ptr<TokenConstraint> constraint)
    : params_(std::move(params)), constraint_(std::move(constraint)) {}

bool Sampler::IsPlainGreedy() const {
  return params_.temperature == 0.0f && params_.logit_bias.empty() &&
         params_.repetition_penalty == 1.0f && params_.frequency_penalty == 0.0f &&
         params_.presence_penalty == 0.0f;
}

absl::StatusOr<SampledToken> Sampler::Sample(absl::Span<const float> logits,
                                             absl::Span<const int32_t> history) {
  const absl::StatusOr<int32_t> id = Choose(logits, history);
  if (!id.ok()) return id.status();
  if (constraint_ != nullptr) {
    if (absl::Status status = constraint_->Accept(*id); !status.ok()) return status;
  }
  ++drawn_;
  SampledToken token;
  token.token_id = *id;
  if (params_.logprobs || params_.top_logprobs > 0) ReportLogprobs(logits, &token);
  return token;
}

absl::StatusOr<int32_t> Sampler::Choose(absl::Span<const float> logits,
                                        absl::Span<const int32_t> history) {
  if (IsPlainGreedy()) {
    const int32_t best = ArgMax(logits);
    if (constraint_ == nullptr) return best;
    // Mostly the model keeps to the grammar by itself.
    const absl::StatusOr<bool> allowed = constraint_->Allows(best);
    if (!allowed.ok()) return allowed.status();
    if (*allowed) return best;
  }
  candidates_.resize(logits.size());
  for (size_t i = 0; i < logits.size(); ++i) {
    candidates_[i] = {static_cast<int32_t>(i), logits[i]};
  }
  sorted_ = 0;
  ApplyBias();
  ApplyPenalties(history);
  if (constraint_ != nullptr) {
    if (absl::Status status = ApplyConstraint(); !status.ok()) return status;
  }
  if (params_.temperature == 0.0f) {
    SortBest(1);
    return candidates_.front().id;
  }
  KeepTopK();
  KeepTopP();
  KeepMinP();
  return Draw();
}

absl::Status Sampler::ApplyConstraint() {
  absl::Status status = constraint_->Allowed(&allowed_);
  if (!status.ok()) return status;
  const auto out = [this](const Candidate& c) {
    return !allowed_[c.id] || c.logit == -std::numeric_limits<float>::infinity();
  };
  candidates_.erase(std::remove_if(candidates_.begin(), candidates_.end(), out), candidates_.end());
  if (!candidates_.empty()) return absl::OkStatus();
  return MakeError(v1::REASON_GRAMMAR_DEAD_END,
                   "expected a token that continues the text as its grammar wants it, this "
                   "vocabulary has none or a bias forbids it; use a grammar whose texts the "
                   "model's tokens can spell");
}

void Sampler::ApplyBias() {
  for (const auto& [id, bias] : params_.logit_bias) candidates_[id].logit += bias;
}

void Sampler::ApplyPenalties(absl::Span<const int32_t> history) {
  const bool none = params_.repetition_penalty == 1.0f && params_.frequency_penalty == 0.0f &&
                    params_.presence_penalty == 0.0f;
  if (none) return;
  const size_t window = std::min<size_t>(history.size(), params_.penalty_last_n);
  seen_.assign(history.end() - window, history.end());
  std::sort(seen_.begin(), seen_.end());
  for (size_t begin = 0; begin < seen_.size();) {
    size_t end = begin;
    while (end < seen_.size() && seen_[end] == seen_[begin]) ++end;
    const auto count = static_cast<float>(end - begin);
    float& logit = candidates_[seen_[begin]].logit;
    // Dividing a negative logit would make a repeated token more likely.
    logit = logit > 0.0f ? logit / params_.repetition_penalty : logit * params_.repetition_penalty;
    logit -= count * params_.frequency_penalty + params_.presence_penalty;
    begin = end;
  }
}

void Sampler::SortBest(size_t count) {
  count = std::min(count, candidates_.size());
  if (count <= sorted_) return;
  std::partial_sort(candidates_.begin() + sorted_, candidates_.begin() + count, candidates_.end(),
                    [](const Candidate& a, const Candidate& b) {
                      return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
                    });
  sorted_ = count;
}

void Sampler::KeepTopK() {
  if (params_.top_k <= 0 || static_cast<size_t>(params_.top_k) >= candidates_.size()) return;
  SortBest(params_.top_k);
  candidates_.resize(params_.top_k);
}

void Sampler::KeepTopP() {
  if (params_.top_p >= 1.0f) return;
  SortBest(1);
  const float max = candidates_.front().logit;
  double total = 0.0;
  for (const Candidate& c : candidates_) total += std::exp(static_cast<double>(c.logit) - max);
  // A vocabulary is large and the nucleus mostly small: sort only as far as it reaches.
  const double target = total * params_.top_p;
  double sum = 0.0;
  size_t kept = 0;
  for (size_t sort_to = 64; kept < candidates_.size(); sort_to *= 4) {
    SortBest(sort_to);
    while (kept < sorted_) {
      sum += std::exp(static_cast<double>(candidates_[kept].logit) - max);
      ++kept;
      if (sum >= target) {
        candidates_.resize(kept);
        sorted_ = kept;
        return;
      }
    }
  }
}

void Sampler::KeepMinP() {
  if (params_.min_p <= 0.0f) return;
  SortBest(1);
  const double bound = candidates_.front().logit + std::log(static_cast<double>(params_.min_p));
  const auto keep = [bound](const Candidate& c) { return c.logit >= bound; };
  // Stable: what is sorted stays sorted, the rest stays in id order but for the first.
  const Candidate best = candidates_.front();
  candidates_.erase(std::stable_partition(candidates_.begin() + 1, candidates_.end(), keep),
                    candidates_.end());
  candidates_.front() = best;
  sorted_ = std::min(sorted_, candidates_.size());
}

int32_t Sampler::Draw() {
  SortBest(1);
  const double max = candidates_.front().logit;
  const double scale = 1.0 / params_.temperature;
  double total = 0.0;
  for (const Candidate& c : candidates_) total += std::exp((c.logit - max) * scale);
  const double target = Uniform(params_.seed, drawn_) * total;
  double sum = 0.0;
  for (const Candidate& c : candidates_) {
    sum += std::exp((c.logit - max) * scale);
    if (sum > target) return c.id;
  }
  return candidates_.front().id;
}

void Sampler::ReportLogprobs(absl::Span<const float> logits, SampledToken* token) const {
  const double total = LogSumExp(logits);
  const auto logprob = [&](int32_t id) {
    return static_cast<float>(static_cast<double>(logits[id]) - total);
  };
  token->logprob = logprob(token->token_id);
  const size_t count = std::min<size_t>(params_.top_logprobs, logits.size());
  if (count == 0) return;
  std::vector<int32_t> ids(logits.size());
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i);
  std::partial_sort(ids.begin(), ids.begin() + count, ids.end(), [&](int32_t a, int32_t b) {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
  });
  for (size_t i = 0; i < count; ++i) token->top.push_back({ids[i], logprob(ids[i])});
}

}  // namespace meshnet
