// Upstream's decision which products its AMX buffers take part in, without AMX: for tests.
#ifndef MESHNET_THIRD_PARTY_LLAMA_CPP_AMX_SELECTION_H_
#define MESHNET_THIRD_PARTY_LLAMA_CPP_AMX_SELECTION_H_

#include "ggml-backend.h"
#include "ggml.h"

namespace meshnet::llama_cpp {

// The buffer type as on a CPU with AMX. Nothing in it may be computed.
ggml_backend_buffer_type_t AmxBufferType();

// Whether AMX takes `product`, a GGML_OP_MUL_MAT whose weight lies in such a buffer.
bool AmxSupports(const ggml_tensor* product);

}  // namespace meshnet::llama_cpp

#endif  // MESHNET_THIRD_PARTY_LLAMA_CPP_AMX_SELECTION_H_
