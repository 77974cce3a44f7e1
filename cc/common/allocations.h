// Counts what operator new gives out in this program. For tests with one thread.
//
//   RestartPeak();
//   const size_t before = AllocatedBytes();
//   Work();
//   EXPECT_LE(PeakAllocatedBytes() - before, bound);
#ifndef MESHNET_CC_COMMON_ALLOCATIONS_H_
#define MESHNET_CC_COMMON_ALLOCATIONS_H_

#include <cstddef>

namespace meshnet {

size_t AllocatedBytes();
// The most since the last RestartPeak.
size_t PeakAllocatedBytes();
void RestartPeak();

}  // namespace meshnet

#endif  // MESHNET_CC_COMMON_ALLOCATIONS_H_
