// SHA-256 (FIPS 180-4), for fingerprints: a few kilobytes at a time, no library needed.
#ifndef MESHNET_CC_COMMON_SHA256_H_
#define MESHNET_CC_COMMON_SHA256_H_

#include <string>

#include "absl/strings/string_view.h"

namespace meshnet {

// Lower-case hex, 64 digits.
std::string Sha256Hex(absl::string_view data);

}  // namespace meshnet

#endif  // MESHNET_CC_COMMON_SHA256_H_
