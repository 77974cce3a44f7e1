// The vocabulary of a loaded GGUF.
#ifndef MESHNET_CC_SHARD_ENGINE_LLAMA_LLAMA_TOKENIZER_H_
#define MESHNET_CC_SHARD_ENGINE_LLAMA_LLAMA_TOKENIZER_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "cc/shard_engine/shard_engine.h"

struct llama_model;
struct llama_vocab;

namespace meshnet {

class LlamaTokenizer : public Tokenizer {
 public:
  // `model` outlives this.
  explicit LlamaTokenizer(const llama_model* model);

  uint32_t vocabulary_size() const override { return vocabulary_size_; }
  bool add_bos() const override;
  bool add_eos() const override;
  std::vector<SpecialToken> special_tokens() const override;
  std::vector<int32_t> end_of_generation_ids() const override { return end_of_generation_; }
  std::string chat_template() const override;
  std::map<std::string, std::string> named_chat_templates() const override;
  // FIELD_OUT_OF_BOUNDS for a text above 64 MiB, ENGINE_FAILURE for one that the vocabulary's
  // pre-tokenizer fails on.
  absl::StatusOr<std::vector<int32_t>> Tokenize(absl::string_view text, bool add_special,
                                                bool parse_special) const override;
  absl::StatusOr<std::string> Detokenize(absl::Span<const int32_t> token_ids,
                                         bool unparse_special) const override;
  absl::StatusOr<std::string> Piece(int32_t token_id) const override;
  bool IsControl(int32_t token_id) const override;

  // `token_id` is inside the vocabulary.
  bool IsEndOfGeneration(int32_t token_id) const;

 private:
  absl::Status CheckId(int32_t token_id) const;

  const llama_model* model_;
  const llama_vocab* vocab_;
  const uint32_t vocabulary_size_;
  std::vector<int32_t> end_of_generation_;
};

}  // namespace meshnet

#endif  // MESHNET_CC_SHARD_ENGINE_LLAMA_LLAMA_TOKENIZER_H_
