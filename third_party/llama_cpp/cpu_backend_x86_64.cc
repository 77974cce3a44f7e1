#include <cpuid.h>

#include <cstdint>

#include "absl/types/span.h"
#include "cc/common/cpu_baseline/cpu_baseline.h"
#include "ggml-backend.h"
#include "third_party/llama_cpp/cpu_backend.h"
#include "third_party/llama_cpp/cpu_backend_variants.h"

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

// One for each variant in cpu_variants.bzl.
extern "C" {
ggml_backend_reg_t ggml_backend_cpu_reg_sse42();
ggml_backend_reg_t ggml_backend_cpu_reg_haswell();
ggml_backend_reg_t ggml_backend_cpu_reg_alderlake();
ggml_backend_reg_t ggml_backend_cpu_reg_skylakex();
ggml_backend_reg_t ggml_backend_cpu_reg_icelake();
ggml_backend_reg_t ggml_backend_cpu_reg_zen4();
ggml_backend_reg_t ggml_backend_cpu_reg_sapphirerapids();
}

namespace meshnet::llama_cpp {
namespace {

bool Icelake(const InstructionSets& s) { return s.avx512 && s.avx512_vbmi && s.avx512_vnni; }
bool Zen4(const InstructionSets& s) { return Icelake(s) && s.avx512_bf16; }

constexpr CpuVariant kVariants[] = {
    {"sse42", ggml_backend_cpu_reg_sse42, [](const InstructionSets&) { return true; }},
    {"haswell", ggml_backend_cpu_reg_haswell, [](const InstructionSets& s) { return s.x86_64_v3; }},
    {"alderlake", ggml_backend_cpu_reg_alderlake,
     [](const InstructionSets& s) { return s.avx_vnni; }},
    {"skylakex", ggml_backend_cpu_reg_skylakex, [](const InstructionSets& s) { return s.avx512; }},
    {"icelake", ggml_backend_cpu_reg_icelake, Icelake},
    {"zen4", ggml_backend_cpu_reg_zen4, Zen4},
    {"sapphirerapids", ggml_backend_cpu_reg_sapphirerapids,
     [](const InstructionSets& s) { return Zen4(s) && s.amx_int8; }},
};

constexpr uint64_t kAvx512State = 0xe0;
constexpr uint64_t kAmxState = 0x60000;

// Linux gives a process the tiles' registers only on demand.
bool MayUseTiles() {
#if defined(__linux__)
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

bool Bit(uint32_t value, int bit) { return (value >> bit & 1u) != 0; }

}  // namespace

absl::Span<const CpuVariant> CompiledCpuVariants() { return kVariants; }

InstructionSets HostInstructionSets() {
  InstructionSets sets;
  const CpuFeatures features = HostCpuFeatures();
  const uint64_t state = features.xcr0;
  sets.x86_64_v3 = MissingFromLevel(features, CpuLevel::kV3) == nullptr;
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!sets.x86_64_v3 || __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return sets;
  const bool avx512 = (state & kAvx512State) == kAvx512State;
  const uint32_t subleaves = eax;
  sets.avx512 =
      avx512 && Bit(ebx, 16) && Bit(ebx, 17) && Bit(ebx, 28) && Bit(ebx, 30) && Bit(ebx, 31);
  sets.avx512_vbmi = avx512 && Bit(ecx, 1);
  sets.avx512_vnni = avx512 && Bit(ecx, 11);
  sets.amx_int8 = (state & kAmxState) == kAmxState && Bit(edx, 24) && Bit(edx, 25) && MayUseTiles();
  if (subleaves >= 1 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0) {
    sets.avx_vnni = Bit(eax, 4);
    sets.avx512_bf16 = avx512 && Bit(eax, 5);
  }
  return sets;
}

}  // namespace meshnet::llama_cpp
