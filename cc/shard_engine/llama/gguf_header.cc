#include "cc/shard_engine/llama/gguf_header.h"

#include <exception>

namespace meshnet {

GgufPtr OpenGguf(const std::string& path) {
  gguf_init_params params = {};
  params.no_alloc = true;
  // A header that declares more entries than there is memory for throws.
  try {
    return GgufPtr(gguf_init_from_file(path.c_str(), params));
  } catch (const std::exception&) {
    return nullptr;
  }
}

}  // namespace meshnet
