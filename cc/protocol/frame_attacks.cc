#include "cc/protocol/frame_attacks.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "cc/common/checksum.h"
#include "cc/shard_engine/shard_engine.h"
#include "google/protobuf/repeated_field.h"

namespace meshnet {
namespace {

constexpr uint32_t kEmbd = 12;
constexpr uint32_t kVocabulary = 500;
constexpr uint32_t kContext = 256;
constexpr uint32_t kMaxTokens = 16;
constexpr uint64_t kEpoch = 5;
constexpr uint64_t kMaxFrameBytes = 8192;
constexpr uint64_t kMaxBundleBytes = 16384;

void Seal(v1::Frame* frame) {
  frame->mutable_fragment()->set_checksum(Checksum(frame->fragment().data()));
}

// Cuts a one-frame bundle into fragments of `length` bytes.
std::vector<v1::Frame> Cut(const v1::Frame& whole, uint64_t length) {
  const std::string& payload = whole.fragment().data();
  const uint64_t count = (payload.size() + length - 1) / length;
  std::vector<v1::Frame> frames;
  for (uint64_t i = 0; i < count; ++i) {
    v1::Frame frame;
    if (i == 0) frame = whole;
    frame.set_schema_version(whole.schema_version());
    frame.set_work_id(whole.work_id());
    frame.set_route_session_id(whole.route_session_id());
    frame.set_route_epoch(whole.route_epoch());
    frame.set_step(whole.step());
    v1::Fragment* fragment = frame.mutable_fragment();
    fragment->set_index(static_cast<uint32_t>(i));
    fragment->set_count(static_cast<uint32_t>(count));
    fragment->set_offset(i * length);
    fragment->set_data(payload.substr(i * length, length));
    Seal(&frame);
    frames.push_back(std::move(frame));
  }
  return frames;
}

std::string Varint(uint64_t value) {
  std::string bytes;
  for (; value >= 0x80; value >>= 7) bytes.push_back(static_cast<char>(value | 0x80));
  bytes.push_back(static_cast<char>(value));
  return bytes;
}

Attack Make(v1::Reason reason, const std::vector<v1::Frame>& frames, size_t count,
            const std::string& suffix = "") {
  Attack attack;
  attack.reason = reason;
  for (size_t i = 0; i < count; ++i) attack.messages.push_back(frames[i].SerializeAsString());
  attack.messages.back() += suffix;
  return attack;
}

// Changes a bundle's first frame.
MakeAttack First(v1::Reason reason, std::function<void(Rng*, v1::Frame*)> change) {
  return [reason, change = std::move(change)](Rng* rng) {
    std::vector<v1::Frame> frames = GoodFrames(rng);
    change(rng, &frames[0]);
    return Make(reason, frames, 1);
  };
}

// Changes any frame of a bundle.
MakeAttack Any(v1::Reason reason, std::function<void(Rng*, v1::Frame*)> change) {
  return [reason, change = std::move(change)](Rng* rng) {
    std::vector<v1::Frame> frames = GoodFrames(rng);
    const size_t which = rng->Between(0, frames.size() - 1);
    change(rng, &frames[which]);
    return Make(reason, frames, which + 1);
  };
}

// Overwrites four bytes of a whole payload, cuts it anew and sends everything.
MakeAttack Content(v1::Reason reason,
                   std::function<void(Rng*, const v1::Frame&, size_t*, uint32_t*)> choose) {
  return [reason, choose = std::move(choose)](Rng* rng) {
    std::vector<v1::Frame> frames = GoodFrames(rng);
    std::string payload;
    for (const v1::Frame& frame : frames) payload += frame.fragment().data();
    size_t offset = 0;
    uint32_t bits = 0;
    choose(rng, frames[0], &offset, &bits);
    std::memcpy(&payload[offset], &bits, sizeof(bits));
    const uint64_t length = frames[0].fragment().data().size();
    v1::Frame whole = frames[0];
    whole.mutable_fragment()->set_data(payload);
    const std::vector<v1::Frame> cut = Cut(whole, length);
    return Make(reason, cut, cut.size());
  };
}

// A field of a number at or above `from`, of any wire type.
std::string RandomField(Rng* rng, uint64_t from) {
  const uint64_t number = rng->Between(from, (1 << 29) - 1);
  switch (rng->Between(0, 3)) {
    case 0:
      return Varint(number << 3) + Varint(rng->Between(0, ~uint64_t{0}));
    case 1:
      return Varint(number << 3 | 1) + rng->Bytes(8);
    case 2:
      return Varint(number << 3 | 5) + rng->Bytes(4);
    default:
      return Delimited(number, rng->Bytes(rng->Between(0, 40)));
  }
}

uint32_t Other(Rng* rng, uint32_t value) {
  return value + static_cast<uint32_t>(rng->Between(1, ~uint32_t{0}));
}

// 0, or anything that is not 1 to `known`.
int UnknownEnum(Rng* rng, int known) {
  if (rng->Coin()) return 0;
  const auto value = static_cast<int>(rng->Between(static_cast<uint64_t>(known) + 1, INT32_MAX));
  return rng->Coin() ? value : -value;
}

float NotFinite(Rng* rng) {
  const uint32_t bits = 0x7f800000u | static_cast<uint32_t>(rng->Between(0, (1 << 23) - 1)) |
                        (rng->Coin() ? 0x80000000u : 0u);
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

void SetSampling(v1::Frame* frame) {
  frame->set_output_rows(v1::OUTPUT_ROWS_LAST);
  frame->mutable_sampling();
}

std::map<std::string, MakeAttack> BytesKinds() {
  std::map<std::string, MakeAttack> kinds;
  for (const auto& [name, ending] : BadEndings(kMaxFrameBytes)) {
    kinds[name] = [ending = ending](Rng* rng) {
      const auto frames = GoodFrames(rng);
      return Make(ending.reason, frames, 1, ending.make(rng));
    };
  }
  kinds["unknown_field_in_a_submessage"] = [](Rng* rng) {
    const auto frames = GoodFrames(rng);
    static constexpr uint64_t kParents[] = {7, 10, 12, 16, 17, 18};
    return Make(v1::REASON_UNKNOWN_FIELD, frames, 1,
                Delimited(kParents[rng->Between(0, 5)], RandomField(rng, 13)));
  };
  kinds["wrong_wire_type"] = [](Rng* rng) {
    const auto frames = GoodFrames(rng);
    // Fields 2 to 4 are a string, bytes and a number.
    const uint64_t number = rng->Between(2, 4);
    const std::string field = Varint(number << 3 | 5) + rng->Bytes(4);
    return Make(v1::REASON_UNKNOWN_FIELD, frames, 1, field);
  };
  kinds["truncated"] = [](Rng* rng) {
    const auto frames = GoodFrames(rng);
    Attack attack = Make(v1::REASON_MALFORMED_MESSAGE, frames, 1);
    // The fragment comes last and holds at least its data.
    const size_t cut = rng->Between(1, frames[0].fragment().data().size());
    attack.messages[0].resize(attack.messages[0].size() - cut);
    return attack;
  };
  kinds["no_utf8"] = [](Rng* rng) {
    const auto frames = GoodFrames(rng);
    return Make(v1::REASON_MALFORMED_MESSAGE, frames, 1,
                Delimited(rng->Coin() ? 2 : 14, "a" + std::string(rng->Between(1, 9), '\xff')));
  };
  kinds["too_many_elements"] = [](Rng* rng) {
    std::string bytes;
    const std::string element = Delimited(rng->Coin() ? 7 : 10, "");
    for (int i = 0; i < 2049; ++i) bytes += element;
    return Attack{
        {bytes + rng->Bytes(rng->Between(0, 100))}, false, v1::REASON_FIELD_OUT_OF_BOUNDS};
  };
  return kinds;
}

std::map<std::string, MakeAttack> IdentityKinds() {
  std::map<std::string, MakeAttack> kinds;
  kinds["schema_version"] = Any(v1::REASON_SCHEMA_VERSION_UNSUPPORTED, [](Rng* rng, v1::Frame* f) {
    f->set_schema_version(Other(rng, 1));
  });
  kinds["reserved_state"] = Any(v1::REASON_RESERVED_FIELD_SET, [](Rng* rng, v1::Frame* f) {
    v1::MtpBoundary* mtp = f->mutable_reserved_state()->mutable_mtp();
    if (rng->Coin()) mtp->mutable_hidden()->set_byte_length(rng->Between(0, 1 << 20));
    if (rng->Coin()) mtp->set_draft_position(static_cast<uint32_t>(rng->Between(0, 5000)));
  });
  kinds["work_id"] = Any(v1::REASON_FIELD_OUT_OF_BOUNDS, [](Rng* rng, v1::Frame* f) {
    f->set_work_id(rng->Coin() ? std::string(rng->Between(65, 200), 'w') : "fuzz\xC3\xA9");
  });
  kinds["session_size"] = Any(v1::REASON_FIELD_OUT_OF_BOUNDS, [](Rng* rng, v1::Frame* f) {
    f->set_route_session_id(rng->Bytes(rng->Coin() ? rng->Between(0, 15) : rng->Between(17, 99)));
  });
  kinds["session"] = Any(v1::REASON_SESSION_UNKNOWN, [](Rng* rng, v1::Frame* f) {
    f->set_route_session_id(rng->Bytes(15) + "x");
  });
  kinds["stale_epoch"] = Any(v1::REASON_STALE_EPOCH, [](Rng* rng, v1::Frame* f) {
    f->set_route_epoch(rng->Between(1, kEpoch - 1));
  });
  kinds["later_epoch"] = Any(v1::REASON_SESSION_UNKNOWN, [](Rng* rng, v1::Frame* f) {
    f->set_route_epoch(rng->Between(kEpoch + 1, ~uint64_t{0}));
  });
  kinds["zero_step"] =
      Any(v1::REASON_FIELD_OUT_OF_BOUNDS, [](Rng*, v1::Frame* f) { f->set_step(0); });
  return kinds;
}

std::map<std::string, MakeAttack> HeaderKinds() {
  std::map<std::string, MakeAttack> kinds;
  kinds["phase"] = First(v1::REASON_UNKNOWN_ENUM_VALUE, [](Rng* rng, v1::Frame* f) {
    f->set_phase(static_cast<v1::Phase>(UnknownEnum(rng, 2)));
  });
  kinds["output_rows"] = First(v1::REASON_UNKNOWN_ENUM_VALUE, [](Rng* rng, v1::Frame* f) {
    f->set_output_rows(static_cast<v1::OutputRows>(UnknownEnum(rng, 2)));
  });
  kinds["applied"] = First(v1::REASON_RANGE_MISMATCH, [](Rng* rng, v1::Frame* f) {
    if (rng->Coin()) {
      f->mutable_applied()->set_end(Other(rng, 3));
    } else {
      f->mutable_applied()->set_begin(Other(rng, 0));
    }
  });
  kinds["token_count"] = First(v1::REASON_FIELD_OUT_OF_BOUNDS, [](Rng* rng, v1::Frame* f) {
    f->set_token_count(
        rng->Coin() ? 0 : static_cast<uint32_t>(rng->Between(kMaxTokens + 1, ~uint32_t{0})));
  });
  kinds["context"] = First(v1::REASON_CONTEXT_EXCEEDED, [](Rng* rng, v1::Frame* f) {
    f->set_start_position(static_cast<uint32_t>(rng->Between(kContext, ~uint32_t{0})));
  });
  kinds["cache"] = First(v1::REASON_FIELD_OUT_OF_BOUNDS, [](Rng* rng, v1::Frame* f) {
    f->mutable_cache()->set_cached_tokens(Other(rng, f->start_position()));
  });
  kinds["sampling_float"] = First(v1::REASON_SAMPLING_INVALID, [](Rng* rng, v1::Frame* f) {
    SetSampling(f);
    const float bad = rng->Coin() ? std::fabs(NotFinite(rng)) : 11.0f;
    switch (rng->Between(0, 5)) {
      case 0:
        return f->mutable_sampling()->set_temperature(bad);
      case 1:
        return f->mutable_sampling()->set_top_p(bad);
      case 2:
        return f->mutable_sampling()->set_min_p(-bad);
      case 3:
        return f->mutable_sampling()->set_repetition_penalty(bad);
      case 4:
        return f->mutable_sampling()->set_frequency_penalty(-bad);
      default:
        return f->mutable_sampling()->set_presence_penalty(bad);
    }
  });
  kinds["sampling_bias"] = First(v1::REASON_SAMPLING_INVALID, [](Rng* rng, v1::Frame* f) {
    SetSampling(f);
    v1::LogitBias* bias = f->mutable_sampling()->add_logit_bias();
    bias->set_token_id(static_cast<int32_t>(rng->Between(kVocabulary, INT32_MAX)) *
                       (rng->Coin() ? 1 : -1));
  });
  kinds["schema"] = First(v1::REASON_BOUNDARY_SCHEMA_MISMATCH, [](Rng* rng, v1::Frame* f) {
    if (rng->Coin()) {
      f->set_boundary_version(Other(rng, 1));
    } else {
      f->mutable_boundary_schema()->append(rng->Between(1, 30), 'x');
    }
  });
  return kinds;
}

std::map<std::string, MakeAttack> TensorKinds() {
  const auto tensor = [](Rng* rng, v1::Frame* f) {
    return f->mutable_tensors(static_cast<int>(rng->Between(0, 2)));
  };
  std::map<std::string, MakeAttack> kinds;
  kinds["tensor_missing"] = First(v1::REASON_TENSOR_MISSING, [](Rng* rng, v1::Frame* f) {
    f->mutable_tensors()->DeleteSubrange(static_cast<int>(rng->Between(0, 2)), 1);
  });
  kinds["tensor_duplicate"] = First(v1::REASON_TENSOR_DUPLICATE, [](Rng* rng, v1::Frame* f) {
    *f->add_tensors() = f->tensors(static_cast<int>(rng->Between(0, 2)));
  });
  kinds["tensor_unexpected"] = First(v1::REASON_TENSOR_UNEXPECTED, [=](Rng* rng, v1::Frame* f) {
    tensor(rng, f)->set_name(std::string(rng->Between(0, 300), 't'));
  });
  kinds["tensor_order"] = First(v1::REASON_TENSOR_UNEXPECTED, [](Rng* rng, v1::Frame* f) {
    const int first = static_cast<int>(rng->Between(0, 1));
    f->mutable_tensors()->SwapElements(first, static_cast<int>(rng->Between(first + 1, 2)));
  });
  kinds["dtype"] = First(v1::REASON_DTYPE_MISMATCH, [=](Rng* rng, v1::Frame* f) {
    tensor(rng, f)->set_dtype(static_cast<v1::DType>(rng->Between(3, 4)));
  });
  kinds["dtype_unknown"] = First(v1::REASON_UNKNOWN_ENUM_VALUE, [=](Rng* rng, v1::Frame* f) {
    tensor(rng, f)->set_dtype(static_cast<v1::DType>(UnknownEnum(rng, 4)));
  });
  kinds["byte_order"] = First(v1::REASON_BYTE_ORDER_UNSUPPORTED, [=](Rng* rng, v1::Frame* f) {
    tensor(rng, f)->set_byte_order(static_cast<v1::ByteOrder>(rng->Between(2, INT32_MAX)));
  });
  kinds["compression"] = First(v1::REASON_COMPRESSION_UNSUPPORTED, [=](Rng* rng, v1::Frame* f) {
    tensor(rng, f)->set_compression(static_cast<v1::Compression>(rng->Between(2, INT32_MAX)));
  });
  kinds["huge_declared_size"] = First(v1::REASON_BUNDLE_TOO_LARGE, [=](Rng* rng, v1::Frame* f) {
    tensor(rng, f)->set_byte_length(
        rng->Between(kMaxBundleBytes + 1, rng->Coin() ? ~uint64_t{0} : uint64_t{1} << 33));
  });
  kinds["shape_extent"] = First(v1::REASON_SHAPE_MISMATCH, [=](Rng* rng, v1::Frame* f) {
    v1::TensorHeader* header = tensor(rng, f);
    const auto axis =
        static_cast<int>(rng->Between(0, static_cast<uint64_t>(header->shape_size()) - 1));
    header->set_shape(axis, header->shape(axis) + rng->Between(1, ~uint64_t{0}));
  });
  kinds["shape_rank"] = First(v1::REASON_SHAPE_MISMATCH, [=](Rng* rng, v1::Frame* f) {
    v1::TensorHeader* header = tensor(rng, f);
    const uint64_t more = rng->Between(0, 1000);
    if (more == 0) header->clear_shape();
    for (uint64_t i = 0; i < more; ++i) header->add_shape(1);
  });
  kinds["declared_size"] = First(v1::REASON_SIZE_MISMATCH, [=](Rng* rng, v1::Frame* f) {
    v1::TensorHeader* header = tensor(rng, f);
    // Small enough for the bundle's limit even beside the other tensors.
    const uint64_t wrong = rng->Between(0, kMaxBundleBytes / 4);
    header->set_byte_length(wrong == header->byte_length() ? wrong + 1 : wrong);
  });
  return kinds;
}

std::map<std::string, MakeAttack> FragmentKinds() {
  std::map<std::string, MakeAttack> kinds;
  kinds["checksum"] = Any(v1::REASON_CHECKSUM_MISMATCH, [](Rng* rng, v1::Frame* f) {
    f->mutable_fragment()->set_checksum(f->fragment().checksum() ^ uint64_t{1}
                                                                       << rng->Between(0, 63));
  });
  kinds["flipped_data"] = Any(v1::REASON_CHECKSUM_MISMATCH, [](Rng* rng, v1::Frame* f) {
    std::string* data = f->mutable_fragment()->mutable_data();
    (*data)[rng->Between(0, data->size() - 1)] ^= static_cast<char>(1 << rng->Between(0, 7));
  });
  kinds["no_fragment"] =
      Any(v1::REASON_FRAGMENT_MISSING, [](Rng*, v1::Frame* f) { f->clear_fragment(); });
  kinds["no_data"] = Any(v1::REASON_FRAGMENT_SIZE_MISMATCH,
                         [](Rng*, v1::Frame* f) { f->mutable_fragment()->clear_data(); });
  kinds["fragment_offset"] = Any(v1::REASON_FRAGMENT_SIZE_MISMATCH, [](Rng* rng, v1::Frame* f) {
    f->mutable_fragment()->set_offset(f->fragment().offset() + rng->Between(1, ~uint64_t{0}));
  });
  kinds["fragment_count"] = Any(v1::REASON_FRAGMENT_SIZE_MISMATCH, [](Rng* rng, v1::Frame* f) {
    const uint32_t count = Other(rng, f->fragment().count());
    f->mutable_fragment()->set_count(count);
  });
  kinds["last_fragment_length"] = [](Rng* rng) {
    std::vector<v1::Frame> frames = GoodFrames(rng, 2);
    v1::Frame& last = frames.back();
    std::string* data = last.mutable_fragment()->mutable_data();
    if (data->size() > 1 && rng->Coin()) {
      data->resize(rng->Between(1, data->size() - 1));
    } else {
      *data += rng->Bytes(rng->Between(1, 64));
    }
    Seal(&last);
    return Make(v1::REASON_FRAGMENT_SIZE_MISMATCH, frames, frames.size());
  };
  kinds["shuffled"] = [](Rng* rng) {
    std::vector<v1::Frame> frames = GoodFrames(rng, 3);
    const size_t place = rng->Between(0, frames.size() - 2);
    std::swap(frames[place], frames[rng->Between(place + 1, frames.size() - 1)]);
    return Make(v1::REASON_FRAGMENT_OUT_OF_ORDER, frames, place + 1);
  };
  kinds["missing"] = [](Rng* rng) {
    std::vector<v1::Frame> frames = GoodFrames(rng, 3);
    const size_t lost = rng->Between(0, frames.size() - 1);
    frames.erase(frames.begin() + static_cast<std::ptrdiff_t>(lost));
    if (lost < frames.size()) return Make(v1::REASON_FRAGMENT_OUT_OF_ORDER, frames, lost + 1);
    Attack attack = Make(v1::REASON_FRAGMENT_MISSING, frames, frames.size());
    attack.finish = true;
    return attack;
  };
  kinds["duplicate"] = [](Rng* rng) {
    std::vector<v1::Frame> frames = GoodFrames(rng, 3, 1);
    // Not the first again after the last: that is the step's repetition.
    const size_t last = rng->Between(1, frames.size() - 1);
    const size_t again = rng->Between(last + 1 == frames.size() ? 1 : 0, last);
    frames.insert(frames.begin() + static_cast<std::ptrdiff_t>(last) + 1, frames[again]);
    return Make(v1::REASON_FRAGMENT_DUPLICATE, frames, last + 2);
  };
  kinds["interleaved"] = [](Rng* rng) {
    std::vector<v1::Frame> frames = GoodFrames(rng, 3, 1);
    const std::vector<v1::Frame> others = GoodFrames(rng, 3, 2);
    const size_t place = rng->Between(1, frames.size() - 1);
    frames[place] = others[rng->Between(0, others.size() - 1)];
    return Make(v1::REASON_FRAGMENT_OUT_OF_ORDER, frames, place + 1);
  };
  kinds["header_repeated"] = [](Rng* rng) {
    std::vector<v1::Frame> frames = GoodFrames(rng, 2);
    const size_t place = rng->Between(1, frames.size() - 1);
    *frames[place].mutable_tensors() = frames[0].tensors();
    return Make(v1::REASON_FIELD_OUT_OF_BOUNDS, frames, place + 1);
  };
  return kinds;
}

std::map<std::string, MakeAttack> ContentKinds() {
  std::map<std::string, MakeAttack> kinds;
  kinds["residual_not_finite"] =
      Content(v1::REASON_NON_FINITE_VALUE,
              [](Rng* rng, const v1::Frame& first, size_t* offset, uint32_t* bits) {
                *offset = 4 * rng->Between(0, first.token_count() * kEmbd - 1);
                const float value = NotFinite(rng);
                std::memcpy(bits, &value, sizeof(value));
              });
  kinds["position"] = Content(v1::REASON_POSITION_MISMATCH, [](Rng* rng, const v1::Frame& first,
                                                               size_t* offset, uint32_t* bits) {
    const uint64_t row = rng->Between(0, first.token_count() - 1);
    *offset = 4 * (first.token_count() * kEmbd + row);
    *bits = Other(rng, static_cast<uint32_t>(first.start_position() + row));
  });
  kinds["position_nan"] = Content(v1::REASON_POSITION_MISMATCH, [](Rng* rng, const v1::Frame& first,
                                                                   size_t* offset, uint32_t* bits) {
    *offset = 4 * (first.token_count() * kEmbd + rng->Between(0, first.token_count() - 1));
    const float value = NotFinite(rng);
    std::memcpy(bits, &value, sizeof(value));
  });
  kinds["token"] = Content(v1::REASON_TOKEN_OUT_OF_RANGE, [](Rng* rng, const v1::Frame& first,
                                                             size_t* offset, uint32_t* bits) {
    *offset = 4 * (first.token_count() * (kEmbd + 1) + rng->Between(0, first.token_count() - 1));
    *bits = static_cast<uint32_t>(rng->Between(kVocabulary, ~uint32_t{0}));
  });
  return kinds;
}

}  // namespace

FrameExpectation AttackedSeam() {
  FrameExpectation expectation;
  expectation.work_id = "fuzz";
  expectation.session = {std::string(16, 's'), kEpoch};
  expectation.schema = DenseResidualSchema(kEmbd);
  expectation.applied = {0, 3};
  expectation.vocabulary_size = kVocabulary;
  expectation.context_tokens = kContext;
  expectation.limits = {kMaxFrameBytes, kMaxBundleBytes, kMaxTokens, 4};
  return expectation;
}

std::vector<v1::Frame> GoodFrames(Rng* rng, size_t min_fragments, uint64_t number) {
  WireStep step;
  step.work_id = "fuzz";
  step.session = {std::string(16, 's'), kEpoch};
  step.step = number != 0 ? number : rng->Between(1, 1000);
  step.phase = rng->Coin() ? Phase::kPrefill : Phase::kDecode;
  step.applied = {0, 3};
  const auto tokens = static_cast<uint32_t>(rng->Between(1, kMaxTokens));
  step.start_position = static_cast<uint32_t>(rng->Between(0, kContext - tokens));
  for (uint32_t i = 0; i < tokens; ++i) {
    step.token_ids.push_back(static_cast<int32_t>(rng->Between(0, kVocabulary - 1)));
  }
  for (uint32_t i = 0; i < tokens * kEmbd; ++i) {
    step.residual.push_back(static_cast<float>(rng->Between(0, 1 << 16)) / 256.0f - 128.0f);
  }
  step.output_rows = rng->Coin() ? OutputRows::kLast : OutputRows::kNone;
  if (step.output_rows == OutputRows::kLast && rng->Coin()) {
    step.sampling.emplace();
    step.sampling->temperature = 0.5f;
    step.sampling->logit_bias = {{3, 1.0f}, {7, -std::numeric_limits<float>::infinity()}};
  }
  std::vector<v1::Frame> frames;
  const FrameExpectation expectation = AttackedSeam();
  if (!EncodeStep(step, expectation.schema, expectation.limits, &frames).ok()) std::abort();
  if (min_fragments == 1 && rng->Coin()) return frames;
  const uint64_t size = frames[0].fragment().data().size();
  const uint64_t longest = min_fragments > 1 ? (size - 1) / (min_fragments - 1) : size;
  return Cut(frames[0], rng->Between(1, 4) == 1 ? longest : rng->Between(1 + longest / 4, longest));
}

std::string Delimited(uint64_t number, const std::string& content) {
  return Varint(number << 3 | 2) + Varint(content.size()) + content;
}

std::map<std::string, BadEnding> BadEndings(uint64_t max_bytes) {
  return {
      {"unknown_field", {v1::REASON_UNKNOWN_FIELD, [](Rng* rng) { return RandomField(rng, 19); }}},
      {"group_or_no_wire_type",
       {v1::REASON_MALFORMED_MESSAGE,
        [](Rng* rng) {
          static constexpr uint64_t kTypes[] = {3, 4, 6, 7};
          return Varint(rng->Between(1, 1000) << 3 | kTypes[rng->Between(0, 3)]) + rng->Bytes(9);
        }}},
      {"endless_varint",
       {v1::REASON_MALFORMED_MESSAGE,
        [](Rng* rng) { return "\x20" + std::string(rng->Between(10, 30), '\xff'); }}},
      {"huge_length",
       {v1::REASON_MALFORMED_MESSAGE,
        [=](Rng* rng) {
          return Varint(rng->Between(1, 18) << 3 | 2) +
                 Varint(rng->Between(max_bytes, ~uint32_t{0})) + rng->Bytes(20);
        }}},
      {"frame_too_large",
       {v1::REASON_FRAME_TOO_LARGE,
        [=](Rng* rng) { return rng->Bytes(max_bytes + rng->Between(0, 1000)); }}},
  };
}

std::map<std::string, MakeAttack> FrameAttacks() {
  std::map<std::string, MakeAttack> all;
  for (auto& kinds : {BytesKinds(), IdentityKinds(), HeaderKinds(), TensorKinds(), FragmentKinds(),
                      ContentKinds()}) {
    for (const auto& [name, make] : kinds) {
      // A name that came twice would hide a kind.
      if (!all.emplace(name, make).second) std::abort();
    }
  }
  return all;
}

std::string Corrupt(std::string bytes, Rng* rng) {
  switch (rng->Between(0, 5)) {
    case 0:
      return rng->Bytes(rng->Between(0, 300));
    case 1:
      bytes.resize(rng->Between(0, bytes.size()));
      return bytes;
    case 2:
      bytes.insert(rng->Between(0, bytes.size()), rng->Bytes(rng->Between(1, 8)));
      return bytes;
    case 3: {
      const size_t from = rng->Between(0, bytes.size());
      bytes.erase(from, rng->Between(1, 8));
      return bytes;
    }
    case 4: {
      // The header is where a few bits change the most.
      const size_t end = std::min<size_t>(bytes.size(), 250);
      for (uint64_t flips = rng->Between(1, 4); flips > 0; --flips) {
        bytes[rng->Between(0, end - 1)] = rng->Byte();
      }
      return bytes;
    }
    default:
      for (uint64_t flips = rng->Between(1, 16); flips > 0; --flips) {
        bytes[rng->Between(0, bytes.size() - 1)] ^= static_cast<char>(1 << rng->Between(0, 7));
      }
      return bytes;
  }
}

}  // namespace meshnet
