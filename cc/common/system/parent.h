// The process that started this one.
#ifndef MESHNET_CC_COMMON_SYSTEM_PARENT_H_
#define MESHNET_CC_COMMON_SYSTEM_PARENT_H_

namespace meshnet {

// Asks for `signal` when the parent ends. Where the system has nothing like it, nothing comes: look
// at getppid() now and then.
void SignalAtParentEnd(int signal);

}  // namespace meshnet

#endif  // MESHNET_CC_COMMON_SYSTEM_PARENT_H_
