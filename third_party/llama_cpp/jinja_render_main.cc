// Renders chat templates with upstream's own engine, as a reference for ours. For tests only.
//
// stdin: one JSON object a line, {"template": "...", "values": {...}}; stdout: one a line,
// {"text": "..."} or {"error": "..."}. The first argument is the time that templates are told,
// seconds since 1970.
#include <cstdlib>
#include <ctime>
#include <exception>
#include <iostream>
#include <string>

#include "jinja/lexer.h"
#include "jinja/parser.h"
#include "jinja/runtime.h"
#include "jinja/value.h"
#include "json.h"

namespace {

std::string Render(const std::string& source, const common_json& values, std::time_t now) {
  jinja::lexer lexer;
  const auto tokens = lexer.tokenize(source);
  jinja::program program = jinja::parse_from_tokens(tokens);
  jinja::context context(source);
  context.current_time = now;
  jinja::global_from_json(context, values, /*mark_input=*/false);
  jinja::runtime runtime(context);
  const jinja::value result = runtime.execute(program);
  return runtime.gather_string_parts(result)->as_string().str();
}

}  // namespace

int main(int argc, char** argv) {
  const std::time_t now = argc > 1 ? std::atoll(argv[1]) : 0;
  std::string line;
  while (std::getline(std::cin, line)) {
    common_json answer;
    try {
      const common_json request = common_json::parse(line);
      answer["text"] = Render(request.at("template").get<std::string>(), request.at("values"), now);
    } catch (const std::exception& error) {
      answer["error"] = std::string(error.what());
    }
    std::cout << answer.dump() << std::endl;
  }
  return 0;
}
