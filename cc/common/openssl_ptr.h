// OpenSSL's objects, freed with their owners.
//
//   using Bio = OpensslPtr<BIO, BIO_free>;
//   const Bio bio(BIO_new_mem_buf(pem.data(), size));
#ifndef MESHNET_CC_COMMON_OPENSSL_PTR_H_
#define MESHNET_CC_COMMON_OPENSSL_PTR_H_

#include <memory>

namespace meshnet {

template <auto Free>
struct OpensslFreer {
  template <typename T>
  void operator()(T* object) const {
    Free(object);
  }
};

template <typename T, auto Free>
using OpensslPtr = std::unique_ptr<T, OpensslFreer<Free>>;

}  // namespace meshnet

#endif  // MESHNET_CC_COMMON_OPENSSL_PTR_H_
