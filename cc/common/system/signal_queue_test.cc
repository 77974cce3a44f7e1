#include "cc/common/system/signal_queue.h"

#include <unistd.h>

#include <csignal>
#include <optional>
#include <thread>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"

namespace meshnet {
namespace {

TEST(SignalQueueTest, NothingComesUntilTheDeadline) {
  SignalQueue signals({SIGTERM});
  EXPECT_EQ(signals.Wait(absl::InfinitePast()), std::nullopt);
}

TEST(SignalQueueTest, SignalsThatNobodyWaitedForComeOneAfterTheOther) {
  SignalQueue signals({SIGTERM, SIGINT});
  kill(getpid(), SIGTERM);
  const std::optional<int> first = signals.Wait(absl::InfiniteFuture());
  kill(getpid(), SIGINT);
  kill(getpid(), SIGTERM);
  const std::optional<int> second = signals.Wait(absl::InfiniteFuture());
  const std::optional<int> third = signals.Wait(absl::InfiniteFuture());
  EXPECT_EQ(first, SIGTERM);
  EXPECT_EQ(*second + *third, SIGINT + SIGTERM);
  EXPECT_EQ(signals.Wait(absl::InfinitePast()), std::nullopt);
}

TEST(SignalQueueTest, ASignalEndsTheWait) {
  SignalQueue signals({SIGTERM});
  std::thread sender([] { kill(getpid(), SIGTERM); });
  EXPECT_EQ(signals.Wait(absl::InfiniteFuture()), SIGTERM);
  sender.join();
}

TEST(SignalQueueTest, AThreadCanEndTheWaitToo) {
  SignalQueue signals({SIGTERM});
  std::thread poster([&signals] { signals.Post(); });
  EXPECT_EQ(signals.Wait(absl::InfiniteFuture()), SignalQueue::kPosted);
  poster.join();
}

TEST(SignalQueueTest, OtherThreadsNeverSeeTheSignals) {
  SignalQueue signals({SIGTERM});
  sigset_t inherited;
  std::thread([&inherited] { pthread_sigmask(SIG_BLOCK, nullptr, &inherited); }).join();
  EXPECT_EQ(sigismember(&inherited, SIGTERM), 1);
}

TEST(SignalQueueTest, ASignalThatIsNotAskedForKeepsItsMeaning) {
  EXPECT_EXIT(
      {
        SignalQueue signals({SIGTERM});
        kill(getpid(), SIGUSR1);
      },
      testing::KilledBySignal(SIGUSR1), "");
}

}  // namespace
}  // namespace meshnet
