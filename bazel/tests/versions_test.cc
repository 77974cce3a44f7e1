// The sysroot's libraries are of the versions that third_party/deps.yaml states: the headers that
// we compile with, and, where a library tells its version, the archives that we link.
#include <cstdlib>
#include <fstream>
#include <map>
#include <string>

#include "absl/base/config.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "gmock/gmock.h"
#include "google/protobuf/stubs/common.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "xxhash.h"

namespace meshnet {
namespace {

// deps.yaml, as far as it is needed here: versions by name.
std::map<std::string, std::string> StatedVersions() {
  std::map<std::string, std::string> versions;
  std::ifstream file(std::getenv("DEPS_YAML"));
  std::string name;
  for (std::string line; std::getline(file, line);) {
    absl::string_view text = line;
    if (absl::ConsumePrefix(&text, "- name: ")) name = std::string(text);
    if (!absl::ConsumePrefix(&text, "  version: ")) continue;
    if (absl::ConsumePrefix(&text, "\"")) absl::ConsumeSuffix(&text, "\"");
    versions[name] = std::string(text);
  }
  return versions;
}

TEST(VersionsTest, AreThoseThatTheListStates) {
  const std::map<std::string, std::string> stated = StatedVersions();
  ASSERT_GT(stated.size(), 10);
  EXPECT_EQ(stated.at("gRPC"), grpc::Version());
  EXPECT_EQ(stated.at("Protocol Buffers"),
            google::protobuf::internal::VersionString(GOOGLE_PROTOBUF_VERSION));
  EXPECT_EQ(stated.at("Abseil"),
            absl::StrCat(ABSL_LTS_RELEASE_VERSION, ".", ABSL_LTS_RELEASE_PATCH_LEVEL));
  EXPECT_EQ(stated.at("xxHash"),
            absl::StrCat(XXH_VERSION_MAJOR, ".", XXH_VERSION_MINOR, ".", XXH_VERSION_RELEASE));
}

TEST(VersionsTest, ArchivesAreOfTheirHeaders) {
  GOOGLE_PROTOBUF_VERIFY_VERSION;  // ends the program on a mismatch
  EXPECT_EQ(XXH_versionNumber(), XXH_VERSION_NUMBER);
}

}  // namespace
}  // namespace meshnet
