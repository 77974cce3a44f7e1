#include "cc/worker/worker.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cc/common/status.h"
#include "cc/common/system/memory.h"
#include "cc/shard_engine/grammar/grammar.h"
#include "cc/worker/head_session.h"
#include "cc/worker/stage_session.h"

namespace meshnet::worker {
namespace {

constexpr absl::Duration kTick = absl::Milliseconds(25);
constexpr absl::Duration kEvictionCheck = absl::Milliseconds(100);

uint64_t Microseconds(absl::Duration duration) {
  return static_cast<uint64_t>(absl::ToInt64Microseconds(duration));
}

template <typename Message>
Payload ErrorPayload(const absl::Status& status, const v1::LayerRange& range) {
  Message message;
  *message.mutable_error() = ToProto(status, range.begin(), range.end());
  return ToPayload(message);
}

template <>
Payload ErrorPayload<v1::SessionEvent>(const absl::Status& status, const v1::LayerRange& range) {
  v1::SessionEvent event;
  *event.mutable_error()->mutable_error() = ToProto(status, range.begin(), range.end());
  return ToPayload(event);
}

// The name of what a message holds, for errors.
template <typename Message>
std::string Described(const Message& message) {
  const auto* body = message.GetDescriptor()->oneof_decl(0);
  const auto* field = message.GetReflection()->GetOneofFieldDescriptor(message, body);
  return field == nullptr ? "an empty message" : absl::StrCat("`", std::string(field->name()), "`");
}

v1::LayerRange OwnRange(const Core& core) {
  return core.engine == nullptr ? v1::LayerRange() : ToProto(core.capability().range);
}

}  // namespace

// The accepted end of a stream whose first message has to say what it is for.
class Worker::AcceptedHandler : public StreamHandler {
 public:
  explicit AcceptedHandler(std::shared_ptr<Core> core) : core_(std::move(core)) {
    ++core_->accepted_streams;
  }
  ~AcceptedHandler() override { --core_->accepted_streams; }

  // With Core::mu held, once the time for the first message is over.
  virtual void OnFirstMessageOverdue() = 0;
  // With Core::mu held, when no stream may open a session any more.
  virtual void OnDrain() {}

 protected:
  const std::shared_ptr<Core> core_;
};

// The accepted end of a Session or Seam stream: nothing until the first message opens a session.
class Worker::UpstreamHandler : public AcceptedHandler {
 public:
  UpstreamHandler(std::shared_ptr<Core> core, Method method, std::shared_ptr<Stream> stream,
                  PeerInfo peer)
      : AcceptedHandler(std::move(core)),
        method_(method),
        stream_(std::move(stream)),
        peer_(std::move(peer)),
        max_bytes_(core_->limits.max_frame_bytes) {}

  void OnMessage(absl::string_view bytes) override {
    if (method_ == Method::kSession) {
      OnSessionMessage(bytes);
    } else {
      OnSeamMessage(bytes);
    }
  }

  void OnFirstMessageOverdue() override {
    if (session_ != nullptr || refused_ || stream_ == nullptr) return;
    Refuse(MakeError(
        v1::REASON_DEADLINE_EXCEEDED,
        absl::StrCat("expected `open` within ", absl::FormatDuration(core_->options.open_timeout),
                     " of the call's begin, got nothing; call again and send it first")));
  }

  void OnDrain() override {
    if (session_ != nullptr || refused_ || stream_ == nullptr) return;
    Refuse(core_->CheckAdmission());
  }

  void OnHalfClose() override {
    absl::MutexLock lock(&core_->mu);
    if (session_ != nullptr) {
      session_->OnUpstreamHalfClosed();
    } else if (!refused_) {
      Refuse(MakeError(v1::REASON_LIFECYCLE_VIOLATION,
                       "expected `open` as the first message, got the end of the stream; send it "
                       "and keep the stream open"));
    }
  }

  void OnWritable() override {
    absl::MutexLock lock(&core_->mu);
    if (session_ != nullptr) session_->OnUpstreamWritable();
  }

  void OnClosed(const absl::Status&) override {
    absl::MutexLock lock(&core_->mu);
    if (session_ != nullptr) session_->OnUpstreamClosed();
    session_ = nullptr;
    head_ = nullptr;
    stage_ = nullptr;
    stream_ = nullptr;
  }

 private:
  void OnSessionMessage(absl::string_view bytes) {
    v1::SessionRequest request;
    const absl::Status status = ParseMessage(bytes, max_bytes_, &request);
    // Reading a grammar takes time, so without the worker's lock. The tail would find the same only
    // after a whole prefill.
    absl::Status grammar;
    if (status.ok() && request.has_generate()) {
      const v1::SamplingParams& sampling = request.generate().sampling();
      grammar = CheckGrammar(sampling.grammar(), sampling.json_schema());
    }
    absl::MutexLock lock(&core_->mu);
    if (refused_) return;
    if (!status.ok()) return Reject(status);
    if (head_ != nullptr) return head_->OnRequest(request, grammar);
    if (!request.has_open()) {
      return Refuse(
          MakeError(v1::REASON_LIFECYCLE_VIOLATION,
                    absl::StrCat("expected `open` as the first message of a session, got ",
                                 Described(request), "; open the session before anything else")));
    }
    const v1::OpenSession& open = request.open();
    absl::StatusOr<Limits> limits = Check("Session", open, 0);
    if (!limits.ok()) return Refuse(limits.status());
    head_ = std::make_shared<HeadSession>(core_, open, peer_, stream_);
    session_ = head_;
    session_->Open(*limits);
  }

  void OnSeamMessage(absl::string_view bytes) {
    v1::SeamMessage message;
    absl::Status status = ParseMessage(bytes, max_bytes_, &message);
    std::shared_ptr<FrameAssembler> assembler;
    {
      absl::MutexLock lock(&core_->mu);
      if (refused_) return;
      if (!status.ok()) return Reject(status);
      if (stage_ == nullptr) return OpenSeam(message, bytes.size());
      stage_->CountReceived(bytes.size());
      switch (message.body_case()) {
        case v1::SeamMessage::kCancel:
          return stage_->OnCancelSteps(message.cancel().through_step());
        case v1::SeamMessage::kFrame:
          assembler = stage_->assembler();
          if (assembler != nullptr) break;
          [[fallthrough]];
        default:
          return stage_->EndHere(
              MakeError(v1::REASON_LIFECYCLE_VIOLATION,
                        absl::StrCat("expected a frame or a cancellation on an open seam, got ",
                                     Described(message),
                                     "; send `open` once and first, frames after `opened`")));
      }
    }
    // The expensive part, checksum and copy, without the worker's lock: this stream's calls are
    // serial and nobody else uses the assembler.
    absl::StatusOr<std::optional<WireStep>> step = assembler->Add(message.frame());
    std::string digest;
    if (step.ok() && step->has_value()) digest = StepDigest(**step);
    absl::MutexLock lock(&core_->mu);
    if (stage_ == nullptr) return;
    if (!step.ok()) return stage_->EndHere(step.status());
    if (step->has_value()) stage_->OnStep(*std::move(*step), std::move(digest));
  }

  void OpenSeam(const v1::SeamMessage& message, uint64_t bytes) {
    if (!message.has_open()) {
      return Refuse(
          MakeError(v1::REASON_LIFECYCLE_VIOLATION,
                    absl::StrCat("expected `open` as the first message of a seam, got ",
                                 Described(message), "; open the seam before any frame")));
    }
    const v1::SeamOpen& open = message.open();
    if (open.hop_index() == 0) {
      return Refuse(
          MakeError(v1::REASON_ROUTE_INVALID,
                    "expected a hop_index of at least 1 on a seam, got 0; hop 0 is opened by a "
                    "client with Session"));
    }
    absl::StatusOr<Limits> limits = Check("Seam", open.session(), open.hop_index());
    if (!limits.ok()) return Refuse(limits.status());
    max_bytes_ = limits->max_frame_bytes;
    stage_ = std::make_shared<StageSession>(core_, open, peer_, stream_);
    session_ = stage_;
    stage_->CountReceived(bytes);
    session_->Open(*limits);
  }

  absl::StatusOr<Limits> Check(absl::string_view action, const v1::OpenSession& open,
                               uint32_t hop_index) const {
    if (absl::Status status = core_->CheckAdmission(); !status.ok()) return status;
    const absl::Status status =
        CheckRoute({open.schema_version(), &open, hop_index}, core_->capability(),
                   core_->options.mixtures, core_->options.now());
    if (!status.ok()) return status;
    const SessionKey key = {open.route().route_session_id(), open.route().route_epoch()};
    // Last, because what it lets in is a session from there on.
    auto limits = NegotiateLimits(open.limits(), core_->limits);
    if (!limits.ok()) return limits;
    const absl::Status denied = core_->authorizer->Authorize(action, peer_, key, hop_index);
    if (!denied.ok()) return denied;
    return limits;
  }

  // A message that cannot be read: ends the session, or the stream when there is none yet.
  void Reject(const absl::Status& status) {
    if (session_ != nullptr) {
      session_->EndHere(status);
    } else {
      Refuse(status);
    }
  }

  void Refuse(const absl::Status& status) {
    refused_ = true;
    core_->CountRefusal(status);
    core_->logger->Log(Severity::kWarning, "refused",
                       {{"method", MethodName(method_)},
                        {"peer", peer_.address},
                        {"reason", ReasonName(ReasonOf(status))},
                        {"message", status.message()}});
    if (stream_ == nullptr) return;
    const v1::LayerRange range = OwnRange(*core_);
    stream_->Send(method_ == Method::kSession ? ErrorPayload<v1::SessionEvent>(status, range)
                                              : ErrorPayload<v1::SeamMessage>(status, range));
    core_->CloseAccepted(stream_, status);
  }

  const Method method_;
  std::shared_ptr<Stream> stream_;
  const PeerInfo peer_;
  // Touched by the stream's serial calls only; all below is guarded by Core::mu.
  uint64_t max_bytes_;
  bool refused_ = false;
  std::shared_ptr<Session> session_;
  std::shared_ptr<HeadSession> head_;
  std::shared_ptr<StageSession> stage_;
};

// The tail's end of a Return stream.
class Worker::ReturnAcceptHandler : public AcceptedHandler {
 public:
  ReturnAcceptHandler(std::shared_ptr<Core> core, std::shared_ptr<Stream> stream, PeerInfo peer)
      : AcceptedHandler(std::move(core)), stream_(std::move(stream)), peer_(std::move(peer)) {}

  void OnMessage(absl::string_view bytes) override {
    v1::ReturnRequest request;
    absl::Status status = ParseMessage(bytes, core_->options.limits.max_frame_bytes, &request);
    absl::MutexLock lock(&core_->mu);
    if (refused_) return;
    if (session_ != nullptr) {
      // The stream carries results from here on; whoever sends more has lost the thread.
      session_->EndHere(
          MakeError(v1::REASON_LIFECYCLE_VIOLATION,
                    absl::StrCat("expected nothing after `attach` on a return "
                                 "stream, got ",
                                 bytes.size(), " bytes; only read from it from there on")));
      return;
    }
    if (status.ok()) status = Attach(request);
    if (!status.ok()) Refuse(status);
  }

  void OnFirstMessageOverdue() override {
    if (session_ != nullptr || refused_ || stream_ == nullptr) return;
    Refuse(MakeError(
        v1::REASON_DEADLINE_EXCEEDED,
        absl::StrCat("expected `attach` within ", absl::FormatDuration(core_->options.open_timeout),
                     " of the call's begin, got nothing; call again and send it first")));
  }

  void OnHalfClose() override {
    absl::MutexLock lock(&core_->mu);
    if (session_ == nullptr && !refused_) {
      Refuse(MakeError(v1::REASON_LIFECYCLE_VIOLATION,
                       "expected `attach` on a return stream, got its end; send it and keep the "
                       "stream open"));
    }
  }

  void OnWritable() override {
    absl::MutexLock lock(&core_->mu);
    if (session_ != nullptr) session_->OnReturnWritable();
  }

  void OnClosed(const absl::Status&) override {
    absl::MutexLock lock(&core_->mu);
    if (session_ != nullptr) session_->OnReturnClosed();
    session_ = nullptr;
    stream_ = nullptr;
  }

 private:
  absl::Status Attach(const v1::ReturnRequest& request) {
    if (!request.has_attach()) {
      return MakeError(v1::REASON_LIFECYCLE_VIOLATION,
                       absl::StrCat("expected `attach` as the first message of a return stream, "
                                    "got ",
                                    Described(request), "; name the session to attach to"));
    }
    const v1::ReturnAttach& attach = request.attach();
    if (attach.schema_version() != kSchemaVersion) {
      return MakeError(
          v1::REASON_SCHEMA_VERSION_UNSUPPORTED,
          absl::StrCat("expected schema_version ", kSchemaVersion, ", got ",
                       attach.schema_version(), "; bring both ends of the route to one version"));
    }
    const SessionKey key = {attach.route_session_id(), attach.route_epoch()};
    const absl::Status denied = core_->authorizer->Authorize("Return", peer_, key, std::nullopt);
    if (!denied.ok()) return denied;
    const std::shared_ptr<Session> found = core_->Find(key);
    if (found == nullptr) {
      for (const auto& session : core_->sessions) {
        if (session->key().route_session_id == key.route_session_id &&
            session->key().route_epoch > key.route_epoch) {
          return MakeError(
              v1::REASON_STALE_EPOCH,
              absl::StrCat("expected epoch ", session->key().route_epoch, ", got ", key.route_epoch,
                           "; the route has been opened anew, leave the old one"));
        }
      }
      return MakeError(v1::REASON_SESSION_UNKNOWN,
                       absl::StrCat("expected the key of a session whose seam is open at this "
                                    "worker, got another one of epoch ",
                                    key.route_epoch, "; open the seam first"));
    }
    auto stage = std::dynamic_pointer_cast<StageSession>(found);
    if (stage == nullptr || !stage->accepts_return()) {
      return MakeError(v1::REASON_LIFECYCLE_VIOLATION,
                       "expected one return stream per session, attached at its last stage, got "
                       "a second one or an earlier stage; keep the first, or attach at the tail");
    }
    session_ = std::move(stage);
    session_->AttachReturn(stream_);
    return absl::OkStatus();
  }

  void Refuse(const absl::Status& status) {
    refused_ = true;
    core_->CountRefusal(status);
    if (stream_ == nullptr) return;
    stream_->Send(ErrorPayload<v1::ReturnEvent>(status, OwnRange(*core_)));
    core_->CloseAccepted(stream_, status);
  }

  std::shared_ptr<Stream> stream_;
  const PeerInfo peer_;
  bool refused_ = false;
  std::shared_ptr<StageSession> session_;
};

// ---- Worker ----

Worker::Worker(WorkerOptions options, Dialer* dialer, Authorizer* authorizer, const Logger* logger)
    : core_(std::make_shared<Core>()) {
  core_->limits = options.limits;
  core_->options = std::move(options);
  core_->dialer = dialer;
  core_->authorizer = authorizer;
  core_->logger = logger;
}

Worker::~Worker() { Stop(); }

void Worker::SetStateListener(std::function<void(v1::WorkerState)> listener) {
  absl::MutexLock lock(&core_->mu);
  listener_ = std::move(listener);
  if (listener_ != nullptr) listener_(core_->state);
}

void Worker::SetState(v1::WorkerState state) {
  core_->state = state;
  core_->logger->Log(state == v1::WORKER_STATE_FAILED ? Severity::kError : Severity::kInfo, "state",
                     {{"state", v1::WorkerState_Name(state)}});
  if (listener_ != nullptr) listener_(state);
}

void Worker::Fail(const absl::Status& status) {
  absl::MutexLock lock(&core_->mu);
  // The first reason stays.
  if (core_->state == v1::WORKER_STATE_FAILED) return;
  core_->state_reason = status;
  SetState(v1::WORKER_STATE_FAILED);
}

absl::Status Worker::AttachEngine(std::unique_ptr<ShardEngine> engine) {
  const Capability& capability = engine->capability();
  const WorkerOptions& options = core_->options;
  absl::Status status;
  if (!options.expected_recipe_fingerprint.empty() &&
      options.expected_recipe_fingerprint != capability.recipe_fingerprint) {
    status = MakeError(v1::REASON_RECIPE_MISMATCH,
                       absl::StrCat("expected recipe ", options.expected_recipe_fingerprint,
                                    ", loaded ", capability.recipe_fingerprint,
                                    "; give the artifact and the flags of that recipe"));
  }
  if (!options.expected_artifact_sha256.empty() &&
      options.expected_artifact_sha256 != capability.artifact_sha256) {
    status =
        MakeError(v1::REASON_ARTIFACT_MISMATCH,
                  absl::StrCat("expected artifact ", options.expected_artifact_sha256, ", loaded ",
                               capability.artifact_sha256, "; give the file that has this hash"));
  }
  const auto one_of = [](const std::vector<std::string>& allowed, const std::string& value) {
    return allowed.empty() || std::find(allowed.begin(), allowed.end(), value) != allowed.end();
  };
  if (status.ok() && !one_of(options.allowed_recipes, capability.recipe_fingerprint)) {
    status = MakeError(v1::REASON_RECIPE_MISMATCH,
                       absl::StrCat("expected one of the identity file's recipes (",
                                    absl::StrJoin(options.allowed_recipes, ", "), "), loaded ",
                                    capability.recipe_fingerprint));
  }
  if (status.ok() && !one_of(options.allowed_artifacts, capability.artifact_sha256)) {
    status = MakeError(v1::REASON_ARTIFACT_MISMATCH,
                       absl::StrCat("expected one of the identity file's artifacts (",
                                    absl::StrJoin(options.allowed_artifacts, ", "), "), loaded ",
                                    capability.artifact_sha256));
  }
  ShardEngine* const loaded = engine.get();
  if (status.ok()) {
    absl::MutexLock lock(&core_->mu);
    core_->limits.max_step_tokens =
        std::min(core_->limits.max_step_tokens, capability.max_step_tokens);
    core_->engine = std::move(engine);
    Scheduler::Options scheduler;
    scheduler.policy = capability.batch_policy;
    scheduler.prefill_token_budget = options.prefill_token_budget > 0 ? options.prefill_token_budget
                                                                      : capability.max_step_tokens;
    scheduler.events = options.events;
    core_->scheduler = std::make_unique<Scheduler>(loaded, scheduler);
    SetState(v1::WORKER_STATE_WARMING_UP);
  }
  if (status.ok()) status = loaded->WarmUp();
  if (!status.ok()) {
    Fail(status);
    return status;
  }
  absl::MutexLock lock(&core_->mu);
  // A shutdown may have come first.
  if (core_->state == v1::WORKER_STATE_WARMING_UP) SetState(v1::WORKER_STATE_READY);
  return absl::OkStatus();
}

void Worker::Start() {
  core_->scheduler->Start();
  timer_ = std::thread([this] { TimerLoop(); });
}

bool Worker::RunEngineOnce() { return core_->scheduler->RunOnce(); }

void Worker::TimerLoop() {
  while (true) {
    {
      absl::MutexLock lock(&core_->mu);
      if (!stopping_) timer_stop_.WaitWithTimeout(&core_->mu, kTick);
      if (stopping_) return;
    }
    Tick();
  }
}

void Worker::Tick() {
  const absl::Time now = core_->options.now();
  EndOverdue(now);
  absl::MutexLock lock(&core_->mu);
  if (core_->engine == nullptr) return;
  // Ends change the set.
  const std::vector<std::shared_ptr<Session>> sessions(core_->sessions.begin(),
                                                       core_->sessions.end());
  for (const auto& session : sessions) session->OnTick(now);
  if (now >= drain_deadline_) {
    for (const auto& session : sessions) {
      if (!session->ended()) session->OnDrain(/*expired=*/true);
    }
  }
  if (core_->state == v1::WORKER_STATE_READY || core_->state == v1::WORKER_STATE_DRAINING) {
    const absl::Status health = core_->engine->health();
    if (!health.ok()) {
      core_->state_reason = health;
      SetState(v1::WORKER_STATE_FAILED);
      for (const auto& session : sessions) {
        if (!session->ended()) session->EndHere(health);
      }
    }
  }
  if (sessions.empty() || now < next_eviction_check_) return;
  next_eviction_check_ = now + kEvictionCheck;
  core_->scheduler->Post([core = core_](ShardEngine& engine) {
    const std::vector<SessionKey> evicted = engine.EvictIdle();
    absl::MutexLock command_lock(&core->mu);
    core->EndEvicted(evicted, nullptr);
  });
}

void Worker::BeginDrain(absl::Time deadline) {
  std::vector<std::shared_ptr<AcceptedHandler>> unopened;
  {
    absl::MutexLock lock(&unopened_mu_);
    for (const Unopened& entry : unopened_) {
      if (auto handler = entry.handler.lock()) unopened.push_back(std::move(handler));
    }
  }
  absl::MutexLock lock(&core_->mu);
  if (core_->state != v1::WORKER_STATE_FAILED) SetState(v1::WORKER_STATE_DRAINING);
  drain_deadline_ = std::min(drain_deadline_, deadline);
  const std::vector<std::shared_ptr<Session>> sessions(core_->sessions.begin(),
                                                       core_->sessions.end());
  for (const auto& session : sessions) session->OnDrain(/*expired=*/false);
  for (const auto& handler : unopened) handler->OnDrain();
}

bool Worker::is_busy() const {
  absl::MutexLock lock(&core_->mu);
  return !core_->sessions.empty() || core_->accepted_streams > 0;
}

void Worker::Stop() {
  {
    absl::MutexLock lock(&core_->mu);
    if (stopping_) return;
    stopping_ = true;
    timer_stop_.SignalAll();
    if (core_->state != v1::WORKER_STATE_FAILED) SetState(v1::WORKER_STATE_DRAINING);
    const std::vector<std::shared_ptr<Session>> sessions(core_->sessions.begin(),
                                                         core_->sessions.end());
    for (const auto& session : sessions) session->OnDrain(/*expired=*/true);
  }
  if (timer_.joinable()) timer_.join();
  if (core_->scheduler != nullptr) core_->scheduler->Stop();
}

std::shared_ptr<StreamHandler> Worker::Accept(Method method, std::shared_ptr<Stream> stream,
                                              const PeerInfo& peer) {
  std::shared_ptr<AcceptedHandler> handler;
  if (method == Method::kReturn) {
    handler = std::make_shared<ReturnAcceptHandler>(core_, std::move(stream), peer);
  } else {
    handler = std::make_shared<UpstreamHandler>(core_, method, std::move(stream), peer);
  }
  absl::MutexLock lock(&unopened_mu_);
  unopened_.push_back({core_->options.now() + core_->options.open_timeout, handler});
  return handler;
}

void Worker::EndOverdue(absl::Time now) {
  std::vector<std::shared_ptr<AcceptedHandler>> overdue;
  {
    absl::MutexLock lock(&unopened_mu_);
    while (!unopened_.empty() && unopened_.front().deadline <= now) {
      if (auto handler = unopened_.front().handler.lock()) overdue.push_back(std::move(handler));
      unopened_.pop_front();
    }
  }
  absl::MutexLock lock(&core_->mu);
  for (const auto& handler : overdue) handler->OnFirstMessageOverdue();
  while (!core_->closing.empty() && core_->closing.front().first <= now) {
    if (const auto stream = core_->closing.front().second.lock()) stream->Abort();
    core_->closing.pop_front();
  }
}

absl::StatusOr<v1::Capability> Worker::GetCapability(
    const v1::GetCapabilityRequest& request) const {
  const auto& versions = request.schema_versions();
  if (std::find(versions.begin(), versions.end(), kSchemaVersion) == versions.end()) {
    return MakeError(
        v1::REASON_SCHEMA_VERSION_UNSUPPORTED,
        absl::StrCat("expected schema_versions to hold ", kSchemaVersion,
                     ", the one that this worker speaks, got [", absl::StrJoin(versions, ", "),
                     "]; use a client of that version"));
  }
  absl::MutexLock lock(&core_->mu);
  v1::Capability capability;
  if (core_->engine != nullptr) {
    capability = ToProto(core_->capability());
    capability.set_prefill_chunk_tokens(core_->limits.max_step_tokens);
  }
  capability.set_schema_version(kSchemaVersion);
  *capability.mutable_limits() = ToProto(core_->limits);
  capability.set_worker_version(core_->options.version);
  return capability;
}

v1::Health Worker::GetHealth() const {
  absl::MutexLock lock(&core_->mu);
  v1::Health health;
  health.set_state(core_->state);
  const absl::Status reason = core_->CheckAdmission();
  if (core_->state != v1::WORKER_STATE_READY) {
    const v1::LayerRange range = OwnRange(*core_);
    *health.mutable_error() = ToProto(reason, range.begin(), range.end());
  }
  if (core_->engine != nullptr) {
    const Capability& capability = core_->capability();
    *health.mutable_range() = ToProto(capability.range);
    health.set_artifact_sha256(capability.artifact_sha256);
    health.set_recipe_fingerprint(capability.recipe_fingerprint);
  }
  return health;
}

v1::Metrics Worker::GetMetrics() const {
  absl::MutexLock lock(&core_->mu);
  v1::Metrics metrics;
  metrics.set_resident_bytes(ResidentBytes());
  if (core_->engine != nullptr) {
    const EngineMetrics engine = core_->engine->metrics();
    metrics.set_owned_tensor_bytes(core_->capability().owned_tensor_bytes);
    metrics.set_kv_bytes(engine.kv_bytes);
    metrics.set_kv_budget_bytes(engine.kv_budget_bytes);
    // Gone from both: the protocol's and the engine's books.
    metrics.set_open_sessions(
        std::max(engine.open_sessions, static_cast<uint32_t>(core_->sessions.size())));
    metrics.set_prefill_tokens(engine.prefill_tokens);
    metrics.set_decode_tokens(engine.decode_tokens);
    metrics.set_prefill_engine_us(Microseconds(engine.prefill_time));
    metrics.set_decode_engine_us(Microseconds(engine.decode_time));
    metrics.set_warm_up_step_us(Microseconds(engine.warm_up_step));
    metrics.set_engine_calls(engine.engine_calls);
    metrics.set_queued_steps(core_->scheduler->queued());
  }
  for (const auto& session : core_->sessions) {
    metrics.set_queued_steps(metrics.queued_steps() + session->queued_steps());
    metrics.set_queued_bytes(metrics.queued_bytes() + session->queued_bytes());
  }
  const Counters& counters = core_->counters;
  metrics.set_seam_bytes_received(counters.seam_bytes_received);
  metrics.set_seam_bytes_sent(counters.seam_bytes_sent);
  metrics.set_return_bytes_sent(counters.return_bytes_sent);
  metrics.set_sessions_opened(counters.sessions_opened);
  metrics.set_sessions_completed(counters.sessions_completed);
  metrics.set_sessions_cancelled(counters.sessions_cancelled);
  metrics.set_sessions_failed(counters.sessions_failed);
  metrics.set_sessions_evicted(counters.sessions_evicted);
  *metrics.mutable_prefill_stay() = counters.prefill_stay.ToProto();
  *metrics.mutable_decode_stay() = counters.decode_stay.ToProto();
  *metrics.mutable_seam_connect() = counters.seam_connect.ToProto();
  *metrics.mutable_decode_round_trip() = counters.decode_round_trip.ToProto();
  metrics.mutable_refusals()->insert(counters.refusals.begin(), counters.refusals.end());
  return metrics;
}

absl::StatusOr<std::vector<std::shared_ptr<Session>>> Worker::FindForKey(absl::string_view action,
                                                                         const std::string& id,
                                                                         uint64_t epoch,
                                                                         const PeerInfo& peer) {
  if (id.size() != 16 || epoch == 0) {
    return MakeError(v1::REASON_FIELD_OUT_OF_BOUNDS,
                     absl::StrCat("expected a route_session_id of 16 bytes and a route_epoch >= 1, "
                                  "got ",
                                  id.size(), " bytes and epoch ", epoch));
  }
  const absl::Status denied = core_->authorizer->Authorize(action, peer, {id, epoch}, std::nullopt);
  if (!denied.ok()) return denied;
  std::vector<std::shared_ptr<Session>> found;
  for (const auto& session : core_->sessions) {
    const SessionKey& key = session->key();
    if (key.route_session_id == id && key.route_epoch <= epoch) found.push_back(session);
  }
  return found;
}

absl::StatusOr<v1::CancelSessionResponse> Worker::CancelSession(
    const v1::CancelSessionRequest& request, const PeerInfo& peer) {
  absl::MutexLock lock(&core_->mu);
  const auto sessions =
      FindForKey("CancelSession", request.route_session_id(), request.route_epoch(), peer);
  if (!sessions.ok()) return sessions.status();
  for (const auto& session : *sessions) {
    session->EndHere(MakeError(v1::REASON_CANCELLED, "the session was cancelled by key"));
  }
  v1::CancelSessionResponse response;
  response.set_found(!sessions->empty());
  return response;
}

absl::StatusOr<v1::ReleaseSessionResponse> Worker::ReleaseSession(
    const v1::ReleaseSessionRequest& request, const PeerInfo& peer) {
  absl::MutexLock lock(&core_->mu);
  const auto sessions =
      FindForKey("ReleaseSession", request.route_session_id(), request.route_epoch(), peer);
  if (!sessions.ok()) return sessions.status();
  for (const auto& session : *sessions) session->ReleaseByKey();
  v1::ReleaseSessionResponse response;
  response.set_found(!sessions->empty());
  return response;
}

const Tokenizer* Worker::tokenizer() const {
  absl::MutexLock lock(&core_->mu);
  return core_->engine == nullptr ? nullptr : &core_->engine->tokenizer();
}

}  // namespace meshnet::worker
