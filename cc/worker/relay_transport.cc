#include "cc/worker/relay_transport.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "cc/common/status.h"
#include "cc/protocol/frame_codec.h"
#include "google/protobuf/io/coded_stream.h"
#include "proto/meshnet/control/v1/relay.pb.h"

namespace meshnet::worker {
namespace {

namespace relay_v1 = ::meshnet::control::v1;
using google::protobuf::io::CodedInputStream;
using google::protobuf::io::CodedOutputStream;

constexpr char kListenPath[] = "/meshnet.control.v1.RelayService/Listen";
constexpr char kConnectPath[] = "/meshnet.control.v1.RelayService/Connect";
constexpr char kAcceptPath[] = "/meshnet.control.v1.RelayService/Accept";
// Of everything but payload.
constexpr uint64_t kMaxControlBytes = 64 << 10;
// Field `payload` of RelayFrame, length-delimited.
constexpr uint8_t kPayloadTag = 0x22;
constexpr size_t kMaxHeaderBytes = 6;

Payload Serialized(const google::protobuf::Message& message) {
  return std::make_shared<const std::string>(message.SerializeAsString());
}

// RelayFrame{payload}, with one copy instead of protobuf's two.
Payload Wrap(const std::string& payload) {
  uint8_t header[kMaxHeaderBytes];
  header[0] = kPayloadTag;
  const uint8_t* end =
      CodedOutputStream::WriteVarint32ToArray(static_cast<uint32_t>(payload.size()), header + 1);
  auto frame = std::make_shared<std::string>();
  frame->reserve(static_cast<size_t>(end - header) + payload.size());
  frame->append(reinterpret_cast<const char*>(header), static_cast<size_t>(end - header));
  frame->append(payload);
  return frame;
}

// The payload within such a frame; nothing for any other one.
std::optional<absl::string_view> Unwrap(absl::string_view frame) {
  if (frame.empty() || static_cast<uint8_t>(frame[0]) != kPayloadTag) return std::nullopt;
  CodedInputStream input(reinterpret_cast<const uint8_t*>(frame.data()),
                         static_cast<int>(frame.size()));
  uint32_t size = 0;
  if (input.ReadTag() == 0 || !input.ReadVarint32(&size)) return std::nullopt;
  frame.remove_prefix(static_cast<size_t>(input.CurrentPosition()));
  if (frame.size() != size) return std::nullopt;
  return frame;
}

enum class Side { kCaller, kCallee };

// One end of a relayed call: a stream to whoever uses it, a handler to the call that carries it.
class RelayedStream final : public Stream,
                            public StreamHandler,
                            public std::enable_shared_from_this<RelayedStream> {
 public:
  RelayedStream(Side side, std::string relay, std::shared_ptr<std::atomic<int>> count = nullptr)
      : side_(side), relay_(std::move(relay)), count_(std::move(count)) {
    if (count_ != nullptr) ++*count_;
  }
  ~RelayedStream() override {
    if (count_ != nullptr) --*count_;
  }

  // Before Begin.
  void SetHandler(std::shared_ptr<StreamHandler> handler) { handler_ = std::move(handler); }

  absl::Status Begin(Caller* caller, const ByteCall& call, Payload first_frame) {
    std::shared_ptr<Stream> carrier;
    const absl::Status status = caller->Call(call, shared_from_this(), &carrier);
    if (!status.ok()) return status;
    absl::MutexLock lock(&mu_);
    carrier_ = std::move(carrier);
    carrier_->Send(std::move(first_frame));
    for (Payload& frame : early_) carrier_->Send(std::move(frame));
    early_.clear();
    if (aborted_) carrier_->Abort();
    return absl::OkStatus();
  }

  void Send(Payload message) override {
    Payload frame = Wrap(*message);
    absl::MutexLock lock(&mu_);
    if (!local_end_) Push(std::move(frame));
  }

  bool writable() const override {
    absl::MutexLock lock(&mu_);
    return carrier_ == nullptr || carrier_->writable();
  }

  void HalfClose() override {
    absl::MutexLock lock(&mu_);
    End();
  }

  void Close(const absl::Status&) override {
    if (side_ == Side::kCaller) return Abort();
    absl::MutexLock lock(&mu_);
    deaf_ = true;
    End();
  }

  void Abort() override {
    absl::MutexLock lock(&mu_);
    AbortLocked();
  }

  void OnMessage(absl::string_view frame) override {
    if (remote_end_) return Violate("nothing after the end frame");
    if (side_ == Side::kCaller && !opened_) return Opened(frame);
    if (const auto payload = Unwrap(frame); payload.has_value()) {
      if (!deaf()) handler_->OnMessage(*payload);
      return;
    }
    relay_v1::RelayFrame end;
    if (!ParseMessage(frame, kMaxControlBytes, &end).ok() || !end.has_end()) {
      return Violate("payload or the end frame");
    }
    remote_end_ = true;
    if (side_ == Side::kCallee) {
      if (!deaf()) handler_->OnHalfClose();
      return;
    }
    // The answering side is done, so the call is.
    absl::MutexLock lock(&mu_);
    End();
  }

  void OnWritable() override { handler_->OnWritable(); }

  void OnClosed(const absl::Status& status) override {
    absl::Status end = status;
    {
      absl::MutexLock lock(&mu_);
      local_end_ = true;
      if (!violation_.ok()) {
        end = violation_;
      } else if (remote_end_ && (side_ == Side::kCaller || deaf_)) {
        end = absl::OkStatus();
      } else if (end.ok()) {
        end = MakeError(v1::REASON_PEER_LOST, "the call ended without its end frame");
      }
    }
    if (!end.ok()) {
      end = MakeError(ReasonOf(end), absl::StrCat("by way of relay ", relay_, ": ", end.message()));
    }
    handler_->OnClosed(end);
    handler_.reset();
  }

 private:
  void Opened(absl::string_view frame) {
    relay_v1::RelayFrame opened;
    if (!ParseMessage(frame, kMaxControlBytes, &opened).ok() || !opened.has_opened()) {
      return Violate("`opened` first");
    }
    opened_ = true;
    handler_->OnConnected();
  }

  void Violate(absl::string_view expected) {
    absl::MutexLock lock(&mu_);
    if (violation_.ok()) {
      violation_ = MakeError(v1::REASON_LIFECYCLE_VIOLATION,
                             absl::StrCat("expected ", expected, ", got another frame"));
    }
    AbortLocked();
  }

  bool deaf() const {
    absl::MutexLock lock(&mu_);
    return deaf_ || !violation_.ok();
  }

  void Push(Payload frame) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (carrier_ != nullptr) {
      carrier_->Send(std::move(frame));
    } else {
      early_.push_back(std::move(frame));
    }
  }

  void End() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (local_end_) return;
    local_end_ = true;
    relay_v1::RelayFrame end;
    end.mutable_end();
    Push(Serialized(end));
  }

  void AbortLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    local_end_ = true;
    aborted_ = true;
    early_.clear();
    if (carrier_ != nullptr) carrier_->Abort();
  }

  const Side side_;
  const std::string relay_;
  // Of the calls that a listener has taken up.
  const std::shared_ptr<std::atomic<int>> count_;
  // Touched by the call's serial events only.
  std::shared_ptr<StreamHandler> handler_;
  bool opened_ = false;
  bool remote_end_ = false;
  mutable absl::Mutex mu_;
  std::shared_ptr<Stream> carrier_ ABSL_GUARDED_BY(mu_);
  // What was sent before there was a call to carry it.
  std::deque<Payload> early_ ABSL_GUARDED_BY(mu_);
  bool local_end_ ABSL_GUARDED_BY(mu_) = false;
  bool aborted_ ABSL_GUARDED_BY(mu_) = false;
  // The answering side has ended the call: nothing that comes matters any more.
  bool deaf_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status violation_ ABSL_GUARDED_BY(mu_);
};

std::optional<Method> MethodOf(absl::string_view name) {
  for (const Method method : {Method::kSession, Method::kSeam, Method::kReturn}) {
    if (MethodName(method) == name) return method;
  }
  return std::nullopt;
}

}  // namespace

absl::Status RelayDialer::Dial(Method method, const DialTarget& target,
                               std::shared_ptr<StreamHandler> handler,
                               std::shared_ptr<Stream>* stream) {
  if (target.relay_peer_id.empty()) {
    return direct_->Dial(method, target, std::move(handler), stream);
  }
  if (peer_id_.empty()) {
    return MakeError(v1::REASON_CONFIGURATION_INVALID,
                     absl::StrCat("expected a name of this worker to give to relay ",
                                  target.endpoint, "; start it with --relay_peer_id"));
  }
  relay_v1::RelayFrame first;
  relay_v1::RelayOpen* open = first.mutable_open();
  open->set_caller_id(peer_id_);
  open->set_callee_id(target.relay_peer_id);
  open->set_method(std::string(MethodName(method)));
  open->set_credential(target.route_token);
  for (const auto& [name, value] : target.attribution) (*open->mutable_attribution())[name] = value;
  ByteCall call;
  call.endpoint = target.endpoint;
  call.path = kConnectPath;
  call.deadline = target.deadline;
  auto relayed = std::make_shared<RelayedStream>(Side::kCaller, target.endpoint);
  relayed->SetHandler(std::move(handler));
  if (absl::Status status = relayed->Begin(caller_, call, Serialized(first)); !status.ok()) {
    return status;
  }
  *stream = std::move(relayed);
  return absl::OkStatus();
}

// ---- Listening ----

struct RelayListener::State {
  State(RelayListenerOptions given, Caller* caller_given, StreamAcceptor* acceptor_given,
        const Logger* logger_given)
      : options(std::move(given)),
        caller(caller_given),
        acceptor(acceptor_given),
        logger(logger_given) {}

  void Log(Severity severity, absl::string_view event, const absl::Status& status) const {
    logger->Log(severity, event,
                {{"relay", options.endpoint},
                 {"peer_id", options.peer_id},
                 {"reason", ReasonName(ReasonOf(status))},
                 {"message", status.message()}});
  }

  void TakeUp(const relay_v1::Incoming& incoming) const {
    const std::optional<Method> method = MethodOf(incoming.method());
    if (!method.has_value()) {
      return Log(Severity::kWarning, "relayed_call_ignored",
                 MakeError(v1::REASON_FIELD_OUT_OF_BOUNDS,
                           absl::StrCat("expected Session, Seam or Return, got '",
                                        incoming.method().substr(0, 64), "' from ",
                                        incoming.caller_id())));
    }
    if (*calls >= options.max_calls) {
      return Log(
          Severity::kWarning, "relayed_call_ignored",
          MakeError(v1::REASON_QUEUE_FULL,
                    absl::StrCat("expected at most ", options.max_calls,
                                 " calls at once, got one more from ", incoming.caller_id())));
    }
    PeerInfo peer;
    peer.address = absl::StrCat("relay:", options.endpoint, "/", incoming.caller_id());
    if (options.authenticated) peer.identity = incoming.caller_id();
    peer.route_token = incoming.credential();
    ByteCall call;
    call.endpoint = options.endpoint;
    call.path = kAcceptPath;
    call.reads_wait_for_writes = true;
    if (incoming.deadline_ms() > 0) {
      call.deadline = absl::Now() + absl::Milliseconds(incoming.deadline_ms());
    }
    relay_v1::RelayFrame first;
    first.mutable_accept()->set_call_id(incoming.call_id());
    auto relayed = std::make_shared<RelayedStream>(Side::kCallee, options.endpoint, calls);
    relayed->SetHandler(acceptor->Accept(*method, relayed, peer));
    const absl::Status status = relayed->Begin(caller, call, Serialized(first));
    if (!status.ok()) relayed->OnClosed(status);
  }

  const RelayListenerOptions options;
  Caller* const caller;
  StreamAcceptor* const acceptor;
  const Logger* const logger;
  const std::shared_ptr<std::atomic<int>> calls = std::make_shared<std::atomic<int>>(0);

  absl::Mutex mu;
  bool stopping ABSL_GUARDED_BY(mu) = false;
  bool closed ABSL_GUARDED_BY(mu) = false;
  bool was_listening ABSL_GUARDED_BY(mu) = false;
  // It sent what no relay sends.
  bool strange ABSL_GUARDED_BY(mu) = false;
  std::shared_ptr<Stream> stream ABSL_GUARDED_BY(mu);
};

// What comes on the Listen call.
class RelayListener::Events : public StreamHandler {
 public:
  explicit Events(std::shared_ptr<State> state) : state_(std::move(state)) {}

  void OnMessage(absl::string_view bytes) override {
    relay_v1::ListenEvent event;
    if (absl::Status status = ParseMessage(bytes, kMaxControlBytes, &event); !status.ok()) {
      state_->Log(Severity::kWarning, "relay_refused", status);
      absl::MutexLock lock(&state_->mu);
      state_->strange = true;
      if (state_->stream != nullptr) state_->stream->Abort();
      return;
    }
    {
      absl::MutexLock lock(&state_->mu);
      if (state_->stopping) return;
      if (event.has_listening()) state_->was_listening = true;
    }
    if (event.has_listening()) {
      state_->logger->Log(
          Severity::kInfo, "relay_listening",
          {{"relay", state_->options.endpoint}, {"peer_id", state_->options.peer_id}});
    }
    if (event.has_incoming()) state_->TakeUp(event.incoming());
  }

  void OnClosed(const absl::Status& status) override {
    {
      absl::MutexLock lock(&state_->mu);
      if (!state_->stopping) {
        state_->Log(Severity::kWarning, "relay_lost",
                    status.ok() ? MakeError(v1::REASON_PEER_LOST, "the relay ended the listening")
                                : status);
      }
      state_->closed = true;
    }
  }

 private:
  const std::shared_ptr<State> state_;
};

RelayListener::RelayListener(RelayListenerOptions options, Caller* caller, StreamAcceptor* acceptor,
                             const Logger* logger)
    : state_(std::make_shared<State>(std::move(options), caller, acceptor, logger)),
      thread_([this] { Run(); }) {}

RelayListener::~RelayListener() {
  {
    absl::MutexLock lock(&state_->mu);
    state_->stopping = true;
    if (state_->stream != nullptr) state_->stream->Abort();
  }
  thread_.join();
}

void RelayListener::Run() {
  State* const state = state_.get();
  absl::Duration backoff = state->options.min_backoff;
  relay_v1::ListenRequest request;
  request.set_peer_id(state->options.peer_id);
  ByteCall call;
  call.endpoint = state->options.endpoint;
  call.path = kListenPath;
  while (true) {
    {
      absl::MutexLock lock(&state->mu);
      if (state->stopping) return;
      state->closed = false;
      state->was_listening = false;
      state->strange = false;
    }
    std::shared_ptr<Stream> stream;
    const absl::Status status =
        state->caller->Call(call, std::make_shared<Events>(state_), &stream);
    if (!status.ok()) state->Log(Severity::kError, "relay_refused", status);
    absl::MutexLock lock(&state->mu);
    if (status.ok()) {
      state->stream = stream;
      stream->Send(Serialized(request));
      stream->HalfClose();
      if (state->stopping || state->strange) stream->Abort();
      // Ends with the call: the relay keeps it open for as long as it forwards.
      state->mu.Await(absl::Condition(&state->closed));
      state->stream = nullptr;
    }
    if (state->was_listening) backoff = state->options.min_backoff;
    state->mu.AwaitWithTimeout(absl::Condition(&state->stopping), backoff);
    backoff = std::min(backoff * 2, state->options.max_backoff);
  }
}

}  // namespace meshnet::worker
