// Streams by way of a relay, for workers that others cannot dial: both ends dial the relay, which
// joins the two calls and hands every frame on as it is (proto/meshnet/control/v1/relay.proto).
//
//   RelayDialer dialer(grpc, grpc, "worker-a");                  // relayed targets and direct ones
//   RelayListener listener({"relay:7200", "worker-b"}, grpc, acceptor, logger);
//
// What travels is what travels on a direct line, one frame a message. A relay has no way to hand on
// an answering side's status: sessions say how they end within the stream.
#ifndef MESHNET_CC_WORKER_RELAY_TRANSPORT_H_
#define MESHNET_CC_WORKER_RELAY_TRANSPORT_H_

#include <memory>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "cc/worker/json_log.h"
#include "cc/worker/transport.h"

namespace meshnet::worker {

class RelayDialer : public Dialer {
 public:
  // `peer_id` is this worker's name at relays, with TLS one of its certificate's; empty: it has
  // none and dials no relays (CONFIGURATION_INVALID).
  RelayDialer(Dialer* direct, Caller* caller, std::string peer_id)
      : direct_(direct), caller_(caller), peer_id_(std::move(peer_id)) {}

  absl::Status Dial(Method method, const DialTarget& target, std::shared_ptr<StreamHandler> handler,
                    std::shared_ptr<Stream>* stream) override;

 private:
  Dialer* const direct_;
  Caller* const caller_;
  const std::string peer_id_;
};

struct RelayListenerOptions {
  // host:port of the relay.
  std::string endpoint;
  std::string peer_id;
  // Callers' ids are names of their certificates, as the relay has verified.
  bool authenticated = false;
  // Calls at once.
  int max_calls = 1024;
  // Between attempts to reach the relay; doubles from the first to the second.
  absl::Duration min_backoff = absl::Milliseconds(100);
  absl::Duration max_backoff = absl::Seconds(5);
};

// Listens at a relay for as long as it lives, and comes back after the relay was gone.
class RelayListener {
 public:
  // `caller`, `acceptor` and `logger` must outlive the listener.
  RelayListener(RelayListenerOptions options, Caller* caller, StreamAcceptor* acceptor,
                const Logger* logger);
  // Calls that were taken up go on.
  ~RelayListener();

 private:
  struct State;
  class Events;

  void Run();

  const std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace meshnet::worker

#endif  // MESHNET_CC_WORKER_RELAY_TRANSPORT_H_
