#include "cc/worker/mixtures.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/time/time.h"
#include "cc/common/ed25519_signer.h"
#include "cc/common/status.h"
#include "cc/worker/mixture_records.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace meshnet::worker {
namespace {

using ::testing::HasSubstr;

// The key and the record of python/meshnet/tests/certification_test.py, which signs the same.
constexpr char kKey[] =
    "-----BEGIN PUBLIC KEY-----\n"
    "MCowBQYDK2VwAyEAA6EHv/POEL4dcN0Y50vAmWfk1jCbpQ1fHdyGZBJVMbg=\n"
    "-----END PUBLIC KEY-----\n";
constexpr char kFingerprint[] = "cff17aabc52085949982fcc7fa5daa9a9c8fd6ffe2afc9f4fd317b6c631393a5";

std::string Repeated(char c) { return std::string(64, c); }

std::string Record() {
  return absl::StrCat(
      "{\"evidence_sha256\":\"", Repeated('e'), "\",\"expires_ms\":20,\"fingerprint\":\"",
      kFingerprint, "\",\"head\":\"", Repeated('a'),
      "\",\"issued_ms\":10,\"key_id\":\"56475aa75463474c0285df5dbf2bcab7\",\"model_id\":\"model\","
      "\"shared\":\"",
      Repeated('c'),
      "\",\"signature\":\"X11g2+a5KTzijXOHkgdV3TIoFx/"
      "iiDNjq5CUa5/bG+O/pawWRfSdkrvrkSVgVRMz18jvPaB3i+b+iNBZl60BCQ==\",\"status\":\"certified\","
      "\"tail\":\"",
      Repeated('b'), "\",\"version\":2}");
}

Capability Worker(std::string fingerprint) {
  Capability capability;
  capability.recipe = {{"backend", "vulkan"}, {"kv_type", "f16"}};
  capability.recipe_fingerprint = std::move(fingerprint);
  return capability;
}

std::string WhyNot(const absl::StatusOr<Mixtures>& mixtures, const Capability& capability,
                   uint32_t hop_index, int64_t now_ms = 19) {
  const absl::Status status =
      mixtures->Check(kFingerprint, capability, hop_index, 3, absl::FromUnixMillis(now_ms));
  EXPECT_EQ(ReasonOf(status), v1::REASON_RECIPE_MISMATCH);
  return std::string(status.message());
}

TEST(MixturesTest, FingerprintsAreThoseOfTheControlPlane) {
  EXPECT_EQ(MixedFingerprint(Repeated('c'), Repeated('a'), Repeated('b')), kFingerprint);
  EXPECT_NE(MixedFingerprint(Repeated('c'), Repeated('b'), Repeated('a')), kFingerprint);
}

TEST(MixturesTest, LanesDifferInBackendBuildAndDeviceAlone) {
  const std::vector<std::pair<std::string, std::string>> recipe = {
      {"accelerator", "x"},     {"accelerator_driver", "x"},
      {"backend", "x"},         {"build_options", "x"},
      {"cpu_repack", "x"},      {"cpu_variant", "x"},
      {"flash_attention", "x"}, {"flash_attention_threads", "x"},
      {"kv_type", "f16"}};
  const std::string shared = SharedFingerprint(recipe);
  EXPECT_EQ(shared, RecipeFingerprint({{"kv_type", "f16"}}));
  for (size_t i = 0; i < recipe.size(); ++i) {
    auto other = recipe;
    other[i].second = "y";
    EXPECT_EQ(SharedFingerprint(other) == shared, recipe[i].first != "kv_type") << recipe[i].first;
  }
  auto more = recipe;
  more.emplace_back("zz_new", "1");
  EXPECT_NE(SharedFingerprint(more), shared);
}

TEST(MixturesTest, ReadsWhatTheControlPlaneSigns) {
  const auto mixtures = Mixtures::FromRecords(absl::StrCat(Record(), "\n"), kKey);
  ASSERT_TRUE(mixtures.ok()) << mixtures.status();
  EXPECT_EQ(mixtures->size(), 1);
  // Everything but what the recipes have in common, which this worker's two fields do not.
  const std::string why = WhyNot(mixtures, Worker(Repeated('a')), 0);
  EXPECT_THAT(why, HasSubstr(absl::StrCat("expected recipe ", Repeated('a'), " (lane vulkan), got ",
                                          kFingerprint)));
  EXPECT_THAT(why, HasSubstr("lanes may differ in backend, build and device alone"));
  EXPECT_THAT(WhyNot(mixtures, Worker(Repeated('d')), 0), HasSubstr("workers of these two"));
  EXPECT_THAT(WhyNot(mixtures, Worker(Repeated('a')), 0, 20), HasSubstr("has expired"));
  EXPECT_THAT(WhyNot(Mixtures(), Worker(Repeated('a')), 0), HasSubstr("--mixtures"));
}

TEST(MixturesTest, PassesOverRecordsOfOneLane) {
  const auto mixtures = Mixtures::FromRecords("{\"version\":1}\n\n", kKey);
  ASSERT_TRUE(mixtures.ok()) << mixtures.status();
  EXPECT_EQ(mixtures->size(), 0);
}

TEST(MixturesTest, RefusesWhatNoTrustedKeySigned) {
  const auto mixtures = Mixtures::FromRecords(Record(), Ed25519Signer(1).PublicPem());
  EXPECT_EQ(ReasonOf(mixtures.status()), v1::REASON_CONFIGURATION_INVALID);
  EXPECT_THAT(std::string(mixtures.status().message()),
              HasSubstr("56475aa75463474c0285df5dbf2bcab7"));
  EXPECT_FALSE(Mixtures::FromRecords(Record(), "no key").ok());
}

TEST(MixturesTest, TheNewestRecordDecides) {
  const Ed25519Signer signer(7);
  MixtureRecord record = {SharedFingerprint(Worker("").recipe), Repeated('a'), Repeated('b'), 5};
  const std::string fingerprint = MixedFingerprint(record.shared, record.head, record.tail);
  std::string lines = SignMixture(signer, record);
  const auto check = [&](const std::string& own, uint32_t hop_index) {
    const auto mixtures = Mixtures::FromRecords(lines, signer.PublicPem());
    EXPECT_TRUE(mixtures.ok()) << mixtures.status();
    const absl::Status status =
        mixtures->Check(fingerprint, Worker(own), hop_index, 3, absl::FromUnixMillis(100));
    return std::string(status.message());
  };
  // The head's lane begins and the tail's ends; who tells them to a worker in between is the
  // tracker.
  EXPECT_EQ(check(record.head, 0), "");
  EXPECT_EQ(check(record.head, 1), "");
  EXPECT_EQ(check(record.tail, 1), "");
  EXPECT_EQ(check(record.tail, 2), "");
  EXPECT_THAT(check(record.head, 2), HasSubstr("can not be hop 2 of 3"));
  EXPECT_THAT(check(record.tail, 0), HasSubstr("can not be hop 0 of 3"));
  record.status = "revoked";
  record.issued_ms = 4;
  absl::StrAppend(&lines, "\n", SignMixture(signer, record));
  EXPECT_EQ(check(record.head, 0), "");
  record.issued_ms = 6;
  absl::StrAppend(&lines, "\n", SignMixture(signer, record));
  EXPECT_THAT(check(record.head, 0), HasSubstr("revokes"));
  record.status = "certified";
  record.issued_ms = 7;
  record.expires_ms = 101;
  absl::StrAppend(&lines, "\n", SignMixture(signer, record), "\n");
  EXPECT_EQ(check(record.head, 0), "");
  record.issued_ms = 8;
  record.expires_ms = 100;
  absl::StrAppend(&lines, "\n", SignMixture(signer, record), "\n");
  EXPECT_THAT(check(record.head, 0), HasSubstr("has expired"));
  record.tail = record.head;
  EXPECT_FALSE(Mixtures::FromRecords(SignMixture(signer, record), signer.PublicPem()).ok());
}

// A record of which anything is changed is no record, whatever it is.
TEST(MixturesTest, EveryByteCounts) {
  const std::string record = Record();
  for (size_t i = 0; i < record.size(); ++i) {
    for (const char c : {'0', '"', 'b', ' '}) {
      if (record[i] == c) continue;
      std::string other = record;
      other[i] = c;
      EXPECT_EQ(ReasonOf(Mixtures::FromRecords(other, kKey).status()),
                v1::REASON_CONFIGURATION_INVALID)
          << i << " " << c;
    }
    if (i > 0) {
      EXPECT_FALSE(Mixtures::FromRecords(record.substr(0, i), kKey).ok()) << i;
    }
  }
  for (const auto& [from, to] : std::vector<std::pair<std::string, std::string>>{
           {"\"version\":2}", "\"version\":2,\"more\":1}"},
           {"\"version\":2}", "\"version\":2.0}"},
           {"\"issued_ms\":10", "\"issued_ms\":1e400"},
           {"\"issued_ms\":10", "\"issued_ms\":\"10\""},
           {"\"issued_ms\":10", "\"issued_ms\":-10"},
           {"{\"evidence", "{ \"evidence"},
       }) {
    EXPECT_FALSE(Mixtures::FromRecords(absl::StrReplaceAll(record, {{from, to}}), kKey).ok()) << to;
  }
}

}  // namespace
}  // namespace meshnet::worker
