// Matrix products of one forced variant against plain loops. A CPU that lacks the variant must
// refuse it instead.

#include <cmath>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "third_party/llama_cpp/cpu_backend.h"

namespace meshnet::llama_cpp {
namespace {

constexpr int kInner = 512;
constexpr int kRows = 64;
constexpr int kColumns = 40;

// Around 1, so that sums do not cancel out.
float Value(int index) { return 1.0f + std::sin(0.37f * static_cast<float>(index)); }

ggml_backend_dev_t Device() { return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU); }

// The plain buffer type and those that repack weights.
std::vector<ggml_backend_buffer_type_t> BufferTypes() {
  std::vector<ggml_backend_buffer_type_t> types = {ggml_backend_dev_buffer_type(Device())};
  auto* extra =
      reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(ggml_backend_reg_get_proc_address(
          ggml_backend_dev_backend_reg(Device()), "ggml_backend_dev_get_extra_bufts"));
  for (ggml_backend_buffer_type_t* type = extra(Device()); *type != nullptr; ++type)
    types.push_back(*type);
  return types;
}

// Columns of a product of kRows rows of quantised weights with kColumns columns, and the same by
// plain loops over the weights as they are after quantisation; the error of the former relative to
// the latter.
double ProductError(ggml_type type, ggml_backend_buffer_type_t buffer_type, bool* supported) {
  ggml_init_params params = {16 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true};
  ggml_context_ptr weights_context(ggml_init(params));
  ggml_context_ptr context(ggml_init(params));
  ggml_tensor* weights = ggml_new_tensor_2d(weights_context.get(), type, kInner, kRows);
  ggml_tensor* input = ggml_new_tensor_2d(context.get(), GGML_TYPE_F32, kInner, kColumns);
  ggml_tensor* product = ggml_mul_mat(context.get(), weights, input);

  ggml_backend_buffer_ptr weights_buffer(
      ggml_backend_alloc_ctx_tensors_from_buft(weights_context.get(), buffer_type));
  *supported = weights_buffer != nullptr && ggml_backend_dev_supports_op(Device(), product);
  if (!*supported) return 0;
  ggml_backend_ptr backend(ggml_backend_dev_init(Device(), nullptr));
  ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(context.get(), backend.get()));

  std::vector<float> w(kInner * kRows), x(kInner * kColumns), result(kRows * kColumns);
  for (size_t i = 0; i < w.size(); ++i) w[i] = Value(static_cast<int>(i));
  for (size_t i = 0; i < x.size(); ++i) x[i] = Value(static_cast<int>(3 * i + 1));
  std::vector<char> quantised(ggml_row_size(type, kInner) * kRows);
  ggml_quantize_chunk(type, w.data(), quantised.data(), 0, kRows, kInner, nullptr);
  if (ggml_is_quantized(type) || type == GGML_TYPE_F16) {
    ggml_get_type_traits(type)->to_float(quantised.data(), w.data(), kInner * kRows);
  }
  ggml_backend_tensor_set(weights, quantised.data(), 0, quantised.size());
  ggml_backend_tensor_set(input, x.data(), 0, x.size() * sizeof(float));

  ggml_cgraph* graph = ggml_new_graph(context.get());
  ggml_build_forward_expand(graph, product);
  EXPECT_EQ(ggml_backend_graph_compute(backend.get(), graph), GGML_STATUS_SUCCESS);
  ggml_backend_tensor_get(product, result.data(), 0, result.size() * sizeof(float));

  double error = 0, norm = 0;
  for (int column = 0; column < kColumns; ++column) {
    for (int row = 0; row < kRows; ++row) {
      double expected = 0;
      for (int i = 0; i < kInner; ++i)
        expected += double{w[row * kInner + i]} * x[column * kInner + i];
      const double difference = result[column * kRows + row] - expected;
      error += difference * difference;
      norm += expected * expected;
    }
  }
  return std::sqrt(error / norm);
}

// Instruction sets that the variant must have been compiled for, as ggml names them.
std::vector<std::string> ExpectedFeatures(const std::string& variant) {
  const std::map<std::string, std::pair<std::string, std::vector<std::string>>> features = {
      {"sse42", {"", {"SSE3", "SSSE3", "LLAMAFILE", "REPACK"}}},
      {"haswell", {"sse42", {"AVX", "AVX2", "BMI2", "FMA", "F16C"}}},
      {"alderlake", {"haswell", {"AVX_VNNI"}}},
      {"skylakex", {"haswell", {"AVX512"}}},
      {"icelake", {"skylakex", {"AVX512_VBMI", "AVX512_VNNI"}}},
      {"zen4", {"icelake", {"AVX512_BF16"}}},
      {"sapphirerapids", {"zen4", {"AMX_INT8"}}},
      {"armv8", {"", {"NEON", "ARM_FMA", "LLAMAFILE", "REPACK"}}},
      {"dotprod", {"armv8", {"FP16_VA", "DOTPROD"}}},
      // There upstream's own kernels stand for llamafile's.
      {"i8mm", {"", {"NEON", "ARM_FMA", "REPACK", "FP16_VA", "DOTPROD", "MATMUL_INT8"}}},
  };
  std::vector<std::string> all;
  for (std::string name = variant; !name.empty(); name = features.at(name).first) {
    const std::vector<std::string>& own = features.at(name).second;
    all.insert(all.end(), own.begin(), own.end());
  }
  return all;
}

TEST(CpuVariant, MultipliesOrIsRefused) {
  const std::string variant = std::getenv("CPU_VARIANT");
  const absl::StatusOr<std::string> registered = RegisterCpuBackend(variant);
  if (!ChooseCpuVariant(HostInstructionSets(), variant).ok()) {
    EXPECT_EQ(registered.status().code(), absl::StatusCode::kFailedPrecondition);
    return;
  }
  ASSERT_EQ(registered.value(), variant);

  auto* get_features =
      reinterpret_cast<ggml_backend_get_features_t>(ggml_backend_reg_get_proc_address(
          ggml_backend_dev_backend_reg(Device()), "ggml_backend_get_features"));
  std::vector<std::string> features;
  for (ggml_backend_feature* f = get_features(ggml_backend_dev_backend_reg(Device())); f->name;
       ++f) {
    if (std::string(f->value) == "1") features.emplace_back(f->name);
  }
  const std::vector<std::string> expected = ExpectedFeatures(variant);
  // What it must not have been compiled for is as wrong as what is missing.
  EXPECT_THAT(features, ::testing::UnorderedElementsAreArray(expected));

  int products = 0;
  for (ggml_type type : {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_Q4_0, GGML_TYPE_Q4_1,
                         GGML_TYPE_Q8_0, GGML_TYPE_Q4_K, GGML_TYPE_Q6_K, GGML_TYPE_MXFP4}) {
    for (ggml_backend_buffer_type_t buffer_type : BufferTypes()) {
      bool supported = false;
      const double error = ProductError(type, buffer_type, &supported);
      if (!supported) continue;
      ++products;
      // Activations are quantised to 8 bits, which alone makes errors of some thousandths.
      EXPECT_LT(error, ggml_is_quantized(type) ? 0.01 : 0.001)
          << ggml_type_name(type) << " in " << ggml_backend_buft_name(buffer_type);
    }
  }
  if (variant == CpuVariants().front()) {
    EXPECT_EQ(products, 8) << "weights are rearranged from AVX2 or dot products on";
  } else {
    EXPECT_GE(products, 8 + 1) << "at least one of the types is repacked";
  }
}

}  // namespace
}  // namespace meshnet::llama_cpp
