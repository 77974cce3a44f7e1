#include "cc/common/cpu_baseline/cpu_baseline.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace meshnet {
namespace {

TEST(CpuBaselineTest, AcceptsTheCpuThatThisTestWasCompiledFor) {
  EXPECT_EQ(MissingFromBaseline(HostCpuFeatures()), nullptr);
}

#if defined(__aarch64__)

TEST(CpuBaselineTest, IsWhatTheCompilerWasTold) {
#if __ARM_ARCH == 8 && defined(__ARM_NEON) && !defined(__ARM_FEATURE_ATOMICS)
  EXPECT_STREQ(kCpuBaseline, "armv8-a");
#else
  FAIL() << "compiled for another level than " << kCpuBaseline;
#endif
}

TEST(CpuBaselineTest, NamesAMissingFeature) {
  EXPECT_EQ(MissingFromBaseline(CpuFeatures{0b11}), nullptr);
  EXPECT_STREQ(MissingFromBaseline(CpuFeatures{~uint64_t{0b10}}), "asimd");
  EXPECT_STREQ(MissingFromBaseline(CpuFeatures{}), "fp");
}

#else

constexpr CpuFeatures kEverything = {~0u, ~0u, ~0u, ~uint64_t{0}};

// Intel Nehalem and Haswell, as far as the levels go.
constexpr CpuFeatures kNehalem = {1u << 0 | 1u << 9 | 1u << 13 | 1u << 19 | 1u << 20 | 1u << 23, 0,
                                  1u << 0, 0};
constexpr CpuFeatures kHaswell = {
    kNehalem.leaf1_ecx | 1u << 12 | 1u << 22 | 1u << 27 | 1u << 28 | 1u << 29,
    1u << 3 | 1u << 5 | 1u << 8, 1u << 0 | 1u << 5, 0x7};

TEST(CpuBaselineTest, IsWhatTheCompilerWasTold) {
#if defined(__SSE4_2__) && defined(__POPCNT__) && !defined(__AVX__)
  EXPECT_STREQ(kCpuBaseline, "x86-64-v2");
#else
  FAIL() << "compiled for another level than " << kCpuBaseline;
#endif
}

TEST(CpuBaselineTest, AcceptsExactlyALevel) {
  EXPECT_EQ(MissingFromLevel(kNehalem, CpuLevel::kV2), nullptr);
  EXPECT_STREQ(MissingFromLevel(kNehalem, CpuLevel::kV3), "fma");
  EXPECT_EQ(MissingFromLevel(kHaswell, CpuLevel::kV3), nullptr);
}

TEST(CpuBaselineTest, NamesAMissingFeatureOfEachRegister) {
  CpuFeatures features = kEverything;
  features.leaf1_ecx &= ~(1u << 20);
  EXPECT_STREQ(MissingFromLevel(features, CpuLevel::kV2), "sse4.2");
  EXPECT_STREQ(MissingFromBaseline(features), "sse4.2");
  features = kEverything;
  features.leaf7_ebx &= ~(1u << 5);
  EXPECT_EQ(MissingFromLevel(features, CpuLevel::kV2), nullptr);
  EXPECT_STREQ(MissingFromLevel(features, CpuLevel::kV3), "avx2");
  features = kEverything;
  features.extended_ecx &= ~(1u << 5);
  EXPECT_STREQ(MissingFromLevel(features, CpuLevel::kV3), "lzcnt");
}

TEST(CpuBaselineTest, WantsTheOperatingSystemToSaveAvxRegisters) {
  CpuFeatures features = kEverything;
  features.xcr0 = 0x3;
  EXPECT_EQ(MissingFromLevel(features, CpuLevel::kV2), nullptr);
  EXPECT_THAT(MissingFromLevel(features, CpuLevel::kV3), testing::HasSubstr("operating system"));
}

TEST(CpuBaselineTest, NothingAtAllLacksTheFirstFeature) {
  EXPECT_STREQ(MissingFromBaseline(CpuFeatures{}), "sse3");
}

#endif

}  // namespace
}  // namespace meshnet
