// Calls with one request and one answer, over a stream of bytes.
//
//   return HandleUnary<v1::GetHealthRequest>(stream, peer, [](auto request, auto call) {
//     call->Answer(response);    // on any thread, once
//   });
#ifndef MESHNET_CC_WORKER_UNARY_CALL_H_
#define MESHNET_CC_WORKER_UNARY_CALL_H_

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "cc/common/status.h"
#include "cc/worker/transport.h"
#include "google/protobuf/message.h"

namespace meshnet::worker {

class UnaryCall {
 public:
  UnaryCall(std::shared_ptr<Stream> stream, PeerInfo peer)
      : stream_(std::move(stream)), peer_(std::move(peer)) {}

  const PeerInfo& peer() const { return peer_; }
  // Nobody waits for the answer any more.
  bool is_abandoned() const { return abandoned_; }
  void Abandon() { abandoned_ = true; }

  void Answer(const google::protobuf::Message& response) {
    stream_->Send(std::make_shared<const std::string>(response.SerializeAsString()));
    stream_->Close(absl::OkStatus());
  }
  void Refuse(const absl::Status& status) { stream_->Close(status); }

 private:
  const std::shared_ptr<Stream> stream_;
  const PeerInfo peer_;
  std::atomic<bool> abandoned_{false};
};

template <typename Request>
using UnaryMethod =
    std::function<void(std::shared_ptr<const Request> request, std::shared_ptr<UnaryCall> call)>;

template <typename Request>
class UnaryHandler final : public StreamHandler {
 public:
  UnaryHandler(std::shared_ptr<UnaryCall> call, UnaryMethod<Request> method)
      : call_(std::move(call)), method_(std::move(method)) {}

  void OnMessage(absl::string_view bytes) override {
    if (asked_) {
      return call_->Refuse(MakeError(v1::REASON_LIFECYCLE_VIOLATION,
                                     "expected one request in a call, got another one"));
    }
    asked_ = true;
    auto request = std::make_shared<Request>();
    if (!request->ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
      return call_->Refuse(
          MakeError(v1::REASON_MALFORMED_MESSAGE,
                    absl::StrCat("expected a serialised ", request->GetDescriptor()->full_name(),
                                 ", got ", bytes.size(), " bytes that cannot be parsed")));
    }
    method_(std::move(request), call_);
  }

  void OnHalfClose() override {
    if (asked_) return;
    call_->Refuse(
        MakeError(v1::REASON_LIFECYCLE_VIOLATION, "expected one request in a call, got its end"));
  }

  void OnClosed(const absl::Status&) override { call_->Abandon(); }

 private:
  const std::shared_ptr<UnaryCall> call_;
  const UnaryMethod<Request> method_;
  bool asked_ = false;
};

template <typename Request>
std::shared_ptr<StreamHandler> HandleUnary(std::shared_ptr<Stream> stream, const PeerInfo& peer,
                                           UnaryMethod<Request> method) {
  return std::make_shared<UnaryHandler<Request>>(
      std::make_shared<UnaryCall>(std::move(stream), peer), std::move(method));
}

}  // namespace meshnet::worker

#endif  // MESHNET_CC_WORKER_UNARY_CALL_H_
