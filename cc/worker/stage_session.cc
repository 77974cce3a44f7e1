#include "cc/worker/stage_session.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cc/common/checksum.h"
#include "cc/common/status.h"

namespace meshnet::worker {
namespace {

template <typename T>
absl::string_view BytesOf(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

}  // namespace

std::string StepDigest(const WireStep& step) {
  std::string sampling;
  if (step.sampling.has_value()) sampling = ToProto(*step.sampling).SerializeAsString();
  return absl::StrCat(static_cast<int>(step.phase), ",", step.start_position, ",",
                      static_cast<int>(step.output_rows), ",", step.return_logits, ",",
                      step.token_ids.size(), ",", Checksum(BytesOf(step.token_ids)), ",",
                      Checksum(BytesOf(step.residual)), ",", step.sampling.has_value(), ",",
                      sampling);
}

StageSession::StageSession(std::shared_ptr<Core> core, const v1::SeamOpen& open,
                           const PeerInfo& peer, std::shared_ptr<Stream> upstream)
    : Session(std::move(core), open.session(), open.hop_index(), peer, std::move(upstream)) {}

v1::LayerRange StageSession::PreviousRange() const {
  return open_.route().hops(static_cast<int>(hop_index_) - 1).range();
}

void StageSession::OnRouteOpen() {
  const Capability& capability = core_->capability();
  FrameExpectation expectation;
  expectation.work_id = open_.work_id();
  expectation.session = key_;
  expectation.schema = *capability.boundary_in;
  expectation.applied = {0, capability.range.begin};
  expectation.vocabulary_size = capability.vocabulary_size;
  expectation.context_tokens = context_tokens_;
  expectation.limits = limits_;
  assembler_ = std::make_shared<FrameAssembler>(std::move(expectation));
  window_ = limits_.max_inflight_steps;
  state_ = State::kOpen;
  ++core_->counters.sessions_opened;
  v1::SeamMessage message;
  *message.mutable_opened()->mutable_limits() = ToProto(limits_);
  message.mutable_opened()->set_context_tokens(context_tokens_);
  SendSeam(message);
  Pump();
}

void StageSession::CountReceived(uint64_t bytes) {
  core_->counters.seam_bytes_received += bytes;
  bytes_received_ += bytes;
}

// ---- Upstream ----

void StageSession::OnStep(WireStep step, std::string digest) {
  if (ended()) return;
  if (state_ != State::kOpen || draining_input_) {
    return EndHere(MakeError(v1::REASON_LIFECYCLE_VIOLATION,
                             "expected no step after the end of the seam was announced"));
  }
  if (is_last() && return_ == nullptr) {
    return EndHere(MakeError(v1::REASON_LIFECYCLE_VIOLATION,
                             "expected the head to attach its return stream before the first "
                             "step"));
  }
  if (window_ == 0) {
    return EndHere(MakeError(v1::REASON_FLOW_CONTROL_VIOLATION,
                             absl::StrCat("expected at most ", limits_.max_inflight_steps,
                                          " steps without a credit; wait for one")));
  }
  auto queued = std::make_unique<QueuedStep>();
  if (step.step == last_step_ + 1) {
    last_step_ = step.step;
    last_digest_ = digest;
  } else if (step.step == last_step_ && !last_digest_.empty()) {
    if (digest != last_digest_) {
      return EndHere(MakeError(v1::REASON_STEP_CONFLICT,
                               absl::StrCat("step ", step.step,
                                            " came again with other content; a step's content "
                                            "never changes")));
    }
    queued->replay = true;
    // Only the number is needed from here on.
    step.residual = {};
    step.token_ids = {};
  } else {
    return EndHere(MakeError(v1::REASON_STEP_OUT_OF_ORDER,
                             absl::StrCat("expected step ", last_step_ + 1, " or a repeat of ",
                                          last_step_, ", got ", step.step)));
  }
  --window_;
  queued->wire = std::move(step);
  queued->arrived = core_->options.now();
  queue_.push_back(std::move(queued));
  Pump();
}

void StageSession::OnCancelSteps(uint64_t through_step) {
  if (ended()) return;
  if (state_ != State::kOpen) {
    return EndHere(MakeError(v1::REASON_LIFECYCLE_VIOLATION,
                             "expected steps to be cancelled on an open seam only"));
  }
  if (through_step > last_step_) {
    last_step_ = through_step;
    last_digest_.clear();
  }
  CancelSteps(through_step);
  Pump();
}

void StageSession::OnUpstreamHalfClosed() {
  if (ended()) return;
  if (state_ == State::kOpening) {
    return EndHere(MakeError(v1::REASON_CANCELLED, "the seam was closed before it was open"));
  }
  if (const absl::Status status = assembler_->Finish(); !status.ok()) return EndHere(status);
  draining_input_ = true;
  Pump();
}

void StageSession::OnUpstreamClosed() {
  if (ended()) return;
  const absl::Status gone =
      MakeError(v1::REASON_PEER_LOST, "the stage before this one ended the seam or went away");
  // If that stage died, this is how the head learns which one it was.
  if (return_ != nullptr) CloseReturn(gone, PreviousRange());
  return_.reset();
  EndHere(MakeError(v1::REASON_CANCELLED, gone.message()));
}

void StageSession::SendSeam(const v1::SeamMessage& message) {
  if (upstream_ == nullptr) return;
  Payload payload = ToPayload(message);
  core_->counters.seam_bytes_sent += payload->size();
  bytes_sent_ += payload->size();
  upstream_->Send(std::move(payload));
}

void StageSession::OnTakenOff() {
  ++unsent_credits_;
  FlushCredits(/*all=*/false);
}

void StageSession::FlushCredits(bool all) {
  // Half a window at a time: the sender never runs dry and every other message is spared.
  const uint32_t threshold = all ? 1 : std::max<uint32_t>(limits_.max_inflight_steps / 2, 1);
  if (unsent_credits_ < threshold || !upstream_->writable()) return;
  v1::SeamMessage message;
  message.mutable_credit()->set_steps(unsent_credits_);
  window_ += unsent_credits_;
  unsent_credits_ = 0;
  SendSeam(message);
}

// ---- Steps ----

bool StageSession::OutputWritable() const { return !is_last() || return_->writable(); }

void StageSession::OnTailOutput(const WireStep& wire, StepOutput output) {
  v1::ReturnEvent event;
  v1::StepResult* result = event.mutable_result();
  result->set_step(wire.step);
  result->mutable_cache()->set_cached_tokens(output.cached_tokens);
  if (wire.output_rows == OutputRows::kLast) {
    *result->add_tokens() = ToProto(*output.token);
    if (wire.return_logits) {
      result->set_logits(output.logits.data(), output.logits.size() * sizeof(float));
    }
  }
  result->set_engine_us(static_cast<uint64_t>(absl::ToInt64Microseconds(output.engine_time)));
  recorded_step_ = wire.step;
  recorded_result_ = ToPayload(event);
  SendReturn(recorded_result_);
}

void StageSession::Replay(const QueuedStep& step) {
  if (step.wire.step <= cancelled_through_ || step.wire.step != recorded_step_) {
    return EndHere(
        MakeError(v1::REASON_STEP_OUT_OF_ORDER,
                  absl::StrCat("step ", step.wire.step, " came again after it was cancelled")));
  }
  if (is_last()) return SendReturn(recorded_result_);
  for (const Payload& message : recorded_frames_) SendDownstream(message);
}

// ---- Return ----

void StageSession::AttachReturn(std::shared_ptr<Stream> stream) {
  return_ = std::move(stream);
  v1::ReturnEvent event;
  event.mutable_attached();
  SendReturn(ToPayload(event));
}

void StageSession::OnReturnWritable() {
  if (!ended()) Pump();
}

void StageSession::OnReturnClosed() {
  if (ended()) return;
  return_.reset();
  // A head that has ended the session reads nothing of it any more. One that has not has lost its
  // line to this stage, and hears of it by way of the seam.
  const absl::Status gone = MakeError(
      v1::REASON_PEER_LOST, "the return stream broke: the head closed it, or the line was lost");
  upstream_->Send(ErrorMessage(gone, range_));
  core_->CloseAccepted(upstream_, gone);
  upstream_.reset();
  EndHere(MakeError(v1::REASON_CANCELLED, gone.message()));
}

void StageSession::SendReturn(Payload payload) {
  core_->counters.return_bytes_sent += payload->size();
  bytes_sent_ += payload->size();
  return_->Send(std::move(payload));
}

void StageSession::CloseReturn(const absl::Status& status, const v1::LayerRange& stage) {
  if (return_ == nullptr) return;
  if (!status.ok()) {
    v1::ReturnEvent event;
    *event.mutable_error() = ToProto(status, stage.begin(), stage.end());
    return_->Send(ToPayload(event));
  }
  core_->CloseAccepted(return_, status);
}

// ---- Ends ----

void StageSession::SendClosed(const std::vector<v1::StageReceipt>& receipts) {
  v1::SeamMessage message;
  for (const v1::StageReceipt& receipt : receipts) {
    *message.mutable_closed()->add_receipts() = receipt;
  }
  SendSeam(message);
}

Payload StageSession::ErrorMessage(const absl::Status& status, const v1::LayerRange& stage) {
  v1::SeamMessage message;
  *message.mutable_error() = ToProto(status, stage.begin(), stage.end());
  return ToPayload(message);
}

}  // namespace meshnet::worker
