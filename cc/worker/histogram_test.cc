#include "cc/worker/histogram.h"

#include <cstdint>
#include <numeric>

#include "absl/time/time.h"
#include "gtest/gtest.h"

namespace meshnet::worker {
namespace {

TEST(HistogramTest, CountsByBounds) {
  Histogram histogram;
  histogram.Add(absl::Microseconds(50));  // at a bound: counts below it
  histogram.Add(absl::Microseconds(51));
  histogram.Add(absl::Milliseconds(-3));  // a clock that went backwards
  histogram.Add(absl::Seconds(31));       // above all
  const v1::Histogram message = histogram.ToProto();
  ASSERT_EQ(message.counts_size(), message.bounds_us_size() + 1);
  EXPECT_EQ(message.bounds_us(0), 50);
  EXPECT_EQ(message.counts(0), 2);
  EXPECT_EQ(message.counts(1), 1);
  EXPECT_EQ(message.counts(message.counts_size() - 1), 1);
  EXPECT_EQ(std::accumulate(message.counts().begin(), message.counts().end(), uint64_t{0}), 4);
  EXPECT_EQ(message.sum_us(), 31'000'101);
}

TEST(HistogramTest, BoundsRise) {
  const v1::Histogram message = Histogram().ToProto();
  for (int i = 1; i < message.bounds_us_size(); ++i) {
    EXPECT_LT(message.bounds_us(i - 1), message.bounds_us(i));
  }
}

}  // namespace
}  // namespace meshnet::worker
