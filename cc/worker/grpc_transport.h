// Streams over gRPC as raw bytes: sizes are checked before anything is parsed, and bytes that are
// no message get the worker's own reason instead of gRPC's.
//
//   GrpcEvents events;
//   auto dialer = MakeGrpcDialer(&events, options);
//   GrpcService service(&events, options, accept);   // of the server that events.builder() builds
#ifndef MESHNET_CC_WORKER_GRPC_TRANSPORT_H_
#define MESHNET_CC_WORKER_GRPC_TRANSPORT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "cc/worker/grpc_events.h"
#include "cc/worker/tls_files.h"
#include "cc/worker/transport.h"

namespace meshnet::worker {

// Metadata key of PeerInfo::route_token.
inline constexpr char kRouteTokenKey[] = "meshnet-route-token";

struct GrpcTransportOptions {
  // Bytes that may wait in one stream before it says that it is not writable.
  uint64_t outbound_bytes = 1 << 20;
  // A peer that answers no ping for keepalive_timeout is gone. (One whose process dies is noticed
  // at once.) On a busy machine a healthy process may well be silent for a second or two.
  absl::Duration keepalive_time = absl::Seconds(1);
  absl::Duration keepalive_timeout = absl::Seconds(5);
  uint64_t max_message_bytes = 64 << 20;
  // Null: plaintext. TLS endpoints are verified against `tls_target_name` when it is set.
  std::shared_ptr<TlsFiles> tls;
  std::string tls_target_name;
  // Plaintext to endpoints that are not loopback.
  bool allow_insecure = false;
};

// Keepalive, flow control and proxies as channel arguments, the same at both ends.
std::vector<std::pair<std::string, int>> TransportArguments(const GrpcTransportOptions& options);

// Direct lines to workers, and calls of other services.
class GrpcDialer : public Dialer, public Caller {};

// Its destructor aborts the streams that it has dialed and waits for their end. `events` must
// outlive it.
std::unique_ptr<GrpcDialer> MakeGrpcDialer(GrpcEvents* events, const GrpcTransportOptions& options);

// Every call that comes to the server of `events`, whatever its method, as a stream of bytes.
class GrpcService {
 public:
  // For each call; `path` is "/package.Service/Method". As StreamAcceptor::Accept.
  using AcceptCall = std::function<std::shared_ptr<StreamHandler>(
      const std::string& path, std::shared_ptr<Stream> stream, const PeerInfo& peer)>;

  // Before the server is built. `events` must outlive the service, the service the server.
  GrpcService(GrpcEvents* events, const GrpcTransportOptions& options, AcceptCall accept);
  ~GrpcService();

  // Once the server has been started.
  void Start();
  // Once it has been shut down: waits until its last stream is over.
  void AwaitEnd();

 private:
  class Impl;
  const std::unique_ptr<Impl> impl_;
};

}  // namespace meshnet::worker

#endif  // MESHNET_CC_WORKER_GRPC_TRANSPORT_H_
