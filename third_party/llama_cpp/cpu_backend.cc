#include "third_party/llama_cpp/cpu_backend.h"

#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "ggml-backend.h"
#include "third_party/llama_cpp/cpu_backend_variants.h"

namespace meshnet::llama_cpp {
namespace {

std::vector<std::string> Runnable(const InstructionSets& host) {
  std::vector<std::string> names;
  for (const CpuVariant& variant : CompiledCpuVariants()) {
    if (variant.runs(host)) names.emplace_back(variant.name);
  }
  return names;
}

}  // namespace

std::vector<std::string> CpuVariants() {
  std::vector<std::string> names;
  for (const CpuVariant& variant : CompiledCpuVariants()) names.emplace_back(variant.name);
  return names;
}

absl::StatusOr<std::string> ChooseCpuVariant(const InstructionSets& host,
                                             absl::string_view forced) {
  const std::vector<std::string> runnable = Runnable(host);
  if (forced.empty()) return runnable.back();
  for (const CpuVariant& variant : CompiledCpuVariants()) {
    if (forced != variant.name) continue;
    if (variant.runs(host)) return std::string(forced);
    return absl::FailedPreconditionError(absl::StrCat(
        "expected a CPU that can run the variant ", forced, ", this one runs: ",
        absl::StrJoin(runnable, ", "), "; leave the variant empty to get the best of them"));
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "expected a CPU variant among ", absl::StrJoin(CpuVariants(), ", "), ", got '", forced, "'"));
}

absl::StatusOr<std::string> RegisterCpuBackend(absl::string_view forced) {
  static std::mutex mutex;
  static std::string* const registered = new std::string;
  absl::StatusOr<std::string> chosen = ChooseCpuVariant(HostInstructionSets(), forced);
  if (!chosen.ok()) return chosen;
  const std::lock_guard<std::mutex> lock(mutex);
  if (!registered->empty()) {
    if (*registered == *chosen) return chosen;
    return absl::FailedPreconditionError(absl::StrCat("expected the CPU variant ", *registered,
                                                      ", which this process runs already, got ",
                                                      *chosen, "; start another process for it"));
  }
  for (const CpuVariant& variant : CompiledCpuVariants()) {
    if (*chosen == variant.name) ggml_backend_register(variant.reg());
  }
  *registered = *chosen;
  return chosen;
}

}  // namespace meshnet::llama_cpp
