// Writes the small random model of tests: write_tiny_llama FILE.gguf
#include <cstdio>

#include "cc/shard_engine/llama/testing/tiny_llama.h"

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "expected write_tiny_llama FILE.gguf\n");
    return 2;
  }
  const absl::Status status = meshnet::WriteTinyLlama(argv[1]);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
