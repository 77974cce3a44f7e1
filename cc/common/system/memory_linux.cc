#include <link.h>
#include <malloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>

#include "cc/common/system/memory.h"

namespace meshnet {

uint64_t ResidentBytes() {
  // The second number of statm: resident pages.
  unsigned long long size = 0;
  unsigned long long resident = 0;
  std::FILE* file = std::fopen("/proc/self/statm", "r");
  if (file == nullptr) return 0;
  const int read = std::fscanf(file, "%llu %llu", &size, &resident);
  std::fclose(file);
  return read == 2 ? resident * static_cast<uint64_t>(sysconf(_SC_PAGESIZE)) : 0;
}

void KeepHeapsSmall() {
  // glibc would learn to keep such blocks in its heaps, one for each thread of gRPC.
  mallopt(M_MMAP_THRESHOLD, 256 << 10);
  mallopt(M_TRIM_THRESHOLD, 1 << 20);
  mallopt(M_ARENA_MAX, 2);
}

void ReleaseFreeMemory() { malloc_trim(0); }

void ReleaseProgramPages() {
  dl_iterate_phdr(
      [](dl_phdr_info* object, size_t, void*) {
        const auto page = static_cast<ElfW(Addr)>(sysconf(_SC_PAGESIZE));
        for (int i = 0; i < object->dlpi_phnum; ++i) {
          const ElfW(Phdr) & segment = object->dlpi_phdr[i];
          // Segments that are never written, so that nothing is lost.
          if (segment.p_type != PT_LOAD || (segment.p_flags & PF_W) != 0) continue;
          const ElfW(Addr) begin = (object->dlpi_addr + segment.p_vaddr + page - 1) / page * page;
          const ElfW(Addr) end =
              (object->dlpi_addr + segment.p_vaddr + segment.p_memsz) / page * page;
          if (begin >= end) continue;
          // Where the kernel does not, the pages just stay.
          (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
        }
        // The program comes first; the C library's pages are shared with everybody.
        return 1;
      },
      nullptr);
}

size_t BlockBytes(void* block) { return malloc_usable_size(block); }

}  // namespace meshnet
