#include "benchmarks/proxy/link_shaper.h"

#include <algorithm>
#include <cmath>

namespace meshnet::benchmarks {

TimePoint LinkShaper::Schedule(TimePoint now, size_t bytes) {
  free_at_ = std::max(free_at_, now);
  if (shape_.bits_per_second > 0) {
    const double nanoseconds = static_cast<double>(bytes) * 8e9 / shape_.bits_per_second;
    free_at_ += std::chrono::nanoseconds(static_cast<long long>(std::ceil(nanoseconds)));
  }
  last_release_ = std::max(last_release_, free_at_ + shape_.one_way_delay);
  return last_release_;
}

}  // namespace meshnet::benchmarks
