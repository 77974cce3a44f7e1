#include "cc/shard_engine/step_check.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "cc/common/status.h"

namespace meshnet {
namespace {

absl::Status CheckRows(const Step& step, const Capability& capability) {
  if (step.token_ids.empty() || step.token_ids.size() > capability.max_step_tokens) {
    return MakeError(v1::REASON_SHAPE_MISMATCH,
                     absl::StrCat("expected 1 to ", capability.max_step_tokens,
                                  " tokens in a step, got ", step.token_ids.size()));
  }
  for (const int32_t token : step.token_ids) {
    if (token < 0 || static_cast<uint32_t>(token) >= capability.vocabulary_size) {
      return MakeError(
          v1::REASON_TOKEN_OUT_OF_RANGE,
          absl::StrCat("expected token ids in [0, ", capability.vocabulary_size, "), got ", token));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckResidual(const Step& step, const Capability& capability) {
  const uint64_t width =
      capability.boundary_in.has_value() ? capability.boundary_in->residual_width() : 0;
  const uint64_t expected = step.token_ids.size() * width;
  if (step.residual.size() != expected) {
    return MakeError(v1::REASON_SHAPE_MISMATCH,
                     absl::StrCat("expected a residual of ", step.token_ids.size(), " x ", width,
                                  " = ", expected, " floats for layers [", capability.range.begin,
                                  ", ", capability.range.end, "), got ", step.residual.size()));
  }
  if (!AllFinite(step.residual)) {
    return MakeError(v1::REASON_NON_FINITE_VALUE,
                     "the residual contains NaN or infinity; the stage before sent garbage");
  }
  return absl::OkStatus();
}

}  // namespace

// Compiles to a vectorised scan: seams check every boundary with it.
bool AllFinite(absl::Span<const float> values) {
  constexpr uint32_t kExponent = 0x7f800000u;
  uint32_t bad = 0;
  for (const float value : values) {
    uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof(bits));
    bad |= static_cast<uint32_t>((bits & kExponent) == kExponent);
  }
  return bad == 0;
}

absl::Status CheckStep(const Step& step, const Capability& capability) {
  absl::Status status = CheckRows(step, capability);
  if (!status.ok()) return status;
  status = CheckResidual(step, capability);
  if (!status.ok()) return status;
  if (!capability.is_tail() && (step.output_rows != OutputRows::kNone || step.return_logits)) {
    return MakeError(v1::REASON_FEATURE_UNSUPPORTED,
                     absl::StrCat("layers [", capability.range.begin, ", ", capability.range.end,
                                  ") of ", capability.model_layers,
                                  " are not the tail: they have neither tokens nor logits to give; "
                                  "ask the stage that ends with the last layer"));
  }
  if (step.sampling.has_value()) {
    return ValidateSampling(*step.sampling, capability.vocabulary_size);
  }
  return absl::OkStatus();
}

absl::Status CheckPosition(const Step& step, const Capability& capability, uint32_t cached) {
  if (step.start_position > cached) {
    return MakeError(
        v1::REASON_CACHE_MISS,
        absl::StrCat("the step starts at position ", step.start_position, " but the session holds ",
                     cached, " tokens; prefill the missing ones first"));
  }
  if (uint64_t{step.start_position} + step.token_ids.size() > capability.context_tokens) {
    return MakeError(v1::REASON_CONTEXT_EXCEEDED,
                     absl::StrCat("the step ends at position ",
                                  uint64_t{step.start_position} + step.token_ids.size(),
                                  ", the context of a session is ", capability.context_tokens,
                                  " tokens; ask for fewer"));
  }
  return absl::OkStatus();
}

absl::Status CheckBatch(absl::Span<const Step> batch) {
  for (size_t i = 0; i < batch.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (batch[i].session == batch[j].session) {
        return MakeError(
            v1::REASON_CONFIGURATION_INVALID,
            absl::StrCat("steps ", batch[j].step, " and ", batch[i].step,
                         " of one session in one batch; put the second into the next"));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace meshnet
