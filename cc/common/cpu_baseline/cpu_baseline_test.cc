#include "cc/common/cpu_baseline/cpu_baseline.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace meshnet {
namespace {

constexpr CpuFeatures kEverything = {~0u, ~0u, ~0u, ~uint64_t{0}};

TEST(CpuBaselineTest, AcceptsTheCpuThatThisTestWasCompiledFor) {
  EXPECT_EQ(MissingFromBaseline(HostCpuFeatures()), nullptr);
}

TEST(CpuBaselineTest, AcceptsExactlyTheBaseline) {
  const CpuFeatures haswell = {1u << 0 | 1u << 9 | 1u << 12 | 1u << 13 | 1u << 19 | 1u << 20 |
                                   1u << 22 | 1u << 23 | 1u << 27 | 1u << 28 | 1u << 29,
                               1u << 3 | 1u << 5 | 1u << 8, 1u << 0 | 1u << 5, 0x7};
  EXPECT_EQ(MissingFromBaseline(haswell), nullptr);
}

TEST(CpuBaselineTest, NamesAMissingFeatureOfEachRegister) {
  CpuFeatures features = kEverything;
  features.leaf1_ecx &= ~(1u << 12);
  EXPECT_STREQ(MissingFromBaseline(features), "fma");
  features = kEverything;
  features.leaf7_ebx &= ~(1u << 5);
  EXPECT_STREQ(MissingFromBaseline(features), "avx2");
  features = kEverything;
  features.extended_ecx &= ~(1u << 5);
  EXPECT_STREQ(MissingFromBaseline(features), "lzcnt");
}

TEST(CpuBaselineTest, WantsTheOperatingSystemToSaveAvxRegisters) {
  CpuFeatures features = kEverything;
  features.xcr0 = 0x3;
  EXPECT_THAT(MissingFromBaseline(features), testing::HasSubstr("operating system"));
}

TEST(CpuBaselineTest, NothingAtAllLacksTheFirstFeature) {
  EXPECT_STREQ(MissingFromBaseline(CpuFeatures{}), "sse3");
}

}  // namespace
}  // namespace meshnet
