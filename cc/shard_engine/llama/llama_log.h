// llama.cpp's and ggml's log lines, whole and with a level, instead of text on stderr.
#ifndef MESHNET_CC_SHARD_ENGINE_LLAMA_LLAMA_LOG_H_
#define MESHNET_CC_SHARD_ENGINE_LLAMA_LLAMA_LOG_H_

#include <functional>
#include <string>

#include "absl/strings/string_view.h"

namespace meshnet {

enum class LlamaLogLevel { kDebug, kInfo, kWarning, kError };

// Any thread; one call at a time; without the line end.
using LlamaLogSink = std::function<void(LlamaLogLevel level, absl::string_view line)>;

// Process-wide, like llama.cpp's logger. An empty sink drops everything. The last words of an
// assertion in ggml go to the sink as an error before the process aborts.
void SetLlamaLogSink(LlamaLogSink sink);

// The error lines since the last call, joined by "; ": llama.cpp reports reasons only there.
std::string TakeLlamaErrors();

}  // namespace meshnet

#endif  // MESHNET_CC_SHARD_ENGINE_LLAMA_LLAMA_LOG_H_
