#include "cc/protocol/frame_codec.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "cc/common/checksum.h"
#include "cc/common/status.h"
#include "cc/protocol/message_scan.h"
#include "cc/shard_engine/shard_engine.h"
#include "google/protobuf/message.h"

namespace meshnet {
namespace {

// Tensors travel little-endian and are copied as they lie in memory. Every platform that is built
// for is little-endian; a port to another one converts in CopyIn and AppendPayload.
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "big-endian hosts need a conversion");
static_assert(sizeof(float) == 4, "the wire carries IEEE 754 single precision");

constexpr size_t kSessionIdBytes = 16;
constexpr size_t kMaxWorkIdBytes = 64;
constexpr int kMaxHops = 64;
constexpr size_t kMaxEndpointBytes = 255;
constexpr size_t kMaxPeerIdBytes = 128;
constexpr size_t kMaxRouteTokenBytes = 1024;
constexpr int kMaxTopLogprobs = 20;

// Hard bounds of v1::Limits.
constexpr uint64_t kMinBytes = 4 << 10;
constexpr uint64_t kMaxFrameBytes = 64 << 20;
constexpr uint64_t kMaxBundleBytes = 1 << 30;
constexpr uint32_t kMaxStepTokens = 1 << 16;
constexpr uint32_t kMaxInflightSteps = 1024;

// What a fragment costs beside its data: tags, numbers and checksum (at most 45 bytes), and the
// SeamMessage around the frame (at most 6).
constexpr uint64_t kFragmentOverheadBytes = 64;
// Data in a fragment that is not the last comes in multiples of this.
constexpr uint64_t kFragmentUnitBytes = 64;
// Below this much data in a frame its limit is taken for a mistake.
constexpr uint64_t kMinFragmentBytes = 1 << 10;

// Peers choose names; neither their length nor their bytes go into a message unchecked.
std::string Quoted(absl::string_view name) {
  return absl::StrCat("\"", absl::CHexEscape(name.substr(0, 64)), "\"");
}

absl::Status OutOfBounds(absl::string_view field, absl::string_view bounds, uint64_t value) {
  return MakeError(v1::REASON_FIELD_OUT_OF_BOUNDS,
                   absl::StrCat("expected ", field, " in ", bounds, ", got ", value));
}

absl::Status UnknownEnum(absl::string_view field, int value) {
  return MakeError(v1::REASON_UNKNOWN_ENUM_VALUE,
                   absl::StrCat("expected ", field,
                                " to be a value of schema version 1 other than 0, got ", value));
}

bool AllFinite(absl::Span<const float> values) {
  // All exponent bits set means NaN or infinity. No early exit, so that the loop vectorises.
  uint32_t found = 0;
  for (const float value : values) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    found |= static_cast<uint32_t>((bits & 0x7f800000u) == 0x7f800000u);
  }
  return found == 0;
}

uint64_t ElementBytes(DType /*dtype*/) { return 4; }

v1::DType ToProto(DType dtype) { return dtype == DType::kF32 ? v1::DTYPE_F32 : v1::DTYPE_I32; }

v1::Phase ToProto(Phase phase) {
  return phase == Phase::kDecode ? v1::PHASE_DECODE : v1::PHASE_PREFILL;
}

// What `extent` of a schema is in a step of `tokens` rows.
uint64_t ExtentOf(int64_t extent, uint32_t tokens) {
  return extent < 0 ? tokens : static_cast<uint64_t>(extent);
}

uint64_t BytesOf(const TensorSpec& spec, uint32_t tokens) {
  uint64_t bytes = ElementBytes(spec.dtype);
  for (const int64_t extent : spec.shape) bytes *= ExtentOf(extent, tokens);
  return bytes;
}

std::string ShapeText(const TensorSpec& spec, uint32_t tokens) {
  return absl::StrCat("[",
                      absl::StrJoin(spec.shape, ", ",
                                    [tokens](std::string* out, int64_t extent) {
                                      absl::StrAppend(out, ExtentOf(extent, tokens));
                                    }),
                      "]");
}

std::string ShapeText(const v1::TensorHeader& header) {
  constexpr int kMostExtents = 8;
  const auto extents =
      absl::MakeConstSpan(header.shape().data(), std::min(header.shape_size(), kMostExtents));
  return absl::StrCat("[", absl::StrJoin(extents, ", "),
                      header.shape_size() > kMostExtents ? ", ...]" : "]");
}

bool ShapeMatches(const v1::TensorHeader& header, const TensorSpec& spec, uint32_t tokens) {
  return std::equal(
      spec.shape.begin(), spec.shape.end(), header.shape().begin(), header.shape().end(),
      [tokens](int64_t extent, uint64_t got) { return ExtentOf(extent, tokens) == got; });
}

enum class Tensor { kResidual, kPositions, kTokenIds, kUnknown };

// This version knows three tensors, whatever order a schema puts them in.
Tensor TensorOf(const TensorSpec& spec) {
  if (spec.name == "residual" && spec.dtype == DType::kF32) return Tensor::kResidual;
  if (spec.name == "positions" && spec.dtype == DType::kI32) return Tensor::kPositions;
  if (spec.name == "token_ids" && spec.dtype == DType::kI32) return Tensor::kTokenIds;
  return Tensor::kUnknown;
}

absl::Status UnknownTensor(const TensorSpec& spec) {
  return MakeError(
      v1::REASON_BOUNDARY_SCHEMA_MISMATCH,
      absl::StrCat("expected a schema of residual (f32), positions and token_ids (i32), got ",
                   Quoted(spec.name)));
}

absl::Status ValidateKey(const SessionKey& key) {
  if (key.route_session_id.size() != kSessionIdBytes) {
    return OutOfBounds("the size of route_session_id", "[16, 16] bytes",
                       key.route_session_id.size());
  }
  if (key.route_epoch == 0) return OutOfBounds("route_epoch", "[1, 2^64)", 0);
  return absl::OkStatus();
}

absl::Status ValidateStep(const WireStep& step, const BoundarySchema& schema,
                          const Limits& limits) {
  if (absl::Status status = ValidateWorkId(step.work_id); !status.ok()) return status;
  if (absl::Status status = ValidateKey(step.session); !status.ok()) return status;
  if (step.step == 0) return OutOfBounds("step", "[1, 2^64)", 0);
  if (step.applied.begin != 0 || step.applied.end == 0) {
    return OutOfBounds("applied", "[0, k) with k >= 1", step.applied.end);
  }
  const size_t tokens = step.token_ids.size();
  if (tokens == 0 || tokens > limits.max_step_tokens) {
    return OutOfBounds("token_count", absl::StrCat("[1, ", limits.max_step_tokens, "]"), tokens);
  }
  if (uint64_t{step.start_position} + tokens > INT32_MAX) {
    return OutOfBounds("start_position + token_count", "[1, 2^31)",
                       uint64_t{step.start_position} + tokens);
  }
  if (step.output_rows == OutputRows::kAllLogits) {
    return MakeError(v1::REASON_FIELD_OUT_OF_BOUNDS,
                     "expected output_rows none or last on the wire, got all logits");
  }
  if (step.sampling.has_value() && step.output_rows != OutputRows::kLast) {
    return MakeError(v1::REASON_SAMPLING_INVALID,
                     "expected sampling only in a step whose last row is sampled");
  }
  const uint64_t width = schema.residual_width();
  if (step.residual.size() != tokens * width) {
    return MakeError(v1::REASON_SHAPE_MISMATCH,
                     absl::StrCat("expected a residual of ", tokens, " x ", width, " floats, got ",
                                  step.residual.size()));
  }
  if (!AllFinite(step.residual)) {
    return MakeError(v1::REASON_NON_FINITE_VALUE, "expected finite residuals, got NaN or infinity");
  }
  return absl::OkStatus();
}

// Bytes [offset, offset + size) of the concatenated tensors.
void AppendPayload(absl::Span<const absl::string_view> tensors, uint64_t offset, uint64_t size,
                   std::string* data) {
  data->reserve(size);
  for (const absl::string_view tensor : tensors) {
    if (size == 0) return;
    if (offset >= tensor.size()) {
      offset -= tensor.size();
      continue;
    }
    const absl::string_view part = tensor.substr(offset, size);
    data->append(part.data(), part.size());
    offset = 0;
    size -= part.size();
  }
}

template <typename T>
absl::string_view BytesOf(const std::vector<T>& values) {
  return absl::string_view(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

void SetIdentity(const WireStep& step, v1::Frame* frame) {
  frame->set_schema_version(kSchemaVersion);
  frame->set_work_id(step.work_id);
  frame->set_route_session_id(step.session.route_session_id);
  frame->set_route_epoch(step.session.route_epoch);
  frame->set_step(step.step);
}

void SetHeader(const WireStep& step, const BoundarySchema& schema, v1::Frame* frame) {
  frame->set_phase(ToProto(step.phase));
  *frame->mutable_applied() = ToProto(step.applied);
  frame->set_start_position(step.start_position);
  frame->set_token_count(static_cast<uint32_t>(step.token_ids.size()));
  frame->mutable_cache()->set_cached_tokens(step.start_position);
  frame->set_output_rows(step.output_rows == OutputRows::kLast ? v1::OUTPUT_ROWS_LAST
                                                               : v1::OUTPUT_ROWS_NONE);
  if (step.sampling.has_value()) *frame->mutable_sampling() = ToProto(*step.sampling);
  frame->set_return_logits(step.return_logits);
  frame->set_boundary_schema(schema.name);
  frame->set_boundary_version(schema.version);
  for (const TensorSpec& spec : schema.tensors) {
    v1::TensorHeader* header = frame->add_tensors();
    header->set_name(spec.name);
    header->set_dtype(ToProto(spec.dtype));
    header->set_byte_order(v1::BYTE_ORDER_LITTLE_ENDIAN);
    header->set_compression(v1::COMPRESSION_NONE);
    for (const int64_t extent : spec.shape) {
      header->add_shape(ExtentOf(extent, frame->token_count()));
    }
    header->set_byte_length(BytesOf(spec, frame->token_count()));
  }
}

// Fields 6 to 16, which only a bundle's first frame carries.
bool HasHeader(const v1::Frame& frame) {
  return frame.phase() != 0 || frame.has_applied() || frame.start_position() != 0 ||
         frame.token_count() != 0 || frame.has_cache() || frame.output_rows() != 0 ||
         frame.has_sampling() || frame.return_logits() || !frame.boundary_schema().empty() ||
         frame.boundary_version() != 0 || frame.tensors_size() != 0;
}

// Everything about a frame that does not depend on the state of its bundle.
absl::Status CheckIdentity(const v1::Frame& frame, const FrameExpectation& expectation) {
  if (frame.schema_version() != kSchemaVersion) {
    return MakeError(
        v1::REASON_SCHEMA_VERSION_UNSUPPORTED,
        absl::StrCat("expected schema_version ", kSchemaVersion, ", got ", frame.schema_version()));
  }
  if (frame.has_reserved_state()) {
    return MakeError(v1::REASON_RESERVED_FIELD_SET,
                     "expected reserved_state to be absent; architecture state, recurrent state "
                     "and MTP belong to a later version");
  }
  if (absl::Status status = ValidateWorkId(frame.work_id()); !status.ok()) return status;
  if (frame.route_session_id().size() != kSessionIdBytes) {
    return OutOfBounds("the size of route_session_id", "[16, 16] bytes",
                       frame.route_session_id().size());
  }
  if (frame.route_epoch() == 0) return OutOfBounds("route_epoch", "[1, 2^64)", 0);
  if (frame.step() == 0) return OutOfBounds("step", "[1, 2^64)", 0);
  if (frame.route_session_id() != expectation.session.route_session_id) {
    return MakeError(v1::REASON_SESSION_UNKNOWN,
                     "this seam carries another route session; open a seam for this one");
  }
  if (frame.route_epoch() != expectation.session.route_epoch) {
    const bool stale = frame.route_epoch() < expectation.session.route_epoch;
    return MakeError(stale ? v1::REASON_STALE_EPOCH : v1::REASON_SESSION_UNKNOWN,
                     absl::StrCat("expected epoch ", expectation.session.route_epoch,
                                  " on this seam, got ", frame.route_epoch()));
  }
  if (frame.work_id() != expectation.work_id) {
    return MakeError(v1::REASON_FIELD_OUT_OF_BOUNDS,
                     absl::StrCat("expected the work_id that opened this seam, ",
                                  Quoted(expectation.work_id), ", got ", Quoted(frame.work_id())));
  }
  if (!frame.has_fragment()) {
    return MakeError(v1::REASON_FRAGMENT_MISSING, "expected one fragment in every frame, got none");
  }
  const v1::Fragment& fragment = frame.fragment();
  if (fragment.index() >= fragment.count()) {
    return MakeError(v1::REASON_FRAGMENT_SIZE_MISMATCH,
                     absl::StrCat("expected a fragment index below the count ", fragment.count(),
                                  ", got ", fragment.index()));
  }
  if (fragment.data().empty()) {
    return MakeError(v1::REASON_FRAGMENT_SIZE_MISMATCH,
                     "expected at least one byte in a fragment, got none");
  }
  return absl::OkStatus();
}

absl::Status CheckTensorOrder(const v1::Frame& frame, const BoundarySchema& schema, int index) {
  const std::string& name = frame.tensors(index).name();
  for (int i = 0; i < index; ++i) {
    if (frame.tensors(i).name() == name) {
      return MakeError(v1::REASON_TENSOR_DUPLICATE,
                       absl::StrCat("expected each tensor once, got ", Quoted(name), " twice"));
    }
  }
  const auto place = static_cast<size_t>(index);
  if (place < schema.tensors.size()) {
    const std::string& expected = schema.tensors[place].name;
    if (name == expected) return absl::OkStatus();
    const bool name_known =
        std::any_of(schema.tensors.begin(), schema.tensors.end(),
                    [&name](const TensorSpec& spec) { return spec.name == name; });
    const bool comes_later =
        std::any_of(frame.tensors().begin(), frame.tensors().end(),
                    [&expected](const v1::TensorHeader& t) { return t.name() == expected; });
    if (name_known && !comes_later) {
      return MakeError(v1::REASON_TENSOR_MISSING, absl::StrCat("expected tensor ", Quoted(expected),
                                                               " at place ", index, ", got none"));
    }
  }
  return MakeError(v1::REASON_TENSOR_UNEXPECTED,
                   absl::StrCat("expected the tensors of ", Quoted(schema.name),
                                " in their order, got ", Quoted(name), " at place ", index));
}

absl::Status CheckTensor(const v1::TensorHeader& header, const TensorSpec& spec,
                         uint32_t token_count, uint64_t max_bundle_bytes, uint64_t* total) {
  if (header.dtype() == 0 || !v1::DType_IsValid(header.dtype())) {
    return UnknownEnum(absl::StrCat("the dtype of ", spec.name), header.dtype());
  }
  if (header.dtype() != ToProto(spec.dtype)) {
    return MakeError(
        v1::REASON_DTYPE_MISMATCH,
        absl::StrCat("expected ", spec.name, " as ", v1::DType_Name(ToProto(spec.dtype)), ", got ",
                     v1::DType_Name(header.dtype())));
  }
  if (header.byte_order() == 0) return UnknownEnum(absl::StrCat("byte_order of ", spec.name), 0);
  if (header.byte_order() != v1::BYTE_ORDER_LITTLE_ENDIAN) {
    return MakeError(v1::REASON_BYTE_ORDER_UNSUPPORTED,
                     absl::StrCat("expected ", spec.name, " little-endian, got byte order ",
                                  static_cast<int>(header.byte_order())));
  }
  if (header.compression() == 0) return UnknownEnum(absl::StrCat("compression of ", spec.name), 0);
  if (header.compression() != v1::COMPRESSION_NONE) {
    return MakeError(v1::REASON_COMPRESSION_UNSUPPORTED,
                     absl::StrCat("expected ", spec.name, " uncompressed, got compression ",
                                  static_cast<int>(header.compression())));
  }
  if (header.byte_length() > max_bundle_bytes - *total) {
    return MakeError(v1::REASON_BUNDLE_TOO_LARGE,
                     absl::StrCat("expected at most ", max_bundle_bytes, " bytes in a bundle, got ",
                                  header.byte_length(), " in ", spec.name, " after ", *total,
                                  "; send smaller steps"));
  }
  *total += header.byte_length();
  if (!ShapeMatches(header, spec, token_count)) {
    return MakeError(v1::REASON_SHAPE_MISMATCH,
                     absl::StrCat("expected ", spec.name, " with shape ",
                                  ShapeText(spec, token_count), ", got ", ShapeText(header)));
  }
  const uint64_t bytes = BytesOf(spec, token_count);
  if (header.byte_length() != bytes) {
    return MakeError(
        v1::REASON_SIZE_MISMATCH,
        absl::StrCat("expected ", bytes, " bytes for ", spec.name, ", got ", header.byte_length()));
  }
  return absl::OkStatus();
}

// A bundle's first frame: what the step is, its sampling, and how large its payload will be.
absl::Status CheckHeader(const v1::Frame& frame, const FrameExpectation& expectation,
                         std::optional<SamplingParams>* sampling, uint64_t* payload_bytes) {
  if (frame.phase() == 0 || !v1::Phase_IsValid(frame.phase())) {
    return UnknownEnum("phase", frame.phase());
  }
  if (frame.output_rows() == 0 || !v1::OutputRows_IsValid(frame.output_rows())) {
    return UnknownEnum("output_rows", frame.output_rows());
  }
  if (!frame.has_applied() || frame.applied().begin() != expectation.applied.begin ||
      frame.applied().end() != expectation.applied.end) {
    return MakeError(v1::REASON_RANGE_MISMATCH,
                     absl::StrCat("expected a boundary behind layers [", expectation.applied.begin,
                                  ", ", expectation.applied.end, "), got [",
                                  frame.applied().begin(), ", ", frame.applied().end(), ")"));
  }
  const uint32_t tokens = frame.token_count();
  if (tokens == 0 || tokens > expectation.limits.max_step_tokens) {
    return OutOfBounds("token_count", absl::StrCat("[1, ", expectation.limits.max_step_tokens, "]"),
                       tokens);
  }
  if (uint64_t{frame.start_position()} + tokens > expectation.context_tokens) {
    return MakeError(v1::REASON_CONTEXT_EXCEEDED,
                     absl::StrCat("expected positions below ", expectation.context_tokens, ", got ",
                                  tokens, " tokens from ", frame.start_position(), " on"));
  }
  if (!frame.has_cache() || frame.cache().cached_tokens() != frame.start_position()) {
    return MakeError(v1::REASON_FIELD_OUT_OF_BOUNDS,
                     absl::StrCat("expected cache.cached_tokens equal to start_position ",
                                  frame.start_position(), ", got ",
                                  frame.has_cache() ? absl::StrCat(frame.cache().cached_tokens())
                                                    : "no cache expectation"));
  }
  if (frame.has_sampling()) {
    if (frame.output_rows() != v1::OUTPUT_ROWS_LAST) {
      return MakeError(v1::REASON_SAMPLING_INVALID,
                       "expected sampling only in a step whose last row is sampled");
    }
    auto params = FromProto(frame.sampling(), expectation.vocabulary_size);
    if (!params.ok()) return params.status();
    *sampling = *std::move(params);
  }
  const BoundarySchema& schema = expectation.schema;
  if (frame.boundary_schema() != schema.name || frame.boundary_version() != schema.version) {
    return MakeError(v1::REASON_BOUNDARY_SCHEMA_MISMATCH,
                     absl::StrCat("expected boundary ", Quoted(schema.name), " version ",
                                  schema.version, ", got ", Quoted(frame.boundary_schema()),
                                  " version ", frame.boundary_version()));
  }
  *payload_bytes = 0;
  for (int i = 0; i < frame.tensors_size(); ++i) {
    if (absl::Status status = CheckTensorOrder(frame, schema, i); !status.ok()) return status;
    const TensorSpec& spec = schema.tensors[static_cast<size_t>(i)];
    if (TensorOf(spec) == Tensor::kUnknown) return UnknownTensor(spec);
    if (absl::Status status = CheckTensor(frame.tensors(i), spec, tokens,
                                          expectation.limits.max_bundle_bytes, payload_bytes);
        !status.ok()) {
      return status;
    }
  }
  if (static_cast<size_t>(frame.tensors_size()) < schema.tensors.size()) {
    return MakeError(
        v1::REASON_TENSOR_MISSING,
        absl::StrCat("expected tensor ",
                     Quoted(schema.tensors[static_cast<size_t>(frame.tensors_size())].name),
                     ", got none"));
  }
  return absl::OkStatus();
}

absl::Status CheckChecksum(const v1::Fragment& fragment) {
  const uint64_t checksum = Checksum(fragment.data());
  if (fragment.checksum() == checksum) return absl::OkStatus();
  return MakeError(v1::REASON_CHECKSUM_MISMATCH,
                   absl::StrCat("expected checksum ", absl::Hex(checksum, absl::kZeroPad16),
                                " of the data in fragment ", fragment.index(), ", got ",
                                absl::Hex(fragment.checksum(), absl::kZeroPad16)));
}

absl::Status FragmentSize(absl::string_view what, uint64_t expected, uint64_t got) {
  return MakeError(v1::REASON_FRAGMENT_SIZE_MISMATCH,
                   absl::StrCat("expected ", what, " ", expected, ", got ", got));
}

// What only the content of a whole bundle shows.
absl::Status CheckContent(const WireStep& step, absl::Span<const int32_t> positions,
                          uint32_t vocabulary_size) {
  if (!AllFinite(step.residual)) {
    return MakeError(v1::REASON_NON_FINITE_VALUE, "expected finite residuals, got NaN or infinity");
  }
  for (size_t i = 0; i < positions.size(); ++i) {
    if (positions[i] != static_cast<int64_t>(step.start_position + i)) {
      return MakeError(v1::REASON_POSITION_MISMATCH,
                       absl::StrCat("expected position ", step.start_position + i, " in row ", i,
                                    ", got ", positions[i]));
    }
  }
  for (size_t i = 0; i < step.token_ids.size(); ++i) {
    if (step.token_ids[i] < 0 || static_cast<uint32_t>(step.token_ids[i]) >= vocabulary_size) {
      return MakeError(v1::REASON_TOKEN_OUT_OF_RANGE,
                       absl::StrCat("expected token ids in [0, ", vocabulary_size, "), got ",
                                    step.token_ids[i], " in row ", i));
    }
  }
  return absl::OkStatus();
}

absl::Status RouteInvalid(absl::string_view message) {
  return MakeError(v1::REASON_ROUTE_INVALID, message);
}

bool IsIdentifier(absl::string_view text, size_t max_bytes = kMaxWorkIdBytes) {
  if (text.empty() || text.size() > max_bytes) return false;
  return std::all_of(text.begin(), text.end(), [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '_' || c == ':' ||
           c == '-';
  });
}

}  // namespace

absl::StatusOr<Limits> NegotiateLimits(const v1::Limits& offer, const Limits& ours) {
  const auto pick = [](absl::string_view field, uint64_t offered, uint64_t own, uint64_t low,
                       uint64_t high) -> absl::StatusOr<uint64_t> {
    const std::string bounds = absl::StrCat("[", low, ", ", high, "]");
    if (offered > high) return OutOfBounds(absl::StrCat("limits.", field), bounds, offered);
    const uint64_t result = offered == 0 ? own : std::min(offered, own);
    if (result < low || result > high) {
      return OutOfBounds(absl::StrCat("limits.", field), bounds, result);
    }
    return result;
  };
  const auto frame = pick("max_frame_bytes", offer.max_frame_bytes(), ours.max_frame_bytes,
                          kMinBytes, kMaxFrameBytes);
  if (!frame.ok()) return frame.status();
  const auto bundle = pick("max_bundle_bytes", offer.max_bundle_bytes(), ours.max_bundle_bytes,
                           kMinBytes, kMaxBundleBytes);
  if (!bundle.ok()) return bundle.status();
  const auto tokens =
      pick("max_step_tokens", offer.max_step_tokens(), ours.max_step_tokens, 1, kMaxStepTokens);
  if (!tokens.ok()) return tokens.status();
  const auto inflight = pick("max_inflight_steps", offer.max_inflight_steps(),
                             ours.max_inflight_steps, 1, kMaxInflightSteps);
  if (!inflight.ok()) return inflight.status();
  return Limits{*frame, *bundle, static_cast<uint32_t>(*tokens), static_cast<uint32_t>(*inflight)};
}

v1::Limits ToProto(const Limits& limits) {
  v1::Limits proto;
  proto.set_max_frame_bytes(limits.max_frame_bytes);
  proto.set_max_bundle_bytes(limits.max_bundle_bytes);
  proto.set_max_step_tokens(limits.max_step_tokens);
  proto.set_max_inflight_steps(limits.max_inflight_steps);
  return proto;
}

absl::Status EncodeStep(const WireStep& step, const BoundarySchema& schema, const Limits& limits,
                        std::vector<v1::Frame>* frames) {
  frames->clear();
  if (absl::Status status = ValidateStep(step, schema, limits); !status.ok()) return status;

  std::vector<int32_t> positions(step.token_ids.size());
  for (size_t i = 0; i < positions.size(); ++i) {
    positions[i] = static_cast<int32_t>(step.start_position + i);
  }
  uint64_t total = 0;
  std::vector<absl::string_view> tensors;
  tensors.reserve(schema.tensors.size());
  for (const TensorSpec& spec : schema.tensors) {
    switch (TensorOf(spec)) {
      case Tensor::kResidual:
        tensors.push_back(BytesOf(step.residual));
        break;
      case Tensor::kPositions:
        tensors.push_back(BytesOf(positions));
        break;
      case Tensor::kTokenIds:
        tensors.push_back(BytesOf(step.token_ids));
        break;
      case Tensor::kUnknown:
        return UnknownTensor(spec);
    }
    total += tensors.back().size();
  }
  if (total == 0) {
    return MakeError(
        v1::REASON_BOUNDARY_SCHEMA_MISMATCH,
        absl::StrCat("expected a schema with tensors, got none in ", Quoted(schema.name)));
  }
  if (total > limits.max_bundle_bytes) {
    return MakeError(v1::REASON_BUNDLE_TOO_LARGE,
                     absl::StrCat("expected at most ", limits.max_bundle_bytes,
                                  " bytes in a bundle, got ", total, "; cut smaller steps"));
  }

  v1::Frame first;
  SetIdentity(step, &first);
  SetHeader(step, schema, &first);
  const uint64_t spent = first.ByteSizeLong() + kFragmentOverheadBytes;
  if (spent + kMinFragmentBytes > limits.max_frame_bytes) {
    return MakeError(v1::REASON_FRAME_TOO_LARGE,
                     absl::StrCat("expected room for ", kMinFragmentBytes,
                                  " bytes of data in a frame of at most ", limits.max_frame_bytes,
                                  " bytes, got a header of ", spent));
  }
  const uint64_t room = limits.max_frame_bytes - spent;
  const uint64_t length = total <= room ? total : room - room % kFragmentUnitBytes;
  const uint64_t count = (total + length - 1) / length;
  frames->reserve(count);
  frames->push_back(std::move(first));
  for (uint64_t index = 0; index < count; ++index) {
    if (index > 0) SetIdentity(step, &frames->emplace_back());
    v1::Fragment* fragment = frames->back().mutable_fragment();
    fragment->set_index(static_cast<uint32_t>(index));
    fragment->set_count(static_cast<uint32_t>(count));
    fragment->set_offset(index * length);
    AppendPayload(tensors, index * length, std::min(length, total - index * length),
                  fragment->mutable_data());
    fragment->set_checksum(Checksum(fragment->data()));
  }
  return absl::OkStatus();
}

FrameAssembler::FrameAssembler(FrameExpectation expectation)
    : expectation_(std::move(expectation)) {}

absl::StatusOr<std::optional<WireStep>> FrameAssembler::Add(const v1::Frame& frame) {
  auto result = Take(frame);
  if (!result.ok()) Reset();
  return result;
}

absl::StatusOr<std::optional<WireStep>> FrameAssembler::Take(const v1::Frame& frame) {
  if (absl::Status status = CheckIdentity(frame, expectation_); !status.ok()) return status;
  absl::Status status = pending_.has_value() ? ContinueBundle(frame) : BeginBundle(frame);
  if (!status.ok()) return status;

  CopyIn(frame.fragment().data());
  if (++next_fragment_ < fragment_count_) return std::optional<WireStep>();
  status = CheckContent(*pending_, positions_, expectation_.vocabulary_size);
  if (!status.ok()) return status;
  completed_step_ = pending_->step;
  std::optional<WireStep> step = std::move(pending_);
  Reset();
  return step;
}

absl::Status FrameAssembler::BeginBundle(const v1::Frame& frame) {
  if (const uint32_t index = frame.fragment().index(); index > 0) {
    const bool again = frame.step() == completed_step_;
    return MakeError(again ? v1::REASON_FRAGMENT_DUPLICATE : v1::REASON_FRAGMENT_OUT_OF_ORDER,
                     absl::StrCat("expected fragment 0 of a new bundle, got fragment ", index,
                                  " of step ", frame.step(), again ? ", which is complete" : ""));
  }
  std::optional<SamplingParams> sampling;
  uint64_t total = 0;
  if (absl::Status status = CheckHeader(frame, expectation_, &sampling, &total); !status.ok()) {
    return status;
  }
  const v1::Fragment& fragment = frame.fragment();
  const uint64_t length = fragment.data().size();
  if (fragment.offset() != 0)
    return FragmentSize("the first fragment at offset", 0, fragment.offset());
  if (length > total) return FragmentSize("a payload of bytes", total, length);
  if (const uint64_t count = (total + length - 1) / length; fragment.count() != count) {
    return FragmentSize(
        absl::StrCat("for ", total, " bytes in fragments of ", length, " a count of"), count,
        fragment.count());
  }
  if (absl::Status status = CheckChecksum(fragment); !status.ok()) return status;

  WireStep& step = pending_.emplace();
  step.work_id = frame.work_id();
  step.session = expectation_.session;
  step.step = frame.step();
  step.phase = frame.phase() == v1::PHASE_DECODE ? Phase::kDecode : Phase::kPrefill;
  step.applied = expectation_.applied;
  step.start_position = frame.start_position();
  step.output_rows =
      frame.output_rows() == v1::OUTPUT_ROWS_LAST ? OutputRows::kLast : OutputRows::kNone;
  step.return_logits = frame.return_logits();
  step.sampling = std::move(sampling);
  step.token_ids.resize(frame.token_count());
  step.residual.resize(frame.token_count() * expectation_.schema.residual_width());
  positions_.resize(frame.token_count());
  payload_bytes_ = total;
  fragment_bytes_ = length;
  fragment_count_ = fragment.count();
  return absl::OkStatus();
}

absl::Status FrameAssembler::ContinueBundle(const v1::Frame& frame) {
  const v1::Fragment& fragment = frame.fragment();
  if (frame.step() != pending_->step) {
    return MakeError(v1::REASON_FRAGMENT_OUT_OF_ORDER,
                     absl::StrCat("expected fragment ", next_fragment_, " of step ", pending_->step,
                                  ", got fragment ", fragment.index(), " of step ", frame.step()));
  }
  if (fragment.index() != next_fragment_) {
    return MakeError(fragment.index() < next_fragment_ ? v1::REASON_FRAGMENT_DUPLICATE
                                                       : v1::REASON_FRAGMENT_OUT_OF_ORDER,
                     absl::StrCat("expected fragment ", next_fragment_, " of step ", pending_->step,
                                  ", got fragment ", fragment.index()));
  }
  if (HasHeader(frame)) {
    return MakeError(
        v1::REASON_FIELD_OUT_OF_BOUNDS,
        "expected header fields only in a bundle's first frame, got some in fragment " +
            absl::StrCat(fragment.index()));
  }
  if (fragment.count() != fragment_count_) {
    return FragmentSize("a count of", fragment_count_, fragment.count());
  }
  const uint64_t offset = uint64_t{next_fragment_} * fragment_bytes_;
  if (fragment.offset() != offset) return FragmentSize("offset", offset, fragment.offset());
  const uint64_t length = std::min(fragment_bytes_, payload_bytes_ - offset);
  if (fragment.data().size() != length) {
    return FragmentSize("a length of", length, fragment.data().size());
  }
  return CheckChecksum(fragment);
}

void FrameAssembler::CopyIn(absl::string_view data) {
  uint64_t skip = uint64_t{next_fragment_} * fragment_bytes_;
  for (const TensorSpec& spec : expectation_.schema.tensors) {
    absl::Span<char> tensor;
    switch (TensorOf(spec)) {
      case Tensor::kResidual:
        tensor = absl::MakeSpan(reinterpret_cast<char*>(pending_->residual.data()),
                                pending_->residual.size() * sizeof(float));
        break;
      case Tensor::kPositions:
        tensor = absl::MakeSpan(reinterpret_cast<char*>(positions_.data()),
                                positions_.size() * sizeof(int32_t));
        break;
      case Tensor::kTokenIds:
        tensor = absl::MakeSpan(reinterpret_cast<char*>(pending_->token_ids.data()),
                                pending_->token_ids.size() * sizeof(int32_t));
        break;
      case Tensor::kUnknown:
        break;
    }
    if (skip >= tensor.size()) {
      skip -= tensor.size();
      continue;
    }
    tensor.remove_prefix(skip);
    skip = 0;
    const size_t size = std::min(tensor.size(), data.size());
    std::memcpy(tensor.data(), data.data(), size);
    data.remove_prefix(size);
    if (data.empty()) return;
  }
}

void FrameAssembler::Reset() {
  pending_.reset();
  payload_bytes_ = 0;
  fragment_bytes_ = 0;
  next_fragment_ = 0;
  fragment_count_ = 0;
}

absl::Status FrameAssembler::Finish() {
  if (!pending_.has_value()) return absl::OkStatus();
  const absl::Status status =
      MakeError(v1::REASON_FRAGMENT_MISSING,
                absl::StrCat("expected fragment ", next_fragment_, " of ", fragment_count_,
                             " of step ", pending_->step, ", got the end of the stream"));
  Reset();
  return status;
}

uint64_t FrameAssembler::buffered_bytes() const { return payload_bytes_; }

absl::Status ParseMessage(absl::string_view bytes, uint64_t max_bytes,
                          google::protobuf::Message* message) {
  if (bytes.size() > max_bytes) {
    return MakeError(v1::REASON_FRAME_TOO_LARGE,
                     absl::StrCat("expected at most ", max_bytes, " bytes in a message, got ",
                                  bytes.size(), "; cut smaller fragments"));
  }
  if (absl::Status status = ScanMessage(bytes, *message->GetDescriptor()); !status.ok()) {
    return status;
  }
  if (!message->ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    return MakeError(v1::REASON_MALFORMED_MESSAGE,
                     absl::StrCat("expected a serialised ", message->GetDescriptor()->full_name(),
                                  ", got ", bytes.size(), " bytes that cannot be parsed"));
  }
  return absl::OkStatus();
}

v1::SamplingParams ToProto(const SamplingParams& params) {
  // What is off stays unset, so that equal parameters have equal bytes.
  v1::SamplingParams proto;
  proto.set_temperature(params.temperature);
  proto.set_top_k(params.top_k);
  proto.set_top_p(params.top_p == 1.0f ? 0.0f : params.top_p);
  proto.set_min_p(params.min_p);
  proto.set_repetition_penalty(params.repetition_penalty == 1.0f ? 0.0f
                                                                 : params.repetition_penalty);
  proto.set_frequency_penalty(params.frequency_penalty);
  proto.set_presence_penalty(params.presence_penalty);
  proto.set_penalty_last_n(
      params.penalty_last_n == SamplingParams().penalty_last_n ? 0 : params.penalty_last_n);
  proto.set_seed(params.seed);
  for (const auto& [id, bias] : params.logit_bias) {
    v1::LogitBias* entry = proto.add_logit_bias();
    entry->set_token_id(id);
    entry->set_bias(bias);
  }
  proto.set_top_logprobs(params.top_logprobs);
  proto.set_logprobs(params.logprobs);
  proto.set_grammar(params.grammar);
  proto.set_json_schema(params.json_schema);
  return proto;
}

absl::StatusOr<SamplingParams> FromProto(const v1::SamplingParams& params,
                                         uint32_t vocabulary_size) {
  SamplingParams result;
  result.temperature = params.temperature();
  result.top_k = params.top_k();
  if (params.top_p() != 0.0f) result.top_p = params.top_p();
  result.min_p = params.min_p();
  if (params.repetition_penalty() != 0.0f) result.repetition_penalty = params.repetition_penalty();
  result.frequency_penalty = params.frequency_penalty();
  result.presence_penalty = params.presence_penalty();
  if (params.penalty_last_n() != 0) result.penalty_last_n = params.penalty_last_n();
  result.seed = params.seed();
  result.logit_bias.reserve(static_cast<size_t>(params.logit_bias_size()));
  for (const v1::LogitBias& bias : params.logit_bias()) {
    result.logit_bias.emplace_back(bias.token_id(), bias.bias());
  }
  result.top_logprobs = params.top_logprobs();
  result.logprobs = params.logprobs();
  result.grammar = params.grammar();
  result.json_schema = params.json_schema();
  if (absl::Status status = ValidateSampling(result, vocabulary_size); !status.ok()) return status;
  return result;
}

v1::SampledToken ToProto(const SampledToken& token) {
  v1::SampledToken proto;
  proto.set_token_id(token.token_id);
  if (token.logprob.has_value()) proto.set_logprob(*token.logprob);
  for (const TokenLogprob& top : token.top) {
    v1::TokenLogprob* entry = proto.add_top();
    entry->set_token_id(top.token_id);
    entry->set_logprob(top.logprob);
  }
  proto.set_end_of_generation(token.end_of_generation);
  return proto;
}

absl::StatusOr<SampledToken> FromProto(const v1::SampledToken& token, uint32_t vocabulary_size) {
  const auto check = [vocabulary_size](int32_t id, float logprob) {
    if (id < 0 || static_cast<uint32_t>(id) >= vocabulary_size) {
      return MakeError(v1::REASON_TOKEN_OUT_OF_RANGE,
                       absl::StrCat("expected token ids in [0, ", vocabulary_size, "), got ", id));
    }
    // -inf is the log-probability of a token that the model rules out.
    if (std::isnan(logprob) || (std::isinf(logprob) && logprob > 0)) {
      return MakeError(
          v1::REASON_NON_FINITE_VALUE,
          absl::StrCat("expected a log-probability for token ", id, ", got ", logprob));
    }
    return absl::OkStatus();
  };
  if (token.top_size() > kMaxTopLogprobs) {
    return OutOfBounds("the number of top tokens", "[0, 20]",
                       static_cast<uint64_t>(token.top_size()));
  }
  SampledToken result;
  result.token_id = token.token_id();
  if (absl::Status status = check(token.token_id(), token.logprob()); !status.ok()) return status;
  if (token.has_logprob()) result.logprob = token.logprob();
  for (const v1::TokenLogprob& top : token.top()) {
    if (absl::Status status = check(top.token_id(), top.logprob()); !status.ok()) return status;
    result.top.push_back({top.token_id(), top.logprob()});
  }
  result.end_of_generation = token.end_of_generation();
  return result;
}

v1::BoundarySchema ToProto(const BoundarySchema& schema) {
  v1::BoundarySchema proto;
  proto.set_name(schema.name);
  proto.set_version(schema.version);
  for (const TensorSpec& spec : schema.tensors) {
    v1::TensorSpec* tensor = proto.add_tensors();
    tensor->set_name(spec.name);
    tensor->set_dtype(ToProto(spec.dtype));
    for (const int64_t extent : spec.shape) tensor->add_shape(extent);
  }
  return proto;
}

v1::Capability ToProto(const Capability& capability) {
  v1::Capability proto;
  proto.set_schema_version(kSchemaVersion);
  proto.set_engine(capability.engine);
  proto.set_architecture(capability.architecture);
  proto.set_artifact_sha256(capability.artifact_sha256);
  for (const auto& [name, value] : capability.recipe) {
    v1::RecipeField* field = proto.mutable_recipe()->add_fields();
    field->set_name(name);
    field->set_value(value);
  }
  proto.mutable_recipe()->set_fingerprint(capability.recipe_fingerprint);
  *proto.mutable_range() = ToProto(capability.range);
  proto.set_model_layers(capability.model_layers);
  if (capability.boundary_in.has_value()) {
    *proto.mutable_boundary_in() = ToProto(*capability.boundary_in);
  }
  if (capability.boundary_out.has_value()) {
    *proto.mutable_boundary_out() = ToProto(*capability.boundary_out);
  }
  proto.mutable_limits()->set_max_step_tokens(capability.max_step_tokens);
  proto.set_max_sessions(capability.max_sessions);
  proto.set_context_tokens(capability.context_tokens);
  proto.set_batch_policy(capability.batch_policy == BatchPolicy::kShared ? v1::BATCH_POLICY_SHARED
                                                                         : v1::BATCH_POLICY_EXACT);
  proto.set_evidence(capability.evidence == Evidence::kFixture ? v1::EVIDENCE_FIXTURE
                                                               : v1::EVIDENCE_DARK);
  proto.set_vocabulary_size(capability.vocabulary_size);
  proto.set_owned_tensor_bytes(capability.owned_tensor_bytes);
  proto.set_owned_tensors(capability.owned_tensors);
  return proto;
}

v1::LayerRange ToProto(const LayerRange& range) {
  v1::LayerRange proto;
  proto.set_begin(range.begin);
  proto.set_end(range.end);
  return proto;
}

absl::Status ValidateRoute(const v1::Route& route) {
  if (route.route_session_id().size() != kSessionIdBytes) {
    return RouteInvalid(absl::StrCat("expected 16 bytes of route_session_id, got ",
                                     route.route_session_id().size()));
  }
  if (route.route_epoch() == 0) return RouteInvalid("expected a route_epoch of at least 1, got 0");
  if (!IsIdentifier(route.recipe_fingerprint())) {
    return RouteInvalid(absl::StrCat("expected a recipe_fingerprint of 1-64 bytes, got ",
                                     Quoted(route.recipe_fingerprint())));
  }
  if (!IsIdentifier(route.artifact_sha256())) {
    return RouteInvalid(absl::StrCat("expected an artifact_sha256 of 1-64 bytes, got ",
                                     Quoted(route.artifact_sha256())));
  }
  if (route.hops_size() < 1 || route.hops_size() > kMaxHops) {
    return RouteInvalid(absl::StrCat("expected 1 to 64 hops, got ", route.hops_size()));
  }
  uint32_t next = 0;
  for (int i = 0; i < route.hops_size(); ++i) {
    const v1::Hop& hop = route.hops(i);
    // Nobody on the route dials the head.
    if ((i > 0 && hop.endpoint().empty()) || hop.endpoint().size() > kMaxEndpointBytes) {
      return RouteInvalid(absl::StrCat("expected an endpoint of 1-255 bytes for hop ", i, ", got ",
                                       hop.endpoint().size(), " bytes"));
    }
    if (!hop.relay_peer_id().empty()) {
      const absl::Status peer = ValidatePeerId(hop.relay_peer_id());
      if (!peer.ok()) return RouteInvalid(absl::StrCat("hop ", i, ": ", peer.message()));
    }
    if (hop.route_token().size() > kMaxRouteTokenBytes) {
      return RouteInvalid(absl::StrCat("expected a route_token of at most ", kMaxRouteTokenBytes,
                                       " bytes for hop ", i, ", got ", hop.route_token().size()));
    }
    if (hop.range().begin() != next || hop.range().end() <= hop.range().begin()) {
      return RouteInvalid(absl::StrCat("expected hop ", i, " to begin at layer ", next,
                                       " and hold at least one layer, got [", hop.range().begin(),
                                       ", ", hop.range().end(), ")"));
    }
    next = hop.range().end();
  }
  if (next != route.model_layers()) {
    return RouteInvalid(absl::StrCat("expected the hops to cover [0, ", route.model_layers(),
                                     "), got [0, ", next, ")"));
  }
  return absl::OkStatus();
}

absl::Status ValidateWorkId(absl::string_view work_id) {
  if (IsIdentifier(work_id)) return absl::OkStatus();
  return MakeError(v1::REASON_FIELD_OUT_OF_BOUNDS,
                   absl::StrCat("expected a work_id of 1-64 bytes of [A-Za-z0-9._:-], got ",
                                Quoted(work_id), " (", work_id.size(), " bytes)"));
}

absl::Status ValidatePeerId(absl::string_view peer_id) {
  if (IsIdentifier(peer_id, kMaxPeerIdBytes)) return absl::OkStatus();
  return MakeError(v1::REASON_FIELD_OUT_OF_BOUNDS,
                   absl::StrCat("expected a peer id of 1-128 bytes of [A-Za-z0-9._:-], got ",
                                Quoted(peer_id), " (", peer_id.size(), " bytes)"));
}

}  // namespace meshnet
