#include "cc/worker/shard_server.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/mutex.h"
#include "cc/common/status.h"
#include "cc/worker/endpoint.h"
#include "cc/worker/tls_files.h"
#include "cc/worker/tokenizer_service.h"
#include "cc/worker/unary_call.h"
#include "google/protobuf/wrappers.pb.h"
#include "grpc/grpc.h"
#include "grpcpp/security/server_credentials.h"
#include "grpcpp/server.h"
#include "grpcpp/server_builder.h"
#include "proto/meshnet/shard/v1/shard.pb.h"

namespace meshnet::worker {
namespace {

constexpr char kShardServiceName[] = "meshnet.shard.v1.ShardService";
constexpr char kTokenizerServiceName[] = "meshnet.shard.v1.TokenizerService";
constexpr char kHealthServiceName[] = "grpc.health.v1.Health";
constexpr int kMaxStreamsPerConnection = 1024;
// A message somewhat above the limit is still read and refused by name.
constexpr uint64_t kRefusalMargin = 1 << 20;

// grpc.health.v1: all services of a worker have one state. Its messages are a string and a number
// in field 1, which protobuf's wrappers are, too.
class HealthService {
 public:
  using Request = google::protobuf::StringValue;

  void SetServing(bool serving) {
    absl::MutexLock lock(&mu_);
    serving_ = serving;
    for (const auto& watcher : watchers_) {
      if (const auto stream = watcher.lock())
        stream->Send(Answer(serving ? kServing : kNotServing));
    }
  }

  std::shared_ptr<StreamHandler> Accept(const std::string& method, std::shared_ptr<Stream> stream,
                                        const PeerInfo& peer) {
    if (method == "Check") {
      return HandleUnary<Request>(std::move(stream), peer, [this](auto request, auto call) {
        if (!Knows(request->value())) {
          return call->Refuse(absl::NotFoundError("service name unknown"));
        }
        call->Answer(State());
      });
    }
    if (method == "Watch") {
      // The answers go on until the caller ends the call.
      const std::shared_ptr<Stream> answers = stream;
      return HandleUnary<Request>(std::move(stream), peer, [this, answers](auto request, auto) {
        Watch(*request, answers);
      });
    }
    return nullptr;
  }

 private:
  enum : int32_t { kServing = 1, kNotServing = 2, kServiceUnknown = 3 };

  static bool Knows(const std::string& service) {
    return service.empty() || service == kShardServiceName || service == kTokenizerServiceName;
  }

  static Payload Answer(int32_t state) {
    google::protobuf::Int32Value value;
    value.set_value(state);
    return std::make_shared<const std::string>(value.SerializeAsString());
  }

  google::protobuf::Int32Value State() const {
    absl::MutexLock lock(&mu_);
    google::protobuf::Int32Value value;
    value.set_value(serving_ ? kServing : kNotServing);
    return value;
  }

  void Watch(const Request& request, const std::shared_ptr<Stream>& stream) {
    absl::MutexLock lock(&mu_);
    if (!Knows(request.value())) return stream->Send(Answer(kServiceUnknown));
    watchers_.erase(std::remove_if(watchers_.begin(), watchers_.end(),
                                   [](const auto& watcher) { return watcher.expired(); }),
                    watchers_.end());
    watchers_.push_back(stream);
    stream->Send(Answer(serving_ ? kServing : kNotServing));
  }

  mutable absl::Mutex mu_;
  bool serving_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::weak_ptr<Stream>> watchers_ ABSL_GUARDED_BY(mu_);
};

// Whatever a call says whose method is not there.
class NoMethod final : public StreamHandler {
 public:
  void OnMessage(absl::string_view) override {}
  void OnClosed(const absl::Status&) override {}
};

class ShardServerImpl final : public ShardServer {
 public:
  ShardServerImpl(GrpcEvents* events, Worker* worker, const ShardServerOptions& options)
      : events_(events),
        worker_(worker),
        tokenizer_(MakeTokenizerService(worker)),
        calls_(events, options.transport,
               [this](const std::string& path, std::shared_ptr<Stream> stream,
                      const PeerInfo& peer) { return Accept(path, std::move(stream), peer); }) {}

  ~ShardServerImpl() override { Shutdown(absl::ZeroDuration()); }

  absl::Status Begin(const ShardServerOptions& options) {
    const auto endpoint = ParseEndpoint(options.listen, /*allow_any_port=*/true);
    if (!endpoint.ok()) return endpoint.status();
    const std::shared_ptr<TlsFiles>& tls = options.transport.tls;
    if (tls == nullptr && !endpoint->is_loopback && !options.transport.allow_insecure) {
      return MakeError(v1::REASON_INSECURE_TRANSPORT,
                       absl::StrCat("expected TLS keys or a loopback address to listen on, got ",
                                    options.listen, "; or give the insecure flag"));
    }
    ApplyTransport(options, events_->builder());
    credentials_ = tls != nullptr ? tls->ServerCredentials() : grpc::InsecureServerCredentials();
    events_->builder()->AddListeningPort(endpoint->ToString(), credentials_, &port_);
    server_ = events_->builder()->BuildAndStart();
    if (server_ == nullptr || port_ == 0) {
      return MakeError(v1::REASON_CONFIGURATION_INVALID,
                       absl::StrCat("cannot listen on ", options.listen,
                                    "; is the address in use or not of this machine?"));
    }
    endpoint_ = *endpoint;
    endpoint_.port = static_cast<uint16_t>(port_);
    worker_->SetStateListener(
        [this](v1::WorkerState state) { health_.SetServing(state == v1::WORKER_STATE_READY); });
    calls_.Start();
    return absl::OkStatus();
  }

  int port() const override { return port_; }
  std::string address() const override { return endpoint_.ToString(); }

  void Shutdown(absl::Duration grace) override {
    if (server_ == nullptr) return;
    worker_->SetStateListener(nullptr);
    server_->Shutdown(absl::ToChronoTime(absl::Now() + grace));
    calls_.AwaitEnd();
    server_.reset();
  }

 private:
  static void ApplyTransport(const ShardServerOptions& options, grpc::ServerBuilder* builder) {
    const GrpcTransportOptions& transport = options.transport;
    for (const auto& [name, value] : TransportArguments(transport)) {
      builder->AddChannelArgument(name, value);
    }
    builder->AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxStreamsPerConnection);
    builder->AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
    builder->SetMaxReceiveMessageSize(static_cast<int>(
        std::max<uint64_t>(transport.max_message_bytes, kMaxTextBytes) + kRefusalMargin));
    builder->SetMaxSendMessageSize(-1);
  }

  std::shared_ptr<StreamHandler> Accept(const std::string& path, std::shared_ptr<Stream> stream,
                                        const PeerInfo& peer) {
    const std::vector<absl::string_view> parts = absl::StrSplit(path, absl::MaxSplits('/', 2));
    std::shared_ptr<StreamHandler> handler;
    if (parts.size() == 3 && parts[0].empty()) {
      const std::string method(parts[2]);
      if (parts[1] == kShardServiceName) handler = AcceptShard(method, stream, peer);
      if (parts[1] == kTokenizerServiceName) handler = tokenizer_->Accept(method, stream, peer);
      if (parts[1] == kHealthServiceName) handler = health_.Accept(method, stream, peer);
    }
    if (handler != nullptr) return handler;
    stream->Close(absl::UnimplementedError("this worker has no such method"));
    return std::make_shared<NoMethod>();
  }

  std::shared_ptr<StreamHandler> AcceptShard(const std::string& name,
                                             std::shared_ptr<Stream> stream, const PeerInfo& peer) {
    for (const Method method : {Method::kSession, Method::kSeam, Method::kReturn}) {
      if (MethodName(method) == name) return worker_->Accept(method, std::move(stream), peer);
    }
    if (name == "GetCapability") {
      return HandleUnary<v1::GetCapabilityRequest>(
          std::move(stream), peer, [this](auto request, auto call) {
            Answer(worker_->GetCapability(*request), call.get());
          });
    }
    if (name == "GetHealth") {
      return HandleUnary<v1::GetHealthRequest>(
          std::move(stream), peer, [this](auto, auto call) { call->Answer(worker_->GetHealth()); });
    }
    if (name == "GetMetrics") {
      return HandleUnary<v1::GetMetricsRequest>(std::move(stream), peer, [this](auto, auto call) {
        call->Answer(worker_->GetMetrics());
      });
    }
    if (name == "CancelSession") {
      return HandleUnary<v1::CancelSessionRequest>(
          std::move(stream), peer, [this](auto request, auto call) {
            Answer(worker_->CancelSession(*request, call->peer()), call.get());
          });
    }
    if (name == "ReleaseSession") {
      return HandleUnary<v1::ReleaseSessionRequest>(
          std::move(stream), peer, [this](auto request, auto call) {
            Answer(worker_->ReleaseSession(*request, call->peer()), call.get());
          });
    }
    return nullptr;
  }

  template <typename Response>
  static void Answer(const absl::StatusOr<Response>& result, UnaryCall* call) {
    result.ok() ? call->Answer(*result) : call->Refuse(result.status());
  }

  GrpcEvents* const events_;
  Worker* const worker_;
  HealthService health_;
  const std::unique_ptr<TokenizerService> tokenizer_;
  GrpcService calls_;
  int port_ = 0;
  Endpoint endpoint_;
  // Asked at every handshake, for as long as there is a server.
  std::shared_ptr<grpc::ServerCredentials> credentials_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<ShardServer>> ShardServer::Start(const ShardServerOptions& options,
                                                                GrpcEvents* events,
                                                                Worker* worker) {
  auto server = std::make_unique<ShardServerImpl>(events, worker, options);
  if (absl::Status status = server->Begin(options); !status.ok()) return status;
  return std::unique_ptr<ShardServer>(std::move(server));
}

}  // namespace meshnet::worker
