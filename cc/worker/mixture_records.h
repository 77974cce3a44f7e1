// Signed certification records for mixtures, for tests.
#ifndef MESHNET_CC_WORKER_MIXTURE_RECORDS_H_
#define MESHNET_CC_WORKER_MIXTURE_RECORDS_H_

#include <cstdint>
#include <string>

#include "cc/common/ed25519_signer.h"

namespace meshnet::worker {

struct MixtureRecord {
  std::string shared;
  std::string head;
  std::string tail;
  int64_t issued_ms = 1;
  int64_t expires_ms = 0;
  std::string status = "certified";
};

// The canonical line. What it says need not be true: the fingerprint is that of the three.
std::string SignMixture(const Ed25519Signer& signer, const MixtureRecord& record);

}  // namespace meshnet::worker

#endif  // MESHNET_CC_WORKER_MIXTURE_RECORDS_H_
