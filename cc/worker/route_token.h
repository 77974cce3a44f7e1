// Lets in who has a token of the tracker for the session, epoch and hop that he asks for.
//
//   auto tokens = RouteTokens::Make(public_keys_pem, "worker-a");
//   Worker worker(options, dialer, tokens->get(), logger);
//
// The token's form: proto/meshnet/control/v1/route_token.proto.
#ifndef MESHNET_CC_WORKER_ROUTE_TOKEN_H_
#define MESHNET_CC_WORKER_ROUTE_TOKEN_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "cc/common/ed25519.h"
#include "cc/worker/authorizer.h"

namespace meshnet::worker {

class RouteTokens : public Authorizer {
 public:
  // CONFIGURATION_INVALID. `worker_id` is this worker's name at the tracker.
  static absl::StatusOr<std::unique_ptr<RouteTokens>> Make(
      absl::string_view public_keys_pem, std::string worker_id,
      std::function<absl::Time()> now = absl::Now);

  // TOKEN_MALFORMED, TOKEN_UNTRUSTED, TOKEN_EXPIRED, TOKEN_WRONG_WORKER, TOKEN_WRONG_SESSION,
  // TOKEN_WRONG_EPOCH, TOKEN_WRONG_HOP, TOKEN_REPLAYED, looked for in this order.
  absl::Status Authorize(absl::string_view action, const PeerInfo& peer, const SessionKey& session,
                         std::optional<uint32_t> hop) override;
  void OnSessionEnded(const SessionKey& session) override;

 private:
  RouteTokens(Ed25519Keys keys, std::string worker_id, std::function<absl::Time()> now)
      : keys_(std::move(keys)), worker_id_(std::move(worker_id)), now_(std::move(now)) {}

  const Ed25519Keys keys_;
  const std::string worker_id_;
  const std::function<absl::Time()> now_;
  absl::Mutex mu_;
  // Sessions that a token has opened, and when that token expires. Ended ones stay until then.
  struct Use {
    absl::Time expires;
    bool ended = false;
  };
  std::map<std::pair<std::string, uint64_t>, Use> used_ ABSL_GUARDED_BY(mu_);
  // With that many it is time to look which may go.
  size_t forget_at_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace meshnet::worker

#endif  // MESHNET_CC_WORKER_ROUTE_TOKEN_H_
