// Bidirectional streams of serialized messages between workers and their clients, whatever carries
// them.
//
// The worker's sessions are written against these interfaces only. grpc_transport.h carries them
// over gRPC, fake_transport.h in memory.
//
// Threading: Stream's methods may be called from any thread, also while the caller holds its own
// locks: they never block and never call a StreamHandler before they return. OnMessage, OnHalfClose
// and OnClosed of one stream are serial; OnConnected and OnWritable may come beside them.
#ifndef MESHNET_CC_WORKER_TRANSPORT_H_
#define MESHNET_CC_WORKER_TRANSPORT_H_

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace meshnet::worker {

// The streaming methods of ShardService.
enum class Method { kSession, kSeam, kReturn };

absl::string_view MethodName(Method method);

// A serialized message, shared so that it can be sent again without a copy.
using Payload = std::shared_ptr<const std::string>;

// Who is at the other end, as far as the transport knows.
struct PeerInfo {
  std::string address;
  // The verified TLS identity (first subject alternative name, else common name); empty in
  // plaintext.
  std::string identity;
  // What the caller gave as its authorization for a route; opaque to the worker, handed on to the
  // next stage.
  std::string route_token;
};

class Stream {
 public:
  virtual ~Stream() = default;

  // Queues one message. Messages arrive in order. Nothing happens when the stream has ended.
  virtual void Send(Payload message) = 0;

  // False while more than the stream's bound is queued: the owner of the stream should produce
  // nothing more until OnWritable.
  virtual bool writable() const = 0;

  // Dialed streams: no message follows. The queue is sent first.
  virtual void HalfClose() = 0;

  // Ends the stream. Accepted streams: sends the queue, then the status. Dialed streams: aborts at
  // once, the queue is lost. OnClosed follows in both cases.
  virtual void Close(const absl::Status& status) = 0;

  // Ends the stream at once, whatever is queued.
  virtual void Abort() = 0;
};

class StreamHandler {
 public:
  virtual ~StreamHandler() = default;

  // Dialed streams: the other end has accepted the call. At most once, before any message.
  virtual void OnConnected() {}
  // `bytes` is valid during the call only.
  virtual void OnMessage(absl::string_view bytes) = 0;
  // Accepted streams: the other end sends no more messages.
  virtual void OnHalfClose() {}
  // The queue has drained after writable() was false.
  virtual void OnWritable() {}
  // Always the last call. OK after an orderly end; the peer's status with its reason; PEER_LOST
  // when the connection broke; CANCELLED when either end aborted.
  virtual void OnClosed(const absl::Status& status) = 0;
};

// Takes the streams that peers open at this worker.
class StreamAcceptor {
 public:
  virtual ~StreamAcceptor() = default;

  // Never null. The stream's first event comes after the return.
  virtual std::shared_ptr<StreamHandler> Accept(Method method, std::shared_ptr<Stream> stream,
                                                const PeerInfo& peer) = 0;
};

// A worker, and what the stream to it is for.
struct DialTarget {
  // host:port of the worker, or of the relay that it listens at.
  std::string endpoint;
  // The worker's id at that relay; empty: a direct line.
  std::string relay_peer_id;
  // See PeerInfo.
  std::string route_token;
  // For relays, which end the call then and account for it by these pairs.
  absl::Time deadline = absl::InfiniteFuture();
  std::vector<std::pair<std::string, std::string>> attribution;
};

class Dialer {
 public:
  virtual ~Dialer() = default;

  // Opens a stream to a worker. Returns at once; failure to connect comes as OnClosed.
  // INSECURE_TRANSPORT when the endpoint may not be reached in plaintext, FIELD_OUT_OF_BOUNDS when
  // it is no host:port, FEATURE_UNSUPPORTED for a relayed target where relays are not spoken.
  virtual absl::Status Dial(Method method, const DialTarget& target,
                            std::shared_ptr<StreamHandler> handler,
                            std::shared_ptr<Stream>* stream) = 0;
};

// One call of any service's streaming method, its messages as bytes.
struct ByteCall {
  std::string endpoint;
  // "/package.Service/Method".
  std::string path;
  std::string route_token;
  absl::Time deadline = absl::InfiniteFuture();
  // Read nothing more while the stream is not writable: for the side that answers.
  bool reads_wait_for_writes = false;
};

class Caller {
 public:
  virtual ~Caller() = default;

  // As Dialer::Dial. Events may come before the return.
  virtual absl::Status Call(const ByteCall& call, std::shared_ptr<StreamHandler> handler,
                            std::shared_ptr<Stream>* stream) = 0;
};

}  // namespace meshnet::worker

#endif  // MESHNET_CC_WORKER_TRANSPORT_H_
