#include "cc/common/system/parent.h"

namespace meshnet {

void SignalAtParentEnd(int) {}

}  // namespace meshnet
