#include "third_party/llama_cpp/cpu_backend.h"

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace meshnet::llama_cpp {
namespace {

using ::testing::HasSubstr;

TEST(ChooseCpuVariant, TakesThePlainestWhereThereIsNothingMore) {
  EXPECT_EQ(ChooseCpuVariant(InstructionSets{}, "").value(), CpuVariants().front());
}

TEST(ChooseCpuVariant, RefusesAnUnknownName) {
  const absl::StatusOr<std::string> chosen = ChooseCpuVariant(InstructionSets{}, "pentium");
  EXPECT_EQ(chosen.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(chosen.status().message(), HasSubstr("got 'pentium'"));
}

TEST(RegisterCpuBackend, RunsOneVariantAProcess) {
  const std::string best = RegisterCpuBackend("").value();
  EXPECT_EQ(best, ChooseCpuVariant(HostInstructionSets(), "").value());
  EXPECT_EQ(RegisterCpuBackend(best).value(), best);
  const std::string plainest = CpuVariants().front();
  if (best != plainest) {
    EXPECT_EQ(RegisterCpuBackend(plainest).status().code(), absl::StatusCode::kFailedPrecondition);
  }
}

}  // namespace
}  // namespace meshnet::llama_cpp
