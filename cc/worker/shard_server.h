// The worker's gRPC server: ShardService, TokenizerService and grpc.health.v1 on one port.
//
//   auto server = ShardServer::Start(options, &events, &worker);
//   LOG((*server)->port());
#ifndef MESHNET_CC_WORKER_SHARD_SERVER_H_
#define MESHNET_CC_WORKER_SHARD_SERVER_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cc/worker/grpc_events.h"
#include "cc/worker/grpc_transport.h"
#include "cc/worker/worker.h"

namespace meshnet::worker {

struct ShardServerOptions {
  // host:port; port 0 takes a free one.
  std::string listen = "127.0.0.1:0";
  // Without transport.tls only on loopback addresses, unless transport.allow_insecure.
  GrpcTransportOptions transport;
};

class ShardServer {
 public:
  // INSECURE_TRANSPORT, FIELD_OUT_OF_BOUNDS (listen), or CONFIGURATION_INVALID when the address
  // cannot be bound. `events`, for this one server, and `worker` must outlive it.
  static absl::StatusOr<std::unique_ptr<ShardServer>> Start(const ShardServerOptions& options,
                                                            GrpcEvents* events, Worker* worker);
  virtual ~ShardServer() = default;

  virtual int port() const = 0;
  // host:port as clients on this machine reach it.
  virtual std::string address() const = 0;
  // Ends all calls, those still running after `grace` by cancelling them. Not on the thread that
  // polls `events`.
  virtual void Shutdown(absl::Duration grace) = 0;
};

}  // namespace meshnet::worker

#endif  // MESHNET_CC_WORKER_SHARD_SERVER_H_
