#include <unistd.h>

#include <cstddef>
#include <cstring>

#include "cc/common/cpu_baseline/cpu_baseline.h"

namespace meshnet {
namespace {

enum class Register { kLeaf1Ecx, kLeaf7Ebx, kExtendedEcx };

struct Feature {
  const char* name;
  Register where;
  int bit;
};

// x86-64-v2 and x86-64-v3 of the x86-64 psABI; v1 is what any x86-64 has.
constexpr Feature kFeatures[] = {
    {"sse3", Register::kLeaf1Ecx, 0},         {"ssse3", Register::kLeaf1Ecx, 9},
    {"cx16", Register::kLeaf1Ecx, 13},        {"sse4.1", Register::kLeaf1Ecx, 19},
    {"sse4.2", Register::kLeaf1Ecx, 20},      {"popcnt", Register::kLeaf1Ecx, 23},
    {"lahf-sahf", Register::kExtendedEcx, 0}, {"fma", Register::kLeaf1Ecx, 12},
    {"movbe", Register::kLeaf1Ecx, 22},       {"osxsave", Register::kLeaf1Ecx, 27},
    {"avx", Register::kLeaf1Ecx, 28},         {"f16c", Register::kLeaf1Ecx, 29},
    {"lzcnt", Register::kExtendedEcx, 5},     {"bmi1", Register::kLeaf7Ebx, 3},
    {"avx2", Register::kLeaf7Ebx, 5},         {"bmi2", Register::kLeaf7Ebx, 8},
};

// The operating system must save the SSE and AVX registers, or AVX instructions fault.
constexpr uint64_t kAvxState = 0x6;

[[maybe_unused]] void Say(const char* text) {
  // There is nobody to tell if standard error does not take it.
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, text, std::strlen(text));
}

[[maybe_unused]] void RefuseOldCpu() {
  const char* const missing = MissingFromBaseline(HostCpuFeatures());
  if (missing == nullptr) return;
  Say("meshnet: this program needs a CPU of level x86-64-v3 (AVX2, BMI2, FMA; Intel Haswell or AMD "
      "Excavator and later); "
      "this one has no ");
  Say(missing);
  Say(".\nRun it on another machine, or build it for this one: change -march in "
      "bazel/toolchain/BUILD.bazel.\n");
  _exit(kCpuBaselineExitCode);
}

#if defined(__x86_64__) && defined(__linux__)
__attribute__((section(".preinit_array"), used)) void (*const refuse_old_cpu)() = RefuseOldCpu;
#endif

}  // namespace

const char* MissingFromBaseline(const CpuFeatures& features) {
  for (const Feature& feature : kFeatures) {
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
  if ((features.xcr0 & kAvxState) != kAvxState)
    return "avx (the operating system does not save its registers)";
  return nullptr;
}

}  // namespace meshnet
