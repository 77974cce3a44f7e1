#include "cc/worker/route_token.h"

#include <memory>
#include <string>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "cc/common/ed25519_signer.h"
#include "cc/common/status.h"
#include "gtest/gtest.h"
#include "proto/meshnet/control/v1/route_token.pb.h"

namespace meshnet::worker {
namespace {

// The key whose 32 private bytes are 0, 1, ... 31. python/meshnet/tests/route_tokens_test.py has it
// as well, and issues the same token: it is the golden file of both.
constexpr char kPublicPem[] =
    "-----BEGIN PUBLIC KEY-----\n"
    "MCowBQYDK2VwAyEAA6EHv/POEL4dcN0Y50vAmWfk1jCbpQ1fHdyGZBJVMbg=\n"
    "-----END PUBLIC KEY-----\n";
constexpr char kKeyId[] = "Vkdap1RjR0wChd9dvyvKtw==";
constexpr char kGoldenToken[] =
    "CiAzMDMxMzIzMzM0MzUzNjM3MzgzOTYxNjI2MzY0NjU2NhAHGAEiAncxKNAP.Rsg8Y2g28gP63aaxzI3mX2H-"
    "v1QjfjfrhEeL3-KZwwLGM-dnvUES35A0yn_40EZFQWAuUrkjpkww2o8CtRMGDQ==.Vkdap1RjR0wChd9dvyvKtw==";

constexpr char kSession[] = "0123456789abcdef";

class RouteTokensTest : public ::testing::Test {
 protected:
  RouteTokensTest() {
    claim_.set_session_id(absl::BytesToHexString(kSession));
    claim_.set_epoch(7);
    claim_.set_hop(1);
    claim_.set_worker_id("w1");
    claim_.set_expires_ms(2'000);
  }

  std::string Token(const control::v1::RouteClaim& claim) const {
    return Signed(claim.SerializeAsString(), "meshnet route token v1\n");
  }

  std::string Signed(const std::string& content, const std::string& purpose) const {
    return absl::StrCat(absl::WebSafeBase64Escape(content), ".",
                        absl::WebSafeBase64Escape(signer_.Sign(purpose + content)), ".", kKeyId);
  }

  v1::Reason Authorize(const std::string& token, absl::string_view action = "Seam",
                       std::optional<uint32_t> hop = 1, uint64_t epoch = 7) {
    PeerInfo peer;
    peer.route_token = token;
    return ReasonOf(tokens_->Authorize(action, peer, {kSession, epoch}, hop));
  }

  // The token with one thing about its claim changed.
  template <typename Change>
  v1::Reason Changed(Change change) {
    control::v1::RouteClaim claim = claim_;
    change(&claim);
    return Authorize(Token(claim));
  }

  absl::Time now_ = absl::FromUnixMillis(1'000);
  Ed25519Signer signer_{0};
  std::unique_ptr<RouteTokens> tokens_ =
      *RouteTokens::Make(kPublicPem, "w1", [this] { return now_; });
  control::v1::RouteClaim claim_;
};

TEST_F(RouteTokensTest, LetsInWhatPythonHasIssued) {
  EXPECT_EQ(signer_.PublicPem(), kPublicPem);
  EXPECT_EQ(Authorize(kGoldenToken), v1::REASON_UNSPECIFIED);
  EXPECT_EQ(Authorize(Token(claim_)), v1::REASON_UNSPECIFIED);
}

TEST_F(RouteTokensTest, EachFaultHasItsReason) {
  EXPECT_EQ(Authorize(""), v1::REASON_TOKEN_MALFORMED);
  EXPECT_EQ(Authorize("a.b"), v1::REASON_TOKEN_MALFORMED);
  EXPECT_EQ(Authorize("!.!.!"), v1::REASON_TOKEN_MALFORMED);
  EXPECT_EQ(Authorize(std::string(1025, 'a')), v1::REASON_TOKEN_MALFORMED);
  // Signed, but no claim.
  EXPECT_EQ(Authorize(Signed("\x07", "meshnet route token v1\n")), v1::REASON_TOKEN_MALFORMED);
  EXPECT_EQ(Changed([](auto* claim) { claim->set_expires_ms(1'000); }), v1::REASON_TOKEN_EXPIRED);
  EXPECT_EQ(Changed([](auto* claim) { claim->set_worker_id("w2"); }),
            v1::REASON_TOKEN_WRONG_WORKER);
  EXPECT_EQ(Changed([](auto* claim) { claim->set_session_id("00"); }),
            v1::REASON_TOKEN_WRONG_SESSION);
  EXPECT_EQ(Changed([](auto* claim) { claim->set_epoch(6); }), v1::REASON_TOKEN_WRONG_EPOCH);
  EXPECT_EQ(Changed([](auto* claim) { claim->set_hop(2); }), v1::REASON_TOKEN_WRONG_HOP);
  EXPECT_EQ(Changed([](auto*) {}), v1::REASON_UNSPECIFIED);
}

TEST_F(RouteTokensTest, OnlyTheTrackersSignatureForThisPurposeCounts) {
  EXPECT_EQ(Authorize(Signed(claim_.SerializeAsString(), "meshnet certification v1\n")),
            v1::REASON_TOKEN_UNTRUSTED);
  std::string token = Token(claim_);
  for (size_t i = 0; i < token.size(); ++i) {
    std::string other = token;
    other[i] = other[i] == 'A' ? 'B' : 'A';
    const v1::Reason reason = Authorize(other);
    // The last digit before a dot holds bits that mean nothing.
    if (i + 1 < token.size() && token[i + 1] != '.') {
      EXPECT_TRUE(reason == v1::REASON_TOKEN_UNTRUSTED || reason == v1::REASON_TOKEN_MALFORMED)
          << i;
    }
  }
  const Ed25519Signer stranger(1);
  tokens_ = *RouteTokens::Make(stranger.PublicPem(), "w1", [this] { return now_; });
  EXPECT_EQ(Authorize(token), v1::REASON_TOKEN_UNTRUSTED);
  // Two trackers.
  tokens_ =
      *RouteTokens::Make(stranger.PublicPem() + signer_.PublicPem(), "w1", [this] { return now_; });
  EXPECT_EQ(Authorize(token), v1::REASON_UNSPECIFIED);
}

TEST_F(RouteTokensTest, ATokenIsGoodForOneLifeOfASession) {
  const std::string token = Token(claim_);
  EXPECT_EQ(Authorize(token), v1::REASON_UNSPECIFIED);
  // The return stream and whoever cancels by key come with the same one.
  EXPECT_EQ(Authorize(token, "Return", std::nullopt), v1::REASON_UNSPECIFIED);
  EXPECT_EQ(Authorize(token, "CancelSession", std::nullopt), v1::REASON_UNSPECIFIED);
  tokens_->OnSessionEnded({kSession, 7});
  EXPECT_EQ(Authorize(token), v1::REASON_TOKEN_REPLAYED);
  claim_.set_epoch(8);
  EXPECT_EQ(Authorize(Token(claim_), "Seam", 1, 8), v1::REASON_UNSPECIFIED);
  // Another token for the same life is no way around it.
  claim_.set_epoch(7);
  claim_.set_expires_ms(1'900);
  EXPECT_EQ(Authorize(Token(claim_)), v1::REASON_TOKEN_REPLAYED);
  now_ = absl::FromUnixMillis(2'000);
  EXPECT_EQ(Authorize(token), v1::REASON_TOKEN_EXPIRED);
}

TEST_F(RouteTokensTest, KeysMustBeKeys) {
  for (const std::string& pem :
       {std::string(), std::string("nothing"), std::string(kPublicPem).substr(0, 60),
        std::string(kPublicPem) + "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n"}) {
    EXPECT_EQ(ReasonOf(RouteTokens::Make(pem, "w1").status()), v1::REASON_CONFIGURATION_INVALID)
        << pem;
  }
}

}  // namespace
}  // namespace meshnet::worker
