// Sessions over chains of workers: in memory (in order of cause, and with streams and engines
// taking turns at random) and over gRPC on loopback.
#include "cc/worker/worker.h"

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/common/status.h"
#include "cc/protocol/frame_codec.h"
#include "cc/worker/test_cluster.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace meshnet::worker {
namespace {

using ::testing::SizeIs;

constexpr uint32_t kLayers = 8;

struct Transport {
  std::string name;
  bool grpc = false;
  FakeNetwork::Options memory;
};

class WorkerTest : public ::testing::TestWithParam<Transport> {
 protected:
  void SetUp() override {
    cluster_ =
        GetParam().grpc ? MakeGrpcCluster() : MakeMemoryCluster(GetParam().memory, &network_);
  }

  // Workers for the layer ranges between `cuts`.
  std::vector<std::string> Chain(const std::vector<uint32_t>& cuts, WorkerSpec spec = {}) {
    std::vector<std::string> endpoints;
    uint32_t begin = 0;
    for (size_t i = 0; i <= cuts.size(); ++i) {
      const uint32_t end = i < cuts.size() ? cuts[i] : kLayers;
      spec.range = {begin, end};
      endpoints.push_back(cluster_->Add(spec));
      begin = end;
    }
    return endpoints;
  }

  // Every stage has given everything back.
  bool AllFree(const std::vector<std::string>& endpoints) {
    return cluster_->WaitUntil([&] {
      return std::all_of(endpoints.begin(), endpoints.end(), [&](const std::string& endpoint) {
        const v1::Metrics metrics = cluster_->worker(endpoint).GetMetrics();
        return metrics.open_sessions() == 0 && metrics.kv_bytes() == 0 &&
               metrics.queued_steps() == 0 && metrics.queued_bytes() == 0;
      });
    });
  }

  // What a session of its own says, on a fresh whole model.
  std::vector<int32_t> Reference(const std::vector<int32_t>& prompt, uint32_t max_tokens,
                                 WorkerSpec spec = {}) {
    spec.range = {0, kLayers};
    const std::string whole = cluster_->Add(spec);
    TestClient client(cluster_.get(), {whole}, "ref");
    EXPECT_TRUE(client.Opened());
    client.Generate(1, prompt, max_tokens);
    EXPECT_TRUE(client.WaitFinished(1));
    return client.tokens(1);
  }

  // A new session on the same route works.
  void ExpectServes(const std::vector<std::string>& endpoints, const std::string& tag = "next") {
    TestClient client(cluster_.get(), endpoints, tag);
    ASSERT_TRUE(client.Opened());
    client.Generate(1, {1, 2, 3}, 4);
    ASSERT_TRUE(client.WaitFinished(1));
    EXPECT_THAT(client.tokens(1), SizeIs(4));
    EXPECT_TRUE(client.Close());
    EXPECT_TRUE(AllFree(endpoints));
  }

  std::unique_ptr<TestCluster> cluster_;
  FakeNetwork* network_ = nullptr;
};

std::vector<int32_t> Prompt(size_t size, int32_t first = 1) {
  std::vector<int32_t> prompt(size);
  for (size_t i = 0; i < size; ++i) prompt[i] = static_cast<int32_t>((first + 7 * i) % 250);
  return prompt;
}

// ---- Generation ----

TEST_P(WorkerTest, AnyCutGivesTheWholeModelsText) {
  // 75 rows: three chunks of 32, the last one shorter.
  const std::vector<int32_t> prompt = Prompt(75);
  const std::vector<int32_t> expected = Reference(prompt, 20);
  ASSERT_THAT(expected, SizeIs(20));
  for (const std::vector<uint32_t>& cuts :
       std::vector<std::vector<uint32_t>>{{4}, {1, 7}, {2, 3, 5, 6}}) {
    const auto endpoints = Chain(cuts);
    TestClient client(cluster_.get(), endpoints);
    ASSERT_TRUE(client.Opened());
    client.Generate(1, prompt, 20);
    ASSERT_TRUE(client.WaitFinished(1));
    EXPECT_EQ(client.tokens(1), expected) << endpoints.size() << " stages";
    EXPECT_TRUE(client.Close());
    EXPECT_TRUE(AllFree(endpoints));
  }
}

TEST_P(WorkerTest, EventsTellTheWholeStory) {
  const auto endpoints = Chain({4});
  TestClient client(cluster_.get(), endpoints);
  ASSERT_TRUE(client.Opened());
  client.Generate(1, Prompt(40), 3);
  ASSERT_TRUE(client.WaitFinished(1));
  ASSERT_TRUE(client.Close());
  const auto events = client.events();
  ASSERT_THAT(events, SizeIs(8));
  EXPECT_EQ(events[0].opened().prefill_chunk_tokens(), 32);
  EXPECT_EQ(events[0].opened().context_tokens(), 1024);
  EXPECT_EQ(events[1].prefill().tokens_done(), 32);
  EXPECT_EQ(events[1].prefill().tokens_total(), 40);
  EXPECT_EQ(events[2].prefill().tokens_done(), 40);
  for (int i = 0; i < 3; ++i) {
    const v1::TokenEvent& token = events[3 + i].token();
    EXPECT_EQ(token.generation(), 1);
    EXPECT_EQ(token.position(), 40 + i);
    // The fixture's vocabulary is bytes.
    EXPECT_EQ(token.piece(), std::string(1, static_cast<char>(token.token().token_id())));
  }
  EXPECT_EQ(events[6].finished().reason(), v1::FINISH_REASON_LENGTH);
  EXPECT_EQ(events[6].finished().prompt_tokens(), 40);
  EXPECT_EQ(events[6].finished().completion_tokens(), 3);
  EXPECT_EQ(events[6].finished().cached_tokens(), 42);
  ASSERT_THAT(events[7].closed().receipts(), SizeIs(2));
  for (int i = 0; i < 2; ++i) {
    const v1::StageReceipt& receipt = events[7].closed().receipts(i);
    EXPECT_EQ(receipt.range().begin(), i * 4);
    EXPECT_EQ(receipt.prefill_tokens(), 40);
    EXPECT_EQ(receipt.decode_tokens(), 2);
  }
}

TEST_P(WorkerTest, LaterGenerationsKeepTheirPrefix) {
  const auto endpoints = Chain({3, 6});
  TestClient client(cluster_.get(), endpoints);
  ASSERT_TRUE(client.Opened());
  client.Generate(1, Prompt(20), 5);
  ASSERT_TRUE(client.WaitFinished(1));
  EXPECT_EQ(client.finished(1)->cached_tokens(), 24);
  // Goes on behind the cache: the last token was sampled but never fed.
  const std::vector<int32_t> said = client.tokens(1);
  client.Generate(2, {said.back(), 9, 9}, 4, 24);
  ASSERT_TRUE(client.WaitFinished(2));
  std::vector<int32_t> all = Prompt(20);
  all.insert(all.end(), said.begin(), said.end());
  all.insert(all.end(), {9, 9});
  EXPECT_EQ(client.tokens(2), Reference(all, 4));
  // Goes back to the middle of the first prompt.
  client.Generate(3, {77}, 4, 10);
  ASSERT_TRUE(client.WaitFinished(3));
  std::vector<int32_t> back = Prompt(20);
  back.resize(10);
  back.push_back(77);
  EXPECT_EQ(client.tokens(3), Reference(back, 4));
  EXPECT_TRUE(client.Close());
}

TEST_P(WorkerTest, EndsAtStopTokens) {
  const auto endpoints = Chain({4});
  const std::vector<int32_t> expected = Reference(Prompt(5), 10);
  TestClient client(cluster_.get(), endpoints);
  ASSERT_TRUE(client.Opened());
  v1::Generate request;
  request.set_generation(1);
  for (const int32_t id : Prompt(5)) request.add_token_ids(id);
  request.set_max_tokens(10);
  request.add_stop_token_ids(expected[3]);
  client.Generate(request);
  ASSERT_TRUE(client.WaitFinished(1));
  EXPECT_EQ(client.finished(1)->reason(), v1::FINISH_REASON_STOP);
  const auto first = std::find(expected.begin(), expected.end(), expected[3]);
  EXPECT_EQ(client.tokens(1), std::vector<int32_t>(expected.begin(), first + 1));
}

TEST_P(WorkerTest, EndOfGenerationCanBeIgnored) {
  WorkerSpec spec;
  spec.engine.end_of_generation_one_in = 3;
  const auto endpoints = Chain({4}, spec);
  TestClient client(cluster_.get(), endpoints);
  ASSERT_TRUE(client.Opened());
  client.Generate(1, Prompt(5), 60);
  ASSERT_TRUE(client.WaitFinished(1));
  EXPECT_EQ(client.finished(1)->reason(), v1::FINISH_REASON_STOP);
  EXPECT_EQ(client.tokens(1).back(), 257);
  v1::Generate request;
  request.set_generation(2);
  for (const int32_t id : Prompt(5)) request.add_token_ids(id);
  request.set_max_tokens(60);
  request.set_ignore_end_of_generation(true);
  client.Generate(request);
  ASSERT_TRUE(client.WaitFinished(2));
  EXPECT_EQ(client.finished(2)->reason(), v1::FINISH_REASON_LENGTH);
  EXPECT_THAT(client.tokens(2), SizeIs(60));
}

TEST_P(WorkerTest, SamplesAtTheTailWithTheRequestsSeed) {
  const auto endpoints = Chain({2, 5});
  const auto generate = [&](const std::vector<std::string>& route, const std::string& tag,
                            uint32_t seed) {
    TestClient client(cluster_.get(), route, tag);
    EXPECT_TRUE(client.Opened());
    v1::Generate request;
    request.set_generation(1);
    request.add_token_ids(3);
    request.set_max_tokens(12);
    request.mutable_sampling()->set_temperature(2.0f);
    request.mutable_sampling()->set_seed(seed);
    client.Generate(request);
    EXPECT_TRUE(client.WaitFinished(1));
    return client.tokens(1);
  };
  const std::vector<int32_t> first = generate(endpoints, "a", 1);
  EXPECT_EQ(generate(endpoints, "b", 1), first);
  EXPECT_NE(generate(endpoints, "c", 2), first);
  EXPECT_EQ(generate({cluster_->Add({{0, kLayers}, {}, {}})}, "d", 1), first);
}

TEST_P(WorkerTest, LogitsComeBackWhenAsked) {
  const auto endpoints = Chain({4});
  TestClient client(cluster_.get(), endpoints);
  ASSERT_TRUE(client.Opened());
  v1::Generate request;
  request.set_generation(1);
  for (const int32_t id : Prompt(40)) request.add_token_ids(id);
  request.set_max_tokens(3);
  request.set_return_logits(true);
  request.mutable_sampling()->set_top_logprobs(2);
  client.Generate(request);
  ASSERT_TRUE(client.WaitFinished(1));
  int tokens = 0;
  for (const v1::SessionEvent& event : client.events()) {
    if (!event.has_token()) continue;
    ++tokens;
    ASSERT_THAT(event.token().logits(), SizeIs(320 * sizeof(float)));
    std::vector<float> logits(320);
    std::memcpy(logits.data(), event.token().logits().data(), event.token().logits().size());
    EXPECT_EQ(std::max_element(logits.begin(), logits.end()) - logits.begin(),
              event.token().token().token_id());
    EXPECT_THAT(event.token().token().top(), SizeIs(2));
  }
  EXPECT_EQ(tokens, 3);
}

TEST_P(WorkerTest, SmallFramesCarryLargeBundles) {
  WorkerSpec spec;
  // 32 rows of 256 floats are 8 fragments and more.
  spec.engine.width = 256;
  spec.worker.limits.max_frame_bytes = 4096;
  const auto endpoints = Chain({3, 5}, spec);
  const std::vector<int32_t> expected = Reference(Prompt(100), 6, spec);
  TestClient client(cluster_.get(), endpoints);
  ASSERT_TRUE(client.Opened());
  client.Generate(1, Prompt(100), 6);
  ASSERT_TRUE(client.WaitFinished(1));
  EXPECT_EQ(client.tokens(1), expected);
  EXPECT_TRUE(client.Close());
}

TEST_P(WorkerTest, OneStepInFlightIsEnough) {
  WorkerSpec spec;
  spec.worker.limits.max_inflight_steps = 1;
  const auto endpoints = Chain({3, 5}, spec);
  TestClient client(cluster_.get(), endpoints);
  ASSERT_TRUE(client.Opened());
  client.Generate(1, Prompt(100), 6);
  ASSERT_TRUE(client.WaitFinished(1));
  EXPECT_EQ(client.tokens(1), Reference(Prompt(100), 6));
}

TEST_P(WorkerTest, EightSessionsDoNotTouchEachOther) {
  for (const BatchPolicy policy : {BatchPolicy::kExact, BatchPolicy::kShared}) {
    WorkerSpec spec;
    spec.engine.max_sessions = 8;
    spec.engine.batch_policy = policy;
    const auto endpoints = Chain({3, 6}, spec);
    std::vector<std::unique_ptr<TestClient>> clients;
    for (int i = 0; i < 8; ++i) {
      clients.push_back(
          std::make_unique<TestClient>(cluster_.get(), endpoints, absl::StrCat("s", i)));
    }
    for (auto& client : clients) ASSERT_TRUE(client->Opened());
    for (int i = 0; i < 8; ++i) clients[i]->Generate(1, Prompt(10 + 15 * i, i), 12);
    for (auto& client : clients) ASSERT_TRUE(client->WaitFinished(1));
    for (int i = 0; i < 8; ++i) {
      EXPECT_EQ(clients[i]->tokens(1), Reference(Prompt(10 + 15 * i, i), 12)) << i;
    }
    for (auto& client : clients) EXPECT_TRUE(client->Close());
    EXPECT_TRUE(AllFree(endpoints));
  }
}

// ---- Requests that are refused and leave the session as it is ----

TEST_P(WorkerTest, RefusesOneGenerationAndKeepsTheSession) {
  const auto endpoints = Chain({4});
  TestClient client(cluster_.get(), endpoints);
  ASSERT_TRUE(client.Opened());
  const auto refused = [&](uint64_t number, const std::vector<int32_t>& prompt, uint32_t max_tokens,
                           uint32_t start, const v1::SamplingParams& sampling = {}) {
    v1::Generate request;
    request.set_generation(number);
    request.mutable_token_ids()->Add(prompt.begin(), prompt.end());
    request.set_max_tokens(max_tokens);
    request.set_start_position(start);
    *request.mutable_sampling() = sampling;
    client.Generate(request);
    EXPECT_TRUE(client.WaitError(number));
    return client.error(number)->reason();
  };
  EXPECT_EQ(refused(1, {}, 4, 0), v1::REASON_FIELD_OUT_OF_BOUNDS);
  EXPECT_EQ(refused(2, {1}, 0, 0), v1::REASON_FIELD_OUT_OF_BOUNDS);
  EXPECT_EQ(refused(3, {320}, 4, 0), v1::REASON_TOKEN_OUT_OF_RANGE);
  EXPECT_EQ(refused(4, {-1}, 4, 0), v1::REASON_TOKEN_OUT_OF_RANGE);
  EXPECT_EQ(refused(5, {1}, 4, 1), v1::REASON_CACHE_MISS);
  EXPECT_EQ(refused(6, {1}, 1024, 0), v1::REASON_CONTEXT_EXCEEDED);
  v1::SamplingParams sampling;
  sampling.set_temperature(11.0f);
  EXPECT_EQ(refused(7, {1}, 4, 0, sampling), v1::REASON_SAMPLING_INVALID);
  client.Generate(8, {1}, 1023);
  client.Generate(9, {1}, 4);
  EXPECT_TRUE(client.WaitError(9));
  EXPECT_EQ(client.error(9)->reason(), v1::REASON_LIFECYCLE_VIOLATION);
  client.CancelGeneration(8);
  ASSERT_TRUE(client.WaitFinished(8));
  EXPECT_EQ(refused(7, {1}, 4, 0), v1::REASON_SAMPLING_INVALID) << "the first refusal of 7";
  client.Generate(10, {1, 2}, 3);
  ASSERT_TRUE(client.WaitFinished(10));
  EXPECT_THAT(client.tokens(10), SizeIs(3));
  EXPECT_TRUE(client.Close());
}

// ---- Opening ----

TEST_P(WorkerTest, RefusesRoutesThatDoNotFit) {
  const auto endpoints = Chain({3, 6});
  const v1::OpenSession good = MakeOpen(*cluster_, endpoints, "s");
  const auto refused = [&](const std::function<void(v1::OpenSession*)>& change) {
    v1::OpenSession open = good;
    change(&open);
    TestClient client(cluster_.get(), endpoints[0], open);
    EXPECT_TRUE(client.WaitError());
    const v1::Reason reason = client.error()->reason();
    // Both carry the same: the message and the status.
    EXPECT_EQ(client.stream().closed_reason(), reason);
    return reason;
  };
  EXPECT_EQ(refused([](auto* o) { o->set_schema_version(2); }),
            v1::REASON_SCHEMA_VERSION_UNSUPPORTED);
  EXPECT_EQ(refused([](auto* o) { o->set_work_id("a b"); }), v1::REASON_FIELD_OUT_OF_BOUNDS);
  EXPECT_EQ(refused([](auto* o) { o->mutable_route()->set_route_epoch(0); }),
            v1::REASON_ROUTE_INVALID);
  EXPECT_EQ(refused([](auto* o) { o->mutable_route()->set_route_session_id("short"); }),
            v1::REASON_ROUTE_INVALID);
  EXPECT_EQ(refused([](auto* o) { o->mutable_route()->clear_hops(); }), v1::REASON_ROUTE_INVALID);
  EXPECT_EQ(refused([](auto* o) { o->mutable_route()->mutable_hops()->RemoveLast(); }),
            v1::REASON_ROUTE_INVALID);
  EXPECT_EQ(refused([](auto* o) { o->mutable_route()->set_artifact_sha256(std::string(64, 'a')); }),
            v1::REASON_ARTIFACT_MISMATCH);
  EXPECT_EQ(
      refused([](auto* o) { o->mutable_route()->set_recipe_fingerprint(std::string(64, 'a')); }),
      v1::REASON_RECIPE_MISMATCH);
  EXPECT_EQ(refused([](auto* o) {
              o->mutable_route()->mutable_hops(0)->mutable_range()->set_end(4);
              o->mutable_route()->mutable_hops(1)->mutable_range()->set_begin(4);
            }),
            v1::REASON_RANGE_MISMATCH);
  EXPECT_EQ(refused([](auto* o) { o->mutable_limits()->set_max_frame_bytes(100); }),
            v1::REASON_FIELD_OUT_OF_BOUNDS);
  // A fault that only the last stage can see: hops 1 and 2 are not who they should be.
  EXPECT_EQ(refused([](auto* o) {
              o->mutable_route()->mutable_hops(1)->mutable_range()->set_end(5);
              o->mutable_route()->mutable_hops(2)->mutable_range()->set_begin(5);
            }),
            v1::REASON_RANGE_MISMATCH);
  EXPECT_TRUE(AllFree(endpoints));
  ExpectServes(endpoints);
}

TEST_P(WorkerTest, LaterStagesCheckTheirOwnIdentity) {
  WorkerSpec other;
  other.engine.artifact_name = "another";
  WorkerSpec spec;
  spec.range = {0, 4};
  const std::string head = cluster_->Add(spec);
  other.range = {4, 8};
  const std::string stranger = cluster_->Add(other);
  spec.range = {4, 8};
  const std::string tail = cluster_->Add(spec);
  v1::OpenSession open = MakeOpen(*cluster_, {head, tail}, "s");
  open.mutable_route()->mutable_hops(1)->set_endpoint(stranger);
  TestClient client(cluster_.get(), head, open);
  ASSERT_TRUE(client.WaitError());
  EXPECT_EQ(client.error()->reason(), v1::REASON_ARTIFACT_MISMATCH);
  EXPECT_EQ(client.error()->stage_begin(), 4);
  EXPECT_EQ(client.error()->stage_end(), 8);
  EXPECT_TRUE(AllFree({head, stranger, tail}));
  ExpectServes({head, tail});
}

TEST_P(WorkerTest, TheSmallestLimitsOfTheRouteHold) {
  WorkerSpec spec;
  spec.range = {0, 3};
  const std::string head = cluster_->Add(spec);
  spec.range = {3, 6};
  const std::string middle = cluster_->Add(spec);
  spec.range = {6, 8};
  spec.worker.limits.max_frame_bytes = 8192;
  spec.worker.limits.max_inflight_steps = 2;
  spec.worker.limits.max_step_tokens = 8;
  const std::string tail = cluster_->Add(spec);
  TestClient client(cluster_.get(), {head, middle, tail});
  ASSERT_TRUE(client.Opened());
  const v1::SessionOpened opened = client.events()[0].opened();
  EXPECT_EQ(opened.limits().max_frame_bytes(), 8192);
  EXPECT_EQ(opened.limits().max_inflight_steps(), 2);
  EXPECT_EQ(opened.prefill_chunk_tokens(), 8);
  client.Generate(1, Prompt(50), 5);
  ASSERT_TRUE(client.WaitFinished(1));
  EXPECT_EQ(client.tokens(1), Reference(Prompt(50), 5));
}

TEST_P(WorkerTest, SlotsAreBounded) {
  WorkerSpec spec;
  spec.engine.max_sessions = 2;
  spec.engine.lru_min_idle = absl::Hours(1);
  const auto endpoints = Chain({4}, spec);
  auto a = std::make_unique<TestClient>(cluster_.get(), endpoints, "a");
  TestClient b(cluster_.get(), endpoints, "b");
  ASSERT_TRUE(a->Opened());
  ASSERT_TRUE(b.Opened());
  TestClient c(cluster_.get(), endpoints, "c");
  ASSERT_TRUE(c.WaitError());
  EXPECT_EQ(c.error()->reason(), v1::REASON_SESSIONS_EXHAUSTED);
  // A place that is given back is free at once.
  ASSERT_TRUE(a->Close());
  TestClient d(cluster_.get(), endpoints, "d");
  EXPECT_TRUE(d.Opened());
}

TEST_P(WorkerTest, IdleSessionsGiveWayToNewOnes) {
  WorkerSpec spec;
  spec.engine.max_sessions = 1;
  spec.engine.lru_min_idle = absl::ZeroDuration();
  const auto endpoints = Chain({4}, spec);
  TestClient old(cluster_.get(), endpoints, "old");
  ASSERT_TRUE(old.Opened());
  TestClient young(cluster_.get(), endpoints, "young");
  ASSERT_TRUE(young.Opened());
  ASSERT_TRUE(old.WaitError());
  EXPECT_EQ(old.error()->reason(), v1::REASON_SESSION_EVICTED);
  young.Generate(1, {1}, 3);
  EXPECT_TRUE(young.WaitFinished(1));
}

TEST_P(WorkerTest, EpochsOnlyGoForward) {
  const auto endpoints = Chain({3, 6});
  TestClient second(cluster_.get(), endpoints, "s", 2);
  ASSERT_TRUE(second.Opened());
  TestClient same(cluster_.get(), endpoints, "s", 2);
  ASSERT_TRUE(same.WaitError());
  EXPECT_EQ(same.error()->reason(), v1::REASON_SESSION_EXISTS);
  TestClient first(cluster_.get(), endpoints, "s", 1);
  ASSERT_TRUE(first.WaitError());
  EXPECT_EQ(first.error()->reason(), v1::REASON_STALE_EPOCH);
  second.Generate(1, {1, 2}, 3);
  ASSERT_TRUE(second.WaitFinished(1)) << "the refusals disturbed the session that was there";
  TestClient third(cluster_.get(), endpoints, "s", 3);
  ASSERT_TRUE(third.Opened());
  ASSERT_TRUE(second.WaitError());
  EXPECT_EQ(second.error()->reason(), v1::REASON_STALE_EPOCH);
  third.Generate(1, {1, 2}, 3);
  ASSERT_TRUE(third.WaitFinished(1));
  EXPECT_EQ(third.tokens(1), second.tokens(1));
  EXPECT_TRUE(third.Close());
  EXPECT_TRUE(AllFree(endpoints));
}

class Doorkeeper : public Authorizer {
 public:
  absl::Status Authorize(absl::string_view action, const PeerInfo&, const SessionKey&,
                         std::optional<uint32_t>) override {
    if (action != refused) return absl::OkStatus();
    return MakeError(v1::REASON_UNAUTHENTICATED, "expected somebody else");
  }
  std::string refused;
};

TEST_P(WorkerTest, TheAuthorizationHookIsAskedOnEveryStage) {
  Doorkeeper at_head;
  Doorkeeper at_tail;
  WorkerSpec spec;
  spec.range = {0, 4};
  spec.authorizer = &at_head;
  const std::string head = cluster_->Add(spec);
  spec.range = {4, 8};
  spec.authorizer = &at_tail;
  const std::string tail = cluster_->Add(spec);
  const auto outcome = [&](const std::string& head_refuses, const std::string& tail_refuses) {
    at_head.refused = head_refuses;
    at_tail.refused = tail_refuses;
    TestClient client(cluster_.get(), {head, tail});
    if (client.Opened()) {
      // The doorkeepers hear of a session's end, and live no longer than this test.
      EXPECT_TRUE(client.Close());
      return v1::REASON_UNSPECIFIED;
    }
    EXPECT_TRUE(client.WaitError());
    EXPECT_TRUE(AllFree({head, tail}));
    return client.error()->reason();
  };
  EXPECT_EQ(outcome("Session", ""), v1::REASON_UNAUTHENTICATED);
  EXPECT_EQ(outcome("", "Seam"), v1::REASON_UNAUTHENTICATED);
  EXPECT_EQ(outcome("", "Return"), v1::REASON_UNAUTHENTICATED);
  EXPECT_EQ(outcome("Seam", "Session"), v1::REASON_UNSPECIFIED);
}

// ---- Ends ----

TEST_P(WorkerTest, CancelledGenerationLeavesAUsableSession) {
  const auto endpoints = Chain({3, 6});
  TestClient client(cluster_.get(), endpoints);
  ASSERT_TRUE(client.Opened());
  client.Generate(1, Prompt(200), 500);
  ASSERT_TRUE(client.WaitTokens(1, 5));
  client.CancelGeneration(1);
  ASSERT_TRUE(client.WaitFinished(1));
  EXPECT_EQ(client.finished(1)->reason(), v1::FINISH_REASON_CANCELLED);
  const uint32_t cached = client.finished(1)->cached_tokens();
  EXPECT_GE(cached, 204);
  // During prefill.
  client.Generate(2, Prompt(600, 3), 400);
  client.CancelGeneration(2);
  ASSERT_TRUE(client.WaitFinished(2));
  EXPECT_EQ(client.finished(2)->reason(), v1::FINISH_REASON_CANCELLED);
  client.Generate(3, Prompt(40, 5), 6);
  ASSERT_TRUE(client.WaitFinished(3));
  EXPECT_EQ(client.tokens(3), Reference(Prompt(40, 5), 6));
  // One that is over already.
  client.CancelGeneration(3);
  client.Generate(4, {1}, 2);
  ASSERT_TRUE(client.WaitFinished(4));
  EXPECT_TRUE(client.Close());
  EXPECT_TRUE(AllFree(endpoints));
}

TEST_P(WorkerTest, CacheSurvivesACancelledGeneration) {
  const auto endpoints = Chain({4});
  TestClient client(cluster_.get(), endpoints);
  ASSERT_TRUE(client.Opened());
  client.Generate(1, Prompt(50), 900);
  ASSERT_TRUE(client.WaitTokens(1, 7));
  client.CancelGeneration(1);
  ASSERT_TRUE(client.WaitFinished(1));
  std::vector<int32_t> all = Prompt(50);
  const std::vector<int32_t> said = client.tokens(1);
  all.insert(all.end(), said.begin(), said.begin() + 4);
  all.push_back(33);
  client.Generate(2, {33}, 5, 54);
  ASSERT_TRUE(client.WaitFinished(2));
  EXPECT_EQ(client.tokens(2), Reference(all, 5));
}

TEST_P(WorkerTest, AClientThatGoesAwayFreesEveryStageAndDisturbsNobody) {
  const auto endpoints = Chain({3, 6});
  TestClient stays(cluster_.get(), endpoints, "stays");
  TestClient leaves(cluster_.get(), endpoints, "leaves");
  ASSERT_TRUE(stays.Opened());
  ASSERT_TRUE(leaves.Opened());
  stays.Generate(1, Prompt(60), 40);
  leaves.Generate(1, Prompt(60), 900);
  ASSERT_TRUE(leaves.WaitTokens(1, 3));
  leaves.Abort();
  EXPECT_TRUE(cluster_->WaitUntil([&] {
    return std::all_of(endpoints.begin(), endpoints.end(), [&](const auto& endpoint) {
      return cluster_->open_sessions(endpoint) == 1;
    });
  }));
  ASSERT_TRUE(stays.WaitFinished(1));
  EXPECT_EQ(stays.tokens(1), Reference(Prompt(60), 40));
  EXPECT_TRUE(stays.Close());
  EXPECT_TRUE(AllFree(endpoints));
  EXPECT_EQ(cluster_->worker(endpoints[0]).GetMetrics().sessions_cancelled(), 1);
  // The others may see the seam or the return stream break first.
  for (const auto& endpoint : endpoints) {
    const v1::Metrics metrics = cluster_->worker(endpoint).GetMetrics();
    EXPECT_EQ(metrics.sessions_cancelled() + metrics.sessions_failed(), 1);
    EXPECT_EQ(metrics.sessions_completed(), 1);
  }
}

TEST_P(WorkerTest, HalfCloseWaitsForTheRunningGeneration) {
  const auto endpoints = Chain({3, 6});
  TestClient client(cluster_.get(), endpoints);
  ASSERT_TRUE(client.Opened());
  client.Generate(1, Prompt(60), 30);
  ASSERT_TRUE(client.Close());
  EXPECT_EQ(client.finished(1)->reason(), v1::FINISH_REASON_LENGTH);
  EXPECT_THAT(client.closed_event()->receipts(), SizeIs(3));
  // `closed` comes after every stage has let go.
  for (const auto& endpoint : endpoints) EXPECT_EQ(cluster_->open_sessions(endpoint), 0);
}

TEST_P(WorkerTest, CancelByKeyWorksAtEveryStage) {
  const auto endpoints = Chain({3, 6});
  for (size_t i = 0; i < endpoints.size(); ++i) {
    TestClient client(cluster_.get(), endpoints, absl::StrCat("s", i), 5);
    ASSERT_TRUE(client.Opened());
    client.Generate(1, Prompt(10), 900);
    ASSERT_TRUE(client.WaitTokens(1, 2));
    v1::CancelSessionRequest request;
    request.set_route_session_id(SessionId(absl::StrCat("s", i)));
    request.set_route_epoch(4);
    EXPECT_FALSE(cluster_->worker(endpoints[i]).CancelSession(request, {})->found())
        << "an older epoch than the session's";
    request.set_route_epoch(5);
    EXPECT_TRUE(cluster_->worker(endpoints[i]).CancelSession(request, {})->found());
    EXPECT_FALSE(cluster_->worker(endpoints[i]).CancelSession(request, {})->found());
    ASSERT_TRUE(client.WaitError());
    EXPECT_EQ(client.error()->reason(), v1::REASON_CANCELLED);
    EXPECT_EQ(client.error()->stage_begin(), std::vector<uint32_t>({0, 3, 6})[i]);
    EXPECT_TRUE(AllFree(endpoints));
  }
  v1::CancelSessionRequest bad;
  bad.set_route_session_id("short");
  bad.set_route_epoch(1);
  EXPECT_EQ(ReasonOf(cluster_->worker(endpoints[0]).CancelSession(bad, {}).status()),
            v1::REASON_FIELD_OUT_OF_BOUNDS);
}

TEST_P(WorkerTest, ReleaseByKeyEndsInGoodOrderAtTheHead) {
  const auto endpoints = Chain({4});
  TestClient client(cluster_.get(), endpoints);
  ASSERT_TRUE(client.Opened());
  client.Generate(1, Prompt(10), 900);
  ASSERT_TRUE(client.WaitTokens(1, 2));
  v1::ReleaseSessionRequest request;
  request.set_route_session_id(SessionId("s"));
  request.set_route_epoch(1);
  EXPECT_TRUE(cluster_->worker(endpoints[0]).ReleaseSession(request, {})->found());
  ASSERT_TRUE(cluster_->WaitUntil([&] { return client.stream().closed(); }));
  EXPECT_EQ(client.finished(1)->reason(), v1::FINISH_REASON_CANCELLED);
  EXPECT_THAT(client.closed_event()->receipts(), SizeIs(2));
  EXPECT_TRUE(AllFree(endpoints));
  EXPECT_FALSE(cluster_->worker(endpoints[0]).ReleaseSession(request, {})->found());
}

TEST_P(WorkerTest, DeadlinesEndSessionsEverywhere) {
  const auto endpoints = Chain({3, 6});
  v1::OpenSession open = MakeOpen(*cluster_, endpoints, "s");
  // Long enough to get that far on a busy machine.
  open.set_deadline_ms(2000);
  TestClient client(cluster_.get(), endpoints[0], open);
  ASSERT_TRUE(client.Opened());
  cluster_->PassTime(absl::Milliseconds(1999));
  EXPECT_FALSE(client.error().has_value());
  cluster_->PassTime(absl::Milliseconds(2));
  ASSERT_TRUE(client.WaitError());
  EXPECT_EQ(client.error()->reason(), v1::REASON_DEADLINE_EXCEEDED);
  EXPECT_TRUE(AllFree(endpoints));
  ExpectServes(endpoints);
}

TEST_P(WorkerTest, IdleSessionsAreEvicted) {
  const auto endpoints = Chain({3, 6});
  v1::OpenSession open = MakeOpen(*cluster_, endpoints, "s");
  // Long enough to get that far on a busy machine.
  open.set_idle_ttl_ms(2000);
  TestClient client(cluster_.get(), endpoints[0], open);
  ASSERT_TRUE(client.Opened());
  client.Generate(1, Prompt(5), 2);
  ASSERT_TRUE(client.WaitFinished(1));
  cluster_->PassTime(absl::Milliseconds(2500));
  ASSERT_TRUE(client.WaitError());
  EXPECT_EQ(client.error()->reason(), v1::REASON_SESSION_EVICTED);
  EXPECT_TRUE(AllFree(endpoints));
  ExpectServes(endpoints);
}

// ---- Stages that die ----

TEST_P(WorkerTest, DeathOfAStageIsAnErrorNotAHang) {
  enum Moment { kIdle, kPrefill, kDecode };
  for (const Moment moment : {kIdle, kPrefill, kDecode}) {
    for (size_t victim = 1; victim < 3; ++victim) {
      SCOPED_TRACE(absl::StrCat("moment ", moment, ", victim ", victim));
      const auto endpoints = Chain({3, 6});
      TestClient client(cluster_.get(), endpoints);
      ASSERT_TRUE(client.Opened());
      if (moment == kPrefill) {
        cluster_->PauseEngine(endpoints[2], true);
        client.Generate(1, Prompt(900), 50);
        cluster_->WaitUntil(
            [&] { return cluster_->worker(endpoints[1]).GetMetrics().prefill_tokens() >= 32; });
      } else if (moment == kDecode) {
        client.Generate(1, Prompt(40), 900);
        ASSERT_TRUE(client.WaitTokens(1, 3));
      }
      cluster_->Kill(endpoints[victim]);
      ASSERT_TRUE(client.WaitError());
      EXPECT_EQ(client.error()->reason(), v1::REASON_PEER_LOST) << client.error()->message();
      const size_t survivor = 3 - victim;
      if (survivor == 2) cluster_->PauseEngine(endpoints[2], false);
      EXPECT_TRUE(AllFree({endpoints[0], endpoints[survivor]}));
      // A new one in its place is found at once.
      cluster_->Restart(endpoints[victim]);
      ExpectServes(endpoints);
    }
  }
}

TEST_P(WorkerTest, DeathOfTheHeadFreesTheOthers) {
  const auto endpoints = Chain({3, 6});
  TestClient client(cluster_.get(), endpoints);
  ASSERT_TRUE(client.Opened());
  client.Generate(1, Prompt(40), 900);
  ASSERT_TRUE(client.WaitTokens(1, 3));
  cluster_->Kill(endpoints[0]);
  EXPECT_TRUE(cluster_->WaitUntil([&] { return client.stream().closed(); }));
  EXPECT_TRUE(AllFree({endpoints[1], endpoints[2]}));
  cluster_->Restart(endpoints[0]);
  ExpectServes(endpoints);
}

TEST_P(WorkerTest, AStageThatIsNotThereIsNamed) {
  const auto endpoints = Chain({3, 6});
  for (size_t victim = 1; victim < 3; ++victim) {
    const v1::OpenSession open = MakeOpen(*cluster_, endpoints, absl::StrCat("s", victim));
    cluster_->Kill(endpoints[victim]);
    TestClient client(cluster_.get(), endpoints[0], open);
    ASSERT_TRUE(client.WaitError());
    EXPECT_EQ(client.error()->reason(), v1::REASON_PEER_UNREACHABLE);
    EXPECT_EQ(client.error()->stage_begin(), victim == 1 ? 3 : 6);
    cluster_->Restart(endpoints[victim]);
    ExpectServes(endpoints, absl::StrCat("next", victim));
  }
}

// ---- Engines that misbehave ----

TEST_P(WorkerTest, NothingThatAnEngineMakesUpIsSentOn) {
  using Malformed = FakeEngineOptions::Malformed;
  struct Case {
    Malformed malformed;
    size_t stage;
  };
  for (const Case& c : {Case{Malformed::kNonFinite, 0}, Case{Malformed::kWrongWidth, 1},
                        Case{Malformed::kBadToken, 2}}) {
    std::vector<std::string> endpoints;
    const std::vector<LayerRange> ranges = {{0, 3}, {3, 6}, {6, 8}};
    for (size_t i = 0; i < 3; ++i) {
      WorkerSpec spec;
      spec.range = ranges[i];
      if (i == c.stage) spec.engine.malformed = c.malformed;
      endpoints.push_back(cluster_->Add(spec));
    }
    TestClient client(cluster_.get(), endpoints);
    ASSERT_TRUE(client.Opened());
    client.Generate(1, Prompt(10), 5);
    ASSERT_TRUE(client.WaitError());
    EXPECT_EQ(client.error()->reason(), v1::REASON_ENGINE_OUTPUT_INVALID)
        << client.error()->message();
    EXPECT_EQ(client.error()->stage_begin(), ranges[c.stage].begin);
    EXPECT_TRUE(AllFree(endpoints));
  }
}

TEST_P(WorkerTest, AFailedStepEndsItsSessionOnly) {
  WorkerSpec spec;
  spec.range = {0, 4};
  const std::string head = cluster_->Add(spec);
  spec.range = {4, 8};
  spec.engine.fail_from_step = 5;
  spec.engine.fail_steps = 1;
  const std::string tail = cluster_->Add(spec);
  TestClient client(cluster_.get(), {head, tail});
  ASSERT_TRUE(client.Opened());
  client.Generate(1, Prompt(10), 50);
  ASSERT_TRUE(client.WaitError());
  EXPECT_EQ(client.error()->reason(), v1::REASON_ENGINE_FAILURE);
  EXPECT_EQ(client.error()->stage_begin(), 4);
  EXPECT_THAT(client.tokens(1), SizeIs(4));
  EXPECT_TRUE(AllFree({head, tail}));
  ExpectServes({head, tail});
}

// ---- Shutdown ----

TEST_P(WorkerTest, DrainsInGoodOrder) {
  const auto endpoints = Chain({4});
  TestClient idle(cluster_.get(), endpoints, "idle");
  TestClient busy(cluster_.get(), endpoints, "busy");
  ASSERT_TRUE(idle.Opened());
  ASSERT_TRUE(busy.Opened());
  busy.Generate(1, Prompt(40), 60);
  ASSERT_TRUE(busy.WaitTokens(1, 1));
  const v1::OpenSession late = MakeOpen(*cluster_, endpoints, "late");
  cluster_->worker(endpoints[0]).BeginDrain(absl::InfiniteFuture());
  EXPECT_EQ(cluster_->worker(endpoints[0]).GetHealth().state(), v1::WORKER_STATE_DRAINING);
  TestClient refused(cluster_.get(), endpoints[0], late);
  ASSERT_TRUE(refused.WaitError());
  EXPECT_EQ(refused.error()->reason(), v1::REASON_DRAINING);
  EXPECT_GT(refused.error()->retry_after_ms(), 0);
  ASSERT_TRUE(idle.WaitError());
  EXPECT_EQ(idle.error()->reason(), v1::REASON_DRAINING);
  ASSERT_TRUE(busy.WaitError());
  EXPECT_THAT(busy.tokens(1), SizeIs(60)) << "the running generation comes to its end";
  EXPECT_TRUE(cluster_->WaitUntil([&] { return !cluster_->worker(endpoints[0]).is_busy(); }));
  EXPECT_TRUE(AllFree(endpoints));
}

TEST_P(WorkerTest, TheDrainDeadlineEndsWhatStillRuns) {
  const auto endpoints = Chain({4});
  TestClient busy(cluster_.get(), endpoints, "busy");
  ASSERT_TRUE(busy.Opened());
  cluster_->PauseEngine(endpoints[1], true);
  busy.Generate(1, Prompt(40), 900);
  cluster_->worker(endpoints[0]).BeginDrain(absl::InfinitePast());
  cluster_->PassTime(absl::Milliseconds(1));
  ASSERT_TRUE(busy.WaitError());
  EXPECT_EQ(busy.error()->reason(), v1::REASON_DRAINING);
  cluster_->PauseEngine(endpoints[1], false);
  EXPECT_TRUE(AllFree(endpoints));
}

// ---- Readers that stall ----

TEST_P(WorkerTest, MetricsCountWhatCrossesTheSeam) {
  const auto endpoints = Chain({4});
  TestClient client(cluster_.get(), endpoints);
  ASSERT_TRUE(client.Opened());
  client.Generate(1, {1}, 2);
  ASSERT_TRUE(client.WaitFinished(1));
  const auto bytes = [&] {
    return cluster_->worker(endpoints[0]).GetMetrics().seam_bytes_sent() +
           cluster_->worker(endpoints[1]).GetMetrics().seam_bytes_sent() +
           cluster_->worker(endpoints[1]).GetMetrics().return_bytes_sent();
  };
  const uint64_t before = bytes();
  client.Generate(2, {1}, 101, 1);
  ASSERT_TRUE(client.WaitFinished(2));
  const uint64_t boundary = 16 * sizeof(float) + 2 * sizeof(int32_t);
  // 101 tokens: one step of prefill and 100 of decode.
  EXPECT_LE(bytes() - before, 101 * (boundary + 256));
  const v1::Metrics head = cluster_->worker(endpoints[0]).GetMetrics();
  const v1::Metrics tail = cluster_->worker(endpoints[1]).GetMetrics();
  EXPECT_EQ(head.decode_tokens(), 101);
  EXPECT_EQ(tail.seam_bytes_received(), head.seam_bytes_sent());
  EXPECT_EQ(head.sessions_opened(), 1);
}

INSTANTIATE_TEST_SUITE_P(Transports, WorkerTest,
                         ::testing::Values(Transport{"memory", false, {}},
                                           Transport{"shuffled1", false, {1 << 20, 1}},
                                           Transport{"shuffled2", false, {1 << 20, 2}},
                                           Transport{"shuffled3", false, {1 << 20, 3}},
                                           Transport{"grpc", true, {}}),
                         [](const auto& transport) { return transport.param.name; });

}  // namespace
}  // namespace meshnet::worker
