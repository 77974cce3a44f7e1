#include "benchmarks/proxy/proxy.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <mutex>
#include <queue>
#include <utility>

#include "absl/strings/str_cat.h"

namespace meshnet::benchmarks {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kReadBytes = 64 * 1024;
// A read is released in pieces of this size, so that its first bytes do not wait for its last ones
// to be serialised.
constexpr size_t kPieceBytes = 8 * 1024;
constexpr size_t kMaxVectors = 64;

absl::Status Errno(const char* what) {
  return absl::InternalError(absl::StrCat(what, ": ", strerror(errno)));
}

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_ = -1;
};

void SetNoDelay(int fd) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

// Bytes [begin, end) of a read, to be written from `due` on. Empty: the end of the stream.
struct Piece {
  std::shared_ptr<std::vector<char>> buffer;
  size_t begin = 0;
  size_t end = 0;
  TimePoint due;
  bool is_end() const { return begin == end; }
};

// One direction of a connection.
struct Flow {
  std::deque<Piece> pieces;
  size_t queued = 0;
  // The source has sent its FIN.
  bool source_ended = false;
  // That FIN has been passed on.
  bool ended = false;
  // The sink took less than it was offered.
  bool blocked = false;
  // The timer queue has an entry no later than the first piece's time.
  bool scheduled = false;
};

struct Link {
  Fd listener;
  sockaddr_in target{};
  // Index 0: client to target; 1: target to client.
  LinkShaper shapers[2];
};

struct Connection : std::enable_shared_from_this<Connection> {
  Link* link = nullptr;
  size_t link_index = 0;
  // Index 0: the client's socket; 1: the target's. flows[i] is read from sides[i] and written to
  // sides[1 - i].
  Fd sides[2];
  Flow flows[2];
  uint32_t interest[2] = {0, 0};
  bool registered[2] = {false, false};
  bool connecting = true;
};

}  // namespace

class Proxy::Impl {
 public:
  explicit Impl(Options options) : options_(options), read_buffer_(kReadBytes) {}

  absl::StatusOr<int> AddLink(const Endpoint& target, int listen_port) {
    auto link = std::make_unique<Link>();
    link->target.sin_family = AF_INET;
    link->target.sin_port = htons(static_cast<uint16_t>(target.port));
    if (inet_pton(AF_INET, target.host.c_str(), &link->target.sin_addr) != 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("expected a numeric IPv4 address as target, got \"", target.host, "\""));
    }
    link->listener = Fd(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    const int fd = link->listener.get();
    if (fd < 0) return Errno("socket");
    const int on = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(listen_port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(address);
    if (bind(fd, reinterpret_cast<sockaddr*>(&address), length) != 0) return Errno("bind");
    if (listen(fd, 128) != 0) return Errno("listen");
    if (getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) {
      return Errno("getsockname");
    }
    links_.push_back(std::move(link));
    std::lock_guard<std::mutex> lock(mutex_);
    stats_.emplace_back();
    return ntohs(address.sin_port);
  }

  absl::Status Run() {
    epoll_ = Fd(epoll_create1(EPOLL_CLOEXEC));
    timer_ = Fd(timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC));
    if (epoll_.get() < 0) return Errno("epoll_create1");
    if (timer_.get() < 0) return Errno("timerfd_create");
    if (wake_.get() < 0) return Errno("eventfd");
    Watch(wake_.get());
    Watch(timer_.get());
    for (const auto& link : links_) Watch(link->listener.get());

    epoll_event events[64];
    while (!stopping_) {
      const int count = epoll_wait(epoll_.get(), events, 64, -1);
      if (count < 0 && errno != EINTR) return Errno("epoll_wait");
      for (int i = 0; i < count; ++i) Dispatch(events[i].data.fd, events[i].events);
      WriteDue();
      ArmTimer();
    }
    return absl::OkStatus();
  }

  void Stop() {
    stopping_ = true;
    Wake();
  }

  void SetShape(LinkShape shape) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      shape_ = shape;
    }
    shape_changed_ = true;
  }

  std::vector<LinkStats> Stats() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return stats_;
  }

  void ResetStats() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (LinkStats& stats : stats_) {
      stats.connections = stats.bytes_up = stats.bytes_down = stats.peak_queued_bytes = 0;
    }
  }

 private:
  // A flow of `connection` that may have something to write at `due`.
  struct Due {
    TimePoint due;
    std::weak_ptr<Connection> connection;
    int flow;
    bool operator>(const Due& other) const { return due > other.due; }
  };

  void Wake() {
    const uint64_t one = 1;
    // Only fails when the counter is full, and then the loop is awake anyway.
    [[maybe_unused]] const ssize_t written = write(wake_.get(), &one, sizeof(one));
  }

  void Watch(int fd) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = fd;
    epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event);
  }

  void Dispatch(int fd, uint32_t events) {
    if (fd == wake_.get() || fd == timer_.get()) {
      uint64_t count;
      [[maybe_unused]] const ssize_t got = read(fd, &count, sizeof(count));
      return;
    }
    for (size_t i = 0; i < links_.size(); ++i) {
      if (fd == links_[i]->listener.get()) return Accept(i);
    }
    const auto found = by_fd_.find(fd);
    // Closed by an earlier event of the same round.
    if (found == by_fd_.end()) return;
    Connection* connection = found->second.get();
    const int side = connection->sides[0].get() == fd ? 0 : 1;
    if ((events & EPOLLERR) != 0) return Close(connection);
    if (side == 1 && connection->connecting && (events & EPOLLOUT) != 0) {
      connection->connecting = false;
    }
    Flow& inward = connection->flows[1 - side];
    if ((events & EPOLLOUT) != 0) inward.blocked = false;
    if ((events & (EPOLLIN | EPOLLHUP)) != 0 && !Read(connection, side)) return;
    if (!Write(connection, 1 - side)) return;
    UpdateInterest(connection);
  }

  void Accept(size_t link_index) {
    Link* link = links_[link_index].get();
    for (;;) {
      Fd client(accept4(link->listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
      if (client.get() < 0) return;
      Fd target(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
      if (target.get() < 0) return;
      SetNoDelay(client.get());
      SetNoDelay(target.get());
      if (connect(target.get(), reinterpret_cast<const sockaddr*>(&link->target),
                  sizeof(link->target)) != 0 &&
          errno != EINPROGRESS) {
        continue;
      }
      auto connection = std::make_shared<Connection>();
      connection->link = link;
      connection->link_index = link_index;
      connection->sides[0] = std::move(client);
      connection->sides[1] = std::move(target);
      for (const Fd& side : connection->sides) by_fd_[side.get()] = connection;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        ++stats_[link_index].connections;
        ++stats_[link_index].open_connections;
      }
      UpdateInterest(connection.get());
    }
  }

  // False when the connection is gone.
  bool Read(Connection* connection, int side) {
    Flow& flow = connection->flows[side];
    if (flow.source_ended || flow.queued >= options_.max_queued_bytes) return true;
    const ssize_t got = recv(connection->sides[side].get(), read_buffer_.data(), kReadBytes, 0);
    if (got < 0) {
      if (errno == EAGAIN || errno == EINTR) return true;
      Close(connection);
      return false;
    }
    ApplyShape();
    LinkShaper& shaper = connection->link->shapers[side];
    const TimePoint now = Clock::now();
    if (got == 0) {
      flow.source_ended = true;
      Piece piece;
      piece.due = shaper.Schedule(now, 0);
      flow.pieces.push_back(std::move(piece));
    } else {
      const size_t size = static_cast<size_t>(got);
      auto buffer =
          std::make_shared<std::vector<char>>(read_buffer_.begin(), read_buffer_.begin() + got);
      for (size_t begin = 0; begin < size; begin += kPieceBytes) {
        Piece piece;
        piece.buffer = buffer;
        piece.begin = begin;
        piece.end = std::min(begin + kPieceBytes, size);
        piece.due = shaper.Schedule(now, piece.end - piece.begin);
        flow.pieces.push_back(std::move(piece));
      }
      flow.queued += size;
      std::lock_guard<std::mutex> lock(mutex_);
      uint64_t& peak = stats_[connection->link_index].peak_queued_bytes;
      peak = std::max<uint64_t>(peak, flow.queued);
    }
    Remember(connection, side);
    return true;
  }

  // Under one lock, so that who has received a byte finds it counted.
  ssize_t SendAndCount(int sink, const msghdr& message, size_t link_index, int flow) {
    std::lock_guard<std::mutex> lock(mutex_);
    const ssize_t sent = sendmsg(sink, &message, MSG_NOSIGNAL);
    if (sent > 0) {
      LinkStats& stats = stats_[link_index];
      (flow == 0 ? stats.bytes_up : stats.bytes_down) += static_cast<uint64_t>(sent);
    }
    return sent;
  }

  // Writes what is due of flow `index`. False when the connection is gone.
  bool Write(Connection* connection, int index) {
    Flow& flow = connection->flows[index];
    if (index == 0 && connection->connecting) return true;
    const int sink = connection->sides[1 - index].get();
    const TimePoint now = Clock::now();
    while (!flow.blocked && !flow.pieces.empty() && flow.pieces.front().due <= now) {
      if (flow.pieces.front().is_end()) {
        shutdown(sink, SHUT_WR);
        flow.ended = true;
        flow.pieces.clear();
        break;
      }
      iovec vectors[kMaxVectors];
      size_t count = 0;
      size_t offered = 0;
      for (const Piece& piece : flow.pieces) {
        if (count == kMaxVectors || piece.is_end() || piece.due > now) break;
        vectors[count].iov_base = piece.buffer->data() + piece.begin;
        vectors[count].iov_len = piece.end - piece.begin;
        offered += vectors[count++].iov_len;
      }
      msghdr message{};
      message.msg_iov = vectors;
      message.msg_iovlen = count;
      const ssize_t sent = SendAndCount(sink, message, connection->link_index, index);
      if (sent < 0) {
        if (errno == EINTR) continue;
        if (errno != EAGAIN) {
          Close(connection);
          return false;
        }
        flow.blocked = true;
        break;
      }
      flow.blocked = static_cast<size_t>(sent) < offered;
      flow.queued -= static_cast<size_t>(sent);
      size_t rest = static_cast<size_t>(sent);
      while (rest > 0) {
        Piece& front = flow.pieces.front();
        const size_t taken = std::min(rest, front.end - front.begin);
        front.begin += taken;
        rest -= taken;
        if (front.begin == front.end) flow.pieces.pop_front();
      }
    }
    if (connection->flows[0].ended && connection->flows[1].ended) {
      Close(connection);
      return false;
    }
    Remember(connection, index);
    return true;
  }

  void Remember(Connection* connection, int index) {
    Flow& flow = connection->flows[index];
    if (flow.scheduled || flow.blocked || flow.pieces.empty()) return;
    flow.scheduled = true;
    due_.push(Due{flow.pieces.front().due, connection->weak_from_this(), index});
  }

  void WriteDue() {
    while (!due_.empty() && due_.top().due <= Clock::now()) {
      const Due due = due_.top();
      due_.pop();
      const std::shared_ptr<Connection> connection = due.connection.lock();
      if (connection == nullptr) continue;
      connection->flows[due.flow].scheduled = false;
      if (Write(connection.get(), due.flow)) UpdateInterest(connection.get());
    }
  }

  void ArmTimer() {
    if (due_.empty()) return;
    const auto since_epoch = due_.top().due.time_since_epoch();
    const auto nanoseconds = std::max<int64_t>(
        1, std::chrono::duration_cast<std::chrono::nanoseconds>(since_epoch).count());
    itimerspec spec{};
    spec.it_value.tv_sec = nanoseconds / 1000000000;
    spec.it_value.tv_nsec = nanoseconds % 1000000000;
    timerfd_settime(timer_.get(), TFD_TIMER_ABSTIME, &spec, nullptr);
  }

  void UpdateInterest(Connection* connection) {
    for (int side = 0; side < 2; ++side) {
      const Flow& outward = connection->flows[side];
      const Flow& inward = connection->flows[1 - side];
      const int fd = connection->sides[side].get();
      uint32_t wanted = 0;
      if (!outward.source_ended && outward.queued < options_.max_queued_bytes) wanted |= EPOLLIN;
      if (inward.blocked || (side == 1 && connection->connecting)) wanted |= EPOLLOUT;
      // epoll reports a hang-up whether asked to or not, again and again while there is nothing to
      // do about it.
      if (wanted == 0) {
        if (connection->registered[side]) epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
        connection->registered[side] = false;
        continue;
      }
      if (connection->registered[side] && connection->interest[side] == wanted) continue;
      epoll_event event{};
      event.events = wanted;
      event.data.fd = fd;
      epoll_ctl(epoll_.get(), connection->registered[side] ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, fd,
                &event);
      connection->registered[side] = true;
      connection->interest[side] = wanted;
    }
  }

  void Close(Connection* connection) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      --stats_[connection->link_index].open_connections;
    }
    const int fds[2] = {connection->sides[0].get(), connection->sides[1].get()};
    // Closing removes the descriptors from the epoll set. The second erase destroys the connection.
    for (const int fd : fds) by_fd_.erase(fd);
  }

  void ApplyShape() {
    if (!shape_changed_.exchange(false)) return;
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& link : links_) {
      for (LinkShaper& shaper : link->shapers) shaper.set_shape(shape_);
    }
  }

  const Options options_;
  std::vector<std::unique_ptr<Link>> links_;
  Fd epoll_;
  Fd timer_;
  Fd wake_{eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)};
  std::map<int, std::shared_ptr<Connection>> by_fd_;
  std::priority_queue<Due, std::vector<Due>, std::greater<Due>> due_;
  std::vector<char> read_buffer_;
  std::atomic<bool> stopping_{false};
  std::atomic<bool> shape_changed_{false};

  mutable std::mutex mutex_;
  LinkShape shape_;
  std::vector<LinkStats> stats_;
};

Proxy::Proxy() : Proxy(Options{}) {}
Proxy::Proxy(Options options) : impl_(std::make_unique<Impl>(options)) {}
Proxy::~Proxy() = default;

absl::StatusOr<int> Proxy::AddLink(const Endpoint& target, int listen_port) {
  return impl_->AddLink(target, listen_port);
}
absl::Status Proxy::Run() { return impl_->Run(); }
void Proxy::Stop() { impl_->Stop(); }
void Proxy::SetShape(LinkShape shape) { impl_->SetShape(shape); }
std::vector<LinkStats> Proxy::Stats() const { return impl_->Stats(); }
void Proxy::ResetStats() { impl_->ResetStats(); }

}  // namespace meshnet::benchmarks
