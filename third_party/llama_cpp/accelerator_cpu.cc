#include "third_party/llama_cpp/accelerator.h"

namespace meshnet::llama_cpp {

const char kLane[] = "cpu";

absl::string_view AcceleratorBuild() { return ""; }
absl::Status CheckDriver() { return absl::OkStatus(); }
ggml_backend_reg_t AcceleratorBackend() { return nullptr; }
void DescribeDevice(size_t, AcceleratorDevice*) {}

}  // namespace meshnet::llama_cpp
