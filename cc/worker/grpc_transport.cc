#include "cc/worker/grpc_transport.h"

#include <deque>
#include <iterator>
#include <list>
#include <optional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "cc/common/status.h"
#include "cc/worker/endpoint.h"
#include "grpc/grpc.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/support/channel_arguments.h"
#include "grpcpp/support/client_callback.h"

namespace meshnet::worker {
namespace {

constexpr char kServicePath[] = "/meshnet.shard.v1.ShardService/";
constexpr size_t kMaxChannels = 256;
constexpr int kReadChunkBytes = 128 << 10;

grpc::ByteBuffer ToByteBuffer(const Payload& payload) {
  auto* held = new Payload(payload);
  // gRPC reads the bytes in place and drops its share when the last byte is written.
  grpc::Slice slice(
      const_cast<char*>((*held)->data()), (*held)->size(),
      [](void* user_data) { delete static_cast<Payload*>(user_data); }, held);
  return grpc::ByteBuffer(&slice, 1);
}

// Calls `use` with the buffer's bytes, copying only when gRPC has them in several pieces.
template <typename F>
void WithBytes(const grpc::ByteBuffer& buffer, F use) {
  grpc::Slice single;
  if (buffer.TrySingleSlice(&single).ok()) {
    use(absl::string_view(reinterpret_cast<const char*>(single.begin()), single.size()));
    return;
  }
  std::vector<grpc::Slice> slices;
  std::string bytes;
  if (buffer.Dump(&slices).ok()) {
    bytes.reserve(buffer.Length());
    for (const grpc::Slice& slice : slices) {
      bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
    }
  }
  use(absl::string_view(bytes));
}

// Messages that wait for their turn to be written. Guarded by its owner's mutex.
class Outbox {
 public:
  explicit Outbox(uint64_t bound) : bound_(bound) {}

  void Push(Payload message) {
    bytes_ += message->size();
    queue_.push_back(std::move(message));
    if (bytes_ > bound_) blocked_ = true;
  }

  grpc::ByteBuffer Pop() {
    grpc::ByteBuffer buffer = ToByteBuffer(queue_.front());
    writing_bytes_ = queue_.front()->size();
    queue_.pop_front();
    return buffer;
  }

  // True when the owner was told to wait and may go on now.
  bool Written() {
    bytes_ -= writing_bytes_;
    writing_bytes_ = 0;
    if (!blocked_ || bytes_ > bound_ / 2) return false;
    blocked_ = false;
    return true;
  }

  void Clear() {
    queue_.clear();
    bytes_ = writing_bytes_;
  }

  bool empty() const { return queue_.empty(); }
  bool blocked() const { return blocked_; }

 private:
  const uint64_t bound_;
  std::deque<Payload> queue_;
  uint64_t bytes_ = 0;
  uint64_t writing_bytes_ = 0;
  bool blocked_ = false;
};

class ServerStream final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                           public Stream,
                           public std::enable_shared_from_this<ServerStream> {
 public:
  ServerStream(grpc::CallbackServerContext* context, const GrpcTransportOptions& options)
      : context_(context), outbox_(options.outbound_bytes) {}

  void Begin(Method method, StreamAcceptor* acceptor) {
    self_ = shared_from_this();
    StartSendInitialMetadata();
    handler_ = acceptor->Accept(method, self_, PeerOf(*context_));
    StartRead(&read_buffer_);
  }

  void Send(Payload message) override {
    absl::MutexLock lock(&mu_);
    if (closing_.has_value() || cancelled_) return;
    outbox_.Push(std::move(message));
    Advance();
  }

  bool writable() const override {
    absl::MutexLock lock(&mu_);
    return !outbox_.blocked();
  }

  void HalfClose() override {}

  void Close(const absl::Status& status) override {
    absl::MutexLock lock(&mu_);
    if (closing_.has_value()) return;
    closing_ = ToGrpcStatus(status);
    Advance();
  }

  void Abort() override {
    absl::MutexLock lock(&mu_);
    if (!finished_) context_->TryCancel();
  }

  void OnReadDone(bool ok) override {
    if (!ok) {
      if (!context_->IsCancelled()) handler_->OnHalfClose();
      return;
    }
    WithBytes(read_buffer_, [this](absl::string_view bytes) { handler_->OnMessage(bytes); });
    read_buffer_.Clear();
    absl::MutexLock lock(&mu_);
    if (closing_.has_value() || cancelled_) return;
    // Whoever does not read our answers has to wait with more questions.
    if (outbox_.blocked()) {
      read_paused_ = true;
    } else {
      StartRead(&read_buffer_);
    }
  }

  void OnWriteDone(bool ok) override {
    bool writable_again = false;
    {
      absl::MutexLock lock(&mu_);
      writing_ = false;
      writable_again = outbox_.Written();
      if (!ok) cancelled_ = true;
      Advance();
      if (!outbox_.blocked() && read_paused_ && !closing_.has_value() && !cancelled_) {
        read_paused_ = false;
        StartRead(&read_buffer_);
      }
    }
    if (writable_again) handler_->OnWritable();
  }

  void OnCancel() override {
    absl::MutexLock lock(&mu_);
    cancelled_ = true;
    Advance();
  }

  void OnDone() override {
    absl::Status status;
    {
      absl::MutexLock lock(&mu_);
      if (cancelled_) {
        status = MakeError(v1::REASON_CANCELLED, "the caller ended the call");
      } else if (closing_.has_value()) {
        status = FromGrpcStatus(*closing_);
      }
    }
    handler_->OnClosed(status);
    handler_.reset();
    const std::shared_ptr<ServerStream> last = std::move(self_);
  }

 private:
  // Starts what can be started: the next write, or the end.
  void Advance() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (cancelled_) outbox_.Clear();
    if (writing_ || finished_) return;
    if (!outbox_.empty()) {
      write_buffer_ = outbox_.Pop();
      writing_ = true;
      StartWrite(&write_buffer_);
      return;
    }
    if (!cancelled_ && !closing_.has_value()) return;
    finished_ = true;
    Finish(closing_.value_or(grpc::Status::CANCELLED));
  }

  grpc::CallbackServerContext* const context_;
  std::shared_ptr<ServerStream> self_;
  std::shared_ptr<StreamHandler> handler_;
  grpc::ByteBuffer read_buffer_;
  grpc::ByteBuffer write_buffer_;
  mutable absl::Mutex mu_;
  Outbox outbox_ ABSL_GUARDED_BY(mu_);
  std::optional<grpc::Status> closing_ ABSL_GUARDED_BY(mu_);
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;
  bool finished_ ABSL_GUARDED_BY(mu_) = false;
  bool read_paused_ ABSL_GUARDED_BY(mu_) = false;
};

// Channels by endpoint. One that has broken is not used again: the next dial connects afresh
// instead of waiting for gRPC's back-off, so that a restarted peer is found at once.
//
// gRPC's callback threads end with the last channel or server that uses them, and whoever destroys
// that one joins them. On one of those threads itself, where streams end, that would be fatal. So
// streams never own the last share of a channel: the pool keeps the newest of the broken ones, and
// Close, called by the dialer's owner, waits for the streams before it lets go of the channels.
class ChannelPool {
 public:
  explicit ChannelPool(const GrpcTransportOptions& options) : options_(options) {}

  std::shared_ptr<grpc::Channel> Get(const std::string& endpoint) {
    // Reads files: before the lock that others wait for.
    const std::shared_ptr<grpc::ChannelCredentials> credentials =
        options_.tls != nullptr ? options_.tls->ChannelCredentials() : plaintext_;
    absl::MutexLock lock(&mu_);
    for (auto it = channels_.begin(); it != channels_.end(); ++it) {
      if (it->endpoint != endpoint) continue;
      if (it->credentials != credentials) {
        // Who this worker is, or whom it trusts, has changed. Streams keep the old line.
        Retire(it);
        break;
      }
      channels_.splice(channels_.begin(), channels_, it);
      return channels_.front().channel;
    }
    channels_.push_front({endpoint, credentials, Connect(endpoint, credentials)});
    if (channels_.size() > kMaxChannels) Retire(std::prev(channels_.end()));
    return channels_.front().channel;
  }

  void Forget(const std::string& endpoint, const grpc::Channel* channel) {
    absl::MutexLock lock(&mu_);
    for (auto it = channels_.begin(); it != channels_.end(); ++it) {
      if (it->endpoint == endpoint && it->channel.get() == channel) return Retire(it);
    }
  }

  void StreamBegins() {
    absl::MutexLock lock(&mu_);
    ++streams_;
  }

  void StreamEnds() {
    absl::MutexLock lock(&mu_);
    --streams_;
  }

  void Close() {
    std::list<std::shared_ptr<grpc::Channel>> channels;
    {
      absl::MutexLock lock(&mu_);
      const bool done = mu_.AwaitWithTimeout(
          absl::Condition(+[](int* streams) { return *streams == 0; }, &streams_), kStreamsMayEnd);
      for (Line& line : channels_) channels.push_back(std::move(line.channel));
      channels.splice(channels.end(), retired_);
      channels_.clear();
      // A handler that never returns: better a leak at the end of the process than its death.
      if (!done) new std::list<std::shared_ptr<grpc::Channel>>(std::move(channels));
    }
  }

 private:
  static constexpr absl::Duration kStreamsMayEnd = absl::Seconds(5);

  struct Line {
    std::string endpoint;
    // With which it was dialed.
    std::shared_ptr<grpc::ChannelCredentials> credentials;
    std::shared_ptr<grpc::Channel> channel;
  };

  void Retire(std::list<Line>::iterator line) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    while (!retired_.empty() && retired_.front().use_count() == 1) retired_.pop_front();
    retired_.push_back(std::move(line->channel));
    channels_.erase(line);
  }

  std::shared_ptr<grpc::Channel> Connect(
      const std::string& endpoint,
      const std::shared_ptr<grpc::ChannelCredentials>& credentials) const {
    grpc::ChannelArguments arguments;
    for (const auto& [name, value] : TransportArguments(options_)) arguments.SetInt(name, value);
    arguments.SetMaxReceiveMessageSize(static_cast<int>(options_.max_message_bytes));
    arguments.SetMaxSendMessageSize(-1);
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    if (!options_.tls_target_name.empty()) {
      arguments.SetSslTargetNameOverride(options_.tls_target_name);
    }
    return grpc::CreateCustomChannel(endpoint, credentials, arguments);
  }

  const GrpcTransportOptions options_;
  const std::shared_ptr<grpc::ChannelCredentials> plaintext_ = grpc::InsecureChannelCredentials();
  absl::Mutex mu_;
  // Most recently used first.
  std::list<Line> channels_ ABSL_GUARDED_BY(mu_);
  // No longer dialed; the newest stays.
  std::list<std::shared_ptr<grpc::Channel>> retired_ ABSL_GUARDED_BY(mu_);
  int streams_ ABSL_GUARDED_BY(mu_) = 0;
};

// Counts a stream for as long as any part of it exists.
class StreamCount {
 public:
  explicit StreamCount(std::shared_ptr<ChannelPool> pool) : pool_(std::move(pool)) {
    pool_->StreamBegins();
  }
  ~StreamCount() { pool_->StreamEnds(); }
  StreamCount(const StreamCount&) = delete;
  StreamCount& operator=(const StreamCount&) = delete;

 private:
  const std::shared_ptr<ChannelPool> pool_;
};

class ClientStream final : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                           public Stream,
                           public std::enable_shared_from_this<ClientStream> {
 public:
  ClientStream(std::shared_ptr<ChannelPool> pool, std::string endpoint,
               std::shared_ptr<StreamHandler> handler, uint64_t outbound_bytes,
               bool reads_wait_for_writes)
      : reads_wait_for_writes_(reads_wait_for_writes),
        count_(pool),
        pool_(std::move(pool)),
        endpoint_(std::move(endpoint)),
        channel_(pool_->Get(endpoint_)),
        stub_(channel_),
        handler_(std::move(handler)),
        outbox_(outbound_bytes) {}

  void Begin(const ByteCall& call) {
    self_ = shared_from_this();
    if (!call.route_token.empty()) context_.AddMetadata(kRouteTokenKey, call.route_token);
    if (call.deadline != absl::InfiniteFuture()) {
      context_.set_deadline(absl::ToChronoTime(call.deadline));
    }
    stub_.PrepareBidiStreamingCall(&context_, call.path, grpc::StubOptions(), this);
    // Writes come from other threads: without the hold the call could be done under their feet.
    AddHold();
    StartRead(&read_buffer_);
    StartCall();
  }

  void Send(Payload message) override {
    absl::MutexLock lock(&mu_);
    if (ended_ || half_close_) return;
    outbox_.Push(std::move(message));
    Advance();
  }

  bool writable() const override {
    absl::MutexLock lock(&mu_);
    return !outbox_.blocked();
  }

  void HalfClose() override {
    absl::MutexLock lock(&mu_);
    half_close_ = true;
    Advance();
  }

  void Close(const absl::Status&) override { Abort(); }

  void Abort() override {
    absl::MutexLock lock(&mu_);
    End();
    context_.TryCancel();
  }

  void OnReadInitialMetadataDone(bool ok) override {
    if (ok) handler_->OnConnected();
  }

  void OnReadDone(bool ok) override {
    if (!ok) {
      absl::MutexLock lock(&mu_);
      End();
      return;
    }
    WithBytes(read_buffer_, [this](absl::string_view bytes) { handler_->OnMessage(bytes); });
    read_buffer_.Clear();
    if (reads_wait_for_writes_) {
      absl::MutexLock lock(&mu_);
      read_paused_ = outbox_.blocked() && !ended_;
      if (read_paused_) return;
    }
    StartRead(&read_buffer_);
  }

  void OnWriteDone(bool ok) override {
    bool writable_again = false;
    {
      absl::MutexLock lock(&mu_);
      writing_ = false;
      writable_again = outbox_.Written();
      if (!ok) End();
      Advance();
      ResumeReads();
    }
    if (writable_again) handler_->OnWritable();
  }

  void OnDone(const grpc::Status& status) override {
    if (status.error_code() == grpc::StatusCode::UNAVAILABLE && status.error_details().empty()) {
      pool_->Forget(endpoint_, channel_.get());
    }
    handler_->OnClosed(FromGrpcStatus(status));
    handler_.reset();
    const std::shared_ptr<ClientStream> last = std::move(self_);
  }

 private:
  void End() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    outbox_.Clear();
    if (ended_) return;
    ended_ = true;
    RemoveHold();
  }

  void ResumeReads() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (!read_paused_ || outbox_.blocked() || ended_) return;
    read_paused_ = false;
    StartRead(&read_buffer_);
  }

  void Advance() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (ended_ || writing_ || half_closed_) return;
    if (!outbox_.empty()) {
      write_buffer_ = outbox_.Pop();
      writing_ = true;
      StartWrite(&write_buffer_);
      return;
    }
    if (!half_close_) return;
    half_closed_ = true;
    StartWritesDone();
  }

  const bool reads_wait_for_writes_;
  // Before the others, so that it goes last: after all that holds a share of the channel.
  const StreamCount count_;
  const std::shared_ptr<ChannelPool> pool_;
  const std::string endpoint_;
  const std::shared_ptr<grpc::Channel> channel_;
  grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer> stub_;
  grpc::ClientContext context_;
  std::shared_ptr<ClientStream> self_;
  std::shared_ptr<StreamHandler> handler_;
  grpc::ByteBuffer read_buffer_;
  grpc::ByteBuffer write_buffer_;
  mutable absl::Mutex mu_;
  Outbox outbox_ ABSL_GUARDED_BY(mu_);
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool half_close_ ABSL_GUARDED_BY(mu_) = false;
  bool half_closed_ ABSL_GUARDED_BY(mu_) = false;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
  bool read_paused_ ABSL_GUARDED_BY(mu_) = false;
};

class GrpcDialerImpl final : public GrpcDialer {
 public:
  explicit GrpcDialerImpl(const GrpcTransportOptions& options)
      : options_(options), pool_(std::make_shared<ChannelPool>(options)) {}
  ~GrpcDialerImpl() override { pool_->Close(); }

  absl::Status Dial(Method method, const DialTarget& target, std::shared_ptr<StreamHandler> handler,
                    std::shared_ptr<Stream>* stream) override {
    if (!target.relay_peer_id.empty()) {
      return MakeError(v1::REASON_FEATURE_UNSUPPORTED,
                       absl::StrCat("expected a direct endpoint, got the relay ", target.endpoint,
                                    " for ", target.relay_peer_id));
    }
    ByteCall call;
    call.endpoint = target.endpoint;
    call.path = absl::StrCat(kServicePath, MethodName(method));
    call.route_token = target.route_token;
    return Call(call, std::move(handler), stream);
  }

  absl::Status Call(const ByteCall& call, std::shared_ptr<StreamHandler> handler,
                    std::shared_ptr<Stream>* stream) override {
    const auto parsed = ParseEndpoint(call.endpoint);
    if (!parsed.ok()) return parsed.status();
    if (options_.tls == nullptr && !parsed->is_loopback && !options_.allow_insecure) {
      return MakeError(
          v1::REASON_INSECURE_TRANSPORT,
          absl::StrCat("expected TLS or a loopback address to dial, got ", call.endpoint,
                       "; give the worker TLS keys or the insecure flag"));
    }
    auto client =
        std::make_shared<ClientStream>(pool_, parsed->ToString(), std::move(handler),
                                       options_.outbound_bytes, call.reads_wait_for_writes);
    *stream = client;
    client->Begin(call);
    return absl::OkStatus();
  }

 private:
  const GrpcTransportOptions options_;
  const std::shared_ptr<ChannelPool> pool_;
};

}  // namespace

std::vector<std::pair<std::string, int>> TransportArguments(const GrpcTransportOptions& options) {
  const auto milliseconds = [](absl::Duration duration) {
    return static_cast<int>(absl::ToInt64Milliseconds(duration));
  };
  return {
      {GRPC_ARG_KEEPALIVE_TIME_MS, milliseconds(options.keepalive_time)},
      {GRPC_ARG_KEEPALIVE_TIMEOUT_MS, milliseconds(options.keepalive_timeout)},
      {GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0},
      // Peers ping as often as they were told to.
      {GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 10},
      {GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0},
      // A prefill chunk must not wait for window updates over a long line.
      {GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 4 << 20},
      {GRPC_ARG_HTTP2_BDP_PROBE, 0},
      // A connection keeps the buffer of its largest read, up to 4 MB if it is let.
      {GRPC_ARG_TCP_MAX_READ_CHUNK_SIZE, kReadChunkBytes},
      // Stages dial each other, never by way of a proxy from the environment.
      {GRPC_ARG_ENABLE_HTTP_PROXY, 0},
      {GRPC_ARG_SERVICE_CONFIG_DISABLE_RESOLUTION, 1},
  };
}

std::unique_ptr<GrpcDialer> MakeGrpcDialer(const GrpcTransportOptions& options) {
  return std::make_unique<GrpcDialerImpl>(options);
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* AcceptGrpcStream(
    Method method, grpc::CallbackServerContext* context, StreamAcceptor* acceptor,
    const GrpcTransportOptions& options) {
  auto stream = std::make_shared<ServerStream>(context, options);
  stream->Begin(method, acceptor);
  return stream.get();
}

PeerInfo PeerOf(const grpc::CallbackServerContext& context) {
  PeerInfo peer;
  peer.address = context.peer();
  const auto auth = context.auth_context();
  if (auth != nullptr && auth->IsPeerAuthenticated()) {
    for (const grpc::string_ref& name : auth->GetPeerIdentity()) {
      peer.identity.assign(name.data(), name.size());
      break;
    }
  }
  const auto& metadata = context.client_metadata();
  const auto token = metadata.find(kRouteTokenKey);
  if (token != metadata.end()) peer.route_token.assign(token->second.data(), token->second.size());
  return peer;
}

}  // namespace meshnet::worker
