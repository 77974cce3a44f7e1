#include "cc/worker/grpc_log.h"

#include <optional>

#include "absl/time/time.h"
#include "gtest/gtest.h"

namespace meshnet::worker {
namespace {

TEST(LineBudgetTest, LeavesOutWhatIsTooMuchAndSaysHowMuchItWas) {
  LineBudget budget(2, absl::Minutes(1));
  const absl::Time begin = absl::FromUnixSeconds(1'000'000);
  EXPECT_EQ(budget.Take(begin), 0);
  EXPECT_EQ(budget.Take(begin + absl::Seconds(1)), 0);
  EXPECT_EQ(budget.Take(begin + absl::Seconds(2)), std::nullopt);
  EXPECT_EQ(budget.Take(begin + absl::Seconds(59)), std::nullopt);
  EXPECT_EQ(budget.Take(begin + absl::Minutes(1)), 2);
  EXPECT_EQ(budget.Take(begin + absl::Minutes(1)), 0);
  EXPECT_EQ(budget.Take(begin + absl::Minutes(1)), std::nullopt);
}

}  // namespace
}  // namespace meshnet::worker
