// Streams in memory, one event at a time, for tests: every order of events is one that the test or
// a seed has chosen, and nothing depends on time.
//
//   FakeNetwork network;
//   network.Listen("b", &worker_b);
//   network.dialer()->Dial(Method::kSeam, {"b"}, handler, &stream);
//   while (network.DeliverOne()) {}
//
// Messages of one direction of a stream keep their order, as on a real one, unless a tap
// interferes.
#ifndef MESHNET_CC_WORKER_FAKE_TRANSPORT_H_
#define MESHNET_CC_WORKER_FAKE_TRANSPORT_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "cc/worker/transport.h"

namespace meshnet::worker {

enum class Direction { kToServer, kToClient };

// One message on its way, as a tap sees it.
struct Passing {
  Method method;
  Direction direction;
  // Of the worker that was dialed.
  std::string endpoint;
  // The tap may change them.
  std::string* bytes;
};

enum class TapVerdict {
  kDeliver,
  kDrop,
  kDuplicate,
  // Swaps places with the next message of its direction.
  kDelay,
};

class FakeNetwork {
 public:
  struct Options {
    // Bytes that may wait in one direction before its sender is not writable.
    uint64_t outbound_bytes = 1 << 20;
    // Absent: events in the order in which they were caused. Present: streams take turns at random.
    std::optional<uint32_t> seed;
  };

  explicit FakeNetwork(Options options);
  ~FakeNetwork();

  // `acceptor` must stay until the endpoint is broken.
  void Listen(const std::string& endpoint, StreamAcceptor* acceptor);
  // The process behind the endpoint has died: its streams break, dialing it fails.
  void Break(const std::string& endpoint);
  // Dialing it leads nowhere and is never answered.
  void Silence(const std::string& endpoint);
  // Nothing is delivered in this direction of the streams to `endpoint` until it is let go.
  void Stall(const std::string& endpoint, Method method, Direction direction, bool stalled);
  void SetTap(std::function<TapVerdict(const Passing&)> tap);

  Dialer* dialer() { return dialer_.get(); }

  // Delivers one event; false when there is none that may be delivered.
  bool DeliverOne();
  // Bytes that wait in all streams together.
  uint64_t queued_bytes() const;

 private:
  class End;
  class NetworkDialer;
  struct Connection;
  struct Pending;

  std::optional<Pending> Take();
  void Deliver(Pending pending);

  const Options options_;
  mutable absl::Mutex mu_;
  std::mt19937 random_;
  uint64_t next_order_ = 0;
  std::function<TapVerdict(const Passing&)> tap_;
  std::map<std::string, StreamAcceptor*> acceptors_;
  std::set<std::string> silent_;
  std::set<std::tuple<std::string, Method, Direction>> stalled_;
  std::vector<std::shared_ptr<Connection>> connections_;
  const std::unique_ptr<Dialer> dialer_;
};

// A node in the middle that knows nothing of what it carries: every stream that is opened at it is
// opened again at `target`, and messages pass as they are.
class OpaqueRelay : public StreamAcceptor {
 public:
  struct Record {
    Method method;
    Direction direction;
    std::string bytes;
  };

  OpaqueRelay(Dialer* dialer, std::string target);

  std::shared_ptr<StreamHandler> Accept(Method method, std::shared_ptr<Stream> stream,
                                        const PeerInfo& peer) override;

  std::vector<Record> records() const;

 private:
  class Leg;
  struct Log;

  Dialer* const dialer_;
  const std::string target_;
  const std::shared_ptr<Log> log_;
};

}  // namespace meshnet::worker

#endif  // MESHNET_CC_WORKER_FAKE_TRANSPORT_H_
