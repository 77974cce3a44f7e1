// Which mixtures of two lanes this worker has evidence of.
//
//   auto mixtures = Mixtures::FromRecords(records, public_keys_pem);
//   mixtures->Check(route.recipe_fingerprint(), capability, hop_index, hop_count, absl::Now());
//
// A mixture is a route whose first workers are of one lane, the head's, and whose last are of
// another, the tail's. Their recipes differ in what belongs to a lane alone (backend, its build and
// kernels, device, driver); all else is the same. The evidence is a signed record for exactly these
// two recipes in this order (python/meshnet/certification.py, version 2), and a route names it by
// the mixture's fingerprint in the place of a recipe's.
#ifndef MESHNET_CC_WORKER_MIXTURES_H_
#define MESHNET_CC_WORKER_MIXTURES_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "cc/shard_engine/shard_engine.h"

namespace meshnet::worker {

// SHA-256 in lower-case hex over "mixed/1" and the three fingerprints, a line each.
std::string MixedFingerprint(absl::string_view shared, absl::string_view head,
                             absl::string_view tail);

// The fingerprint of a recipe without the fields in which the lanes of a mixture may differ. A
// field that this version does not know must be equal.
std::string SharedFingerprint(const std::vector<std::pair<std::string, std::string>>& recipe);

class Mixtures {
 public:
  // Of none: every mixture is refused.
  Mixtures() = default;

  // `records` are certification records, one a line; those that are for no mixture are passed over.
  // CONFIGURATION_INVALID: one is malformed, or signed by none of the keys.
  static absl::StatusOr<Mixtures> FromRecords(absl::string_view records,
                                              absl::string_view public_keys_pem);

  // Whether a worker may be this hop of a route under a fingerprint that is not its recipe's. OK
  // for a mixture that it is part of, whose newest record certifies it now. Otherwise
  // RECIPE_MISMATCH, saying what was expected and what to do.
  absl::Status Check(const std::string& fingerprint, const Capability& capability,
                     uint32_t hop_index, uint32_t hop_count, absl::Time now) const;

  size_t size() const { return newest_.size(); }

 private:
  struct Record {
    std::string id;
    std::string head;
    std::string tail;
    std::string shared;
    int64_t issued_ms = 0;
    int64_t expires_ms = 0;  // 0 = never
    bool is_certified = false;
  };

  // By the mixture's fingerprint.
  std::map<std::string, Record> newest_;
};

}  // namespace meshnet::worker

#endif  // MESHNET_CC_WORKER_MIXTURES_H_
