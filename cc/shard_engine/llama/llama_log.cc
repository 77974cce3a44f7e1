#include "cc/shard_engine/llama/llama_log.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/mutex.h"
#include "llama.h"

namespace meshnet {
namespace {

constexpr size_t kMaxErrorBytes = 512;

struct LogState {
  absl::Mutex mu;
  LlamaLogSink sink ABSL_GUARDED_BY(mu);
  std::string line ABSL_GUARDED_BY(mu);
  LlamaLogLevel line_level ABSL_GUARDED_BY(mu) = LlamaLogLevel::kInfo;
  std::string errors ABSL_GUARDED_BY(mu);

  void Append(LlamaLogLevel level, bool continues, absl::string_view text) ABSL_LOCKS_EXCLUDED(mu) {
    absl::MutexLock lock(&mu);
    if (!continues) line_level = level;
    while (!text.empty()) {
      const size_t end = text.find('\n');
      absl::StrAppend(&line, text.substr(0, end));
      if (end == absl::string_view::npos) break;
      text.remove_prefix(end + 1);
      Flush();
    }
  }

  void Flush() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    if (line_level == LlamaLogLevel::kError && errors.size() < kMaxErrorBytes) {
      absl::StrAppend(&errors, errors.empty() ? "" : "; ", line);
    }
    if (sink && !line.empty()) sink(line_level, line);
    line.clear();
  }
};

// Never destroyed: ggml's threads may log while the process ends.
LogState& State() {
  static auto* state = new LogState;
  return *state;
}

LlamaLogLevel FromGgml(ggml_log_level level) {
  switch (level) {
    case GGML_LOG_LEVEL_ERROR:
      return LlamaLogLevel::kError;
    case GGML_LOG_LEVEL_WARN:
      return LlamaLogLevel::kWarning;
    case GGML_LOG_LEVEL_DEBUG:
      return LlamaLogLevel::kDebug;
    default:
      return LlamaLogLevel::kInfo;
  }
}

void OnLog(ggml_log_level level, const char* text, void* /*user_data*/) {
  State().Append(FromGgml(level), level == GGML_LOG_LEVEL_CONT, text);
}

void OnAbort(const char* message) {
  State().Append(LlamaLogLevel::kError, false, absl::StrCat("ggml aborts: ", message, "\n"));
}

}  // namespace

void SetLlamaLogSink(LlamaLogSink sink) {
  {
    absl::MutexLock lock(&State().mu);
    State().sink = std::move(sink);
  }
  static const bool installed = [] {
    llama_log_set(&OnLog, nullptr);
    ggml_set_abort_callback(&OnAbort);
    return true;
  }();
  (void)installed;
}

std::string TakeLlamaErrors() {
  absl::MutexLock lock(&State().mu);
  std::string errors = std::move(State().errors);
  State().errors.clear();
  return errors;
}

}  // namespace meshnet
