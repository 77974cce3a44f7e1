#include "cc/worker/session.h"

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "cc/common/status.h"

namespace meshnet::worker {
namespace {

// Sessions that wait for a slot or give one back, beside those that hold one.
constexpr size_t kSessionsInTransit = 64;
constexpr uint32_t kRetryHintMs = 500;
constexpr absl::Duration kDeadlineMargin = absl::Seconds(1);

bool SameRange(const v1::LayerRange& wire, const LayerRange& range) {
  return wire.begin() == range.begin && wire.end() == range.end;
}

std::string RangeText(const v1::LayerRange& range) {
  return absl::StrCat("[", range.begin(), ", ", range.end(), ")");
}

// Reasons by which a caller or an operator ends a session, as opposed to a fault.
bool IsCancellation(v1::Reason reason) {
  return reason == v1::REASON_CANCELLED || reason == v1::REASON_DEADLINE_EXCEEDED ||
         reason == v1::REASON_DRAINING;
}

class DownstreamHandler : public StreamHandler {
 public:
  DownstreamHandler(std::shared_ptr<Core> core, std::shared_ptr<Session> session,
                    uint64_t max_message_bytes)
      : core_(std::move(core)), session_(std::move(session)), max_bytes_(max_message_bytes) {}

  void OnConnected() override {
    absl::MutexLock lock(&core_->mu);
    session_->OnDownstreamConnected();
  }

  void OnMessage(absl::string_view bytes) override {
    v1::SeamMessage message;
    const absl::Status status = ParseMessage(bytes, max_bytes_, &message);
    absl::MutexLock lock(&core_->mu);
    if (!status.ok()) {
      session_->EndHere(status);
    } else {
      session_->OnDownstreamMessage(message, bytes.size());
    }
  }

  void OnWritable() override {
    absl::MutexLock lock(&core_->mu);
    session_->OnDownstreamWritable();
  }

  void OnClosed(const absl::Status& status) override {
    absl::MutexLock lock(&core_->mu);
    session_->OnDownstreamClosed(status);
  }

 private:
  const std::shared_ptr<Core> core_;
  const std::shared_ptr<Session> session_;
  const uint64_t max_bytes_;
};

}  // namespace

// A step of a session on its way through the engine.
class SessionTask : public EngineTask {
 public:
  SessionTask(std::shared_ptr<Session> session, WireStep wire, absl::Time arrived, bool is_tail)
      : session_(std::move(session)), wire_(std::move(wire)), arrived_(arrived) {
    step_.session = wire_.session;
    step_.step = wire_.step;
    step_.phase = wire_.phase;
    step_.start_position = wire_.start_position;
    step_.token_ids = wire_.token_ids;
    step_.residual = wire_.residual;
    if (!is_tail) return;
    step_.output_rows = wire_.output_rows;
    step_.sampling = wire_.sampling;
    step_.return_logits = wire_.return_logits;
  }

  const Step& step() const override { return step_; }
  uint64_t session_ordinal() const override { return session_->ordinal(); }

  void Done(StepOutput output) override {
    std::vector<Payload> messages;
    if (output.status.ok()) output.status = session_->EncodeOutput(wire_, &output, &messages);
    absl::MutexLock lock(&session_->core_->mu);
    session_->OnStepDone(wire_, arrived_, std::move(output), std::move(messages));
  }

 private:
  const std::shared_ptr<Session> session_;
  const WireStep wire_;
  const absl::Time arrived_;
  Step step_;
};

Payload ToPayload(const google::protobuf::Message& message) {
  return std::make_shared<const std::string>(message.SerializeAsString());
}

std::string LogId(const SessionKey& key) {
  return absl::BytesToHexString(key.route_session_id.substr(0, 8));
}

// ---- Core ----

void Core::CloseAccepted(const std::shared_ptr<Stream>& stream, const absl::Status& status) {
  stream->Close(status);
  closing.emplace_back(options.now() + options.linger, stream);
}

void Core::CountRefusal(const absl::Status& status) {
  ++counters.refusals[ReasonName(ReasonOf(status))];
}

absl::Status Core::CheckAdmission() const {
  switch (state) {
    case v1::WORKER_STATE_READY:
      break;
    case v1::WORKER_STATE_DRAINING:
      return MakeError(v1::REASON_DRAINING,
                       "this worker is shutting down and takes no new sessions; use another one",
                       kRetryHintMs);
    case v1::WORKER_STATE_FAILED:
      return state_reason;
    default:
      return MakeError(v1::REASON_NOT_READY, "the shard is still loading; ask again", kRetryHintMs);
  }
  if (sessions.size() >= capability().max_sessions + kSessionsInTransit) {
    return MakeError(v1::REASON_QUEUE_FULL,
                     absl::StrCat("expected at most ", kSessionsInTransit,
                                  " sessions to wait for a slot; try again later"),
                     kRetryHintMs);
  }
  return absl::OkStatus();
}

std::shared_ptr<Session> Core::Find(const SessionKey& key) const {
  for (const auto& session : sessions) {
    if (session->key() == key) return session;
  }
  return nullptr;
}

void Core::EndEvicted(const std::vector<SessionKey>& keys, const Session* replaced_by) {
  for (const SessionKey& key : keys) {
    std::shared_ptr<Session> victim;
    for (const auto& session : sessions) {
      if (session->key() == key && session.get() != replaced_by) victim = session;
    }
    if (victim == nullptr) continue;
    const bool newer_epoch =
        replaced_by != nullptr && replaced_by->key().route_session_id == key.route_session_id;
    victim->EndEvicted(
        newer_epoch ? MakeError(v1::REASON_STALE_EPOCH,
                                absl::StrCat("epoch ", key.route_epoch, " was replaced by epoch ",
                                             replaced_by->key().route_epoch))
                    : MakeError(v1::REASON_SESSION_EVICTED,
                                "the session was idle and its slot was given up; open a new one"));
  }
}

absl::Status CheckRoute(const RouteCheck& check, const Capability& capability,
                        const Mixtures& mixtures, absl::Time now) {
  if (check.schema_version != kSchemaVersion) {
    return MakeError(
        v1::REASON_SCHEMA_VERSION_UNSUPPORTED,
        absl::StrCat("expected schema_version ", kSchemaVersion, ", got ", check.schema_version,
                     "; bring the client and all workers of the route to one version"));
  }
  if (check.open->mtp()) return MtpUnsupported();
  if (absl::Status status = ValidateWorkId(check.open->work_id()); !status.ok()) return status;
  const v1::Route& route = check.open->route();
  if (absl::Status status = ValidateRoute(route); !status.ok()) return status;
  if (check.hop_index >= static_cast<uint32_t>(route.hops_size())) {
    return MakeError(
        v1::REASON_ROUTE_INVALID,
        absl::StrCat("expected a hop_index below ", route.hops_size(), ", got ", check.hop_index));
  }
  if (route.artifact_sha256() != capability.artifact_sha256) {
    return MakeError(
        v1::REASON_ARTIFACT_MISMATCH,
        absl::StrCat("expected artifact ", capability.artifact_sha256, ", got ",
                     route.artifact_sha256(),
                     "; route to workers that have loaded one artifact, all by one "
                     "manifest or all without: a manifest makes an artifact of its own"));
  }
  if (route.recipe_fingerprint() != capability.recipe_fingerprint) {
    absl::Status status = mixtures.Check(route.recipe_fingerprint(), capability, check.hop_index,
                                         static_cast<uint32_t>(route.hops_size()), now);
    if (!status.ok()) return status;
  }
  if (route.model_layers() != capability.model_layers) {
    return MakeError(
        v1::REASON_RANGE_MISMATCH,
        absl::StrCat("expected a model of ", capability.model_layers, " layers, got ",
                     route.model_layers(), "; take model_layers from the workers' capability"));
  }
  const v1::LayerRange& range = route.hops(static_cast<int>(check.hop_index)).range();
  if (!SameRange(range, capability.range)) {
    return MakeError(
        v1::REASON_RANGE_MISMATCH,
        absl::StrCat("expected hop ", check.hop_index, " to be [", capability.range.begin, ", ",
                     capability.range.end, "), got ", RangeText(range),
                     "; take each hop's range from its worker's capability"));
  }
  return absl::OkStatus();
}

// ---- Opening ----

Session::Session(std::shared_ptr<Core> core, const v1::OpenSession& open, uint32_t hop_index,
                 const PeerInfo& peer, std::shared_ptr<Stream> upstream)
    : core_(std::move(core)),
      open_(open),
      hop_index_(hop_index),
      route_token_(peer.route_token),
      key_{open.route().route_session_id(), open.route().route_epoch()},
      ordinal_(core_->next_ordinal++),
      range_(open.route().hops(static_cast<int>(hop_index)).range()),
      upstream_(std::move(upstream)),
      opened_at_(core_->options.now()) {
  if (open.deadline_ms() > 0) {
    session_deadline_ = opened_at_ + absl::Milliseconds(open.deadline_ms());
  }
}

void Session::Open(const Limits& negotiated) {
  limits_ = negotiated;
  context_tokens_ = core_->capability().context_tokens;
  core_->sessions.insert(shared_from_this());
  SessionOptions options;
  if (open_.idle_ttl_ms() > 0) options.idle_ttl = absl::Milliseconds(open_.idle_ttl_ms());
  core_->scheduler->Post([self = shared_from_this(), options](ShardEngine& engine) {
    std::vector<SessionKey> evicted;
    const absl::Status status = engine.OpenSession(self->key_, options, &evicted);
    absl::MutexLock lock(&self->core_->mu);
    self->OnEngineOpened(status, evicted);
    // It ended while it waited: nobody else gives the slot back.
    if (self->ended() && status.ok()) engine.Release(self->key_).IgnoreError();
  });
}

void Session::OnEngineOpened(const absl::Status& status, const std::vector<SessionKey>& evicted) {
  core_->EndEvicted(evicted, this);
  if (ended()) return;
  if (!status.ok()) {
    EndHere(status);
    return;
  }
  engine_open_ = true;
  if (is_last()) {
    OnRouteOpen();
  } else {
    DialNext();
  }
}

DialTarget Session::TargetOf(const v1::Hop& hop) const {
  DialTarget target;
  target.endpoint = hop.endpoint();
  target.relay_peer_id = hop.relay_peer_id();
  target.route_token = hop.route_token().empty() ? route_token_ : hop.route_token();
  // The stages end the session by themselves when its time is over, and say why.
  target.deadline = session_deadline_ + kDeadlineMargin;
  target.attribution = {{"work", open_.work_id()},
                        {"session", absl::BytesToHexString(key_.route_session_id)},
                        {"epoch", absl::StrCat(key_.route_epoch)}};
  return target;
}

void Session::DialNext() {
  const uint64_t max_bytes = core_->limits.max_frame_bytes;
  auto handler = std::make_shared<DownstreamHandler>(core_, shared_from_this(), max_bytes);
  const absl::Status status =
      core_->dialer->Dial(Method::kSeam, TargetOf(NextHop()), handler, &downstream_);
  if (!status.ok()) {
    EndHere(status);
    return;
  }
  dialed_at_ = core_->options.now();
  SetPhaseDeadline(core_->options.dial_timeout, "accept the seam", NextHop().range());
  v1::SeamMessage message;
  v1::SeamOpen* seam = message.mutable_open();
  *seam->mutable_session() = open_;
  *seam->mutable_session()->mutable_limits() = ToProto(limits_);
  seam->mutable_session()->set_deadline_ms(RemainingDeadlineMs());
  seam->set_hop_index(hop_index_ + 1);
  SendDownstream(ToPayload(message));
}

void Session::OnDownstreamConnected() {
  if (ended() || downstream_connected_) return;
  downstream_connected_ = true;
  core_->counters.seam_connect.Add(core_->options.now() - dialed_at_);
  if (state_ == State::kOpening) {
    SetPhaseDeadline(core_->options.open_timeout, "agree to the route", NextHop().range());
  }
}

void Session::SetPhaseDeadline(absl::Duration timeout, absl::string_view waiting_for,
                               const v1::LayerRange& stage) {
  phase_deadline_ = core_->options.now() + timeout;
  phase_waiting_for_ = std::string(waiting_for);
  phase_stage_ = stage;
}

void Session::EndUnlessExplained(const absl::Status& status, const v1::LayerRange& stage) {
  if (unexplained_until_ != absl::InfiniteFuture()) return;
  unexplained_until_ = core_->options.now() + core_->options.explain_timeout;
  unexplained_ = status;
  unexplained_stage_ = stage;
}

void Session::ClearPhaseDeadline() { phase_deadline_ = absl::InfiniteFuture(); }

uint32_t Session::RemainingDeadlineMs() const {
  if (session_deadline_ == absl::InfiniteFuture()) return 0;
  const int64_t left = absl::ToInt64Milliseconds(session_deadline_ - core_->options.now());
  return static_cast<uint32_t>(std::max<int64_t>(left, 1));
}

bool Session::accepts_return() const {
  return !ended() && is_last() && hop_index_ > 0 && return_ == nullptr;
}

// ---- Downstream ----

void Session::OnDownstreamMessage(const v1::SeamMessage& message, uint64_t bytes) {
  if (ended() || finishing_) return;
  core_->counters.seam_bytes_received += bytes;
  bytes_received_ += bytes;
  const auto violation = [&](absl::string_view what) {
    End(MakeError(v1::REASON_LIFECYCLE_VIOLATION,
                  absl::StrCat("expected ", what, " from the next stage, got another message")),
        NextHop().range());
  };
  switch (message.body_case()) {
    case v1::SeamMessage::kOpened: {
      if (state_ != State::kOpening || downstream_opened_) {
        return violation("one answer to the opening");
      }
      const auto limits = NegotiateLimits(message.opened().limits(), limits_);
      if (!limits.ok()) return End(limits.status(), NextHop().range());
      downstream_opened_ = true;
      limits_ = *limits;
      downstream_limits_ = *limits;
      context_tokens_ = std::min(context_tokens_, message.opened().context_tokens());
      credits_ = limits_.max_inflight_steps;
      ClearPhaseDeadline();
      OnRouteOpen();
      return;
    }
    case v1::SeamMessage::kCredit: {
      const uint32_t steps = message.credit().steps();
      if (state_ == State::kOpening) return violation("an answer to the opening");
      if (steps == 0 || steps > limits_.max_inflight_steps - credits_) {
        return End(
            MakeError(v1::REASON_FLOW_CONTROL_VIOLATION,
                      absl::StrCat("expected at most ", limits_.max_inflight_steps - credits_,
                                   " credits back, got ", steps)),
            NextHop().range());
      }
      credits_ += steps;
      Pump();
      return;
    }
    case v1::SeamMessage::kClosed: {
      if (state_ != State::kClosing) return violation("no end before it was asked for");
      if (message.closed().receipts_size() !=
          open_.route().hops_size() - static_cast<int>(hop_index_) - 1) {
        return violation("one receipt a stage");
      }
      Finish({message.closed().receipts().begin(), message.closed().receipts().end()});
      return;
    }
    case v1::SeamMessage::kError: {
      v1::LayerRange stage;
      stage.set_begin(message.error().stage_begin());
      stage.set_end(message.error().stage_end());
      if (stage.end() == 0) stage = NextHop().range();
      End(FromProto(message.error()), stage);
      return;
    }
    default:
      return violation("an answer");
  }
}

void Session::OnDownstreamClosed(const absl::Status& status) {
  if (ended() || finishing_) return;
  const v1::Reason reason = ReasonOf(status);
  // A peer's own refusal keeps its reason; a broken line or a strange server is one thing.
  const bool refusal = !status.ok() && reason != v1::REASON_PEER_LOST &&
                       reason != v1::REASON_CANCELLED && reason != v1::REASON_ENGINE_FAILURE;
  if (refusal) return End(status, NextHop().range());
  const bool opening = state_ == State::kOpening;
  End(MakeError(opening ? v1::REASON_PEER_UNREACHABLE : v1::REASON_PEER_LOST,
                absl::StrCat("the stage for layers ", RangeText(NextHop().range()),
                             opening ? " could not be reached: " : " went away: ",
                             status.ok() ? "the seam was closed" : status.message())),
      NextHop().range());
}

void Session::OnDownstreamWritable() {
  if (ended()) return;
  FlushCancel();
  Pump();
}

void Session::OnUpstreamWritable() {
  if (ended()) return;
  Pump();
}

void Session::SendUpstream(const google::protobuf::Message& message) {
  if (upstream_ != nullptr) upstream_->Send(ToPayload(message));
}

void Session::SendDownstream(Payload payload) {
  core_->counters.seam_bytes_sent += payload->size();
  bytes_sent_ += payload->size();
  downstream_->Send(std::move(payload));
}

// ---- Steps ----

void Session::Pump() {
  while ((state_ == State::kOpen) && !running_) {
    if (queue_.empty()) Refill();
    if (queue_.empty()) break;
    const bool seam_ready = downstream_ == nullptr || (credits_ > 0 && !unsent_cancel_.has_value());
    if (!seam_ready || !OutputWritable()) return;
    const std::unique_ptr<QueuedStep> next = std::move(queue_.front());
    queue_.pop_front();
    if (downstream_ != nullptr) --credits_;
    OnTakenOff();
    if (next->replay) {
      Replay(*next);
      continue;
    }
    running_ = true;
    core_->scheduler->Submit(std::make_shared<SessionTask>(
        shared_from_this(), std::move(next->wire), next->arrived, downstream_ == nullptr));
  }
  const bool idle = queue_.empty() && !running_ && !ExpectsWork();
  if (state_ == State::kOpen && draining_input_ && idle) BeginClose();
}

absl::Status Session::EncodeOutput(const WireStep& wire, StepOutput* output,
                                   std::vector<Payload>* messages) const {
  const Capability& capability = core_->capability();
  const auto invalid = [](absl::string_view what) {
    return MakeError(v1::REASON_ENGINE_OUTPUT_INVALID,
                     absl::StrCat("expected ", what, " from the engine; nothing was sent on"));
  };
  if (is_last()) {
    if (wire.output_rows == OutputRows::kLast) {
      if (!output->token.has_value() || output->token->token_id < 0 ||
          static_cast<uint32_t>(output->token->token_id) >= capability.vocabulary_size) {
        return invalid("a token of the vocabulary");
      }
      if (wire.return_logits && output->logits.size() != capability.vocabulary_size) {
        return invalid("one logit per token of the vocabulary");
      }
    }
    return absl::OkStatus();
  }
  WireStep next;
  next.work_id = wire.work_id;
  next.session = wire.session;
  next.step = wire.step;
  next.phase = wire.phase;
  next.applied = {0, capability.range.end};
  next.start_position = wire.start_position;
  next.token_ids = wire.token_ids;
  next.residual = std::move(output->residual);
  next.output_rows = wire.output_rows;
  next.sampling = wire.sampling;
  next.return_logits = wire.return_logits;
  std::vector<v1::Frame> frames;
  const absl::Status status =
      EncodeStep(next, *capability.boundary_out, downstream_limits_, &frames);
  if (!status.ok()) return invalid(absl::StrCat("a valid boundary (", status.message(), ")"));
  messages->reserve(frames.size());
  for (v1::Frame& frame : frames) {
    v1::SeamMessage message;
    *message.mutable_frame() = std::move(frame);
    messages->push_back(ToPayload(message));
  }
  return absl::OkStatus();
}

void Session::OnStepDone(const WireStep& wire, absl::Time arrived, StepOutput output,
                         std::vector<Payload> messages) {
  running_ = false;
  if (ended()) return;
  engine_time_ += output.engine_time;
  if (!output.status.ok()) return EndHere(output.status);
  const bool decode = wire.phase == Phase::kDecode;
  (decode ? decode_tokens_ : prefill_tokens_) += wire.token_ids.size();
  Counters& counters = core_->counters;
  (decode ? counters.decode_stay : counters.prefill_stay).Add(core_->options.now() - arrived);
  if (wire.step <= cancelled_through_) {
    if (downstream_ != nullptr) ++credits_;
  } else if (downstream_ != nullptr) {
    recorded_step_ = wire.step;
    for (const Payload& message : messages) SendDownstream(message);
    OnSentOn(wire);
    if (hop_index_ > 0) recorded_frames_ = std::move(messages);
  } else {
    OnTailOutput(wire, std::move(output));
  }
  if (!ended()) Pump();
}

void Session::CancelSteps(uint64_t through_step) {
  if (through_step <= cancelled_through_) return;
  cancelled_through_ = through_step;
  while (!queue_.empty() && queue_.front()->wire.step <= through_step) {
    queue_.pop_front();
    OnTakenOff();
  }
  if (downstream_ != nullptr) {
    unsent_cancel_ = through_step;
    FlushCancel();
  }
}

void Session::FlushCancel() {
  if (!unsent_cancel_.has_value() || downstream_ == nullptr || !downstream_->writable()) return;
  v1::SeamMessage message;
  message.mutable_cancel()->set_through_step(*unsent_cancel_);
  unsent_cancel_.reset();
  SendDownstream(ToPayload(message));
}

uint64_t Session::queued_bytes() const {
  uint64_t bytes = 0;
  for (const auto& step : queue_) {
    bytes +=
        step->wire.residual.size() * sizeof(float) + step->wire.token_ids.size() * sizeof(int32_t);
  }
  return bytes;
}

// ---- Ends ----

v1::StageReceipt Session::Receipt() const {
  v1::StageReceipt receipt;
  *receipt.mutable_range() = range_;
  receipt.set_prefill_tokens(prefill_tokens_);
  receipt.set_decode_tokens(decode_tokens_);
  receipt.set_engine_us(static_cast<uint64_t>(absl::ToInt64Microseconds(engine_time_)));
  receipt.set_bytes_received(bytes_received_);
  receipt.set_bytes_sent(bytes_sent_);
  return receipt;
}

void Session::BeginClose() {
  if (state_ != State::kOpen) return;
  state_ = State::kClosing;
  if (downstream_ == nullptr) return Finish({});
  SetPhaseDeadline(core_->options.close_timeout, "hand in its receipt", NextHop().range());
  downstream_->HalfClose();
}

void Session::Finish(std::vector<v1::StageReceipt> later) {
  finishing_ = true;
  ClearPhaseDeadline();
  later.insert(later.begin(), Receipt());
  // The slot is free before anybody hears that the session has ended.
  core_->scheduler->Post([self = shared_from_this(), later](ShardEngine& engine) {
    {
      absl::MutexLock lock(&self->core_->mu);
      if (self->ended()) return;
      self->engine_open_ = false;
    }
    engine.Release(self->key_).IgnoreError();
    absl::MutexLock lock(&self->core_->mu);
    if (self->ended()) return;
    self->SendClosed(later);
    self->core_->CloseAccepted(self->upstream_, absl::OkStatus());
    self->CloseReturn(absl::OkStatus(), self->range_);
    self->Detach(absl::OkStatus());
  });
}

void Session::EndHere(const absl::Status& status) { End(status, range_); }

void Session::EndEvicted(const absl::Status& status) {
  engine_open_ = false;
  EndHere(status);
}

void Session::End(const absl::Status& status, const v1::LayerRange& stage) {
  if (ended()) return;
  core_->CountRefusal(status);
  if (upstream_ != nullptr) {
    upstream_->Send(ErrorMessage(status, stage));
    core_->CloseAccepted(upstream_, status);
  }
  if (downstream_ != nullptr) downstream_->Close(status);
  CloseReturn(status, stage);
  Detach(status);
}

void Session::CloseReturn(const absl::Status& status, const v1::LayerRange&) {
  if (return_ != nullptr) return_->Close(status);
}

void Session::Detach(const absl::Status& status) {
  const std::shared_ptr<Session> self = shared_from_this();
  state_ = State::kEnded;
  core_->scheduler->Drop(ordinal_);
  if (engine_open_) {
    engine_open_ = false;
    core_->engine->Cancel(key_);
    core_->scheduler->Post(
        [key = key_](ShardEngine& engine) { engine.Release(key).IgnoreError(); });
  }
  queue_.clear();
  recorded_frames_.clear();
  upstream_.reset();
  downstream_.reset();
  return_.reset();
  core_->sessions.erase(self);
  core_->authorizer->OnSessionEnded(key_);

  const v1::Reason reason = ReasonOf(status);
  Counters& counters = core_->counters;
  absl::string_view outcome;
  if (status.ok()) {
    outcome = "completed";
    ++counters.sessions_completed;
  } else if (IsCancellation(reason)) {
    outcome = "cancelled";
    ++counters.sessions_cancelled;
  } else if (reason == v1::REASON_SESSION_EVICTED) {
    outcome = "evicted";
    ++counters.sessions_evicted;
  } else {
    outcome = "failed";
    ++counters.sessions_failed;
  }
  JsonFields fields = {
      {"session", LogId(key_)},
      {"epoch", key_.route_epoch},
      {"work_id", open_.work_id()},
      {"outcome", outcome},
      {"prefill_tokens", prefill_tokens_},
      {"decode_tokens", decode_tokens_},
      {"engine_us", absl::ToInt64Microseconds(engine_time_)},
      {"bytes_received", bytes_received_},
      {"bytes_sent", bytes_sent_},
      {"duration_ms", absl::ToInt64Milliseconds(core_->options.now() - opened_at_)},
  };
  if (!status.ok()) {
    fields.push_back({"reason", ReasonName(reason)});
    fields.push_back({"message", status.message()});
  }
  core_->logger->Log(status.ok() || IsCancellation(reason) ? Severity::kInfo : Severity::kWarning,
                     "session_end", std::move(fields));
}

void Session::ReleaseByKey() {
  EndHere(MakeError(v1::REASON_CANCELLED, "the session was released by key"));
}

void Session::OnDrain(bool expired) {
  if (!expired) return;
  EndHere(MakeError(v1::REASON_DRAINING,
                    "this worker is shutting down; open the session at another one", kRetryHintMs));
}

void Session::OnTick(absl::Time now) {
  if (ended()) return;
  if (now >= session_deadline_) {
    EndHere(MakeError(
        v1::REASON_DEADLINE_EXCEEDED,
        absl::StrCat("the session's deadline of ", open_.deadline_ms(), " ms has passed")));
  } else if (now >= unexplained_until_) {
    End(unexplained_, unexplained_stage_);
  } else if (now >= phase_deadline_) {
    End(MakeError(state_ == State::kOpening ? v1::REASON_PEER_UNREACHABLE : v1::REASON_PEER_LOST,
                  absl::StrCat("the stage for layers ", RangeText(phase_stage_), " did not ",
                               phase_waiting_for_, " in time")),
        phase_stage_);
  }
}

}  // namespace meshnet::worker
