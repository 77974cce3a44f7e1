#include "cc/shard_engine/grammar/json_schema.h"

#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/common/status.h"
#include "cc/shard_engine/fake/fake_tokenizer.h"
#include "cc/shard_engine/grammar/grammar.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace meshnet {
namespace {

using ::testing::HasSubstr;

absl::StatusOr<std::unique_ptr<TokenConstraint>> TryMake(const std::string& schema) {
  static const auto* const vocabulary = new std::shared_ptr<const GrammarVocabulary>(
      std::make_shared<GrammarVocabulary>(FakeTokenizer(FakeTokenizer::kMinVocabulary)));
  SamplingParams params;
  params.json_schema = schema;
  return MakeGrammarConstraint(params, *vocabulary);
}

bool Matches(const std::string& schema, const std::string& document) {
  const auto made = TryMake(schema);
  EXPECT_TRUE(made.ok()) << made.status();
  if (!made.ok()) return false;
  for (const char c : document) {
    const int32_t id = static_cast<unsigned char>(c);
    if (!*(*made)->Allows(id)) return false;
    EXPECT_TRUE((*made)->Accept(id).ok());
  }
  return *(*made)->Allows(FakeTokenizer::kEos);
}

TEST(JsonSchemaTest, KeepsToTypes) {
  const std::string person =
      R"({"type": "object", "title": "Person", "properties": {"name": {"type": "string",
          "minLength": 1, "maxLength": 4}, "age": {"type": "integer", "minimum": 0,
          "maximum": 150}, "tags": {"type": "array", "items": {"enum": ["a", "b"]},
          "maxItems": 2}}, "required": ["name", "age"], "additionalProperties": false})";
  EXPECT_TRUE(Matches(person, R"({"name":"Jo","age":7})"));
  EXPECT_TRUE(Matches(person, R"({ "name": "J\u00f6", "age": 150, "tags": ["a","b"] })"));
  EXPECT_FALSE(Matches(person, R"({"name":"Jo"})"));
  EXPECT_FALSE(Matches(person, R"({"name":"","age":7})"));
  EXPECT_FALSE(Matches(person, R"({"name":"Johan","age":7})"));
  EXPECT_FALSE(Matches(person, R"({"name":"Jo","age":151})"));
  EXPECT_FALSE(Matches(person, R"({"name":"Jo","age":-1})"));
  EXPECT_FALSE(Matches(person, R"({"name":"Jo","age":7,"x":1})"));
  EXPECT_FALSE(Matches(person, R"({"name":"Jo","age":7,"tags":["a","a","a"]})"));
  EXPECT_TRUE(Matches(R"({"type": ["integer", "null"]})", "null"));
  EXPECT_TRUE(Matches(R"({"type": ["string", "null"], "maxLength": 2})", "null"));
  EXPECT_FALSE(Matches(R"({"type": ["string", "null"], "maxLength": 2})", "\"abc\""));
  EXPECT_TRUE(Matches(R"({"const": {"a": [1]}})", R"({"a":[1]})"));
  EXPECT_TRUE(Matches(R"({"anyOf": [{"type": "boolean"}, {"type": "number"}]})", "-1.5e3"));
  EXPECT_TRUE(Matches(R"({"type": "string", "format": "date"})", "\"2026-01-31\""));
  EXPECT_FALSE(Matches(R"({"type": "string", "format": "date"})", "\"2026-13-31\""));
  EXPECT_TRUE(Matches("{}", R"([{"a": null}, true, "x"])"));
  EXPECT_TRUE(
      Matches(R"({"type": "array", "prefixItems": [{"const": 1}, {"const": 2}]})", "[1,2]"));
}

TEST(JsonSchemaTest, FollowsReferencesAlsoToItself) {
  const std::string tree =
      R"({"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "properties": {"v":
          {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
          "required": ["v", "next"]}}})";
  EXPECT_TRUE(Matches(tree, R"({"v":1,"next":{"v":2,"next":null}})"));
  EXPECT_FALSE(Matches(tree, R"({"v":1,"next":{"v":2}})"));
}

TEST(JsonSchemaTest, RefusesWhatItCannotKeepTo) {
  const std::pair<std::string, std::string> cases[] = {
      {"nonsense", "json_schema at #"},
      {"[]", "expected an object as a schema"},
      {"true", "expected an object as a schema"},
      {R"({"type": "strin"})", "unrecognized type"},
      {R"({"type": 3})", "list of texts"},
      {R"({"type": []})", "list of texts"},
      {R"({"type": "string", "pattern": "^a$"})", "`pattern` is not supported"},
      {R"({"not": {}})", "`not` is not supported"},
      {R"({"allOf": [{}]})", "`allOf` is not supported"},
      {R"({"type": "number", "minimum": 1})", "`minimum` is not supported"},
      {R"({"type": "integer", "multipleOf": 2})", "`multipleOf` is not supported"},
      {R"({"type": "integer", "minimum": 1, "exclusiveMinimum": 1})", "two of a kind"},
      {R"({"type": "integer", "minimum": 1e30})", "`minimum`"},
      {R"({"type": "array", "uniqueItems": true})", "`uniqueItems` is not supported"},
      {R"({"type": "array", "minItems": 3, "maxItems": 2})", "[3, 2000] as `maxItems`"},
      {R"({"type": "string", "maxLength": 2001})", "[0, 2000] as `maxLength`"},
      {R"({"type": "string", "maxLength": -1})", "`maxLength`"},
      {R"({"type": "object", "required": ["a"]})", "names of `properties`"},
      {R"({"type": "object", "patternProperties": {}})", "`patternProperties` is not"},
      {R"({"type": "object", "properties": {"a": {"properties": {"b": {"if": {}}}}}})",
       "#/properties/a/properties/b: `if`"},
      {R"({"$ref": "https://example.org/s"})", "$defs/NAME"},
      {R"({"$ref": "#/$defs/a"})", "$defs/NAME"},
      {R"({"$ref": "#/$defs/a/properties/b", "$defs": {"a": {}}})", "$defs/NAME"},
      {R"({"$ref": "#/$defs/a", "type": "string", "$defs": {"a": {}}})", "`type` is not"},
      {R"({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}})", "left recursion"},
      {R"({"anyOf": []})", "list of schemas"},
      {R"({"anyOf": [{"type": "string"}], "minLength": 2})", "`minLength` is not supported"},
      {R"({"enum": []})", "non-empty"},
      {absl::StrCat(R"({"const": )", std::string(100, '['), std::string(100, ']'), "}"),
       "levels of brackets"},
      {absl::StrCat(R"({"type": "object", "properties": {")", std::string(200, 'n'), R"(": {}}})"),
       "at most 128 bytes"},
  };
  for (const auto& [schema, message] : cases) {
    const auto made = TryMake(schema);
    ASSERT_FALSE(made.ok()) << schema.substr(0, 200);
    EXPECT_EQ(ReasonOf(made.status()), v1::REASON_GRAMMAR_INVALID) << schema.substr(0, 200);
    EXPECT_THAT(std::string(made.status().message()), HasSubstr(message)) << schema.substr(0, 200);
  }
}

TEST(JsonSchemaTest, SchemasThatGrowWhenTheyAreConvertedAreRefused) {
  // A list of types converts what is below once a type.
  std::string schema = R"({"type": "integer"})";
  for (int i = 0; i < 14; ++i) {
    schema = absl::StrCat(R"({"type": ["object", "object", "object"], "properties": {"a": )",
                          schema, "}}");
  }
  EXPECT_THAT(std::string(TryMake(schema).status().message()), HasSubstr("at most 512 schemas"));
  std::string wide = "{\"properties\": {";
  for (int i = 0; i < 129; ++i) absl::StrAppend(&wide, i > 0 ? "," : "", "\"p", i, "\": {}");
  EXPECT_THAT(std::string(TryMake(wide + "}}").status().message()),
              HasSubstr("at most 128 properties"));
}

TEST(JsonSchemaTest, TheLargestSchemasAreRead) {
  std::string schema = R"({"type": "object", "additionalProperties": true, "properties": {)";
  for (int i = 0; i < 128; ++i) {
    absl::StrAppend(&schema, i > 0 ? "," : "", "\"", std::string(100, 'k'), i,
                    R"(": {"type": "string", "maxLength": 20})");
  }
  schema += "}}";
  EXPECT_TRUE(Matches(schema, absl::StrCat("{\"", std::string(100, 'k'), "5\":\"x\"}")));
  EXPECT_TRUE(Matches(schema, absl::StrCat("{\"", std::string(100, 'k'), "x\":1}")));
}

TEST(JsonSchemaTest, MutatedSchemasAreRefusedOrServed) {
  const std::string seeds[] = {
      R"({"type":"object","properties":{"a":{"type":["string","null"],"maxLength":9},"b":{"type":)"
      R"("array","items":{"$ref":"#/$defs/d"},"minItems":1,"maxItems":3}},"required":["a"],)"
      R"("additionalProperties":false,"$defs":{"d":{"enum":[1,"x",null]}}})",
      R"({"anyOf":[{"type":"integer","minimum":-12,"exclusiveMaximum":340},{"const":{"k":[1.5]}},)"
      R"({"type":"string","format":"date-time"}]})",
  };
  const std::string alphabet = "\"[]{}:,-019.e$#/\\abdtypnul\x80";
  std::minstd_rand random(2);
  int served = 0;
  for (int round = 0; round < 4000; ++round) {
    std::string schema = seeds[round % 2];
    for (unsigned i = 0; i < 1 + random() % 2; ++i) {
      const size_t at = random() % schema.size();
      switch (random() % 3) {
        case 0:
          schema[at] = alphabet[random() % alphabet.size()];
          break;
        case 1:
          schema.insert(at, 1, alphabet[random() % alphabet.size()]);
          break;
        default:
          schema.erase(at, random() % 6);
      }
    }
    const auto made = TryMake(schema);
    if (made.ok()) {
      ++served;
    } else {
      ASSERT_EQ(ReasonOf(made.status()), v1::REASON_GRAMMAR_INVALID) << schema;
    }
  }
  EXPECT_GT(served, 300);
}

}  // namespace
}  // namespace meshnet
