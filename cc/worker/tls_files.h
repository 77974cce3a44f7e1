// Mutual TLS by PEM files that may be replaced while the worker runs: a certificate that is
// renewed, an authority that is rotated.
//
//   auto files = TlsFiles::Load({"me.pem", "me.key", "authorities.pem"}, &logger);
//   builder.AddListeningPort(address, (*files)->ServerCredentials(), &port);
//   auto channel = grpc::CreateChannel(endpoint, (*files)->ChannelCredentials());
//
// The files are read at every handshake that this worker answers, and for every connection that it
// opens. Files that cannot be read, do not fit each other (one is replaced already, the other not
// yet) or have run out change nothing: what was read last stays in use.
#ifndef MESHNET_CC_WORKER_TLS_FILES_H_
#define MESHNET_CC_WORKER_TLS_FILES_H_

#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "cc/worker/json_log.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/security/server_credentials.h"

namespace meshnet::worker {

struct TlsPaths {
  // The certificate chain, its key, and the authorities of the others.
  std::string certificate;
  std::string key;
  std::string authorities;
};

// What the files hold.
struct TlsPems {
  std::string certificate;
  std::string key;
  std::string authorities;

  bool operator==(const TlsPems& other) const {
    return certificate == other.certificate && key == other.key && authorities == other.authorities;
  }
  bool operator!=(const TlsPems& other) const { return !(*this == other); }
};

// Reads them. CONFIGURATION_INVALID, naming the flag (--tls_cert, --tls_key, --tls_ca), unless they
// can be read, fit each other and the certificate is valid now.
absl::StatusOr<TlsPems> ReadTlsPems(const TlsPaths& paths);

// Thread-safe.
class TlsFiles : public std::enable_shared_from_this<TlsFiles> {
 public:
  // CONFIGURATION_INVALID as above. `logger` must outlive this; it is told of every change
  // ("tls_changed") and of files that are not taken up ("tls_unchanged").
  static absl::StatusOr<std::shared_ptr<TlsFiles>> Load(TlsPaths paths, const Logger* logger);

  // What the files hold now, or what was good last.
  std::shared_ptr<const TlsPems> Current();
  // For a new connection: the same object for as long as nothing changes.
  std::shared_ptr<grpc::ChannelCredentials> ChannelCredentials();
  // For a server, which asks Current() at every handshake. Callers must show a certificate. gRPC's
  // server does not hold these itself: they have to outlive it.
  std::shared_ptr<grpc::ServerCredentials> ServerCredentials();

 private:
  TlsFiles(TlsPaths paths, const Logger* logger, TlsPems pems);

  void Refresh() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const TlsPaths paths_;
  const Logger* const logger_;
  absl::Mutex mu_;
  std::shared_ptr<const TlsPems> current_ ABSL_GUARDED_BY(mu_);
  // Of `current_`; null until somebody asks.
  std::shared_ptr<grpc::ChannelCredentials> channel_credentials_ ABSL_GUARDED_BY(mu_);
  // What was told last about files that are not taken up.
  std::string refused_ ABSL_GUARDED_BY(mu_);
};

}  // namespace meshnet::worker

#endif  // MESHNET_CC_WORKER_TLS_FILES_H_
