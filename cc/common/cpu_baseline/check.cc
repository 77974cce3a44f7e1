#include <unistd.h>

#include <cstring>

#include "cc/common/cpu_baseline/cpu_baseline.h"

namespace meshnet {
namespace {

[[maybe_unused]] void Say(const char* text) {
  // There is nobody to tell if standard error does not take it.
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, text, std::strlen(text));
}

[[maybe_unused]] void RefuseOldCpu() {
  const char* const missing = MissingFromBaseline(HostCpuFeatures());
  if (missing == nullptr) return;
  Say("meshnet: this program needs a CPU of level ");
  Say(kCpuBaseline);
  Say(" (");
  Say(kCpuBaselineCpus);
  Say("); this one has no ");
  Say(missing);
  Say(".\nRun it on another machine.\n");
  _exit(kCpuBaselineExitCode);
}

#if defined(__linux__)
__attribute__((section(".preinit_array"), used)) void (*const refuse_old_cpu)() = RefuseOldCpu;
#endif

}  // namespace

}  // namespace meshnet
