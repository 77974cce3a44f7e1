// A GGUF's header, read by ggml: keys, and what tensors it holds where.
#ifndef MESHNET_CC_SHARD_ENGINE_LLAMA_GGUF_HEADER_H_
#define MESHNET_CC_SHARD_ENGINE_LLAMA_GGUF_HEADER_H_

#include <memory>
#include <string>

#include "gguf.h"

namespace meshnet {

struct GgufDeleter {
  void operator()(gguf_context* context) const { gguf_free(context); }
};
using GgufPtr = std::unique_ptr<gguf_context, GgufDeleter>;

// Null when the header does not parse.
GgufPtr OpenGguf(const std::string& path);

}  // namespace meshnet

#endif  // MESHNET_CC_SHARD_ENGINE_LLAMA_GGUF_HEADER_H_
