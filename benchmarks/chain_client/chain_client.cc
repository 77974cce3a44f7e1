// Runs prompts over a chain of shard workers, with the same commands and answers as llama_driver,
// so that both are timed alike. A client in C++ because on a small machine the client shares the
// cores with the workers that it times.
#include <grpcpp/grpcpp.h>
#include <stdio.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <iostream>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "proto/meshnet/shard/v1/shard.grpc.pb.h"
#include "proto/meshnet/shard/v1/shard.pb.h"

ABSL_FLAG(std::vector<std::string>, workers, {},
          "HOST:PORT of each worker as this client reaches it, in layer order");
ABSL_FLAG(std::vector<std::string>, hops, {},
          "HOST:PORT of each worker as its neighbours reach it; default: as --workers");

namespace meshnet::benchmarks {
namespace {

namespace pb = ::meshnet::shard::v1;
using Clock = std::chrono::steady_clock;
using TimePoint = Clock::time_point;

constexpr uint32_t kSchemaVersion = 1;
constexpr char kUsage[] =
    "Times a chain of shard workers on prompts given as token ids.\n\n"
    "Example: printf 'prefill 1,2,3 4,5,6\\ndecode 16\\n' | chain_client "
    "--workers=127.0.0.1:7001,127.0.0.1:7002\n\n"
    "Prints {\"ready\": true, ...} once every worker has answered. Then reads commands from stdin, "
    "one a line, and\n"
    "answers each with a line of JSON:\n"
    "  prefill IDS [IDS...]   one session for each comma-separated list, up to its first token; "
    "closes earlier ones\n"
    "                         -> prefill_s (until all have it), ttft_ms (one for each), token_ids\n"
    "  decode N               N + 1 further tokens of every session; the clock runs from the first "
    "of them\n"
    "                         -> decode_s, decode_tokens (while all sessions decode), "
    "computed_tokens, stages (what\n"
    "                            each worker counted meanwhile, and the most\n"
    "                            that waited there beside several sessions), token_ids\n"
    "Ends when stdin ends. Exit status: 0, or 2 when it cannot start.";

double Seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

// One session at the head. After a failure, which `error` tells, it does nothing more.
class Session {
 public:
  Session(pb::ShardService::Stub* head, pb::OpenSession open) : stream_(head->Session(&context_)) {
    pb::SessionRequest request;
    *request.mutable_open() = std::move(open);
    pb::SessionEvent event;
    if (!stream_->Write(request) || !stream_->Read(&event)) {
      Fail();
    } else if (!event.has_opened()) {
      error = event.ShortDebugString();
    }
  }
  // Ends the session on every stage and waits until they have.
  ~Session() {
    pb::SessionEvent event;
    if (error.empty() && stream_->WritesDone()) {
      while (stream_->Read(&event)) {
      }
    } else {
      context_.TryCancel();
    }
    stream_->Finish();
  }

  // Appends `ids` to what the stages hold, generates `max_tokens` into token_ids and times.
  void Generate(std::vector<int32_t> ids, uint32_t max_tokens) {
    if (!error.empty()) return;
    pb::SessionRequest request;
    pb::Generate* generate = request.mutable_generate();
    generate->set_generation(++generation_);
    generate->set_start_position(cached_);
    generate->mutable_token_ids()->Add(ids.begin(), ids.end());
    generate->set_max_tokens(max_tokens);
    generate->set_ignore_end_of_generation(true);
    generate->mutable_sampling();
    token_ids.clear();
    times.clear();
    started = Clock::now();
    pb::SessionEvent event;
    if (!stream_->Write(request)) return Fail();
    while (stream_->Read(&event)) {
      if (event.has_token()) {
        times.push_back(Clock::now());
        token_ids.push_back(event.token().token().token_id());
      } else if (event.has_finished()) {
        cached_ = event.finished().cached_tokens();
        if (token_ids.size() != max_tokens) error = event.ShortDebugString();
        return;
      } else if (event.has_error()) {
        error = event.ShortDebugString();
        return;
      }
    }
    Fail();
  }

  // Of the last Generate().
  TimePoint started;
  std::vector<int32_t> token_ids;
  std::vector<TimePoint> times;
  std::string error;

 private:
  // The stream has ended: its status tells why.
  void Fail() {
    context_.TryCancel();
    error = "the head ended the session";
  }

  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<pb::SessionRequest, pb::SessionEvent>> stream_;
  uint64_t generation_ = 0;
  uint32_t cached_ = 0;
};

// The most that waited at each worker, looked at a few times a second while it exists. What waits
// shows where several sessions meet; beside a single one it would only take the cores.
class QueueWatch {
 public:
  struct Queue {
    uint32_t steps = 0;
    uint64_t bytes = 0;
  };

  QueueWatch(const std::vector<std::unique_ptr<pb::ShardService::Stub>>& stubs, size_t sessions)
      : stubs_(stubs), queues_(stubs.size()) {
    if (sessions > 1) thread_ = std::thread([this] { Loop(); });
  }

  // Of every worker.
  std::vector<Queue> Stop() {
    {
      absl::MutexLock lock(&mu_);
      stopping_ = true;
    }
    if (thread_.joinable()) thread_.join();
    return queues_;
  }
  ~QueueWatch() { Stop(); }

 private:
  void Loop() {
    absl::MutexLock lock(&mu_);
    while (!mu_.AwaitWithTimeout(absl::Condition(&stopping_), absl::Milliseconds(100))) {
      for (size_t i = 0; i < stubs_.size(); ++i) {
        grpc::ClientContext context;
        context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
        pb::Metrics metrics;
        if (!stubs_[i]->GetMetrics(&context, pb::GetMetricsRequest(), &metrics).ok()) continue;
        queues_[i].steps = std::max(queues_[i].steps, metrics.queued_steps());
        queues_[i].bytes = std::max<uint64_t>(queues_[i].bytes, metrics.queued_bytes());
      }
    }
  }

  const std::vector<std::unique_ptr<pb::ShardService::Stub>>& stubs_;
  std::vector<Queue> queues_;
  absl::Mutex mu_;
  bool stopping_ = false;
  std::thread thread_;
};

class ChainClient {
 public:
  // False, with a message on stderr, when a worker does not answer.
  bool Connect() {
    const std::vector<std::string> workers = absl::GetFlag(FLAGS_workers);
    std::vector<std::string> hops = absl::GetFlag(FLAGS_hops);
    if (hops.empty()) hops = workers;
    if (workers.empty() || hops.size() != workers.size()) {
      std::cerr << "chain_client: expected --workers=HOST:PORT[,...] and as many --hops or none; "
                   "see --help\n";
      return false;
    }
    for (size_t i = 0; i < workers.size(); ++i) {
      stubs_.push_back(pb::ShardService::NewStub(
          grpc::CreateChannel(workers[i], grpc::InsecureChannelCredentials())));
      grpc::ClientContext context;
      context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
      pb::GetCapabilityRequest request;
      request.add_schema_versions(kSchemaVersion);
      const grpc::Status status = stubs_[i]->GetCapability(&context, request, &capability_);
      if (!status.ok()) {
        std::cerr << "chain_client: expected a worker at " << workers[i] << ": "
                  << status.error_message() << "\n";
        return false;
      }
      pb::Hop* hop = route_.add_hops();
      hop->set_endpoint(hops[i]);
      *hop->mutable_range() = capability_.range();
    }
    route_.set_recipe_fingerprint(capability_.recipe().fingerprint());
    route_.set_artifact_sha256(capability_.artifact_sha256());
    route_.set_model_layers(capability_.model_layers());
    route_.set_route_epoch(1);
    return true;
  }

  // Both answer with JSON, an error when a session fails.
  std::string Prefill(const std::vector<std::vector<int32_t>>& prompts) {
    sessions_.clear();
    for (size_t i = 0; i < prompts.size(); ++i) {
      sessions_.push_back(std::make_unique<Session>(stubs_[0].get(), NewSession()));
    }
    const std::vector<pb::Metrics> before = Metrics();
    QueueWatch watch(stubs_, sessions_.size());
    ForEachSession([&](size_t i) { sessions_[i]->Generate(prompts[i], 1); });
    const std::vector<QueueWatch::Queue> queues = watch.Stop();
    const std::vector<pb::Metrics> after = Metrics();
    if (const std::string error = Error(); !error.empty()) return error;
    double prefill_s = 0;
    std::vector<std::string> ttft_ms;
    for (const auto& session : sessions_) {
      const double seconds = Seconds(session->times[0] - session->started);
      prefill_s = std::max(prefill_s, seconds);
      ttft_ms.push_back(absl::StrCat(seconds * 1e3));
    }
    return absl::StrCat("{\"prefill_s\": ", prefill_s, ", \"ttft_ms\": [",
                        absl::StrJoin(ttft_ms, ", "), "], \"stages\": [",
                        Stages(before, after, queues), "], \"token_ids\": ", TokenIds(), "}");
  }

  std::string Decode(uint32_t rounds) {
    const std::vector<pb::Metrics> before = Metrics();
    QueueWatch watch(stubs_, sessions_.size());
    ForEachSession(
        [&](size_t i) { sessions_[i]->Generate({sessions_[i]->token_ids.back()}, rounds + 1); });
    const std::vector<QueueWatch::Queue> queues = watch.Stop();
    const std::vector<pb::Metrics> after = Metrics();
    if (const std::string error = Error(); !error.empty()) return error;
    TimePoint from = TimePoint::min();
    TimePoint to = TimePoint::max();
    for (const auto& session : sessions_) {
      from = std::max(from, session->times.front());
      to = std::min(to, session->times.back());
    }
    if (to <= from) {
      // So few tokens that the sessions did not overlap: take the whole time instead.
      for (const auto& session : sessions_) {
        from = std::min(from, session->times.front());
        to = std::max(to, session->times.back());
      }
    }
    size_t decoded = 0;
    for (const auto& session : sessions_) {
      decoded += static_cast<size_t>(
          std::count_if(session->times.begin(), session->times.end(),
                        [&](TimePoint time) { return time > from && time <= to; }));
    }
    return absl::StrCat("{\"decode_s\": ", Seconds(to - from), ", \"decode_tokens\": ", decoded,
                        ", \"computed_tokens\": ", sessions_.size() * (rounds + 1),
                        ", \"stages\": [", Stages(before, after, queues),
                        "], \"token_ids\": ", TokenIds(), "}");
  }

  bool has_sessions() const { return !sessions_.empty(); }
  const pb::Capability& tail() const { return capability_; }

 private:
  pb::OpenSession NewSession() {
    pb::OpenSession open;
    open.set_schema_version(kSchemaVersion);
    *open.mutable_route() = route_;
    std::string* id = open.mutable_route()->mutable_route_session_id();
    for (int i = 0; i < 16; ++i) id->push_back(static_cast<char>(random_() & 0xff));
    open.set_work_id(absl::StrCat("benchmark.", ++opened_));
    *open.mutable_limits() = capability_.limits();
    return open;
  }

  std::vector<pb::Metrics> Metrics() {
    std::vector<pb::Metrics> all(stubs_.size());
    for (size_t i = 0; i < stubs_.size(); ++i) {
      grpc::ClientContext context;
      context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
      // A failure leaves zeros; the sessions will have failed as well then.
      stubs_[i]->GetMetrics(&context, pb::GetMetricsRequest(), &all[i]);
    }
    return all;
  }

  // All sessions at once, each in a thread of its own.
  void ForEachSession(const std::function<void(size_t)>& work) {
    std::vector<std::thread> threads;
    for (size_t i = 1; i < sessions_.size(); ++i) threads.emplace_back(work, i);
    work(0);
    for (std::thread& thread : threads) thread.join();
  }

  // JSON of the first session's failure; empty when there is none.
  std::string Error() {
    for (const auto& session : sessions_) {
      if (session->error.empty()) continue;
      const std::string what = absl::StrReplaceAll(session->error, {{"\"", "'"}, {"\\", "/"}});
      sessions_.clear();
      return absl::StrCat("{\"error\": \"", what, "\"}");
    }
    return "";
  }

  // What each worker counted between two looks at its metrics, and what it holds.
  static std::string Stages(const std::vector<pb::Metrics>& before,
                            const std::vector<pb::Metrics>& after,
                            const std::vector<QueueWatch::Queue>& queues) {
    std::vector<std::string> stages;
    for (size_t i = 0; i < before.size(); ++i) {
      const pb::Metrics& a = before[i];
      const pb::Metrics& b = after[i];
      stages.push_back(absl::StrCat(
          "{\"engine_calls\": ", b.engine_calls() - a.engine_calls(), ", \"engine_us\": ",
          b.decode_engine_us() + b.prefill_engine_us() - a.decode_engine_us() -
              a.prefill_engine_us(),
          ", \"seam_bytes_sent\": ", b.seam_bytes_sent() - a.seam_bytes_sent(),
          ", \"return_bytes_sent\": ", b.return_bytes_sent() - a.return_bytes_sent(),
          ", \"resident_bytes\": ", b.resident_bytes(), ", \"owned_tensor_bytes\": ",
          b.owned_tensor_bytes(), ", \"kv_bytes\": ", b.kv_budget_bytes(),
          ", \"queued_steps\": ", queues[i].steps, ", \"queued_bytes\": ", queues[i].bytes,
          ", \"sessions_failed\": ", b.sessions_failed() - a.sessions_failed(), "}"));
    }
    return absl::StrJoin(stages, ", ");
  }

  std::string TokenIds() const {
    std::vector<std::string> ids;
    for (const auto& session : sessions_) ids.push_back(absl::StrJoin(session->token_ids, ", "));
    return absl::StrCat("[[", absl::StrJoin(ids, "], ["), "]]");
  }

  std::vector<std::unique_ptr<pb::ShardService::Stub>> stubs_;
  pb::Route route_;
  // The tail's.
  pb::Capability capability_;
  std::random_device random_;
  uint64_t opened_ = 0;
  std::vector<std::unique_ptr<Session>> sessions_;
};

std::string Answer(ChainClient* client, const std::string& line) {
  const std::vector<std::string> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
  uint32_t rounds = 0;
  if (words.size() == 2 && words[0] == "decode") {
    if (absl::SimpleAtoi(words[1], &rounds) && rounds > 0 && client->has_sessions()) {
      return client->Decode(rounds);
    }
  } else if (words.size() >= 2 && words[0] == "prefill") {
    std::vector<std::vector<int32_t>> prompts;
    bool valid = true;
    for (size_t i = 1; i < words.size(); ++i) {
      std::vector<int32_t>& prompt = prompts.emplace_back();
      for (const absl::string_view part : absl::StrSplit(words[i], ',')) {
        valid = valid && absl::SimpleAtoi(part, &prompt.emplace_back());
      }
    }
    if (valid) return client->Prefill(prompts);
  }
  return "{\"error\": \"expected: prefill IDS [IDS...], then decode N\"}";
}

// Payload of one token; 0 when the chain has no seam.
int64_t BoundaryBytes(const pb::BoundarySchema& schema) {
  int64_t total = 0;
  for (const pb::TensorSpec& tensor : schema.tensors()) {
    int64_t bytes = tensor.dtype() == pb::DTYPE_F16 || tensor.dtype() == pb::DTYPE_BF16 ? 2 : 4;
    for (const int64_t extent : tensor.shape()) bytes *= extent < 0 ? 1 : extent;
    total += bytes;
  }
  return total;
}

std::string RecipeJson(const pb::Recipe& recipe) {
  const auto quoted = [](const std::string& text) {
    return absl::StrCat("\"", absl::StrReplaceAll(text, {{"\"", "'"}, {"\\", "/"}}), "\"");
  };
  std::vector<std::string> fields;
  for (const pb::RecipeField& field : recipe.fields()) {
    fields.push_back(absl::StrCat(quoted(field.name()), ": ", quoted(field.value())));
  }
  return absl::StrCat("{", absl::StrJoin(fields, ", "), "}");
}

int Main() {
  ChainClient client;
  if (!client.Connect()) return 2;
  std::cout << "{\"ready\": true, \"vocabulary\": " << client.tail().vocabulary_size()
            << ", \"prefill_chunk_tokens\": " << client.tail().prefill_chunk_tokens()
            << ", \"batch_policy\": \"" << pb::BatchPolicy_Name(client.tail().batch_policy())
            << "\", \"boundary_bytes_per_token\": " << BoundaryBytes(client.tail().boundary_in())
            << ", \"recipe\": " << RecipeJson(client.tail().recipe())
            << ", \"recipe_fingerprint\": \"" << client.tail().recipe().fingerprint() << "\"}"
            << std::endl;
  std::string line;
  while (std::getline(std::cin, line)) std::cout << Answer(&client, line) << std::endl;
  return 0;
}

}  // namespace
}  // namespace meshnet::benchmarks

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage(meshnet::benchmarks::kUsage);
  absl::ParseCommandLine(argc, argv);
  return meshnet::benchmarks::Main();
}
