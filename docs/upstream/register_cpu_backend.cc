// Upstream's tests find their backends by themselves; here the CPU's is registered before main().

#include <cstdlib>

#include "third_party/llama_cpp/cpu_backend.h"

namespace {

const bool kRegistered = [] {
  if (!meshnet::llama_cpp::RegisterCpuBackend("").ok()) abort();
  return true;
}();

}  // namespace
