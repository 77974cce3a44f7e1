// Upstream's RPC server finds its backends in the registry; this fills it before main() runs.

#include <cstdio>
#include <cstdlib>

#include "absl/status/statusor.h"
#include "ggml-backend.h"
#include "ggml-rpc.h"
#include "third_party/llama_cpp/cpu_backend.h"

namespace {

[[maybe_unused]] const bool kRegistered = [] {
  const char* const forced = std::getenv("MESHNET_CPU_VARIANT");
  const auto variant = meshnet::llama_cpp::RegisterCpuBackend(forced == nullptr ? "" : forced);
  if (!variant.ok()) {
    std::fprintf(stderr, "%s\n", variant.status().ToString().c_str());
    std::exit(1);
  }
  ggml_backend_register(ggml_backend_rpc_reg());
  return true;
}();

}  // namespace
