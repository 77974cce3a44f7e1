#include "cc/worker/head_session.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cc/common/status.h"

namespace meshnet::worker {
namespace {

// What an event needs beside its logits.
constexpr uint64_t kEventBytes = 64 << 10;

class ReturnHandler : public StreamHandler {
 public:
  ReturnHandler(std::shared_ptr<Core> core, std::shared_ptr<HeadSession> session,
                uint64_t max_message_bytes)
      : core_(std::move(core)), session_(std::move(session)), max_bytes_(max_message_bytes) {}

  void OnConnected() override {
    absl::MutexLock lock(&core_->mu);
    session_->OnReturnConnected();
  }

  void OnMessage(absl::string_view bytes) override {
    v1::ReturnEvent event;
    const absl::Status status = ParseMessage(bytes, max_bytes_, &event);
    absl::MutexLock lock(&core_->mu);
    if (!status.ok()) {
      session_->EndHere(status);
    } else {
      session_->OnReturnEvent(event, bytes.size());
    }
  }

  void OnClosed(const absl::Status& status) override {
    absl::MutexLock lock(&core_->mu);
    session_->OnReturnClosed(status);
  }

 private:
  const std::shared_ptr<Core> core_;
  const std::shared_ptr<HeadSession> session_;
  const uint64_t max_bytes_;
};

}  // namespace

HeadSession::HeadSession(std::shared_ptr<Core> core, const v1::OpenSession& open,
                         const PeerInfo& peer, std::shared_ptr<Stream> upstream)
    : Session(std::move(core), open, 0, peer, std::move(upstream)) {}

// ---- Opening ----

void HeadSession::OnRouteOpen() {
  if (is_last()) return Opened();
  const uint64_t max_bytes =
      uint64_t{core_->capability().vocabulary_size} * sizeof(float) + kEventBytes;
  auto self = std::static_pointer_cast<HeadSession>(shared_from_this());
  auto handler = std::make_shared<ReturnHandler>(core_, std::move(self), max_bytes);
  const absl::Status status =
      core_->dialer->Dial(Method::kReturn, TargetOf(LastHop()), handler, &return_);
  if (!status.ok()) return EndHere(status);
  SetPhaseDeadline(core_->options.dial_timeout, "accept the return stream", LastHop().range());
  v1::ReturnRequest request;
  request.mutable_attach()->set_schema_version(kSchemaVersion);
  request.mutable_attach()->set_route_session_id(key_.route_session_id);
  request.mutable_attach()->set_route_epoch(key_.route_epoch);
  return_->Send(ToPayload(request));
}

void HeadSession::OnReturnConnected() {
  if (ended() || state_ != State::kOpening) return;
  SetPhaseDeadline(core_->options.open_timeout, "attach the return stream", LastHop().range());
}

void HeadSession::Opened() {
  ClearPhaseDeadline();
  state_ = State::kOpen;
  ++core_->counters.sessions_opened;
  core_->logger->Log(Severity::kInfo, "session_open",
                     {{"session", LogId(key_)},
                      {"epoch", key_.route_epoch},
                      {"work_id", open_.work_id()},
                      {"stages", open_.route().hops_size()}});
  v1::SessionEvent event;
  v1::SessionOpened* opened = event.mutable_opened();
  *opened->mutable_limits() = ToProto(limits_);
  opened->set_context_tokens(context_tokens_);
  opened->set_prefill_chunk_tokens(limits_.max_step_tokens);
  SendUpstream(event);
  // The client may have half-closed already.
  Pump();
}

// ---- Client ----

void HeadSession::OnRequest(const v1::SessionRequest& request, const absl::Status& grammar) {
  if (ended()) return;
  // It was released by key while this was on its way.
  if (state_ == State::kClosing || draining_input_) return;
  switch (request.body_case()) {
    case v1::SessionRequest::kGenerate:
      if (state_ != State::kOpen) break;
      return OnGenerate(request.generate(), grammar);
    case v1::SessionRequest::kCancel:
      if (state_ != State::kOpen) break;
      // One that has finished already is no fault: the two crossed on their way.
      if (generation_.has_value() && generation_->number == request.cancel().generation()) {
        StopGeneration();
      }
      return;
    default:
      break;
  }
  EndHere(MakeError(
      v1::REASON_LIFECYCLE_VIOLATION,
      "expected generate or cancel on an open session: `open` comes once and first, generate "
      "after `opened`"));
}

absl::Status HeadSession::CheckRollback(uint32_t position) const {
  const std::optional<uint32_t>& rollback = core_->capability().rollback_tokens;
  if (!rollback.has_value() || position == 0 || uint64_t{position} + *rollback >= written_) {
    return absl::OkStatus();
  }
  return MakeError(
      v1::REASON_CACHE_MISS,
      absl::StrCat("the session wrote up to position ", written_, " and can go back by at most ",
                   *rollback, " tokens, not to ", position, "; generate from start_position 0"));
}

absl::Status HeadSession::CheckGenerate(const v1::Generate& request,
                                        SamplingParams* sampling) const {
  const uint32_t vocabulary_size = core_->capability().vocabulary_size;
  if (request.generation() <= last_generation_) {
    return MakeError(v1::REASON_FIELD_OUT_OF_BOUNDS,
                     absl::StrCat("expected a generation number above ", last_generation_, ", got ",
                                  request.generation()));
  }
  if (generation_.has_value()) {
    return MakeError(v1::REASON_LIFECYCLE_VIOLATION,
                     absl::StrCat("generation ", generation_->number,
                                  " is running; wait for its end or cancel it"));
  }
  if (request.token_ids().empty()) {
    return MakeError(v1::REASON_FIELD_OUT_OF_BOUNDS, "expected at least one token id, got none");
  }
  for (const auto& ids : {request.token_ids(), request.stop_token_ids()}) {
    for (const int32_t id : ids) {
      if (id < 0 || static_cast<uint32_t>(id) >= vocabulary_size) {
        return MakeError(
            v1::REASON_TOKEN_OUT_OF_RANGE,
            absl::StrCat("expected token ids in [0, ", vocabulary_size, "), got ", id));
      }
    }
  }
  if (request.start_position() > cached_) {
    return MakeError(
        v1::REASON_CACHE_MISS,
        absl::StrCat("expected start_position <= ", cached_,
                     ", the tokens that this session holds, got ", request.start_position()));
  }
  if (absl::Status status = CheckRollback(request.start_position()); !status.ok()) return status;
  if (request.max_tokens() == 0) {
    return MakeError(v1::REASON_FIELD_OUT_OF_BOUNDS, "expected max_tokens >= 1, got 0");
  }
  const uint64_t total = uint64_t{request.start_position()} +
                         static_cast<uint64_t>(request.token_ids_size()) + request.max_tokens();
  if (total > context_tokens_) {
    return MakeError(v1::REASON_CONTEXT_EXCEEDED,
                     absl::StrCat("expected start_position + prompt + max_tokens <= ",
                                  context_tokens_, ", got ", total));
  }
  const auto parsed = FromProto(request.sampling(), vocabulary_size);
  if (!parsed.ok()) return parsed.status();
  *sampling = *parsed;
  return absl::OkStatus();
}

void HeadSession::OnGenerate(const v1::Generate& request, const absl::Status& grammar) {
  if (request.generation() == 0) {
    return EndHere(MakeError(v1::REASON_FIELD_OUT_OF_BOUNDS,
                             "expected a generation number of at least 1, got 0"));
  }
  SamplingParams sampling;
  absl::Status status = CheckGenerate(request, &sampling);
  status.Update(grammar);
  if (status.ok() && core_->state != v1::WORKER_STATE_READY) status = core_->CheckAdmission();
  if (!status.ok()) return RefuseGeneration(request.generation(), status);
  last_generation_ = request.generation();
  cached_ = request.start_position();
  Generation& generation = generation_.emplace();
  generation.number = request.generation();
  generation.prompt.assign(request.token_ids().begin(), request.token_ids().end());
  generation.start_position = request.start_position();
  generation.sampling = std::move(sampling);
  generation.max_tokens = request.max_tokens();
  generation.stop.insert(request.stop_token_ids().begin(), request.stop_token_ids().end());
  generation.ignore_end_of_generation = request.ignore_end_of_generation();
  generation.return_logits = request.return_logits();
  generation.started = core_->options.now();
  Pump();
}

void HeadSession::RefuseGeneration(uint64_t number, const absl::Status& status) {
  core_->CountRefusal(status);
  v1::SessionEvent event;
  event.mutable_error()->set_generation(number);
  *event.mutable_error()->mutable_error() = ToProto(status, range_.begin(), range_.end());
  SendUpstream(event);
}

void HeadSession::OnUpstreamHalfClosed() {
  if (ended()) return;
  draining_input_ = true;
  Pump();
}

void HeadSession::OnUpstreamClosed() {
  if (ended()) return;
  EndHere(MakeError(v1::REASON_CANCELLED, "the client went away"));
}

// ---- Steps ----

void HeadSession::Refill() {
  // Until the running generation has its results, the session is not at its end.
  if (!generation_.has_value()) return;
  Generation& generation = *generation_;
  auto step = std::make_unique<QueuedStep>();
  step->arrived = core_->options.now();
  WireStep& wire = step->wire;
  const size_t left = generation.prompt.size() - generation.taken;
  if (left > 0) {
    const size_t rows = std::min<size_t>(left, limits_.max_step_tokens);
    const auto first = generation.prompt.begin() + static_cast<std::ptrdiff_t>(generation.taken);
    wire.phase = Phase::kPrefill;
    wire.start_position = generation.start_position + static_cast<uint32_t>(generation.taken);
    wire.token_ids.assign(first, first + static_cast<std::ptrdiff_t>(rows));
    generation.taken += rows;
    if (rows == left) {
      wire.output_rows = OutputRows::kLast;
      wire.sampling = generation.sampling;
      wire.return_logits = generation.return_logits;
    }
  } else if (generation.next_token.has_value()) {
    wire.phase = Phase::kDecode;
    wire.start_position = generation.prompt_end() + generation.produced - 1;
    wire.token_ids = {*generation.next_token};
    wire.output_rows = OutputRows::kLast;
    wire.return_logits = generation.return_logits;
    generation.next_token.reset();
  } else {
    return;
  }
  wire.work_id = open_.work_id();
  wire.session = key_;
  wire.step = ++last_step_;
  outstanding_.push_back({wire.step, wire.start_position,
                          wire.start_position + static_cast<uint32_t>(wire.token_ids.size()),
                          wire.phase == Phase::kPrefill, wire.output_rows == OutputRows::kLast});
  queue_.push_back(std::move(step));
}

void HeadSession::OnSentOn(const WireStep& wire) {
  if (wire.phase == Phase::kDecode) decode_sent_ = {wire.step, core_->options.now()};
}

bool HeadSession::OutputWritable() const { return upstream_->writable(); }

void HeadSession::OnTailOutput(const WireStep& wire, StepOutput output) {
  std::string logits;
  if (wire.return_logits) {
    logits.assign(reinterpret_cast<const char*>(output.logits.data()),
                  output.logits.size() * sizeof(float));
  }
  OnResult(wire.step, output.cached_tokens, output.token, std::move(logits));
}

void HeadSession::OnReturnEvent(const v1::ReturnEvent& event, uint64_t bytes) {
  if (ended()) return;
  bytes_received_ += bytes;
  const uint32_t vocabulary_size = core_->capability().vocabulary_size;
  switch (event.body_case()) {
    case v1::ReturnEvent::kAttached:
      if (state_ != State::kOpening) break;
      return Opened();
    case v1::ReturnEvent::kResult: {
      if (state_ == State::kOpening) break;
      const v1::StepResult& result = event.result();
      if (result.has_mtp()) {
        return End(MakeError(v1::REASON_RESERVED_FIELD_SET,
                             "expected mtp to be absent from a result; multi-token prediction "
                             "belongs to a later version"),
                   LastHop().range());
      }
      std::optional<SampledToken> token;
      if (result.tokens_size() == 1) {
        const auto parsed = FromProto(result.tokens(0), vocabulary_size);
        if (!parsed.ok()) return End(parsed.status(), LastHop().range());
        token = *parsed;
      }
      if (result.tokens_size() > 1 ||
          (!result.logits().empty() &&
           result.logits().size() != uint64_t{vocabulary_size} * sizeof(float))) {
        return End(MakeError(v1::REASON_SIZE_MISMATCH,
                             "expected at most one token and all logits or none in a result"),
                   LastHop().range());
      }
      return OnResult(result.step(), result.cache().cached_tokens(), token, result.logits());
    }
    case v1::ReturnEvent::kError: {
      v1::LayerRange stage;
      stage.set_begin(event.error().stage_begin());
      stage.set_end(event.error().stage_end());
      if (stage.end() == 0) stage = LastHop().range();
      const absl::Status error = FromProto(event.error());
      // The tail only saw its seam break. The stage before the break knows more, if it is alive.
      if (ReasonOf(error) == v1::REASON_PEER_LOST) return EndUnlessExplained(error, stage);
      return End(error, stage);
    }
    default:
      break;
  }
  End(MakeError(v1::REASON_LIFECYCLE_VIOLATION,
                "expected `attached` and then results on the return stream"),
      LastHop().range());
}

void HeadSession::OnReturnClosed(const absl::Status& status) {
  // In good order the tail closes it first.
  if (ended() || finishing_ || (state_ == State::kClosing && status.ok())) return;
  const v1::Reason reason = ReasonOf(status);
  const bool refusal = !status.ok() && reason != v1::REASON_PEER_LOST &&
                       reason != v1::REASON_CANCELLED && reason != v1::REASON_ENGINE_FAILURE;
  if (refusal) return End(status, LastHop().range());
  const bool opening = state_ == State::kOpening;
  EndUnlessExplained(MakeError(opening ? v1::REASON_PEER_UNREACHABLE : v1::REASON_PEER_LOST,
                               absl::StrCat("the return stream of the last stage broke: ",
                                            status.ok() ? "it was closed" : status.message())),
                     LastHop().range());
}

void HeadSession::OnResult(uint64_t step, uint32_t cached_tokens,
                           const std::optional<SampledToken>& token, std::string logits) {
  // Late for a cancelled step, or a repeat.
  if (step <= cancelled_through_) return;
  if (outstanding_.empty() || outstanding_.front().step != step) {
    if (step < (outstanding_.empty() ? last_step_ + 1 : outstanding_.front().step)) return;
    return End(MakeError(v1::REASON_STEP_OUT_OF_ORDER,
                         absl::StrCat("expected the result of step ",
                                      outstanding_.empty() ? 0 : outstanding_.front().step,
                                      ", got that of step ", step)),
               LastHop().range());
  }
  const Outstanding done = outstanding_.front();
  outstanding_.pop_front();
  if (decode_sent_.first == step) {
    core_->counters.decode_round_trip.Add(core_->options.now() - decode_sent_.second);
  }
  if (cached_tokens != done.end_position || token.has_value() != done.sampled ||
      logits.empty() == (done.sampled && generation_->return_logits)) {
    return End(
        MakeError(v1::REASON_ENGINE_OUTPUT_INVALID,
                  absl::StrCat("expected ", done.end_position, " cached tokens, ",
                               done.sampled ? "a token" : "no token",
                               done.sampled && generation_->return_logits ? " and its logits" : "",
                               " as the result of step ", step, ", got ", cached_tokens,
                               " cached tokens and ", token.has_value() ? "a" : "no", " token")),
        LastHop().range());
  }
  cached_ = done.end_position;
  // A step from 0 has come through all stages: none holds anything older.
  written_ = done.start_position == 0 ? done.end_position : std::max(written_, done.end_position);
  if (done.prefill) {
    v1::SessionEvent event;
    event.mutable_prefill()->set_generation(generation_->number);
    event.mutable_prefill()->set_tokens_done(done.end_position - generation_->start_position);
    event.mutable_prefill()->set_tokens_total(static_cast<uint32_t>(generation_->prompt.size()));
    SendUpstream(event);
  }
  if (token.has_value()) OnToken(*token, std::move(logits));
}

void HeadSession::OnToken(const SampledToken& token, std::string logits) {
  Generation& generation = *generation_;
  if (generation.produced == 0) generation.first_token = core_->options.now();
  ++generation.produced;
  const bool stop = generation.stop.count(token.token_id) > 0 ||
                    (token.end_of_generation && !generation.ignore_end_of_generation);
  const bool length = generation.produced == generation.max_tokens;
  v1::SessionEvent event;
  v1::TokenEvent* body = event.mutable_token();
  body->set_generation(generation.number);
  *body->mutable_token() = ToProto(token);
  body->set_position(generation.prompt_end() + generation.produced - 1);
  body->set_logits(std::move(logits));
  if (!stop && !length) {
    // The next step first: the client can wait, the pipeline should not.
    generation.next_token = token.token_id;
    Pump();
  }
  const auto piece = core_->engine->tokenizer().Piece(token.token_id);
  if (piece.ok()) body->set_piece(*piece);
  SendUpstream(event);
  if (stop) {
    FinishGeneration(v1::FINISH_REASON_STOP);
  } else if (length) {
    FinishGeneration(v1::FINISH_REASON_LENGTH);
  }
}

void HeadSession::FinishGeneration(v1::FinishReason reason) {
  const absl::Time now = core_->options.now();
  const Generation& generation = *generation_;
  v1::SessionEvent event;
  v1::GenerationFinished* body = event.mutable_finished();
  body->set_generation(generation.number);
  body->set_reason(reason);
  body->set_prompt_tokens(static_cast<uint32_t>(generation.prompt.size()));
  body->set_completion_tokens(generation.produced);
  body->set_cached_tokens(cached_);
  const absl::Time first = generation.produced > 0 ? generation.first_token : now;
  body->set_prefill_us(
      static_cast<uint64_t>(absl::ToInt64Microseconds(first - generation.started)));
  body->set_decode_us(static_cast<uint64_t>(absl::ToInt64Microseconds(now - first)));
  generation_.reset();
  SendUpstream(event);
  if (drain_after_generation_) return Session::OnDrain(true);
  Pump();
}

void HeadSession::StopGeneration() {
  // What is neither done nor still in the queue has been computed here, and perhaps further on.
  for (size_t i = 0; i + queue_.size() < outstanding_.size(); ++i) {
    written_ = std::max(written_, outstanding_[i].end_position);
  }
  // Steps that were never sent are cancelled with the rest, so that the numbers stay in one row.
  CancelSteps(last_step_);
  outstanding_.clear();
  // Stages have come to different positions. All of them can go on from here, or from 0.
  if (!CheckRollback(cached_).ok()) cached_ = 0;
  FinishGeneration(v1::FINISH_REASON_CANCELLED);
}

// ---- Ends ----

void HeadSession::ReleaseByKey() {
  if (state_ != State::kOpen) return Session::ReleaseByKey();
  draining_input_ = true;
  if (generation_.has_value()) {
    StopGeneration();
  } else {
    Pump();
  }
}

void HeadSession::OnDrain(bool expired) {
  if (!expired && generation_.has_value()) {
    drain_after_generation_ = true;
    return;
  }
  Session::OnDrain(true);
}

void HeadSession::SendClosed(const std::vector<v1::StageReceipt>& receipts) {
  v1::SessionEvent event;
  for (const v1::StageReceipt& receipt : receipts)
    *event.mutable_closed()->add_receipts() = receipt;
  SendUpstream(event);
}

Payload HeadSession::ErrorMessage(const absl::Status& status, const v1::LayerRange& stage) {
  v1::SessionEvent event;
  *event.mutable_error()->mutable_error() = ToProto(status, stage.begin(), stage.end());
  return ToPayload(event);
}

}  // namespace meshnet::worker
