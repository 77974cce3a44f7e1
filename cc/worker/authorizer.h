// The hook through which an operator decides who may use a worker. Accounts, quotas and billing
// live behind it, never in the worker.
#ifndef MESHNET_CC_WORKER_AUTHORIZER_H_
#define MESHNET_CC_WORKER_AUTHORIZER_H_

#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "cc/shard_engine/shard_engine.h"
#include "cc/worker/transport.h"

namespace meshnet::worker {

class Authorizer {
 public:
  virtual ~Authorizer() = default;

  // Asked before a session, seam or return stream is opened and before a session is cancelled or
  // released by key. `action` is the RPC's name, `hop` this worker's place in the route where the
  // call names one. Called from any thread; must not block. UNAUTHENTICATED or one of the TOKEN_
  // reasons to refuse.
  virtual absl::Status Authorize(absl::string_view action, const PeerInfo& peer,
                                 const SessionKey& session, std::optional<uint32_t> hop) = 0;

  // A session that was let in has ended at this worker.
  virtual void OnSessionEnded(const SessionKey&) {}
};

class AllowAll : public Authorizer {
 public:
  absl::Status Authorize(absl::string_view, const PeerInfo&, const SessionKey&,
                         std::optional<uint32_t>) override {
    return absl::OkStatus();
  }
};

}  // namespace meshnet::worker

#endif  // MESHNET_CC_WORKER_AUTHORIZER_H_
