// Ed25519 signatures, checked by the TLS library.
//
//   auto keys = Ed25519Keys::FromPem(pem);                 // one public key or several
//   keys->Verify(key_id, "meshnet route token v1\n" + claim, signature)
#ifndef MESHNET_CC_COMMON_ED25519_H_
#define MESHNET_CC_COMMON_ED25519_H_

#include <map>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace meshnet {

class Ed25519Keys {
 public:
  // CONFIGURATION_INVALID unless `pem` holds public keys, all of them Ed25519.
  static absl::StatusOr<Ed25519Keys> FromPem(absl::string_view pem);

  // Whether the key with this id is here and made the signature. An id is the first 32 hex digits
  // of the SHA-256 of the key's 32 bytes.
  bool Verify(const std::string& key_id, absl::string_view message,
              absl::string_view signature) const;

 private:
  // 32 public bytes by key id.
  std::map<std::string, std::string> keys_;
};

}  // namespace meshnet

#endif  // MESHNET_CC_COMMON_ED25519_H_
