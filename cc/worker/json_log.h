// Structured logs: one JSON object a line on stderr with ts, severity, event and the event's
// fields.
//
//   logger.Log(Severity::kInfo, "session_open", {{"session", id}, {"stages", 3}});
//
// Never prompt text, tokens or tensors.
#ifndef MESHNET_CC_WORKER_JSON_LOG_H_
#define MESHNET_CC_WORKER_JSON_LOG_H_

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace meshnet::worker {

enum class Severity { kInfo, kWarning, kError };

// A field's value, already as JSON.
class JsonValue {
 public:
  JsonValue(absl::string_view text);  // NOLINT: literals should just work
  JsonValue(const char* text) : JsonValue(absl::string_view(text)) {}         // NOLINT
  JsonValue(const std::string& text) : JsonValue(absl::string_view(text)) {}  // NOLINT
  JsonValue(bool value) : json_(value ? "true" : "false") {}                  // NOLINT
  JsonValue(int64_t value) : json_(absl::StrCat(value)) {}                    // NOLINT
  JsonValue(uint64_t value) : json_(absl::StrCat(value)) {}                   // NOLINT
  JsonValue(int value) : json_(absl::StrCat(value)) {}                        // NOLINT
  JsonValue(uint32_t value) : json_(absl::StrCat(value)) {}                   // NOLINT
  JsonValue(double value) : json_(absl::StrCat(value)) {}                     // NOLINT

  const std::string& json() const { return json_; }

 private:
  std::string json_;
};

using JsonFields = std::vector<std::pair<absl::string_view, JsonValue>>;

// `{"a":1,"b":"x"}`. Bytes that are not UTF-8 become U+FFFD.
std::string ToJson(const JsonFields& fields);

class Logger {
 public:
  // `sink` gets whole lines without the newline, from any thread. Null: stderr.
  explicit Logger(std::function<void(const std::string&)> sink = nullptr);

  void Log(Severity severity, absl::string_view event, JsonFields fields = {}) const;

 private:
  std::function<void(const std::string&)> sink_;
};

}  // namespace meshnet::worker

#endif  // MESHNET_CC_WORKER_JSON_LOG_H_
