// What a GGUF says about itself, read before any tensor is. A split set is one model: any of its
// parts stands for all of them, and the first one may hold no tensor.
#ifndef MESHNET_CC_SHARD_ENGINE_LLAMA_ARTIFACT_H_
#define MESHNET_CC_SHARD_ENGINE_LLAMA_ARTIFACT_H_

#include <cstdint>
#include <string>
#include <vector>

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
  // Of DeepSeek V4 alone: the size of a key and of an indexer's key, the window that raw keys are
  // kept for, and each layer's compression ratio, 0 being none.
  uint32_t key_length = 0;
  uint32_t indexer_key_length = 0;
  uint32_t window = 0;
  std::vector<uint32_t> compression_ratios;
  // SHA-256 over every tokenizer.* entry as it stands in the first file, sorted by key.
  std::string tokenizer_sha256;
  // The file, or all parts of the split set, in their order.
  std::vector<std::string> files;
};

// Whether the engine can serve models of this general.architecture.
bool IsServedArchitecture(absl::string_view architecture);

// ARTIFACT_UNREADABLE or ARTIFACT_INVALID. Checks what llama.cpp would answer with an assertion,
// and that the parts of a split set are all there, no more, and agree.
absl::StatusOr<ArtifactHeader> ReadArtifactHeader(const std::string& path);

// The artifact's identity in lower-case hex: of one file its content's SHA-256; of several the
// SHA-256 over a line for each with its own, in their order, so that names count for nothing. Reads
// through the page cache and maps nothing, so the pages do not count as this process's memory.
// ARTIFACT_UNREADABLE.
absl::StatusOr<std::string> ArtifactSha256(const std::vector<std::string>& files);

}  // namespace meshnet

#endif  // MESHNET_CC_SHARD_ENGINE_LLAMA_ARTIFACT_H_
