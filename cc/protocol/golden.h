// The messages of tests/golden/golden.proto as the codec's own types, and back. For tests.
#ifndef MESHNET_CC_PROTOCOL_GOLDEN_H_
#define MESHNET_CC_PROTOCOL_GOLDEN_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "cc/protocol/frame_codec.h"
#include "tests/golden/golden.pb.h"

namespace meshnet {

// The bytes that a golden file has as hexadecimal digits, two a byte.
std::string BytesOfHex(absl::string_view digits);

FrameExpectation FromGolden(const golden::Expectation& message);
// SAMPLING_INVALID when the step's sampling does not fit the vocabulary.
absl::StatusOr<WireStep> FromGolden(const golden::Step& message, uint32_t vocabulary_size);
golden::Step ToGolden(const WireStep& step);

}  // namespace meshnet

#endif  // MESHNET_CC_PROTOCOL_GOLDEN_H_
