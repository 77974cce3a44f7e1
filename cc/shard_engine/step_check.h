// The part of ShardEngine::Execute's contract that depends only on the step and the capability.
#ifndef MESHNET_CC_SHARD_ENGINE_STEP_CHECK_H_
#define MESHNET_CC_SHARD_ENGINE_STEP_CHECK_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "cc/shard_engine/shard_engine.h"

namespace meshnet {

// SHAPE_MISMATCH (row count outside [1, max_step_tokens], a residual of the wrong size or at the
// head), TOKEN_OUT_OF_RANGE, NON_FINITE_VALUE, FEATURE_UNSUPPORTED (rows or logits asked of a stage
// that is not the tail), SAMPLING_INVALID. Nothing a peer can put into a step passes this and still
// harms an engine.
absl::Status CheckStep(const Step& step, const Capability& capability);

// CACHE_MISS when `step` starts beyond the `cached` tokens, CONTEXT_EXCEEDED when it ends beyond
// the context.
absl::Status CheckPosition(const Step& step, const Capability& capability, uint32_t cached);

// CONFIGURATION_INVALID when two steps are of one session.
absl::Status CheckBatch(absl::Span<const Step> batch);

// No NaN, no infinity.
bool AllFinite(absl::Span<const float> values);

}  // namespace meshnet

#endif  // MESHNET_CC_SHARD_ENGINE_STEP_CHECK_H_
