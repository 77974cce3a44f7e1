#include "cc/worker/grpc_events.h"

#include <chrono>
#include <utility>

#include "grpc/grpc.h"
#include "grpcpp/support/time.h"

namespace meshnet::worker {
namespace {

// A guest that is away for longer leaves its place to the host.
constexpr absl::Duration kAbsence = absl::Milliseconds(20);

gpr_timespec Timespec(absl::Time time) {
  // gRPC's own conversion takes times before the epoch for the infinite future.
  if (time <= absl::UnixEpoch()) return gpr_inf_past(GPR_CLOCK_REALTIME);
  return grpc::TimePoint<std::chrono::system_clock::time_point>(absl::ToChronoTime(time))
      .raw_time();
}

}  // namespace

GrpcEvents::GrpcEvents() : queue_(builder_.AddCompletionQueue()) {
  thread_ = std::thread([this] { Host(); });
}

GrpcEvents::~GrpcEvents() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
    host_.Signal();
    if (host_polls_) Kick();
  }
  thread_.join();
  // Not by way of queue_, which would complain of a server that could not be started.
  grpc_completion_queue_shutdown(queue_->cq());
  void* tag = nullptr;
  for (bool ok = false; queue_->Next(&tag, &ok);) static_cast<Tag*>(tag)->OnDone(ok);
}

void GrpcEvents::Poll(absl::Time deadline) {
  {
    absl::MutexLock lock(&mu_);
    guest_waits_ = true;
    if (host_polls_) Kick();
    while (host_polls_) guest_.Wait(&mu_);
    guest_waits_ = false;
    guest_polls_ = true;
  }
  Run(deadline, /*guest=*/true);
  absl::MutexLock lock(&mu_);
  guest_polls_ = false;
  ++visits_;
  if (host_sleeps_ || is_sending()) host_.Signal();
}

void GrpcEvents::Wake() {
  absl::MutexLock lock(&mu_);
  woken_ = true;
  if (guest_polls_ && in_queue_) Kick();
}

void GrpcEvents::Kick() {
  if (kicked_) return;
  kicked_ = true;
  kick_.Set(queue_.get(), gpr_inf_past(GPR_CLOCK_REALTIME), &kick_tag_);
}

void GrpcEvents::KickTag::OnDone(bool) {
  absl::MutexLock lock(&events_->mu_);
  events_->kicked_ = false;
}

void GrpcEvents::WriteBegins() {
  absl::MutexLock lock(&mu_);
  ++writes_;
  new_write_ = true;
}

void GrpcEvents::WriteEnds() {
  absl::MutexLock lock(&mu_);
  --writes_;
}

void GrpcEvents::Run(absl::Time deadline, bool guest) {
  while (true) {
    {
      absl::MutexLock lock(&mu_);
      if (guest && std::exchange(woken_, false)) deadline = absl::InfinitePast();
      in_queue_ = deadline != absl::InfinitePast();
    }
    void* tag = nullptr;
    bool ok = false;
    const auto next = queue_->AsyncNext(&tag, &ok, Timespec(deadline));
    {
      absl::MutexLock lock(&mu_);
      in_queue_ = false;
    }
    if (next == grpc::CompletionQueue::GOT_EVENT) {
      static_cast<Tag*>(tag)->OnDone(ok);
    } else if (!deferred_.empty()) {
      for (Tag* deferred : std::exchange(deferred_, {})) deferred->OnDone(true);
    } else {
      return;
    }
    // One event seldom comes alone, but what has come is worth no more waiting.
    deadline = absl::InfinitePast();
  }
}

void GrpcEvents::Host() {
  absl::MutexLock lock(&mu_);
  while (!stopping_) {
    const uint64_t visits = visits_;
    if (has_guest() || (visits > 0 && !is_sending())) host_.WaitWithTimeout(&mu_, kAbsence);
    if (has_guest()) {
      if (visits_ != visits) continue;
      host_sleeps_ = true;
      while (has_guest() && !stopping_) host_.Wait(&mu_);
      host_sleeps_ = false;
      continue;
    }
    if (visits_ != visits && !is_sending()) continue;
    host_polls_ = true;
    new_write_ = false;
    while (!guest_waits_ && !stopping_) {
      mu_.Unlock();
      Run(absl::InfiniteFuture(), /*guest=*/false);
      mu_.Lock();
    }
    host_polls_ = false;
    guest_.Signal();
  }
}

}  // namespace meshnet::worker
