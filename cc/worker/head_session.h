// The head (or the whole model): talks to the client and runs the decode loop.
//
// Prefill is cut into chunks of the recipe's size; up to the seam's credits of them are under way
// at once. Every sampled token comes back over the return stream and goes into the next step at
// once.
#ifndef MESHNET_CC_WORKER_HEAD_SESSION_H_
#define MESHNET_CC_WORKER_HEAD_SESSION_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "cc/worker/session.h"

namespace meshnet::worker {

class HeadSession : public Session {
 public:
  HeadSession(std::shared_ptr<Core> core, const v1::OpenSession& open, const PeerInfo& peer,
              std::shared_ptr<Stream> upstream);

  // `grammar` says what is wrong with the grammar of a `generate`, if anything is.
  void OnRequest(const v1::SessionRequest& request, const absl::Status& grammar);
  void OnUpstreamHalfClosed() override;
  void OnUpstreamClosed() override;

  void OnReturnConnected();
  void OnReturnEvent(const v1::ReturnEvent& event, uint64_t bytes);
  void OnReturnClosed(const absl::Status& status);

  void ReleaseByKey() override;
  void OnDrain(bool expired) override;

 protected:
  void OnRouteOpen() override;
  void Refill() override;
  bool ExpectsWork() const override { return generation_.has_value(); }
  bool OutputWritable() const override;
  void OnSentOn(const WireStep& wire) override;
  void OnTailOutput(const WireStep& wire, StepOutput output) override;
  void SendClosed(const std::vector<v1::StageReceipt>& receipts) override;
  Payload ErrorMessage(const absl::Status& status, const v1::LayerRange& stage) override;

 private:
  struct Generation {
    uint64_t number = 0;
    std::vector<int32_t> prompt;
    uint32_t start_position = 0;
    // Prompt tokens that are in steps already.
    size_t taken = 0;
    SamplingParams sampling;
    uint32_t max_tokens = 0;
    std::set<int32_t> stop;
    bool ignore_end_of_generation = false;
    bool return_logits = false;
    // Sampled, to be decoded next.
    std::optional<int32_t> next_token;
    uint32_t produced = 0;
    absl::Time started;
    absl::Time first_token;

    uint32_t prompt_end() const { return start_position + static_cast<uint32_t>(prompt.size()); }
  };
  // A step whose result has not come back.
  struct Outstanding {
    uint64_t step = 0;
    uint32_t start_position = 0;
    uint32_t end_position = 0;
    bool prefill = false;
    bool sampled = false;
  };

  void Opened();
  // CACHE_MISS when some stage's state cannot go back to `position`.
  absl::Status CheckRollback(uint32_t position) const;
  // Why `request` cannot start, or OK.
  absl::Status CheckGenerate(const v1::Generate& request, SamplingParams* sampling) const;
  void OnGenerate(const v1::Generate& request, const absl::Status& grammar);
  void RefuseGeneration(uint64_t number, const absl::Status& status);
  // `logits` is little-endian f32, empty unless asked for.
  void OnResult(uint64_t step, uint32_t cached_tokens, const std::optional<SampledToken>& token,
                std::string logits);
  void OnToken(const SampledToken& token, std::string logits);
  void FinishGeneration(v1::FinishReason reason);
  void StopGeneration();

  uint64_t last_step_ = 0;
  // The newest decode step that left for the next stage, and when.
  std::pair<uint64_t, absl::Time> decode_sent_;
  uint64_t last_generation_ = 0;
  // Tokens that every stage holds for certain.
  uint32_t cached_ = 0;
  // The furthest that any stage wrote since all of them last began at 0. This stage is the one that
  // gets furthest.
  uint32_t written_ = 0;
  std::optional<Generation> generation_;
  std::deque<Outstanding> outstanding_;
  bool drain_after_generation_ = false;
};

}  // namespace meshnet::worker

#endif  // MESHNET_CC_WORKER_HEAD_SESSION_H_
