#include <cstdint>

#include "cc/common/cpu_baseline/cpu_baseline.h"

namespace meshnet {
namespace {

enum class Register { kLeaf1Ecx, kLeaf7Ebx, kExtendedEcx };

struct Feature {
  CpuLevel level;  // the first that has it
  const char* name;
  Register where;
  int bit;
};

// As the x86-64 psABI lists them; v1 is what any x86-64 has.
constexpr Feature kFeatures[] = {
    {CpuLevel::kV2, "sse3", Register::kLeaf1Ecx, 0},
    {CpuLevel::kV2, "ssse3", Register::kLeaf1Ecx, 9},
    {CpuLevel::kV2, "cx16", Register::kLeaf1Ecx, 13},
    {CpuLevel::kV2, "sse4.1", Register::kLeaf1Ecx, 19},
    {CpuLevel::kV2, "sse4.2", Register::kLeaf1Ecx, 20},
    {CpuLevel::kV2, "popcnt", Register::kLeaf1Ecx, 23},
    {CpuLevel::kV2, "lahf-sahf", Register::kExtendedEcx, 0},
    {CpuLevel::kV3, "fma", Register::kLeaf1Ecx, 12},
    {CpuLevel::kV3, "movbe", Register::kLeaf1Ecx, 22},
    {CpuLevel::kV3, "osxsave", Register::kLeaf1Ecx, 27},
    {CpuLevel::kV3, "avx", Register::kLeaf1Ecx, 28},
    {CpuLevel::kV3, "f16c", Register::kLeaf1Ecx, 29},
    {CpuLevel::kV3, "lzcnt", Register::kExtendedEcx, 5},
    {CpuLevel::kV3, "bmi1", Register::kLeaf7Ebx, 3},
    {CpuLevel::kV3, "avx2", Register::kLeaf7Ebx, 5},
    {CpuLevel::kV3, "bmi2", Register::kLeaf7Ebx, 8},
};

// The operating system must save the SSE and AVX registers, or AVX instructions fault.
constexpr uint64_t kAvxState = 0x6;

}  // namespace

const char* MissingFromLevel(const CpuFeatures& features, CpuLevel level) {
  for (const Feature& feature : kFeatures) {
    if (feature.level > level) continue;
    uint32_t value = 0;
    switch (feature.where) {
      case Register::kLeaf1Ecx:
        value = features.leaf1_ecx;
        break;
      case Register::kLeaf7Ebx:
        value = features.leaf7_ebx;
        break;
      case Register::kExtendedEcx:
        value = features.extended_ecx;
        break;
    }
    if ((value >> feature.bit & 1u) == 0) return feature.name;
  }
  if (level >= CpuLevel::kV3 && (features.xcr0 & kAvxState) != kAvxState)
    return "avx (the operating system does not save its registers)";
  return nullptr;
}

}  // namespace meshnet
