// A stage behind the head: takes boundaries from the stage before it; a middle stage sends its own
// on, the tail answers the head on the return stream.
#ifndef MESHNET_CC_WORKER_STAGE_SESSION_H_
#define MESHNET_CC_WORKER_STAGE_SESSION_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cc/protocol/frame_codec.h"
#include "cc/worker/session.h"

namespace meshnet::worker {

// What tells a step's content from another's: equal for equal content.
std::string StepDigest(const WireStep& step);

class StageSession : public Session {
 public:
  StageSession(std::shared_ptr<Core> core, const v1::SeamOpen& open, const PeerInfo& peer,
               std::shared_ptr<Stream> upstream);

  // Not guarded by Core::mu: for the seam's own serial calls, null before the route is open.
  std::shared_ptr<FrameAssembler> assembler() const { return assembler_; }
  uint64_t max_frame_bytes() const { return limits_.max_frame_bytes; }

  void OnStep(WireStep step, std::string digest);
  void OnCancelSteps(uint64_t through_step);
  void CountReceived(uint64_t bytes);
  void OnUpstreamHalfClosed() override;
  void OnUpstreamClosed() override;

  void AttachReturn(std::shared_ptr<Stream> stream);
  void OnReturnWritable();
  void OnReturnClosed();

 protected:
  void OnRouteOpen() override;
  bool OutputWritable() const override;
  void OnTakenOff() override;
  void OnTailOutput(const WireStep& wire, StepOutput output) override;
  void Replay(const QueuedStep& step) override;
  void SendClosed(const std::vector<v1::StageReceipt>& receipts) override;
  Payload ErrorMessage(const absl::Status& status, const v1::LayerRange& stage) override;
  void CloseReturn(const absl::Status& status, const v1::LayerRange& stage) override;

 private:
  void SendReturn(Payload payload);
  void SendSeam(const v1::SeamMessage& message);
  void FlushCredits(bool all);
  v1::LayerRange PreviousRange() const;

  std::shared_ptr<FrameAssembler> assembler_;
  // The last step that was taken in, and its content.
  uint64_t last_step_ = 0;
  std::string last_digest_;
  // What upstream may still send, and what it does not know yet that it may.
  uint32_t window_ = 0;
  uint32_t unsent_credits_ = 0;
  Payload recorded_result_;
};

}  // namespace meshnet::worker

#endif  // MESHNET_CC_WORKER_STAGE_SESSION_H_
