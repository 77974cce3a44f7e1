// What upstream's test-llama-archs.cpp takes from upstream's common library, without the rest of
// that library (argument parsing, chat templates, downloads): logging, the common start, and
// filling a batch. The test itself is upstream's.

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "common.h"
#include "log.h"
#include "third_party/llama_cpp/cpu_backend.h"

namespace {

int g_threshold = LOG_DEFAULT_LLAMA;

void Log(ggml_log_level level, const char* text, void* /*user_data*/) {
  if (common_log_get_verbosity(level) <= g_threshold) std::fputs(text, stderr);
}

}  // namespace

struct common_log {};

int common_log_get_verbosity_thold(void) { return g_threshold; }

void common_log_set_verbosity_thold(int verbosity) { g_threshold = verbosity; }

int common_log_get_verbosity(enum ggml_log_level level) {
  switch (level) {
    case GGML_LOG_LEVEL_DEBUG:
      return LOG_LEVEL_DEBUG;
    case GGML_LOG_LEVEL_INFO:
    case GGML_LOG_LEVEL_CONT:
      return LOG_LEVEL_INFO;
    case GGML_LOG_LEVEL_WARN:
      return LOG_LEVEL_WARN;
    case GGML_LOG_LEVEL_ERROR:
      return LOG_LEVEL_ERROR;
    default:
      return LOG_LEVEL_OUTPUT;
  }
}

common_log* common_log_main() {
  static common_log log;
  return &log;
}

void common_log_flush(common_log* /*log*/) { std::fflush(stdout); }

void common_log_add(common_log* /*log*/, enum ggml_log_level /*level*/, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stdout, format, arguments);
  va_end(arguments);
}

void common_init() {
  if (!meshnet::llama_cpp::RegisterCpuBackend("").ok()) std::abort();
  llama_log_set(Log, nullptr);
}

void common_batch_add(llama_batch& batch, llama_token id, llama_pos pos,
                      const std::vector<llama_seq_id>& seq_ids, bool logits) {
  const int row = batch.n_tokens;
  batch.token[row] = id;
  batch.pos[row] = pos;
  batch.n_seq_id[row] = static_cast<int32_t>(seq_ids.size());
  for (size_t i = 0; i < seq_ids.size(); ++i) batch.seq_id[row][i] = seq_ids[i];
  batch.logits[row] = logits ? 1 : 0;
  ++batch.n_tokens;
}

// The test is compiled with llama_init_from_model renamed to this. It asks for four threads, which
// on a machine with fewer free cores spend most of their time waiting for each other.
extern "C" llama_context* llama_init_with_one_thread(llama_model* model,
                                                     llama_context_params params) {
  params.n_threads = 1;
  params.n_threads_batch = 1;
  return llama_init_from_model(model, params);
}
