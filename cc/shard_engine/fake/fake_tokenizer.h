// A byte-level vocabulary: ids 0-255 are bytes, then a few special tokens, then unused ids.
#ifndef MESHNET_CC_SHARD_ENGINE_FAKE_FAKE_TOKENIZER_H_
#define MESHNET_CC_SHARD_ENGINE_FAKE_FAKE_TOKENIZER_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "cc/shard_engine/shard_engine.h"

namespace meshnet {

class FakeTokenizer : public Tokenizer {
 public:
  static constexpr int32_t kBos = 256;
  static constexpr int32_t kEos = 257;
  static constexpr int32_t kUser = 258;
  static constexpr int32_t kAssistant = 259;
  static constexpr uint32_t kMinVocabulary = 260;

  // `vocabulary_size` >= kMinVocabulary.
  explicit FakeTokenizer(uint32_t vocabulary_size) : vocabulary_size_(vocabulary_size) {}

  uint32_t vocabulary_size() const override { return vocabulary_size_; }
  bool add_bos() const override { return true; }
  bool add_eos() const override { return false; }
  std::vector<SpecialToken> special_tokens() const override;
  std::vector<int32_t> end_of_generation_ids() const override { return {kEos}; }
  std::string chat_template() const override;
  std::map<std::string, std::string> named_chat_templates() const override { return {}; }
  absl::StatusOr<std::vector<int32_t>> Tokenize(absl::string_view text, bool add_special,
                                                bool parse_special) const override;
  absl::StatusOr<std::string> Detokenize(absl::Span<const int32_t> token_ids,
                                         bool unparse_special) const override;
  absl::StatusOr<std::string> Piece(int32_t token_id) const override;
  bool IsControl(int32_t token_id) const override { return token_id >= kBos; }

 private:
  const uint32_t vocabulary_size_;
};

}  // namespace meshnet

#endif  // MESHNET_CC_SHARD_ENGINE_FAKE_FAKE_TOKENIZER_H_
