// The arithmetic of one direction of an emulated link: when does a piece of data come out of the
// far end?
//
// A link has a one-way delay and a bandwidth. Pieces leave one after the other in the order in
// which they came: each occupies the link for bytes / bandwidth (a token bucket without depth, so
// no burst is ever faster than the link), then travels for the delay. All connections that share a
// link share one LinkShaper per direction.
//
//   LinkShaper link(LinkShape{std::chrono::milliseconds(20), 100e6});
//   auto due = link.Schedule(now, 1250);  // now + 0.1 ms on the wire + 20 ms
#ifndef BENCHMARKS_PROXY_LINK_SHAPER_H_
#define BENCHMARKS_PROXY_LINK_SHAPER_H_

#include <chrono>
#include <cstddef>

namespace meshnet::benchmarks {

using TimePoint = std::chrono::steady_clock::time_point;

struct LinkShape {
  // Half of the round trip.
  std::chrono::nanoseconds one_way_delay{0};
  // Bits per second; 0 = unlimited.
  double bits_per_second = 0;
};

// Not thread-safe.
class LinkShaper {
 public:
  LinkShaper() = default;
  explicit LinkShaper(LinkShape shape) : shape_(shape) {}

  // What is under way already keeps the times it got.
  void set_shape(LinkShape shape) { shape_ = shape; }
  const LinkShape& shape() const { return shape_; }

  // The time at which the last of `bytes` bytes that entered at `now` comes out. Never earlier than
  // that of an earlier call, also when the shape changed in between: a link does not reorder.
  TimePoint Schedule(TimePoint now, size_t bytes);

 private:
  LinkShape shape_;
  // When the last byte accepted so far has left the near end.
  TimePoint free_at_{};
  TimePoint last_release_{};
};

}  // namespace meshnet::benchmarks

#endif  // BENCHMARKS_PROXY_LINK_SHAPER_H_
