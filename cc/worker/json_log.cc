#include "cc/worker/json_log.h"

#include <unistd.h>

#include <utility>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace meshnet::worker {
namespace {

// Length of the valid UTF-8 character at the start of `text`, 0 when there is none.
size_t CharacterLength(absl::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  size_t length = 0;
  uint32_t value = 0;
  if (byte(0) < 0x80) return 1;
  if (byte(0) >= 0xc2 && byte(0) < 0xe0) {
    length = 2;
    value = byte(0) & 0x1f;
  } else if (byte(0) >= 0xe0 && byte(0) < 0xf0) {
    length = 3;
    value = byte(0) & 0x0f;
  } else if (byte(0) >= 0xf0 && byte(0) < 0xf5) {
    length = 4;
    value = byte(0) & 0x07;
  }
  if (length == 0 || text.size() < length) return 0;
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
    value = value << 6 | (byte(i) & 0x3f);
  }
  const bool overlong = (length == 3 && value < 0x800) || (length == 4 && value < 0x10000);
  const bool surrogate = value >= 0xd800 && value < 0xe000;
  return overlong || surrogate || value > 0x10ffff ? 0 : length;
}

std::string Quote(absl::string_view text) {
  std::string out = "\"";
  while (!text.empty()) {
    const size_t length = CharacterLength(text);
    const char c = text[0];
    if (length == 0) {
      out += "\\ufffd";
    } else if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      absl::StrAppendFormat(&out, "\\u%04x", static_cast<unsigned char>(c));
    } else {
      absl::StrAppend(&out, text.substr(0, length));
    }
    text.remove_prefix(length == 0 ? 1 : length);
  }
  return out += '"';
}

absl::string_view Name(Severity severity) {
  switch (severity) {
    case Severity::kInfo:
      return "INFO";
    case Severity::kWarning:
      return "WARNING";
    case Severity::kError:
      return "ERROR";
  }
  return "ERROR";
}

void WriteToStderr(const std::string& line) {
  // One write call, so that lines of several processes on one terminal stay whole.
  const std::string with_newline = line + "\n";
  size_t done = 0;
  while (done < with_newline.size()) {
    const ssize_t wrote =
        write(STDERR_FILENO, with_newline.data() + done, with_newline.size() - done);
    if (wrote <= 0) return;
    done += static_cast<size_t>(wrote);
  }
}

}  // namespace

JsonValue::JsonValue(absl::string_view text) : json_(Quote(text)) {}

std::string ToJson(const JsonFields& fields) {
  std::string out = "{";
  for (const auto& [name, value] : fields) {
    if (out.size() > 1) out += ',';
    absl::StrAppend(&out, Quote(name), ":", value.json());
  }
  return out += '}';
}

Logger::Logger(std::function<void(const std::string&)> sink) : sink_(std::move(sink)) {
  if (sink_ == nullptr) sink_ = WriteToStderr;
}

void Logger::Log(Severity severity, absl::string_view event, JsonFields fields) const {
  JsonFields all = {
      {"ts", absl::FormatTime("%Y-%m-%d%ET%H:%M:%E3SZ", absl::Now(), absl::UTCTimeZone())},
      {"severity", Name(severity)},
      {"event", event},
  };
  all.insert(all.end(), std::make_move_iterator(fields.begin()),
             std::make_move_iterator(fields.end()));
  sink_(ToJson(all));
}

}  // namespace meshnet::worker
