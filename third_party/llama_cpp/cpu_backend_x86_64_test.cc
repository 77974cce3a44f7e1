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

InstructionSets Haswell() {
  InstructionSets sets;
  sets.x86_64_v3 = true;
  return sets;
}

InstructionSets Zen4() {
  InstructionSets sets = Haswell();
  sets.avx512 = sets.avx512_vbmi = sets.avx512_vnni = sets.avx512_bf16 = true;
  return sets;
}

TEST(CpuVariants, AreListedFromThePlainestToTheBest) {
  EXPECT_THAT(CpuVariants(), ElementsAre("sse42", "haswell", "alderlake", "skylakex", "icelake",
                                         "zen4", "sapphirerapids"));
}

TEST(ChooseCpuVariant, TakesTheBestThatTheCpuRuns) {
  InstructionSets sets;
  EXPECT_EQ(ChooseCpuVariant(sets, "").value(), "sse42");
  sets.x86_64_v3 = true;
  EXPECT_EQ(ChooseCpuVariant(sets, "").value(), "haswell");
  sets.avx_vnni = true;
  EXPECT_EQ(ChooseCpuVariant(sets, "").value(), "alderlake");
  sets = Haswell();
  sets.avx512 = true;
  EXPECT_EQ(ChooseCpuVariant(sets, "").value(), "skylakex");
  sets.avx512_vnni = true;
  EXPECT_EQ(ChooseCpuVariant(sets, "").value(), "skylakex") << "icelake needs VBMI as well";
  sets.avx512_vbmi = true;
  EXPECT_EQ(ChooseCpuVariant(sets, "").value(), "icelake");
  EXPECT_EQ(ChooseCpuVariant(Zen4(), "").value(), "zen4");
  sets = Zen4();
  sets.amx_int8 = true;
  EXPECT_EQ(ChooseCpuVariant(sets, "").value(), "sapphirerapids");
}

TEST(ChooseCpuVariant, TakesTheForcedOne) {
  EXPECT_EQ(ChooseCpuVariant(Zen4(), "haswell").value(), "haswell");
  EXPECT_EQ(ChooseCpuVariant(Zen4(), "icelake").value(), "icelake");
  EXPECT_EQ(ChooseCpuVariant(Zen4(), "sse42").value(), "sse42");
}

TEST(ChooseCpuVariant, RefusesAForcedOneThatTheCpuLacks) {
  const absl::StatusOr<std::string> chosen = ChooseCpuVariant(Zen4(), "sapphirerapids");
  EXPECT_EQ(chosen.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(chosen.status().message(),
              HasSubstr("this one runs: sse42, haswell, skylakex, icelake, zen4;"));
}

}  // namespace
}  // namespace meshnet::llama_cpp
