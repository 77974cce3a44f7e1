// host:port as hops and flags give it.
#ifndef MESHNET_CC_WORKER_ENDPOINT_H_
#define MESHNET_CC_WORKER_ENDPOINT_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace meshnet::worker {

struct Endpoint {
  // Without brackets.
  std::string host;
  uint16_t port = 0;
  bool is_loopback = false;

  // "host:port", an IPv6 host in brackets.
  std::string ToString() const;
};

// Only a DNS name or an IP address with a port: never a URI that makes a dialer do something else
// (unix sockets, other resolvers). FIELD_OUT_OF_BOUNDS otherwise. Port 0 only with
// `allow_any_port`.
absl::StatusOr<Endpoint> ParseEndpoint(absl::string_view text, bool allow_any_port = false);

}  // namespace meshnet::worker

#endif  // MESHNET_CC_WORKER_ENDPOINT_H_
