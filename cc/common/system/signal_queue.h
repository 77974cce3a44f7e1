// Signals that a process is to be told of, one after the other, and word from its own threads.
//
//   SignalQueue signals({SIGTERM, SIGINT});
//   std::thread loader([&signals] { Load(); signals.Post(); });
//   const std::optional<int> next = signals.Wait(absl::Now() + absl::Seconds(1));
//
// With what POSIX has: handlers, which run while Wait waits, write into a pipe.
#ifndef MESHNET_CC_COMMON_SYSTEM_SIGNAL_QUEUE_H_
#define MESHNET_CC_COMMON_SYSTEM_SIGNAL_QUEUE_H_

#include <csignal>
#include <initializer_list>
#include <optional>
#include <vector>

#include "absl/time/time.h"

namespace meshnet {

class SignalQueue {
 public:
  // What Wait returns for a Post.
  static constexpr int kPosted = 0;

  // Before any thread is started: it is to inherit that the signals are blocked. One at a time in a
  // process. Aborts where the process may open no files.
  explicit SignalQueue(std::initializer_list<int> signals);
  ~SignalQueue();
  SignalQueue(const SignalQueue&) = delete;
  SignalQueue& operator=(const SignalQueue&) = delete;

  // The number of the next signal, or kPosted; nothing when the deadline passes. On the thread that
  // made the queue.
  std::optional<int> Wait(absl::Time deadline);

  // Ends a Wait, or the next one. On any thread.
  void Post();

 private:
  const std::vector<int> numbers_;
  sigset_t signals_;
  int read_end_;
};

}  // namespace meshnet

#endif  // MESHNET_CC_COMMON_SYSTEM_SIGNAL_QUEUE_H_
