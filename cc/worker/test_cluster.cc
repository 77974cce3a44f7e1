#include "cc/worker/test_cluster.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cc/common/status.h"
#include "cc/worker/grpc_events.h"
#include "cc/worker/grpc_transport.h"
#include "cc/worker/shard_server.h"

namespace meshnet::worker {
namespace {

// Far beyond what anything here takes: only a hang gets there.
constexpr absl::Duration kHang = absl::Seconds(60);
// A busy machine under a sanitizer is slow, not dead.
constexpr absl::Duration kSlow = absl::Seconds(20);

FakeEngineOptions EngineOptions(const WorkerSpec& spec) {
  FakeEngineOptions options = spec.engine;
  options.range = spec.range;
  return options;
}

class MemoryCluster : public TestCluster {
 public:
  explicit MemoryCluster(const FakeNetwork::Options& options)
      : network_(options), random_(options.seed.value_or(0)), shuffle_(options.seed.has_value()) {}

  ~MemoryCluster() override {
    for (auto& [endpoint, node] : nodes_) node.worker->Stop();
    WaitUntil([] { return false; });
  }

  FakeNetwork* network() { return &network_; }

  std::string Add(const WorkerSpec& spec) override {
    const std::string endpoint = absl::StrCat("worker", nodes_.size(), ":1");
    nodes_[endpoint].spec = spec;
    Start(endpoint);
    return endpoint;
  }

  void Restart(const std::string& endpoint) override { Start(endpoint); }

  void Kill(const std::string& endpoint) override {
    network_.Break(endpoint);
    Node& node = nodes_[endpoint];
    // The dead process says nothing more: what its streams would send goes nowhere.
    node.dialer->Cut();
    graveyard_.push_back(std::move(node.worker));
    graveyard_.back()->Stop();
    graveyard_dialers_.push_back(std::move(node.dialer));
  }

  Worker& worker(const std::string& endpoint) override { return *nodes_[endpoint].worker; }
  Dialer* dialer() override { return network_.dialer(); }

  void PauseEngine(const std::string& endpoint, bool paused) override {
    nodes_[endpoint].paused = paused;
  }

  bool WaitUntil(const std::function<bool()>& condition) override {
    while (!condition()) {
      if (!Advance()) return condition();
    }
    return true;
  }

  void PassTime(absl::Duration duration) override {
    now_ += duration;
    for (auto& [endpoint, node] : nodes_) {
      if (node.worker != nullptr) node.worker->Tick();
    }
  }

 private:
  // Streams that a worker has dialed break when it dies.
  class CuttableDialer : public Dialer {
   public:
    explicit CuttableDialer(Dialer* dialer) : dialer_(dialer) {}

    absl::Status Dial(Method method, const DialTarget& target,
                      std::shared_ptr<StreamHandler> handler,
                      std::shared_ptr<Stream>* stream) override {
      const absl::Status status = dialer_->Dial(method, target, std::move(handler), stream);
      streams_.erase(std::remove_if(streams_.begin(), streams_.end(),
                                    [](const auto& dialed) { return dialed.expired(); }),
                     streams_.end());
      if (status.ok()) streams_.push_back(*stream);
      return status;
    }

    void Cut() {
      for (const auto& dialed : streams_) {
        if (const auto stream = dialed.lock()) stream->Close(absl::OkStatus());
      }
    }

   private:
    Dialer* const dialer_;
    std::vector<std::weak_ptr<Stream>> streams_;
  };

  struct Node {
    WorkerSpec spec;
    std::unique_ptr<CuttableDialer> dialer;
    std::unique_ptr<Worker> worker;
    bool paused = false;
  };

  void Start(const std::string& endpoint) {
    Node& node = nodes_[endpoint];
    node.paused = false;
    WorkerOptions options = node.spec.worker;
    options.now = [this] { return now_; };
    FakeEngineOptions engine = EngineOptions(node.spec);
    engine.now = options.now;
    node.dialer = std::make_unique<CuttableDialer>(network_.dialer());
    Authorizer* authorizer = node.spec.authorizer != nullptr ? node.spec.authorizer : &allow_all_;
    node.worker = std::make_unique<Worker>(options, node.dialer.get(), authorizer, &logger_);
    node.worker
        ->AttachEngine(node.spec.make_engine != nullptr ? node.spec.make_engine()
                                                        : *MakeFakeEngine(engine))
        .IgnoreError();
    network_.Listen(endpoint, node.worker.get());
  }

  bool Advance() {
    std::vector<Worker*> workers;
    for (auto& [endpoint, node] : nodes_) {
      if (node.worker != nullptr && !node.paused) workers.push_back(node.worker.get());
    }
    if (shuffle_) {
      std::shuffle(workers.begin(), workers.end(), random_);
      // An engine may be faster than a message.
      if (!workers.empty() && random_() % 2 == 0 && workers[0]->RunEngineOnce()) return true;
    }
    if (network_.DeliverOne()) return true;
    for (Worker* worker : workers) {
      if (worker->RunEngineOnce()) return true;
    }
    return false;
  }

  FakeNetwork network_;
  std::mt19937 random_;
  const bool shuffle_;
  absl::Time now_ = absl::FromUnixSeconds(1'000'000);
  std::map<std::string, Node> nodes_;
  std::vector<std::unique_ptr<CuttableDialer>> graveyard_dialers_;
  std::vector<std::unique_ptr<Worker>> graveyard_;
};

class GrpcCluster : public TestCluster {
 public:
  GrpcCluster() : client_dialer_(MakeGrpcDialer(&client_events_, Transport())) {}

  ~GrpcCluster() override {
    for (auto& [endpoint, node] : nodes_) {
      if (node == nullptr) continue;
      node->Pause(false);
      node->worker->Stop();
      node->server->Shutdown(absl::ZeroDuration());
    }
  }

  std::string Add(const WorkerSpec& spec) override {
    auto node = StartNode(spec, "127.0.0.1:0");
    const std::string endpoint = node->server->address();
    nodes_[endpoint] = std::move(node);
    return endpoint;
  }

  void Restart(const std::string& endpoint) override {
    nodes_[endpoint] = StartNode(specs_.at(endpoint), endpoint);
  }

  void Kill(const std::string& endpoint) override {
    std::unique_ptr<Node> node = std::move(nodes_[endpoint]);
    specs_[endpoint] = node->spec;
    node->Pause(false);
    // As near to a death as one process allows: connections are cut before the worker can react.
    node->server->Shutdown(absl::ZeroDuration());
    node->worker->Stop();
  }

  Worker& worker(const std::string& endpoint) override { return *nodes_.at(endpoint)->worker; }
  Dialer* dialer() override { return client_dialer_.get(); }

  void PauseEngine(const std::string& endpoint, bool paused) override {
    nodes_.at(endpoint)->Pause(paused);
  }

  bool WaitUntil(const std::function<bool()>& condition) override {
    const absl::Time deadline = absl::Now() + kHang;
    while (!condition()) {
      if (absl::Now() > deadline) return false;
      absl::SleepFor(absl::Milliseconds(1));
    }
    return true;
  }

  void PassTime(absl::Duration) override {}

 private:
  struct Node {
    WorkerSpec spec;
    absl::Mutex mu;
    bool paused = false;
    GrpcEvents events;
    std::unique_ptr<Dialer> dialer;
    std::unique_ptr<Worker> worker;
    std::unique_ptr<ShardServer> server;

    void Pause(bool value) {
      absl::MutexLock lock(&mu);
      paused = value;
    }
    void Pass() {
      absl::MutexLock lock(&mu);
      mu.Await(absl::Condition(+[](bool* value) { return !*value; }, &paused));
    }
  };

  static GrpcTransportOptions Transport() {
    GrpcTransportOptions options;
    options.keepalive_time = kSlow;
    options.keepalive_timeout = kSlow;
    return options;
  }

  std::unique_ptr<Node> StartNode(const WorkerSpec& spec, const std::string& listen) {
    auto node = std::make_unique<Node>();
    node->spec = spec;
    FakeEngineOptions engine = EngineOptions(spec);
    engine.before_batch = [raw = node.get()] { raw->Pass(); };
    node->dialer = MakeGrpcDialer(&node->events, Transport());
    Authorizer* authorizer = spec.authorizer != nullptr ? spec.authorizer : &allow_all_;
    WorkerOptions worker = spec.worker;
    worker.dial_timeout = worker.close_timeout = kSlow;
    worker.explain_timeout = kSlow / 4;
    worker.events = &node->events;
    node->worker = std::make_unique<Worker>(worker, node->dialer.get(), authorizer, &logger_);
    ShardServerOptions options;
    options.listen = listen;
    options.transport = Transport();
    node->server = *ShardServer::Start(options, &node->events, node->worker.get());
    node->worker->AttachEngine(*MakeFakeEngine(engine)).IgnoreError();
    node->worker->Start();
    return node;
  }

  GrpcEvents client_events_;
  std::unique_ptr<Dialer> client_dialer_;
  std::map<std::string, WorkerSpec> specs_;
  std::map<std::string, std::unique_ptr<Node>> nodes_;
};

}  // namespace

void RecordingHandler::OnConnected() {}

void RecordingHandler::OnMessage(absl::string_view bytes) {
  absl::MutexLock lock(&mu_);
  messages_.emplace_back(bytes);
}

void RecordingHandler::OnClosed(const absl::Status& status) {
  absl::MutexLock lock(&mu_);
  closed_ = status;
}

std::vector<std::string> RecordingHandler::messages() const {
  absl::MutexLock lock(&mu_);
  return messages_;
}

std::optional<absl::Status> RecordingHandler::closed() const {
  absl::MutexLock lock(&mu_);
  return closed_;
}

void TestStream::Send(const google::protobuf::Message& message) const {
  SendBytes(message.SerializeAsString());
}

void TestStream::SendBytes(std::string bytes) const {
  stream->Send(std::make_shared<const std::string>(std::move(bytes)));
}

TestStream TestCluster::Dial(Method method, const std::string& endpoint) {
  TestStream stream;
  stream.handler = std::make_shared<RecordingHandler>();
  DialTarget target;
  target.endpoint = endpoint;
  dialer()->Dial(method, target, stream.handler, &stream.stream).IgnoreError();
  return stream;
}

uint32_t TestCluster::open_sessions(const std::string& endpoint) {
  return worker(endpoint).GetMetrics().open_sessions();
}

std::unique_ptr<TestCluster> MakeMemoryCluster(const FakeNetwork::Options& options,
                                               FakeNetwork** network) {
  auto cluster = std::make_unique<MemoryCluster>(options);
  if (network != nullptr) *network = cluster->network();
  return cluster;
}

std::unique_ptr<TestCluster> MakeGrpcCluster() { return std::make_unique<GrpcCluster>(); }

std::string SessionId(const std::string& tag) {
  std::string id = tag;
  id.resize(16, '.');
  return id;
}

v1::OpenSession MakeOpen(TestCluster& cluster, const std::vector<std::string>& endpoints,
                         const std::string& session_tag, uint64_t epoch) {
  v1::OpenSession open;
  open.set_schema_version(kSchemaVersion);
  open.set_work_id(absl::StrCat("work-", session_tag));
  v1::Route* route = open.mutable_route();
  route->set_route_session_id(SessionId(session_tag));
  route->set_route_epoch(epoch);
  v1::GetCapabilityRequest request;
  request.add_schema_versions(kSchemaVersion);
  for (const std::string& endpoint : endpoints) {
    const v1::Capability capability = *cluster.worker(endpoint).GetCapability(request);
    route->set_recipe_fingerprint(capability.recipe().fingerprint());
    route->set_artifact_sha256(capability.artifact_sha256());
    route->set_model_layers(capability.model_layers());
    v1::Hop* hop = route->add_hops();
    hop->set_endpoint(endpoint);
    *hop->mutable_range() = capability.range();
  }
  return open;
}

TestClient::TestClient(TestCluster* cluster, const std::vector<std::string>& endpoints,
                       const std::string& tag, uint64_t epoch)
    : TestClient(cluster, endpoints[0], MakeOpen(*cluster, endpoints, tag, epoch)) {}

TestClient::TestClient(TestCluster* cluster, const std::string& head, const v1::OpenSession& open)
    : cluster_(cluster), stream_(cluster->Dial(Method::kSession, head)) {
  v1::SessionRequest request;
  *request.mutable_open() = open;
  stream_.Send(request);
}

bool TestClient::Opened() {
  cluster_->WaitUntil([this] { return !events().empty() || stream_.closed(); });
  const auto all = events();
  return !all.empty() && all[0].has_opened();
}

void TestClient::Generate(uint64_t generation, const std::vector<int32_t>& prompt,
                          uint32_t max_tokens, uint32_t start_position) {
  v1::Generate request;
  request.set_generation(generation);
  request.set_start_position(start_position);
  request.mutable_token_ids()->Add(prompt.begin(), prompt.end());
  request.set_max_tokens(max_tokens);
  Generate(request);
}

void TestClient::Generate(const v1::Generate& request) {
  v1::SessionRequest message;
  *message.mutable_generate() = request;
  stream_.Send(message);
}

void TestClient::CancelGeneration(uint64_t generation) {
  v1::SessionRequest message;
  message.mutable_cancel()->set_generation(generation);
  stream_.Send(message);
}

std::vector<int32_t> TestClient::tokens(uint64_t generation) const {
  std::vector<int32_t> ids;
  for (const v1::SessionEvent& event : events()) {
    if (event.has_token() && event.token().generation() == generation) {
      ids.push_back(event.token().token().token_id());
    }
  }
  return ids;
}

std::optional<v1::GenerationFinished> TestClient::finished(uint64_t generation) const {
  for (const v1::SessionEvent& event : events()) {
    if (event.has_finished() && event.finished().generation() == generation) {
      return event.finished();
    }
  }
  return std::nullopt;
}

std::optional<v1::Error> TestClient::error(uint64_t generation) const {
  for (const v1::SessionEvent& event : events()) {
    if (event.has_error() && event.error().generation() == generation) return event.error().error();
  }
  return std::nullopt;
}

std::optional<v1::SessionClosed> TestClient::closed_event() const {
  for (const v1::SessionEvent& event : events()) {
    if (event.has_closed()) return event.closed();
  }
  return std::nullopt;
}

bool TestClient::WaitFinished(uint64_t generation) {
  return cluster_->WaitUntil([&] {
    return finished(generation).has_value() || stream_.closed();
  }) && finished(generation).has_value();
}

bool TestClient::WaitError(uint64_t generation) {
  return cluster_->WaitUntil(
      [&] { return error(generation).has_value() && (generation > 0 || stream_.closed()); });
}

bool TestClient::WaitTokens(uint64_t generation, size_t count) {
  return cluster_->WaitUntil([&] { return tokens(generation).size() >= count; });
}

bool TestClient::Close() {
  HalfClose();
  return cluster_->WaitUntil([&] { return stream_.closed(); }) && stream_.handler->closed()->ok() &&
         closed_event().has_value();
}

}  // namespace meshnet::worker
