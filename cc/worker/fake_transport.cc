#include "cc/worker/fake_transport.h"

#include <algorithm>
#include <deque>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cc/common/status.h"

namespace meshnet::worker {
namespace {

absl::Status Cancelled() { return MakeError(v1::REASON_CANCELLED, "the other end ended the call"); }

absl::Status Broken(const std::string& endpoint) {
  return MakeError(v1::REASON_PEER_LOST, absl::StrCat("the line to ", endpoint, " broke"));
}

enum class Kind { kConnected, kMessage, kHalfClose, kWritable, kClosed };

}  // namespace

// One event for one end of a connection.
struct FakeNetwork::Pending {
  Kind kind = Kind::kMessage;
  uint64_t order = 0;
  Payload bytes;
  absl::Status status;
  // A tap has seen it.
  bool tapped = false;
  std::shared_ptr<Connection> connection;
  Direction direction = Direction::kToServer;
};

struct FakeNetwork::Connection {
  Method method;
  std::string endpoint;
  std::shared_ptr<StreamHandler> client;
  std::shared_ptr<StreamHandler> server;
  // Towards the server and towards the client.
  std::deque<Pending> queue[2];
  uint64_t queued[2] = {0, 0};
  bool blocked[2] = {false, false};
  // The end that receives in this direction has had its last event queued.
  bool closed[2] = {false, false};
  bool half_closed = false;
  bool server_closing = false;
};

class FakeNetwork::End : public Stream {
 public:
  // `direction` is the one in which this end sends.
  End(FakeNetwork* network, std::shared_ptr<Connection> connection, Direction direction)
      : network_(network), connection_(std::move(connection)), direction_(direction) {}

  void Send(Payload message) override {
    absl::MutexLock lock(&network_->mu_);
    const int d = static_cast<int>(direction_);
    if (connection_->closed[d] || (is_client() && connection_->half_closed) ||
        (!is_client() && connection_->server_closing)) {
      return;
    }
    connection_->queued[d] += message->size();
    if (connection_->queued[d] > network_->options_.outbound_bytes) connection_->blocked[d] = true;
    Pending pending;
    pending.bytes = std::move(message);
    Push(direction_, std::move(pending));
  }

  bool writable() const override {
    absl::MutexLock lock(&network_->mu_);
    return !connection_->blocked[static_cast<int>(direction_)];
  }

  void HalfClose() override {
    absl::MutexLock lock(&network_->mu_);
    if (connection_->half_closed || connection_->closed[static_cast<int>(direction_)]) return;
    connection_->half_closed = true;
    Pending pending;
    pending.kind = Kind::kHalfClose;
    Push(direction_, std::move(pending));
  }

  void Close(const absl::Status& status) override {
    absl::MutexLock lock(&network_->mu_);
    if (is_client()) {
      Cut(connection_.get(), Cancelled(), Cancelled());
      return;
    }
    if (connection_->server_closing || connection_->closed[1]) return;
    connection_->server_closing = true;
    Pending pending;
    pending.kind = Kind::kClosed;
    pending.status = status;
    connection_->closed[1] = true;
    Push(Direction::kToClient, std::move(pending));
  }

  void Abort() override {
    absl::MutexLock lock(&network_->mu_);
    Cut(connection_.get(), Cancelled(), Cancelled());
  }

  // Ends both ends at once; what was on its way is lost.
  void Cut(Connection* connection, const absl::Status& to_client, const absl::Status& to_server) {
    for (int d = 0; d < 2; ++d) {
      connection->queue[d].clear();
      connection->queued[d] = 0;
      // A closing that was queued is lost with the rest: this one takes its place.
      const bool had_last = connection->closed[d] && delivered_last(d);
      if (had_last) continue;
      connection->closed[d] = true;
      Pending pending;
      pending.kind = Kind::kClosed;
      pending.status = d == 0 ? to_server : to_client;
      Push(static_cast<Direction>(d), std::move(pending));
    }
  }

  void Push(Direction direction, Pending pending) {
    pending.order = network_->next_order_++;
    pending.direction = direction;
    pending.connection = connection_;
    connection_->queue[static_cast<int>(direction)].push_back(std::move(pending));
  }

 private:
  bool is_client() const { return direction_ == Direction::kToServer; }
  bool delivered_last(int d) const {
    return d == 0 ? connection_->server == nullptr : connection_->client == nullptr;
  }

  FakeNetwork* const network_;
  const std::shared_ptr<Connection> connection_;
  const Direction direction_;
};

class FakeNetwork::NetworkDialer : public Dialer {
 public:
  explicit NetworkDialer(FakeNetwork* network) : network_(network) {}

  absl::Status Dial(Method method, const DialTarget& target, std::shared_ptr<StreamHandler> handler,
                    std::shared_ptr<Stream>* stream) override {
    const std::string& endpoint = target.endpoint;
    auto connection = std::make_shared<Connection>();
    connection->method = method;
    connection->endpoint = endpoint;
    connection->client = std::move(handler);
    auto client = std::make_shared<End>(network_, connection, Direction::kToServer);
    auto server = std::make_shared<End>(network_, connection, Direction::kToClient);
    *stream = client;
    StreamAcceptor* acceptor = nullptr;
    {
      absl::MutexLock lock(&network_->mu_);
      network_->connections_.push_back(connection);
      if (network_->silent_.count(endpoint) > 0) return absl::OkStatus();
      const auto it = network_->acceptors_.find(endpoint);
      Pending pending;
      if (it == network_->acceptors_.end()) {
        pending.kind = Kind::kClosed;
        pending.status = Broken(endpoint);
        connection->closed[0] = connection->closed[1] = true;
        client->Push(Direction::kToClient, std::move(pending));
        return absl::OkStatus();
      }
      acceptor = it->second;
      pending.kind = Kind::kConnected;
      client->Push(Direction::kToClient, std::move(pending));
    }
    PeerInfo peer;
    peer.address = "fake";
    peer.route_token = target.route_token;
    connection->server = acceptor->Accept(method, server, peer);
    return absl::OkStatus();
  }

 private:
  FakeNetwork* const network_;
};

FakeNetwork::FakeNetwork(Options options)
    : options_(options),
      random_(options.seed.value_or(0)),
      dialer_(std::make_unique<NetworkDialer>(this)) {}

FakeNetwork::~FakeNetwork() {
  // Handlers and streams hold each other until they are told that all is over.
  std::vector<std::shared_ptr<Connection>> connections;
  {
    absl::MutexLock lock(&mu_);
    connections.swap(connections_);
  }
  for (const auto& connection : connections) {
    if (auto client = std::move(connection->client)) client->OnClosed(Cancelled());
    if (auto server = std::move(connection->server)) server->OnClosed(Cancelled());
    connection->queue[0].clear();
    connection->queue[1].clear();
  }
}

void FakeNetwork::Listen(const std::string& endpoint, StreamAcceptor* acceptor) {
  absl::MutexLock lock(&mu_);
  acceptors_[endpoint] = acceptor;
  silent_.erase(endpoint);
}

void FakeNetwork::Break(const std::string& endpoint) {
  absl::MutexLock lock(&mu_);
  acceptors_.erase(endpoint);
  for (const auto& connection : connections_) {
    if (connection->endpoint != endpoint) continue;
    End(this, connection, Direction::kToServer)
        .Cut(connection.get(), Broken(endpoint), Cancelled());
  }
}

void FakeNetwork::Silence(const std::string& endpoint) {
  absl::MutexLock lock(&mu_);
  acceptors_.erase(endpoint);
  silent_.insert(endpoint);
}

void FakeNetwork::Stall(const std::string& endpoint, Method method, Direction direction,
                        bool stalled) {
  absl::MutexLock lock(&mu_);
  const auto key = std::make_tuple(endpoint, method, direction);
  if (stalled) {
    stalled_.insert(key);
  } else {
    stalled_.erase(key);
  }
}

void FakeNetwork::SetTap(std::function<TapVerdict(const Passing&)> tap) {
  absl::MutexLock lock(&mu_);
  tap_ = std::move(tap);
}

uint64_t FakeNetwork::queued_bytes() const {
  absl::MutexLock lock(&mu_);
  uint64_t bytes = 0;
  for (const auto& connection : connections_)
    bytes += connection->queued[0] + connection->queued[1];
  return bytes;
}

std::optional<FakeNetwork::Pending> FakeNetwork::Take() {
  std::vector<std::deque<Pending>*> ready;
  for (const auto& connection : connections_) {
    for (int d = 0; d < 2; ++d) {
      std::deque<Pending>& queue = connection->queue[d];
      if (queue.empty()) continue;
      const auto direction = static_cast<Direction>(d);
      // The break of a line is noticed even where nothing moves.
      const bool held = stalled_.count({connection->endpoint, connection->method, direction}) > 0 &&
                        !(queue.front().kind == Kind::kClosed && !queue.front().status.ok());
      if (!held) ready.push_back(&queue);
    }
  }
  if (ready.empty()) return std::nullopt;
  std::deque<Pending>* chosen = nullptr;
  if (options_.seed.has_value()) {
    chosen = ready[random_() % ready.size()];
  } else {
    chosen = *std::min_element(ready.begin(), ready.end(), [](const auto* a, const auto* b) {
      return a->front().order < b->front().order;
    });
  }
  Pending pending = std::move(chosen->front());
  chosen->pop_front();
  return pending;
}

bool FakeNetwork::DeliverOne() {
  std::optional<Pending> pending;
  {
    absl::MutexLock lock(&mu_);
    pending = Take();
    if (!pending.has_value()) {
      connections_.erase(std::remove_if(connections_.begin(), connections_.end(),
                                        [](const auto& connection) {
                                          return connection->client == nullptr &&
                                                 connection->server == nullptr;
                                        }),
                         connections_.end());
      return false;
    }
    Connection& connection = *pending->connection;
    const int d = static_cast<int>(pending->direction);
    if (pending->kind == Kind::kMessage && tap_ != nullptr && !pending->tapped) {
      std::string bytes = *pending->bytes;
      const TapVerdict verdict =
          tap_({connection.method, pending->direction, connection.endpoint, &bytes});
      connection.queued[d] -= pending->bytes->size();
      pending->bytes = std::make_shared<const std::string>(std::move(bytes));
      connection.queued[d] += pending->bytes->size();
      pending->tapped = true;
      if (verdict == TapVerdict::kDrop) {
        connection.queued[d] -= pending->bytes->size();
        return true;
      }
      if (verdict == TapVerdict::kDuplicate) {
        connection.queued[d] += pending->bytes->size();
        connection.queue[d].push_front(*pending);
      }
      if (verdict == TapVerdict::kDelay && !connection.queue[d].empty()) {
        std::swap(*pending, connection.queue[d].front());
        if (pending->kind == Kind::kMessage) pending->tapped = true;
      }
    }
    if (pending->kind == Kind::kMessage) {
      connection.queued[d] -= pending->bytes->size();
      if (connection.blocked[d] && connection.queued[d] <= options_.outbound_bytes / 2) {
        connection.blocked[d] = false;
        const Direction back = pending->direction == Direction::kToServer ? Direction::kToClient
                                                                          : Direction::kToServer;
        Pending writable;
        writable.kind = Kind::kWritable;
        End(this, pending->connection, back).Push(back, std::move(writable));
      }
    }
  }
  Deliver(*std::move(pending));
  return true;
}

void FakeNetwork::Deliver(Pending pending) {
  Connection& connection = *pending.connection;
  std::shared_ptr<StreamHandler>& place =
      pending.direction == Direction::kToServer ? connection.server : connection.client;
  const std::shared_ptr<StreamHandler> handler = place;
  if (handler == nullptr) return;
  switch (pending.kind) {
    case Kind::kConnected:
      return handler->OnConnected();
    case Kind::kMessage:
      return handler->OnMessage(*pending.bytes);
    case Kind::kHalfClose:
      return handler->OnHalfClose();
    case Kind::kWritable:
      return handler->OnWritable();
    case Kind::kClosed:
      break;
  }
  place = nullptr;
  handler->OnClosed(pending.status);
  if (pending.direction != Direction::kToClient) return;
  // The server has had its say; now it may forget the call.
  std::shared_ptr<StreamHandler> server;
  {
    absl::MutexLock lock(&mu_);
    if (!connection.server_closing) return;
    connection.closed[0] = true;
    connection.queue[0].clear();
    server = std::move(connection.server);
  }
  if (server != nullptr) server->OnClosed(pending.status);
}

// ---- OpaqueRelay ----

struct OpaqueRelay::Log {
  absl::Mutex mu;
  std::vector<Record> records;
};

// Passes on what comes from one side to the other side's stream.
class OpaqueRelay::Leg : public StreamHandler {
 public:
  Leg(Method method, Direction direction, std::shared_ptr<Log> log)
      : method_(method), direction_(direction), log_(std::move(log)) {}

  void SetOther(std::shared_ptr<Stream> other) { other_ = std::move(other); }

  void OnMessage(absl::string_view bytes) override {
    {
      absl::MutexLock lock(&log_->mu);
      log_->records.push_back({method_, direction_, std::string(bytes)});
    }
    other_->Send(std::make_shared<const std::string>(bytes));
  }
  void OnHalfClose() override { other_->HalfClose(); }
  void OnClosed(const absl::Status& status) override {
    // Towards the server only an abort is left to say: an orderly end came from there.
    if (direction_ == Direction::kToClient || !status.ok()) other_->Close(status);
    other_ = nullptr;
  }

 private:
  const Method method_;
  const Direction direction_;
  const std::shared_ptr<Log> log_;
  std::shared_ptr<Stream> other_;
};

OpaqueRelay::OpaqueRelay(Dialer* dialer, std::string target)
    : dialer_(dialer), target_(std::move(target)), log_(std::make_shared<Log>()) {}

std::shared_ptr<StreamHandler> OpaqueRelay::Accept(Method method, std::shared_ptr<Stream> stream,
                                                   const PeerInfo& peer) {
  auto to_server = std::make_shared<Leg>(method, Direction::kToServer, log_);
  auto to_client = std::make_shared<Leg>(method, Direction::kToClient, log_);
  to_client->SetOther(stream);
  std::shared_ptr<Stream> onward;
  DialTarget target;
  target.endpoint = target_;
  target.route_token = peer.route_token;
  const absl::Status status = dialer_->Dial(method, target, to_client, &onward);
  if (!status.ok()) stream->Close(status);
  to_server->SetOther(std::move(onward));
  return to_server;
}

std::vector<OpaqueRelay::Record> OpaqueRelay::records() const {
  absl::MutexLock lock(&log_->mu);
  return log_->records;
}

}  // namespace meshnet::worker
