// Upstream's file with the two macros that a compiler for AMX sets, and the call by which Linux
// grants AMX answered with yes. Its kernels, which are in another file, are left out.
#include "third_party/llama_cpp/amx_selection.h"

#include <immintrin.h>  // before the macros, which it would take for the compiler's own
#include <unistd.h>

#include <cstdlib>

#define __AMX_INT8__ 1
#define __AVX512VNNI__ 1
#define syscall(...) 0
#include "ggml-cpu/amx/amx.cpp"
#undef syscall

size_t ggml_backend_amx_desired_wsize(const ggml_tensor*) { std::abort(); }
size_t ggml_backend_amx_get_alloc_size(const ggml_tensor* tensor) { return ggml_nbytes(tensor); }
void ggml_backend_amx_convert_weight(ggml_tensor*, const void*, size_t, size_t) { std::abort(); }
void ggml_backend_amx_mul_mat(const ggml_compute_params*, ggml_tensor*) { std::abort(); }

// Asked for its device, which nobody looks at.
ggml_backend_reg_t ggml_backend_cpu_reg() {
  static ggml_backend_reg registry = {};
  registry.iface.get_device = [](ggml_backend_reg_t, size_t) -> ggml_backend_dev_t {
    return nullptr;
  };
  return &registry;
}

namespace ggml::cpu {
tensor_traits::~tensor_traits() = default;
extra_buffer_type::~extra_buffer_type() = default;
}  // namespace ggml::cpu

namespace meshnet::llama_cpp {

ggml_backend_buffer_type_t AmxBufferType() { return ggml_backend_amx_buffer_type(); }

bool AmxSupports(const ggml_tensor* product) {
  auto* type = static_cast<ggml::cpu::extra_buffer_type*>(AmxBufferType()->context);
  return type->supports_op(nullptr, product);
}

}  // namespace meshnet::llama_cpp
