// Reads every frame of a DeepSeek V4 run through workers: what crosses a seam is the boundary, bit
// for bit what the layers before it gave, and nothing else. No cache and no state of any layer.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "cc/shard_engine/engine_chain.h"
#include "cc/shard_engine/llama/llama_engine.h"
#include "cc/worker/seam_peer.h"
#include "cc/worker/test_cluster.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/meshnet/shard/v1/frame.pb.h"
#include "proto/meshnet/shard/v1/shard.pb.h"

namespace meshnet::worker {
namespace {

constexpr uint64_t kStreams = 4;
constexpr uint64_t kEmbedding = 128;
constexpr uint32_t kChunk = 16;
// A frame's fields beside its payload, generously.
constexpr size_t kEnvelope = 640;

LlamaEngineOptions OptionsFor(LayerRange range, uint32_t rollback) {
  LlamaEngineOptions options;
  options.rollback_tokens = rollback;
  options.model_path = std::getenv("DEEPSEEK4_MODEL");
  options.range = range;
  options.max_sessions = 2;
  options.context_tokens = 256;
  options.max_step_tokens = kChunk;
  options.threads = 1;
  return options;
}

std::unique_ptr<ShardEngine> Load(LayerRange range, uint32_t rollback = 64) {
  auto engine = LoadLlamaEngine(OptionsFor(range, rollback));
  EXPECT_TRUE(engine.ok()) << engine.status();
  return engine.ok() ? *std::move(engine) : nullptr;
}

// One step as it crossed a seam.
struct Crossing {
  uint32_t start = 0;
  uint32_t tokens = 0;
  std::string payload;
};

void ExpectTensor(const v1::TensorHeader& tensor, const std::string& name, v1::DType dtype,
                  const std::vector<uint64_t>& shape) {
  EXPECT_EQ(tensor.name(), name);
  EXPECT_EQ(tensor.dtype(), dtype);
  EXPECT_THAT(tensor.shape(), testing::ElementsAreArray(shape));
}

TEST(DeepSeek4SeamTest, NothingButTheBoundaryCrosses) {
  const std::vector<LayerRange> ranges = {{0, 2}, {2, 5}, {5, 8}};
  FakeNetwork* network = nullptr;
  const auto cluster = MakeMemoryCluster({}, &network);
  std::vector<std::string> endpoints;
  for (const LayerRange& range : ranges) {
    WorkerSpec spec;
    spec.range = range;
    spec.make_engine = [range] { return Load(range); };
    endpoints.push_back(cluster->Add(spec));
  }

  // Per receiving endpoint and step.
  std::map<std::string, std::map<uint64_t, Crossing>> crossings;
  std::map<v1::SeamMessage::BodyCase, int> kinds;
  network->SetTap([&](const Passing& passing) {
    if (passing.method != Method::kSeam) return TapVerdict::kDeliver;
    v1::SeamMessage message;
    EXPECT_TRUE(message.ParseFromString(*passing.bytes));
    ++kinds[message.body_case()];
    if (!message.has_frame()) {
      // Openings, credits and receipts: too small to carry anything of a layer.
      EXPECT_LT(passing.bytes->size(), 4096u) << message.ShortDebugString();
      return TapVerdict::kDeliver;
    }
    EXPECT_EQ(passing.direction, Direction::kToServer) << "a boundary going back";
    const v1::Frame& frame = message.frame();
    EXPECT_FALSE(frame.has_reserved_state());
    EXPECT_LT(passing.bytes->size() - frame.fragment().data().size(), kEnvelope);
    Crossing& crossing = crossings[passing.endpoint][frame.step()];
    if (frame.fragment().index() == 0) {
      crossing.start = frame.start_position();
      crossing.tokens = frame.token_count();
      EXPECT_EQ(frame.boundary_schema(), "deepseek4.mhc");
      EXPECT_EQ(frame.boundary_version(), 1u);
      EXPECT_EQ(frame.cache().cached_tokens(), frame.start_position());
      EXPECT_EQ(frame.tensors_size(), 3);
      if (frame.tensors_size() == 3) {
        ExpectTensor(frame.tensors(0), "residual", v1::DTYPE_F32,
                     {frame.token_count(), kStreams, kEmbedding});
        ExpectTensor(frame.tensors(1), "positions", v1::DTYPE_I32, {frame.token_count()});
        ExpectTensor(frame.tensors(2), "token_ids", v1::DTYPE_I32, {frame.token_count()});
      }
    }
    crossing.payload += frame.fragment().data();
    return TapVerdict::kDeliver;
  });

  TestClient client(cluster.get(), endpoints);
  ASSERT_TRUE(client.Opened());
  const std::vector<int32_t> prompt = RandomTokens(512, 150, 3);
  client.Generate(1, prompt, /*max_tokens=*/12);
  ASSERT_TRUE(client.WaitFinished(1));
  const std::vector<int32_t> text = client.tokens(1);
  ASSERT_FALSE(text.empty());
  ASSERT_TRUE(client.Close());

  // The same steps through the layers before each seam.
  std::vector<int32_t> ids = prompt;
  ids.insert(ids.end(), text.begin(), text.end());
  EngineChain before;
  for (size_t seam = 1; seam < ranges.size(); ++seam) {
    SCOPED_TRACE(absl::StrCat("into layer ", ranges[seam].begin));
    before.clear();
    for (size_t i = 0; i < seam; ++i) {
      before.push_back(Load(ranges[i]));
      ASSERT_TRUE(before.back()->OpenSession(Key('x'), {}, nullptr).ok());
    }
    uint32_t position = 0;
    for (const auto& [step, crossing] : crossings[endpoints[seam]]) {
      SCOPED_TRACE(absl::StrCat("step ", step));
      ASSERT_EQ(crossing.start, position);
      ASSERT_LE(position + crossing.tokens, ids.size());
      const auto rows = absl::MakeConstSpan(ids).subspan(position, crossing.tokens);
      const StepOutput output = RunThrough(before, MakeStep(Key('x'), position, rows));
      ASSERT_TRUE(output.status.ok()) << output.status;
      std::vector<int32_t> integers;
      for (uint32_t i = 0; i < crossing.tokens; ++i) {
        integers.push_back(static_cast<int32_t>(position + i));
      }
      integers.insert(integers.end(), rows.begin(), rows.end());
      const size_t residual = output.residual.size() * sizeof(float);
      ASSERT_EQ(crossing.payload.size(), residual + integers.size() * sizeof(int32_t));
      EXPECT_EQ(std::memcmp(crossing.payload.data(), output.residual.data(), residual), 0);
      EXPECT_EQ(std::memcmp(crossing.payload.data() + residual, integers.data(),
                            integers.size() * sizeof(int32_t)),
                0);
      position += crossing.tokens;
    }
    // All but the last token of the text went through.
    EXPECT_EQ(position, ids.size() - 1);
  }
  EXPECT_GT(kinds[v1::SeamMessage::kFrame], 0);
}

class CancelTest : public testing::Test {
 protected:
  explicit CancelTest(uint32_t rollback = 128) : cluster_(MakeMemoryCluster({})) {
    for (const LayerRange& range : std::vector<LayerRange>{{0, 2}, {2, 5}, {5, 8}}) {
      WorkerSpec spec;
      spec.range = range;
      spec.make_engine = [range, rollback] { return Load(range, rollback); };
      endpoints_.push_back(cluster_->Add(spec));
    }
  }

  uint64_t Computed(const std::string& endpoint) {
    return cluster_->worker(endpoint).GetMetrics().prefill_tokens();
  }

  // Cancels generation `number` when the last stage has computed one chunk of the prompt's six and
  // the first one four.
  v1::GenerationFinished CancelledInPrefill(TestClient* client, uint64_t number) {
    const uint64_t head = Computed(endpoints_[0]);
    const uint64_t tail = Computed(endpoints_[2]);
    client->Generate(number, prompt_, 8);
    EXPECT_TRUE(cluster_->WaitUntil([&] { return Computed(endpoints_[2]) > tail; }));
    cluster_->PauseEngine(endpoints_[2], true);
    EXPECT_TRUE(cluster_->WaitUntil([&] { return Computed(endpoints_[0]) >= head + 4 * kChunk; }));
    EXPECT_EQ(Computed(endpoints_[2]), tail + kChunk);
    client->CancelGeneration(number);
    EXPECT_TRUE(client->WaitFinished(number));
    cluster_->PauseEngine(endpoints_[2], false);
    EXPECT_EQ(client->finished(number)->reason(), v1::FINISH_REASON_CANCELLED);
    return *client->finished(number);
  }

  std::vector<int32_t> Expected(const std::vector<int32_t>& prompt, size_t count) {
    EngineChain whole;
    whole.push_back(Load({0, 0}));
    return meshnet::Generate(whole, Key('w'), prompt, kChunk, count);
  }

  const std::unique_ptr<TestCluster> cluster_;
  std::vector<std::string> endpoints_;
  const std::vector<int32_t> prompt_ = RandomTokens(512, 6 * kChunk, 3);
};

// Every stage goes back to where the last one has come to.
TEST_F(CancelTest, ASessionGoesOnFromWhatAllStagesHold) {
  TestClient client(cluster_.get(), endpoints_);
  ASSERT_TRUE(client.Opened());
  ASSERT_EQ(CancelledInPrefill(&client, 1).cached_tokens(), kChunk);
  client.Generate(2, {prompt_.begin() + kChunk, prompt_.end()}, 8, kChunk);
  ASSERT_TRUE(client.WaitFinished(2));
  EXPECT_EQ(client.tokens(2), Expected(prompt_, 8));
  EXPECT_TRUE(client.Close());
}

class CancelBeyondRollbackTest : public CancelTest {
 protected:
  CancelBeyondRollbackTest() : CancelTest(8) {}
};

// The first stage's rings have lost what it would need: the session says that it holds nothing, and
// prefills from the start.
TEST_F(CancelBeyondRollbackTest, ASessionBeginsAgain) {
  TestClient client(cluster_.get(), endpoints_);
  ASSERT_TRUE(client.Opened());
  for (const uint64_t generation : {1, 3}) {
    ASSERT_EQ(CancelledInPrefill(&client, generation).cached_tokens(), 0u);
    client.Generate(generation + 1, prompt_, 8);
    ASSERT_TRUE(client.WaitFinished(generation + 1));
    EXPECT_EQ(client.tokens(generation + 1), Expected(prompt_, 8));
  }
  // Going back further than that is refused, and the session lives.
  client.Generate(5, {1, 2}, 4, 50);
  ASSERT_TRUE(client.WaitError(5));
  EXPECT_EQ(client.error(5)->reason(), v1::REASON_CACHE_MISS);
  const uint32_t held = client.finished(4)->cached_tokens();
  client.Generate(6, {1}, 4, held - 8);
  ASSERT_TRUE(client.WaitFinished(6));
  EXPECT_TRUE(client.Close());
}

// What does not fit the boundary is refused by name, before any layer runs.
TEST(DeepSeek4SeamTest, OtherBoundariesAreRefusedBeforeExecution) {
  const auto cluster = MakeMemoryCluster({});
  std::vector<std::string> endpoints;
  for (const LayerRange& range : std::vector<LayerRange>{{0, 2}, {2, 8}}) {
    WorkerSpec spec;
    spec.range = range;
    spec.make_engine = [range] { return Load(range); };
    endpoints.push_back(cluster->Add(spec));
  }
  int sessions = 0;
  const auto refusal = [&](const std::function<void(SeamPeer&)>& misbehave) {
    SeamPeer peer(cluster.get(), MakeOpen(*cluster, endpoints, absl::StrCat("s", ++sessions)));
    EXPECT_TRUE(peer.Opened());
    EXPECT_TRUE(peer.Attach());
    misbehave(peer);
    return peer.WaitRefusal();
  };
  const auto changed = [&](const std::function<void(v1::Frame*)>& change) {
    return refusal([&](SeamPeer& peer) {
      std::vector<v1::SeamMessage> messages = peer.Encode(peer.MakeStep(1, 0, {1, 2}));
      change(messages[0].mutable_frame());
      peer.seam.Send(messages[0]);
    });
  };
  const auto shape = [](v1::TensorHeader* tensor, const std::vector<uint64_t>& extents) {
    tensor->mutable_shape()->Assign(extents.begin(), extents.end());
  };

  // As many numbers, but the streams are no axis any more, or another one.
  EXPECT_EQ(changed([&](auto* f) { shape(f->mutable_tensors(0), {2, kStreams * kEmbedding}); }),
            v1::REASON_SHAPE_MISMATCH);
  EXPECT_EQ(changed([&](auto* f) { shape(f->mutable_tensors(0), {2, kEmbedding, kStreams}); }),
            v1::REASON_SHAPE_MISMATCH);
  EXPECT_EQ(changed([&](auto* f) { shape(f->mutable_tensors(0), {1, kStreams, kEmbedding}); }),
            v1::REASON_SHAPE_MISMATCH);
  // Layer 2 chooses experts by the ids.
  EXPECT_EQ(changed([](auto* f) { f->mutable_tensors()->RemoveLast(); }),
            v1::REASON_TENSOR_MISSING);
  EXPECT_EQ(changed([&](auto* f) { shape(f->mutable_tensors(2), {1}); }),
            v1::REASON_SHAPE_MISMATCH);
  EXPECT_EQ(changed([](auto* f) { f->mutable_tensors(0)->set_dtype(v1::DTYPE_F16); }),
            v1::REASON_DTYPE_MISMATCH);
  for (const TensorSpec& reserved : ReservedMtpTensors(kStreams, kEmbedding)) {
    EXPECT_EQ(changed([&](auto* f) {
                v1::TensorHeader* tensor = f->add_tensors();
                *tensor = f->tensors(2);
                tensor->set_name(reserved.name);
              }),
              v1::REASON_TENSOR_UNEXPECTED);
  }
  EXPECT_EQ(changed([](auto* f) { f->mutable_reserved_state()->mutable_mtp()->mutable_hidden(); }),
            v1::REASON_RESERVED_FIELD_SET);
  EXPECT_EQ(changed([](auto* f) { f->mutable_reserved_state()->set_architecture_state("x"); }),
            v1::REASON_RESERVED_FIELD_SET);
  EXPECT_EQ(changed([](auto* f) { f->set_boundary_schema("dense.residual"); }),
            v1::REASON_BOUNDARY_SCHEMA_MISMATCH);
  EXPECT_EQ(changed([](auto* f) { f->set_boundary_version(2); }),
            v1::REASON_BOUNDARY_SCHEMA_MISMATCH);
  EXPECT_EQ(refusal([](SeamPeer& p) { p.Send(p.MakeStep(1, 5, {1})); }), v1::REASON_CACHE_MISS);

  EXPECT_TRUE(cluster->WaitUntil([&] { return cluster->open_sessions(endpoints[1]) == 0; }));
  const v1::Metrics metrics = cluster->worker(endpoints[1]).GetMetrics();
  EXPECT_EQ(metrics.prefill_tokens() + metrics.decode_tokens(), 0u);
}

}  // namespace
}  // namespace meshnet::worker
