#include "cc/worker/grpc_transport.h"

#include <deque>
#include <list>
#include <set>
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
#include "grpcpp/generic/async_generic_service.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/support/async_stream.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/channel_arguments.h"

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

// What both ends of a stream have in common: messages wait for their turn to be written, are read
// one after another, and everything is over when the last operation is.
class GrpcStream : public Stream, public std::enable_shared_from_this<GrpcStream> {
 public:
  GrpcStream(GrpcEvents* events, uint64_t outbound_bytes, bool reads_wait_for_writes)
      : events_(events), reads_wait_for_writes_(reads_wait_for_writes), outbox_(outbound_bytes) {}

  void Send(Payload message) override {
    absl::MutexLock lock(&mu_);
    if (last_ || broken_) return;
    outbox_.Push(std::move(message));
    Advance();
  }

  bool writable() const override {
    absl::MutexLock lock(&mu_);
    return !outbox_.blocked();
  }

 protected:
  // An operation on its way through the queue.
  template <typename S>
  class Operation final : public GrpcEvents::Tag {
   public:
    Operation(S* stream, void (S::*over)(bool)) : stream_(stream), over_(over) {}

    void OnDone(bool ok) override {
      (stream_->*over_)(ok);
      stream_->OperationEnds();
    }

   private:
    S* const stream_;
    void (S::* const over_)(bool);
  };
  template <typename S>
  friend class Operation;

  virtual void Read(grpc::ByteBuffer* buffer, GrpcEvents::Tag* tag) = 0;
  virtual void Write(const grpc::ByteBuffer& buffer, GrpcEvents::Tag* tag) = 0;
  // Nothing follows what has been written.
  virtual void WriteLast() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) = 0;
  virtual bool can_write() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) = 0;
  virtual bool wants_messages() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) = 0;
  // Nothing more can be read.
  virtual void OnReadsOver() = 0;
  // No operation is under way any more, and none follows.
  virtual void OnOver() = 0;

  void OperationEnds() {
    {
      absl::MutexLock lock(&mu_);
      if (--operations_ > 0) return;
    }
    OnOver();
    const std::shared_ptr<GrpcStream> last = std::move(self_);
  }

  void StartRead() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    ++operations_;
    Read(&read_buffer_, &read_);
  }

  // Starts the next write, or the end.
  void Advance() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (broken_) outbox_.Clear();
    if (writing_ || broken_ || last_written_ || !can_write()) return;
    if (!outbox_.empty()) {
      writing_ = true;
      ++operations_;
      events_->WriteBegins();
      Write(outbox_.Pop(), &write_);
    } else if (last_) {
      last_written_ = true;
      WriteLast();
    }
  }

  GrpcEvents* const events_;
  // Keeps the stream while there are operations.
  std::shared_ptr<GrpcStream> self_;
  // Touched by whoever polls.
  std::shared_ptr<StreamHandler> handler_;
  mutable absl::Mutex mu_;
  int operations_ ABSL_GUARDED_BY(mu_) = 0;
  // No message follows those in the outbox.
  bool last_ ABSL_GUARDED_BY(mu_) = false;
  // Nothing reaches the other end any more.
  bool broken_ ABSL_GUARDED_BY(mu_) = false;

 private:
  void OnRead(bool ok) {
    if (!ok) return OnReadsOver();
    WithBytes(read_buffer_, [this](absl::string_view bytes) { handler_->OnMessage(bytes); });
    read_buffer_.Clear();
    absl::MutexLock lock(&mu_);
    // Whoever does not read our answers has to wait with more questions.
    read_paused_ = reads_wait_for_writes_ && outbox_.blocked() && !broken_;
    if (!read_paused_ && wants_messages()) StartRead();
  }

  void OnWritten(bool ok) {
    bool writable_again = false;
    {
      absl::MutexLock lock(&mu_);
      events_->WriteEnds();
      writing_ = false;
      writable_again = outbox_.Written();
      if (!ok) broken_ = true;
      Advance();
      if (read_paused_ && (!outbox_.blocked() || broken_)) {
        read_paused_ = false;
        if (wants_messages()) StartRead();
      }
    }
    if (writable_again) handler_->OnWritable();
  }

  const bool reads_wait_for_writes_;
  grpc::ByteBuffer read_buffer_;
  Operation<GrpcStream> read_{this, &GrpcStream::OnRead};
  Operation<GrpcStream> write_{this, &GrpcStream::OnWritten};
  Outbox outbox_ ABSL_GUARDED_BY(mu_);
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool last_written_ ABSL_GUARDED_BY(mu_) = false;
  bool read_paused_ ABSL_GUARDED_BY(mu_) = false;
};

// The streams of one owner, which must not go before them.
class LiveStreams {
 public:
  void Add(Stream* stream) {
    absl::MutexLock lock(&mu_);
    streams_.insert(stream);
  }

  // The last thing that a stream does.
  void Remove(Stream* stream) {
    absl::MutexLock lock(&mu_);
    streams_.erase(stream);
  }

  void AbortAll() {
    absl::MutexLock lock(&mu_);
    for (Stream* stream : streams_) stream->Abort();
  }

  void AwaitNone() {
    absl::MutexLock lock(&mu_);
    mu_.Await(
        absl::Condition(+[](std::set<Stream*>* streams) { return streams->empty(); }, &streams_));
  }

 private:
  absl::Mutex mu_;
  std::set<Stream*> streams_ ABSL_GUARDED_BY(mu_);
};

// What gRPC knows about the caller.
PeerInfo PeerOf(const grpc::ServerContext& context) {
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

// gRPC's codes for what does not exist are part of its own protocols: no reason of ours goes with
// them.
grpc::Status StatusOnTheWire(const absl::Status& status) {
  const bool exists = !absl::IsUnimplemented(status) && !absl::IsNotFound(status);
  if (exists || ReasonOf(status) != v1::REASON_ENGINE_FAILURE) return ToGrpcStatus(status);
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), std::string(status.message()));
}

}  // namespace

class GrpcService::Impl {
 public:
  Impl(GrpcEvents* events, const GrpcTransportOptions& options, AcceptCall accept)
      : events_(events), outbound_bytes_(options.outbound_bytes), accept_(std::move(accept)) {
    events_->builder()->RegisterAsyncGenericService(&service_);
  }

  // Waits for the next call.
  void AwaitCall();
  void AwaitNone() { live_.AwaitNone(); }

 private:
  class ServerStream;

  GrpcEvents* const events_;
  const uint64_t outbound_bytes_;
  const AcceptCall accept_;
  grpc::AsyncGenericService service_;
  LiveStreams live_;
};

class GrpcService::Impl::ServerStream final : public GrpcStream {
 public:
  explicit ServerStream(Impl* service)
      : GrpcStream(service->events_, service->outbound_bytes_, /*reads_wait_for_writes=*/true),
        service_(service) {}

  // Becomes the next call that comes.
  void Await() {
    self_ = shared_from_this();
    service_->live_.Add(this);
    absl::MutexLock lock(&mu_);
    ++operations_;
    context_.AsyncNotifyWhenDone(&done_);
    service_->service_.RequestCall(&context_, &call_, events_->queue(), events_->queue(),
                                   &accepted_);
  }

  void HalfClose() override {}

  void Close(const absl::Status& status) override {
    absl::MutexLock lock(&mu_);
    if (last_) return;
    last_ = true;
    status_ = status;
    Advance();
  }

  void Abort() override {
    absl::MutexLock lock(&mu_);
    if (accepted_call_ && operations_ > 0) context_.TryCancel();
  }

 protected:
  void Read(grpc::ByteBuffer* buffer, GrpcEvents::Tag* tag) override { call_.Read(buffer, tag); }
  void Write(const grpc::ByteBuffer& buffer, GrpcEvents::Tag* tag) override {
    call_.Write(buffer, tag);
  }

  void WriteLast() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) override {
    ++operations_;
    call_.Finish(StatusOnTheWire(status_), &finished_);
  }

  bool can_write() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) override { return true; }
  bool wants_messages() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) override {
    return !last_ && !broken_;
  }

  void OnReadsOver() override {
    // Whether the caller has half-closed or is gone is only known when all is seen that came.
    absl::MutexLock lock(&mu_);
    ++operations_;
    events_->Defer(&reads_over_);
  }

  void OnOver() override {
    if (handler_ != nullptr) {
      absl::Status status;
      {
        absl::MutexLock lock(&mu_);
        status = broken_ ? MakeError(v1::REASON_CANCELLED, "the caller ended the call") : status_;
      }
      handler_->OnClosed(status);
      handler_.reset();
    }
    service_->live_.Remove(this);
  }

 private:
  void OnAccepted(bool ok) {
    // The server is being shut down.
    if (!ok) return;
    service_->AwaitCall();
    {
      absl::MutexLock lock(&mu_);
      accepted_call_ = true;
      operations_ += 2;  // done_ comes by itself
      call_.SendInitialMetadata(&metadata_sent_);
    }
    handler_ = service_->accept_(context_.method(), self_, PeerOf(context_));
    absl::MutexLock lock(&mu_);
    StartRead();
  }

  void OnCallDone(bool) {
    absl::MutexLock lock(&mu_);
    if (context_.IsCancelled()) broken_ = true;
    Advance();
  }

  void OnHalfClosed(bool) {
    {
      absl::MutexLock lock(&mu_);
      if (broken_) return;
    }
    handler_->OnHalfClose();
  }

  void OnNothing(bool) {}

  Impl* const service_;
  grpc::GenericServerContext context_;
  grpc::GenericServerAsyncReaderWriter call_{&context_};
  Operation<ServerStream> accepted_{this, &ServerStream::OnAccepted};
  Operation<ServerStream> metadata_sent_{this, &ServerStream::OnNothing};
  Operation<ServerStream> reads_over_{this, &ServerStream::OnHalfClosed};
  Operation<ServerStream> finished_{this, &ServerStream::OnNothing};
  Operation<ServerStream> done_{this, &ServerStream::OnCallDone};
  bool accepted_call_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mu_);
};

void GrpcService::Impl::AwaitCall() { std::make_shared<ServerStream>(this)->Await(); }

GrpcService::GrpcService(GrpcEvents* events, const GrpcTransportOptions& options, AcceptCall accept)
    : impl_(std::make_unique<Impl>(events, options, std::move(accept))) {}
GrpcService::~GrpcService() = default;
void GrpcService::Start() { impl_->AwaitCall(); }
void GrpcService::AwaitEnd() { impl_->AwaitNone(); }

namespace {

// Channels by endpoint. One that has broken is not used again: the next dial connects afresh
// instead of waiting for gRPC's back-off, so that a restarted peer is found at once.
class ChannelPool {
 public:
  explicit ChannelPool(const GrpcTransportOptions& options) : options_(options) {}

  std::shared_ptr<grpc::Channel> Get(const std::string& endpoint) {
    // Reads files: before the lock that others wait for.
    const std::shared_ptr<grpc::ChannelCredentials> credentials =
        options_.tls != nullptr ? options_.tls->ChannelCredentials() : plaintext_;
    absl::MutexLock lock(&mu_);
    for (auto it = lines_.begin(); it != lines_.end(); ++it) {
      if (it->endpoint != endpoint) continue;
      if (it->credentials != credentials) {
        // Who this worker is, or whom it trusts, has changed. Streams keep the old line.
        lines_.erase(it);
        break;
      }
      lines_.splice(lines_.begin(), lines_, it);
      return lines_.front().channel;
    }
    lines_.push_front({endpoint, credentials, Connect(endpoint, credentials)});
    if (lines_.size() > kMaxChannels) lines_.pop_back();
    return lines_.front().channel;
  }

  void Forget(const std::string& endpoint, const grpc::Channel* channel) {
    absl::MutexLock lock(&mu_);
    lines_.remove_if([&](const Line& line) {
      return line.endpoint == endpoint && line.channel.get() == channel;
    });
  }

 private:
  struct Line {
    std::string endpoint;
    // With which it was dialed.
    std::shared_ptr<grpc::ChannelCredentials> credentials;
    std::shared_ptr<grpc::Channel> channel;
  };

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
  std::list<Line> lines_ ABSL_GUARDED_BY(mu_);
};

class ClientStream final : public GrpcStream {
 public:
  ClientStream(GrpcEvents* events, ChannelPool* pool, LiveStreams* live, std::string endpoint,
               std::shared_ptr<StreamHandler> handler, uint64_t outbound_bytes,
               bool reads_wait_for_writes)
      : GrpcStream(events, outbound_bytes, reads_wait_for_writes),
        pool_(pool),
        live_(live),
        endpoint_(std::move(endpoint)),
        channel_(pool_->Get(endpoint_)) {
    handler_ = std::move(handler);
  }

  void Begin(const ByteCall& call) {
    self_ = shared_from_this();
    live_->Add(this);
    if (!call.route_token.empty()) context_.AddMetadata(kRouteTokenKey, call.route_token);
    if (call.deadline != absl::InfiniteFuture()) {
      context_.set_deadline(absl::ToChronoTime(call.deadline));
    }
    absl::MutexLock lock(&mu_);
    call_ = grpc::GenericStub(channel_).PrepareCall(&context_, call.path, events_->queue());
    operations_ = 2;
    call_->StartCall(&started_);
    call_->ReadInitialMetadata(&connected_);
  }

  void HalfClose() override {
    absl::MutexLock lock(&mu_);
    last_ = true;
    Advance();
  }

  void Close(const absl::Status&) override { Abort(); }

  void Abort() override {
    absl::MutexLock lock(&mu_);
    broken_ = true;
    Advance();
    if (operations_ > 0) context_.TryCancel();
  }

 protected:
  void Read(grpc::ByteBuffer* buffer, GrpcEvents::Tag* tag) override { call_->Read(buffer, tag); }
  void Write(const grpc::ByteBuffer& buffer, GrpcEvents::Tag* tag) override {
    call_->Write(buffer, tag);
  }

  void WriteLast() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) override {
    ++operations_;
    call_->WritesDone(&half_closed_);
  }

  bool can_write() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) override { return is_started_; }
  // The call's status comes after the last message.
  bool wants_messages() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) override { return true; }

  void OnReadsOver() override {
    absl::MutexLock lock(&mu_);
    broken_ = true;
    Advance();
    ++operations_;
    call_->Finish(&status_, &finished_);
  }

  void OnOver() override {
    if (status_.error_code() == grpc::StatusCode::UNAVAILABLE && status_.error_details().empty()) {
      pool_->Forget(endpoint_, channel_.get());
    }
    handler_->OnClosed(FromGrpcStatus(status_));
    handler_.reset();
    live_->Remove(this);
  }

 private:
  void OnStarted(bool ok) {
    absl::MutexLock lock(&mu_);
    is_started_ = ok;
    Advance();
  }

  void OnConnected(bool ok) {
    if (!ok) return OnReadsOver();
    handler_->OnConnected();
    absl::MutexLock lock(&mu_);
    StartRead();
  }

  void OnNothing(bool) {}

  ChannelPool* const pool_;
  LiveStreams* const live_;
  const std::string endpoint_;
  const std::shared_ptr<grpc::Channel> channel_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call_;
  Operation<ClientStream> started_{this, &ClientStream::OnStarted};
  Operation<ClientStream> connected_{this, &ClientStream::OnConnected};
  Operation<ClientStream> half_closed_{this, &ClientStream::OnNothing};
  Operation<ClientStream> finished_{this, &ClientStream::OnNothing};
  bool is_started_ ABSL_GUARDED_BY(mu_) = false;
  // Written by gRPC before finished_ comes.
  grpc::Status status_;
};

class GrpcDialerImpl final : public GrpcDialer {
 public:
  GrpcDialerImpl(GrpcEvents* events, const GrpcTransportOptions& options)
      : events_(events), options_(options), pool_(options) {}

  ~GrpcDialerImpl() override {
    live_.AbortAll();
    live_.AwaitNone();
  }

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
    auto client = std::make_shared<ClientStream>(events_, &pool_, &live_, parsed->ToString(),
                                                 std::move(handler), options_.outbound_bytes,
                                                 call.reads_wait_for_writes);
    *stream = client;
    client->Begin(call);
    return absl::OkStatus();
  }

 private:
  GrpcEvents* const events_;
  const GrpcTransportOptions options_;
  ChannelPool pool_;
  LiveStreams live_;
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

std::unique_ptr<GrpcDialer> MakeGrpcDialer(GrpcEvents* events,
                                           const GrpcTransportOptions& options) {
  return std::make_unique<GrpcDialerImpl>(events, options);
}

}  // namespace meshnet::worker
