// DeepSeek V4 in the patched llama.cpp: what ranges compute on the way, what they keep, and the
// faults of upstream that have a patch. Whole against split over many cuts is tests/parity.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ggml-backend.h"
#include "ggml.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "llama-cpp.h"
#include "llama-ext.h"
#include "llama.h"
#include "third_party/llama_cpp/cpu_backend.h"

namespace {

constexpr int kLayers = 8;
constexpr int kVocab = 512;
constexpr int kEmbd = 128;
constexpr int kStreams = 4;
constexpr uint32_t kRollback = 8;

std::string ModelPath() { return std::getenv("DEEPSEEK4_MODEL"); }

class DeepSeek4 : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    ASSERT_TRUE(meshnet::llama_cpp::RegisterCpuBackend("").ok());
    llama_backend_init();
    llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  }
};

// Appends a tensor's values; it can be a view with gaps between its rows.
void Append(const ggml_tensor* tensor, std::vector<char>* bytes) {
  const size_t size = ggml_row_size(tensor->type, tensor->ne[0]);
  for (int64_t i3 = 0; i3 < tensor->ne[3]; ++i3) {
    for (int64_t i2 = 0; i2 < tensor->ne[2]; ++i2) {
      for (int64_t i1 = 0; i1 < tensor->ne[1]; ++i1) {
        const size_t at = bytes->size();
        bytes->resize(at + size);
        ggml_backend_tensor_get(tensor, bytes->data() + at,
                                i1 * tensor->nb[1] + i2 * tensor->nb[2] + i3 * tensor->nb[3], size);
      }
    }
  }
}

// Tensors of a graph by their names, copied when they are computed, batch after batch.
class Recorder {
 public:
  explicit Recorder(std::vector<std::string> prefixes) : prefixes_(std::move(prefixes)) {}

  static bool Callback(ggml_tensor* tensor, bool ask, void* self) {
    auto* recorder = static_cast<Recorder*>(self);
    if (!recorder->Wants(tensor->name)) return !ask;
    if (!ask) Append(tensor, &recorder->seen_[tensor->name]);
    return true;
  }

  const std::map<std::string, std::vector<char>>& seen() const { return seen_; }

 private:
  bool Wants(const char* name) const {
    return std::any_of(prefixes_.begin(), prefixes_.end(), [name](const std::string& prefix) {
      return std::strncmp(name, prefix.c_str(), prefix.size()) == 0;
    });
  }

  std::vector<std::string> prefixes_;
  std::map<std::string, std::vector<char>> seen_;
};

// What the rows of a layer's attention look with and at, and what they see.
class AttentionRecorder {
 public:
  static bool Callback(ggml_tensor* tensor, bool ask, void* self) {
    if (tensor->op != GGML_OP_FLASH_ATTN_EXT) return !ask;
    if (!ask) static_cast<AttentionRecorder*>(self)->Record(tensor);
    return true;
  }

  const std::vector<char>& queries() const { return queries_; }
  // Row by row the keys that its mask lets it see, raw and compressed, in the order of their bytes.
  const std::vector<std::vector<std::string>>& keys() const { return keys_; }
  const std::vector<float>& output() const { return output_; }

 private:
  void Record(const ggml_tensor* attention) {
    const ggml_tensor* key = attention->src[1];
    const ggml_tensor* mask = attention->src[3];
    ASSERT_EQ(mask->type, GGML_TYPE_F16);
    ASSERT_EQ(mask->ne[0], key->ne[1]);
    ASSERT_EQ(key->ne[2], 1);  // all heads share one key
    Append(attention->src[0], &queries_);
    std::vector<char> bytes;
    Append(key, &bytes);
    std::vector<char> mask_bytes;
    Append(mask, &mask_bytes);
    const size_t size = ggml_row_size(key->type, key->ne[0]);
    const auto* visible = reinterpret_cast<const ggml_fp16_t*>(mask_bytes.data());
    for (int64_t row = 0; row < attention->src[0]->ne[1]; ++row) {
      keys_.emplace_back();
      for (int64_t cell = 0; cell < key->ne[1]; ++cell) {
        const float value = ggml_fp16_to_fp32(visible[row * mask->ne[0] + cell]);
        if (std::isinf(value)) continue;
        ASSERT_EQ(value, 0.0f);
        keys_.back().emplace_back(&bytes[cell * size], size);
      }
      std::sort(keys_.back().begin(), keys_.back().end());
    }
    std::vector<char> out;
    Append(attention, &out);
    const auto* values = reinterpret_cast<const float*>(out.data());
    output_.insert(output_.end(), values, values + out.size() / sizeof(float));
  }

  std::vector<char> queries_;
  std::vector<std::vector<std::string>> keys_;
  std::vector<float> output_;
};

struct Stage {
  llama_model_ptr model;
  llama_context_ptr context;
};

llama_context_params ContextParams() {
  llama_context_params params = llama_context_default_params();
  params.n_ctx = 1024;
  params.n_batch = params.n_ubatch = 64;
  params.n_seq_max = 1;
  params.n_rs_seq = kRollback;
  // A ring of 256 raw keys: window, micro-batch and twice the rollback, padded.
  params.swa_full = false;
  params.n_threads = params.n_threads_batch = 1;
  params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
  return params;
}

llama_model_ptr Load(int begin, int end, const std::string& path = ModelPath()) {
  llama_model_params params = llama_model_default_params();
  params.layer_begin = begin;
  params.layer_end = end;
  return llama_model_ptr(llama_model_load_from_file(path.c_str(), params));
}

Stage OpenWith(llama_model_ptr model, const llama_context_params& params) {
  Stage stage;
  EXPECT_NE(model, nullptr);
  stage.model = std::move(model);
  stage.context.reset(llama_init_from_model(stage.model.get(), params));
  EXPECT_NE(stage.context, nullptr);
  return stage;
}

template <typename SomeRecorder = Recorder>
Stage Open(int begin, int end, SomeRecorder* recorder = nullptr, bool whole_window = false) {
  llama_context_params params = ContextParams();
  params.swa_full = whole_window;
  if (recorder != nullptr) {
    params.cb_eval = &SomeRecorder::Callback;
    params.cb_eval_user_data = recorder;
  }
  return OpenWith(Load(begin, end), params);
}

std::vector<llama_token> Tokens(int n, uint32_t seed) {
  std::vector<llama_token> tokens(n);
  for (llama_token& token : tokens) {
    seed = seed * 1664525u + 1013904223u;
    token = static_cast<llama_token>((seed >> 8) % kVocab);
  }
  return tokens;
}

// Decodes rows from `position` on, all of them outputs, `chunk` at a time, and returns logits or
// boundary of all rows; empty after a failure.
std::vector<float> Evaluate(Stage& stage, std::vector<llama_token> tokens, int position, int chunk,
                            const std::vector<float>* boundary = nullptr, bool with_ids = true) {
  std::vector<float> result;
  const int width_in = llama_model_boundary_n_embd_in(stage.model.get());
  const int width_out = llama_model_boundary_n_embd_out(stage.model.get());
  for (int begin = 0; begin < static_cast<int>(tokens.size()); begin += chunk) {
    const int n = std::min<int>(chunk, static_cast<int>(tokens.size()) - begin);
    std::vector<llama_pos> positions(n);
    std::vector<int32_t> counts(n, 1);
    std::vector<llama_seq_id> sequences(n, 0);
    std::vector<llama_seq_id*> lists(n);
    std::vector<int8_t> outputs(n, 1);
    for (int i = 0; i < n; ++i) {
      positions[i] = position + begin + i;
      lists[i] = &sequences[i];
    }
    llama_batch batch = {};
    batch.n_tokens = n;
    batch.token = with_ids ? tokens.data() + begin : nullptr;
    batch.embd = boundary == nullptr
                     ? nullptr
                     : const_cast<float*>(boundary->data()) + size_t(begin) * width_in;
    batch.pos = positions.data();
    batch.n_seq_id = counts.data();
    batch.seq_id = lists.data();
    batch.logits = width_out > 0 ? nullptr : outputs.data();
    if (llama_decode(stage.context.get(), batch) != 0) return {};
    if (width_out > 0) {
      const float* rows = llama_get_boundary(stage.context.get());
      result.insert(result.end(), rows, rows + size_t(n) * width_out);
    } else {
      const float* rows = llama_get_logits(stage.context.get());
      result.insert(result.end(), rows, rows + size_t(n) * kVocab);
    }
  }
  return result;
}

bool Cut(Stage& stage, llama_pos from) {
  return llama_memory_seq_rm(llama_get_memory(stage.context.get()), 0, from, -1);
}

float MaxDifference(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return std::numeric_limits<float>::infinity();
  float difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference = std::max(difference, std::abs(a[i] - b[i]));
  return difference;
}

size_t StateBytes(const Stage& stage) {
  size_t bytes = 0;
  for (const auto& [type, use] : llama_get_memory_breakdown(stage.context.get())) {
    bytes += use.context;
  }
  return bytes;
}

// The choices of six experts, their weights, and the shared expert's part, in each of the layers.
TEST_F(DeepSeek4, ExpertsOfEveryLayerAreThoseOfTheWholeModel) {
  constexpr size_t kRows = 150;
  constexpr size_t kUsed = 6;
  const std::vector<std::string> names = {"ffn_moe_topk", "ffn_moe_weights", "ffn_moe_out",
                                          "ffn_shexp", "ffn_out"};
  const std::vector<llama_token> tokens = Tokens(kRows, 3);
  Recorder whole(names);
  int layers = 0;
  {
    Stage stage = Open(0, -1, &whole);
    layers = llama_model_n_layer(stage.model.get());
    ASSERT_FALSE(Evaluate(stage, tokens, 0, 64).empty());
  }
  const int experts = std::atoi(std::getenv("DEEPSEEK4_EXPERTS"));
  std::set<int32_t> chosen;
  for (int layer = 0; layer < layers; ++layer) {
    const std::string il = "-" + std::to_string(layer);
    ASSERT_EQ(whole.seen().count("ffn_moe_topk" + il), 1u) << il;
    ASSERT_EQ(whole.seen().count("ffn_shexp" + il), 1u) << il;
    const std::vector<char>& bytes = whole.seen().at("ffn_moe_topk" + il);
    ASSERT_EQ(bytes.size(), kRows * kUsed * sizeof(int32_t)) << il;
    const auto* choices = reinterpret_cast<const int32_t*>(bytes.data());
    for (size_t row = 0; row < kRows; ++row) {
      const std::set<int32_t> of_row(choices + row * kUsed, choices + (row + 1) * kUsed);
      EXPECT_EQ(of_row.size(), kUsed) << il << ", row " << row;
      chosen.insert(of_row.begin(), of_row.end());
    }
  }
  // All of them, none besides.
  EXPECT_EQ(static_cast<int>(chosen.size()), experts);
  EXPECT_EQ(*chosen.begin(), 0);
  EXPECT_EQ(*chosen.rbegin(), experts - 1);

  std::vector<int> each(layers - 1);
  std::iota(each.begin(), each.end(), 1);
  for (const std::vector<int>& cuts : {std::vector<int>{1, 3, 5}, {2, 6}, each}) {
    SCOPED_TRACE(testing::PrintToString(cuts));
    Recorder split(names);
    std::vector<float> boundary;
    int begin = 0;
    for (size_t i = 0; i <= cuts.size(); ++i) {
      const int end = i < cuts.size() ? cuts[i] : layers;
      Stage stage = Open(begin, end, &split);
      boundary = Evaluate(stage, tokens, 0, 64, begin == 0 ? nullptr : &boundary);
      ASSERT_FALSE(boundary.empty());
      begin = end;
    }
    EXPECT_EQ(split.seen().size(), whole.seen().size());
    for (const auto& [name, bytes] : whole.seen()) {
      const auto found = split.seen().find(name);
      ASSERT_NE(found, split.seen().end()) << name;
      EXPECT_TRUE(found->second == bytes) << name;
    }
  }
}

TEST_F(DeepSeek4, HashLayersNeedTokenIds) {
  for (const int begin : {1, 2}) {
    Stage stage = Open(begin, begin + 1);
    EXPECT_TRUE(llama_model_boundary_needs_tokens(stage.model.get()));
    const std::vector<float> boundary(size_t{kEmbd} * kStreams * 4, 0.1f);
    EXPECT_TRUE(Evaluate(stage, Tokens(4, 1), 0, 4, &boundary, /*with_ids=*/false).empty());
    EXPECT_FALSE(Evaluate(stage, Tokens(4, 1), 0, 4, &boundary).empty());
  }
  EXPECT_FALSE(llama_model_boundary_needs_tokens(Open(3, 4).model.get()));
  EXPECT_FALSE(llama_model_boundary_needs_tokens(Open(3, -1).model.get()));
}

TEST_F(DeepSeek4, StateIsKeptForTheLayersOfTheRangeOnly) {
  const size_t whole = StateBytes(Open(0, -1));
  size_t sum = 0;
  std::vector<size_t> layers;
  for (int layer = 0; layer < kLayers; ++layer) {
    layers.push_back(StateBytes(Open(layer, layer + 1)));
    sum += layers.back();
  }
  EXPECT_EQ(sum, whole);
  // Window only, CSA with its indexer, HCA; the file's ratios are 0, 0, 4, 128, 4, 128, 4, 0.
  EXPECT_EQ(layers[0], layers[1]);
  EXPECT_EQ(layers[0], layers[7]);
  EXPECT_EQ(layers[2], layers[4]);
  EXPECT_EQ(layers[3], layers[5]);
  EXPECT_GT(layers[2], layers[0]);
  EXPECT_GT(layers[3], layers[0]);
}

TEST_F(DeepSeek4, ANextnContextNeedsTheWholeModel) {
  llama_context_params params = ContextParams();
  params.ctx_type = LLAMA_CONTEXT_TYPE_MTP;
  const llama_model_ptr part = Load(4, -1);
  EXPECT_EQ(llama_init_from_model(part.get(), params), nullptr);
}

// 0005-nextn-output: the rows are what the graph computed, although the output was switched on
// after the context had made its plan.
TEST_F(DeepSeek4, NextnRowsSurviveTheRestOfTheGraph) {
  Recorder recorder({"h_nextn"});
  Stage observed = Open(0, -1, &recorder);
  Stage stage = Open(0, -1);
  for (Stage* each : {&observed, &stage}) {
    llama_set_embeddings_nextn(each->context.get(), true, /*masked=*/true);
  }
  const std::vector<llama_token> tokens = Tokens(48, 9);
  ASSERT_FALSE(Evaluate(observed, tokens, 0, 48).empty());
  ASSERT_FALSE(Evaluate(stage, tokens, 0, 48).empty());
  const std::vector<char>& computed = recorder.seen().at("h_nextn");
  ASSERT_EQ(computed.size(), size_t{48} * kEmbd * kStreams * sizeof(float));
  const float* rows = llama_get_embeddings_nextn(stage.context.get());
  ASSERT_NE(rows, nullptr);
  EXPECT_EQ(std::memcmp(rows, computed.data(), computed.size()), 0);
}

// 0006-empty-cache: without a layer that has an indexer, its cache has no layer and no head size.
TEST_F(DeepSeek4, RangesWithoutCompressedLayersWork) {
  const std::vector<float> boundary(size_t{kEmbd} * kStreams * 4, 0.1f);
  Stage head = Open(0, 2);
  EXPECT_EQ(Evaluate(head, Tokens(4, 1), 0, 4).size(), boundary.size());
  Stage hca = Open(3, 4);
  EXPECT_EQ(Evaluate(hca, Tokens(4, 1), 0, 4, &boundary).size(), boundary.size());
  Stage last = Open(7, 8);
  EXPECT_EQ(Evaluate(last, Tokens(4, 1), 0, 4, &boundary).size(), size_t{4} * kVocab);
}

// 0011-deepseek-v4-rollback: tokens decoded one by one, then removed together, and again.
TEST_F(DeepSeek4, RollbackDoesNotDependOnHowTokensWereBatched) {
  // Around the ends of CSA blocks (multiples of 4), of HCA blocks (128) and of the ring of raw keys
  // (256).
  for (const int prompt : {1, 6, 7, 126, 127, 128, 254, 255, 256, 300}) {
    SCOPED_TRACE(prompt);
    const std::vector<llama_token> text = Tokens(prompt, 5);
    const std::vector<llama_token> after = Tokens(20, 6);
    Stage straight = Open(0, -1);
    ASSERT_FALSE(Evaluate(straight, text, 0, 64).empty());
    const std::vector<float> expected = Evaluate(straight, after, prompt, 1);

    Stage drafted = Open(0, -1);
    ASSERT_FALSE(Evaluate(drafted, text, 0, 64).empty());
    for (const int draft : {3, 5}) {
      ASSERT_FALSE(Evaluate(drafted, Tokens(draft, 7), prompt, 1).empty());
      ASSERT_TRUE(Cut(drafted, prompt + 1));
      ASSERT_TRUE(Cut(drafted, prompt));
    }
    ASSERT_FALSE(Evaluate(drafted, Tokens(7, 8), prompt, 7).empty());
    ASSERT_TRUE(Cut(drafted, prompt));
    EXPECT_TRUE(Evaluate(drafted, after, prompt, 1) == expected);
  }
}

// Twice around the ring and further, against a cache that forgets no key. Every row of attention
// sees the same keys, byte for byte, and what it makes of them differs by the order of the sum
// alone. One layer of each kind on equal input, so that nothing else differs.
TEST_F(DeepSeek4, TheRingOfRawKeysHoldsTheWindow) {
  constexpr size_t kRow = size_t{kEmbd} * kStreams;
  constexpr size_t kRows = 640;  // whole chunks: attention sums fewer rows than 64 in 16 bits
  constexpr size_t kRing = 256;
  constexpr size_t kWindow = 128;
  const std::vector<llama_token> text = Tokens(kRows, 5);
  std::vector<float> boundary(kRows * kRow);
  for (size_t i = 0; i < boundary.size(); ++i) {
    boundary[i] =
        static_cast<float>(text[i % kRows] + static_cast<int>(i * 7919 % 1021) - 700) / 512;
  }
  // Window alone, CSA of which the indexer takes 16, HCA.
  struct Kind {
    int layer;
    size_t ratio;
    size_t most;
  };
  for (const Kind& kind : {Kind{0, 0, 0}, Kind{2, 4, 16}, Kind{3, 128, kRows}}) {
    SCOPED_TRACE(kind.layer);
    AttentionRecorder in_ring;
    AttentionRecorder in_full;
    Stage ring = Open(kind.layer, kind.layer + 1, &in_ring);
    Stage full = Open(kind.layer, kind.layer + 1, &in_full, /*whole_window=*/true);
    EXPECT_LT(StateBytes(ring), StateBytes(full));
    const std::vector<float>* input = kind.layer == 0 ? nullptr : &boundary;
    const std::vector<float> found = Evaluate(ring, text, 0, 64, input);
    const std::vector<float> expected = Evaluate(full, text, 0, 64, input);
    ASSERT_EQ(found.size(), kRows * kRow);
    ASSERT_EQ(expected.size(), kRows * kRow);
    // Before the ring's end there is no difference at all.
    EXPECT_TRUE(std::equal(found.begin(), found.begin() + kRing * kRow, expected.begin()));

    EXPECT_TRUE(in_ring.queries() == in_full.queries());
    ASSERT_EQ(in_ring.keys().size(), kRows);
    ASSERT_EQ(in_full.keys().size(), kRows);
    for (size_t row = 0; row < kRows; ++row) {
      const size_t compressed = kind.ratio == 0 ? 0 : std::min((row + 1) / kind.ratio, kind.most);
      EXPECT_EQ(in_ring.keys()[row].size(), std::min(row + 1, kWindow) + compressed) << row;
      EXPECT_TRUE(in_ring.keys()[row] == in_full.keys()[row]) << row;
    }
    ASSERT_EQ(in_ring.output().size(), in_full.output().size());
    EXPECT_LT(MaxDifference(in_ring.output(), in_full.output()), 1e-5);
  }
}

// The same for a whole model in which rounding can turn no choice (every expert is used, every
// compressed key looked at) and stays small (weights and keys of 32 bits): the logits, all layers
// on.
TEST_F(DeepSeek4, TheRingChangesNoMoreThanTheOrderOfSums) {
  constexpr size_t kRows = 400;
  constexpr size_t kChanged = 260;
  const std::vector<llama_token> text = Tokens(kRows, 5);
  const auto logits = [](const std::vector<llama_token>& tokens, int chunk, bool whole_window) {
    llama_context_params params = ContextParams();
    params.swa_full = whole_window;
    params.type_k = params.type_v = GGML_TYPE_F32;
    // It would take 16 bits a key.
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    Stage stage = OpenWith(Load(0, -1, std::getenv("DEEPSEEK4_STEADY_MODEL")), params);
    return Evaluate(stage, tokens, 0, chunk);
  };
  for (const int chunk : {1, 64}) {
    SCOPED_TRACE(chunk);
    const std::vector<float> expected = logits(text, chunk, /*whole_window=*/true);
    ASSERT_EQ(expected.size(), kRows * kVocab);
    EXPECT_LT(MaxDifference(logits(text, chunk, /*whole_window=*/false), expected), 1e-4);
  }
  // One other key in the window would show.
  std::vector<llama_token> other = text;
  other[kChanged] = (other[kChanged] + 1) % kVocab;
  const std::vector<float> expected = logits(text, 64, /*whole_window=*/true);
  const std::vector<float> changed = logits(other, 64, /*whole_window=*/true);
  ASSERT_EQ(changed.size(), expected.size());
  for (const size_t row : {kChanged + 1, kChanged + 60, kChanged + 127}) {
    const auto at = static_cast<std::ptrdiff_t>(row * kVocab);
    EXPECT_GT(MaxDifference({changed.begin() + at, changed.begin() + at + kVocab},
                            {expected.begin() + at, expected.begin() + at + kVocab}),
              1e-3)
        << row;
  }
}

TEST_F(DeepSeek4, RollbackIsRefusedBeyondWhatTheRingsHold) {
  Stage stage = Open(0, -1);
  ASSERT_FALSE(Evaluate(stage, Tokens(100, 5), 0, 64).empty());
  EXPECT_FALSE(Cut(stage, 100 - kRollback - 1));
  EXPECT_TRUE(Cut(stage, 100 - kRollback));
  // The rows behind it were written once, whatever was cut since.
  EXPECT_FALSE(Cut(stage, 100 - kRollback - 1));
  EXPECT_TRUE(Cut(stage, 0));
}

}  // namespace
