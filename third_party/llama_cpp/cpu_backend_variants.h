// The builds of ggml's CPU backend in the program, one file for each architecture; for
// cpu_backend.cc alone.
#ifndef MESHNET_THIRD_PARTY_LLAMA_CPP_CPU_BACKEND_VARIANTS_H_
#define MESHNET_THIRD_PARTY_LLAMA_CPP_CPU_BACKEND_VARIANTS_H_

#include "absl/types/span.h"
#include "ggml-backend.h"
#include "third_party/llama_cpp/cpu_backend.h"

namespace meshnet::llama_cpp {

struct CpuVariant {
  const char* name;
  ggml_backend_reg_t (*reg)();
  bool (*runs)(const InstructionSets&);
};

// From the plainest, which every CPU runs, to the best.
absl::Span<const CpuVariant> CompiledCpuVariants();

}  // namespace meshnet::llama_cpp

#endif  // MESHNET_THIRD_PARTY_LLAMA_CPP_CPU_BACKEND_VARIANTS_H_
