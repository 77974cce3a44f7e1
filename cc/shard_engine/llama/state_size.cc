#include "cc/shard_engine/llama/state_size.h"

#include <algorithm>

namespace meshnet {
namespace {

constexpr uint32_t kCsaRatio = 4;
constexpr uint32_t kHcaRatio = 128;
constexpr uint32_t kCellPadding = 256;
// An accumulator holds what is compressed and its scores.
constexpr uint64_t kAccumulatorTensors = 2;

uint32_t Padded(uint32_t cells) { return (cells + kCellPadding - 1) / kCellPadding * kCellPadding; }

}  // namespace

uint64_t StateSize::Bytes(uint32_t tokens) const {
  uint64_t bytes = 0;
  for (const Rows& rows : rows_) {
    bytes += rows.bytes * std::min<uint64_t>(tokens / rows.tokens_per_row, rows.most);
  }
  return bytes;
}

StateSize DenseStateSize(uint64_t bytes, uint32_t cells) {
  return StateSize({{bytes / cells, 1, cells}});
}

StateSize DeepSeek4StateSize(const ArtifactHeader& header, const LayerRange& range, ggml_type type,
                             const DeepSeek4Geometry& geometry) {
  uint64_t csa = 0;
  uint64_t hca = 0;
  for (uint32_t layer = range.begin; layer < range.end; ++layer) {
    const uint32_t ratio =
        layer < header.compression_ratios.size() ? header.compression_ratios[layer] : 0;
    csa += ratio == kCsaRatio ? 1 : 0;
    hca += ratio == kHcaRatio ? 1 : 0;
  }
  const uint64_t key = ggml_row_size(type, header.key_length);
  const uint64_t indexer_key = ggml_row_size(type, header.indexer_key_length);
  // Neighbouring CSA blocks overlap: their accumulators hold two of them, twice as wide.
  const uint64_t accumulated = kAccumulatorTensors * sizeof(float) * header.key_length;
  const uint64_t indexer_accumulated =
      kAccumulatorTensors * sizeof(float) * header.indexer_key_length;
  const uint32_t room = geometry.micro_batch + 2 * geometry.rollback_tokens;
  const uint32_t ring = Padded(std::min(geometry.slot_cells, header.window + room));
  return StateSize({
      {key * (range.end - range.begin), 1, ring},
      {(key + indexer_key) * csa, kCsaRatio, geometry.slot_cells},
      {2 * (accumulated + indexer_accumulated) * csa, 1, 2 * kCsaRatio + geometry.rollback_tokens},
      {key * hca, kHcaRatio, geometry.slot_cells},
      {accumulated * hca, 1, kHcaRatio + geometry.rollback_tokens},
  });
}

}  // namespace meshnet
