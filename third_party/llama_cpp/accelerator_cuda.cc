// NVIDIA's GPUs and, compiled for them, AMD's: ggml has one backend for both.
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "ggml-cuda.h"
#include "llama_cpp_accelerator_options.h"
#include "third_party/llama_cpp/accelerator.h"

#if defined(MESHNET_LANE_ROCM)
#include <hip/hip_runtime_api.h>
#else
#include <cuda_runtime_api.h>
#endif

namespace meshnet::llama_cpp {
namespace {

#if defined(MESHNET_LANE_ROCM)
constexpr char kRuntime[] = "HIP";
constexpr char kDriverVersion[] = "/sys/module/amdgpu/version";
bool RuntimeVersion(int* version) { return hipDriverGetVersion(version) == hipSuccess; }
#else
constexpr char kRuntime[] = "CUDA";
constexpr char kDriverVersion[] = "/sys/module/nvidia/version";
bool RuntimeVersion(int* version) { return cudaDriverGetVersion(version) == cudaSuccess; }
#endif

}  // namespace

#if defined(MESHNET_LANE_ROCM)
const char kLane[] = "rocm";
#else
const char kLane[] = "cuda";
#endif

absl::string_view AcceleratorBuild() { return kAcceleratorOptions; }

// ggml asks for the number of devices, and has none where there is no driver.
absl::Status CheckDriver() { return absl::OkStatus(); }

ggml_backend_reg_t AcceleratorBackend() { return ggml_backend_cuda_reg(); }

void DescribeDevice(size_t, AcceleratorDevice* device) {
  std::string module = "unknown";
  // AMD's driver within the kernel has the kernel's version and says nothing.
  std::getline(std::ifstream(kDriverVersion), module);
  int version = 0;
  device->driver = absl::StrCat(module.empty() ? "unknown" : module, " ", kRuntime, " ",
                                RuntimeVersion(&version) ? absl::StrCat(version) : "unknown");
}

}  // namespace meshnet::llama_cpp
