// Darwin binds no thread to a CPU: its affinity tags are hints, which Apple's own CPUs do not take.
#include "cc/common/system/threads.h"

namespace meshnet {

std::vector<int> AllowedCpus() { return {}; }

void KeepToCpus(const std::vector<int>&) {}

}  // namespace meshnet
