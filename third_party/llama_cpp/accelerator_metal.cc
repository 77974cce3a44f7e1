// Apple's GPUs. Written without a machine that could compile or run it.
#include <sys/sysctl.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "ggml-metal.h"
#include "llama_cpp_accelerator_options.h"
#include "third_party/llama_cpp/accelerator.h"

namespace meshnet::llama_cpp {

const char kLane[] = "metal";

absl::string_view AcceleratorBuild() { return kAcceleratorOptions; }

// Part of the system.
absl::Status CheckDriver() { return absl::OkStatus(); }

ggml_backend_reg_t AcceleratorBackend() { return ggml_backend_metal_reg(); }

void DescribeDevice(size_t, AcceleratorDevice* device) {
  char version[64] = "unknown";
  size_t size = sizeof(version);
  sysctlbyname("kern.osproductversion", version, &size, nullptr, 0);
  device->driver = absl::StrCat("macOS ", version);
}

}  // namespace meshnet::llama_cpp
