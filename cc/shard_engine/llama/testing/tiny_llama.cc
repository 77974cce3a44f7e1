#include "cc/shard_engine/llama/testing/tiny_llama.h"

#include <cmath>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "ggml.h"
#include "gguf.h"
#include "llama.h"

namespace meshnet {
namespace {

constexpr int64_t kWidth = 64;
constexpr int64_t kHeads = 2;
constexpr int64_t kKvHeads = 1;
constexpr int64_t kHeadWidth = kWidth / kHeads;
constexpr int64_t kFeedForward = 128;
constexpr int64_t kVocabulary = 512;
constexpr int32_t kBytes = 256;
constexpr int32_t kFirstByte = 3;
constexpr size_t kTensorBytes = 4u << 20;

class Random {
 public:
  explicit Random(uint32_t seed) : state_(seed * 2654435761ull + 1) {}

  // Close to normal with deviation 1: the sum of four uniform numbers.
  float Normal() {
    float sum = 0.0f;
    for (int i = 0; i < 4; ++i) sum += static_cast<float>(Next() >> 40) * 0x1.0p-24f - 0.5f;
    return sum * 1.7320508f;
  }

 private:
  uint64_t Next() {
    state_ = state_ * 6364136223846793005ull + 1442695040888963407ull;
    return state_ ^ (state_ >> 29);
  }

  uint64_t state_;
};

class Writer {
 public:
  explicit Writer(const TinyLlamaOptions& options)
      : options_(options), random_(options.seed), gguf_(gguf_init_empty()) {
    ggml_init_params params = {};
    params.mem_size = kTensorBytes + options.layers * (1u << 20);
    ggml_ = ggml_init(params);
  }
  ~Writer() {
    gguf_free(gguf_);
    ggml_free(ggml_);
  }
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;

  bool Write(const std::string& path) {
    AddHeader();
    AddVocabulary();
    const ggml_type matrix = options_.quantized ? GGML_TYPE_Q4_0 : GGML_TYPE_F16;
    AddMatrix("token_embd.weight", GGML_TYPE_F16, kWidth, kVocabulary);
    AddNorm("output_norm.weight");
    if (!options_.tied_output) AddMatrix("output.weight", GGML_TYPE_F16, kWidth, kVocabulary);
    for (uint32_t layer = 0; layer < options_.layers; ++layer) {
      const std::string block = absl::StrCat("blk.", layer, ".");
      AddNorm(block + "attn_norm.weight");
      AddMatrix(block + "attn_q.weight", matrix, kWidth, kWidth);
      AddMatrix(block + "attn_k.weight", matrix, kWidth, kKvHeads * kHeadWidth);
      AddMatrix(block + "attn_v.weight", matrix, kWidth, kKvHeads * kHeadWidth);
      AddMatrix(block + "attn_output.weight", matrix, kWidth, kWidth);
      AddNorm(block + "ffn_norm.weight");
      AddMatrix(block + "ffn_gate.weight", matrix, kWidth, kFeedForward);
      AddMatrix(block + "ffn_up.weight", matrix, kWidth, kFeedForward);
      AddMatrix(block + "ffn_down.weight", matrix, kFeedForward, kWidth);
    }
    if (options_.parts > 1) return WriteParts(path);
    for (const ggml_tensor* tensor : tensors_) gguf_add_tensor(gguf_, tensor);
    return gguf_write_to_file(gguf_, path.c_str(), /*only_meta=*/false);
  }

 private:
  bool WriteParts(const std::string& path) {
    const std::string prefix(absl::StripSuffix(path, ".gguf"));
    const size_t with_tensors = options_.parts - 1;
    for (size_t number = 0; number < options_.parts; ++number) {
      gguf_context* part = number == 0 ? gguf_ : gguf_init_empty();
      gguf_set_val_u16(part, "split.no", static_cast<uint16_t>(number));
      gguf_set_val_u16(part, "split.count", static_cast<uint16_t>(options_.parts));
      gguf_set_val_i32(part, "split.tensors.count", static_cast<int32_t>(tensors_.size()));
      for (size_t i = 0; number > 0 && i < tensors_.size(); ++i) {
        if (i * with_tensors / tensors_.size() + 1 == number) gguf_add_tensor(part, tensors_[i]);
      }
      const std::string name =
          absl::StrFormat("%s-%05d-of-%05d.gguf", prefix, number + 1, options_.parts);
      const bool written = gguf_write_to_file(part, name.c_str(), /*only_meta=*/false);
      if (number > 0) gguf_free(part);
      if (!written) return false;
    }
    return true;
  }

  void AddHeader() {
    const std::string prefix = options_.architecture + ".";
    const auto set = [&](const char* key, uint32_t value) {
      gguf_set_val_u32(gguf_, (prefix + key).c_str(), value);
    };
    gguf_set_val_str(gguf_, "general.architecture", options_.architecture.c_str());
    gguf_set_val_str(gguf_, "general.name", "tiny random llama");
    gguf_set_val_u32(gguf_, "general.file_type",
                     options_.quantized ? LLAMA_FTYPE_MOSTLY_Q4_0 : LLAMA_FTYPE_MOSTLY_F16);
    set("context_length", 1024);
    set("embedding_length", kWidth);
    set("block_count", options_.layers);
    set("feed_forward_length", kFeedForward);
    set("attention.head_count", kHeads);
    set("attention.head_count_kv", kKvHeads);
    set("rope.dimension_count", kHeadWidth);
    set("vocab_size", kVocabulary);
    gguf_set_val_f32(gguf_, (prefix + "attention.layer_norm_rms_epsilon").c_str(), 1e-5f);
    gguf_set_val_f32(gguf_, (prefix + "rope.freq_base").c_str(), 10000.0f);
  }

  // Three specials, the 256 bytes, letters with and without the word mark, then made-up words.
  void AddVocabulary() {
    std::vector<std::string> tokens = {"<unk>", "<s>", "</s>"};
    std::vector<int32_t> types = {LLAMA_TOKEN_TYPE_UNKNOWN, LLAMA_TOKEN_TYPE_CONTROL,
                                  LLAMA_TOKEN_TYPE_CONTROL};
    for (int byte = 0; byte < kBytes; ++byte) {
      tokens.push_back(absl::StrFormat("<0x%02X>", byte));
      types.push_back(LLAMA_TOKEN_TYPE_BYTE);
    }
    tokens.push_back("\xE2\x96\x81");
    for (char c = '!'; c < 0x7f; ++c) tokens.push_back(std::string(1, c));
    for (char c = 'a'; c <= 'z'; ++c)
      tokens.push_back(absl::StrCat("\xE2\x96\x81", std::string(1, c)));
    for (char a = 'a'; a <= 'z'; ++a) {
      for (const char b : {'e', 'o', 'a', 'n', 'r', 's', 't'}) {
        if (tokens.size() < kVocabulary) tokens.push_back({a, b});
      }
    }
    types.resize(tokens.size(), LLAMA_TOKEN_TYPE_NORMAL);
    std::vector<float> scores(tokens.size());
    std::vector<const char*> texts(tokens.size());
    for (size_t i = 0; i < tokens.size(); ++i) {
      scores[i] = i < kFirstByte + kBytes ? 0.0f : -static_cast<float>(tokens.size() - i);
      texts[i] = tokens[i].c_str();
    }
    gguf_set_val_str(gguf_, "tokenizer.ggml.model", "llama");
    gguf_set_arr_str(gguf_, "tokenizer.ggml.tokens", texts.data(), texts.size());
    gguf_set_arr_data(gguf_, "tokenizer.ggml.scores", GGUF_TYPE_FLOAT32, scores.data(),
                      scores.size());
    gguf_set_arr_data(gguf_, "tokenizer.ggml.token_type", GGUF_TYPE_INT32, types.data(),
                      types.size());
    gguf_set_val_u32(gguf_, "tokenizer.ggml.unknown_token_id", 0);
    gguf_set_val_u32(gguf_, "tokenizer.ggml.bos_token_id", 1);
    gguf_set_val_u32(gguf_, "tokenizer.ggml.eos_token_id", 2);
    gguf_set_val_bool(gguf_, "tokenizer.ggml.add_bos_token", true);
    gguf_set_val_str(gguf_, "tokenizer.chat_template",
                     "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}");
    gguf_set_val_str(gguf_, "tokenizer.chat_template.tool_use", "tools: {{ tools }}");
  }

  void AddNorm(const std::string& name) {
    std::vector<float> values(kWidth);
    for (float& value : values) value = 1.0f + 0.1f * random_.Normal();
    AddTensor(name, GGML_TYPE_F32, kWidth, 1, std::move(values));
  }

  void AddMatrix(const std::string& name, ggml_type type, int64_t in, int64_t out) {
    std::vector<float> values(in * out);
    const float scale = 1.0f / std::sqrt(static_cast<float>(in));
    for (float& value : values) value = scale * random_.Normal();
    AddTensor(name, type, in, out, std::move(values));
  }

  void AddTensor(std::string name, ggml_type type, int64_t in, int64_t out,
                 std::vector<float> values) {
    if (options_.edit != nullptr) options_.edit(&name, &values);
    ggml_tensor* tensor =
        out == 1 ? ggml_new_tensor_1d(ggml_, type, in) : ggml_new_tensor_2d(ggml_, type, in, out);
    ggml_quantize_chunk(type, values.data(), tensor->data, 0, out, in, nullptr);
    ggml_set_name(tensor, name.c_str());
    tensors_.push_back(tensor);
  }

  const TinyLlamaOptions options_;
  Random random_;
  gguf_context* gguf_;
  ggml_context* ggml_ = nullptr;
  // In the file's order.
  std::vector<ggml_tensor*> tensors_;
};

}  // namespace

absl::Status WriteTinyLlama(const std::string& path, const TinyLlamaOptions& options) {
  if (!Writer(options).Write(path)) {
    return absl::InternalError(absl::StrCat("cannot write ", path));
  }
  return absl::OkStatus();
}

}  // namespace meshnet
