#include "cc/worker/grpc_log.h"

#include "absl/base/attributes.h"
#include "absl/base/const_init.h"
#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "grpcpp/version_info.h"

#if GRPC_CPP_VERSION_MAJOR == 1 && GRPC_CPP_VERSION_MINOR < 65
#define MESHNET_GRPC_LOGS_THROUGH_GPR
#include "grpc/support/log.h"
#else
#include "absl/base/log_severity.h"
#include "absl/log/globals.h"
#include "absl/log/initialize.h"
#include "absl/log/log_entry.h"
#include "absl/log/log_sink.h"
#include "absl/log/log_sink_registry.h"
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

namespace {

ABSL_CONST_INIT absl::Mutex budget_mu(absl::kConstInit);

void LogLine(const Logger& logger, absl::string_view message) {
  static LineBudget budget ABSL_GUARDED_BY(budget_mu)(20, absl::Minutes(1));
  std::optional<uint64_t> left_out;
  {
    absl::MutexLock lock(&budget_mu);
    left_out = budget.Take(absl::Now());
  }
  if (!left_out.has_value()) return;
  logger.Log(Severity::kWarning, "grpc", {{"message", message}, {"left_out", *left_out}});
}

}  // namespace

#ifdef MESHNET_GRPC_LOGS_THROUGH_GPR

namespace {

// gRPC takes a function without a state of its own.
const Logger* destination = nullptr;

}  // namespace

void LogGrpcTo(const Logger* logger) {
  destination = logger;
  gpr_set_log_function([](gpr_log_func_args* line) { LogLine(*destination, line->message); });
}

#else

namespace {

class GrpcLines final : public absl::LogSink {
 public:
  explicit GrpcLines(const Logger* logger) : logger_(*logger) {}

  void Send(const absl::LogEntry& entry) override {
    if (entry.log_severity() == absl::LogSeverity::kFatal) {
      // The last line of this process: no budget may leave it out.
      logger_.Log(Severity::kError, "grpc", {{"message", entry.text_message()}});
    } else if (entry.log_severity() >= absl::LogSeverity::kWarning) {
      LogLine(logger_, entry.text_message());
    }
  }

 private:
  const Logger& logger_;
};

}  // namespace

void LogGrpcTo(const Logger* logger) {
  // Lines may come until the very end of the process.
  static auto* const lines = new GrpcLines(logger);
  absl::AddLogSink(lines);
  absl::SetStderrThreshold(absl::LogSeverityAtLeast::kInfinity);
  // Until then Abseil writes to stderr whatever the threshold is.
  absl::InitializeLog();
}

#endif

}  // namespace meshnet::worker
