// Where a thread waits for events that may bring it work.
//
// The engine's thread waits for messages itself instead of being told of them by another thread:
// on the way of a token each hand-over between two threads costs as much as a small layer.
#ifndef MESHNET_CC_WORKER_EVENT_SOURCE_H_
#define MESHNET_CC_WORKER_EVENT_SOURCE_H_

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace meshnet::worker {

class EventSource {
 public:
  virtual ~EventSource() = default;

  // Handles on this thread what has come. When that is nothing, waits for the first event, until
  // `deadline` (in the past: not at all) or Wake. One thread at a time.
  virtual void Poll(absl::Time deadline) = 0;

  // Any thread, also while it handles an event: ends the Poll that waits, or else the next one.
  virtual void Wake() = 0;
};

// No events but Wake.
class WakeOnly final : public EventSource {
 public:
  void Poll(absl::Time deadline) override {
    absl::MutexLock lock(&mu_);
    mu_.AwaitWithDeadline(absl::Condition(&woken_), deadline);
    woken_ = false;
  }

  void Wake() override {
    absl::MutexLock lock(&mu_);
    woken_ = true;
  }

 private:
  absl::Mutex mu_;
  bool woken_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace meshnet::worker

#endif  // MESHNET_CC_WORKER_EVENT_SOURCE_H_
