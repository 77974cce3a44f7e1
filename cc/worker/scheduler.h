// Decides which steps the engine runs next. One engine, one thread, bounded work.
//
// A session has at most one step here at a time (it keeps the rest itself), so the queue is bounded
// by the number of sessions. Order: decode steps in order of arrival; after each round of them at
// most one round of prefill chunks, so that neither kind starves the other.
//
//   exact   one step per engine call: another session's rows never share one, and a result leaves
//           the worker before the next session's step begins.
//   shared  all waiting decode steps in one call, then prefill chunks up to a token budget in the
//           next, rows ordered by session: no token waits for another session's chunk that came
//           with it. Sessions that decoded in one call stay together: when the next step of one of
//           them comes, the engine waits a moment for the others', which are on their way.
#ifndef MESHNET_CC_WORKER_SCHEDULER_H_
#define MESHNET_CC_WORKER_SCHEDULER_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "cc/shard_engine/shard_engine.h"
#include "cc/worker/event_source.h"

namespace meshnet::worker {

// One step on its way through the engine.
class EngineTask {
 public:
  virtual ~EngineTask() = default;

  // Stable until Done.
  virtual const Step& step() const = 0;
  // Identifies the session within this worker; rows are ordered by it.
  virtual uint64_t session_ordinal() const = 0;
  // On the engine thread, once, unless the task was dropped.
  virtual void Done(StepOutput output) = 0;
};

class Scheduler {
 public:
  struct Options {
    BatchPolicy policy = BatchPolicy::kExact;
    // Rows of prefill that one call may hold (shared). At least one chunk always goes.
    uint32_t prefill_token_budget = 512;
    // How long the first of several sessions that decode together may wait for the last (shared).
    absl::Duration batch_window = absl::Milliseconds(1);
    // Where the engine's thread waits for steps; it handles the events that bring them. Null: other
    // threads do.
    EventSource* events = nullptr;
  };

  // `engine` and the events must outlive the scheduler.
  Scheduler(ShardEngine* engine, Options options);
  ~Scheduler();

  // Any thread; never calls back before it returns.
  void Submit(std::shared_ptr<EngineTask> task);
  // Runs `command` on the engine thread before the next step; commands keep their order.
  void Post(std::function<void(ShardEngine&)> command);
  // Forgets the session and its step, if that has not begun.
  void Drop(uint64_t session_ordinal);

  uint32_t queued() const;

  // Runs all posted commands and at most one engine call. False when there was nothing to do. For
  // callers without a thread of their own; not together with Start.
  bool RunOnce();

  // Starts the engine thread. Stop finishes what runs, drops what waits (commands are still run)
  // and joins.
  void Start();
  void Stop();

 private:
  using TaskList = std::deque<std::shared_ptr<EngineTask>>;

  void Loop();
  void RunCommands();
  // Until when the engine has to wait for work, or should for more decode steps; the past when it
  // should not.
  absl::Time IdleUntil() const;
  absl::Time WaitForMates() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void RememberMates(const std::vector<std::shared_ptr<EngineTask>>& batch)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::vector<std::shared_ptr<EngineTask>> NextBatch() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Execute(const std::vector<std::shared_ptr<EngineTask>>& batch);

  ShardEngine* const engine_;
  const Options options_;
  WakeOnly wake_only_;
  EventSource* const events_;
  mutable absl::Mutex mu_;
  std::deque<std::function<void(ShardEngine&)>> commands_ ABSL_GUARDED_BY(mu_);
  TaskList decode_ ABSL_GUARDED_BY(mu_);
  TaskList prefill_ ABSL_GUARDED_BY(mu_);
  // How many tasks at the front of decode_ belong to the round under way (exact).
  size_t round_ ABSL_GUARDED_BY(mu_) = 0;
  bool prefill_turn_ ABSL_GUARDED_BY(mu_) = false;
  // Sessions that decoded in the same call have the same number here (shared).
  std::map<uint64_t, uint64_t> last_call_ ABSL_GUARDED_BY(mu_);
  uint64_t calls_ ABSL_GUARDED_BY(mu_) = 0;
  absl::Time first_decode_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace meshnet::worker

#endif  // MESHNET_CC_WORKER_SCHEDULER_H_
