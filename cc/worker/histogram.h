// How long things took, by buckets.
#ifndef MESHNET_CC_WORKER_HISTOGRAM_H_
#define MESHNET_CC_WORKER_HISTOGRAM_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>

#include "absl/time/time.h"
#include "cc/common/status.h"
#include "proto/meshnet/shard/v1/shard.pb.h"

namespace meshnet::worker {

// Not thread-safe.
class Histogram {
 public:
  // A clock that went backwards counts as no time.
  void Add(absl::Duration took) {
    const int64_t us = std::max<int64_t>(absl::ToInt64Microseconds(took), 0);
    const auto* const bound = std::lower_bound(std::begin(kBoundsUs), std::end(kBoundsUs), us);
    ++counts_[static_cast<size_t>(std::distance(std::begin(kBoundsUs), bound))];
    sum_us_ += static_cast<uint64_t>(us);
  }

  v1::Histogram ToProto() const {
    v1::Histogram message;
    message.mutable_bounds_us()->Add(std::begin(kBoundsUs), std::end(kBoundsUs));
    message.mutable_counts()->Add(counts_.begin(), counts_.end());
    message.set_sum_us(sum_us_);
    return message;
  }

 private:
  // From a seam on one machine to a prefill chunk of a large model.
  static constexpr int64_t kBoundsUs[] = {
      50,     100,     200,     500,     1'000,     2'000,     5'000,     10'000,     20'000,
      50'000, 100'000, 200'000, 500'000, 1'000'000, 2'000'000, 5'000'000, 10'000'000, 30'000'000};

  std::array<uint64_t, std::size(kBoundsUs) + 1> counts_{};
  uint64_t sum_us_ = 0;
};

}  // namespace meshnet::worker

#endif  // MESHNET_CC_WORKER_HISTOGRAM_H_
