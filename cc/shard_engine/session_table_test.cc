#include "cc/shard_engine/session_table.h"

#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "cc/common/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace meshnet {
namespace {

SessionKey Key(int id, uint64_t epoch = 1) { return {absl::StrFormat("%016d", id), epoch}; }

class SessionTableTest : public testing::Test {
 protected:
  SessionTableTest() {
    options_.slots = 3;
    options_.now = [this] { return now_; };
    options_.on_free = [this](uint32_t slot) { freed_.push_back(slot); };
  }

  uint32_t Slot(SessionTable& table, int id) {
    const auto session = table.Open(Key(id), {}, nullptr);
    EXPECT_TRUE(session.ok()) << session.status();
    return session.ok() ? (*session)->slot : ~0u;
  }

  absl::Time now_ = absl::UnixEpoch();
  std::vector<uint32_t> freed_;
  SessionTable::Options options_;
};

TEST_F(SessionTableTest, TheLowestFreeSlotIsTaken) {
  SessionTable table(options_);
  EXPECT_EQ(Slot(table, 1), 0u);
  EXPECT_EQ(Slot(table, 2), 1u);
  EXPECT_EQ(Slot(table, 3), 2u);
  ASSERT_TRUE(table.Release(Key(2)).ok());
  ASSERT_TRUE(table.Release(Key(1)).ok());
  EXPECT_THAT(freed_, testing::ElementsAre(1, 0));
  EXPECT_EQ(Slot(table, 4), 0u);
  EXPECT_EQ(Slot(table, 5), 1u);
  EXPECT_EQ(table.open_sessions(), 3u);
}

TEST_F(SessionTableTest, LeastRecentlyUsedGoesFirstAndOnlyWhenIdle) {
  SessionTable table(options_);
  for (const int id : {1, 2, 3}) {
    Slot(table, id);
    now_ += absl::Seconds(1);
  }
  ASSERT_TRUE(table.Use(Key(1)).ok());  // 2 is the oldest now, used at second 1
  now_ = absl::UnixEpoch() + absl::Seconds(1) + absl::Seconds(10) - absl::Nanoseconds(1);
  EXPECT_EQ(ReasonOf(table.Open(Key(4), {}, nullptr).status()), v1::REASON_SESSIONS_EXHAUSTED);
  now_ += absl::Nanoseconds(1);
  std::vector<SessionKey> evicted;
  ASSERT_TRUE(table.Open(Key(4), {}, &evicted).ok());
  EXPECT_THAT(evicted, testing::ElementsAre(Key(2)));
  EXPECT_EQ(table.evictions(), 1u);
  EXPECT_EQ(ReasonOf(table.Use(Key(2)).status()), v1::REASON_SESSION_EVICTED);
  EXPECT_EQ(ReasonOf(table.Release(Key(2))), v1::REASON_SESSION_EVICTED);
  now_ += absl::Seconds(10);
  ASSERT_TRUE(table.Open(Key(2), {}, nullptr).ok()) << "the same key may come back";
  EXPECT_TRUE(table.Use(Key(2)).ok());
}

TEST_F(SessionTableTest, APinnedSessionIsNeverEvicted) {
  options_.slots = 1;
  options_.idle_ttl = absl::Seconds(20);
  SessionTable table(options_);
  auto session = table.Open(Key(1), {}, nullptr);
  ASSERT_TRUE(session.ok());
  (*session)->pinned = true;
  now_ += absl::Seconds(100);
  EXPECT_TRUE(table.EvictIdle().empty());
  EXPECT_EQ(ReasonOf(table.Open(Key(2), {}, nullptr).status()), v1::REASON_SESSIONS_EXHAUSTED);
  (*session)->pinned = false;
  EXPECT_THAT(table.EvictIdle(), testing::ElementsAre(Key(1)));
}

TEST_F(SessionTableTest, AnExpiredSessionGivesWayBeforeTheLruMinimum) {
  options_.slots = 1;
  options_.idle_ttl = absl::Seconds(4);
  SessionTable table(options_);
  Slot(table, 1);
  now_ += absl::Seconds(4);
  EXPECT_TRUE(table.Open(Key(2), {}, nullptr).ok());
}

TEST_F(SessionTableTest, StatesMayGrowUnevenly) {
  // A ring of 4 tokens, and something for every 8.
  options_.bytes = [](uint32_t tokens) { return 10 * std::min(tokens, 4u) + 100 * (tokens / 8); };
  SessionTable table(options_);
  auto one = table.Open(Key(1), {}, nullptr);
  auto two = table.Open(Key(2), {}, nullptr);
  ASSERT_TRUE(table.SetCached(*one, 3).ok());
  EXPECT_EQ(table.held_bytes(), 30u);
  ASSERT_TRUE(table.SetCached(*two, 17).ok());
  EXPECT_EQ(table.held_bytes(), 30u + 240u);
  ASSERT_TRUE(table.SetCached(*two, 7).ok());
  EXPECT_EQ(table.held_bytes(), 30u + 40u);
  ASSERT_TRUE(table.Release(Key(1)).ok());
  ASSERT_TRUE(table.Release(Key(2)).ok());
  EXPECT_EQ(table.held_bytes(), 0u);
}

TEST_F(SessionTableTest, TheBudgetCountsCachedTokens) {
  options_.bytes = [](uint32_t tokens) { return uint64_t{100} * tokens; };
  options_.budget_bytes = 1000;
  SessionTable table(options_);
  auto one = table.Open(Key(1), {}, nullptr);
  auto two = table.Open(Key(2), {}, nullptr);
  ASSERT_TRUE(table.SetCached(*one, 6).ok());
  ASSERT_TRUE(table.SetCached(*two, 4).ok());
  EXPECT_EQ(table.held_bytes(), 1000u);
  const absl::Status full = table.SetCached(*two, 5);
  EXPECT_EQ(ReasonOf(full), v1::REASON_MEMORY_BUDGET_EXCEEDED);
  EXPECT_GT(RetryAfterMsOf(full), 0u);
  EXPECT_EQ((*two)->cached_tokens, 4u);
  ASSERT_TRUE(table.SetCached(*one, 5).ok());
  ASSERT_TRUE(table.SetCached(*two, 5).ok());
  ASSERT_TRUE(table.Release(Key(1)).ok());
  EXPECT_EQ(table.held_bytes(), 500u);

  auto three = table.Open(Key(3), {}, nullptr);
  now_ += absl::Seconds(10);
  ASSERT_TRUE(table.SetCached(*three, 10).ok());
  EXPECT_EQ(ReasonOf(table.Use(Key(2)).status()), v1::REASON_SESSION_EVICTED);
  EXPECT_EQ(table.held_bytes(), 1000u);
  EXPECT_THAT(table.EvictIdle(), testing::ElementsAre(Key(2)));
  EXPECT_TRUE(table.EvictIdle().empty());
  EXPECT_EQ(ReasonOf(table.SetCached(*three, 11)), v1::REASON_MEMORY_BUDGET_EXCEEDED);
}

TEST_F(SessionTableTest, EpochsAreRememberedForABoundedNumberOfIds) {
  options_.remembered_ids = 10;
  SessionTable table(options_);
  ASSERT_TRUE(table.Open(Key(0, 9), {}, nullptr).ok());
  ASSERT_TRUE(table.Open(Key(1, 9), {}, nullptr).ok());
  ASSERT_TRUE(table.Release(Key(1, 9)).ok());
  EXPECT_EQ(ReasonOf(table.Open(Key(1, 8), {}, nullptr).status()), v1::REASON_STALE_EPOCH);
  // 0 stays open; enough others pass by to push 1 out.
  for (int id = 2; id < 14; ++id) {
    ASSERT_TRUE(table.Open(Key(id), {}, nullptr).ok());
    ASSERT_TRUE(table.Release(Key(id)).ok());
  }
  EXPECT_EQ(ReasonOf(table.Open(Key(0, 8), {}, nullptr).status()), v1::REASON_STALE_EPOCH);
  EXPECT_EQ(ReasonOf(table.Use(Key(1, 9)).status()), v1::REASON_SESSION_UNKNOWN);
  EXPECT_TRUE(table.Open(Key(1, 8), {}, nullptr).ok());
}

TEST_F(SessionTableTest, ANewerEpochTakesTheSlotOfTheOlderOneEvenWhenFull) {
  options_.slots = 1;
  SessionTable table(options_);
  Slot(table, 1);
  std::vector<SessionKey> evicted;
  const auto session = table.Open(Key(1, 2), {}, &evicted);
  ASSERT_TRUE(session.ok()) << session.status();
  EXPECT_THAT(evicted, testing::ElementsAre(Key(1, 1)));
  EXPECT_THAT(freed_, testing::ElementsAre(0));
  EXPECT_EQ(table.evictions(), 0u) << "replaced, not evicted";
}

TEST_F(SessionTableTest, CancelMarksTheSessionAlone) {
  SessionTable table(options_);
  auto one = table.Open(Key(1), {}, nullptr);
  auto two = table.Open(Key(2), {}, nullptr);
  table.Cancel(Key(1));
  table.Cancel(Key(7));
  EXPECT_TRUE((*one)->cancelled);
  EXPECT_FALSE((*two)->cancelled);
}

}  // namespace
}  // namespace meshnet
