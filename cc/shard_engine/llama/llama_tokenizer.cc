#include "cc/shard_engine/llama/llama_tokenizer.h"

#include <algorithm>
#include <exception>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "cc/common/status.h"
#include "llama.h"

namespace meshnet {
namespace {

constexpr size_t kMaxTextBytes = 64u << 20;
constexpr absl::string_view kTemplateKey = "tokenizer.chat_template";

}  // namespace

LlamaTokenizer::LlamaTokenizer(const llama_model* model)
    : model_(model),
      vocab_(llama_model_get_vocab(model)),
      vocabulary_size_(static_cast<uint32_t>(llama_vocab_n_tokens(vocab_))) {
  for (int32_t id = 0; id < static_cast<int32_t>(vocabulary_size_); ++id) {
    if (llama_vocab_is_eog(vocab_, id)) end_of_generation_.push_back(id);
  }
}

bool LlamaTokenizer::add_bos() const { return llama_vocab_get_add_bos(vocab_); }
bool LlamaTokenizer::add_eos() const { return llama_vocab_get_add_eos(vocab_); }

std::vector<Tokenizer::SpecialToken> LlamaTokenizer::special_tokens() const {
  std::vector<SpecialToken> tokens;
  const auto add = [&tokens](const char* role, int32_t id) {
    if (id != LLAMA_TOKEN_NULL) tokens.push_back({role, id});
  };
  add("bos", llama_vocab_bos(vocab_));
  add("eos", llama_vocab_eos(vocab_));
  add("eot", llama_vocab_eot(vocab_));
  add("sep", llama_vocab_sep(vocab_));
  add("nl", llama_vocab_nl(vocab_));
  add("pad", llama_vocab_pad(vocab_));
  add("mask", llama_vocab_mask(vocab_));
  std::set<int32_t> named;
  for (const SpecialToken& token : tokens) named.insert(token.token_id);
  for (int32_t id = 0; id < static_cast<int32_t>(vocabulary_size_); ++id) {
    if (IsControl(id) && named.count(id) == 0) {
      tokens.push_back({"control", id});
    }
  }
  return tokens;
}

std::string LlamaTokenizer::chat_template() const {
  const char* text = llama_model_chat_template(model_, nullptr);
  return text == nullptr ? "" : text;
}

std::map<std::string, std::string> LlamaTokenizer::named_chat_templates() const {
  std::map<std::string, std::string> templates;
  for (int32_t i = 0; i < llama_model_meta_count(model_); ++i) {
    char key[256] = {};
    if (llama_model_meta_key_by_index(model_, i, key, sizeof(key)) < 0) continue;
    absl::string_view name = key;
    if (!absl::ConsumePrefix(&name, kTemplateKey) || !absl::ConsumePrefix(&name, ".")) continue;
    const std::string name_text(name);
    const char* text = llama_model_chat_template(model_, name_text.c_str());
    if (text != nullptr) templates[name_text] = text;
  }
  return templates;
}

absl::StatusOr<std::vector<int32_t>> LlamaTokenizer::Tokenize(absl::string_view text,
                                                              bool add_special,
                                                              bool parse_special) const {
  if (text.size() > kMaxTextBytes) {
    return MakeError(
        v1::REASON_FIELD_OUT_OF_BOUNDS,
        absl::StrCat("expected a text of at most ", kMaxTextBytes, " bytes, got ", text.size()));
  }
  // Pre-tokenizers throw on text that their expressions cannot handle.
  try {
    // A token is at least a byte, but for those that are added at the ends.
    std::vector<int32_t> ids(text.size() + 2);
    int32_t count =
        llama_tokenize(vocab_, text.data(), static_cast<int32_t>(text.size()), ids.data(),
                       static_cast<int32_t>(ids.size()), add_special, parse_special);
    if (count < 0) {
      ids.resize(static_cast<size_t>(-static_cast<int64_t>(count)));
      count = llama_tokenize(vocab_, text.data(), static_cast<int32_t>(text.size()), ids.data(),
                             static_cast<int32_t>(ids.size()), add_special, parse_special);
    }
    if (count < 0) {
      return MakeError(v1::REASON_ENGINE_FAILURE,
                       absl::StrCat("expected tokens of a text of ", text.size(),
                                    " bytes, llama.cpp gave none twice; send it in parts"));
    }
    ids.resize(count);
    return ids;
  } catch (const std::exception& error) {
    return MakeError(v1::REASON_ENGINE_FAILURE,
                     absl::StrCat("the text does not tokenize: ", error.what()));
  }
}

absl::StatusOr<std::string> LlamaTokenizer::Detokenize(absl::Span<const int32_t> token_ids,
                                                       bool unparse_special) const {
  for (const int32_t id : token_ids) {
    const absl::Status status = CheckId(id);
    if (!status.ok()) return status;
  }
  try {
    std::string text(token_ids.size() * 8 + 64, '\0');
    for (int attempt = 0; attempt < 2; ++attempt) {
      const int32_t size = llama_detokenize(
          vocab_, token_ids.data(), static_cast<int32_t>(token_ids.size()), &text[0],
          static_cast<int32_t>(text.size()), /*remove_special=*/false, unparse_special);
      if (size >= 0) {
        text.resize(size);
        return text;
      }
      text.resize(static_cast<size_t>(-static_cast<int64_t>(size)));
    }
    return MakeError(v1::REASON_ENGINE_FAILURE,
                     absl::StrCat("expected the text of ", token_ids.size(),
                                  " tokens, llama.cpp gave none twice; ask for fewer at once"));
  } catch (const std::exception& error) {
    return MakeError(v1::REASON_ENGINE_FAILURE,
                     absl::StrCat("the tokens do not detokenize: ", error.what()));
  }
}

absl::StatusOr<std::string> LlamaTokenizer::Piece(int32_t token_id) const {
  const absl::Status status = CheckId(token_id);
  if (!status.ok()) return status;
  try {
    std::string piece(64, '\0');
    for (int attempt = 0; attempt < 2; ++attempt) {
      const int32_t size =
          llama_token_to_piece(vocab_, token_id, &piece[0], static_cast<int32_t>(piece.size()),
                               /*lstrip=*/0, /*special=*/true);
      if (size >= 0) {
        piece.resize(size);
        return piece;
      }
      piece.resize(static_cast<size_t>(-static_cast<int64_t>(size)));
    }
    return MakeError(v1::REASON_ENGINE_FAILURE,
                     absl::StrCat("expected bytes for token ", token_id,
                                  ", llama.cpp gave none; check the artifact's vocabulary"));
  } catch (const std::exception& error) {
    return MakeError(v1::REASON_ENGINE_FAILURE,
                     absl::StrCat("the token has no piece: ", error.what()));
  }
}

bool LlamaTokenizer::IsControl(int32_t token_id) const {
  // What llama_tokenize reads only with parse_special.
  constexpr uint32_t kControl = LLAMA_TOKEN_ATTR_CONTROL | LLAMA_TOKEN_ATTR_UNKNOWN;
  return (llama_vocab_get_attr(vocab_, token_id) & kControl) != 0;
}

bool LlamaTokenizer::IsEndOfGeneration(int32_t token_id) const {
  return llama_vocab_is_eog(vocab_, token_id);
}

absl::Status LlamaTokenizer::CheckId(int32_t token_id) const {
  if (token_id >= 0 && static_cast<uint32_t>(token_id) < vocabulary_size_) return absl::OkStatus();
  return MakeError(
      v1::REASON_TOKEN_OUT_OF_RANGE,
      absl::StrCat("expected token ids in [0, ", vocabulary_size_, "), got ", token_id));
}

}  // namespace meshnet
