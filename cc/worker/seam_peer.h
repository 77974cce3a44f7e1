// A test's hand on a seam: plays the stage before the worker under test, as well or as badly as the
// test wants.
#ifndef MESHNET_CC_WORKER_SEAM_PEER_H_
#define MESHNET_CC_WORKER_SEAM_PEER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "cc/protocol/frame_codec.h"
#include "cc/worker/test_cluster.h"
#include "proto/meshnet/shard/v1/shard.pb.h"

namespace meshnet::worker {

class SeamPeer {
 public:
  // Opens the seam to hop `hop` of `open`'s route.
  SeamPeer(TestCluster* cluster, const v1::OpenSession& open, uint32_t hop = 1);

  bool Opened();
  // Attaches the return stream at the route's last stage.
  bool Attach();

  // A valid step whose residual depends on `step` and the rows' positions only.
  WireStep MakeStep(uint64_t step, uint32_t start, const std::vector<int32_t>& tokens,
                    bool sample = true) const;
  std::vector<v1::SeamMessage> Encode(const WireStep& step, const Limits& limits = {}) const;
  void Send(const WireStep& step, const Limits& limits = {}) const;

  std::vector<v1::StepResult> Results() const;
  // Waits for `count` results in all.
  bool WaitResults(size_t count) const;
  uint32_t Credits() const;
  // Waits until the seam has ended; its reason, which message and status agree on.
  v1::Reason WaitRefusal() const;

  TestStream seam;
  TestStream back;
  v1::OpenSession open;

 private:
  TestCluster* const cluster_;
  BoundarySchema schema_;
  uint32_t begin_ = 0;
};

}  // namespace meshnet::worker

#endif  // MESHNET_CC_WORKER_SEAM_PEER_H_
