// A random model of the `llama` architecture, small enough to make in a test: real topology, real
// tokenizer, no meaning.
#ifndef MESHNET_CC_SHARD_ENGINE_LLAMA_TESTING_TINY_LLAMA_H_
#define MESHNET_CC_SHARD_ENGINE_LLAMA_TESTING_TINY_LLAMA_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace meshnet {

struct TinyLlamaOptions {
  uint32_t layers = 6;
  uint32_t seed = 1;
  // Embeddings serve as the output matrix, as in small real models.
  bool tied_output = false;
  // Quantised as real models are: Q4_0 for the blocks' matrices, F16 for the rest.
  bool quantized = true;
  std::string architecture = "llama";
  // More than 1: a split set with `-00001-of-0000N` before the suffix of the path, of which the
  // first part holds no tensor.
  uint32_t parts = 1;
  // May change a tensor's name and values before they are written: a fault that a test shall find.
  std::function<void(std::string* name, std::vector<float>* values)> edit;
};

// Width 64, 2 heads of 32, 1 KV head, feed-forward 128, vocabulary 512 (SentencePiece with byte
// fallback). Writes about 300 KiB to `path`. The same options give the same bytes.
absl::Status WriteTinyLlama(const std::string& path, const TinyLlamaOptions& options = {});

}  // namespace meshnet

#endif  // MESHNET_CC_SHARD_ENGINE_LLAMA_TESTING_TINY_LLAMA_H_
