#include "cc/worker/grpc_log.h"

#include "absl/base/attributes.h"
#include "absl/base/const_init.h"
#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "grpcpp/version_info.h"

#if GRPC_CPP_VERSION_MAJOR == 1 && GRPC_CPP_VERSION_MINOR < 65
#define MESHNET_GRPC_LOGS_THROUGH_GPR
#include "grpc/support/log.h"
#endif

namespace meshnet::worker {

std::optional<uint64_t> LineBudget::Take(absl::Time now) {
  if (now >= window_end_) {
    window_end_ = now + window_;
    taken_ = 0;
  }
  if (taken_ == lines_) {
    ++left_out_;
    return std::nullopt;
  }
  ++taken_;
  const uint64_t left_out = left_out_;
  left_out_ = 0;
  return left_out;
}

#ifdef MESHNET_GRPC_LOGS_THROUGH_GPR

namespace {

// gRPC takes a function without a state of its own.
ABSL_CONST_INIT absl::Mutex budget_mu(absl::kConstInit);
const Logger* destination = nullptr;

void LogLine(gpr_log_func_args* line) {
  static LineBudget budget ABSL_GUARDED_BY(budget_mu)(20, absl::Minutes(1));
  std::optional<uint64_t> left_out;
  {
    absl::MutexLock lock(&budget_mu);
    left_out = budget.Take(absl::Now());
  }
  if (!left_out.has_value()) return;
  destination->Log(Severity::kWarning, "grpc",
                   {{"message", line->message}, {"left_out", *left_out}});
}

}  // namespace

void LogGrpcTo(const Logger* logger) {
  destination = logger;
  gpr_set_log_function(LogLine);
}

#else

void LogGrpcTo(const Logger*) {}

#endif

}  // namespace meshnet::worker
