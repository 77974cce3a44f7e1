#include "benchmarks/proxy/link_shaper.h"

#include <gtest/gtest.h>

namespace meshnet::benchmarks {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

const TimePoint kStart = TimePoint(std::chrono::hours(1));

TEST(LinkShaperTest, AnUnshapedLinkReleasesAtOnce) {
  LinkShaper link;
  EXPECT_EQ(link.Schedule(kStart, 1000000), kStart);
}

TEST(LinkShaperTest, DelayIsAddedToTheTimeOnTheWire) {
  // 1250 bytes are 10,000 bits: 0.1 ms at 100 Mbit/s.
  LinkShaper link(LinkShape{milliseconds(20), 100e6});
  EXPECT_EQ(link.Schedule(kStart, 1250), kStart + microseconds(20100));
}

TEST(LinkShaperTest, PiecesOccupyTheLinkOneAfterTheOther) {
  LinkShaper link(LinkShape{milliseconds(20), 100e6});
  EXPECT_EQ(link.Schedule(kStart, 1250), kStart + microseconds(20100));
  EXPECT_EQ(link.Schedule(kStart, 2500), kStart + microseconds(20300));
  // The link has been idle since 0.3 ms.
  EXPECT_EQ(link.Schedule(kStart + milliseconds(1), 1250), kStart + microseconds(21100));
}

TEST(LinkShaperTest, DelayAloneDoesNotQueue) {
  LinkShaper link(LinkShape{milliseconds(5), 0});
  EXPECT_EQ(link.Schedule(kStart, 1 << 20), kStart + milliseconds(5));
  EXPECT_EQ(link.Schedule(kStart, 1 << 20), kStart + milliseconds(5));
}

TEST(LinkShaperTest, AShorterDelayNeverOvertakesWhatIsUnderWay) {
  LinkShaper link(LinkShape{milliseconds(20), 0});
  EXPECT_EQ(link.Schedule(kStart, 10), kStart + milliseconds(20));
  link.set_shape(LinkShape{});
  EXPECT_EQ(link.Schedule(kStart + milliseconds(1), 10), kStart + milliseconds(20));
  EXPECT_EQ(link.Schedule(kStart + milliseconds(30), 10), kStart + milliseconds(30));
}

TEST(LinkShaperTest, SecondsOfTrafficDoNotDrift) {
  LinkShaper link(LinkShape{milliseconds(0), 100e6});
  TimePoint due = kStart;
  for (int i = 0; i < 10000; ++i) due = link.Schedule(kStart, 12500);
  EXPECT_EQ(due, kStart + std::chrono::seconds(10));
}

}  // namespace
}  // namespace meshnet::benchmarks
