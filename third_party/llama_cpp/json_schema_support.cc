// Upstream's common library is far more than its conversion of JSON schemas needs: these three
// functions are all that it calls of the rest. Declared as in upstream's common.h.
#include <cstddef>
#include <string>
#include <vector>

std::string string_join(const std::vector<std::string>& values, const std::string& separator) {
  std::string joined;
  for (const std::string& value : values) {
    if (&value != &values.front()) joined += separator;
    joined += value;
  }
  return joined;
}

std::vector<std::string> string_split(const std::string& text, const std::string& delimiter) {
  std::vector<std::string> parts;
  size_t begin = 0;
  for (size_t end = text.find(delimiter); end != std::string::npos;
       end = text.find(delimiter, begin)) {
    parts.push_back(text.substr(begin, end - begin));
    begin = end + delimiter.size();
  }
  parts.push_back(text.substr(begin));
  return parts;
}

std::string string_repeat(const std::string& text, size_t times) {
  std::string repeated;
  repeated.reserve(text.size() * times);
  for (size_t i = 0; i < times; ++i) repeated += text;
  return repeated;
}
