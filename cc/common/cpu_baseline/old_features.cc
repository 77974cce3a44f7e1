#include "cc/common/cpu_baseline/cpu_baseline.h"

namespace meshnet {

// A CPU of level x86-64-v2 (SSE4.2 and POPCNT, but no AVX).
CpuFeatures HostCpuFeatures() {
  return {1u << 0 | 1u << 9 | 1u << 13 | 1u << 19 | 1u << 20 | 1u << 23, 0, 1u << 0, 0};
}

}  // namespace meshnet
