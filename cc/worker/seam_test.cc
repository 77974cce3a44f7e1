// What a stage does with the messages of a stage before it that does not keep to the protocol.
#include <functional>
#include <memory>
#include <random>
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

class SeamTest : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    cluster_ = GetParam() ? MakeGrpcCluster() : MakeMemoryCluster({});
    WorkerSpec spec;
    spec.range = {0, 3};
    head_ = cluster_->Add(spec);
    spec.range = {3, 6};
    middle_ = cluster_->Add(spec);
    spec.range = {6, 8};
    tail_ = cluster_->Add(spec);
  }

  v1::OpenSession Route(const std::string& tag = "s", uint64_t epoch = 1) {
    return MakeOpen(*cluster_, {head_, middle_, tail_}, tag, epoch);
  }
  // A seam straight to the tail, open, with its return stream.
  std::unique_ptr<SeamPeer> ToTail(const std::string& tag = "s", uint64_t epoch = 1) {
    auto peer = std::make_unique<SeamPeer>(cluster_.get(), Route(tag, epoch), 2);
    EXPECT_TRUE(peer->Opened());
    EXPECT_TRUE(peer->Attach());
    return peer;
  }
  bool AllFree() {
    return cluster_->WaitUntil([&] {
      for (const std::string& endpoint : {head_, middle_, tail_}) {
        if (cluster_->open_sessions(endpoint) != 0) return false;
      }
      return true;
    });
  }
  // The refusal of what `misbehave` does on a fresh open seam to the tail, and that it left
  // nothing.
  v1::Reason Refusal(const std::function<void(SeamPeer&)>& misbehave) {
    const auto peer = ToTail(absl::StrCat("r", ++refusals_));
    misbehave(*peer);
    const v1::Reason reason = peer->WaitRefusal();
    EXPECT_TRUE(AllFree());
    return reason;
  }

  std::unique_ptr<TestCluster> cluster_;
  std::string head_;
  std::string middle_;
  std::string tail_;
  int refusals_ = 0;
};

TEST_P(SeamTest, AnswersStepsOnTheReturnStream) {
  const auto peer = ToTail();
  peer->Send(peer->MakeStep(1, 0, {1, 2, 3}, /*sample=*/false));
  peer->Send(peer->MakeStep(2, 3, {4, 5}));
  peer->Send(peer->MakeStep(3, 5, {6}));
  ASSERT_TRUE(peer->WaitResults(3));
  const auto results = peer->Results();
  EXPECT_EQ(results[0].step(), 1);
  EXPECT_EQ(results[0].cache().cached_tokens(), 3);
  EXPECT_THAT(results[0].tokens(), SizeIs(0));
  EXPECT_EQ(results[1].cache().cached_tokens(), 5);
  EXPECT_THAT(results[1].tokens(), SizeIs(1));
  EXPECT_EQ(results[2].cache().cached_tokens(), 6);
  EXPECT_THAT(results[2].tokens(), SizeIs(1));
}

TEST_P(SeamTest, ARepeatedStepGetsItsRecordedResult) {
  const auto peer = ToTail();
  WireStep sampled = peer->MakeStep(1, 0, {1, 2});
  sampled.sampling.emplace();
  sampled.sampling->temperature = 3.0f;
  peer->Send(sampled);
  peer->Send(sampled);
  peer->Send(sampled);
  ASSERT_TRUE(peer->WaitResults(3));
  for (const v1::StepResult& result : peer->Results()) {
    EXPECT_EQ(result.SerializeAsString(), peer->Results()[0].SerializeAsString());
  }
  // The repeats neither drew from the sampler nor touched the cache.
  peer->Send(peer->MakeStep(2, 2, {9}));
  ASSERT_TRUE(peer->WaitResults(4));
  const auto other = ToTail("other");
  other->Send(sampled = [&] {
    WireStep step = other->MakeStep(1, 0, {1, 2});
    step.sampling = sampled.sampling;
    return step;
  }());
  other->Send(other->MakeStep(2, 2, {9}));
  ASSERT_TRUE(other->WaitResults(2));
  EXPECT_EQ(peer->Results()[3].tokens(0).token_id(), other->Results()[1].tokens(0).token_id());
}

TEST_P(SeamTest, AMiddleStagePassesARepeatOn) {
  SeamPeer peer(cluster_.get(), Route(), 1);
  ASSERT_TRUE(peer.Opened());
  ASSERT_TRUE(peer.Attach());
  const WireStep step = peer.MakeStep(1, 0, {1, 2});
  peer.Send(step);
  peer.Send(step);
  ASSERT_TRUE(peer.WaitResults(2));
  EXPECT_EQ(peer.Results()[0].SerializeAsString(), peer.Results()[1].SerializeAsString());
}

TEST_P(SeamTest, RefusesStepsOutOfTurn) {
  EXPECT_EQ(Refusal([](SeamPeer& p) { p.Send(p.MakeStep(2, 0, {1})); }),
            v1::REASON_STEP_OUT_OF_ORDER);
  EXPECT_EQ(Refusal([&](SeamPeer& p) {
              p.Send(p.MakeStep(1, 0, {1}));
              p.Send(p.MakeStep(2, 1, {2}));
              p.Send(p.MakeStep(1, 0, {1}));
            }),
            v1::REASON_STEP_OUT_OF_ORDER);
  EXPECT_EQ(Refusal([&](SeamPeer& p) {
              p.Send(p.MakeStep(1, 0, {1}));
              p.Send(p.MakeStep(3, 1, {2}));
            }),
            v1::REASON_STEP_OUT_OF_ORDER);
  EXPECT_EQ(Refusal([&](SeamPeer& p) {
              p.Send(p.MakeStep(1, 0, {1}));
              p.Send(p.MakeStep(1, 0, {2}));
            }),
            v1::REASON_STEP_CONFLICT);
  EXPECT_EQ(Refusal([&](SeamPeer& p) {
              WireStep step = p.MakeStep(1, 0, {1});
              p.Send(step);
              step.residual[3] += 1.0f;
              p.Send(step);
            }),
            v1::REASON_STEP_CONFLICT);
  EXPECT_EQ(Refusal([&](SeamPeer& p) {
              p.Send(p.MakeStep(1, 0, {1}));
              v1::SeamMessage cancel;
              cancel.mutable_cancel()->set_through_step(1);
              p.seam.Send(cancel);
              p.Send(p.MakeStep(1, 0, {1}));
            }),
            v1::REASON_STEP_OUT_OF_ORDER);
}

TEST_P(SeamTest, RefusesWhatTheCacheDoesNotHold) {
  EXPECT_EQ(Refusal([](SeamPeer& p) { p.Send(p.MakeStep(1, 5, {1})); }), v1::REASON_CACHE_MISS);
  EXPECT_EQ(Refusal([](SeamPeer& p) {
              p.Send(p.MakeStep(1, 0, {1, 2}));
              p.Send(p.MakeStep(2, 3, {1}));
            }),
            v1::REASON_CACHE_MISS);
}

TEST_P(SeamTest, RefusesFramesThatAreWrong) {
  const auto change = [this](const std::function<void(v1::Frame*)>& f) {
    return Refusal([&](SeamPeer& p) {
      std::vector<v1::SeamMessage> messages = p.Encode(p.MakeStep(1, 0, {1, 2}));
      f(messages[0].mutable_frame());
      p.seam.Send(messages[0]);
    });
  };
  EXPECT_EQ(change([](auto* f) { f->set_route_epoch(2); }), v1::REASON_SESSION_UNKNOWN);
  EXPECT_EQ(change([](auto* f) { f->mutable_route_session_id()->at(0) ^= 1; }),
            v1::REASON_SESSION_UNKNOWN);
  EXPECT_EQ(change([](auto* f) { f->mutable_fragment()->set_checksum(7); }),
            v1::REASON_CHECKSUM_MISMATCH);
  EXPECT_EQ(change([](auto* f) { f->mutable_fragment()->mutable_data()->at(0) ^= 1; }),
            v1::REASON_CHECKSUM_MISMATCH);
  EXPECT_EQ(change([](auto* f) { f->set_phase(static_cast<v1::Phase>(77)); }),
            v1::REASON_UNKNOWN_ENUM_VALUE);
  EXPECT_EQ(
      change([](auto* f) { f->mutable_reserved_state()->mutable_mtp()->set_draft_position(1); }),
      v1::REASON_RESERVED_FIELD_SET);
  EXPECT_EQ(change([](auto* f) { f->set_boundary_schema("other"); }),
            v1::REASON_BOUNDARY_SCHEMA_MISMATCH);
  EXPECT_EQ(change([](auto* f) { f->set_schema_version(9); }),
            v1::REASON_SCHEMA_VERSION_UNSUPPORTED);
  EXPECT_EQ(change([](auto* f) { f->mutable_applied()->set_end(5); }), v1::REASON_RANGE_MISMATCH);
  EXPECT_THAT(change([](auto* f) { f->mutable_tensors(0)->set_byte_length(uint64_t{1} << 60); }),
              AnyOf(v1::REASON_SIZE_MISMATCH, v1::REASON_BUNDLE_TOO_LARGE));
}

TEST_P(SeamTest, RefusesStaleEpochsOnTheSeam) {
  EXPECT_EQ(
      [&] {
        SeamPeer peer(cluster_.get(), Route("e", 3), 2);
        EXPECT_TRUE(peer.Opened());
        EXPECT_TRUE(peer.Attach());
        std::vector<v1::SeamMessage> messages = peer.Encode(peer.MakeStep(1, 0, {1}));
        messages[0].mutable_frame()->set_route_epoch(2);
        peer.seam.Send(messages[0]);
        return peer.WaitRefusal();
      }(),
      v1::REASON_STALE_EPOCH);
  SeamPeer late(cluster_.get(), Route("e", 2), 2);
  EXPECT_EQ(late.WaitRefusal(), v1::REASON_STALE_EPOCH);
}

TEST_P(SeamTest, RefusesFragmentsThatAreShuffledMissingOrDoubled) {
  Limits small;
  small.max_frame_bytes = 4096;
  const auto fragments = [&](SeamPeer& p) {
    std::vector<int32_t> tokens(32, 1);
    // 32 rows x 18 x 4 bytes are less than one frame of 4 KiB can carry with its header, so that
    // there are two at least.
    return p.Encode(p.MakeStep(1, 0, tokens), small);
  };
  WorkerSpec spec;
  spec.engine.width = 256;
  spec.range = {0, 3};
  head_ = cluster_->Add(spec);
  spec.range = {3, 6};
  middle_ = cluster_->Add(spec);
  spec.range = {6, 8};
  tail_ = cluster_->Add(spec);
  EXPECT_EQ(Refusal([&](SeamPeer& p) {
              const auto all = fragments(p);
              EXPECT_GT(all.size(), 3);
              p.seam.Send(all[0]);
              p.seam.Send(all[2]);
            }),
            v1::REASON_FRAGMENT_OUT_OF_ORDER);
  EXPECT_EQ(Refusal([&](SeamPeer& p) {
              const auto all = fragments(p);
              p.seam.Send(all[0]);
              p.seam.Send(all[1]);
              p.seam.Send(all[1]);
            }),
            v1::REASON_FRAGMENT_DUPLICATE);
  EXPECT_EQ(Refusal([&](SeamPeer& p) { p.seam.Send(fragments(p)[1]); }),
            v1::REASON_FRAGMENT_OUT_OF_ORDER);
  EXPECT_EQ(Refusal([&](SeamPeer& p) {
              p.seam.Send(fragments(p)[0]);
              p.seam.stream->HalfClose();
            }),
            v1::REASON_FRAGMENT_MISSING);
}

TEST_P(SeamTest, RefusesBytesThatAreNoMessage) {
  EXPECT_EQ(Refusal([](SeamPeer& p) { p.seam.SendBytes("\xff\xff\xff\xff"); }),
            v1::REASON_MALFORMED_MESSAGE);
  EXPECT_EQ(Refusal([](SeamPeer& p) {
              std::string bytes = p.Encode(p.MakeStep(1, 0, {1}))[0].SerializeAsString();
              bytes.resize(bytes.size() - 3);
              p.seam.SendBytes(bytes);
            }),
            v1::REASON_MALFORMED_MESSAGE);
  // Field 99 of the message.
  EXPECT_EQ(Refusal([](SeamPeer& p) { p.seam.SendBytes("\x98\x06\x01"); }),
            v1::REASON_UNKNOWN_FIELD);
  EXPECT_EQ(Refusal([](SeamPeer& p) { p.seam.SendBytes(std::string((1 << 20) + 1, '\0')); }),
            v1::REASON_FRAME_TOO_LARGE);
  EXPECT_EQ(Refusal([](SeamPeer& p) { p.back.SendBytes("\xff\xff"); }),
            v1::REASON_LIFECYCLE_VIOLATION);
}

TEST_P(SeamTest, KeepsTheOrderOfLife) {
  v1::SeamMessage open;
  *open.mutable_open()->mutable_session() = Route();
  open.mutable_open()->set_hop_index(2);
  v1::SeamMessage credit;
  credit.mutable_credit()->set_steps(1);
  v1::SeamMessage closed;
  closed.mutable_closed();
  v1::SeamMessage empty;
  // On an open seam.
  EXPECT_EQ(Refusal([&](SeamPeer& p) { p.seam.Send(open); }), v1::REASON_LIFECYCLE_VIOLATION);
  EXPECT_EQ(Refusal([&](SeamPeer& p) { p.seam.Send(credit); }), v1::REASON_LIFECYCLE_VIOLATION);
  EXPECT_EQ(Refusal([&](SeamPeer& p) { p.seam.Send(closed); }), v1::REASON_LIFECYCLE_VIOLATION);
  EXPECT_EQ(Refusal([&](SeamPeer& p) { p.seam.Send(empty); }), v1::REASON_LIFECYCLE_VIOLATION);
  EXPECT_EQ(Refusal([&](SeamPeer& p) {
              v1::ReturnRequest again;
              again.mutable_attach()->set_schema_version(1);
              p.back.Send(again);
            }),
            v1::REASON_LIFECYCLE_VIOLATION);
  // As the first message.
  const auto first = [&](Method method, const google::protobuf::Message& message) {
    const TestStream stream = cluster_->Dial(method, tail_);
    stream.Send(message);
    EXPECT_TRUE(cluster_->WaitUntil([&] { return stream.closed(); }));
    return stream.closed_reason();
  };
  for (const v1::SeamMessage& message : {credit, closed, empty}) {
    EXPECT_EQ(first(Method::kSeam, message), v1::REASON_LIFECYCLE_VIOLATION);
  }
  EXPECT_EQ(first(Method::kReturn, v1::ReturnRequest()), v1::REASON_LIFECYCLE_VIOLATION);
  EXPECT_EQ(first(Method::kSession, v1::SessionRequest()), v1::REASON_LIFECYCLE_VIOLATION);
  v1::SessionRequest generate;
  generate.mutable_generate()->set_generation(1);
  EXPECT_EQ(first(Method::kSession, generate), v1::REASON_LIFECYCLE_VIOLATION);
  // A stream that ends before it began.
  for (const Method method : {Method::kSession, Method::kSeam, Method::kReturn}) {
    const TestStream stream = cluster_->Dial(method, tail_);
    stream.stream->HalfClose();
    EXPECT_TRUE(cluster_->WaitUntil([&] { return stream.closed(); }));
    EXPECT_EQ(stream.closed_reason(), v1::REASON_LIFECYCLE_VIOLATION);
  }
  // A client's stream at a stage that is not the head, a seam at the head, a hop of 0.
  v1::SessionRequest session;
  *session.mutable_open() = Route();
  EXPECT_EQ(first(Method::kSession, session), v1::REASON_RANGE_MISMATCH);
  open.mutable_open()->set_hop_index(1);
  EXPECT_EQ(first(Method::kSeam, open), v1::REASON_RANGE_MISMATCH);
  open.mutable_open()->set_hop_index(9);
  EXPECT_EQ(first(Method::kSeam, open), v1::REASON_ROUTE_INVALID);
  // Multi-token prediction, at the head and behind it.
  session.mutable_open()->set_mtp(true);
  EXPECT_EQ(first(Method::kSession, session), v1::REASON_FEATURE_UNSUPPORTED);
  open.mutable_open()->set_hop_index(1);
  open.mutable_open()->mutable_session()->set_mtp(true);
  EXPECT_EQ(first(Method::kSeam, open), v1::REASON_FEATURE_UNSUPPORTED);
  EXPECT_TRUE(AllFree());
}

TEST_P(SeamTest, OneReturnStreamForOneSession) {
  SeamPeer peer(cluster_.get(), Route(), 2);
  ASSERT_TRUE(peer.Opened());
  const auto attach = [&](const std::string& endpoint, const std::string& tag, uint64_t epoch,
                          uint32_t version = 1) {
    const TestStream stream = cluster_->Dial(Method::kReturn, endpoint);
    v1::ReturnRequest request;
    request.mutable_attach()->set_schema_version(version);
    request.mutable_attach()->set_route_session_id(SessionId(tag));
    request.mutable_attach()->set_route_epoch(epoch);
    stream.Send(request);
    EXPECT_TRUE(cluster_->WaitUntil([&] { return stream.closed(); }));
    return stream.closed_reason();
  };
  EXPECT_EQ(attach(tail_, "nobody", 1), v1::REASON_SESSION_UNKNOWN);
  EXPECT_EQ(attach(head_, "s", 1), v1::REASON_SESSION_UNKNOWN);
  EXPECT_EQ(attach(tail_, "s", 2), v1::REASON_SESSION_UNKNOWN);
  EXPECT_EQ(attach(tail_, "s", 1, 2), v1::REASON_SCHEMA_VERSION_UNSUPPORTED);
  ASSERT_TRUE(peer.Attach());
  EXPECT_EQ(attach(tail_, "s", 1), v1::REASON_LIFECYCLE_VIOLATION);
  // None of it touched the session.
  peer.Send(peer.MakeStep(1, 0, {1}));
  EXPECT_TRUE(peer.WaitResults(1));
  const auto newer = ToTail("t", 7);
  EXPECT_EQ(attach(tail_, "t", 6), v1::REASON_STALE_EPOCH);
}

TEST_P(SeamTest, NoStepBeforeTheReturnStream) {
  SeamPeer peer(cluster_.get(), Route(), 2);
  ASSERT_TRUE(peer.Opened());
  peer.Send(peer.MakeStep(1, 0, {1}));
  EXPECT_EQ(peer.WaitRefusal(), v1::REASON_LIFECYCLE_VIOLATION);
}

TEST_P(SeamTest, CreditsBoundWhatMayWait) {
  const auto peer = ToTail();
  cluster_->PauseEngine(tail_, true);
  // One with the engine and four that wait.
  for (uint64_t step = 1; step <= 6; ++step) {
    peer->Send(peer->MakeStep(step, static_cast<uint32_t>(step - 1), {1}));
  }
  EXPECT_EQ(peer->WaitRefusal(), v1::REASON_FLOW_CONTROL_VIOLATION);
  cluster_->PauseEngine(tail_, false);
  EXPECT_TRUE(AllFree());
  // With its credits a sender may go on for ever.
  const auto fair = ToTail("fair");
  for (uint64_t step = 1; step <= 50; ++step) {
    fair->Send(fair->MakeStep(step, static_cast<uint32_t>(step - 1), {1}));
    ASSERT_TRUE(fair->WaitResults(step));
  }
  EXPECT_TRUE(cluster_->WaitUntil([&] { return fair->Credits() == 50; }));
}

TEST_P(SeamTest, CancelledStepsAreNotComputed) {
  const auto peer = ToTail();
  peer->Send(peer->MakeStep(1, 0, {1, 2}));
  ASSERT_TRUE(peer->WaitResults(1));
  cluster_->PauseEngine(tail_, true);
  peer->Send(peer->MakeStep(2, 2, {3}));
  peer->Send(peer->MakeStep(3, 3, {4}));
  peer->Send(peer->MakeStep(4, 4, {5}));
  v1::SeamMessage cancel;
  cancel.mutable_cancel()->set_through_step(6);
  peer->seam.Send(cancel);
  peer->Send(peer->MakeStep(7, 1, {9}));
  cluster_->WaitUntil([&] { return peer->Credits() >= 4; });
  cluster_->PauseEngine(tail_, false);
  ASSERT_TRUE(peer->WaitResults(2));
  EXPECT_EQ(peer->Results()[1].step(), 7);
  EXPECT_EQ(peer->Results()[1].cache().cached_tokens(), 2);
}

TEST_P(SeamTest, EndsInGoodOrderWithReceipts) {
  const auto peer = ToTail();
  peer->Send(peer->MakeStep(1, 0, {1, 2}));
  peer->Send(peer->MakeStep(2, 2, {3}));
  peer->seam.stream->HalfClose();
  ASSERT_TRUE(cluster_->WaitUntil([&] { return peer->seam.closed() && peer->back.closed(); }));
  EXPECT_TRUE(peer->seam.handler->closed()->ok());
  EXPECT_TRUE(peer->back.handler->closed()->ok());
  EXPECT_THAT(peer->Results(), SizeIs(2)) << "what was sent before the end is done";
  const auto received = peer->seam.Received<v1::SeamMessage>();
  ASSERT_TRUE(received.back().has_closed());
  ASSERT_THAT(received.back().closed().receipts(), SizeIs(1));
  EXPECT_EQ(received.back().closed().receipts(0).prefill_tokens(), 2);
  EXPECT_EQ(received.back().closed().receipts(0).decode_tokens(), 1);
  EXPECT_EQ(cluster_->open_sessions(tail_), 0);
}

TEST_P(SeamTest, TheEndOfEitherStreamFreesTheSession) {
  const auto by_seam = ToTail("a");
  by_seam->seam.stream->Close(absl::OkStatus());
  EXPECT_TRUE(AllFree());
  EXPECT_TRUE(cluster_->WaitUntil([&] { return by_seam->back.closed(); }));
  const auto by_return = ToTail("b");
  by_return->back.stream->Close(absl::OkStatus());
  EXPECT_EQ(by_return->WaitRefusal(), v1::REASON_PEER_LOST);
  EXPECT_TRUE(AllFree());
}

TEST_P(SeamTest, SurvivesGarbage) {
  // In memory thousands of rounds are a second's work.
  const int rounds = GetParam() ? 200 : 4000;
  std::mt19937 random(7);
  const auto below = [&](size_t bound) { return static_cast<size_t>(random() % bound); };
  for (int round = 0; round < rounds; ++round) {
    const auto peer = ToTail(absl::StrCat("g", round));
    peer->Send(peer->MakeStep(1, 0, {1, 2, 3}));
    std::string bytes = peer->Encode(peer->MakeStep(2, 3, {4, 5}))[0].SerializeAsString();
    switch (below(5)) {
      case 0:
        for (char& byte : bytes) byte = static_cast<char>(random());
        break;
      case 1:
        bytes.resize(below(bytes.size()));
        break;
      case 2:
        bytes[below(bytes.size())] ^= static_cast<char>(1 << below(8));
        break;
      case 3:
        bytes.insert(below(bytes.size()), 1, static_cast<char>(random()));
        break;
      case 4:
        for (int i = 0; i < 8; ++i) bytes[below(64)] = static_cast<char>(random());
        break;
    }
    const TestStream& stream = below(8) == 0 ? peer->back : peer->seam;
    stream.SendBytes(bytes);
    stream.SendBytes(bytes);
    stream.stream->HalfClose();
    // Refused, or by a rare chance a message that says the same: the stream ends one way or
    // another.
    ASSERT_TRUE(cluster_->WaitUntil([&] { return stream.closed(); })) << round;
    peer->seam.stream->Close(absl::OkStatus());
    peer->back.stream->Close(absl::OkStatus());
    ASSERT_TRUE(AllFree()) << round;
  }
  TestClient client(cluster_.get(), {head_, middle_, tail_}, "after");
  ASSERT_TRUE(client.Opened());
  client.Generate(1, {1, 2, 3}, 5);
  EXPECT_TRUE(client.WaitFinished(1));
  EXPECT_TRUE(client.Close());
}

INSTANTIATE_TEST_SUITE_P(Transports, SeamTest, ::testing::Values(false, true),
                         [](const auto& grpc) { return grpc.param ? "grpc" : "memory"; });

}  // namespace
}  // namespace meshnet::worker
