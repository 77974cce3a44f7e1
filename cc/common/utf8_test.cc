#include "cc/common/utf8.h"

#include <string>

#include "gtest/gtest.h"

namespace meshnet {
namespace {

TEST(Utf8Test, AcceptsCharactersOfEveryLength) {
  EXPECT_TRUE(IsValidUtf8(""));
  EXPECT_TRUE(IsValidUtf8(std::string("a\0z", 3)));
  // The first and the last character of each length, and the neighbours of the surrogates.
  EXPECT_TRUE(IsValidUtf8("\xC2\x80\xDF\xBF\xE0\xA0\x80\xED\x9F\xBF\xEE\x80\x80\xEF\xBF\xBF"));
  EXPECT_TRUE(IsValidUtf8("\xF0\x90\x80\x80\xF4\x8F\xBF\xBF"));
}

TEST(Utf8Test, RefusesWhatIsNoCharacter) {
  for (const char* bad :
       {"\x80", "\xC0\x80", "\xC1\xBF", "\xE0\x9F\xBF", "\xED\xA0\x80", "\xED\xBF\xBF",
        "\xF0\x8F\xBF\xBF", "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\xFF", "\xC2", "\xE2\x82",
        "\xF0\x9F\x98", "\xC2z", "\xE2\x82z", "ok\xFE"}) {
    EXPECT_FALSE(IsValidUtf8(bad)) << bad;
  }
}

TEST(Utf8Test, MeasuresTheFirstCharacter) {
  EXPECT_EQ(Utf8CharacterBytes("az"), 1u);
  EXPECT_EQ(Utf8CharacterBytes("\xC3\xA9z"), 2u);
  EXPECT_EQ(Utf8CharacterBytes("\xE2\x82\xACz"), 3u);
  EXPECT_EQ(Utf8CharacterBytes("\xF0\x9F\x98\x80z"), 4u);
  EXPECT_EQ(Utf8CharacterBytes("\xBFz"), 0u);
}

}  // namespace
}  // namespace meshnet
