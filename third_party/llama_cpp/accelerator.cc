#include "third_party/llama_cpp/accelerator.h"

#include <mutex>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace meshnet::llama_cpp {
namespace {

absl::StatusOr<std::vector<AcceleratorDevice>> FindDevices() {
  const absl::Status driver = CheckDriver();
  if (!driver.ok()) return driver;
  std::vector<AcceleratorDevice> devices;
  ggml_backend_reg_t backend = AcceleratorBackend();
  const size_t count = backend == nullptr ? 0 : ggml_backend_reg_dev_count(backend);
  if (count == 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("expected a device that the ", kLane,
                     " driver offers for computing, it offers none; check that the driver of the "
                     "hardware is installed and that this user may open it"));
  }
  ggml_backend_register(backend);
  for (size_t i = 0; i < count; ++i) {
    AcceleratorDevice device;
    device.device = ggml_backend_reg_dev_get(backend, i);
    device.name = ggml_backend_dev_name(device.device);
    device.description = ggml_backend_dev_description(device.device);
    DescribeDevice(i, &device);
    devices.push_back(std::move(device));
  }
  return devices;
}

}  // namespace

absl::StatusOr<std::vector<AcceleratorDevice>> AcceleratorDevices() {
  if (absl::string_view(kLane) == "cpu") return std::vector<AcceleratorDevice>();
  static std::mutex mutex;
  static auto* const found =
      new absl::StatusOr<std::vector<AcceleratorDevice>>(absl::UnknownError("not looked for yet"));
  const std::lock_guard<std::mutex> lock(mutex);
  if (absl::IsUnknown(found->status())) *found = FindDevices();
  return *found;
}

absl::StatusOr<AcceleratorDevice> FindAcceleratorDevice(absl::string_view name) {
  const absl::StatusOr<std::vector<AcceleratorDevice>> devices = AcceleratorDevices();
  if (!devices.ok()) return devices.status();
  std::vector<std::string> names;
  for (const AcceleratorDevice& device : *devices) {
    if (name.empty() || name == device.name) return device;
    names.push_back(device.name);
  }
  return absl::NotFoundError(absl::StrCat(
      "expected a device of the ", kLane, " lane (",
      names.empty() ? "it has none" : absl::StrJoin(names, ", "), "), got '", name, "'"));
}

}  // namespace meshnet::llama_cpp
