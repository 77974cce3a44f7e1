// What a GGUF says about itself, read before any tensor is.
#ifndef MESHNET_CC_SHARD_ENGINE_LLAMA_ARTIFACT_H_
#define MESHNET_CC_SHARD_ENGINE_LLAMA_ARTIFACT_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace meshnet {

struct ArtifactHeader {
  std::string architecture;
  // <architecture>.block_count; 0 for an architecture other than `llama`.
  uint32_t layers = 0;
  // SHA-256 over every tokenizer.* entry, sorted by key.
  std::string tokenizer_sha256;
};

// ARTIFACT_UNREADABLE or ARTIFACT_INVALID. Checks what llama.cpp would answer with an assertion.
absl::StatusOr<ArtifactHeader> ReadArtifactHeader(const std::string& path);

// Of the file's content, in lower-case hex. Reads through the page cache and maps nothing, so the
// pages do not count as this process's memory. ARTIFACT_UNREADABLE.
absl::StatusOr<std::string> FileSha256(const std::string& path);

}  // namespace meshnet

#endif  // MESHNET_CC_SHARD_ENGINE_LLAMA_ARTIFACT_H_
