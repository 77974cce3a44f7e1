#include "cc/common/cpu_baseline/cpu_baseline.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__linux__)
#include <sys/auxv.h>
#endif

namespace meshnet {

#if defined(__x86_64__)

CpuFeatures HostCpuFeatures() {
  CpuFeatures features = {};
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0) features.leaf1_ecx = ecx;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0) features.leaf7_ebx = ebx;
  if (__get_cpuid(0x80000001, &eax, &ebx, &ecx, &edx) != 0) features.extended_ecx = ecx;
  constexpr uint32_t kOsXsave = 1u << 27;
  if ((features.leaf1_ecx & kOsXsave) != 0) {
    uint32_t low = 0, high = 0;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    features.xcr0 = static_cast<uint64_t>(high) << 32 | low;
  }
  return features;
}

#elif defined(__linux__)

CpuFeatures HostCpuFeatures() { return {getauxval(AT_HWCAP)}; }

#else

// Every Mac has the baseline of its architecture.
CpuFeatures HostCpuFeatures() { return {~uint64_t{0}}; }

#endif

}  // namespace meshnet
