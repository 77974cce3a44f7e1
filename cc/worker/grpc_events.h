// All of a process's gRPC on one completion queue, polled by one thread at a time.
//
//   GrpcEvents events;
//   queue operations on events.queue() with tags that are GrpcEvents::Tag
//   events.Poll(deadline);   // a guest: the thread that will work on what comes
//
// A thread of its own polls when no guest does. A guest that has work to do leaves; its place is
// taken only when it stays away for long, or at once when something is on its way out, so that a
// guest with short work finds what has come meanwhile without any other thread having been woken.
#ifndef MESHNET_CC_WORKER_GRPC_EVENTS_H_
#define MESHNET_CC_WORKER_GRPC_EVENTS_H_

#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "cc/worker/event_source.h"
#include "grpcpp/alarm.h"
#include "grpcpp/completion_queue.h"
#include "grpcpp/server_builder.h"

namespace meshnet::worker {

class GrpcEvents final : public EventSource {
 public:
  // What an operation calls when it is over. Calls of all tags are serial.
  class Tag {
   public:
    virtual void OnDone(bool ok) = 0;

   protected:
    ~Tag() = default;
  };

  GrpcEvents();
  // All operations must have ended, and the server must be gone.
  ~GrpcEvents() override;
  GrpcEvents(const GrpcEvents&) = delete;
  GrpcEvents& operator=(const GrpcEvents&) = delete;

  void Poll(absl::Time deadline) override;
  void Wake() override;

  // For the process's server: a queue belongs to the builder it comes from. At most one server.
  grpc::ServerBuilder* builder() { return &builder_; }
  grpc::ServerCompletionQueue* queue() { return queue_.get(); }

  // Within an event: `tag` is called after all that has come so far.
  void Defer(Tag* tag) { deferred_.push_back(tag); }
  // For operations whose end brings the next one: somebody should see it soon.
  void WriteBegins();
  void WriteEnds();

 private:
  class KickTag final : public Tag {
   public:
    explicit KickTag(GrpcEvents* events) : events_(events) {}
    void OnDone(bool ok) override;

   private:
    GrpcEvents* const events_;
  };

  void Host();
  // Handles events; waits for the first of them.
  void Run(absl::Time deadline, bool guest);
  void Kick() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool has_guest() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return guest_polls_ || guest_waits_; }
  // What a host has waited for without success is the receiver's affair, and no reason to hurry.
  bool is_sending() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return writes_ > 0 && new_write_; }

  grpc::ServerBuilder builder_;
  const std::unique_ptr<grpc::ServerCompletionQueue> queue_;
  KickTag kick_tag_{this};
  // Touched by whoever polls.
  std::vector<Tag*> deferred_;

  absl::Mutex mu_;
  absl::CondVar host_;
  absl::CondVar guest_;
  grpc::Alarm kick_ ABSL_GUARDED_BY(mu_);
  bool kicked_ ABSL_GUARDED_BY(mu_) = false;
  bool host_polls_ ABSL_GUARDED_BY(mu_) = false;
  // Until the next guest leaves.
  bool host_sleeps_ ABSL_GUARDED_BY(mu_) = false;
  bool guest_polls_ ABSL_GUARDED_BY(mu_) = false;
  bool guest_waits_ ABSL_GUARDED_BY(mu_) = false;
  // Whoever polls is in the queue, with a deadline that is not yet over.
  bool in_queue_ ABSL_GUARDED_BY(mu_) = false;
  bool woken_ ABSL_GUARDED_BY(mu_) = false;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  int writes_ ABSL_GUARDED_BY(mu_) = 0;
  // Since a host came last.
  bool new_write_ ABSL_GUARDED_BY(mu_) = false;
  // How often guests have left.
  uint64_t visits_ ABSL_GUARDED_BY(mu_) = 0;
  std::thread thread_;
};

}  // namespace meshnet::worker

#endif  // MESHNET_CC_WORKER_GRPC_EVENTS_H_
