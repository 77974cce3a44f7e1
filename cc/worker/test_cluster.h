// A few workers with fake engines and clients that talk to them, over memory or over gRPC on
// loopback: one suite of tests runs on both.
//
// In memory everything is one thread that WaitUntil drives: first messages, then engines. Over gRPC
// the workers have their own threads and WaitUntil only looks.
#ifndef MESHNET_CC_WORKER_TEST_CLUSTER_H_
#define MESHNET_CC_WORKER_TEST_CLUSTER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "cc/protocol/frame_codec.h"
#include "cc/shard_engine/fake/fake_engine.h"
#include "cc/worker/authorizer.h"
#include "cc/worker/fake_transport.h"
#include "cc/worker/json_log.h"
#include "cc/worker/worker.h"
#include "proto/meshnet/shard/v1/shard.pb.h"

namespace meshnet::worker {

struct WorkerSpec {
  LayerRange range;
  FakeEngineOptions engine;
  // Makes another engine instead; in memory only.
  std::function<std::unique_ptr<ShardEngine>()> make_engine = nullptr;
  WorkerOptions worker;
  // Null: everybody may do everything.
  Authorizer* authorizer = nullptr;
};

// Records what happens on a stream that a test has dialed.
class RecordingHandler : public StreamHandler {
 public:
  void OnConnected() override;
  void OnMessage(absl::string_view bytes) override;
  void OnClosed(const absl::Status& status) override;

  std::vector<std::string> messages() const;
  std::optional<absl::Status> closed() const;

 private:
  mutable absl::Mutex mu_;
  std::vector<std::string> messages_;
  std::optional<absl::Status> closed_;
};

// A stream with its record.
struct TestStream {
  std::shared_ptr<Stream> stream;
  std::shared_ptr<RecordingHandler> handler;

  void Send(const google::protobuf::Message& message) const;
  void SendBytes(std::string bytes) const;
  // The messages so far, parsed as T.
  template <typename T>
  std::vector<T> Received() const {
    std::vector<T> parsed;
    for (const std::string& bytes : handler->messages())
      parsed.emplace_back().ParseFromString(bytes);
    return parsed;
  }
  bool closed() const { return handler->closed().has_value(); }
  v1::Reason closed_reason() const { return ReasonOf(*handler->closed()); }
};

class TestCluster {
 public:
  TestCluster() : logger_([](const std::string&) {}) {}
  virtual ~TestCluster() = default;

  // Starts a worker and returns its endpoint.
  virtual std::string Add(const WorkerSpec& spec) = 0;
  // Starts it again at the same endpoint after Kill.
  virtual void Restart(const std::string& endpoint) = 0;
  // As the death of its process: no farewell, nothing kept.
  virtual void Kill(const std::string& endpoint) = 0;
  virtual Worker& worker(const std::string& endpoint) = 0;
  virtual Dialer* dialer() = 0;
  // Holds the worker's engine before its next call.
  virtual void PauseEngine(const std::string& endpoint, bool paused) = 0;
  // False when `condition` cannot become true any more (memory) or did not in good time (gRPC).
  virtual bool WaitUntil(const std::function<bool()>& condition) = 0;
  // In memory the clock jumps; over gRPC time passes by itself.
  virtual void PassTime(absl::Duration duration) = 0;

  TestStream Dial(Method method, const std::string& endpoint);
  uint32_t open_sessions(const std::string& endpoint);

 protected:
  Logger logger_;
  AllowAll allow_all_;
};

std::unique_ptr<TestCluster> MakeMemoryCluster(const FakeNetwork::Options& options,
                                               FakeNetwork** network = nullptr);
std::unique_ptr<TestCluster> MakeGrpcCluster();

// 16 bytes that begin with `tag`.
std::string SessionId(const std::string& tag);

// The opening of a session over workers that are up, in order.
v1::OpenSession MakeOpen(TestCluster& cluster, const std::vector<std::string>& endpoints,
                         const std::string& session_tag, uint64_t epoch = 1);

// A client's view of one session.
class TestClient {
 public:
  TestClient(TestCluster* cluster, const std::vector<std::string>& endpoints,
             const std::string& tag = "s", uint64_t epoch = 1);
  TestClient(TestCluster* cluster, const std::string& head, const v1::OpenSession& open);

  // Waits for `opened`; false when something else came.
  bool Opened();
  void Generate(uint64_t generation, const std::vector<int32_t>& prompt, uint32_t max_tokens,
                uint32_t start_position = 0);
  void Generate(const v1::Generate& request);
  void CancelGeneration(uint64_t generation);
  void HalfClose() { stream_.stream->HalfClose(); }
  // Goes away without a word.
  void Abort() { stream_.stream->Close(absl::OkStatus()); }

  std::vector<v1::SessionEvent> events() const { return stream_.Received<v1::SessionEvent>(); }
  // Ids of the generation's tokens so far.
  std::vector<int32_t> tokens(uint64_t generation) const;
  std::optional<v1::GenerationFinished> finished(uint64_t generation) const;
  // The error that ended the session, or the one that refused `generation`.
  std::optional<v1::Error> error(uint64_t generation = 0) const;
  std::optional<v1::SessionClosed> closed_event() const;
  const TestStream& stream() const { return stream_; }

  // Waits for the generation's end.
  bool WaitFinished(uint64_t generation);
  bool WaitError(uint64_t generation = 0);
  bool WaitTokens(uint64_t generation, size_t count);
  // Half-closes and waits for `closed` with status OK.
  bool Close();

 private:
  TestCluster* const cluster_;
  TestStream stream_;
};

}  // namespace meshnet::worker

#endif  // MESHNET_CC_WORKER_TEST_CLUSTER_H_
