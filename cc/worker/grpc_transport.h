// Streams over gRPC's callback API, as raw bytes: sizes are checked before anything is parsed, and
// bytes that are no message get the worker's own reason instead of gRPC's.
//
//   auto dialer = MakeGrpcDialer(options);
//   auto reactor = AcceptGrpcStream(Method::kSeam, context, acceptor, options);  // in a service
#ifndef MESHNET_CC_WORKER_GRPC_TRANSPORT_H_
#define MESHNET_CC_WORKER_GRPC_TRANSPORT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "cc/worker/tls_files.h"
#include "cc/worker/transport.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/server_callback.h"

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

// Its destructor waits for the streams that it has dialed; end them first.
std::unique_ptr<GrpcDialer> MakeGrpcDialer(const GrpcTransportOptions& options);

// Deletes itself when the call is done. `acceptor` must outlive the server.
grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* AcceptGrpcStream(
    Method method, grpc::CallbackServerContext* context, StreamAcceptor* acceptor,
    const GrpcTransportOptions& options);

// What gRPC knows about the caller.
PeerInfo PeerOf(const grpc::CallbackServerContext& context);

}  // namespace meshnet::worker

#endif  // MESHNET_CC_WORKER_GRPC_TRANSPORT_H_
