#include "cc/protocol/golden.h"

#include <cstring>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/escaping.h"
#include "absl/strings/string_view.h"
#include "cc/protocol/frame_codec.h"
#include "cc/shard_engine/shard_engine.h"
#include "tests/golden/golden.pb.h"

namespace meshnet {

// Abseil has one with another signature in each of the versions that we build with.
std::string BytesOfHex(absl::string_view digits) {
  std::string bytes;
  for (size_t i = 0; i + 1 < digits.size(); i += 2) {
    bytes += static_cast<char>(std::stoi(std::string(digits.substr(i, 2)), nullptr, 16));
  }
  return bytes;
}

FrameExpectation FromGolden(const golden::Expectation& message) {
  FrameExpectation expectation;
  expectation.work_id = message.work_id();
  expectation.session = {BytesOfHex(message.route_session_id()), message.route_epoch()};
  expectation.schema = message.streams() > 0
                           ? HyperConnectionSchema(message.streams(), message.n_embd())
                           : DenseResidualSchema(message.n_embd());
  expectation.applied = {0, message.applied_end()};
  expectation.vocabulary_size = message.vocabulary_size();
  expectation.context_tokens = message.context_tokens();
  expectation.limits = {message.limits().max_frame_bytes(), message.limits().max_bundle_bytes(),
                        message.limits().max_step_tokens(), message.limits().max_inflight_steps()};
  return expectation;
}

absl::StatusOr<WireStep> FromGolden(const golden::Step& message, uint32_t vocabulary_size) {
  WireStep step;
  step.work_id = message.work_id();
  step.session = {BytesOfHex(message.route_session_id()), message.route_epoch()};
  step.step = message.step();
  step.phase = message.phase() == v1::PHASE_DECODE ? Phase::kDecode : Phase::kPrefill;
  step.applied = {0, message.applied_end()};
  step.start_position = message.start_position();
  step.token_ids.assign(message.token_ids().begin(), message.token_ids().end());
  const std::string residual = BytesOfHex(message.residual());
  step.residual.resize(residual.size() / sizeof(float));
  if (!residual.empty()) std::memcpy(step.residual.data(), residual.data(), residual.size());
  step.output_rows =
      message.output_rows() == v1::OUTPUT_ROWS_LAST ? OutputRows::kLast : OutputRows::kNone;
  if (message.has_sampling()) {
    auto sampling = FromProto(message.sampling(), vocabulary_size);
    if (!sampling.ok()) return sampling.status();
    step.sampling = *std::move(sampling);
  }
  step.return_logits = message.return_logits();
  return step;
}

golden::Step ToGolden(const WireStep& step) {
  golden::Step message;
  message.set_work_id(step.work_id);
  message.set_route_session_id(absl::BytesToHexString(step.session.route_session_id));
  message.set_route_epoch(step.session.route_epoch);
  message.set_step(step.step);
  message.set_phase(step.phase == Phase::kDecode ? v1::PHASE_DECODE : v1::PHASE_PREFILL);
  message.set_applied_end(step.applied.end);
  message.set_start_position(step.start_position);
  for (const int32_t id : step.token_ids) message.add_token_ids(id);
  message.set_residual(absl::BytesToHexString(absl::string_view(
      reinterpret_cast<const char*>(step.residual.data()), step.residual.size() * sizeof(float))));
  message.set_output_rows(step.output_rows == OutputRows::kLast ? v1::OUTPUT_ROWS_LAST
                                                                : v1::OUTPUT_ROWS_NONE);
  if (step.sampling.has_value()) *message.mutable_sampling() = ToProto(*step.sampling);
  message.set_return_logits(step.return_logits);
  return message;
}

}  // namespace meshnet
