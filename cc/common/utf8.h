// UTF-8 as protobuf strings must be.
#ifndef MESHNET_CC_COMMON_UTF8_H_
#define MESHNET_CC_COMMON_UTF8_H_

#include <cstddef>

#include "absl/strings/string_view.h"

namespace meshnet {

// Bytes of the character that `text`, which is not empty, starts with; 0 if it is none.
size_t Utf8CharacterBytes(absl::string_view text);

bool IsValidUtf8(absl::string_view text);

}  // namespace meshnet

#endif  // MESHNET_CC_COMMON_UTF8_H_
