// 0012-amx: a weight must not get an AMX buffer for a product that AMX then refuses to compute, as
// no backend is left for it and the scheduler aborts.
#include "third_party/llama_cpp/amx_selection.h"

#include <vector>

#include "ggml-cpp.h"
#include "gtest/gtest.h"

namespace meshnet::llama_cpp {
namespace {

constexpr int64_t kInner = 512;
constexpr int64_t kRows = 64;
constexpr int64_t kTokens = 32;
constexpr int64_t kGroups = 4;

class AmxSelection : public ::testing::TestWithParam<ggml_type> {
 protected:
  AmxSelection() : context_(ggml_init({1u << 20, nullptr, /*no_alloc=*/true})) {}

  ggml_tensor* Weight(int64_t stack) {
    ggml_tensor* weight = ggml_new_tensor_3d(context_.get(), GetParam(), kInner, kRows, stack);
    buffers_.emplace_back(ggml_backend_buft_alloc_buffer(AmxBufferType(), 0));
    weight->buffer = buffers_.back().get();
    return weight;
  }

  ggml_tensor* Product(ggml_tensor* weight, ggml_tensor* activations) {
    return ggml_mul_mat(context_.get(), weight, activations);
  }

  ggml_context_ptr context_;
  std::vector<ggml_backend_buffer_ptr> buffers_;
};

// As the loader of a model tries it: see weight_buft_supported.
TEST_P(AmxSelection, TakesMatrices) {
  ggml_tensor* activations = ggml_new_tensor_2d(context_.get(), GGML_TYPE_F32, kInner, kTokens);
  EXPECT_TRUE(AmxSupports(Product(Weight(1), activations)));
}

TEST_P(AmxSelection, TakesNoStackThatItWillNotMultiply) {
  ggml_tensor* weight = Weight(kGroups);
  // The trial, with contiguous activations ...
  ggml_tensor* tried = ggml_new_tensor_3d(context_.get(), GGML_TYPE_F32, kInner, kTokens, kGroups);
  // ... and the use, as llama_model_deepseek4 has it: groups of heads, permuted.
  ggml_tensor* used = ggml_permute(
      context_.get(), ggml_new_tensor_3d(context_.get(), GGML_TYPE_F32, kInner, kGroups, kTokens),
      0, 2, 1, 3);
  ASSERT_FALSE(ggml_is_contiguous(used));
  EXPECT_FALSE(AmxSupports(Product(weight, used)));
  EXPECT_FALSE(AmxSupports(Product(weight, tried)));
}

INSTANTIATE_TEST_SUITE_P(Types, AmxSelection,
                         ::testing::Values(GGML_TYPE_F16, GGML_TYPE_Q4_0, GGML_TYPE_Q8_0),
                         [](const auto& test) { return std::string(ggml_type_name(test.param)); });

}  // namespace
}  // namespace meshnet::llama_cpp
