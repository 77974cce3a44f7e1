#include "cc/shard_engine/fake/fake_tokenizer.h"

#include <iterator>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "cc/common/status.h"

namespace meshnet {
namespace {

constexpr int32_t kBytes = 256;
constexpr absl::string_view kSpecial[] = {"<bos>", "<eos>", "<|user|>", "<|assistant|>"};

}  // namespace

std::vector<Tokenizer::SpecialToken> FakeTokenizer::special_tokens() const {
  return {{"bos", kBos}, {"eos", kEos}, {"control", kUser}, {"control", kAssistant}};
}

std::string FakeTokenizer::chat_template() const {
  return "{% for message in messages %}"
         "{% if message['role'] == 'assistant' %}<|assistant|>{% else %}<|user|>{% endif %}"
         "{{ message['content'] }}{% endfor %}"
         "{% if add_generation_prompt %}<|assistant|>{% endif %}";
}

absl::StatusOr<std::vector<int32_t>> FakeTokenizer::Tokenize(absl::string_view text,
                                                             bool add_special,
                                                             bool parse_special) const {
  std::vector<int32_t> ids;
  ids.reserve(text.size() + 1);
  if (add_special) ids.push_back(kBos);
  while (!text.empty()) {
    size_t taken = 0;
    for (size_t i = 0; parse_special && taken == 0 && i < std::size(kSpecial); ++i) {
      if (!absl::StartsWith(text, kSpecial[i])) continue;
      ids.push_back(kBytes + static_cast<int32_t>(i));
      taken = kSpecial[i].size();
    }
    if (taken == 0) {
      ids.push_back(static_cast<unsigned char>(text.front()));
      taken = 1;
    }
    text.remove_prefix(taken);
  }
  return ids;
}

absl::StatusOr<std::string> FakeTokenizer::Detokenize(absl::Span<const int32_t> token_ids,
                                                      bool unparse_special) const {
  std::string text;
  for (const int32_t id : token_ids) {
    const absl::StatusOr<std::string> piece = Piece(id);
    if (!piece.ok()) return piece.status();
    if (id < kBytes || unparse_special) absl::StrAppend(&text, *piece);
  }
  return text;
}

absl::StatusOr<std::string> FakeTokenizer::Piece(int32_t token_id) const {
  if (token_id < 0 || static_cast<uint32_t>(token_id) >= vocabulary_size_) {
    return MakeError(
        v1::REASON_TOKEN_OUT_OF_RANGE,
        absl::StrCat("expected token ids in [0, ", vocabulary_size_, "), got ", token_id));
  }
  if (token_id < kBytes) return std::string(1, static_cast<char>(token_id));
  const auto special = static_cast<size_t>(token_id - kBytes);
  if (special < std::size(kSpecial)) return std::string(kSpecial[special]);
  return absl::StrCat("<unused", token_id, ">");
}

}  // namespace meshnet
