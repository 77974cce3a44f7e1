#include "cc/worker/identity.h"

#include <string>
#include <tuple>

#include "absl/strings/str_replace.h"
#include "cc/common/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace meshnet::worker {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(IdentityTest, AcceptsItself) {
  EXPECT_EQ(IdentityJson(), IdentityJson());
  EXPECT_THAT(IdentityJson(), HasSubstr("\"program\": \"meshnet-worker\""));
  const auto pins = CheckIdentity(IdentityJson());
  ASSERT_TRUE(pins.ok()) << pins.status();
  EXPECT_THAT(pins->artifacts, IsEmpty());
  EXPECT_THAT(pins->recipes, IsEmpty());
}

TEST(IdentityTest, ReadsPins) {
  const auto pins = CheckIdentity(absl::StrReplaceAll(
      IdentityJson(),
      {{"\"certification\": []", R"("pins": {"artifacts": ["aa", "bb"], "recipes": ["cc"]})"}}));
  ASSERT_TRUE(pins.ok()) << pins.status();
  EXPECT_THAT(pins->artifacts, ElementsAre("aa", "bb"));
  EXPECT_THAT(pins->recipes, ElementsAre("cc"));
}

TEST(IdentityTest, NamesTheFieldThatIsAnothers) {
  for (const auto& [from, to, field] : {
#if defined(__aarch64__)
           std::make_tuple("\"cpu\": \"aarch64\"", "\"cpu\": \"x86_64\"", "lane.cpu"),
#else
           std::make_tuple("\"cpu\": \"x86_64\"", "\"cpu\": \"aarch64\"", "lane.cpu"),
#endif
           std::make_tuple("\"accelerator\": \"cpu\"", "\"accelerator\": \"cuda\"",
                           "lane.accelerator"),
           std::make_tuple("\"schema_version\": \"1\"", "\"schema_version\": \"2\"",
                           "protocol.schema_version"),
           std::make_tuple("\"fingerprint\": \"", "\"fingerprint\": \"0", "fingerprint"),
       }) {
    const auto pins = CheckIdentity(absl::StrReplaceAll(IdentityJson(), {{from, to}}));
    EXPECT_EQ(ReasonOf(pins.status()), v1::REASON_RECIPE_MISMATCH) << field;
    EXPECT_THAT(std::string(pins.status().message()), HasSubstr(field));
  }
}

TEST(IdentityTest, RefusesWhatIsNoIdentity) {
  const std::string own = IdentityJson();
  for (const std::string& text : {
           std::string(),
           std::string("{}"),
           std::string("[1]"),
           std::string("{"),
           own.substr(0, own.size() / 2),
           absl::StrReplaceAll(own, {{"\"program\"", "\"programme\""}}),
           absl::StrReplaceAll(own, {{"\"certification\": []", "\"pins\": 1"}}),
           absl::StrReplaceAll(own, {{"\"certification\": []", "\"pins\": {\"recipes\": \"x\"}"}}),
           absl::StrReplaceAll(own, {{"\"certification\": []", "\"pins\": {\"recipes\": [1]}"}}),
           std::string(100000, ' '),
       }) {
    EXPECT_EQ(ReasonOf(CheckIdentity(text).status()), v1::REASON_CONFIGURATION_INVALID)
        << text.substr(0, 100);
  }
}

}  // namespace
}  // namespace meshnet::worker
