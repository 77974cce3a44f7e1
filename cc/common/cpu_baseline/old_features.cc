#include "cc/common/cpu_baseline/cpu_baseline.h"

namespace meshnet {

#if defined(__aarch64__)

// A CPU without Advanced SIMD.
CpuFeatures HostCpuFeatures() { return {1u << 0}; }

#else

// A CPU short of level x86-64-v2 (SSE4.1, but neither SSE4.2 nor POPCNT).
CpuFeatures HostCpuFeatures() { return {1u << 0 | 1u << 9 | 1u << 13 | 1u << 19, 0, 1u << 0, 0}; }

#endif

}  // namespace meshnet
