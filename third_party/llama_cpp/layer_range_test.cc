// Layer ranges of the patched llama.cpp against the whole model: the same batches give the same
// bits.

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "ggml-cpp.h"
#include "ggml.h"
#include "gguf.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "llama-cpp.h"
#include "llama-ext.h"
#include "llama.h"
#include "third_party/llama_cpp/cpu_backend.h"

namespace {

constexpr int kLayers = 6;
constexpr int kEmbd = 128;
constexpr int kHeads = 4;
constexpr int kHeadsKv = 2;
constexpr int kFeedForward = 256;
constexpr int kVocab = 320;

struct ModelOptions {
  bool tied = false;  // token embeddings are the output layer
  ggml_type type = GGML_TYPE_Q8_0;
  std::string architecture = "llama";
  std::string without;       // a tensor that is left out
  std::string extra_tensor;  // one that no architecture knows
};

// Writes a random dense model and returns its path.
std::string WriteModel(const std::string& name, const ModelOptions& options) {
  const std::string path = ::testing::TempDir() + "/" + name + ".gguf";
  gguf_context_ptr gguf(gguf_init_empty());
  const std::string arch = options.architecture;
  gguf_set_val_str(gguf.get(), "general.architecture", arch.c_str());
  const auto u32 = [&](const char* key, uint32_t value) {
    gguf_set_val_u32(gguf.get(), (arch + "." + key).c_str(), value);
  };
  u32("vocab_size", kVocab);
  u32("context_length", 512);
  u32("embedding_length", kEmbd);
  u32("block_count", kLayers);
  u32("feed_forward_length", kFeedForward);
  u32("attention.head_count", kHeads);
  u32("attention.head_count_kv", kHeadsKv);
  u32("rope.dimension_count", kEmbd / kHeads);
  gguf_set_val_f32(gguf.get(), (arch + ".attention.layer_norm_rms_epsilon").c_str(), 1e-5f);
  gguf_set_val_str(gguf.get(), "tokenizer.ggml.model", "no_vocab");

  ggml_init_params params = {32u << 20, nullptr, false};
  ggml_context_ptr context(ggml_init(params));
  std::mt19937 random(7);
  const auto add = [&](const std::string& tensor_name, std::vector<int64_t> shape) {
    if (tensor_name == options.without) return;
    const bool norm = shape.size() == 1;
    ggml_tensor* tensor = ggml_new_tensor(context.get(), norm ? GGML_TYPE_F32 : options.type,
                                          static_cast<int>(shape.size()), shape.data());
    ggml_set_name(tensor, tensor_name.c_str());
    std::normal_distribution<float> values(
        norm ? 1.0f : 0.0f, norm ? 0.1f : 1.0f / std::sqrt(static_cast<float>(shape[0])));
    std::vector<float> data(ggml_nelements(tensor));
    for (float& value : data) value = values(random);
    ggml_quantize_chunk(tensor->type, data.data(), tensor->data, 0, ggml_nrows(tensor), shape[0],
                        nullptr);
    gguf_add_tensor(gguf.get(), tensor);
  };
  add("token_embd.weight", {kEmbd, kVocab});
  add("output_norm.weight", {kEmbd});
  if (!options.tied) add("output.weight", {kEmbd, kVocab});
  const int kv = kEmbd / kHeads * kHeadsKv;
  for (int layer = 0; layer < kLayers; ++layer) {
    const std::string block = "blk." + std::to_string(layer) + ".";
    add(block + "attn_norm.weight", {kEmbd});
    add(block + "attn_q.weight", {kEmbd, kEmbd});
    add(block + "attn_k.weight", {kEmbd, kv});
    add(block + "attn_v.weight", {kEmbd, kv});
    add(block + "attn_output.weight", {kEmbd, kEmbd});
    add(block + "ffn_norm.weight", {kEmbd});
    add(block + "ffn_gate.weight", {kEmbd, kFeedForward});
    add(block + "ffn_up.weight", {kEmbd, kFeedForward});
    add(block + "ffn_down.weight", {kFeedForward, kEmbd});
  }
  if (!options.extra_tensor.empty()) add(options.extra_tensor, {kEmbd});
  EXPECT_TRUE(gguf_write_to_file(gguf.get(), path.c_str(), false));
  return path;
}

// Errors that llama.cpp logged.
std::string& Errors() {
  static std::string errors;
  return errors;
}

class LayerRange : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    ASSERT_TRUE(meshnet::llama_cpp::RegisterCpuBackend("").ok());
    llama_backend_init();
    llama_log_set(
        [](ggml_log_level level, const char* text, void*) {
          if (level >= GGML_LOG_LEVEL_ERROR && level != GGML_LOG_LEVEL_CONT) Errors() += text;
        },
        nullptr);
  }

  void SetUp() override { Errors().clear(); }
};

llama_model_ptr Load(const std::string& path, int begin, int end,
                     llama_load_mode mode = LLAMA_LOAD_MODE_AUTO) {
  llama_model_params params = llama_model_default_params();
  params.layer_begin = begin;
  params.layer_end = end;
  params.load_mode = mode;
  return llama_model_ptr(llama_model_load_from_file(path.c_str(), params));
}

struct ContextOptions {
  bool unified = true;
  ggml_type cache_type = GGML_TYPE_F16;
  llama_flash_attn_type flash_attention = LLAMA_FLASH_ATTN_TYPE_ENABLED;
  uint32_t n_ubatch = 64;
};

// One layer range with a context on it.
struct Stage {
  llama_model_ptr model;
  llama_context_ptr context;
};

Stage Open(const std::string& path, int begin, int end, const ContextOptions& options) {
  Stage stage;
  stage.model = Load(path, begin, end);
  llama_context_params params = llama_context_default_params();
  params.n_ctx = 1024;
  params.n_batch = 128;
  params.n_ubatch = options.n_ubatch;
  params.n_seq_max = 4;
  params.kv_unified = options.unified;
  // threads that wait for each other on a busy machine would take minutes
  params.n_threads = params.n_threads_batch = 1;
  params.type_k = params.type_v = options.cache_type;
  params.flash_attn_type = options.flash_attention;
  stage.context.reset(llama_init_from_model(stage.model.get(), params));
  EXPECT_NE(stage.context, nullptr);
  return stage;
}

struct Row {
  llama_token token;
  llama_pos position;
  llama_seq_id sequence;
  bool output;
};

struct BatchResult {
  int code = 0;
  std::vector<float> boundary;  // of a range without the last layer
  std::vector<float> logits;    // of the output rows otherwise
};

BatchResult Decode(Stage& stage, const std::vector<Row>& rows, const std::vector<float>* boundary,
                   bool with_tokens = true) {
  const int n = static_cast<int>(rows.size());
  std::vector<llama_token> tokens;
  std::vector<llama_pos> positions;
  std::vector<llama_seq_id> sequences;
  std::vector<int8_t> outputs;
  for (const Row& row : rows) {
    tokens.push_back(row.token);
    positions.push_back(row.position);
    sequences.push_back(row.sequence);
    outputs.push_back(row.output ? 1 : 0);
  }
  std::vector<int32_t> counts(n, 1);
  std::vector<llama_seq_id*> sequence_lists(n);
  for (int i = 0; i < n; ++i) sequence_lists[i] = &sequences[i];
  const int width = llama_model_boundary_n_embd_out(stage.model.get());

  llama_batch batch = {};
  batch.n_tokens = n;
  batch.token = with_tokens ? tokens.data() : nullptr;
  batch.embd = boundary == nullptr ? nullptr : const_cast<float*>(boundary->data());
  batch.pos = positions.data();
  batch.n_seq_id = counts.data();
  batch.seq_id = sequence_lists.data();
  batch.logits = width > 0 ? nullptr : outputs.data();

  BatchResult result;
  result.code = llama_decode(stage.context.get(), batch);
  if (result.code != 0) return result;
  if (width > 0) {
    const float* rows_out = llama_get_boundary(stage.context.get());
    if (rows_out == nullptr) return result;
    result.boundary.assign(rows_out, rows_out + size_t(n) * width);
    return result;
  }
  for (int i = 0; i < n; ++i) {
    if (!rows[i].output) continue;
    const float* logits = llama_get_logits_ith(stage.context.get(), i);
    result.logits.insert(result.logits.end(), logits, logits + kVocab);
  }
  return result;
}

class Chain {
 public:
  Chain(const std::string& path, const std::vector<int>& cuts, const ContextOptions& options = {}) {
    int begin = 0;
    for (size_t i = 0; i <= cuts.size(); ++i) {
      const int end = i < cuts.size() ? cuts[i] : kLayers;
      stages_.push_back(Open(path, begin, end, options));
      begin = end;
    }
  }

  std::vector<float> Run(const std::vector<Row>& rows) {
    std::vector<float> boundary;
    for (size_t i = 0; i < stages_.size(); ++i) {
      BatchResult result = Decode(stages_[i], rows, i == 0 ? nullptr : &boundary);
      EXPECT_EQ(result.code, 0) << "stage " << i;
      if (i + 1 == stages_.size()) return result.logits;
      boundary = std::move(result.boundary);
    }
    return {};
  }

  void Truncate(llama_seq_id sequence, llama_pos from) {
    for (Stage& stage : stages_) {
      EXPECT_TRUE(llama_memory_seq_rm(llama_get_memory(stage.context.get()), sequence, from, -1));
    }
  }

 private:
  std::vector<Stage> stages_;
};

llama_token Token(int index) { return (index * 131 + 7) % kVocab; }

llama_token Best(const std::vector<float>& logits) {
  return static_cast<llama_token>(std::max_element(logits.end() - kVocab, logits.end()) -
                                  (logits.end() - kVocab));
}

// Prefill in two sizes, two interleaved sequences, decode with a rollback: every logit, bit for
// bit.
void ExpectParity(const std::string& path, const std::vector<int>& cuts,
                  const ContextOptions& options) {
  Chain whole(path, {}, options);
  Chain parts(path, cuts, options);
  const auto compare = [&](const std::vector<Row>& rows, const char* what) {
    const std::vector<float> expected = whole.Run(rows);
    const std::vector<float> found = parts.Run(rows);
    EXPECT_TRUE(
        std::all_of(expected.begin(), expected.end(), [](float f) { return std::isfinite(f); }));
    EXPECT_EQ(expected, found) << what;
    return expected;
  };
  std::vector<Row> rows;
  for (int i = 0; i < 100; ++i) rows.push_back({Token(i), i, 0, true});
  std::vector<float> logits = compare(rows, "prefill, all outputs");
  rows.clear();
  for (int i = 0; i < 33; ++i) rows.push_back({Token(i + 500), i, 1, i == 32});
  compare(rows, "prefill, last output");
  rows.clear();
  for (int i = 0; i < 20; ++i) {
    rows.push_back({Token(i + 60), i, 2, i % 3 == 0});
    rows.push_back({Token(i + 90), i, 3, i % 4 == 0});
  }
  compare(rows, "two sequences in one batch");
  int length = 100;
  for (int step = 0; step < 40; ++step) {
    rows = {{Best(logits), length, 0, true}};
    if (step % 2 == 1) rows.push_back({Token(step), 33 + step / 2, 1, true});
    logits = compare(rows, "decode");
    logits.resize(kVocab);
    ++length;
    if (step == 20) {
      length -= 5;
      whole.Truncate(0, length);
      parts.Truncate(0, length);
    }
  }
}

TEST_F(LayerRange, RangesGiveTheBitsOfTheWholeModel) {
  const std::string path = WriteModel("dense", {});
  for (const std::vector<int>& cuts :
       std::vector<std::vector<int>>{{1}, {3}, {5}, {2, 4}, {1, 2, 3, 5}}) {
    SCOPED_TRACE(::testing::PrintToString(cuts));
    ExpectParity(path, cuts, {});
  }
}

TEST_F(LayerRange, SoDoTheyWithTiedEmbeddings) {
  ModelOptions options;
  options.tied = true;
  ExpectParity(WriteModel("tied", options), {2, 4}, {});
}

TEST_F(LayerRange, SoDoTheyWithOtherCachesAndBatches) {
  const std::string path = WriteModel("dense", {});
  ContextOptions streams;
  streams.unified = false;
  ExpectParity(path, {3}, streams);
  ContextOptions quantised;
  quantised.cache_type = GGML_TYPE_Q8_0;
  ExpectParity(path, {3}, quantised);
  ContextOptions plain;
  plain.flash_attention = LLAMA_FLASH_ATTN_TYPE_DISABLED;
  ExpectParity(path, {3}, plain);
  ContextOptions small;
  small.n_ubatch = 16;
  ExpectParity(path, {3}, small);
  small.unified = false;
  ExpectParity(path, {3}, small);
}

TEST_F(LayerRange, ALoadedRangeTellsWhatItIs) {
  const std::string path = WriteModel("dense", {});
  const llama_model_ptr whole = Load(path, 0, -1);
  const llama_model_ptr head = Load(path, 0, 2);
  const llama_model_ptr middle = Load(path, 2, 5);
  const llama_model_ptr tail = Load(path, 5, kLayers);
  EXPECT_TRUE(llama_model_supports_layer_range(whole.get()));
  EXPECT_EQ(llama_model_layer_begin(middle.get()), 2);
  EXPECT_EQ(llama_model_layer_end(middle.get()), 5);
  EXPECT_EQ(llama_model_layer_end(whole.get()), kLayers);
  EXPECT_EQ(llama_model_boundary_n_embd_in(head.get()), 0);
  EXPECT_EQ(llama_model_boundary_n_embd_out(head.get()), kEmbd);
  EXPECT_EQ(llama_model_boundary_n_embd_in(middle.get()), kEmbd);
  EXPECT_EQ(llama_model_boundary_n_embd_out(middle.get()), kEmbd);
  EXPECT_EQ(llama_model_boundary_n_embd_in(tail.get()), kEmbd);
  EXPECT_EQ(llama_model_boundary_n_embd_out(tail.get()), 0);
  EXPECT_EQ(llama_model_boundary_n_embd_out(whole.get()), 0);
  EXPECT_FALSE(llama_model_boundary_needs_tokens(middle.get()));
  // 9 tensors a block; embeddings; output norm and output
  EXPECT_EQ(llama_model_loaded_n_tensors(head.get()), 2u * 9 + 1);
  EXPECT_EQ(llama_model_loaded_n_tensors(middle.get()), 3u * 9);
  EXPECT_EQ(llama_model_loaded_n_tensors(tail.get()), 1u * 9 + 2);
  EXPECT_EQ(llama_model_loaded_size(head.get()) + llama_model_loaded_size(middle.get()) +
                llama_model_loaded_size(tail.get()),
            llama_model_loaded_size(whole.get()));
}

TEST_F(LayerRange, TiedEmbeddingsAreAtBothEnds) {
  ModelOptions options;
  options.tied = true;
  const std::string path = WriteModel("tied", options);
  EXPECT_EQ(llama_model_loaded_n_tensors(Load(path, 0, 2).get()), 2u * 9 + 1);
  EXPECT_EQ(llama_model_loaded_n_tensors(Load(path, 2, 4).get()), 2u * 9);
  EXPECT_EQ(llama_model_loaded_n_tensors(Load(path, 4, kLayers).get()), 2u * 9 + 2);
}

TEST_F(LayerRange, IsLoadedWithoutMappingToo) {
  const std::string path = WriteModel("dense", {});
  const llama_model_ptr model = Load(path, 2, 5, LLAMA_LOAD_MODE_NONE);
  ASSERT_NE(model, nullptr);
  EXPECT_EQ(llama_model_loaded_n_tensors(model.get()), 3u * 9);
}

// For each tensor of a mapped model: how many of the pages that only it lies in are in this
// process's memory.
std::map<std::string, int> PresentPages(const std::string& path) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  std::vector<bool> present;  // by page of the file
  std::ifstream maps("/proc/self/maps");
  const int pagemap = open("/proc/self/pagemap", O_RDONLY);
  for (std::string line; std::getline(maps, line);) {
    if (line.find(path.substr(path.rfind('/'))) == std::string::npos) continue;
    uintptr_t begin = 0, end = 0;
    size_t offset = 0;
    EXPECT_EQ(std::sscanf(line.c_str(), "%zx-%zx %*s %zx", &begin, &end, &offset), 3);
    for (uintptr_t address = begin; address < end; address += page) {
      uint64_t entry = 0;
      const off_t at = static_cast<off_t>(address / page * sizeof(entry));
      EXPECT_EQ(pread(pagemap, &entry, sizeof(entry), at), ssize_t{sizeof(entry)});
      const size_t index = (offset + address - begin) / page;
      if (present.size() <= index) present.resize(index + 1, false);
      present[index] = (entry >> 63 & 1) != 0;
    }
  }
  close(pagemap);
  EXPECT_FALSE(present.empty()) << path << " is not mapped";

  gguf_context_ptr gguf(gguf_init_from_file(path.c_str(), {/*no_alloc=*/true, /*ctx=*/nullptr}));
  std::map<std::string, int> result;
  for (int64_t i = 0; i < gguf_get_n_tensors(gguf.get()); ++i) {
    const size_t begin = gguf_get_data_offset(gguf.get()) + gguf_get_tensor_offset(gguf.get(), i);
    const size_t end = begin + gguf_get_tensor_size(gguf.get(), i);
    int count = 0;
    for (size_t p = (begin + page - 1) / page; (p + 1) * page <= end && p < present.size(); ++p)
      count += present[p];
    result[gguf_get_tensor_name(gguf.get(), i)] = count;
  }
  return result;
}

TEST_F(LayerRange, NeverTouchesWhatItDoesNotOwn) {
  // a file of its own, which no other test has mapped; the output layer lies between what the range
  // owns
  const std::string path = WriteModel("pages", {});
  Stage head = Open(path, 0, 2, {});
  std::vector<Row> rows;
  for (int i = 0; i < 64; ++i) rows.push_back({Token(i), i, 0, true});
  ASSERT_EQ(Decode(head, rows, nullptr).code, 0);
  for (const auto& [name, pages] : PresentPages(path)) {
    const bool owned =
        name.rfind("blk.0.", 0) == 0 || name.rfind("blk.1.", 0) == 0 || name == "token_embd.weight";
    if (!owned) {
      EXPECT_EQ(pages, 0) << name;
    }
  }

  // what the whole model touches shows that pages can be seen
  head.context.reset();
  head.model.reset();
  Stage whole = Open(path, 0, -1, {});
  ASSERT_EQ(Decode(whole, rows, nullptr).code, 0);
  EXPECT_GT(PresentPages(path)["token_embd.weight"], 0);
}

// Every variant repacks this type (patch 0007).
TEST_F(LayerRange, ARepackedTensorGivesItsPagesBack) {
  ModelOptions options;
  options.type = GGML_TYPE_Q4_0;
  const std::string path = WriteModel("repacked", options);
  llama_model_params params = llama_model_default_params();
  params.use_extra_bufts = false;
  {
    const llama_model_ptr plain(llama_model_load_from_file(path.c_str(), params));
    llama_context_params context_params = llama_context_default_params();
    context_params.n_ctx = 256;
    context_params.n_threads = context_params.n_threads_batch = 1;
    Stage stage;
    stage.context.reset(llama_init_from_model(plain.get(), context_params));
    llama_token token = 1;
    ASSERT_EQ(llama_decode(stage.context.get(), llama_batch_get_one(&token, 1)), 0);
    EXPECT_GT(PresentPages(path)["blk.2.ffn_up.weight"], 0);
  }
  params.use_extra_bufts = true;
  const llama_model_ptr repacked(llama_model_load_from_file(path.c_str(), params));
  EXPECT_EQ(PresentPages(path)["blk.2.ffn_up.weight"], 0);
}

TEST_F(LayerRange, ThatIsNoneIsRefused) {
  const std::string path = WriteModel("dense", {});
  for (const auto& [begin, end] : std::vector<std::pair<int, int>>{
           {2, 2}, {4, 2}, {-1, 3}, {0, kLayers + 1}, {kLayers, -1}, {9, 12}}) {
    Errors().clear();
    EXPECT_EQ(Load(path, begin, end), nullptr) << begin << " " << end;
    EXPECT_THAT(Errors(), ::testing::HasSubstr("expected a non-empty range within [0, 6)"));
  }
}

TEST_F(LayerRange, OfAnotherArchitectureIsRefusedByName) {
  ModelOptions options;
  options.architecture = "exaone";
  const std::string path = WriteModel("exaone", options);
  const llama_model_ptr whole = Load(path, 0, -1);
  ASSERT_NE(whole, nullptr) << "the whole model loads: " << Errors();
  EXPECT_FALSE(llama_model_supports_layer_range(whole.get()));
  EXPECT_EQ(Load(path, 0, 3), nullptr);
  EXPECT_THAT(Errors(), ::testing::HasSubstr("not supported for model architecture 'exaone'"));
}

TEST_F(LayerRange, WithLockedMemoryIsRefused) {
  const std::string path = WriteModel("dense", {});
  EXPECT_EQ(Load(path, 0, 3, LLAMA_LOAD_MODE_MMAP_MLOCK), nullptr);
  EXPECT_THAT(Errors(),
              ::testing::HasSubstr("load mode 'mmap+mlock' is not supported with a layer range"));
}

TEST_F(LayerRange, NeedsItsOwnTensorsAndNoOthers) {
  ModelOptions missing;
  missing.without = "blk.3.ffn_up.weight";
  const std::string path = WriteModel("missing", missing);
  EXPECT_NE(Load(path, 0, 3), nullptr) << Errors();
  EXPECT_NE(Load(path, 4, kLayers), nullptr) << Errors();
  EXPECT_EQ(Load(path, 3, 4), nullptr);
  EXPECT_THAT(Errors(), ::testing::HasSubstr("blk.3.ffn_up.weight"));
}

TEST_F(LayerRange, WithAnUnknownTensorIsRefused) {
  ModelOptions extra;
  extra.extra_tensor = "blk.3.new_invention.weight";
  const std::string path = WriteModel("extra", extra);
  EXPECT_NE(Load(path, 0, 3), nullptr) << Errors();
  EXPECT_EQ(Load(path, 2, 5), nullptr);
  EXPECT_THAT(Errors(), ::testing::HasSubstr(
                            "tensor 'blk.3.new_invention.weight' of the layer range [2, 5)"));
}

TEST_F(LayerRange, WithoutTheFirstLayerNeedsABoundary) {
  const std::string path = WriteModel("dense", {});
  Stage middle = Open(path, 2, 4, {});
  const std::vector<Row> rows = {{1, 0, 0, true}, {2, 1, 0, true}};
  EXPECT_EQ(Decode(middle, rows, nullptr).code, -1);
  EXPECT_THAT(Errors(),
              ::testing::HasSubstr("expected the boundary of the preceding layers in batch.embd"));
  EXPECT_EQ(llama_get_boundary(middle.context.get()), nullptr);
  // and works afterwards, with and without token ids
  const std::vector<float> boundary(2 * kEmbd, 0.5f);
  const BatchResult with = Decode(middle, rows, &boundary);
  EXPECT_EQ(with.code, 0);
  llama_memory_seq_rm(llama_get_memory(middle.context.get()), 0, -1, -1);
  const BatchResult without = Decode(middle, rows, &boundary, /*with_tokens=*/false);
  EXPECT_EQ(without.code, 0);
  EXPECT_EQ(with.boundary, without.boundary);
  EXPECT_THAT(with.boundary, ::testing::SizeIs(2 * kEmbd));
}

TEST_F(LayerRange, AFailedBatchLeavesNoBoundary) {
  const std::string path = WriteModel("dense", {});
  Stage head = Open(path, 0, 3, {});
  EXPECT_EQ(Decode(head, {{1, 0, 0, true}}, nullptr).code, 0);
  EXPECT_NE(llama_get_boundary(head.context.get()), nullptr);
  EXPECT_EQ(Decode(head, {{1, 7, 0, true}}, nullptr).code, -1) << "positions have a gap";
  EXPECT_EQ(llama_get_boundary(head.context.get()), nullptr);
  EXPECT_EQ(Decode(head, {{kVocab, 1, 0, true}}, nullptr).code, -1) << "no such token";
}

TEST_F(LayerRange, WithoutTheLastLayerHasNoLogits) {
  const std::string path = WriteModel("dense", {});
  Stage head = Open(path, 0, 3, {});
  EXPECT_EQ(Decode(head, {{1, 0, 0, true}}, nullptr).code, 0);
  EXPECT_EQ(llama_get_logits(head.context.get()), nullptr);
  EXPECT_EQ(llama_get_logits_ith(head.context.get(), 0), nullptr);
  Stage tail = Open(path, 3, kLayers, {});
  const std::vector<float> boundary(kEmbd, 0.5f);
  EXPECT_EQ(Decode(tail, {{1, 0, 0, true}}, &boundary).code, 0);
  EXPECT_EQ(llama_get_boundary(tail.context.get()), nullptr);
}

TEST_F(LayerRange, WithoutTheLastLayerGivesNoEmbeddings) {
  const llama_model_ptr head = Load(WriteModel("dense", {}), 0, 3);
  llama_context_params params = llama_context_default_params();
  params.embeddings = true;
  EXPECT_EQ(llama_init_from_model(head.get(), params), nullptr);
}

TEST_F(LayerRange, KeepsStateForItsOwnLayersOnly) {
  const std::string path = WriteModel("dense", {});
  const auto state_size = [&](int begin, int end) {
    Stage stage = Open(path, begin, end, {});
    std::vector<Row> rows;
    for (int i = 0; i < 50; ++i) rows.push_back({Token(i), i, 0, false});
    rows.back().output = true;
    const std::vector<float> boundary(50 * kEmbd, 0.5f);
    EXPECT_EQ(Decode(stage, rows, begin == 0 ? nullptr : &boundary).code, 0);
    return llama_state_seq_get_size(stage.context.get(), 0);
  };
  const size_t one = state_size(2, 3);
  const size_t two = state_size(2, 4);
  const size_t three = state_size(2, 5);
  // 50 cells of keys and values in f16, for each layer
  EXPECT_GE(two - one, size_t{50} * 2 * (kEmbd / kHeads * kHeadsKv) * 2);
  EXPECT_EQ(three - two, two - one);
}

}  // namespace
