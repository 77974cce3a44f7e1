#include "cc/shard_engine/llama/manifest.h"

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "cc/common/status.h"
#include "gtest/gtest.h"

namespace meshnet {
namespace {

// The same file and hash as in python/meshnet_gguf/tests/manifest_test.py.
constexpr char kGoldenSha256[] = "a01f8b758e45934a575193b24b96f091a8e4d17a3f3ebe2d2bc79b0eaada258a";

std::string Golden() {
  std::ifstream file(std::getenv("GOLDEN_MANIFEST"), std::ios::binary);
  std::stringstream content;
  content << file.rdbuf();
  return content.str();
}

TEST(ManifestTest, ReadsTheGoldenOne) {
  const auto manifest = ReadManifest(std::getenv("GOLDEN_MANIFEST"));
  ASSERT_TRUE(manifest.ok()) << manifest.status();
  EXPECT_EQ(manifest->artifact_sha256, kGoldenSha256);
  EXPECT_EQ(manifest->tokenizer_sha256,
            "5f97e3774c51edd1d63706c2ec3826c564a067794770cdab0f8c4797971cacf9");
  EXPECT_EQ(manifest->chunk_bytes, 1024u);
  ASSERT_EQ(manifest->files.size(), 2u);
  EXPECT_EQ(manifest->files[0].name, "golden-00001-of-00002.gguf");
  EXPECT_EQ(manifest->files[1].bytes, 2500u);
  EXPECT_EQ(manifest->files[1].header_bytes, 512u);
  ASSERT_EQ(manifest->files[1].chunks.size(), 3u);
  EXPECT_EQ(manifest->files[1].chunks[2],
            "4814d92093ac8a0f4a2163ab87dee509ba306a58f5888be0edcb2fcd0712028b");
}

TEST(ManifestTest, EveryByteCounts) {
  const auto manifest = ParseManifest(Golden() + "\n", "it");
  ASSERT_TRUE(manifest.ok()) << manifest.status();
  EXPECT_NE(manifest->artifact_sha256, kGoldenSha256);
}

TEST(ManifestTest, RefusesWhatIsNone) {
  const std::string golden = Golden();
  const std::string hash = "c02c0b965e023abee808f2b548d8d5193a8b5229be6f3121a6f16e2d41a449b3";
  const std::string cases[] = {
      "",
      "{}",
      "[]",
      std::string(100000, '['),
      golden.substr(0, golden.size() - 10),
      absl::StrReplaceAll(golden, {{"meshnet.manifest/1", "meshnet.manifest/2"}}),
      absl::StrReplaceAll(golden, {{"\"role\"", "\"rank\""}}),
      absl::StrReplaceAll(golden, {{"\"chunk_bytes\": 1024", "\"chunk_bytes\": 1000"}}),
      absl::StrReplaceAll(golden, {{"\"chunk_bytes\": 1024", "\"chunk_bytes\": 512"}}),
      absl::StrReplaceAll(golden, {{"\"chunk_bytes\": 1024", "\"chunk_bytes\": -1"}}),
      absl::StrReplaceAll(golden, {{"\"chunk_bytes\": 1024", "\"chunk_bytes\": 2048"}}),
      absl::StrReplaceAll(golden, {{"\"bytes\": 2500", "\"bytes\": 0"}}),
      absl::StrReplaceAll(golden, {{"\"bytes\": 2500", "\"bytes\": 9223372036854775807"}}),
      absl::StrReplaceAll(golden, {{"\"bytes\": 2500", "\"bytes\": 99999999999999999999"}}),
      absl::StrReplaceAll(golden, {{"\"bytes\": 2500", "\"bytes\": \"many\""}}),
      absl::StrReplaceAll(golden, {{"\"header_bytes\": 512", "\"header_bytes\": 2501"}}),
      absl::StrReplaceAll(golden, {{hash, "0"}}),
      absl::StrReplaceAll(golden, {{hash, std::string(64, 'G')}}),
      absl::StrReplaceAll(golden, {{"golden-00002-of-00002.gguf", "../golden.gguf"}}),
      absl::StrReplaceAll(golden, {{"golden-00002-of-00002.gguf", ".gguf"}}),
      absl::StrReplaceAll(golden, {{"golden-00002-of-00002.gguf", ""}}),
      absl::StrReplaceAll(golden, {{"golden-00002-of-00002.gguf", "golden.bin"}}),
      absl::StrReplaceAll(golden, {{"5f97e3774c51", ""}}),
  };
  for (const std::string& json : cases) {
    const auto manifest = ParseManifest(json, "it");
    EXPECT_EQ(ReasonOf(manifest.status()), v1::REASON_MANIFEST_INVALID) << json.substr(0, 3000);
  }
}

TEST(ManifestTest, SaysWhatCannotBeRead) {
  const std::string folder = ::testing::TempDir();
  EXPECT_EQ(ReasonOf(ReadManifest(folder + "/none.json").status()), v1::REASON_ARTIFACT_UNREADABLE);
  EXPECT_EQ(ReasonOf(ReadManifest(folder).status()), v1::REASON_ARTIFACT_UNREADABLE);
  const auto manifest = ReadManifest(std::getenv("GOLDEN_MANIFEST"));
  ASSERT_TRUE(manifest.ok());
  const auto missing = VerifyHeaders(*manifest, folder, 1);
  EXPECT_EQ(ReasonOf(missing.status()), v1::REASON_ARTIFACT_INCOMPLETE);
  EXPECT_NE(missing.status().message().find("golden-00001-of-00002.gguf"), std::string::npos);
}

TEST(ManifestTest, ComparesSizesAndHeaders) {
  const std::string folder = absl::StrCat(::testing::TempDir(), "/set");
  ASSERT_EQ(std::system(absl::StrCat("mkdir -p ", folder).c_str()), 0);
  auto manifest = ReadManifest(std::getenv("GOLDEN_MANIFEST"));
  ASSERT_TRUE(manifest.ok());
  const auto write = [&](size_t file, size_t size) {
    std::ofstream(absl::StrCat(folder, "/", manifest->files[file].name)) << std::string(size, '\0');
  };
  write(0, 900);
  write(1, 2499);
  EXPECT_EQ(ReasonOf(VerifyHeaders(*manifest, folder, 2).status()), v1::REASON_ARTIFACT_MISMATCH);
  write(1, 2500);
  const auto wrong = VerifyHeaders(*manifest, folder, 2);
  EXPECT_EQ(ReasonOf(wrong.status()), v1::REASON_ARTIFACT_MISMATCH);
  EXPECT_NE(wrong.status().message().find("chunk 0: expected SHA-256"), std::string::npos);
  // 900 and 1024 bytes of zeros.
  manifest->files[0].chunks[0] = "fa807c957eafe34b850cb453a096df2e5899f0902a837fccd59f9aafa869fb44";
  manifest->files[1].chunks[0] = "5f70bf18a086007016e948b04aed3b82103a36bea41755b6cddfaf10ace3c6ef";
  const auto paths = VerifyHeaders(*manifest, folder, 2);
  ASSERT_TRUE(paths.ok()) << paths.status();
  EXPECT_EQ(paths->at(1), absl::StrCat(folder, "/golden-00002-of-00002.gguf"));
}

}  // namespace
}  // namespace meshnet
