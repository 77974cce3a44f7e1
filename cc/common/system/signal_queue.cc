#include "cc/common/system/signal_queue.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>

#include "absl/time/clock.h"

namespace meshnet {
namespace {

// A handler knows nothing but the signal's number.
int write_end = -1;

void Enqueue(int number) {
  const int saved_errno = errno;
  const auto byte = static_cast<uint8_t>(number);
  // A pipe that is full has enough in it to be read.
  [[maybe_unused]] const ssize_t written = write(write_end, &byte, sizeof(byte));
  errno = saved_errno;
}

}  // namespace

SignalQueue::SignalQueue(std::initializer_list<int> signals) : numbers_(signals) {
  int ends[2];
  if (pipe(ends) != 0) std::abort();
  for (const int end : ends) {
    if (fcntl(end, F_SETFD, FD_CLOEXEC) != 0 || fcntl(end, F_SETFL, O_NONBLOCK) != 0) std::abort();
  }
  read_end_ = ends[0];
  write_end = ends[1];
  sigemptyset(&signals_);
  for (const int number : numbers_) sigaddset(&signals_, number);
  pthread_sigmask(SIG_BLOCK, &signals_, nullptr);
  struct sigaction action = {};
  action.sa_handler = Enqueue;
  action.sa_flags = SA_RESTART;
  action.sa_mask = signals_;
  for (const int number : numbers_) sigaction(number, &action, nullptr);
}

SignalQueue::~SignalQueue() {
  for (const int number : numbers_) std::signal(number, SIG_DFL);
  close(read_end_);
  close(write_end);
}

std::optional<int> SignalQueue::Wait(absl::Time deadline) {
  pollfd entry = {read_end_, POLLIN, 0};
  while (true) {
    const int64_t left = absl::ToInt64Milliseconds(deadline - absl::Now());
    pthread_sigmask(SIG_UNBLOCK, &signals_, nullptr);
    // A signal that comes just before it has written, and so ends it.
    const int ready = poll(&entry, 1, static_cast<int>(std::clamp<int64_t>(left, 0, 1000)));
    const int error = errno;
    pthread_sigmask(SIG_BLOCK, &signals_, nullptr);
    uint8_t number = 0;
    if (ready > 0 && read(read_end_, &number, sizeof(number)) == sizeof(number)) return number;
    const bool interrupted = ready < 0 && error == EINTR;
    if (!interrupted && absl::Now() >= deadline) return std::nullopt;
  }
}

void SignalQueue::Post() { Enqueue(kPosted); }

}  // namespace meshnet
