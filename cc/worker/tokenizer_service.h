// TokenizerService over a worker's vocabulary.
#ifndef MESHNET_CC_WORKER_TOKENIZER_SERVICE_H_
#define MESHNET_CC_WORKER_TOKENIZER_SERVICE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "cc/worker/transport.h"
#include "cc/worker/worker.h"

namespace meshnet::worker {

// Texts of up to this size, as tokenizer.proto promises.
inline constexpr size_t kMaxTextBytes = 8 << 20;
inline constexpr int kMaxTokenIds = 1 << 20;
// Calls are answered one after another. So many may wait, with requests of so many bytes.
inline constexpr size_t kMaxWaitingCalls = 64;
inline constexpr uint64_t kMaxWaitingBytes = 32 << 20;

class TokenizerService {
 public:
  virtual ~TokenizerService() = default;

  // Null when `method` is none of the service's. Calls are refused with NOT_READY until the worker
  // has an engine, with QUEUE_FULL when too many wait.
  virtual std::shared_ptr<StreamHandler> Accept(const std::string& method,
                                                std::shared_ptr<Stream> stream,
                                                const PeerInfo& peer) = 0;
};

// `worker` must outlive the service, the service its calls.
std::unique_ptr<TokenizerService> MakeTokenizerService(const Worker* worker);

}  // namespace meshnet::worker

#endif  // MESHNET_CC_WORKER_TOKENIZER_SERVICE_H_
