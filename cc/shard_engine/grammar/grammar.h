// Texts that a grammar or a JSON schema allows, token by token, with llama.cpp's grammars.
//
// Grammars come from strangers. What one may cost is bounded when it is read (its size after the
// expansion of repetitions, groups within groups) and at every token (elements of stacks and
// candidates looked at, which is the same on every machine). Nothing that llama.cpp throws gets
// out.
//
//   auto vocabulary = std::make_shared<const GrammarVocabulary>(engine.tokenizer());
//   auto constraint = MakeGrammarConstraint(params, vocabulary);
//   Sampler sampler(params, *std::move(constraint));
#ifndef MESHNET_CC_SHARD_ENGINE_GRAMMAR_GRAMMAR_H_
#define MESHNET_CC_SHARD_ENGINE_GRAMMAR_GRAMMAR_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "cc/shard_engine/sampler.h"
#include "cc/shard_engine/shard_engine.h"

namespace meshnet {

// GRAMMAR_INVALID when a grammar or JSON schema could not be used with any vocabulary, OK when both
// are empty. What is above kMaxGrammarBytes is not looked at: ValidateSampling refuses it.
absl::Status CheckGrammar(const std::string& grammar, const std::string& json_schema);

// What the tokens of a vocabulary spell, as grammars see it. Immutable.
class GrammarVocabulary {
 public:
  // Bytes that it takes for a token, at most: pieces of 8 characters on average.
  static constexpr uint64_t kBytesPerToken = 96;

  explicit GrammarVocabulary(const Tokenizer& tokenizer);

  enum class Kind : uint8_t {
    // Never drawn under a grammar: control tokens, and those without bytes.
    kUnusable,
    kEndOfGeneration,
    kText,
  };

  uint32_t size() const { return static_cast<uint32_t>(kinds_.size()); }
  Kind kind(int32_t id) const { return kinds_[id]; }
  absl::string_view piece(int32_t id) const {
    return absl::string_view(bytes_).substr(ends_[id], ends_[id + 1] - ends_[id]);
  }

 private:
  std::vector<Kind> kinds_;
  std::string bytes_;
  std::vector<uint32_t> ends_ = {0};  // [size + 1]
};

// Null when `params` has neither grammar nor schema. GRAMMAR_INVALID.
absl::StatusOr<std::unique_ptr<TokenConstraint>> MakeGrammarConstraint(
    const SamplingParams& params, std::shared_ptr<const GrammarVocabulary> vocabulary);

}  // namespace meshnet

#endif  // MESHNET_CC_SHARD_ENGINE_GRAMMAR_GRAMMAR_H_
