// A TCP proxy that makes loopback behave like a longer, narrower link: a delay and a bandwidth in
// each direction.
//
//   Proxy proxy;
//   absl::StatusOr<int> port = proxy.AddLink({"127.0.0.1", 50051});
//   std::thread loop([&] { proxy.Run(); });
//   proxy.SetShape(LinkShape{std::chrono::milliseconds(20), 100e6});  // 40 ms round trip, 100
//   Mbit/s
//   ... connect to 127.0.0.1:*port ...
//   proxy.Stop();
//
// One thread, one epoll set, one timer. Bytes come out whole and in order; half-closes travel with
// them. What a connection has under way is bounded in each direction: beyond it the proxy stops
// reading and TCP slows the sender down. Not emulated: the connection handshake (accepted at once),
// loss, reordering.
#ifndef BENCHMARKS_PROXY_PROXY_H_
#define BENCHMARKS_PROXY_PROXY_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "benchmarks/proxy/link_shaper.h"

namespace meshnet::benchmarks {

struct Endpoint {
  // A numeric IPv4 address.
  std::string host;
  int port = 0;
};

// Since the start or the last ResetStats().
struct LinkStats {
  uint64_t connections = 0;
  uint64_t open_connections = 0;
  // Delivered, client to target and back.
  uint64_t bytes_up = 0;
  uint64_t bytes_down = 0;
  // The most that one direction of one connection ever held.
  uint64_t peak_queued_bytes = 0;
};

class Proxy {
 public:
  struct Options {
    // Per connection and direction; at least one read of 64 KiB beyond it can be under way. Holds
    // 160 ms at 100 Mbit/s.
    size_t max_queued_bytes = 2 << 20;
  };

  Proxy();
  explicit Proxy(Options options);
  ~Proxy();
  Proxy(const Proxy&) = delete;
  Proxy& operator=(const Proxy&) = delete;

  // Before Run(). Listens on 127.0.0.1 at `listen_port` (0 = any) and connects to `target` for each
  // connection. Returns the port. All connections of a link share its bandwidth.
  absl::StatusOr<int> AddLink(const Endpoint& target, int listen_port = 0);

  // Serves until Stop(). INTERNAL when the kernel refuses epoll.
  absl::Status Run();

  // From any thread, while Run() runs or before it.
  void Stop();
  // Holds for data that comes in from now on, on all links.
  void SetShape(LinkShape shape);
  // One entry per link, in the order of AddLink. Whatever has come out is counted.
  std::vector<LinkStats> Stats() const;
  void ResetStats();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace meshnet::benchmarks

#endif  // BENCHMARKS_PROXY_PROXY_H_
