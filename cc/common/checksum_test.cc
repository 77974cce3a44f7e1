#include "cc/common/checksum.h"

#include "gtest/gtest.h"

namespace meshnet {
namespace {

// Reference values of XXH3-64, seed 0.
TEST(ChecksumTest, MatchesReferenceValues) {
  EXPECT_EQ(Checksum(""), 0x2d06800538d394c2u);
  EXPECT_EQ(Checksum("abc"), 0x78af5f94892f3950u);
}

}  // namespace
}  // namespace meshnet
