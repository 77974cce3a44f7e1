// What the operating system and its allocator hold for this process.
#ifndef MESHNET_CC_COMMON_SYSTEM_MEMORY_H_
#define MESHNET_CC_COMMON_SYSTEM_MEMORY_H_

#include <cstddef>
#include <cstdint>

namespace meshnet {

// Memory of this process that lies in RAM; 0 where the system does not say.
uint64_t ResidentBytes();

// Makes malloc give blocks of megabytes back as soon as they are freed, whichever thread has them.
// Before any thread is started.
void KeepHeapsSmall();

// Gives what malloc holds and nobody uses back to the system.
void ReleaseFreeMemory();

// Gives back the pages of the program itself: those that starting needed and serving does not (the
// loader, flags, kernels for other shapes) stay away, the others come back from the page cache when
// they are next run.
void ReleaseProgramPages();

// What malloc really set aside for `block`, which it gave out.
size_t BlockBytes(void* block);

}  // namespace meshnet

#endif  // MESHNET_CC_COMMON_SYSTEM_MEMORY_H_
