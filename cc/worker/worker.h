// A shard worker behind its transports: sessions, capability, health, metrics, shutdown.
//
//   Worker worker(options, dialer, authorizer, logger);    // LOADING: answers, takes no sessions
//   worker.AttachEngine(std::move(engine));                // WARMING_UP, then READY
//   worker.BeginDrain(deadline);                           // DRAINING
//
// Thread-safe. Streams come in through StreamAcceptor, whatever carries them.
#ifndef MESHNET_CC_WORKER_WORKER_H_
#define MESHNET_CC_WORKER_WORKER_H_

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "cc/shard_engine/shard_engine.h"
#include "cc/worker/authorizer.h"
#include "cc/worker/json_log.h"
#include "cc/worker/session.h"
#include "cc/worker/transport.h"
#include "proto/meshnet/shard/v1/shard.pb.h"

namespace meshnet::worker {

class Worker : public StreamAcceptor {
 public:
  // All pointers must outlive the worker and the streams it has accepted or dialed.
  Worker(WorkerOptions options, Dialer* dialer, Authorizer* authorizer, const Logger* logger);
  ~Worker() override;

  // Checks identity (RECIPE_MISMATCH, ARTIFACT_MISMATCH), warms the engine up and becomes READY.
  // The failure is also what GetHealth reports from then on. Once, before Start.
  absl::Status AttachEngine(std::unique_ptr<ShardEngine> engine);
  void Fail(const absl::Status& status);
  // Called with the worker's lock held after each change of state.
  void SetStateListener(std::function<void(v1::WorkerState)> listener);

  // Starts the engine's and the timer's thread.
  void Start();
  // For callers without threads: one round of engine work; false when there was none.
  bool RunEngineOnce();
  // Deadlines, idle sessions, the drain deadline.
  void Tick();

  // No new sessions from now on. Idle ones end at once, running generations by `deadline`.
  void BeginDrain(absl::Time deadline);
  // Whether a session is open, or a stream whose peer has not been told its end yet.
  bool is_busy() const;
  // Ends what is left and joins the threads.
  void Stop();

  std::shared_ptr<StreamHandler> Accept(Method method, std::shared_ptr<Stream> stream,
                                        const PeerInfo& peer) override;

  absl::StatusOr<v1::Capability> GetCapability(const v1::GetCapabilityRequest& request) const;
  v1::Health GetHealth() const;
  v1::Metrics GetMetrics() const;
  absl::StatusOr<v1::CancelSessionResponse> CancelSession(const v1::CancelSessionRequest& request,
                                                          const PeerInfo& peer);
  absl::StatusOr<v1::ReleaseSessionResponse> ReleaseSession(
      const v1::ReleaseSessionRequest& request, const PeerInfo& peer);

  // Null until the engine is attached.
  const Tokenizer* tokenizer() const;

 private:
  class AcceptedHandler;
  class UpstreamHandler;
  class ReturnAcceptHandler;
  // A stream from which nothing has come yet, or had not when it was accepted.
  struct Unopened {
    absl::Time deadline;
    std::weak_ptr<AcceptedHandler> handler;
  };

  void SetState(v1::WorkerState state);
  absl::StatusOr<std::vector<std::shared_ptr<Session>>> FindForKey(absl::string_view action,
                                                                   const std::string& id,
                                                                   uint64_t epoch,
                                                                   const PeerInfo& peer);
  void EndOverdue(absl::Time now);
  void TimerLoop();

  const std::shared_ptr<Core> core_;
  std::function<void(v1::WorkerState)> listener_;
  absl::Time drain_deadline_ = absl::InfiniteFuture();
  absl::Time next_eviction_check_ = absl::InfinitePast();
  // Taken without Core::mu: an accepted stream may be a stage of this very process, dialing.
  absl::Mutex unopened_mu_;
  std::deque<Unopened> unopened_ ABSL_GUARDED_BY(unopened_mu_);
  std::thread timer_;
  absl::CondVar timer_stop_;
  bool stopping_ = false;
};

}  // namespace meshnet::worker

#endif  // MESHNET_CC_WORKER_WORKER_H_
