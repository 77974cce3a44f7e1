#include <sys/prctl.h>

#include "cc/common/system/parent.h"

namespace meshnet {

void SignalAtParentEnd(int signal) { prctl(PR_SET_PDEATHSIG, signal); }

}  // namespace meshnet
