#include "cc/common/ed25519.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "cc/common/openssl_ptr.h"
#include "cc/common/sha256.h"
#include "cc/common/status.h"

namespace meshnet {
namespace {

constexpr size_t kKeyBytes = 32;
constexpr size_t kKeyIdDigits = 32;
constexpr absl::string_view kEnd = "-----END PUBLIC KEY-----";

using Bio = OpensslPtr<BIO, BIO_free>;
using Key = OpensslPtr<EVP_PKEY, EVP_PKEY_free>;
using DigestContext = OpensslPtr<EVP_MD_CTX, EVP_MD_CTX_free>;

const uint8_t* Bytes(absl::string_view text) {
  return reinterpret_cast<const uint8_t*>(text.data());
}

absl::Status Refused() {
  return MakeError(v1::REASON_CONFIGURATION_INVALID,
                   "expected Ed25519 public keys in PEM, as `meshnet keys` writes them");
}

}  // namespace

absl::StatusOr<Ed25519Keys> Ed25519Keys::FromPem(absl::string_view pem) {
  Ed25519Keys keys;
  for (size_t end = pem.find(kEnd); end != absl::string_view::npos; end = pem.find(kEnd)) {
    const absl::string_view block = pem.substr(0, end + kEnd.size());
    pem.remove_prefix(block.size());
    const Bio bio(BIO_new_mem_buf(block.data(), static_cast<int>(block.size())));
    const Key key(PEM_read_bio_PUBKEY(bio.get(), nullptr, nullptr, nullptr));
    ERR_clear_error();
    std::string raw(kKeyBytes, '\0');
    size_t size = raw.size();
    if (key == nullptr || EVP_PKEY_id(key.get()) != EVP_PKEY_ED25519 ||
        EVP_PKEY_get_raw_public_key(key.get(), reinterpret_cast<uint8_t*>(raw.data()), &size) !=
            1 ||
        size != kKeyBytes) {
      return Refused();
    }
    keys.keys_.emplace(Sha256Hex(raw).substr(0, kKeyIdDigits), std::move(raw));
  }
  if (keys.keys_.empty()) return Refused();
  return keys;
}

bool Ed25519Keys::Verify(const std::string& key_id, absl::string_view message,
                         absl::string_view signature) const {
  const auto found = keys_.find(key_id);
  if (found == keys_.end()) return false;
  const Key key(EVP_PKEY_new_raw_public_key(EVP_PKEY_ED25519, nullptr, Bytes(found->second),
                                            found->second.size()));
  const DigestContext context(EVP_MD_CTX_new());
  const bool valid =
      key != nullptr && context != nullptr &&
      EVP_DigestVerifyInit(context.get(), nullptr, nullptr, nullptr, key.get()) == 1 &&
      EVP_DigestVerify(context.get(), Bytes(signature), signature.size(), Bytes(message),
                       message.size()) == 1;
  ERR_clear_error();
  return valid;
}

}  // namespace meshnet
