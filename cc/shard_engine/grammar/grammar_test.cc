#include "cc/shard_engine/grammar/grammar.h"

#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/common/status.h"
#include "cc/shard_engine/fake/fake_tokenizer.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace meshnet {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Bytes as in the fake engine's vocabulary, and pieces of several bytes behind them.
class PieceTokenizer : public FakeTokenizer {
 public:
  explicit PieceTokenizer(std::vector<std::string> pieces)
      : FakeTokenizer(kMinVocabulary + static_cast<uint32_t>(pieces.size())),
        pieces_(std::move(pieces)) {}

  absl::StatusOr<std::string> Piece(int32_t token_id) const override {
    const auto extra = token_id - static_cast<int32_t>(kMinVocabulary);
    return extra < 0 ? FakeTokenizer::Piece(token_id) : pieces_[extra];
  }
  bool IsControl(int32_t token_id) const override {
    return token_id >= kBos && token_id < static_cast<int32_t>(kMinVocabulary);
  }

 private:
  const std::vector<std::string> pieces_;
};

std::shared_ptr<const GrammarVocabulary> Bytes() {
  static const auto* const vocabulary = new std::shared_ptr<const GrammarVocabulary>(
      std::make_shared<GrammarVocabulary>(FakeTokenizer(FakeTokenizer::kMinVocabulary)));
  return *vocabulary;
}

absl::StatusOr<std::unique_ptr<TokenConstraint>> TryMake(
    const std::string& grammar, std::shared_ptr<const GrammarVocabulary> vocabulary = Bytes()) {
  SamplingParams params;
  params.grammar = grammar;
  return MakeGrammarConstraint(params, std::move(vocabulary));
}

std::unique_ptr<TokenConstraint> Make(
    const std::string& grammar, std::shared_ptr<const GrammarVocabulary> vocabulary = Bytes()) {
  auto made = TryMake(grammar, std::move(vocabulary));
  EXPECT_TRUE(made.ok()) << made.status();
  return *std::move(made);
}

std::vector<int32_t> AllowedIds(TokenConstraint& constraint) {
  std::vector<bool> allowed;
  const absl::Status status = constraint.Allowed(&allowed);
  EXPECT_TRUE(status.ok()) << status;
  std::vector<int32_t> ids;
  for (size_t id = 0; id < allowed.size(); ++id) {
    if (allowed[id]) ids.push_back(static_cast<int32_t>(id));
  }
  return ids;
}

// Whether all of `text` goes, byte by byte.
bool Goes(TokenConstraint& constraint, const std::string& text) {
  for (const char c : text) {
    const int32_t id = static_cast<unsigned char>(c);
    if (!*constraint.Allows(id)) return false;
    EXPECT_TRUE(constraint.Accept(id).ok());
  }
  return true;
}

bool IsComplete(TokenConstraint& constraint) { return *constraint.Allows(FakeTokenizer::kEos); }

// Whether the grammar's texts hold `text`.
bool Matches(const std::string& grammar, const std::string& text) {
  const auto constraint = Make(grammar);
  return Goes(*constraint, text) && IsComplete(*constraint);
}

TEST(GrammarTest, NoGrammarIsNoConstraint) {
  const auto made = MakeGrammarConstraint({}, nullptr);
  ASSERT_TRUE(made.ok());
  EXPECT_EQ(*made, nullptr);
  EXPECT_TRUE(CheckGrammar("", "").ok());
}

TEST(GrammarTest, AllowsItsTextsAndTheirBeginnings) {
  const std::string grammar = "root ::= \"yes\" | \"no\" \"!\"? # comment\n";
  EXPECT_TRUE(Matches(grammar, "yes"));
  EXPECT_TRUE(Matches(grammar, "no"));
  EXPECT_TRUE(Matches(grammar, "no!"));
  EXPECT_FALSE(Matches(grammar, "ye"));
  EXPECT_FALSE(Matches(grammar, "yes!"));
  EXPECT_THAT(AllowedIds(*Make(grammar)), ElementsAre('n', 'y'));
}

TEST(GrammarTest, TheEndComesWhenTheTextIsCompleteAndThenNothingElse) {
  const auto constraint = Make("root ::= \"a\" \"b\"?");
  EXPECT_THAT(AllowedIds(*constraint), ElementsAre('a'));
  ASSERT_TRUE(constraint->Accept('a').ok());
  EXPECT_THAT(AllowedIds(*constraint), ElementsAre('b', FakeTokenizer::kEos));
  ASSERT_TRUE(constraint->Accept('b').ok());
  EXPECT_THAT(AllowedIds(*constraint), ElementsAre(FakeTokenizer::kEos));
  // A client may ask to go on behind the end.
  ASSERT_TRUE(constraint->Accept(FakeTokenizer::kEos).ok());
  EXPECT_THAT(AllowedIds(*constraint), ElementsAre(FakeTokenizer::kEos));
}

TEST(GrammarTest, AnEndInTheMiddleOfALongerTextEndsIt) {
  const auto constraint = Make("root ::= \"a\"*");
  ASSERT_TRUE(constraint->Accept(FakeTokenizer::kEos).ok());
  EXPECT_THAT(AllowedIds(*constraint), ElementsAre(FakeTokenizer::kEos));
}

TEST(GrammarTest, TokensMayCrossRulesAndEndInsideThem) {
  const auto vocabulary = std::make_shared<GrammarVocabulary>(
      PieceTokenizer({"ab", "abc", "abcd", "b", "abx", "\xc5", "a\xc5"}));
  const int32_t first = FakeTokenizer::kMinVocabulary;
  const auto constraint = Make("root ::= a (\"c\" | \"\\u0142\") \na ::= \"ab\"", vocabulary);
  EXPECT_THAT(AllowedIds(*constraint), ElementsAre('a', first, first + 1));
  ASSERT_TRUE(constraint->Accept(first).ok());
  // Half of U+0142, as a byte and as a piece.
  EXPECT_THAT(AllowedIds(*constraint), ElementsAre('c', 0xc5, first + 5));
  ASSERT_TRUE(constraint->Accept(first + 5).ok());
  EXPECT_THAT(AllowedIds(*constraint), ElementsAre(0x82));
  ASSERT_TRUE(constraint->Accept(0x82).ok());
  EXPECT_THAT(AllowedIds(*constraint), ElementsAre(FakeTokenizer::kEos));
}

TEST(GrammarTest, NothingButUtf8ComesOut) {
  const std::string anything = "root ::= .*";
  EXPECT_TRUE(Matches(anything, "A\xc5\x82\xe2\x82\xac\xf0\x9f\x99\x82"));
  for (const char* const bad : {"\x80", "\xc0", "\xc1", "\xf5", "\xff", "\xe0\x80", "\xe0\x9f",
                                "\xed\xa0", "\xf0\x8f", "\xf4\x90",
                                "\xc5"
                                "A",
                                "\xe2\x82"
                                "A"}) {
    EXPECT_FALSE(Goes(*Make(anything), bad)) << bad;
  }
  EXPECT_FALSE(*Make(anything)->Allows(0)) << "the zero byte";
  const auto half = Make(anything);
  EXPECT_TRUE(Goes(*half, "\xf0\x9f"));
  EXPECT_FALSE(IsComplete(*half)) << "in the middle of a character";
  std::vector<int32_t> continuations;
  for (int32_t id = 0x80; id < 0xc0; ++id) continuations.push_back(id);
  EXPECT_EQ(AllowedIds(*half), continuations);
}

TEST(GrammarTest, ControlTokensAreNoText) {
  const std::string grammar = "root ::= \"<bos>\"";
  EXPECT_FALSE(*Make(grammar)->Allows(FakeTokenizer::kBos));
  EXPECT_TRUE(Matches(grammar, "<bos>"));
}

TEST(GrammarTest, RefusesWhatIsNoGrammar) {
  std::string deep = "root ::= ";
  for (int i = 0; i < 300; ++i) deep += "(";
  const std::pair<std::string, std::string> cases[] = {
      {"nonsense", "expecting ::="},
      {"root ::= other", "Undefined rule identifier 'other'"},
      {"other ::= \"a\"", "a rule `root`"},
      {"root ::= \"a", "unexpected end of input"},
      {"root ::= (\"a\"", "expecting ')'"},
      {"root ::= [a-", "unexpected end of input"},
      {"root ::= *", "expecting preceding item"},
      {"root ::= [] *", "expecting preceding item"},
      {"root ::= \"\\q\"", "unknown escape"},
      {"root ::= \"\\u12\"", "hex chars"},
      {"root ::= \"a\"{3,1}", "lower bound"},
      {"root ::= \"a\"{5000}", "number of repetitions"},
      {"root ::= \"a\"{99999999999999999999}", ""},
      {absl::StrCat("root ::= \"", std::string(1000, 'a'), "\"{1000}"), "too large"},
      {absl::StrCat("root ::= \"", std::string(1000, 'a'), "\"{0,1000}"), "too large"},
      {deep, "groups within groups"},
      {"root ::= <eos>", "no vocab"},
      {"root ::= <[99999999999999999999]>", ""},
      {"root ::= root", "left recursion"},
      {"root ::= root \"a\" | \"b\"", "left recursion"},
      {"root ::= a\na ::= b \"x\"\nb ::= a \"y\" | \"z\"", "left recursion"},
      // Through a rule that is empty by way of another one.
      {"root ::= a\na ::= b a \"x\" | \"y\"\nb ::= c\nc ::= \"\"", "left recursion"},
      {"root ::= \"\xff\"", "UTF-8"},
      {std::string("root ::= \"a\0\"", 13), "zero byte"},
  };
  for (const auto& [grammar, message] : cases) {
    const auto made = TryMake(grammar);
    ASSERT_FALSE(made.ok()) << grammar.substr(0, 100);
    EXPECT_EQ(ReasonOf(made.status()), v1::REASON_GRAMMAR_INVALID) << grammar.substr(0, 100);
    EXPECT_THAT(std::string(made.status().message()), HasSubstr(message)) << grammar.substr(0, 100);
    EXPECT_EQ(ReasonOf(CheckGrammar(grammar, "")), v1::REASON_GRAMMAR_INVALID);
  }
}

TEST(GrammarTest, LongChainsOfRulesAreRead) {
  // Two ways through each rule: 2^2000 paths.
  std::string grammar = "root ::= r0\n";
  for (int i = 0; i < 2000; ++i) {
    absl::StrAppend(&grammar, "r", i, " ::= r", i + 1, " | r", i + 1, "\n");
  }
  absl::StrAppend(&grammar, "r2000 ::= \"a\"\n");
  EXPECT_TRUE(Matches(grammar, "a"));
}

TEST(GrammarTest, RefusesWhatTakesTooMuchWork) {
  // After each "a" any of the others may come next.
  std::string grammar = "root ::=";
  for (int i = 0; i < 9000; ++i) grammar += " \"a\"?";
  const auto made = TryMake(grammar);
  absl::Status status = made.status();
  for (int i = 0; i < 10 && status.ok(); ++i) status = (*made)->Accept('a');
  EXPECT_TRUE(ReasonOf(status) == v1::REASON_GRAMMAR_INVALID ||
              ReasonOf(status) == v1::REASON_GRAMMAR_TOO_COSTLY)
      << status;
  // Smaller: it can be read, and a long token cannot be matched.
  const auto vocabulary =
      std::make_shared<GrammarVocabulary>(PieceTokenizer({std::string(300, 'a')}));
  grammar = "root ::=";
  for (int i = 0; i < 600; ++i) grammar += " \"a\"?";
  const auto small = Make(grammar, vocabulary);
  std::vector<bool> allowed;
  EXPECT_EQ(ReasonOf(small->Allowed(&allowed)), v1::REASON_GRAMMAR_TOO_COSTLY);
}

// Any text: what comes out is a refusal with its reason, or a constraint that keeps its word.
TEST(GrammarTest, MutatedGrammarsAreRefusedOrServed) {
  const std::string seeds[] = {
      "root ::= object\nobject ::= \"{\" (pair (\",\" pair)*)? \"}\"\npair ::= [a-z]{1,8} \":\" "
      "(object | [0-9]+)\n",
      "root ::= (\"a\" | [^b-d\\x00-\\x1f] | .){2,30} \"\\u0142\"? !<[7]> # end\n",
      "root ::= x y | y x\nx ::= \"0\"? x2\nx2 ::= [xX]* \"-\"\ny ::= (y2 \"]\")+\ny2 ::= \"[\"\n",
  };
  const std::string alphabet = "\"[]()<>{}|*+?.^!-:=\\, \nax09#\x80\xc5";
  std::minstd_rand random(1);
  int served = 0;
  for (int round = 0; round < 6000; ++round) {
    std::string grammar = seeds[round % 3];
    const unsigned edits = 1 + random() % 4;
    for (unsigned i = 0; i < edits; ++i) {
      const size_t at = random() % grammar.size();
      const size_t length = std::min<size_t>(random() % 12, grammar.size() - at);
      switch (random() % 4) {
        case 0:
          grammar[at] = alphabet[random() % alphabet.size()];
          break;
        case 1:
          grammar.insert(at, 1, alphabet[random() % alphabet.size()]);
          break;
        case 2:
          grammar.erase(at, length);
          break;
        default:
          grammar.insert(random() % grammar.size(), grammar.substr(at, length));
      }
      if (grammar.empty()) grammar = "r";
    }
    const auto made = TryMake(grammar);
    if (!made.ok()) {
      ASSERT_EQ(ReasonOf(made.status()), v1::REASON_GRAMMAR_INVALID) << grammar;
      continue;
    }
    ++served;
    for (int token = 0; token < 12; ++token) {
      std::vector<bool> allowed;
      const absl::Status status = (*made)->Allowed(&allowed);
      if (!status.ok()) {
        ASSERT_EQ(ReasonOf(status), v1::REASON_GRAMMAR_TOO_COSTLY) << grammar;
        break;
      }
      std::vector<int32_t> ids;
      for (size_t id = 0; id < allowed.size(); ++id) {
        if (allowed[id]) ids.push_back(static_cast<int32_t>(id));
      }
      if (ids.empty()) break;
      const int32_t next = ids[random() % ids.size()];
      ASSERT_TRUE(*(*made)->Allows(next)) << grammar;
      const absl::Status accepted = (*made)->Accept(next);
      ASSERT_TRUE(accepted.ok()) << accepted << "\n" << grammar;
    }
  }
  EXPECT_GT(served, 300);
}

}  // namespace
}  // namespace meshnet
