// TokenizerService over a worker's vocabulary.
#ifndef MESHNET_CC_WORKER_TOKENIZER_SERVICE_H_
#define MESHNET_CC_WORKER_TOKENIZER_SERVICE_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "cc/worker/worker.h"
#include "proto/meshnet/shard/v1/tokenizer.grpc.pb.h"

namespace meshnet::worker {

// Texts of up to this size, as tokenizer.proto promises.
inline constexpr size_t kMaxTextBytes = 8 << 20;
inline constexpr int kMaxTokenIds = 1 << 20;
// Calls are answered one after another. So many may wait, with requests of so many bytes.
inline constexpr size_t kMaxWaitingCalls = 64;
inline constexpr uint64_t kMaxWaitingBytes = 32 << 20;

// NOT_READY until the worker has an engine, QUEUE_FULL when too many calls wait. `worker` must
// outlive the service.
std::unique_ptr<v1::TokenizerService::CallbackService> MakeTokenizerService(const Worker* worker);

}  // namespace meshnet::worker

#endif  // MESHNET_CC_WORKER_TOKENIZER_SERVICE_H_
