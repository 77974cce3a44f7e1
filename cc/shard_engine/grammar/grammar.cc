#include "cc/shard_engine/grammar/grammar.h"

#include <algorithm>
#include <cstddef>
#include <exception>
#include <functional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cc/common/status.h"
#include "cc/common/utf8.h"
#include "cc/shard_engine/grammar/json_schema.h"
#include "llama-grammar.h"

namespace meshnet {
namespace {

constexpr size_t kMaxElements = 1 << 18;
// Of groups: property names that a schema's other properties must not have nest as deep as they are
// long.
constexpr size_t kMaxGroups = 256;
// Elements looked at for one token; a JSON grammar and a vocabulary of 130,000 tokens take two to
// three million.
constexpr uint64_t kMaxWork = 8'000'000;

struct FreeGrammar {
  void operator()(llama_grammar* grammar) const { llama_grammar_free_impl(grammar); }
};
using GrammarPtr = std::unique_ptr<llama_grammar, FreeGrammar>;

// Bounds llama.cpp's matching on this thread for as long as it lives.
class WorkLimit {
 public:
  WorkLimit() { llama_grammar_set_work_limit(kMaxWork); }
  ~WorkLimit() { llama_grammar_set_work_limit(UINT64_MAX); }
  WorkLimit(const WorkLimit&) = delete;
  WorkLimit& operator=(const WorkLimit&) = delete;
};

absl::Status TooCostly(const std::exception& error) {
  return MakeError(v1::REASON_GRAMMAR_TOO_COSTLY,
                   absl::StrCat("expected a grammar that one token can be matched with in ",
                                kMaxWork, " steps: ", error.what(),
                                "; use one with fewer alternatives for the same text"));
}

absl::Status Invalid(absl::string_view what) {
  return MakeError(v1::REASON_GRAMMAR_INVALID, absl::StrCat("the grammar: ", what.substr(0, 500)));
}

absl::StatusOr<GrammarPtr> Parse(const std::string& text) {
  if (text.find('\0') != std::string::npos) return Invalid("expected text, got a zero byte");
  if (!IsValidUtf8(text)) return Invalid("expected UTF-8");
  try {
    const WorkLimit limit;
    llama_grammar_parser parser;
    parser.max_size = kMaxElements;
    parser.max_depth = kMaxGroups;
    parser.parse_or_throw(text.c_str());
    const auto root = parser.symbol_ids.find("root");
    if (root == parser.symbol_ids.end()) return Invalid("expected a rule `root`, found none");
    std::vector<const llama_grammar_element*> rules = parser.c_rules();
    GrammarPtr grammar(llama_grammar_init_impl(nullptr, rules.data(), rules.size(), root->second));
    if (grammar == nullptr) {
      return Invalid(
          "expected no left recursion: a rule must not come to itself before it has matched "
          "anything");
    }
    return grammar;
  } catch (const std::exception& error) {
    return Invalid(error.what());
  }
}

absl::StatusOr<GrammarPtr> Compile(const std::string& grammar, const std::string& json_schema) {
  if (json_schema.empty()) return Parse(grammar);
  const absl::StatusOr<std::string> text = GrammarOfJsonSchema(json_schema);
  if (!text.ok()) return text.status();
  return Parse(*text);
}

// Whether `bytes`, less than a character, begin one.
bool BeginsCharacter(absl::string_view bytes) {
  const auto lead = static_cast<unsigned char>(bytes[0]);
  const size_t length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (bytes.size() >= length) return false;
  // A character that goes on like this and ends in some way, if there is one: only the second byte
  // has bounds of its own.
  for (const char second : {'\x80', '\x90', '\xa0'}) {
    std::string whole(bytes);
    while (whole.size() < length) whole.push_back(whole.size() == 1 ? second : '\x80');
    if (Utf8CharacterBytes(whole) == length) return true;
  }
  return false;
}

// Appends the characters of `bytes`, and a zero behind them. False when they are no text that may
// still become UTF-8. `begun` is where an unfinished character begins.
bool Decode(absl::string_view bytes, std::vector<uint32_t>* characters, size_t* begun) {
  size_t at = 0;
  while (at < bytes.size()) {
    const absl::string_view rest = bytes.substr(at);
    const size_t length = Utf8CharacterBytes(rest);
    if (length == 0) break;
    const auto lead = static_cast<unsigned char>(rest[0]);
    uint32_t character = length == 1 ? lead : lead & (0x7fu >> length);
    for (size_t i = 1; i < length; ++i) {
      character = character << 6 | (static_cast<unsigned char>(rest[i]) & 0x3fu);
    }
    // Zero is the end of a text to llama.cpp.
    if (character == 0) return false;
    characters->push_back(character);
    at += length;
  }
  characters->push_back(0);
  *begun = at;
  return at == bytes.size() || BeginsCharacter(bytes.substr(at));
}

llama_partial_utf8 Partial(absl::string_view begun) {
  if (begun.empty()) return {0, 0};
  const auto lead = static_cast<unsigned char>(begun[0]);
  const int length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  uint32_t value = lead & (0x7fu >> length);
  for (size_t i = 1; i < begun.size(); ++i) {
    value = value << 6 | (static_cast<unsigned char>(begun[i]) & 0x3fu);
  }
  return {value, length - static_cast<int>(begun.size())};
}

class GrammarConstraint : public TokenConstraint {
 public:
  GrammarConstraint(GrammarPtr grammar, std::shared_ptr<const GrammarVocabulary> vocabulary)
      : grammar_(std::move(grammar)), vocabulary_(std::move(vocabulary)) {}

  absl::StatusOr<bool> Allows(int32_t token_id) override {
    std::vector<bool> allowed(1);
    const absl::Status status = Match(token_id, token_id + 1, &allowed);
    if (!status.ok()) return status;
    return allowed[0];
  }

  absl::Status Allowed(std::vector<bool>* allowed) override {
    allowed->assign(vocabulary_->size(), false);
    return Match(0, static_cast<int32_t>(vocabulary_->size()), allowed);
  }

  absl::Status Accept(int32_t token_id) override {
    // The end changes nothing: after it only the end may come again.
    if (vocabulary_->kind(token_id) == GrammarVocabulary::Kind::kEndOfGeneration) {
      ended_ = true;
      return absl::OkStatus();
    }
    const std::string piece(vocabulary_->piece(token_id));
    try {
      const WorkLimit limit;
      llama_grammar_accept_token(*grammar_, token_id, piece);
    } catch (const std::exception& error) {
      return TooCostly(error);
    }
    begun_ += piece;
    std::vector<uint32_t> characters;
    size_t begun = 0;
    Decode(begun_, &characters, &begun);
    begun_.erase(0, begun);
    return absl::OkStatus();
  }

 private:
  // Of the tokens [begin, end).
  absl::Status Match(int32_t begin, int32_t end, std::vector<bool>* allowed) {
    const llama_grammar_stacks& stacks = llama_grammar_get_stacks(grammar_.get());
    const bool complete =
        begun_.empty() && std::any_of(stacks.begin(), stacks.end(),
                                      [](const llama_grammar_stack& s) { return s.empty(); });
    characters_.clear();
    texts_.clear();
    std::string joined;
    for (int32_t id = begin; id < end; ++id) {
      if (vocabulary_->kind(id) == GrammarVocabulary::Kind::kEndOfGeneration) {
        (*allowed)[id - begin] = complete || ended_;
      }
      if (ended_ || vocabulary_->kind(id) != GrammarVocabulary::Kind::kText) continue;
      absl::string_view bytes = vocabulary_->piece(id);
      if (!begun_.empty()) {
        joined = absl::StrCat(begun_, bytes);
        bytes = joined;
      }
      const size_t first = characters_.size();
      size_t begun = 0;
      if (Decode(bytes, &characters_, &begun)) {
        texts_.push_back({id, first, Partial(bytes.substr(begun))});
      } else {
        characters_.resize(first);
      }
    }
    try {
      const WorkLimit limit;
      llama_grammar_candidates left;
      left.reserve(texts_.size());
      for (const Text& text : texts_) {
        (*allowed)[text.id - begin] = true;
        left.push_back(
            {static_cast<size_t>(text.id), characters_.data() + text.first, text.partial, text.id});
      }
      for (const llama_grammar_stack& stack : stacks) {
        left = llama_grammar_reject_candidates_for_stack(grammar_->rules, stack, left);
      }
      for (const llama_grammar_candidate& rejected : left) (*allowed)[rejected.id - begin] = false;
    } catch (const std::exception& error) {
      return TooCostly(error);
    }
    return absl::OkStatus();
  }

  struct Text {
    int32_t id;
    size_t first;  // in characters_
    llama_partial_utf8 partial;
  };

  const GrammarPtr grammar_;
  const std::shared_ptr<const GrammarVocabulary> vocabulary_;
  // The bytes of a character that is not complete yet.
  std::string begun_;
  bool ended_ = false;
  // Kept for their memory.
  std::vector<uint32_t> characters_;
  std::vector<Text> texts_;
};

}  // namespace

absl::Status CheckGrammar(const std::string& grammar, const std::string& json_schema) {
  if (grammar.empty() && json_schema.empty()) return absl::OkStatus();
  if (std::max(grammar.size(), json_schema.size()) > kMaxGrammarBytes) return absl::OkStatus();
  return Compile(grammar, json_schema).status();
}

GrammarVocabulary::GrammarVocabulary(const Tokenizer& tokenizer) {
  kinds_.resize(tokenizer.vocabulary_size(), Kind::kUnusable);
  ends_.reserve(kinds_.size() + 1);
  for (int32_t id = 0; static_cast<size_t>(id) < kinds_.size(); ++id) {
    if (!tokenizer.IsControl(id)) {
      const absl::StatusOr<std::string> piece = tokenizer.Piece(id);
      if (piece.ok() && !piece->empty()) {
        bytes_ += *piece;
        kinds_[id] = Kind::kText;
      }
    }
    ends_.push_back(static_cast<uint32_t>(bytes_.size()));
  }
  for (const int32_t id : tokenizer.end_of_generation_ids()) kinds_[id] = Kind::kEndOfGeneration;
}

absl::StatusOr<std::unique_ptr<TokenConstraint>> MakeGrammarConstraint(
    const SamplingParams& params, std::shared_ptr<const GrammarVocabulary> vocabulary) {
  if (params.grammar.empty() && params.json_schema.empty()) return nullptr;
  absl::StatusOr<GrammarPtr> grammar = Compile(params.grammar, params.json_schema);
  if (!grammar.ok()) return grammar.status();
  return std::make_unique<GrammarConstraint>(*std::move(grammar), std::move(vocabulary));
}

}  // namespace meshnet
