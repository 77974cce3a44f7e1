#include "cc/common/ed25519_signer.h"

#include <openssl/bio.h>
#include <openssl/evp.h>
#include <openssl/pem.h>

#include "cc/common/sha256.h"
#include "gtest/gtest.h"

namespace meshnet {

Ed25519Signer::Ed25519Signer(uint8_t first) {
  uint8_t seed[32];
  for (uint8_t i = 0; i < 32; ++i) seed[i] = static_cast<uint8_t>(first + i);
  key_ = EVP_PKEY_new_raw_private_key(EVP_PKEY_ED25519, nullptr, seed, sizeof(seed));
}

Ed25519Signer::~Ed25519Signer() { EVP_PKEY_free(key_); }

std::string Ed25519Signer::PublicPem() const {
  BIO* bio = BIO_new(BIO_s_mem());
  EXPECT_EQ(PEM_write_bio_PUBKEY(bio, key_), 1);
  char* data = nullptr;
  const auto size = BIO_get_mem_data(bio, &data);
  std::string pem(data, static_cast<size_t>(size));
  BIO_free(bio);
  return pem;
}

std::string Ed25519Signer::KeyId() const {
  uint8_t bytes[32];
  size_t size = sizeof(bytes);
  EXPECT_EQ(EVP_PKEY_get_raw_public_key(key_, bytes, &size), 1);
  return Sha256Hex(absl::string_view(reinterpret_cast<const char*>(bytes), size)).substr(0, 32);
}

std::string Ed25519Signer::Sign(absl::string_view message) const {
  EVP_MD_CTX* context = EVP_MD_CTX_new();
  EXPECT_EQ(EVP_DigestSignInit(context, nullptr, nullptr, nullptr, key_), 1);
  std::string signature(64, '\0');
  size_t size = signature.size();
  EXPECT_EQ(EVP_DigestSign(context, reinterpret_cast<uint8_t*>(signature.data()), &size,
                           reinterpret_cast<const uint8_t*>(message.data()), message.size()),
            1);
  EVP_MD_CTX_free(context);
  return signature;
}

}  // namespace meshnet
