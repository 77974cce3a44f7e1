#include "cc/worker/shard_server.h"

#include <algorithm>
#include <map>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cc/common/status.h"
#include "cc/worker/endpoint.h"
#include "cc/worker/tls_files.h"
#include "cc/worker/tokenizer_service.h"
#include "grpc/grpc.h"
#include "grpcpp/health_check_service_interface.h"
#include "grpcpp/security/server_credentials.h"
#include "grpcpp/server.h"
#include "grpcpp/server_builder.h"
#include "proto/meshnet/shard/v1/shard.grpc.pb.h"

namespace meshnet::worker {
namespace {

using StreamReactor = grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>;
using Service = v1::ShardService;

constexpr char kShardServiceName[] = "meshnet.shard.v1.ShardService";
constexpr char kTokenizerServiceName[] = "meshnet.shard.v1.TokenizerService";
constexpr int kMaxStreamsPerConnection = 1024;
// A message somewhat above the limit is still read and refused by name.
constexpr uint64_t kRefusalMargin = 1 << 20;

// Streams as raw bytes, calls as messages.
using ServiceBase = Service::WithRawCallbackMethod_Session<
    Service::WithRawCallbackMethod_Seam<Service::WithRawCallbackMethod_Return<
        Service::WithCallbackMethod_GetCapability<Service::WithCallbackMethod_GetHealth<
            Service::WithCallbackMethod_GetMetrics<Service::WithCallbackMethod_CancelSession<
                Service::WithCallbackMethod_ReleaseSession<Service::Service>>>>>>>>;

class ShardServiceImpl final : public ServiceBase {
 public:
  ShardServiceImpl(Worker* worker, GrpcTransportOptions options)
      : worker_(worker), options_(std::move(options)) {}

  StreamReactor* Session(grpc::CallbackServerContext* context) override {
    return AcceptGrpcStream(Method::kSession, context, worker_, options_);
  }
  StreamReactor* Seam(grpc::CallbackServerContext* context) override {
    return AcceptGrpcStream(Method::kSeam, context, worker_, options_);
  }
  StreamReactor* Return(grpc::CallbackServerContext* context) override {
    return AcceptGrpcStream(Method::kReturn, context, worker_, options_);
  }

  grpc::ServerUnaryReactor* GetCapability(grpc::CallbackServerContext* context,
                                          const v1::GetCapabilityRequest* request,
                                          v1::Capability* response) override {
    return Answer(context, worker_->GetCapability(*request), response);
  }
  grpc::ServerUnaryReactor* GetHealth(grpc::CallbackServerContext* context,
                                      const v1::GetHealthRequest*, v1::Health* response) override {
    return Answer<v1::Health>(context, worker_->GetHealth(), response);
  }
  grpc::ServerUnaryReactor* GetMetrics(grpc::CallbackServerContext* context,
                                       const v1::GetMetricsRequest*,
                                       v1::Metrics* response) override {
    return Answer<v1::Metrics>(context, worker_->GetMetrics(), response);
  }
  grpc::ServerUnaryReactor* CancelSession(grpc::CallbackServerContext* context,
                                          const v1::CancelSessionRequest* request,
                                          v1::CancelSessionResponse* response) override {
    return Answer(context, worker_->CancelSession(*request, PeerOf(*context)), response);
  }
  grpc::ServerUnaryReactor* ReleaseSession(grpc::CallbackServerContext* context,
                                           const v1::ReleaseSessionRequest* request,
                                           v1::ReleaseSessionResponse* response) override {
    return Answer(context, worker_->ReleaseSession(*request, PeerOf(*context)), response);
  }

 private:
  template <typename Response>
  static grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* context,
                                          absl::StatusOr<Response> result, Response* response) {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    if (result.ok()) *response = *std::move(result);
    reactor->Finish(ToGrpcStatus(result.status()));
    return reactor;
  }

  Worker* const worker_;
  const GrpcTransportOptions options_;
};

class ShardServerImpl final : public ShardServer {
 public:
  ShardServerImpl(Worker* worker, const ShardServerOptions& options)
      : worker_(worker),
        shard_service_(worker, options.transport),
        tokenizer_service_(MakeTokenizerService(worker)) {}

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
    grpc::EnableDefaultHealthCheckService(true);
    grpc::ServerBuilder builder;
    ApplyTransport(options, &builder);
    credentials_ = tls != nullptr ? tls->ServerCredentials() : grpc::InsecureServerCredentials();
    builder.AddListeningPort(endpoint->ToString(), credentials_, &port_);
    builder.RegisterService(&shard_service_);
    builder.RegisterService(tokenizer_service_.get());
    server_ = builder.BuildAndStart();
    if (server_ == nullptr || port_ == 0) {
      return MakeError(v1::REASON_CONFIGURATION_INVALID,
                       absl::StrCat("cannot listen on ", options.listen,
                                    "; is the address in use or not of this machine?"));
    }
    endpoint_ = *endpoint;
    endpoint_.port = static_cast<uint16_t>(port_);
    worker_->SetStateListener([this](v1::WorkerState state) {
      const bool serving = state == v1::WORKER_STATE_READY;
      grpc::HealthCheckServiceInterface* health = server_->GetHealthCheckService();
      health->SetServingStatus(serving);
      health->SetServingStatus(kShardServiceName, serving);
      health->SetServingStatus(kTokenizerServiceName, serving);
    });
    return absl::OkStatus();
  }

  int port() const override { return port_; }
  std::string address() const override { return endpoint_.ToString(); }

  void Shutdown(absl::Duration grace) override {
    if (server_ == nullptr) return;
    worker_->SetStateListener(nullptr);
    server_->Shutdown(absl::ToChronoTime(absl::Now() + grace));
    server_->Wait();
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

  Worker* const worker_;
  ShardServiceImpl shard_service_;
  const std::unique_ptr<v1::TokenizerService::CallbackService> tokenizer_service_;
  int port_ = 0;
  Endpoint endpoint_;
  // Asked at every handshake, for as long as there is a server.
  std::shared_ptr<grpc::ServerCredentials> credentials_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<ShardServer>> ShardServer::Start(const ShardServerOptions& options,
                                                                Worker* worker) {
  auto server = std::make_unique<ShardServerImpl>(worker, options);
  if (absl::Status status = server->Begin(options); !status.ok()) return status;
  return std::unique_ptr<ShardServer>(std::move(server));
}

}  // namespace meshnet::worker
