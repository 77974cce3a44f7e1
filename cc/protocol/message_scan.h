// Walks a serialised message along its descriptor without parsing it, so that hostile bytes are
// refused before a parser allocates for them.
#ifndef MESHNET_CC_PROTOCOL_MESSAGE_SCAN_H_
#define MESHNET_CC_PROTOCOL_MESSAGE_SCAN_H_

#include <cstddef>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "google/protobuf/descriptor.h"

namespace meshnet {

// Submessages and repeated elements (other than 32-bit numbers) that one message may hold: what
// bounds a parser's memory to a small multiple of the message's own size.
inline constexpr size_t kMaxMessageElements = 2048;

// The first fault in the order of the bytes:
//   MALFORMED_MESSAGE    bytes end early, a varint, tag or length is too long, a group, a wire type
//                        that does not exist, a string that is not UTF-8
//   UNKNOWN_FIELD        a number that the descriptor does not have, or has with another wire type
//   FIELD_OUT_OF_BOUNDS  more than kMaxMessageElements
absl::Status ScanMessage(absl::string_view bytes, const google::protobuf::Descriptor& type);

}  // namespace meshnet

#endif  // MESHNET_CC_PROTOCOL_MESSAGE_SCAN_H_
