#include "cc/common/allocations.h"

#include <algorithm>
#include <cstdlib>
#include <new>

#include "cc/common/system/memory.h"

namespace {

size_t live_bytes = 0;
size_t peak_bytes = 0;

void* Allocate(size_t size, size_t alignment) {
  void* memory =
      alignment <= alignof(std::max_align_t)
          ? std::malloc(size)
          : std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
  if (memory == nullptr) std::abort();
  live_bytes += meshnet::BlockBytes(memory);
  peak_bytes = std::max(peak_bytes, live_bytes);
  return memory;
}

void Free(void* memory) {
  if (memory == nullptr) return;
  live_bytes -= meshnet::BlockBytes(memory);
  std::free(memory);
}

}  // namespace

void* operator new(size_t size) { return Allocate(size, 1); }
void* operator new[](size_t size) { return Allocate(size, 1); }
void* operator new(size_t size, std::align_val_t alignment) {
  return Allocate(size, static_cast<size_t>(alignment));
}
void* operator new[](size_t size, std::align_val_t alignment) {
  return Allocate(size, static_cast<size_t>(alignment));
}
void* operator new(size_t size, const std::nothrow_t&) noexcept { return Allocate(size, 1); }
void* operator new[](size_t size, const std::nothrow_t&) noexcept { return Allocate(size, 1); }
void operator delete(void* memory) noexcept { Free(memory); }
void operator delete[](void* memory) noexcept { Free(memory); }
void operator delete(void* memory, size_t) noexcept { Free(memory); }
void operator delete[](void* memory, size_t) noexcept { Free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { Free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { Free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { Free(memory); }
void operator delete[](void* memory, size_t, std::align_val_t) noexcept { Free(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { Free(memory); }
void operator delete[](void* memory, const std::nothrow_t&) noexcept { Free(memory); }

namespace meshnet {

size_t AllocatedBytes() { return live_bytes; }
size_t PeakAllocatedBytes() { return peak_bytes; }
void RestartPeak() { peak_bytes = live_bytes; }

}  // namespace meshnet
