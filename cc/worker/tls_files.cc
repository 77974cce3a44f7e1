#include "cc/worker/tls_files.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <fstream>
#include <memory>
#include <sstream>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "cc/common/openssl_ptr.h"
#include "cc/common/status.h"
#include "grpc/grpc.h"
#include "grpc/grpc_security.h"
#include "grpcpp/version_info.h"

namespace meshnet::worker {
namespace {

using Bio = OpensslPtr<BIO, BIO_free>;
using Certificate = OpensslPtr<X509, X509_free>;
using PrivateKey = OpensslPtr<EVP_PKEY, EVP_PKEY_free>;

absl::Status Invalid(absl::string_view message) {
  return MakeError(v1::REASON_CONFIGURATION_INVALID, message);
}

absl::StatusOr<std::string> ReadPem(absl::string_view flag, const std::string& path,
                                    absl::string_view kind) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream content;
  content << file.rdbuf();
  if (!file.good() || content.str().empty()) {
    return Invalid(absl::StrCat("expected a readable file in --", flag, ", got '", path, "'"));
  }
  if (!absl::StrContains(content.str(), absl::StrCat(kind, "-----"))) {
    return Invalid(absl::StrCat("expected --", flag, " to name a PEM file with a ", kind,
                                ", found none in '", path, "'"));
  }
  return content.str();
}

Bio BioOf(const std::string& pem) {
  return Bio(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
}

std::string TextOf(const ASN1_TIME* time) {
  const Bio bio(BIO_new(BIO_s_mem()));
  ASN1_TIME_print(bio.get(), time);
  char* text = nullptr;
  const long size = BIO_get_mem_data(bio.get(), &text);  // NOLINT: OpenSSL's type
  return std::string(text, static_cast<size_t>(size));
}

// Whether every certificate in it is one.
bool AreCertificates(const std::string& pem) {
  const Bio bio = BioOf(pem);
  int count = 0;
  while (Certificate(PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr)) != nullptr) ++count;
  // It ends for want of a further one, not because one is damaged.
  const bool ended = ERR_GET_REASON(ERR_peek_last_error()) == PEM_R_NO_START_LINE;
  ERR_clear_error();
  return count > 0 && ended;
}

absl::Status CheckPair(const TlsPaths& paths, const TlsPems& pems) {
  const Bio certificate_bio = BioOf(pems.certificate);
  const Certificate certificate(
      PEM_read_bio_X509(certificate_bio.get(), nullptr, nullptr, nullptr));
  const Bio key_bio = BioOf(pems.key);
  const PrivateKey key(PEM_read_bio_PrivateKey(key_bio.get(), nullptr, nullptr, nullptr));
  const bool fits = certificate != nullptr && key != nullptr &&
                    X509_check_private_key(certificate.get(), key.get()) == 1;
  ERR_clear_error();
  if (!fits) {
    return Invalid(absl::StrCat(
        "expected --tls_key to name the private key of the first certificate in "
        "--tls_cert; '",
        paths.key, "' and '", paths.certificate, "' do not fit, or one of them is damaged"));
  }
  const ASN1_TIME* const begins = X509_get0_notBefore(certificate.get());
  const ASN1_TIME* const ends = X509_get0_notAfter(certificate.get());
  if (X509_cmp_current_time(begins) > 0 || X509_cmp_current_time(ends) < 0) {
    return Invalid(absl::StrCat("expected --tls_cert to name a certificate that is valid now; '",
                                paths.certificate, "' is valid from ", TextOf(begins), " to ",
                                TextOf(ends), "; issue it anew"));
  }
  return absl::OkStatus();
}

// What gRPC asks for the certificate at every handshake, one at a time.
class CertificateSource {
 public:
  explicit CertificateSource(std::shared_ptr<TlsFiles> files) : files_(std::move(files)) {}

  // Credentials that must not outlive this object.
  grpc_server_credentials* MakeCredentials() {
    return grpc_ssl_server_credentials_create_with_options(
        grpc_ssl_server_credentials_create_options_using_config_fetcher(
            GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY, &Fetch, this));
  }

 private:
  static grpc_ssl_certificate_config_reload_status Fetch(
      void* self, grpc_ssl_server_certificate_config** config) {
    auto* const source = static_cast<CertificateSource*>(self);
    const std::shared_ptr<const TlsPems> pems = source->files_->Current();
    if (pems == source->used_) return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_UNCHANGED;
    const grpc_ssl_pem_key_cert_pair pair = {pems->key.c_str(), pems->certificate.c_str()};
    *config = grpc_ssl_server_certificate_config_create(pems->authorities.c_str(), &pair, 1);
    source->used_ = pems;
    return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_NEW;
  }

  const std::shared_ptr<TlsFiles> files_;
  std::shared_ptr<const TlsPems> used_;
};

// gRPC's C++ interface knows no credentials that change; its C interface does.
class ReloadingServerCredentials final : public grpc::ServerCredentials {
 public:
  explicit ReloadingServerCredentials(std::shared_ptr<TlsFiles> files)
      : ReloadingServerCredentials(std::make_unique<CertificateSource>(std::move(files))) {}

#if GRPC_CPP_VERSION_MAJOR == 1 && GRPC_CPP_VERSION_MINOR < 65
  // Older ones leave the credentials of the C interface to the derived class.
  ~ReloadingServerCredentials() override { grpc_server_credentials_release(credentials_); }

  void SetAuthMetadataProcessor(const std::shared_ptr<grpc::AuthMetadataProcessor>&) override {}

 private:
  explicit ReloadingServerCredentials(std::unique_ptr<CertificateSource> source)
      : credentials_(source->MakeCredentials()), source_(std::move(source)) {}

  int AddPortToServer(const std::string& address, grpc_server* server) override {
    return grpc_server_add_http2_port(server, address.c_str(), credentials_);
  }

  grpc_server_credentials* const credentials_;
#else

 private:
  explicit ReloadingServerCredentials(std::unique_ptr<CertificateSource> source)
      : grpc::ServerCredentials(source->MakeCredentials()), source_(std::move(source)) {}
#endif

  const std::unique_ptr<CertificateSource> source_;
};

}  // namespace

absl::StatusOr<TlsPems> ReadTlsPems(const TlsPaths& paths) {
  const auto certificate = ReadPem("tls_cert", paths.certificate, "CERTIFICATE");
  if (!certificate.ok()) return certificate.status();
  const auto key = ReadPem("tls_key", paths.key, "PRIVATE KEY");
  if (!key.ok()) return key.status();
  const auto authorities = ReadPem("tls_ca", paths.authorities, "CERTIFICATE");
  if (!authorities.ok()) return authorities.status();
  TlsPems pems = {*certificate, *key, *authorities};
  if (absl::Status status = CheckPair(paths, pems); !status.ok()) return status;
  if (!AreCertificates(pems.authorities)) {
    return Invalid(absl::StrCat(
        "expected --tls_ca to name a PEM file with certificates of authorities, those in '",
        paths.authorities, "' are damaged"));
  }
  return pems;
}

absl::StatusOr<std::shared_ptr<TlsFiles>> TlsFiles::Load(TlsPaths paths, const Logger* logger) {
  auto pems = ReadTlsPems(paths);
  if (!pems.ok()) return pems.status();
  return std::shared_ptr<TlsFiles>(new TlsFiles(std::move(paths), logger, *std::move(pems)));
}

TlsFiles::TlsFiles(TlsPaths paths, const Logger* logger, TlsPems pems)
    : paths_(std::move(paths)),
      logger_(logger),
      current_(std::make_shared<const TlsPems>(std::move(pems))) {}

void TlsFiles::Refresh() {
  auto found = ReadTlsPems(paths_);
  if (!found.ok()) {
    const std::string message(found.status().message());
    if (message == refused_) return;
    refused_ = message;
    logger_->Log(Severity::kWarning, "tls_unchanged",
                 {{"reason", ReasonName(ReasonOf(found.status()))}, {"message", message}});
    return;
  }
  refused_.clear();
  if (*found == *current_) return;
  current_ = std::make_shared<const TlsPems>(*std::move(found));
  channel_credentials_ = nullptr;
  logger_->Log(Severity::kInfo, "tls_changed", {{"certificate", paths_.certificate}});
}

std::shared_ptr<const TlsPems> TlsFiles::Current() {
  absl::MutexLock lock(&mu_);
  Refresh();
  return current_;
}

std::shared_ptr<grpc::ChannelCredentials> TlsFiles::ChannelCredentials() {
  absl::MutexLock lock(&mu_);
  Refresh();
  if (channel_credentials_ == nullptr) {
    grpc::SslCredentialsOptions options;
    options.pem_root_certs = current_->authorities;
    options.pem_private_key = current_->key;
    options.pem_cert_chain = current_->certificate;
    channel_credentials_ = grpc::SslCredentials(options);
  }
  return channel_credentials_;
}

std::shared_ptr<grpc::ServerCredentials> TlsFiles::ServerCredentials() {
  return std::make_shared<ReloadingServerCredentials>(shared_from_this());
}

}  // namespace meshnet::worker
