// The accelerator that this program was built for: its lane's.
//
//   auto devices = meshnet::llama_cpp::AcceleratorDevices();
//   if (!devices.ok()) ...        // no driver, no device: the message says what to install
//   params.devices = {devices->front().device, nullptr};
//
// On the cpu lane there are none, and nothing but the CPU computes. Which lane a program is of is
// fixed when it is built (--config=cpu, cuda, rocm, vulkan, metal).
#ifndef THIRD_PARTY_LLAMA_CPP_ACCELERATOR_H_
#define THIRD_PARTY_LLAMA_CPP_ACCELERATOR_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "ggml-backend.h"

namespace meshnet::llama_cpp {

// "cpu", "cuda", "rocm", "vulkan" or "metal".
extern const char kLane[];

// SDK and flags that the lane's kernels were compiled with; empty on the cpu lane.
absl::string_view AcceleratorBuild();

struct AcceleratorDevice {
  ggml_backend_dev_t device = nullptr;
  std::string name;         // in this process: "Vulkan0"
  std::string description;  // the hardware's own name
  std::string driver;       // name and version
  // A program that stands in for hardware (Mesa's lavapipe, say): right results, evidence of no
  // hardware.
  bool software = false;
};

// The lane's devices, in the driver's order; empty on the cpu lane. Registers the backend with ggml
// at the first call. FAILED_PRECONDITION when the driver is missing or has no device. Thread-safe.
absl::StatusOr<std::vector<AcceleratorDevice>> AcceleratorDevices();

// The device called `name`, the first for an empty name. NOT_FOUND naming those that there are.
absl::StatusOr<AcceleratorDevice> FindAcceleratorDevice(absl::string_view name);

// --- What each lane implements ---

// That the driver can be called at all: ggml's backends end the process where it cannot.
absl::Status CheckDriver();
// Null when the backend cannot start.
ggml_backend_reg_t AcceleratorBackend();
// Fills in driver and software; the rest is there.
void DescribeDevice(size_t index, AcceleratorDevice* device);

}  // namespace meshnet::llama_cpp

#endif  // THIRD_PARTY_LLAMA_CPP_ACCELERATOR_H_
