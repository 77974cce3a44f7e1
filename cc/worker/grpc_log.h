// gRPC's own log lines, as records of the worker's log.
#ifndef MESHNET_CC_WORKER_GRPC_LOG_H_
#define MESHNET_CC_WORKER_GRPC_LOG_H_

#include <cstdint>
#include <optional>

#include "absl/time/time.h"
#include "cc/worker/json_log.h"

namespace meshnet::worker {

// Lines that strangers can cause are worth a few per window, not a full disk. Not thread-safe.
class LineBudget {
 public:
  LineBudget(uint32_t lines, absl::Duration window) : lines_(lines), window_(window) {}

  // How many lines were left out since the last one that was not; nothing for one to leave out.
  std::optional<uint64_t> Take(absl::Time now);

 private:
  const uint32_t lines_;
  const absl::Duration window_;
  absl::Time window_end_ = absl::InfinitePast();
  uint32_t taken_ = 0;
  uint64_t left_out_ = 0;
};

// From now on gRPC's lines go to `logger` as warnings {"event":"grpc","message":...}, a limited
// number of them per minute, and none to stderr. `logger` must live as long as the process. Call it
// once: gRPC from 1.65 on logs through absl/log, which this sets up for the whole program.
void LogGrpcTo(const Logger* logger);

}  // namespace meshnet::worker

#endif  // MESHNET_CC_WORKER_GRPC_LOG_H_
