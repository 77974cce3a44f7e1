// Runs llama.cpp as its users do, for comparison: the whole model in this process or, with --rpc,
// over llama.cpp's own RPC servers. Several sequences are served as llama-server serves them:
// prompts are filled into one batch, then every round decodes one token of each sequence in a
// single llama_decode. Greedy; ends of generation are ignored, so that every system does the same
// work.
//
// Part of the benchmark only: the worker knows nothing of the RPC backend.
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "benchmarks/llama_driver/link_bytes.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml-rpc.h"
#include "llama.h"
#include "third_party/llama_cpp/cpu_backend.h"

ABSL_FLAG(std::string, model, "", "GGUF file");
ABSL_FLAG(std::vector<std::string>, rpc, {},
          "HOST:PORT of rpc-servers that hold all layers, in equal parts; none: this process holds "
          "the model");
ABSL_FLAG(int, threads, 0, "Threads of this process; 0 = one per core");
ABSL_FLAG(int, poll, 50, "How eagerly idle threads spin, 0-100; 50 is llama.cpp's default");
ABSL_FLAG(int, max_sessions, 8, "Sequences that one command can run");
ABSL_FLAG(int, context, 1024, "Tokens of each sequence");
ABSL_FLAG(bool, kv_unified, true, "One cache for all sequences, as llama-server does");

namespace meshnet::benchmarks {
namespace {

using Clock = std::chrono::steady_clock;

constexpr char kUsage[] =
    "Times llama.cpp on prompts given as token ids.\n\n"
    "Example: printf 'prefill 1,2,3 4,5,6\\ndecode 16\\n' | llama_driver --model=model.gguf\n\n"
    "Prints {\"ready\": true, ...} once the model is loaded and warm. Then reads commands from "
    "stdin, one a line, and\n"
    "answers each with a line of JSON:\n"
    "  prefill IDS [IDS...]   one sequence for each comma-separated list, up to its first token; "
    "forgets earlier ones\n"
    "                         -> prefill_s (until all have it), ttft_ms (one for each), token_ids\n"
    "  decode N               N further tokens of every sequence\n"
    "                         -> decode_s, decode_tokens, link_bytes (TCP payload both ways), "
    "token_ids\n"
    "Ends when stdin ends. Exit status: 0, or 2 when it cannot start.";

double Seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

void LogErrors(ggml_log_level level, const char* text, void*) {
  if (level >= GGML_LOG_LEVEL_WARN && level != GGML_LOG_LEVEL_CONT) fputs(text, stderr);
}

struct ModelDeleter {
  void operator()(llama_model* model) const { llama_model_free(model); }
};
struct ContextDeleter {
  void operator()(llama_context* context) const { llama_free(context); }
};
// A function of the CPU backend that runs; several are in the program, so it cannot be called by
// its name.
template <typename Function>
Function CpuFunction(const char* name) {
  ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
  return reinterpret_cast<Function>(
      ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device), name));
}

struct ThreadpoolDeleter {
  void operator()(ggml_threadpool* pool) const {
    CpuFunction<decltype(&ggml_threadpool_free)>("ggml_threadpool_free")(pool);
  }
};

class Driver {
 public:
  ~Driver() { llama_batch_free(batch_); }

  // False, with a message on stderr, when the model or a server cannot be used.
  bool Load() {
    llama_log_set(LogErrors, nullptr);
    const absl::StatusOr<std::string> variant = llama_cpp::RegisterCpuBackend("");
    if (!variant.ok()) {
      std::cerr << "llama_driver: " << variant.status() << "\n";
      return false;
    }
    variant_ = *variant;
    threads_ = absl::GetFlag(FLAGS_threads);
    if (threads_ <= 0) threads_ = static_cast<int>(std::thread::hardware_concurrency());

    llama_model_params model_params = llama_model_default_params();
    std::vector<ggml_backend_dev_t> devices;
    for (const std::string& endpoint : absl::GetFlag(FLAGS_rpc)) {
      const ggml_backend_reg_t reg = ggml_backend_rpc_add_server(endpoint.c_str());
      if (reg == nullptr || ggml_backend_reg_dev_count(reg) == 0) {
        std::cerr << "llama_driver: expected an rpc-server at " << endpoint << ", found none\n";
        return false;
      }
      ggml_backend_register(reg);
      devices.push_back(ggml_backend_reg_dev_get(reg, 0));
    }
    const std::vector<float> equal_parts(llama_max_devices(), 1.0f);
    if (!devices.empty()) {
      devices.push_back(nullptr);
      model_params.devices = devices.data();
      model_params.n_gpu_layers = -1;
      model_params.tensor_split = equal_parts.data();
    } else {
      model_params.n_gpu_layers = 0;
    }
    model_.reset(llama_model_load_from_file(absl::GetFlag(FLAGS_model).c_str(), model_params));
    if (model_ == nullptr) {
      std::cerr << "llama_driver: expected a GGUF at --model=" << absl::GetFlag(FLAGS_model)
                << " that llama.cpp can load\n";
      return false;
    }
    vocabulary_ = llama_vocab_n_tokens(llama_model_get_vocab(model_.get()));

    llama_context_params params = llama_context_default_params();
    params.n_seq_max = static_cast<uint32_t>(absl::GetFlag(FLAGS_max_sessions));
    params.n_ctx = params.n_seq_max * static_cast<uint32_t>(absl::GetFlag(FLAGS_context));
    params.n_threads = threads_;
    params.n_threads_batch = threads_;
    params.kv_unified = absl::GetFlag(FLAGS_kv_unified);
    params.no_perf = true;
    context_.reset(llama_init_from_model(model_.get(), params));
    if (context_ == nullptr) {
      std::cerr << "llama_driver: llama.cpp made no context\n";
      return false;
    }
    // As llama-server and llama-bench do; without one, a build without OpenMP starts threads for
    // every graph.
    ggml_threadpool_params pool = ggml_threadpool_params_default(threads_);
    pool.poll = static_cast<uint32_t>(absl::GetFlag(FLAGS_poll));
    pool_.reset(CpuFunction<decltype(&ggml_threadpool_new)>("ggml_threadpool_new")(&pool));
    llama_attach_threadpool(context_.get(), pool_.get(), pool_.get());
    batch_tokens_ = static_cast<int32_t>(llama_n_batch(context_.get()));
    batch_ = llama_batch_init(batch_tokens_, 0, 1);
    return true;
  }

  // Both answer with JSON, an error when llama.cpp fails.
  std::string Prefill(const std::vector<std::vector<llama_token>>& prompts) {
    llama_memory_clear(llama_get_memory(context_.get()), true);
    const size_t count = prompts.size();
    positions_.clear();
    last_.assign(count, 0);
    std::vector<std::string> ttft_ms;
    std::vector<std::pair<size_t, int32_t>> ends;

    const Clock::time_point start = Clock::now();
    const auto flush = [&] {
      if (llama_decode(context_.get(), batch_) != 0) return false;
      for (const auto& [sequence, row] : ends) {
        last_[sequence] = Greedy(row);
        ttft_ms.push_back(absl::StrCat(Seconds(Clock::now() - start) * 1e3));
      }
      batch_.n_tokens = 0;
      ends.clear();
      return true;
    };
    batch_.n_tokens = 0;
    for (size_t sequence = 0; sequence < count; ++sequence) {
      const std::vector<llama_token>& prompt = prompts[sequence];
      for (size_t i = 0; i < prompt.size(); ++i) {
        const bool last = i + 1 == prompt.size();
        if (last) ends.emplace_back(sequence, batch_.n_tokens);
        Add(prompt[i], i, sequence, last);
        if (batch_.n_tokens == batch_tokens_ && !flush()) return Failed();
      }
      positions_.push_back(prompt.size());
    }
    if (batch_.n_tokens > 0 && !flush()) return Failed();
    const double prefill_s = Seconds(Clock::now() - start);
    return absl::StrCat("{\"prefill_s\": ", prefill_s, ", \"ttft_ms\": [",
                        absl::StrJoin(ttft_ms, ", "), "], \"token_ids\": [[",
                        absl::StrJoin(last_, "], ["), "]]}");
  }

  std::string Decode(int rounds) {
    std::vector<std::vector<llama_token>> sampled(last_.size());
    const LinkBytes before = OpenTcpBytes();
    const Clock::time_point start = Clock::now();
    for (int round = 0; round < rounds; ++round) {
      batch_.n_tokens = 0;
      for (size_t sequence = 0; sequence < last_.size(); ++sequence) {
        Add(last_[sequence], positions_[sequence]++, sequence, true);
      }
      if (llama_decode(context_.get(), batch_) != 0) return Failed();
      for (size_t sequence = 0; sequence < last_.size(); ++sequence) {
        last_[sequence] = Greedy(static_cast<int32_t>(sequence));
        sampled[sequence].push_back(last_[sequence]);
      }
    }
    const double decode_s = Seconds(Clock::now() - start);
    const LinkBytes after = OpenTcpBytes();
    std::vector<std::string> ids;
    for (const auto& tokens : sampled) ids.push_back(absl::StrJoin(tokens, ", "));
    return absl::StrCat(
        "{\"decode_s\": ", decode_s,
        ", \"decode_tokens\": ", last_.size() * static_cast<size_t>(rounds),
        ", \"link_bytes\": ", after.sent - before.sent + after.received - before.received,
        ", \"token_ids\": [[", absl::StrJoin(ids, "], ["), "]]}");
  }

  // Whether every sequence has room for `rounds` more tokens.
  bool Fits(int rounds) const {
    for (const size_t position : positions_) {
      if (position + static_cast<size_t>(rounds) > Context()) return false;
    }
    return !positions_.empty();
  }

  static size_t Context() { return static_cast<size_t>(absl::GetFlag(FLAGS_context)); }

  const std::string& variant() const { return variant_; }
  int threads() const { return threads_; }
  int layers() const { return llama_model_n_layer(model_.get()); }
  int vocabulary() const { return vocabulary_; }

 private:
  static std::string Failed() { return "{\"error\": \"llama_decode failed\"}"; }

  void Add(llama_token token, size_t position, size_t sequence, bool logits) {
    const int32_t row = batch_.n_tokens++;
    batch_.token[row] = token;
    batch_.pos[row] = static_cast<llama_pos>(position);
    batch_.n_seq_id[row] = 1;
    batch_.seq_id[row][0] = static_cast<llama_seq_id>(sequence);
    batch_.logits[row] = logits ? 1 : 0;
  }

  llama_token Greedy(int32_t row) {
    const float* logits = llama_get_logits_ith(context_.get(), row);
    return static_cast<llama_token>(std::max_element(logits, logits + vocabulary_) - logits);
  }

  std::string variant_;
  int threads_ = 0;
  int vocabulary_ = 0;
  int32_t batch_tokens_ = 0;
  llama_batch batch_{};
  // Of each sequence: where its next token goes, and that token.
  std::vector<size_t> positions_;
  std::vector<llama_token> last_;
  std::unique_ptr<llama_model, ModelDeleter> model_;
  // Before the context, so that it goes after it.
  std::unique_ptr<ggml_threadpool, ThreadpoolDeleter> pool_;
  std::unique_ptr<llama_context, ContextDeleter> context_;
};

// Empty when `text` is not a list of token ids.
std::vector<llama_token> ParseIds(const std::string& text, int vocabulary) {
  std::vector<llama_token> ids;
  for (const absl::string_view part : absl::StrSplit(text, ',')) {
    int id = 0;
    if (!absl::SimpleAtoi(part, &id) || id < 0 || id >= vocabulary) return {};
    ids.push_back(id);
  }
  return ids;
}

std::string Answer(Driver* driver, const std::string& line) {
  const std::vector<std::string> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
  if (words.size() == 2 && words[0] == "decode") {
    int rounds = 0;
    if (absl::SimpleAtoi(words[1], &rounds) && rounds > 0 && driver->Fits(rounds)) {
      return driver->Decode(rounds);
    }
  } else if (words.size() >= 2 && words[0] == "prefill") {
    std::vector<std::vector<llama_token>> prompts;
    bool valid = words.size() - 1 <= static_cast<size_t>(absl::GetFlag(FLAGS_max_sessions));
    for (size_t i = 1; valid && i < words.size(); ++i) {
      prompts.push_back(ParseIds(words[i], driver->vocabulary()));
      valid = !prompts.back().empty() && prompts.back().size() <= Driver::Context();
    }
    if (valid) return driver->Prefill(prompts);
  }
  return "{\"error\": \"expected: prefill IDS [IDS...] or decode N, within --max_sessions and "
         "--context\"}";
}

int Main() {
  Driver driver;
  if (!driver.Load()) return 2;
  driver.Prefill({{1, 2, 3, 4}});
  driver.Decode(1);
  std::cout << "{\"ready\": true, \"cpu_variant\": \"" << driver.variant()
            << "\", \"threads\": " << driver.threads() << ", \"layers\": " << driver.layers()
            << ", \"vocabulary\": " << driver.vocabulary() << "}" << std::endl;
  std::string line;
  while (std::getline(std::cin, line)) std::cout << Answer(&driver, line) << std::endl;
  return 0;
}

}  // namespace
}  // namespace meshnet::benchmarks

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage(meshnet::benchmarks::kUsage);
  absl::ParseCommandLine(argc, argv);
  return meshnet::benchmarks::Main();
}
