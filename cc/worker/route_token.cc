#include "cc/worker/route_token.h"

#include <algorithm>
#include <iterator>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "cc/common/status.h"
#include "cc/protocol/frame_codec.h"
#include "proto/meshnet/control/v1/route_token.pb.h"

namespace meshnet::worker {
namespace {

constexpr absl::string_view kPurpose = "meshnet route token v1\n";
constexpr size_t kMaxTokenBytes = 1024;
constexpr size_t kMaxUsed = 1 << 16;
constexpr size_t kForgetAt = 1024;

absl::Status Malformed(absl::string_view got) {
  return MakeError(v1::REASON_TOKEN_MALFORMED,
                   absl::StrCat("expected a route token of the tracker, got ", got,
                                "; present the one of this hop"));
}

template <typename Expected, typename Got>
absl::Status Wrong(v1::Reason reason, absl::string_view what, const Expected& expected,
                   const Got& got) {
  return MakeError(
      reason, absl::StrCat("expected a route token for ", what, " ", expected, ", got one for ",
                           got, "; present the one of this hop and epoch"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<RouteTokens>> RouteTokens::Make(absl::string_view public_keys_pem,
                                                               std::string worker_id,
                                                               std::function<absl::Time()> now) {
  auto keys = Ed25519Keys::FromPem(public_keys_pem);
  if (!keys.ok()) return keys.status();
  return std::unique_ptr<RouteTokens>(
      new RouteTokens(*std::move(keys), std::move(worker_id), std::move(now)));
}

absl::Status RouteTokens::Authorize(absl::string_view action, const PeerInfo& peer,
                                    const SessionKey& session, std::optional<uint32_t> hop) {
  const std::string& token = peer.route_token;
  if (token.empty()) return Malformed("none");
  if (token.size() > kMaxTokenBytes) return Malformed(absl::StrCat(token.size(), " bytes"));
  const std::vector<absl::string_view> parts = absl::StrSplit(token, '.');
  std::string content;
  std::string signature;
  std::string key_id;
  if (parts.size() != 3 || !absl::WebSafeBase64Unescape(parts[0], &content) ||
      !absl::WebSafeBase64Unescape(parts[1], &signature) ||
      !absl::WebSafeBase64Unescape(parts[2], &key_id)) {
    return Malformed("something else");
  }
  if (!keys_.Verify(absl::BytesToHexString(key_id), absl::StrCat(kPurpose, content), signature)) {
    return MakeError(v1::REASON_TOKEN_UNTRUSTED,
                     absl::StrCat("expected a route token signed by a key that this worker trusts, "
                                  "got one of key ",
                                  absl::BytesToHexString(key_id.substr(0, 16)),
                                  "; give the worker the tracker's public key"));
  }
  control::v1::RouteClaim claim;
  if (!ParseMessage(content, kMaxTokenBytes, &claim).ok()) return Malformed("another claim");
  const absl::Time now = now_();
  const absl::Time expires = absl::FromUnixMillis(static_cast<int64_t>(claim.expires_ms()));
  if (now >= expires) {
    return MakeError(
        v1::REASON_TOKEN_EXPIRED,
        absl::StrCat("expected a route token that is valid now, got one that expired ",
                     absl::FormatDuration(now - expires), " ago; select a route anew"));
  }
  if (claim.worker_id() != worker_id_) {
    return Wrong(v1::REASON_TOKEN_WRONG_WORKER, "worker", worker_id_, claim.worker_id());
  }
  const std::string session_id = absl::BytesToHexString(session.route_session_id);
  if (claim.session_id() != session_id) {
    return Wrong(v1::REASON_TOKEN_WRONG_SESSION, "session", session_id, claim.session_id());
  }
  if (claim.epoch() != session.route_epoch) {
    return Wrong(v1::REASON_TOKEN_WRONG_EPOCH, "epoch", session.route_epoch, claim.epoch());
  }
  if (hop.has_value() && claim.hop() != *hop) {
    return Wrong(v1::REASON_TOKEN_WRONG_HOP, "hop", *hop, claim.hop());
  }
  if (action != "Session" && action != "Seam") return absl::OkStatus();
  absl::MutexLock lock(&mu_);
  if (used_.size() >= forget_at_) {
    for (auto it = used_.begin(); it != used_.end();) {
      it = it->second.ended && it->second.expires <= now ? used_.erase(it) : std::next(it);
    }
    forget_at_ = std::max(kForgetAt, 2 * used_.size());
  }
  const auto key = std::make_pair(session.route_session_id, session.route_epoch);
  const auto found = used_.find(key);
  if (found != used_.end() && found->second.ended) {
    return MakeError(v1::REASON_TOKEN_REPLAYED,
                     absl::StrCat("expected a route token whose session has not ended here, got "
                                  "that of epoch ",
                                  session.route_epoch, " again; ask for the next epoch"));
  }
  if (used_.size() >= kMaxUsed) {
    return MakeError(v1::REASON_QUEUE_FULL,
                     "expected fewer sessions within the life of a token; try again later");
  }
  Use& use = used_[key];
  use.expires = std::max(use.expires, expires);
  return absl::OkStatus();
}

void RouteTokens::OnSessionEnded(const SessionKey& session) {
  absl::MutexLock lock(&mu_);
  const auto found = used_.find({session.route_session_id, session.route_epoch});
  if (found != used_.end()) found->second.ended = true;
}

}  // namespace meshnet::worker
