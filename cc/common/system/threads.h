// Which CPUs a thread runs on.
#ifndef MESHNET_CC_COMMON_SYSTEM_THREADS_H_
#define MESHNET_CC_COMMON_SYSTEM_THREADS_H_

#include <vector>

namespace meshnet {

// The CPUs that the calling thread may use, ascending; empty where the system does not say.
std::vector<int> AllowedCpus();

// Lets the calling thread, and those that it starts, use these CPUs and no others. Only speed
// depends on it, and a CPU can go away: where it cannot be done, nothing happens.
void KeepToCpus(const std::vector<int>& cpus);

}  // namespace meshnet

#endif  // MESHNET_CC_COMMON_SYSTEM_THREADS_H_
