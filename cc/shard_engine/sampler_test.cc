#include "cc/shard_engine/sampler.h"

#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "cc/common/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace meshnet {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

int32_t SampleOnce(const SamplingParams& params, const std::vector<float>& logits,
                   const std::vector<int32_t>& history = {}) {
  return Sampler(params).Sample(logits, history)->token_id;
}

// How often each id comes out of `draws` draws.
std::map<int32_t, int> Counts(const SamplingParams& params, const std::vector<float>& logits,
                              int draws) {
  Sampler sampler(params);
  std::map<int32_t, int> counts;
  for (int i = 0; i < draws; ++i) ++counts[sampler.Sample(logits, {})->token_id];
  return counts;
}

std::set<int32_t> Support(const SamplingParams& params, const std::vector<float>& logits) {
  std::set<int32_t> ids;
  for (const auto& [id, count] : Counts(params, logits, 2000)) ids.insert(id);
  return ids;
}

TEST(ArgMaxTest, TheLowestIdAmongEquals) {
  EXPECT_EQ(ArgMax({1.0f, 3.0f, 3.0f, 2.0f}), 1);
  EXPECT_EQ(ArgMax({-5.0f, -4.0f}), 1);
  EXPECT_EQ(ArgMax({-kInf, -kInf}), 0);
  EXPECT_EQ(ArgMax({}), 0);
  std::vector<float> many(5000, 0.0f);
  many[1023] = many[1024] = many[4999] = 1.0f;
  EXPECT_EQ(ArgMax(many), 1023);
  many[4998] = 2.0f;
  EXPECT_EQ(ArgMax(many), 4998);
}

TEST(SamplerTest, TheDefaultIsGreedy) { EXPECT_EQ(SampleOnce({}, {0.5f, 2.0f, 2.0f}), 1); }

TEST(SamplerTest, BiasForbidsAndForces) {
  SamplingParams params;
  params.logit_bias = {{1, -kInf}};
  EXPECT_EQ(SampleOnce(params, {0.5f, 2.0f, 1.0f}), 2);
  params.logit_bias = {{0, 1.5f}};
  EXPECT_EQ(SampleOnce(params, {0.5f, 2.0f, 1.0f}), 0) << "a tie goes to the lower id";
  params.temperature = 1.0f;
  params.logit_bias = {{0, -kInf}, {2, -kInf}};
  EXPECT_THAT(Support(params, {9.0f, 0.0f, 9.0f}), testing::ElementsAre(1));
}

TEST(SamplerTest, RepetitionPenaltyMakesARepeatLessLikelyWhateverItsSign) {
  SamplingParams params;
  params.repetition_penalty = 2.0f;
  EXPECT_EQ(SampleOnce(params, {3.0f, 2.0f}, {0}), 1);
  EXPECT_EQ(SampleOnce(params, {4.0f, 2.0f}, {0}), 0);
  EXPECT_EQ(SampleOnce(params, {-1.0f, -1.5f}, {0}), 1);
  EXPECT_EQ(SampleOnce(params, {-1.0f, -1.5f}, {0, 1}), 0);
}

TEST(SamplerTest, FrequencyCountsAndPresenceDoesNot) {
  SamplingParams params;
  params.frequency_penalty = 0.5f;
  EXPECT_EQ(SampleOnce(params, {3.0f, 2.0f}, {0}), 0);
  EXPECT_EQ(SampleOnce(params, {3.0f, 2.0f}, {0, 0, 0}), 1);
  params.frequency_penalty = 0.0f;
  params.presence_penalty = 0.9f;
  EXPECT_EQ(SampleOnce(params, {3.0f, 2.0f}, {0, 0, 0}), 0);
  params.presence_penalty = 1.1f;
  EXPECT_EQ(SampleOnce(params, {3.0f, 2.0f}, {0}), 1);
}

TEST(SamplerTest, PenaltiesLookAtTheLastTokensOnly) {
  SamplingParams params;
  params.presence_penalty = 2.0f;
  params.penalty_last_n = 2;
  EXPECT_EQ(SampleOnce(params, {3.0f, 2.0f, 0.0f}, {0, 2, 2}), 0);
  EXPECT_EQ(SampleOnce(params, {3.0f, 2.0f, 0.0f}, {2, 0, 2}), 1);
  params.penalty_last_n = 64;
  std::vector<int32_t> history(64, 2);
  history.front() = 0;
  EXPECT_EQ(SampleOnce(params, {3.0f, 2.0f, 0.0f}, history), 1);
  history.push_back(2);
  EXPECT_EQ(SampleOnce(params, {3.0f, 2.0f, 0.0f}, history), 0);
}

TEST(SamplerTest, TopKKeepsTheBestAndTheLowerIdAmongEquals) {
  SamplingParams params;
  params.temperature = 10.0f;
  params.top_k = 2;
  EXPECT_THAT(Support(params, {1.0f, 3.0f, 2.0f, 2.0f}), testing::ElementsAre(1, 2));
  params.top_k = 1;
  EXPECT_THAT(Support(params, {1.0f, 3.0f, 3.0f}), testing::ElementsAre(1));
}

TEST(SamplerTest, TopPKeepsTheSmallestSetThatReachesIt) {
  SamplingParams params;
  params.temperature = 1.0f;
  // Probabilities 0.5, 0.25, 0.125, 0.125.
  const std::vector<float> logits = {std::log(0.125f), std::log(0.5f), std::log(0.125f),
                                     std::log(0.25f)};
  params.top_p = 0.45f;
  EXPECT_THAT(Support(params, logits), testing::ElementsAre(1));
  params.top_p = 0.7f;
  EXPECT_THAT(Support(params, logits), testing::ElementsAre(1, 3));
  params.top_p = 0.8f;
  EXPECT_THAT(Support(params, logits), testing::ElementsAre(0, 1, 3));
  params.top_p = 1.0f;
  EXPECT_THAT(Support(params, logits), testing::ElementsAre(0, 1, 2, 3));
}

TEST(SamplerTest, TopPReachesFarIntoAFlatDistribution) {
  SamplingParams params;
  params.temperature = 1.0f;
  params.top_p = 0.5f;
  const std::vector<float> flat(300, 1.0f);
  const std::map<int32_t, int> counts = Counts(params, flat, 4000);
  EXPECT_EQ(counts.size(), 150u);
  EXPECT_EQ(counts.rbegin()->first, 149);
}

TEST(SamplerTest, MinPIsRelativeToTheBest) {
  SamplingParams params;
  params.temperature = 1.0f;
  params.min_p = 0.3f;
  const std::vector<float> logits = {std::log(0.125f), std::log(0.5f), std::log(0.2f),
                                     std::log(0.175f)};
  EXPECT_THAT(Support(params, logits), testing::ElementsAre(1, 2, 3));
  params.min_p = 1.0f;
  EXPECT_THAT(Support(params, logits), testing::ElementsAre(1));
}

TEST(SamplerTest, FiltersComeBeforeTheTemperature) {
  SamplingParams params;
  params.temperature = 10.0f;
  params.top_p = 0.7f;
  // At temperature 10 these would be almost equally likely and all be needed to reach 0.7.
  EXPECT_THAT(Support(params, {4.0f, 0.0f, 0.0f, 0.0f}), testing::ElementsAre(0));
}

TEST(SamplerTest, DrawsFollowTheDistribution) {
  SamplingParams params;
  params.temperature = 2.0f;
  params.seed = 5;
  // exp(logit / 2) = 1, 2, 5.
  const std::map<int32_t, int> counts =
      Counts(params, {0.0f, 2.0f * std::log(2.0f), 2.0f * std::log(5.0f)}, 80000);
  EXPECT_NEAR(counts.at(0), 10000, 400);
  EXPECT_NEAR(counts.at(1), 20000, 500);
  EXPECT_NEAR(counts.at(2), 50000, 600);
}

TEST(SamplerTest, TheDrawDependsOnSeedAndCountAlone) {
  SamplingParams params;
  params.temperature = 1.0f;
  params.seed = 77;
  const std::vector<float> flat(64, 0.0f);
  Sampler plain(params);
  std::vector<int32_t> expected;
  for (int i = 0; i < 20; ++i) expected.push_back(plain.Sample(flat, {})->token_id);
  Sampler other(params);
  for (int i = 0; i < 20; ++i) {
    // A draw with one candidate in between still counts as one.
    if (i % 3 == 1) {
      std::vector<float> certain(64, -kInf);
      certain[9] = 0.0f;
      EXPECT_EQ(other.Sample(certain, {1, 2, 3})->token_id, 9);
    } else {
      EXPECT_EQ(other.Sample(flat, {i})->token_id, expected[i]) << i;
    }
  }
  params.seed = 78;
  Sampler reseeded(params);
  std::vector<int32_t> different;
  for (int i = 0; i < 20; ++i) different.push_back(reseeded.Sample(flat, {})->token_id);
  EXPECT_NE(different, expected);
}

TEST(SamplerTest, LogprobsAreOfTheUnmodifiedLogits) {
  SamplingParams params;
  params.logit_bias = {{0, -kInf}};
  params.top_logprobs = 2;
  Sampler sampler(params);
  const SampledToken token =
      *sampler.Sample({std::log(0.5f), std::log(0.125f), std::log(0.25f), std::log(0.125f)}, {});
  EXPECT_EQ(token.token_id, 2);
  ASSERT_TRUE(token.logprob.has_value());
  EXPECT_NEAR(*token.logprob, std::log(0.25), 1e-6);
  ASSERT_EQ(token.top.size(), 2u);
  EXPECT_EQ(token.top[0].token_id, 0);
  EXPECT_NEAR(token.top[0].logprob, std::log(0.5), 1e-6);
  EXPECT_EQ(token.top[1].token_id, 2);

  params = {};
  params.logprobs = true;
  const SampledToken greedy = *Sampler(params).Sample({std::log(0.75f), std::log(0.25f)}, {});
  EXPECT_NEAR(greedy.logprob.value(), std::log(0.75), 1e-6);
  EXPECT_TRUE(greedy.top.empty());
  EXPECT_FALSE(Sampler().Sample({1.0f}, {})->logprob.has_value());
}

TEST(SamplerTest, EverythingForbiddenStillGivesAToken) {
  SamplingParams params;
  params.logit_bias = {{0, -kInf}, {1, -kInf}};
  params.temperature = 1.0f;
  params.top_p = 0.5f;
  params.min_p = 0.1f;
  EXPECT_THAT(SampleOnce(params, {1.0f, 2.0f}), testing::AnyOf(0, 1));
}

// Allows the tokens of one list after the other.
class Listed : public TokenConstraint {
 public:
  explicit Listed(std::vector<std::set<int32_t>> lists) : lists_(std::move(lists)) {}

  absl::StatusOr<bool> Allows(int32_t token_id) override {
    return lists_[accepted_.size()].count(token_id) > 0;
  }
  absl::Status Allowed(std::vector<bool>* allowed) override {
    allowed->assign(kTokens, false);
    for (const int32_t id : lists_[accepted_.size()]) (*allowed)[id] = true;
    return absl::OkStatus();
  }
  absl::Status Accept(int32_t token_id) override {
    accepted_.push_back(token_id);
    return absl::OkStatus();
  }

  static constexpr size_t kTokens = 4;

 private:
  const std::vector<std::set<int32_t>> lists_;
  std::vector<int32_t> accepted_;
};

TEST(SamplerTest, AConstraintComesBeforeTheCuts) {
  SamplingParams params;
  const std::vector<float> logits = {9.0f, 8.0f, 1.0f, 0.5f};
  Sampler greedy(params, std::make_unique<Listed>(std::vector<std::set<int32_t>>{{0}, {2, 3}}));
  EXPECT_EQ(greedy.Sample(logits, {})->token_id, 0);
  EXPECT_EQ(greedy.Sample(logits, {})->token_id, 2);
  params.logit_bias = {{3, 100.0f}};
  Sampler biased(params, std::make_unique<Listed>(std::vector<std::set<int32_t>>{{2, 3}}));
  EXPECT_EQ(biased.Sample(logits, {})->token_id, 3);
  params.logit_bias.clear();
  params.temperature = 10.0f;
  params.top_k = 2;
  std::set<int32_t> drawn;
  for (params.seed = 0; params.seed < 200; ++params.seed) {
    Sampler sampler(params, std::make_unique<Listed>(std::vector<std::set<int32_t>>{{1, 2, 3}}));
    drawn.insert(sampler.Sample(logits, {})->token_id);
  }
  EXPECT_THAT(drawn, testing::ElementsAre(1, 2)) << "the best two of those that are allowed";
}

TEST(SamplerTest, AConstraintThatLeavesNothingIsADeadEnd) {
  SamplingParams params;
  const std::vector<float> logits = {1.0f, 2.0f, 3.0f, 4.0f};
  Sampler none(params, std::make_unique<Listed>(std::vector<std::set<int32_t>>{{}}));
  EXPECT_EQ(ReasonOf(none.Sample(logits, {}).status()), v1::REASON_GRAMMAR_DEAD_END);
  params.logit_bias = {{1, -kInf}};
  for (const float temperature : {0.0f, 1.0f}) {
    params.temperature = temperature;
    Sampler forbidden(params, std::make_unique<Listed>(std::vector<std::set<int32_t>>{{1}}));
    EXPECT_EQ(ReasonOf(forbidden.Sample(logits, {}).status()), v1::REASON_GRAMMAR_DEAD_END);
  }
}

}  // namespace
}  // namespace meshnet
