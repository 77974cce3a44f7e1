#include "cc/worker/json_log.h"

#include <cstdint>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace meshnet::worker {
namespace {

using ::testing::MatchesRegex;
using ::testing::SizeIs;

TEST(ToJsonTest, WritesEveryKindOfValue) {
  EXPECT_EQ(ToJson({}), "{}");
  EXPECT_EQ(ToJson({{"text", "a"},
                    {"flag", true},
                    {"small", 7},
                    {"negative", int64_t{-9}},
                    {"large", uint64_t{18446744073709551615u}},
                    {"real", 0.5}}),
            R"({"text":"a","flag":true,"small":7,"negative":-9,"large":18446744073709551615,)"
            R"("real":0.5})");
}

TEST(ToJsonTest, EscapesWhatJsonForbids) {
  EXPECT_EQ(ToJson({{"t", "a\"b\\c\nd\x01"}}), R"({"t":"a\"b\\c\u000ad\u0001"})");
}

TEST(ToJsonTest, ReplacesBytesThatAreNotUtf8) {
  EXPECT_EQ(ToJson({{"t", "gr\xc3\xbc\xc3\x9f\xe4\xbd\xa0\xf0\x9f\x99\x82"}}),
            "{\"t\":\"gr\xc3\xbc\xc3\x9f\xe4\xbd\xa0\xf0\x9f\x99\x82\"}");
  // Cut short, a lone continuation, an overlong slash, a surrogate.
  EXPECT_EQ(ToJson({{"t", "\xc3"}}), R"({"t":"\ufffd"})");
  EXPECT_EQ(ToJson({{"t", "\x80z"}}), R"({"t":"\ufffdz"})");
  EXPECT_EQ(ToJson({{"t", "\xc0\xaf"}}), R"({"t":"\ufffd\ufffd"})");
  EXPECT_EQ(ToJson({{"t", "\xed\xa0\x80"}}), R"({"t":"\ufffd\ufffd\ufffd"})");
}

TEST(LoggerTest, WritesOneLineWithTimeSeverityAndEvent) {
  std::vector<std::string> lines;
  const Logger logger([&](const std::string& line) { lines.push_back(line); });
  logger.Log(Severity::kWarning, "refused", {{"reason", "DRAINING"}});
  ASSERT_THAT(lines, SizeIs(1));
  EXPECT_THAT(lines[0],
              MatchesRegex(R"(\{"ts":"[0-9]+-[0-9]+-[0-9]+T[0-9]+:[0-9]+:[0-9]+\.[0-9]+Z",)"
                           R"("severity":"WARNING","event":"refused","reason":"DRAINING"\})"));
}

}  // namespace
}  // namespace meshnet::worker
