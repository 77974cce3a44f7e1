// TokenizerService over a worker's vocabulary.
#ifndef MESHNET_CC_WORKER_TOKENIZER_SERVICE_H_
#define MESHNET_CC_WORKER_TOKENIZER_SERVICE_H_

#include <memory>

#include "cc/worker/worker.h"
#include "proto/meshnet/shard/v1/tokenizer.grpc.pb.h"

namespace meshnet::worker {

// Texts of up to this size, as tokenizer.proto promises.
inline constexpr size_t kMaxTextBytes = 8 << 20;
inline constexpr int kMaxTokenIds = 1 << 20;

// NOT_READY until the worker has an engine. `worker` must outlive the service.
std::unique_ptr<v1::TokenizerService::CallbackService> MakeTokenizerService(const Worker* worker);

}  // namespace meshnet::worker

#endif  // MESHNET_CC_WORKER_TOKENIZER_SERVICE_H_
