// The checksum of a fragment: XXH3-64 with seed 0.
#ifndef MESHNET_CC_COMMON_CHECKSUM_H_
#define MESHNET_CC_COMMON_CHECKSUM_H_

#include <cstdint>

#include "absl/strings/string_view.h"

namespace meshnet {

uint64_t Checksum(absl::string_view data);

}  // namespace meshnet

#endif  // MESHNET_CC_COMMON_CHECKSUM_H_
