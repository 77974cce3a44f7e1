// Makes Ed25519 signatures, for tests of those who check them.
#ifndef MESHNET_CC_COMMON_ED25519_SIGNER_H_
#define MESHNET_CC_COMMON_ED25519_SIGNER_H_

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

struct evp_pkey_st;

namespace meshnet {

class Ed25519Signer {
 public:
  // The key whose 32 private bytes are `first`, `first` + 1, and so on.
  explicit Ed25519Signer(uint8_t first);
  ~Ed25519Signer();
  Ed25519Signer(const Ed25519Signer&) = delete;
  Ed25519Signer& operator=(const Ed25519Signer&) = delete;

  std::string PublicPem() const;
  // As in signatures: 32 hex digits.
  std::string KeyId() const;
  // 64 bytes.
  std::string Sign(absl::string_view message) const;

 private:
  evp_pkey_st* key_;
};

}  // namespace meshnet

#endif  // MESHNET_CC_COMMON_ED25519_SIGNER_H_
