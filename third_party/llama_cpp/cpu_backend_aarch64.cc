#include "absl/types/span.h"
#include "ggml-backend.h"
#include "third_party/llama_cpp/cpu_backend.h"
#include "third_party/llama_cpp/cpu_backend_variants.h"

#if defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

// One for each variant in cpu_variants.bzl.
extern "C" {
#if defined(__APPLE__)
ggml_backend_reg_t ggml_backend_cpu_reg_apple_m1();
#else
ggml_backend_reg_t ggml_backend_cpu_reg_armv8();
ggml_backend_reg_t ggml_backend_cpu_reg_dotprod();
ggml_backend_reg_t ggml_backend_cpu_reg_i8mm();
#endif
}

namespace meshnet::llama_cpp {
namespace {

constexpr CpuVariant kVariants[] = {
#if defined(__APPLE__)
    {"apple_m1", ggml_backend_cpu_reg_apple_m1, [](const InstructionSets&) { return true; }},
#else
    {"armv8", ggml_backend_cpu_reg_armv8, [](const InstructionSets&) { return true; }},
    {"dotprod", ggml_backend_cpu_reg_dotprod,
     [](const InstructionSets& s) { return s.armv8_2_dotprod; }},
    {"i8mm", ggml_backend_cpu_reg_i8mm,
     [](const InstructionSets& s) { return s.armv8_2_dotprod && s.i8mm; }},
#endif
};

}  // namespace

absl::Span<const CpuVariant> CompiledCpuVariants() { return kVariants; }

InstructionSets HostInstructionSets() {
  InstructionSets sets;
#if defined(__linux__)
  // What Armv8.1 and 8.2 brought and compilers use unasked comes with the rest, or is missing in a
  // virtual machine: then the plain variant has to do.
  constexpr unsigned long kArmv82Dotprod =
      HWCAP_ATOMICS | HWCAP_CRC32 | HWCAP_ASIMDRDM | HWCAP_FPHP | HWCAP_ASIMDHP | HWCAP_ASIMDDP;
  sets.armv8_2_dotprod = (getauxval(AT_HWCAP) & kArmv82Dotprod) == kArmv82Dotprod;
  sets.i8mm = (getauxval(AT_HWCAP2) & HWCAP2_I8MM) != 0;
#endif
  return sets;
}

}  // namespace meshnet::llama_cpp
