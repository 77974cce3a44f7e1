// One session at this stage: what head and later stages have in common.
//
//   client --Session--> head --Seam--> middle --Seam--> tail
//                         ^-----------Return-------------|
//
// A session owns its place in the engine and its streams: `upstream` (towards the client),
// `downstream` (the seam to the next stage) and `return` (between tail and head). Whatever ends any
// of them ends the session here, and through its other streams on every stage.
//
// States only move forward: opening -> open -> closing -> ended. All members are guarded by
// Core::mu; methods are called with it held unless they say otherwise.
#ifndef MESHNET_CC_WORKER_SESSION_H_
#define MESHNET_CC_WORKER_SESSION_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "cc/protocol/frame_codec.h"
#include "cc/shard_engine/shard_engine.h"
#include "cc/worker/authorizer.h"
#include "cc/worker/event_source.h"
#include "cc/worker/histogram.h"
#include "cc/worker/json_log.h"
#include "cc/worker/mixtures.h"
#include "cc/worker/scheduler.h"
#include "cc/worker/transport.h"
#include "proto/meshnet/shard/v1/shard.pb.h"

namespace meshnet::worker {

class Session;

struct WorkerOptions {
  Limits limits;
  // Time for a peer to accept a call.
  absl::Duration dial_timeout = absl::Milliseconds(1500);
  // Time for the later stages to agree once the next one has accepted the call; time for a caller
  // to send its first message.
  absl::Duration open_timeout = absl::Seconds(10);
  // Time for the later stages to hand in their receipts.
  absl::Duration close_timeout = absl::Seconds(2);
  // Time for a caller to take what it is told at the end of its stream.
  absl::Duration linger = absl::Seconds(2);
  // When the return stream breaks: time for the seam to tell which stage is at fault, and why.
  absl::Duration explain_timeout = absl::Milliseconds(500);
  // Rows of prefill beside decode rows in one call (batch policy shared). 0 = one chunk.
  uint32_t prefill_token_budget = 0;
  // When set, the loaded shard must have them (RECIPE_MISMATCH, ARTIFACT_MISMATCH).
  std::string expected_recipe_fingerprint;
  std::string expected_artifact_sha256;
  // When not empty, the loaded shard must have one of each.
  std::vector<std::string> allowed_recipes;
  std::vector<std::string> allowed_artifacts;
  // Of which there is evidence. A route of any other fingerprint than the recipe's is refused.
  Mixtures mixtures;
  std::string version;
  // See Scheduler::Options.
  EventSource* events = nullptr;
  std::function<absl::Time()> now = absl::Now;
};

struct Counters {
  uint64_t seam_bytes_received = 0;
  uint64_t seam_bytes_sent = 0;
  uint64_t return_bytes_sent = 0;
  uint64_t sessions_opened = 0;
  uint64_t sessions_completed = 0;
  uint64_t sessions_cancelled = 0;
  uint64_t sessions_failed = 0;
  uint64_t sessions_evicted = 0;
  std::map<std::string, uint64_t> refusals;
  // See Metrics in shard.proto.
  Histogram prefill_stay;
  Histogram decode_stay;
  Histogram seam_connect;
  Histogram decode_round_trip;
};

// What all sessions of a worker share. Shared ownership: streams may outlive the worker object.
struct Core {
  WorkerOptions options;
  Dialer* dialer = nullptr;
  Authorizer* authorizer = nullptr;
  const Logger* logger = nullptr;

  mutable absl::Mutex mu;
  // From here on guarded by mu. Engine and scheduler are set once and stay.
  std::unique_ptr<ShardEngine> engine;
  std::unique_ptr<Scheduler> scheduler;
  // What the engine allows and the options narrow.
  Limits limits;
  v1::WorkerState state = v1::WORKER_STATE_LOADING;
  absl::Status state_reason;
  bool stopped = false;
  // With an entry in the engine or on the way to one.
  std::set<std::shared_ptr<Session>> sessions;
  uint64_t next_ordinal = 1;
  Counters counters;
  // Streams that are being closed, and when patience with their peers ends.
  std::deque<std::pair<absl::Time, std::weak_ptr<Stream>>> closing;

  // Streams that peers have opened and whose end is not over yet. Not guarded by mu.
  std::atomic<int> accepted_streams{0};

  // Closes a stream that a peer opened.
  void CloseAccepted(const std::shared_ptr<Stream>& stream, const absl::Status& status);
  const Capability& capability() const { return engine->capability(); }
  void CountRefusal(const absl::Status& status);
  // OK when a new session may come in. NOT_READY, DRAINING, ENGINE_FAILURE or QUEUE_FULL.
  absl::Status CheckAdmission() const;
  std::shared_ptr<Session> Find(const SessionKey& key) const;
  // Ends the sessions whose slots the engine took away; `replaced_by` is the session whose opening
  // caused it.
  void EndEvicted(const std::vector<SessionKey>& keys, const Session* replaced_by);
};

// What two stages must agree on before anything is opened.
struct RouteCheck {
  uint32_t schema_version = 0;
  const v1::OpenSession* open = nullptr;
  uint32_t hop_index = 0;
};
// `mixtures` as in WorkerOptions.
absl::Status CheckRoute(const RouteCheck& check, const Capability& capability,
                        const Mixtures& mixtures, absl::Time now);

class Session : public std::enable_shared_from_this<Session> {
 public:
  // `open` has passed CheckRoute.
  Session(std::shared_ptr<Core> core, const v1::OpenSession& open, uint32_t hop_index,
          const PeerInfo& peer, std::shared_ptr<Stream> upstream);
  virtual ~Session() = default;

  // Takes a slot in the engine, then opens the later stages.
  void Open(const Limits& negotiated);

  const SessionKey& key() const { return key_; }
  uint64_t ordinal() const { return ordinal_; }
  bool ended() const { return state_ == State::kEnded; }
  bool accepts_return() const;

  // ---- What happens on the streams ----
  virtual void OnUpstreamHalfClosed() = 0;
  virtual void OnUpstreamClosed() = 0;
  void OnUpstreamWritable();
  void OnDownstreamConnected();
  void OnDownstreamMessage(const v1::SeamMessage& message, uint64_t bytes);
  void OnDownstreamClosed(const absl::Status& status);
  void OnDownstreamWritable();

  // Ends the session at once on every stage. `stage` is the one that has the fault. Not OK.
  void End(const absl::Status& status, const v1::LayerRange& stage);
  void EndHere(const absl::Status& status);
  // The engine has already freed the slot.
  void EndEvicted(const absl::Status& status);
  // Ends in good order where this stage can, otherwise as a cancellation.
  virtual void ReleaseByKey();
  // The worker takes no more work; `expired` ends what is left.
  virtual void OnDrain(bool expired);
  void OnTick(absl::Time now);

  uint32_t queued_steps() const { return static_cast<uint32_t>(queue_.size()); }
  uint64_t queued_bytes() const;

 protected:
  friend class SessionTask;
  enum class State { kOpening, kOpen, kClosing, kEnded };

  // One step that waits for the engine.
  struct QueuedStep {
    WireStep wire;
    // Identifies the content, for repeats.
    std::string digest;
    // A repeat of the step before it: the recorded result is sent again.
    bool replay = false;
    absl::Time arrived;
  };

  // ---- For the roles ----
  // All stages behind this one have agreed.
  virtual void OnRouteOpen() = 0;
  // Puts the next step into queue_ if there is one.
  virtual void Refill() {}
  // More work comes without anything from upstream.
  virtual bool ExpectsWork() const { return false; }
  // Room for what a step produces besides the next seam's credits.
  virtual bool OutputWritable() const = 0;
  // A step left queue_: for the engine, or dropped.
  virtual void OnTakenOff() {}
  // A step's boundary is on its way to the next stage.
  virtual void OnSentOn(const WireStep&) {}
  // The last stage's step is done.
  virtual void OnTailOutput(const WireStep& wire, StepOutput output) = 0;
  virtual void Replay(const QueuedStep&) {}
  // Tells upstream that the session has ended in good order.
  virtual void SendClosed(const std::vector<v1::StageReceipt>& receipts) = 0;
  virtual Payload ErrorMessage(const absl::Status& status, const v1::LayerRange& stage) = 0;
  // Ends the return stream; OK in good order.
  virtual void CloseReturn(const absl::Status& status, const v1::LayerRange& stage);

  // Runs what can be run.
  void Pump();
  void CancelSteps(uint64_t through_step);
  // Half-closes downstream, collects receipts, frees the slot, then SendClosed.
  void BeginClose();

  void SendUpstream(const google::protobuf::Message& message);
  void SendDownstream(Payload payload);
  void DialNext();
  DialTarget TargetOf(const v1::Hop& hop) const;
  void SetPhaseDeadline(absl::Duration timeout, absl::string_view waiting_for,
                        const v1::LayerRange& stage);
  void ClearPhaseDeadline();
  // Ends the session with this unless something better explained comes first.
  void EndUnlessExplained(const absl::Status& status, const v1::LayerRange& stage);
  // What remains of the session's deadline, 0 = none.
  uint32_t RemainingDeadlineMs() const;
  v1::StageReceipt Receipt() const;
  const v1::Hop& NextHop() const { return open_.route().hops(static_cast<int>(hop_index_) + 1); }
  const v1::Hop& LastHop() const { return open_.route().hops(open_.route().hops_size() - 1); }
  bool is_last() const { return static_cast<int>(hop_index_) + 1 == open_.route().hops_size(); }

  const std::shared_ptr<Core> core_;
  const v1::OpenSession open_;
  const uint32_t hop_index_;
  const std::string route_token_;
  const SessionKey key_;
  const uint64_t ordinal_;
  const v1::LayerRange range_;

  State state_ = State::kOpening;
  std::shared_ptr<Stream> upstream_;
  std::shared_ptr<Stream> downstream_;
  std::shared_ptr<Stream> return_;

  // Negotiated with everything behind this stage. Fixed once the route is open.
  Limits limits_;
  // The seam to the next stage.
  Limits downstream_limits_;
  uint32_t context_tokens_ = 0;

  std::deque<std::unique_ptr<QueuedStep>> queue_;
  bool running_ = false;
  // Results of steps up to here are of no interest.
  uint64_t cancelled_through_ = 0;
  // All receipts are in: nothing that happens behind this stage matters any more.
  bool finishing_ = false;
  // No step follows; close when the queue is empty.
  bool draining_input_ = false;

  // Recorded result of the last step, for repeats.
  uint64_t recorded_step_ = 0;
  std::vector<Payload> recorded_frames_;

 private:
  void OnEngineOpened(const absl::Status& status, const std::vector<SessionKey>& evicted);
  // Without core->mu: turns an engine output into messages for the next stage.
  absl::Status EncodeOutput(const WireStep& wire, StepOutput* output,
                            std::vector<Payload>* messages) const;
  void OnStepDone(const WireStep& wire, absl::Time arrived, StepOutput output,
                  std::vector<Payload> messages);
  void FlushCancel();
  void Finish(std::vector<v1::StageReceipt> later);
  void Detach(const absl::Status& status);

  bool engine_open_ = false;
  bool downstream_connected_ = false;
  bool downstream_opened_ = false;
  uint32_t credits_ = 0;
  std::optional<uint64_t> unsent_cancel_;

  absl::Time opened_at_;
  absl::Time dialed_at_;
  absl::Time session_deadline_ = absl::InfiniteFuture();
  absl::Time phase_deadline_ = absl::InfiniteFuture();
  std::string phase_waiting_for_;
  v1::LayerRange phase_stage_;
  absl::Time unexplained_until_ = absl::InfiniteFuture();
  absl::Status unexplained_;
  v1::LayerRange unexplained_stage_;

  uint64_t prefill_tokens_ = 0;
  uint64_t decode_tokens_ = 0;
  absl::Duration engine_time_;

 protected:
  uint64_t bytes_received_ = 0;
  uint64_t bytes_sent_ = 0;
};

// Serializes into shared bytes.
Payload ToPayload(const google::protobuf::Message& message);

// Hex of the first bytes of a session id, for logs.
std::string LogId(const SessionKey& key);

}  // namespace meshnet::worker

#endif  // MESHNET_CC_WORKER_SESSION_H_
