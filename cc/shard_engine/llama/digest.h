// SHA-256 of what comes piece by piece, as fast as the CPU can.
#ifndef MESHNET_CC_SHARD_ENGINE_LLAMA_DIGEST_H_
#define MESHNET_CC_SHARD_ENGINE_LLAMA_DIGEST_H_

#include <openssl/evp.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/strings/escaping.h"
#include "absl/strings/string_view.h"

namespace meshnet {

class Sha256 {
 public:
  Sha256() : context_(EVP_MD_CTX_new()) { EVP_DigestInit_ex(context_, EVP_sha256(), nullptr); }
  ~Sha256() { EVP_MD_CTX_free(context_); }
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;

  void Update(const void* data, size_t size) { EVP_DigestUpdate(context_, data, size); }

  // With its length, so that neighbours cannot run into each other.
  void UpdateText(absl::string_view text) {
    const uint64_t size = text.size();
    Update(&size, sizeof(size));
    Update(text.data(), text.size());
  }

  // Lower-case hex. The last call.
  std::string Hex() {
    std::string digest(EVP_MAX_MD_SIZE, '\0');
    unsigned int size = 0;
    EVP_DigestFinal_ex(context_, reinterpret_cast<unsigned char*>(&digest[0]), &size);
    digest.resize(size);
    return absl::BytesToHexString(digest);
  }

 private:
  EVP_MD_CTX* context_;
};

}  // namespace meshnet

#endif  // MESHNET_CC_SHARD_ENGINE_LLAMA_DIGEST_H_
