// Refuses to start on a CPU without the instructions that our programs are compiled for (x86-64-v2,
// or Armv8.0 with Advanced SIMD), and tells which level of the x86-64 psABI a CPU has.
//
// Programs link //cc/common/cpu_baseline (meshnet_cc_binary does so by itself). A .preinit_array
// entry then checks the CPU before any constructor or main() runs, and ends the process with exit
// code 78 and a message on standard error, where it would otherwise die of an illegal instruction
// at some later point.

#ifndef CC_COMMON_CPU_BASELINE_CPU_BASELINE_H_
#define CC_COMMON_CPU_BASELINE_CPU_BASELINE_H_

#include <cstdint>

namespace meshnet {

// Exit code of a refusal: EX_CONFIG of sysexits.h.
inline constexpr int kCpuBaselineExitCode = 78;

#if defined(__aarch64__)

// What the operating system says.
struct CpuFeatures {
  uint64_t hwcap;  // AT_HWCAP of the auxiliary vector
};

// What the toolchain compiles for, as its -march names it, and which CPUs have that.
inline constexpr char kCpuBaseline[] = "armv8-a";
inline constexpr char kCpuBaselineCpus[] =
    "Advanced SIMD; any 64-bit Arm CPU of a server or computer";

// Name of the first feature of the baseline that is missing, or null if all are there.
const char* MissingFromBaseline(const CpuFeatures& features);

#else

// What the CPU and the operating system say, as the registers that hold it.
struct CpuFeatures {
  uint32_t leaf1_ecx;     // CPUID 1: ECX
  uint32_t leaf7_ebx;     // CPUID 7.0: EBX, 0 where there is no such leaf
  uint32_t extended_ecx;  // CPUID 0x80000001: ECX, 0 where there is no such leaf
  uint64_t xcr0;  // register state that the operating system saves, 0 where it cannot be read
};

// Levels of the x86-64 psABI above the one that any x86-64 has.
enum class CpuLevel { kV2, kV3 };

// What the toolchain compiles for, as its -march names it, and which CPUs have that.
inline constexpr CpuLevel kCpuBaselineLevel = CpuLevel::kV2;
inline constexpr char kCpuBaseline[] = "x86-64-v2";
inline constexpr char kCpuBaselineCpus[] =
    "SSE4.2, POPCNT; Intel Nehalem or AMD Bulldozer and later";

// Name of the first feature of `level` that is missing, or null if all are there.
const char* MissingFromLevel(const CpuFeatures& features, CpuLevel level);

// Name of the first feature of the baseline that is missing, or null if all are there.
inline const char* MissingFromBaseline(const CpuFeatures& features) {
  return MissingFromLevel(features, kCpuBaselineLevel);
}

#endif

// Features of the running CPU.
CpuFeatures HostCpuFeatures();

}  // namespace meshnet

#endif  // CC_COMMON_CPU_BASELINE_CPU_BASELINE_H_
