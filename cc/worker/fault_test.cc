// Lines that stall, break, lose and change what they carry; peers that never answer; a relay in the
// middle. In memory only: here the test is the network and the clock.
#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/common/status.h"
#include "cc/worker/seam_peer.h"
#include "cc/worker/test_cluster.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace meshnet::worker {
namespace {

using ::testing::AnyOf;
using ::testing::SizeIs;

std::vector<int32_t> Prompt(size_t size) {
  std::vector<int32_t> prompt(size);
  for (size_t i = 0; i < size; ++i) prompt[i] = static_cast<int32_t>(i % 200);
  return prompt;
}

class FaultTest : public ::testing::Test {
 protected:
  FaultTest() { Start({}); }

  void Start(const FakeNetwork::Options& options, WorkerSpec spec = {}) {
    cluster_ = MakeMemoryCluster(options, &network_);
    spec.range = {0, 3};
    endpoints_ = {cluster_->Add(spec)};
    spec.range = {3, 6};
    endpoints_.push_back(cluster_->Add(spec));
    spec.range = {6, 8};
    endpoints_.push_back(cluster_->Add(spec));
  }

  bool AllFree() {
    return cluster_->WaitUntil([&] {
      return std::all_of(endpoints_.begin(), endpoints_.end(), [&](const auto& endpoint) {
        return cluster_->open_sessions(endpoint) == 0;
      });
    });
  }
  void RunUntilQuiet() {
    cluster_->WaitUntil([] { return false; });
  }
  void ExpectServes() {
    TestClient client(cluster_.get(), endpoints_, "next");
    ASSERT_TRUE(client.Opened());
    client.Generate(1, {1, 2, 3}, 4);
    ASSERT_TRUE(client.WaitFinished(1));
    EXPECT_TRUE(client.Close());
    EXPECT_TRUE(AllFree());
  }

  FakeNetwork* network_ = nullptr;
  std::unique_ptr<TestCluster> cluster_;
  std::vector<std::string> endpoints_;
};

TEST_F(FaultTest, AClientThatDoesNotReadStopsTheDecodeLoopNotTheWorker) {
  FakeNetwork::Options options;
  options.outbound_bytes = 2000;
  Start(options);
  TestClient slow(cluster_.get(), endpoints_, "slow");
  ASSERT_TRUE(slow.Opened());
  network_->Stall(endpoints_[0], Method::kSession, Direction::kToClient, true);
  slow.Generate(1, {1, 2, 3}, 1000);
  RunUntilQuiet();
  // Not more than the bound and one event over it.
  EXPECT_LT(network_->queued_bytes(), 2100);
  const uint64_t decoded = cluster_->worker(endpoints_[0]).GetMetrics().decode_tokens();
  EXPECT_GT(decoded, 10);
  EXPECT_LT(decoded, 200);
  network_->Stall(endpoints_[0], Method::kSession, Direction::kToClient, false);
  ASSERT_TRUE(slow.WaitFinished(1));
  EXPECT_THAT(slow.tokens(1), SizeIs(1000));
}

TEST_F(FaultTest, AClientThatDoesNotTakeItsErrorIsLeft) {
  TestClient client(cluster_.get(), endpoints_);
  ASSERT_TRUE(client.Opened());
  network_->Stall(endpoints_[0], Method::kSession, Direction::kToClient, true);
  v1::CancelSessionRequest request;
  request.set_route_session_id(SessionId("s"));
  request.set_route_epoch(1);
  ASSERT_TRUE(cluster_->worker(endpoints_[0]).CancelSession(request, {})->found());
  EXPECT_TRUE(AllFree());
  cluster_->PassTime(absl::Milliseconds(1900));
  RunUntilQuiet();
  EXPECT_FALSE(client.stream().closed());
  cluster_->PassTime(absl::Milliseconds(200));
  RunUntilQuiet();
  EXPECT_TRUE(client.stream().closed());
}

TEST_F(FaultTest, AWorkerThatDrainsIsBusyUntilItsPeersKnow) {
  Worker& head = cluster_->worker(endpoints_[0]);
  EXPECT_FALSE(head.is_busy());
  TestClient client(cluster_.get(), endpoints_);
  ASSERT_TRUE(client.Opened());
  const TestStream silent = cluster_->Dial(Method::kSession, endpoints_[0]);
  network_->Stall(endpoints_[0], Method::kSession, Direction::kToClient, true);
  head.BeginDrain(absl::InfiniteFuture());
  EXPECT_TRUE(AllFree());
  RunUntilQuiet();
  EXPECT_TRUE(head.is_busy());
  network_->Stall(endpoints_[0], Method::kSession, Direction::kToClient, false);
  RunUntilQuiet();
  EXPECT_FALSE(head.is_busy());
  ASSERT_TRUE(client.WaitError());
  EXPECT_EQ(client.error()->reason(), v1::REASON_DRAINING);
  ASSERT_TRUE(silent.closed());
  EXPECT_EQ(silent.closed_reason(), v1::REASON_DRAINING);
}

TEST_F(FaultTest, AStalledSeamHoldsTheStageBeforeIt) {
  TestClient client(cluster_.get(), endpoints_);
  ASSERT_TRUE(client.Opened());
  network_->Stall(endpoints_[1], Method::kSeam, Direction::kToServer, true);
  client.Generate(1, Prompt(900), 4);
  RunUntilQuiet();
  // Four credits: four chunks of 32 are computed and no more.
  EXPECT_EQ(cluster_->worker(endpoints_[0]).GetMetrics().prefill_tokens(), 4 * 32);
  EXPECT_EQ(cluster_->worker(endpoints_[0]).GetMetrics().queued_bytes(), 32 * 4);
  network_->Stall(endpoints_[1], Method::kSeam, Direction::kToServer, false);
  ASSERT_TRUE(client.WaitFinished(1));
  EXPECT_TRUE(client.Close());
}

TEST_F(FaultTest, StalledCreditsHoldTheSender) {
  TestClient client(cluster_.get(), endpoints_);
  ASSERT_TRUE(client.Opened());
  network_->Stall(endpoints_[1], Method::kSeam, Direction::kToClient, true);
  client.Generate(1, Prompt(900), 4);
  RunUntilQuiet();
  EXPECT_EQ(cluster_->worker(endpoints_[2]).GetMetrics().prefill_tokens(), 4 * 32);
  client.CancelGeneration(1);
  ASSERT_TRUE(client.WaitFinished(1));
  network_->Stall(endpoints_[1], Method::kSeam, Direction::kToClient, false);
  client.Generate(2, Prompt(100), 4);
  ASSERT_TRUE(client.WaitFinished(2));
  EXPECT_TRUE(client.Close());
}

TEST_F(FaultTest, AHeadThatDoesNotReadResultsStopsTheTail) {
  FakeNetwork::Options options;
  options.outbound_bytes = 100;
  Start(options);
  SeamPeer peer(cluster_.get(), MakeOpen(*cluster_, endpoints_, "s"), 2);
  ASSERT_TRUE(peer.Opened());
  ASSERT_TRUE(peer.Attach());
  network_->Stall(endpoints_[2], Method::kReturn, Direction::kToClient, true);
  uint64_t step = 0;
  while (true) {
    const uint64_t before = peer.Credits();
    ++step;
    ASSERT_LT(step, 100);
    peer.Send(peer.MakeStep(step, static_cast<uint32_t>(step - 1), {1}));
    RunUntilQuiet();
    if (step > before + 3) break;
  }
  EXPECT_LT(network_->queued_bytes(), 200);
  network_->Stall(endpoints_[2], Method::kReturn, Direction::kToClient, false);
  EXPECT_TRUE(peer.WaitResults(step));
}

TEST_F(FaultTest, DeadlinesHoldWhileAStageIsStalled) {
  v1::OpenSession open = MakeOpen(*cluster_, endpoints_, "s");
  open.set_deadline_ms(5000);
  TestClient client(cluster_.get(), endpoints_[0], open);
  ASSERT_TRUE(client.Opened());
  network_->Stall(endpoints_[2], Method::kSeam, Direction::kToServer, true);
  client.Generate(1, Prompt(500), 4);
  RunUntilQuiet();
  cluster_->PassTime(absl::Seconds(6));
  ASSERT_TRUE(client.WaitError());
  EXPECT_EQ(client.error()->reason(), v1::REASON_DEADLINE_EXCEEDED);
  EXPECT_TRUE(AllFree());
  network_->Stall(endpoints_[2], Method::kSeam, Direction::kToServer, false);
  ExpectServes();
}

TEST_F(FaultTest, ASilentStageIsUnreachableInTime) {
  for (size_t silent = 1; silent < 3; ++silent) {
    const v1::OpenSession open = MakeOpen(*cluster_, endpoints_, absl::StrCat("s", silent));
    network_->Silence(endpoints_[silent]);
    TestClient client(cluster_.get(), endpoints_[0], open);
    RunUntilQuiet();
    cluster_->PassTime(absl::Milliseconds(1400));
    RunUntilQuiet();
    EXPECT_FALSE(client.error().has_value());
    cluster_->PassTime(absl::Milliseconds(200));
    ASSERT_TRUE(client.WaitError());
    EXPECT_EQ(client.error()->reason(), v1::REASON_PEER_UNREACHABLE);
    EXPECT_EQ(client.error()->stage_begin(), silent == 1 ? 3 : 6);
    EXPECT_TRUE(AllFree());
    network_->Listen(endpoints_[silent], &cluster_->worker(endpoints_[silent]));
  }
  ExpectServes();
}

TEST_F(FaultTest, AStageThatAcceptsAndNeverAgreesIsGivenUp) {
  const v1::OpenSession open = MakeOpen(*cluster_, endpoints_, "s");
  cluster_->PauseEngine(endpoints_[1], true);
  TestClient client(cluster_.get(), endpoints_[0], open);
  RunUntilQuiet();
  cluster_->PassTime(absl::Seconds(9));
  RunUntilQuiet();
  EXPECT_FALSE(client.error().has_value());
  cluster_->PassTime(absl::Seconds(2));
  ASSERT_TRUE(client.WaitError());
  EXPECT_EQ(client.error()->reason(), v1::REASON_PEER_UNREACHABLE);
  cluster_->PauseEngine(endpoints_[1], false);
  EXPECT_TRUE(AllFree());
  ExpectServes();
}

TEST_F(FaultTest, AStreamThatSaysNothingIsRefused) {
  std::vector<TestStream> streams;
  for (const Method method : {Method::kSession, Method::kSeam, Method::kReturn}) {
    streams.push_back(cluster_->Dial(method, endpoints_[0]));
  }
  TestClient client(cluster_.get(), endpoints_);
  ASSERT_TRUE(client.Opened());
  cluster_->PassTime(absl::Seconds(9));
  RunUntilQuiet();
  for (const TestStream& stream : streams) EXPECT_FALSE(stream.closed());
  cluster_->PassTime(absl::Seconds(2));
  RunUntilQuiet();
  for (const TestStream& stream : streams) {
    ASSERT_TRUE(stream.closed());
    EXPECT_EQ(stream.closed_reason(), v1::REASON_DEADLINE_EXCEEDED);
  }
  EXPECT_TRUE(client.Close()) << "one that has opened its session may be silent";
}

TEST_F(FaultTest, AStageThatNeverHandsInItsReceiptDoesNotHoldTheOthers) {
  TestClient client(cluster_.get(), endpoints_);
  ASSERT_TRUE(client.Opened());
  network_->Stall(endpoints_[2], Method::kSeam, Direction::kToClient, true);
  client.HalfClose();
  RunUntilQuiet();
  cluster_->PassTime(absl::Seconds(3));
  ASSERT_TRUE(client.WaitError());
  EXPECT_EQ(client.error()->reason(), v1::REASON_PEER_LOST);
  EXPECT_TRUE(AllFree());
}

TEST_F(FaultTest, ABrokenReturnStreamIsAnErrorEvenWhenNobodyExplainsIt) {
  TestClient client(cluster_.get(), endpoints_);
  ASSERT_TRUE(client.Opened());
  client.Generate(1, Prompt(40), 500);
  ASSERT_TRUE(client.WaitTokens(1, 3));
  // The tail is gone and the middle's word about it does not come through.
  network_->Stall(endpoints_[1], Method::kSeam, Direction::kToClient, true);
  network_->Break(endpoints_[2]);
  RunUntilQuiet();
  cluster_->PassTime(absl::Milliseconds(600));
  ASSERT_TRUE(client.WaitError());
  EXPECT_EQ(client.error()->reason(), v1::REASON_PEER_LOST);
}

TEST_F(FaultTest, ChangedBytesAreRefusedAndNamed) {
  bool done = false;
  network_->SetTap([&](const Passing& passing) {
    v1::SeamMessage message;
    if (passing.method != Method::kSeam || passing.endpoint != endpoints_[2] || done ||
        !message.ParseFromString(*passing.bytes) || !message.has_frame()) {
      return TapVerdict::kDeliver;
    }
    done = true;
    std::string* data = message.mutable_frame()->mutable_fragment()->mutable_data();
    data->at(data->size() / 2) ^= 0x10;
    *passing.bytes = message.SerializeAsString();
    return TapVerdict::kDeliver;
  });
  TestClient client(cluster_.get(), endpoints_);
  ASSERT_TRUE(client.Opened());
  client.Generate(1, Prompt(40), 5);
  ASSERT_TRUE(client.WaitError());
  EXPECT_EQ(client.error()->reason(), v1::REASON_CHECKSUM_MISMATCH);
  EXPECT_EQ(client.error()->stage_begin(), 6);
  EXPECT_TRUE(AllFree());
  ExpectServes();
}

// One verdict for the `nth` frame that goes to the tail.
class FrameFaultTest : public FaultTest,
                       public ::testing::WithParamInterface<std::pair<TapVerdict, v1::Reason>> {};

TEST_P(FrameFaultTest, IsRefused) {
  WorkerSpec spec;
  spec.engine.width = 256;
  spec.worker.limits.max_frame_bytes = 4096;
  Start({}, spec);
  int frames = 0;
  network_->SetTap([&](const Passing& passing) {
    v1::SeamMessage message;
    if (passing.method != Method::kSeam || passing.endpoint != endpoints_[2] ||
        !message.ParseFromString(*passing.bytes) || !message.has_frame()) {
      return TapVerdict::kDeliver;
    }
    return ++frames == 3 ? GetParam().first : TapVerdict::kDeliver;
  });
  TestClient client(cluster_.get(), endpoints_);
  ASSERT_TRUE(client.Opened());
  client.Generate(1, Prompt(40), 5);
  ASSERT_TRUE(client.WaitError());
  EXPECT_EQ(client.error()->reason(), GetParam().second) << client.error()->message();
  EXPECT_EQ(client.error()->stage_begin(), 6);
  EXPECT_TRUE(AllFree());
  network_->SetTap(nullptr);
  ExpectServes();
}

INSTANTIATE_TEST_SUITE_P(
    Verdicts, FrameFaultTest,
    ::testing::Values(std::make_pair(TapVerdict::kDrop, v1::REASON_FRAGMENT_OUT_OF_ORDER),
                      std::make_pair(TapVerdict::kDuplicate, v1::REASON_FRAGMENT_DUPLICATE),
                      std::make_pair(TapVerdict::kDelay, v1::REASON_FRAGMENT_OUT_OF_ORDER)));

// One session whose line to one stage breaks, whichever moment that is.
class BreakTest : public FaultTest, public ::testing::WithParamInterface<size_t> {
 protected:
  struct Outcome {
    // Messages that passed the line before it broke, or all that there were.
    int messages = 0;
    bool broke = false;
    // The client was told: a whole answer and the end of the session, or why not.
    bool complete = false;
    v1::Reason reason = v1::REASON_UNSPECIFIED;
    std::vector<int32_t> tokens;
  };

  // Opens, generates and closes; the line breaks with its `nth` message on it, never for 0.
  Outcome Run(int nth) {
    Outcome outcome;
    const std::string endpoint = endpoints_[GetParam()];
    network_->SetTap([&](const Passing& passing) {
      if (passing.endpoint != endpoint || outcome.broke) return TapVerdict::kDeliver;
      return ++outcome.messages == nth ? TapVerdict::kDrop : TapVerdict::kDeliver;
    });
    TestClient client(cluster_.get(), endpoints_);
    bool asked = false;
    bool left = false;
    const auto ended = [&] {
      if (nth > 0 && outcome.messages == nth && !outcome.broke) {
        outcome.broke = true;
        network_->Break(endpoint);
      }
      if (!asked && !client.events().empty() && client.events()[0].has_opened()) {
        asked = true;
        client.Generate(1, Prompt(75), 6);
      }
      if (!left && client.finished(1).has_value()) {
        left = true;
        client.HalfClose();
      }
      return client.stream().closed();
    };
    // The bar: within two seconds, of this network's clock.
    for (int waited = 0; !cluster_->WaitUntil(ended) && waited < 2000; waited += 250) {
      cluster_->PassTime(absl::Milliseconds(250));
    }
    network_->SetTap(nullptr);
    outcome.tokens = client.tokens(1);
    if (!client.stream().closed()) return outcome;
    outcome.complete = client.closed_event().has_value();
    if (client.error().has_value()) {
      outcome.reason = client.error()->reason();
    } else if (!client.stream().handler->closed()->ok()) {
      outcome.reason = client.stream().closed_reason();
    }
    return outcome;
  }

  void ExpectNothingHeld() {
    EXPECT_TRUE(AllFree());
    EXPECT_EQ(network_->queued_bytes(), 0);
    for (const std::string& endpoint : endpoints_) {
      const v1::Metrics metrics = cluster_->worker(endpoint).GetMetrics();
      EXPECT_EQ(metrics.queued_steps(), 0);
      EXPECT_EQ(metrics.queued_bytes(), 0);
      EXPECT_EQ(metrics.kv_bytes(), 0);
    }
  }
};

TEST_P(BreakTest, AtAnyMessageIsToldAndLeavesNothing) {
  const Outcome whole = Run(0);
  ASSERT_TRUE(whole.complete);
  ASSERT_THAT(whole.tokens, SizeIs(6));
  ASSERT_GT(whole.messages, 8);
  for (int nth = 1; nth <= whole.messages; ++nth) {
    SCOPED_TRACE(absl::StrCat("message ", nth, " of ", whole.messages));
    Start({});
    const Outcome outcome = Run(nth);
    ASSERT_TRUE(outcome.broke);
    if (outcome.complete) {
      EXPECT_EQ(outcome.reason, v1::REASON_UNSPECIFIED);
      EXPECT_EQ(outcome.tokens, whole.tokens);
    } else {
      EXPECT_THAT(outcome.reason, AnyOf(v1::REASON_PEER_LOST, v1::REASON_PEER_UNREACHABLE));
      // What came before is right all the same.
      ASSERT_LE(outcome.tokens.size(), whole.tokens.size());
      EXPECT_TRUE(std::equal(outcome.tokens.begin(), outcome.tokens.end(), whole.tokens.begin()));
    }
    RunUntilQuiet();
    ExpectNothingHeld();
    network_->Listen(endpoints_[GetParam()], &cluster_->worker(endpoints_[GetParam()]));
    ExpectServes();
    ExpectNothingHeld();
  }
}

INSTANTIATE_TEST_SUITE_P(Stages, BreakTest, ::testing::Range<size_t>(0, 3));

TEST_F(FaultTest, ARelayPassesTheSameBytes) {
  // What goes to the tail, directly.
  const auto frames_of = [](const std::vector<OpaqueRelay::Record>& records) {
    std::vector<std::string> frames;
    for (const auto& record : records) {
      v1::SeamMessage message;
      if (record.method == Method::kSeam && record.direction == Direction::kToServer &&
          message.ParseFromString(record.bytes) && message.has_frame()) {
        frames.push_back(record.bytes);
      }
    }
    return frames;
  };
  std::map<std::string, std::vector<OpaqueRelay::Record>> seen;
  network_->SetTap([&](const Passing& passing) {
    seen[passing.endpoint].push_back({passing.method, passing.direction, *passing.bytes});
    return TapVerdict::kDeliver;
  });
  const auto run = [&](const v1::OpenSession& open) {
    TestClient client(cluster_.get(), endpoints_[0], open);
    EXPECT_TRUE(client.Opened());
    client.Generate(1, Prompt(75), 12);
    EXPECT_TRUE(client.WaitFinished(1));
    EXPECT_TRUE(client.Close());
    EXPECT_TRUE(AllFree());
    return client.tokens(1);
  };
  v1::OpenSession open = MakeOpen(*cluster_, endpoints_, "s", 1);
  const std::vector<int32_t> direct_tokens = run(open);
  const auto direct = seen[endpoints_[2]];
  seen.clear();

  OpaqueRelay relay(network_->dialer(), endpoints_[2]);
  network_->Listen("relay:1", &relay);
  // The same session again, on workers that have not seen it.
  for (const std::string& endpoint : endpoints_) {
    cluster_->Kill(endpoint);
    cluster_->Restart(endpoint);
  }
  open.mutable_route()->mutable_hops(2)->set_endpoint("relay:1");
  EXPECT_EQ(run(open), direct_tokens);

  const auto same = [](const auto& a, const auto& b) {
    return a.method == b.method && a.direction == b.direction && a.bytes == b.bytes;
  };
  // Into the relay, through it and out of it: the same messages.
  for (const Method method : {Method::kSeam, Method::kReturn}) {
    for (const Direction direction : {Direction::kToServer, Direction::kToClient}) {
      const auto pick = [&](std::vector<OpaqueRelay::Record> records) {
        records.erase(std::remove_if(records.begin(), records.end(),
                                     [&](const auto& record) {
                                       return record.method != method ||
                                              record.direction != direction;
                                     }),
                      records.end());
        return records;
      };
      const auto in = pick(seen["relay:1"]);
      const auto out = pick(seen[endpoints_[2]]);
      const auto through = pick(relay.records());
      EXPECT_FALSE(through.empty());
      EXPECT_TRUE(std::equal(in.begin(), in.end(), through.begin(), through.end(), same));
      EXPECT_TRUE(std::equal(out.begin(), out.end(), through.begin(), through.end(), same));
    }
  }
  // And the frames are those of the direct line.
  EXPECT_THAT(frames_of(direct), SizeIs(3 + 11));
  EXPECT_EQ(frames_of(relay.records()), frames_of(direct));
}

}  // namespace
}  // namespace meshnet::worker
