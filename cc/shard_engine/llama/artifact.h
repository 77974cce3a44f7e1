// What a GGUF says about itself, read before any tensor is.
#ifndef MESHNET_CC_SHARD_ENGINE_LLAMA_ARTIFACT_H_
#define MESHNET_CC_SHARD_ENGINE_LLAMA_ARTIFACT_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace meshnet {

struct ArtifactHeader {
  std::string architecture;
  // Main layers: without those for multi-token prediction. 0 for an architecture that is not
  // served.
  uint32_t layers = 0;
  // Residual streams of a token: 1 for dense models.
  uint32_t streams = 1;
  uint32_t embedding = 0;
  // SHA-256 over every tokenizer.* entry, sorted by key.
  std::string tokenizer_sha256;
};

// Whether the engine can serve models of this general.architecture.
bool IsServedArchitecture(absl::string_view architecture);

// ARTIFACT_UNREADABLE or ARTIFACT_INVALID. Checks what llama.cpp would answer with an assertion.
absl::StatusOr<ArtifactHeader> ReadArtifactHeader(const std::string& path);

// Of the file's content, in lower-case hex. Reads through the page cache and maps nothing, so the
// pages do not count as this process's memory. ARTIFACT_UNREADABLE.
absl::StatusOr<std::string> FileSha256(const std::string& path);

}  // namespace meshnet

#endif  // MESHNET_CC_SHARD_ENGINE_LLAMA_ARTIFACT_H_
