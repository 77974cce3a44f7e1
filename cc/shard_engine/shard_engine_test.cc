#include "cc/shard_engine/shard_engine.h"

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "cc/common/sha256.h"
#include "cc/common/status.h"
#include "gtest/gtest.h"

namespace meshnet {
namespace {

constexpr uint32_t kVocabulary = 100;

TEST(BoundarySchemaTest, DenseResidualNamesItsTensorsInOrder) {
  const BoundarySchema schema = DenseResidualSchema(576);
  EXPECT_EQ(schema.name, "dense.residual");
  EXPECT_EQ(schema.version, 1u);
  ASSERT_EQ(schema.tensors.size(), 3u);
  EXPECT_EQ(schema.tensors[0], (TensorSpec{"residual", DType::kF32, {-1, 576}}));
  EXPECT_EQ(schema.tensors[1], (TensorSpec{"positions", DType::kI32, {-1}}));
  EXPECT_EQ(schema.tensors[2], (TensorSpec{"token_ids", DType::kI32, {-1}}));
  EXPECT_EQ(schema.residual_width(), 576u);
}

TEST(BoundarySchemaTest, ResidualWidthIsTheProductOfTheFixedExtents) {
  EXPECT_EQ((BoundarySchema{"x", 1, {{"residual", DType::kF32, {-1, 4, 4096}}}}).residual_width(),
            4u * 4096u);
  EXPECT_EQ((BoundarySchema{"x", 1, {{"positions", DType::kI32, {-1}}}}).residual_width(), 0u);
}

TEST(ValidateSamplingTest, AcceptsDefaultsAndBounds) {
  EXPECT_TRUE(ValidateSampling({}, kVocabulary).ok());
  SamplingParams params;
  params.temperature = 10.0f;
  params.top_k = kVocabulary;
  params.top_p = 0.001f;
  params.min_p = 1.0f;
  params.repetition_penalty = 10.0f;
  params.frequency_penalty = -2.0f;
  params.presence_penalty = 2.0f;
  params.penalty_last_n = 4096;
  params.top_logprobs = 20;
  params.logit_bias = {{0, -std::numeric_limits<float>::infinity()}, {99, 3.5f}};
  EXPECT_TRUE(ValidateSampling(params, kVocabulary).ok());
}

TEST(ValidateSamplingTest, RefusesEveryFieldOutsideItsBounds) {
  const float nan = std::nanf("");
  const float inf = std::numeric_limits<float>::infinity();
  struct Case {
    std::string field;
    std::function<void(SamplingParams*)> change;
  };
  const std::vector<Case> cases = {
      {"temperature", [](SamplingParams* p) { p->temperature = -0.1f; }},
      {"temperature", [](SamplingParams* p) { p->temperature = 10.5f; }},
      {"temperature", [=](SamplingParams* p) { p->temperature = nan; }},
      {"top_k", [](SamplingParams* p) { p->top_k = -1; }},
      {"top_k", [](SamplingParams* p) { p->top_k = kVocabulary + 1; }},
      {"top_p", [](SamplingParams* p) { p->top_p = 0.0f; }},
      {"top_p", [](SamplingParams* p) { p->top_p = 1.5f; }},
      {"top_p", [=](SamplingParams* p) { p->top_p = nan; }},
      {"min_p", [](SamplingParams* p) { p->min_p = -0.5f; }},
      {"min_p", [=](SamplingParams* p) { p->min_p = nan; }},
      {"repetition_penalty", [](SamplingParams* p) { p->repetition_penalty = 0.0f; }},
      {"repetition_penalty", [=](SamplingParams* p) { p->repetition_penalty = inf; }},
      {"frequency_penalty", [](SamplingParams* p) { p->frequency_penalty = 2.5f; }},
      {"presence_penalty", [](SamplingParams* p) { p->presence_penalty = -2.5f; }},
      {"penalty_last_n", [](SamplingParams* p) { p->penalty_last_n = 0; }},
      {"penalty_last_n", [](SamplingParams* p) { p->penalty_last_n = 4097; }},
      {"top_logprobs", [](SamplingParams* p) { p->top_logprobs = 21; }},
      {"logit_bias",
       [](SamplingParams* p) { p->logit_bias.assign(1025, std::make_pair(1, 0.0f)); }},
      {"logit_bias.token_id", [](SamplingParams* p) { p->logit_bias = {{-1, 0.0f}}; }},
      {"logit_bias.token_id", [](SamplingParams* p) { p->logit_bias = {{100, 0.0f}}; }},
      {"logit_bias.bias", [=](SamplingParams* p) { p->logit_bias = {{1, nan}}; }},
      {"logit_bias.bias", [=](SamplingParams* p) { p->logit_bias = {{1, inf}}; }},
      {"logit_bias", [](SamplingParams* p) { p->logit_bias = {{1, 0.0f}, {2, 0.0f}, {1, 1.0f}}; }},
  };
  for (const Case& c : cases) {
    SamplingParams params;
    c.change(&params);
    const absl::Status status = ValidateSampling(params, kVocabulary);
    EXPECT_EQ(ReasonOf(status), v1::REASON_SAMPLING_INVALID) << c.field;
    EXPECT_EQ(status.message().find("sampling." + c.field + " "), 0u) << status.message();
  }
}

TEST(RecipeFingerprintTest, IsSha256OfSortedEncodedLines) {
  EXPECT_EQ(RecipeFingerprint({{"quant", "Q4_1"}, {"artifact", "a b%\n\xC3\xA9=:/+,-._"}}),
            Sha256Hex("artifact=a%20b%25%0A%C3%A9%3D:/+,-._\nquant=Q4_1\n"));
  // The same fields as in python/meshnet_gguf/protocol/tests/codec_test.py.
  EXPECT_EQ(RecipeFingerprint({{"artifact", "a b%\n\xC3\xA9=:/+,-._"}, {"quant", "Q4_1"}}),
            "167b0a20d5c6c90e5148ec9d5066459104fbe7bfbeead85a32e33b95f4840630");
  EXPECT_EQ(RecipeFingerprint({}), Sha256Hex(""));
}

TEST(RecipeFingerprintTest, IgnoresOrderAndNoticesEveryChange) {
  EXPECT_EQ(RecipeFingerprint({{"a", "1"}, {"b", "2"}}),
            RecipeFingerprint({{"b", "2"}, {"a", "1"}}));
  EXPECT_NE(RecipeFingerprint({{"a", "1"}, {"b", "2"}}),
            RecipeFingerprint({{"a", "1"}, {"b", "3"}}));
  EXPECT_NE(RecipeFingerprint({{"a", "1\nb=2"}}), RecipeFingerprint({{"a", "1"}, {"b", "2"}}));
}

}  // namespace
}  // namespace meshnet
