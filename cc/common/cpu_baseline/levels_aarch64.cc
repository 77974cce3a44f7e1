#include <cstdint>

#include "cc/common/cpu_baseline/cpu_baseline.h"

namespace meshnet {
namespace {

// Bits of AT_HWCAP, as Linux's asm/hwcap.h numbers them: this is compiled where there is no Linux,
// too.
struct Feature {
  const char* name;
  int bit;
};

// The architecture leaves both out of a CPU without floating point.
constexpr Feature kFeatures[] = {{"fp", 0}, {"asimd", 1}};

}  // namespace

const char* MissingFromBaseline(const CpuFeatures& features) {
  for (const Feature& feature : kFeatures) {
    if ((features.hwcap >> feature.bit & 1u) == 0) return feature.name;
  }
  return nullptr;
}

}  // namespace meshnet
