#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "third_party/llama_cpp/cpu_backend.h"

namespace meshnet::llama_cpp {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(CpuVariants, AreListedFromThePlainestToTheBest) {
  EXPECT_THAT(CpuVariants(), ElementsAre("armv8", "dotprod", "i8mm"));
}

TEST(ChooseCpuVariant, TakesTheBestThatTheCpuRuns) {
  InstructionSets sets;
  EXPECT_EQ(ChooseCpuVariant(sets, "").value(), "armv8");
  sets.i8mm = true;
  EXPECT_EQ(ChooseCpuVariant(sets, "").value(), "armv8") << "i8mm needs dot products as well";
  sets.armv8_2_dotprod = true;
  EXPECT_EQ(ChooseCpuVariant(sets, "").value(), "i8mm");
  sets.i8mm = false;
  EXPECT_EQ(ChooseCpuVariant(sets, "").value(), "dotprod");
  EXPECT_EQ(ChooseCpuVariant(sets, "armv8").value(), "armv8");
}

TEST(ChooseCpuVariant, RefusesAForcedOneThatTheCpuLacks) {
  InstructionSets sets;
  sets.armv8_2_dotprod = true;
  const absl::StatusOr<std::string> chosen = ChooseCpuVariant(sets, "i8mm");
  EXPECT_EQ(chosen.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(chosen.status().message(), HasSubstr("this one runs: armv8, dotprod;"));
}

}  // namespace
}  // namespace meshnet::llama_cpp
