#include "cc/worker/grpc_log.h"

#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "cc/worker/json_log.h"
#include "gmock/gmock.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"

namespace meshnet::worker {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::Each;
using ::testing::HasSubstr;

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

struct Lines {
  void Add(const std::string& line) {
    absl::MutexLock lock(&mu);
    lines.push_back(line);
  }

  absl::Mutex mu;
  std::vector<std::string> lines ABSL_GUARDED_BY(mu);
};

TEST(LogGrpcToTest, TurnsALineOfGrpcIntoARecordAndKeepsItFromStderr) {
  // As the program has them: gRPC may log until its very end.
  static auto* const seen = new Lines;
  static const auto* const logger = new Logger([](const std::string& line) { seen->Add(line); });
  LogGrpcTo(logger);
  testing::internal::CaptureStderr();
  // A server that nobody would serve.
  EXPECT_EQ(grpc::ServerBuilder().BuildAndStart(), nullptr);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  absl::MutexLock lock(&seen->mu);
  EXPECT_THAT(seen->lines, Each(HasSubstr(R"("event":"grpc")")));
  EXPECT_THAT(seen->lines, Contains(AllOf(HasSubstr(R"("severity":"WARNING")"),
                                          HasSubstr("completion queues"))));
}

}  // namespace
}  // namespace meshnet::worker
