#include "cc/worker/identity.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cc/common/cpu_baseline/cpu_baseline.h"
#include "cc/common/sha256.h"
#include "cc/common/status.h"
#include "cc/protocol/frame_codec.h"
#include "google/protobuf/struct.pb.h"
#include "google/protobuf/util/json_util.h"
#include "llama_cpp_identity.h"
#include "third_party/llama_cpp/accelerator.h"
#include "third_party/llama_cpp/cpu_backend.h"

namespace meshnet::worker {
namespace {

using google::protobuf::Value;

// As Linux's `uname -m` names it.
#if defined(__aarch64__)
constexpr char kCpu[] = "aarch64";
#else
constexpr char kCpu[] = "x86_64";
#endif

#if defined(__APPLE__)
constexpr char kOperatingSystem[] = "macos";
#else
constexpr char kOperatingSystem[] = "linux";
#endif

std::string Compiler() {
#if defined(__clang__)  // which says that it is gcc, too
  return absl::StrCat("clang ", __clang_major__, ".", __clang_minor__);
#else
  return absl::StrCat("gcc ", __GNUC__, ".", __GNUC_MINOR__);
#endif
}

// Every value, by its path. None of them needs an escape.
std::map<std::string, std::string> Fields() {
  std::map<std::string, std::string> fields = {
      {"engine.llama_cpp.commit", llama_cpp::kCommit},
      {"engine.llama_cpp.patched_tree", llama_cpp::kPatchedTree},
      {"engine.llama_cpp.patches_sha256", llama_cpp::kPatchStackSha256},
      {"engine.llama_cpp.release", llama_cpp::kRelease},
      {"engine.llama_cpp.tree", llama_cpp::kTree},
      {"lane.accelerator", llama_cpp::kLane},
      {"lane.cpu", kCpu},
      {"lane.os", kOperatingSystem},
      {"program", "meshnet-worker"},
      {"protocol.schema_version", absl::StrCat(kSchemaVersion)},
      {"toolchain.baseline", kCpuBaseline},
      {"toolchain.compiler", Compiler()},
      {"toolchain.cpu_variants", absl::StrJoin(llama_cpp::CpuVariants(), " ")},
      {"version", kVersion},
  };
#if defined(__GLIBC__)
  fields.emplace("toolchain.glibc", absl::StrCat(__GLIBC__, ".", __GLIBC_MINOR__));
#endif
  if (!llama_cpp::AcceleratorBuild().empty()) {
    fields.emplace("toolchain.accelerator", llama_cpp::AcceleratorBuild());
  }
  return fields;
}

std::string Fingerprint(const std::map<std::string, std::string>& fields) {
  std::string text;
  for (const auto& [name, value] : fields) absl::StrAppend(&text, name, "=", value, "\n");
  return Sha256Hex(text);
}

// The text at `path` of an object of objects, or nothing.
const std::string* TextAt(const google::protobuf::Struct& object, absl::string_view path) {
  const size_t dot = path.find('.');
  const auto entry = object.fields().find(std::string(path.substr(0, dot)));
  if (entry == object.fields().end()) return nullptr;
  if (dot == absl::string_view::npos) {
    return entry->second.has_string_value() ? &entry->second.string_value() : nullptr;
  }
  if (!entry->second.has_struct_value()) return nullptr;
  return TextAt(entry->second.struct_value(), path.substr(dot + 1));
}

absl::Status NoIdentity(absl::string_view what) {
  return MakeError(v1::REASON_CONFIGURATION_INVALID,
                   absl::StrCat("expected --identity to name a file as `worker --version --json` "
                                "prints it: ",
                                what));
}

absl::StatusOr<std::vector<std::string>> Texts(const google::protobuf::Struct& pins,
                                               const std::string& name) {
  std::vector<std::string> texts;
  const auto entry = pins.fields().find(name);
  if (entry == pins.fields().end()) return texts;
  if (!entry->second.has_list_value()) {
    return NoIdentity(absl::StrCat("pins.", name, " is no list"));
  }
  for (const Value& value : entry->second.list_value().values()) {
    if (!value.has_string_value() || value.string_value().empty()) {
      return NoIdentity(absl::StrCat("pins.", name, " holds something that is no text"));
    }
    texts.push_back(value.string_value());
  }
  return texts;
}

}  // namespace

const char kVersion[] = MESHNET_VERSION;

std::string IdentityJson() {
  const std::map<std::string, std::string> fields = Fields();
  // Paths in order list an object's entries one after the other.
  std::string json = "{\n";
  std::vector<std::string> open;
  bool first = true;
  const auto indent = [&open] { return std::string(2 * (open.size() + 1), ' '); };
  for (const auto& [path, value] : fields) {
    std::vector<std::string> steps;
    size_t begin = 0;
    for (size_t dot = path.find('.'); dot != std::string::npos; dot = path.find('.', begin)) {
      steps.push_back(path.substr(begin, dot - begin));
      begin = dot + 1;
    }
    size_t common = 0;
    while (common < std::min(steps.size(), open.size()) && steps[common] == open[common]) ++common;
    while (open.size() > common) {
      open.pop_back();
      absl::StrAppend(&json, "\n", indent(), "}");
    }
    if (!first) absl::StrAppend(&json, ",\n");
    while (open.size() < steps.size()) {
      absl::StrAppend(&json, indent(), "\"", steps[open.size()], "\": {\n");
      open.push_back(steps[open.size()]);
    }
    absl::StrAppend(&json, indent(), "\"", path.substr(begin), "\": \"", value, "\"");
    first = false;
  }
  while (!open.empty()) {
    open.pop_back();
    absl::StrAppend(&json, "\n", indent(), "}");
  }
  absl::StrAppend(&json, ",\n  \"certification\": [],\n  \"fingerprint\": \"", Fingerprint(fields),
                  "\"\n}\n");
  return json;
}

absl::StatusOr<IdentityPins> CheckIdentity(absl::string_view json) {
  constexpr size_t kMaxBytes = 64 << 10;
  if (json.size() > kMaxBytes) return NoIdentity("it is larger than 64 KiB");
  google::protobuf::Struct object;
  const auto parsed = google::protobuf::util::JsonStringToMessage(std::string(json), &object);
  if (!parsed.ok()) return NoIdentity(std::string(parsed.message()));
  std::map<std::string, std::string> fields = Fields();
  const std::string fingerprint = Fingerprint(fields);
  fields.emplace("fingerprint", fingerprint);
  for (const auto& [path, value] : fields) {
    const std::string* const said = TextAt(object, path);
    if (said == nullptr) return NoIdentity(absl::StrCat("`", path, "` is missing"));
    if (*said == value) continue;
    return MakeError(v1::REASON_RECIPE_MISMATCH,
                     absl::StrCat("expected the program of the identity file with `", path, "` ",
                                  *said, ", this one has ", value,
                                  "; install program and identity file of one release"));
  }
  IdentityPins pins;
  const auto entry = object.fields().find("pins");
  if (entry == object.fields().end()) return pins;
  if (!entry->second.has_struct_value()) return NoIdentity("`pins` is no object");
  auto artifacts = Texts(entry->second.struct_value(), "artifacts");
  if (!artifacts.ok()) return artifacts.status();
  auto recipes = Texts(entry->second.struct_value(), "recipes");
  if (!recipes.ok()) return recipes.status();
  pins.artifacts = *std::move(artifacts);
  pins.recipes = *std::move(recipes);
  return pins;
}

}  // namespace meshnet::worker
