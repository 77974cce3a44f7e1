// What the state of one session takes in memory at a stage, by how many tokens it holds.
//
//   StateSize size = DeepSeek4StateSize(header, range, GGML_TYPE_F16, geometry);
//   size.Bytes(1000);
//
// Memory for all slots is taken at load; this says how much of it a session's tokens fill.
#ifndef MESHNET_CC_SHARD_ENGINE_LLAMA_STATE_SIZE_H_
#define MESHNET_CC_SHARD_ENGINE_LLAMA_STATE_SIZE_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "cc/shard_engine/llama/artifact.h"
#include "cc/shard_engine/shard_engine.h"
#include "ggml.h"

namespace meshnet {

class StateSize {
 public:
  // Rows that are alike, of all layers of a range together.
  struct Rows {
    uint64_t bytes = 0;  // of one row in all layers
    uint32_t tokens_per_row = 1;
    uint64_t most = 0;  // a ring's length: later tokens overwrite
  };

  // Nothing.
  StateSize() = default;
  explicit StateSize(std::vector<Rows> rows) : rows_(std::move(rows)) {}

  // Of a session that holds so many tokens.
  uint64_t Bytes(uint32_t tokens) const;

 private:
  std::vector<Rows> rows_;
};

// A row a token, of what llama.cpp took for `cells` tokens.
StateSize DenseStateSize(uint64_t bytes, uint32_t cells);

struct DeepSeek4Geometry {
  uint32_t slot_cells = 0;       // tokens that a slot has room for
  uint32_t micro_batch = 0;      // rows of the largest step
  uint32_t rollback_tokens = 0;  // by which every ring is longer
};

// Raw keys of the window, compressed keys of CSA and HCA layers, the indexer's keys, and the
// compressors' accumulators (with their scores) of the layers of `range`. As llama.cpp lays them
// out: llama_kv_cache_dsv4.
StateSize DeepSeek4StateSize(const ArtifactHeader& header, const LayerRange& range, ggml_type type,
                             const DeepSeek4Geometry& geometry);

}  // namespace meshnet

#endif  // MESHNET_CC_SHARD_ENGINE_LLAMA_STATE_SIZE_H_
