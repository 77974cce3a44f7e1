// A step of one session as frames on a seam, and back: the only code that trusts nothing about a
// frame.
//
//   std::vector<v1::Frame> frames;
//   EncodeStep(step, schema, limits, &frames);                 // sender
//   FrameAssembler assembler(expectation);                     // receiver, one per seam
//   auto step = assembler.Add(frame);                          // nullopt: more fragments to come
//
// Every frame is checked before anything is allocated for it, in a fixed order, so that a frame
// with several faults gets the same reason from the C++ and the Python implementation (golden list:
// tests/golden/malformed_frames.textproto).
#ifndef MESHNET_CC_PROTOCOL_FRAME_CODEC_H_
#define MESHNET_CC_PROTOCOL_FRAME_CODEC_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "cc/common/status.h"
#include "cc/shard_engine/shard_engine.h"
#include "proto/meshnet/shard/v1/frame.pb.h"
#include "proto/meshnet/shard/v1/shard.pb.h"

namespace meshnet {

inline constexpr uint32_t kSchemaVersion = 1;

// Bounds of one stream; see v1::Limits for meaning and hard bounds.
struct Limits {
  uint64_t max_frame_bytes = 1 << 20;
  uint64_t max_bundle_bytes = 64 << 20;
  uint32_t max_step_tokens = 512;
  uint32_t max_inflight_steps = 4;
};

// The smaller of both offers, field by field. A zero in `offer` takes ours. FIELD_OUT_OF_BOUNDS
// when the result is below or an offer above the documented hard bounds.
absl::StatusOr<Limits> NegotiateLimits(const v1::Limits& offer, const Limits& ours);
v1::Limits ToProto(const Limits& limits);

// A whole step as it crosses a seam, with its own memory.
struct WireStep {
  std::string work_id;
  SessionKey session;
  uint64_t step = 0;
  Phase phase = Phase::kPrefill;
  LayerRange applied;  // [0, k): the layers behind `residual`
  uint32_t start_position = 0;
  std::vector<int32_t> token_ids;              // [n]
  std::vector<float> residual;                 // [n, residual_width]
  OutputRows output_rows = OutputRows::kNone;  // kNone or kLast
  std::optional<SamplingParams> sampling;
  bool return_logits = false;
};

// Replaces *frames. FIELD_OUT_OF_BOUNDS, SAMPLING_INVALID (sampling without kLast), SHAPE_MISMATCH,
// NON_FINITE_VALUE, BOUNDARY_SCHEMA_MISMATCH (a tensor that this version does not carry),
// BUNDLE_TOO_LARGE or FRAME_TOO_LARGE (no room for data beside the header) when `step` does not fit
// itself, schema or limits.
absl::Status EncodeStep(const WireStep& step, const BoundarySchema& schema, const Limits& limits,
                        std::vector<v1::Frame>* frames);

// What a receiver requires of every frame on its seam.
struct FrameExpectation {
  std::string work_id;
  SessionKey session;
  BoundarySchema schema;
  // [0, begin of the receiver's own range).
  LayerRange applied;
  uint32_t vocabulary_size = 0;
  uint32_t context_tokens = 0;
  Limits limits;
};

// Reassembles the steps of one seam. After an error the assembler is empty again and can take the
// next bundle; whether the stream goes on is its owner's decision. Holds at most one bundle of at
// most limits.max_bundle_bytes.
class FrameAssembler {
 public:
  explicit FrameAssembler(FrameExpectation expectation);

  // A completed step, nothing while fragments are missing, or the refusal. Reads `frame` only
  // during the call.
  absl::StatusOr<std::optional<WireStep>> Add(const v1::Frame& frame);

  // At the end of the stream: FRAGMENT_MISSING when a bundle is incomplete.
  absl::Status Finish();

  // Payload bytes that the incomplete bundle takes at the moment; 0 without one.
  uint64_t buffered_bytes() const;

 private:
  absl::StatusOr<std::optional<WireStep>> Take(const v1::Frame& frame);
  absl::Status BeginBundle(const v1::Frame& frame);
  absl::Status ContinueBundle(const v1::Frame& frame);
  // Puts the next fragment's bytes where they belong in pending_ and positions_.
  void CopyIn(absl::string_view data);
  void Reset();

  FrameExpectation expectation_;
  std::optional<WireStep> pending_;
  std::vector<int32_t> positions_;  // of pending_
  uint64_t payload_bytes_ = 0;
  uint64_t fragment_bytes_ = 0;  // of every fragment but the last
  uint32_t next_fragment_ = 0;
  uint32_t fragment_count_ = 0;
  uint64_t completed_step_ = 0;  // 0 = none
};

// Parses one message of a stream. Before anything is allocated: FRAME_TOO_LARGE, MALFORMED_MESSAGE,
// UNKNOWN_FIELD (at any depth), FIELD_OUT_OF_BOUNDS (more elements than message_scan.h allows).
absl::Status ParseMessage(absl::string_view bytes, uint64_t max_bytes,
                          google::protobuf::Message* message);

// Engine types to and from the wire. From-conversions refuse with UNKNOWN_ENUM_VALUE,
// FIELD_OUT_OF_BOUNDS, ...
v1::SamplingParams ToProto(const SamplingParams& params);
absl::StatusOr<SamplingParams> FromProto(const v1::SamplingParams& params,
                                         uint32_t vocabulary_size);
v1::SampledToken ToProto(const SampledToken& token);
absl::StatusOr<SampledToken> FromProto(const v1::SampledToken& token, uint32_t vocabulary_size);
v1::BoundarySchema ToProto(const BoundarySchema& schema);
// Leaves what the engine does not know to the worker: limits other than max_step_tokens,
// prefill_chunk_tokens, worker_version.
v1::Capability ToProto(const Capability& capability);
v1::LayerRange ToProto(const LayerRange& range);
// ROUTE_INVALID unless ids, epoch, hop count and ranges are within the bounds that shard.proto
// documents.
absl::Status ValidateRoute(const v1::Route& route);
// FIELD_OUT_OF_BOUNDS unless 1-64 bytes of [A-Za-z0-9._:-].
absl::Status ValidateWorkId(absl::string_view work_id);
// FIELD_OUT_OF_BOUNDS unless it is 1-128 bytes of [A-Za-z0-9._:-].
absl::Status ValidatePeerId(absl::string_view peer_id);

}  // namespace meshnet

#endif  // MESHNET_CC_PROTOCOL_FRAME_CODEC_H_
