#include "cc/common/checksum.h"

#include <cstdint>

// Header only: no libxxhash to link, and the compiler sees through it.
#define XXH_INLINE_ALL
#include "absl/strings/string_view.h"
#include "xxhash.h"

namespace meshnet {

uint64_t Checksum(absl::string_view data) { return XXH3_64bits(data.data(), data.size()); }

}  // namespace meshnet
