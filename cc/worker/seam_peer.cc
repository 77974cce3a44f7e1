#include "cc/worker/seam_peer.h"

#include "cc/common/status.h"

namespace meshnet::worker {

SeamPeer::SeamPeer(TestCluster* cluster, const v1::OpenSession& session, uint32_t hop)
    : open(session), cluster_(cluster) {
  const v1::Hop& target = open.route().hops(static_cast<int>(hop));
  v1::GetCapabilityRequest request;
  request.add_schema_versions(kSchemaVersion);
  const v1::Capability capability = *cluster->worker(target.endpoint()).GetCapability(request);
  const v1::BoundarySchema& boundary = capability.boundary_in();
  schema_ = {boundary.name(), boundary.version(), {}};
  for (const v1::TensorSpec& tensor : boundary.tensors()) {
    schema_.tensors.push_back({tensor.name(),
                               tensor.dtype() == v1::DTYPE_F32 ? DType::kF32 : DType::kI32,
                               {tensor.shape().begin(), tensor.shape().end()}});
  }
  begin_ = target.range().begin();
  seam = cluster->Dial(Method::kSeam, target.endpoint());
  v1::SeamMessage message;
  *message.mutable_open()->mutable_session() = open;
  message.mutable_open()->set_hop_index(hop);
  seam.Send(message);
}

bool SeamPeer::Opened() {
  cluster_->WaitUntil([&] { return !seam.handler->messages().empty() || seam.closed(); });
  const auto received = seam.Received<v1::SeamMessage>();
  return !received.empty() && received[0].has_opened();
}

bool SeamPeer::Attach() {
  const auto& route = open.route();
  back = cluster_->Dial(Method::kReturn, route.hops(route.hops_size() - 1).endpoint());
  v1::ReturnRequest request;
  request.mutable_attach()->set_schema_version(kSchemaVersion);
  request.mutable_attach()->set_route_session_id(route.route_session_id());
  request.mutable_attach()->set_route_epoch(route.route_epoch());
  back.Send(request);
  cluster_->WaitUntil([&] { return !back.handler->messages().empty() || back.closed(); });
  const auto received = back.Received<v1::ReturnEvent>();
  return !received.empty() && received[0].has_attached();
}

WireStep SeamPeer::MakeStep(uint64_t step, uint32_t start, const std::vector<int32_t>& tokens,
                            bool sample) const {
  WireStep wire;
  wire.work_id = open.work_id();
  wire.session = {open.route().route_session_id(), open.route().route_epoch()};
  wire.step = step;
  wire.phase = tokens.size() == 1 ? Phase::kDecode : Phase::kPrefill;
  wire.applied = {0, begin_};
  wire.start_position = start;
  wire.token_ids = tokens;
  const uint64_t width = schema_.residual_width();
  for (size_t i = 0; i < tokens.size() * width; ++i) {
    wire.residual.push_back(static_cast<float>((step * 31 + start + i) % 97) / 97.0f);
  }
  wire.output_rows = sample ? OutputRows::kLast : OutputRows::kNone;
  return wire;
}

std::vector<v1::SeamMessage> SeamPeer::Encode(const WireStep& step, const Limits& limits) const {
  std::vector<v1::Frame> frames;
  EncodeStep(step, schema_, limits, &frames).IgnoreError();
  std::vector<v1::SeamMessage> messages;
  for (const v1::Frame& frame : frames) *messages.emplace_back().mutable_frame() = frame;
  return messages;
}

void SeamPeer::Send(const WireStep& step, const Limits& limits) const {
  for (const v1::SeamMessage& message : Encode(step, limits)) seam.Send(message);
}

std::vector<v1::StepResult> SeamPeer::Results() const {
  std::vector<v1::StepResult> results;
  for (const v1::ReturnEvent& event : back.Received<v1::ReturnEvent>()) {
    if (event.has_result()) results.push_back(event.result());
  }
  return results;
}

bool SeamPeer::WaitResults(size_t count) const {
  return cluster_->WaitUntil([&] { return Results().size() >= count; });
}

uint32_t SeamPeer::Credits() const {
  uint32_t credits = 0;
  for (const v1::SeamMessage& message : seam.Received<v1::SeamMessage>()) {
    credits += message.credit().steps();
  }
  return credits;
}

v1::Reason SeamPeer::WaitRefusal() const {
  if (!cluster_->WaitUntil([&] { return seam.closed(); })) return v1::REASON_UNSPECIFIED;
  const auto received = seam.Received<v1::SeamMessage>();
  if (received.empty() || !received.back().has_error()) return v1::REASON_UNSPECIFIED;
  if (received.back().error().reason() != seam.closed_reason()) return v1::REASON_UNSPECIFIED;
  return received.back().error().reason();
}

}  // namespace meshnet::worker
