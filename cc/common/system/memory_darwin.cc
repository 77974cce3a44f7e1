// Compiled against Darwin's headers; never run.
#include <mach/mach.h>
#include <malloc/malloc.h>

#include "cc/common/system/memory.h"

namespace meshnet {

uint64_t ResidentBytes() {
  mach_task_basic_info_data_t info = {};
  mach_msg_type_number_t count = MACH_TASK_BASIC_INFO_COUNT;
  const kern_return_t result = task_info(mach_task_self(), MACH_TASK_BASIC_INFO,
                                         reinterpret_cast<task_info_t>(&info), &count);
  return result == KERN_SUCCESS ? info.resident_size : 0;
}

// Large blocks are regions of their own here, and malloc has no such settings.
void KeepHeapsSmall() {}

void ReleaseFreeMemory() {
  // Of every zone, as much as there is.
  malloc_zone_pressure_relief(nullptr, 0);
}

// The kernel takes clean pages of files when it wants them, and does not let a process drop them.
void ReleaseProgramPages() {}

size_t BlockBytes(void* block) { return malloc_size(block); }

}  // namespace meshnet
