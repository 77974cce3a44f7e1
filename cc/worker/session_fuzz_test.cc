// Malformed messages by the hundred thousand, from a seeded generator, at a worker's streams and
// from the stages that it dials: the whole way through transport, session and engine in one thread.
//
// Each is refused for its reason on every stream that it ends, nothing of it reaches an engine, and
// the worker holds no more than the negotiated bundle plus a small multiple of the bytes that
// really came. Meanwhile one session is open at the same worker; it is none the wiser.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/common/allocations.h"
#include "cc/common/checksum.h"
#include "cc/common/status.h"
#include "cc/protocol/frame_attacks.h"
#include "cc/protocol/frame_codec.h"
#include "cc/worker/seam_peer.h"
#include "cc/worker/test_cluster.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/meshnet/shard/v1/shard.pb.h"

namespace meshnet::worker {
namespace {

constexpr int kPerFrameKind = 1800;
constexpr int kPerMessageKind = 500;
constexpr int kAtRandom = 5000;

// What one message may make a worker hold beside the bundle: parsing it, the copies of it that wait
// in the network, and what the refusal says.
constexpr size_t kBytesPerReceivedByte = 100;
constexpr size_t kFixedBytes = 64 << 10;
// What is left of thousands of refused sessions when their peers have gone.
constexpr size_t kLeftBytes = 16 << 10;

const FrameExpectation kAttacked = AttackedSeam();

// Where a message goes.
enum class Target {
  // Streams that have just begun.
  kNewSession,
  kNewSeam,
  kNewReturn,
  // A session at the whole model, open.
  kSession,
  // A session at the tail, open, its return stream attached, or not yet.
  kSeam,
  kSeamWithoutReturn,
  // The return stream of such a session.
  kReturn,
  // The answers of a tail to a head: to the opening of the seam and of the return stream, and when
  // the route is open.
  kSeamOpening,
  kReturnOpening,
  kSeamAnswer,
  kReturnAnswer,
};

// Messages of which the last one must be refused for `reason`.
struct MessageAttack {
  std::vector<std::string> messages;
  v1::Reason reason = v1::REASON_UNSPECIFIED;
  // The stream ends after the messages.
  bool half_close = false;
  // Only this generation is refused and the session goes on.
  uint64_t refused_generation = 0;
};

struct Kind {
  Target target;
  std::function<MessageAttack(Rng*)> make;
};

// Plays the last stage badly: says only what the test makes it say.
class BadTail : public StreamAcceptor {
 public:
  std::shared_ptr<StreamHandler> Accept(Method method, std::shared_ptr<Stream> stream,
                                        const PeerInfo&) override {
    TestStream& accepted = method == Method::kSeam ? seam : back;
    accepted.stream = std::move(stream);
    accepted.handler = std::make_shared<RecordingHandler>();
    return accepted.handler;
  }

  TestStream seam;
  TestStream back;
};

template <typename Message>
v1::Reason LastError(const TestStream& stream) {
  const auto received = stream.Received<Message>();
  if (received.empty() || !received.back().has_error()) return v1::REASON_UNSPECIFIED;
  return received.back().error().reason();
}

class SessionFuzzTest : public ::testing::Test {
 protected:
  SessionFuzzTest() : cluster_(MakeMemoryCluster({}, &network_)) {
    WorkerSpec spec;
    spec.engine.width = static_cast<uint32_t>(kAttacked.schema.residual_width());
    spec.engine.vocabulary_size = kAttacked.vocabulary_size;
    spec.engine.context_tokens = kAttacked.context_tokens;
    spec.engine.max_step_tokens = kAttacked.limits.max_step_tokens;
    spec.worker.limits = kAttacked.limits;
    spec.range = {0, kAttacked.applied.end};
    head_ = cluster_->Add(spec);
    spec.range = {kAttacked.applied.end, spec.engine.layers};
    tail_ = cluster_->Add(spec);
    spec.range = {0, spec.engine.layers};
    whole_ = cluster_->Add(spec);
    network_->Listen(kBadTail, &bad_tail_);
    open_ = MakeOpen(*cluster_, {head_, tail_}, kAttacked.session.route_session_id,
                     kAttacked.session.route_epoch);
    open_.set_work_id(kAttacked.work_id);
    whole_open_ = MakeOpen(*cluster_, {whole_}, "whole");
    bystander_ = std::make_unique<SeamPeer>(
        cluster_.get(), MakeOpen(*cluster_, {head_, tail_}, "bystander", kBystanderEpoch));
    EXPECT_TRUE(bystander_->Opened());
    EXPECT_TRUE(bystander_->Attach());
  }

  void WarmUp(Rng* rng) {
    const Attack attack = FrameAttacks().at("checksum")(rng);
    MessageAttack wrapped{{}, attack.reason};
    for (const std::string& bytes : attack.messages) {
      wrapped.messages.push_back(Delimited(3, bytes));
    }
    Check(Target::kSeam, wrapped);
  }

  // Sends an attack to its target and checks all that must be true afterwards.
  void Check(Target target, const MessageAttack& attack) {
    size_t received = 0;
    for (const std::string& message : attack.messages) {
      received += std::min<size_t>(message.size(), kAttacked.limits.max_frame_bytes);
    }
    switch (target) {
      case Target::kNewSession:
        CheckNew<v1::SessionEvent>(Method::kSession, whole_, attack);
        break;
      case Target::kNewSeam:
        CheckNew<v1::SeamMessage>(Method::kSeam, tail_, attack);
        break;
      case Target::kNewReturn:
        CheckNew<v1::ReturnEvent>(Method::kReturn, tail_, attack);
        break;
      case Target::kSession:
        CheckSession(attack);
        break;
      case Target::kSeam:
      case Target::kSeamWithoutReturn:
      case Target::kReturn:
        CheckSeam(target, attack);
        break;
      default:
        CheckAnswer(target, attack);
    }
    const size_t peak = PeakAllocatedBytes();
    const size_t allowed =
        kAttacked.limits.max_bundle_bytes + kFixedBytes + kBytesPerReceivedByte * received;
    if (warm_) {
      EXPECT_LE(peak > base_ ? peak - base_ : 0, allowed);
    }
    RunUntilQuiet();
    ++sent_;
  }

  void RunUntilQuiet() {
    cluster_->WaitUntil([] { return false; });
  }

  // From here on the attack's memory counts.
  void Begin() {
    base_ = AllocatedBytes();
    RestartPeak();
  }

  void Send(const TestStream& stream, const MessageAttack& attack) {
    Begin();
    for (const std::string& message : attack.messages) stream.SendBytes(message);
    if (attack.half_close) stream.stream->HalfClose();
    RunUntilQuiet();
  }

  static v1::Reason ErrorOf(const TestStream& stream, const v1::SessionEvent*) {
    const auto received = stream.Received<v1::SessionEvent>();
    if (received.empty() || !received.back().has_error()) return v1::REASON_UNSPECIFIED;
    return received.back().error().error().reason();
  }
  template <typename Message>
  static v1::Reason ErrorOf(const TestStream& stream, const Message*) {
    return LastError<Message>(stream);
  }

  // The stream has ended with this reason, in words and in its status.
  template <typename Message>
  static void ExpectRefused(const TestStream& stream, v1::Reason reason) {
    ASSERT_TRUE(stream.closed());
    EXPECT_EQ(stream.closed_reason(), reason) << *stream.handler->closed();
    EXPECT_EQ(ErrorOf(stream, static_cast<const Message*>(nullptr)), reason);
  }

  template <typename Message>
  void CheckNew(Method method, const std::string& endpoint, const MessageAttack& attack) {
    const TestStream stream = cluster_->Dial(method, endpoint);
    Send(stream, attack);
    ExpectRefused<Message>(stream, attack.reason);
  }

  void CheckSession(const MessageAttack& attack) {
    TestClient client(cluster_.get(), whole_, whole_open_);
    ASSERT_TRUE(client.Opened());
    Send(client.stream(), attack);
    if (attack.refused_generation == 0) {
      ExpectRefused<v1::SessionEvent>(client.stream(), attack.reason);
      return;
    }
    const auto error = client.error(attack.refused_generation);
    ASSERT_TRUE(error.has_value());
    EXPECT_EQ(error->reason(), attack.reason) << error->message();
    EXPECT_TRUE(client.Close());
  }

  void CheckSeam(Target target, const MessageAttack& attack) {
    SeamPeer peer(cluster_.get(), open_);
    ASSERT_TRUE(peer.Opened());
    const bool attached = target != Target::kSeamWithoutReturn;
    if (attached) {
      ASSERT_TRUE(peer.Attach());
    }
    Send(target == Target::kReturn ? peer.back : peer.seam, attack);
    ExpectRefused<v1::SeamMessage>(peer.seam, attack.reason);
    if (attached) ExpectRefused<v1::ReturnEvent>(peer.back, attack.reason);
  }

  void CheckAnswer(Target target, const MessageAttack& attack) {
    v1::OpenSession open = open_;
    open.mutable_route()->mutable_hops(1)->set_endpoint(kBadTail);
    TestClient client(cluster_.get(), head_, open);
    RunUntilQuiet();
    ASSERT_NE(bad_tail_.seam.stream, nullptr);
    if (target != Target::kSeamOpening) {
      v1::SeamMessage opened;
      *opened.mutable_opened()->mutable_limits() = ToProto(kAttacked.limits);
      opened.mutable_opened()->set_context_tokens(kAttacked.context_tokens);
      bad_tail_.seam.Send(opened);
      RunUntilQuiet();
      ASSERT_NE(bad_tail_.back.stream, nullptr);
    }
    if (target == Target::kSeamAnswer || target == Target::kReturnAnswer) {
      v1::ReturnEvent attached;
      attached.mutable_attached();
      bad_tail_.back.Send(attached);
      ASSERT_TRUE(client.Opened());
      // One step is on its way to the tail.
      client.Generate(1, {1, 2, 3}, 8);
      RunUntilQuiet();
    }
    const bool by_return = target == Target::kReturnOpening || target == Target::kReturnAnswer;
    Send(by_return ? bad_tail_.back : bad_tail_.seam, attack);
    ExpectRefused<v1::SessionEvent>(client.stream(), attack.reason);
    EXPECT_TRUE(bad_tail_.seam.closed());
    if (target != Target::kSeamOpening) {
      EXPECT_TRUE(bad_tail_.back.closed());
    }
    bad_tail_.seam = {};
    bad_tail_.back = {};
  }

  // Nobody but the bystander has a session anywhere.
  void ExpectNothingLeft() {
    // Peers that take their time are given up.
    cluster_->PassTime(absl::Minutes(1));
    RunUntilQuiet();
    EXPECT_EQ(cluster_->open_sessions(head_), 0u);
    EXPECT_EQ(cluster_->open_sessions(tail_), 1u);
    EXPECT_EQ(cluster_->open_sessions(whole_), 0u);
    const size_t left = AllocatedBytes();
    if (!left_.has_value()) left_ = left;
    EXPECT_LE(left, *left_ + kLeftBytes);
  }

  uint64_t TokensComputed(const std::string& endpoint) {
    const v1::Metrics metrics = cluster_->worker(endpoint).GetMetrics();
    return metrics.prefill_tokens() + metrics.decode_tokens();
  }

  void ExpectServes() {
    bystander_->Send(bystander_->MakeStep(1, 0, {1, 2, 3}));
    EXPECT_TRUE(bystander_->WaitResults(1));
    TestClient client(cluster_.get(), {head_, tail_}, "after");
    ASSERT_TRUE(client.Opened());
    client.Generate(1, {1, 2, 3}, 5);
    ASSERT_TRUE(client.WaitFinished(1));
    EXPECT_TRUE(client.Close());
    TestClient whole(cluster_.get(), {whole_}, "after");
    ASSERT_TRUE(whole.Opened());
    whole.Generate(1, {1, 2, 3}, 5);
    ASSERT_TRUE(whole.WaitFinished(1));
    EXPECT_THAT(whole.tokens(1), ::testing::ElementsAreArray(client.tokens(1)));
    EXPECT_TRUE(whole.Close());
  }

  std::map<std::string, Kind> Kinds() const;

  static constexpr char kBadTail[] = "bad_tail:1";
  static constexpr uint64_t kBystanderEpoch = 9;

  FakeNetwork* network_ = nullptr;
  BadTail bad_tail_;
  std::unique_ptr<TestCluster> cluster_;
  std::string head_;
  std::string tail_;
  std::string whole_;
  v1::OpenSession open_;
  v1::OpenSession whole_open_;
  std::unique_ptr<SeamPeer> bystander_;
  size_t base_ = 0;
  // Descriptors and the like have come into being.
  bool warm_ = false;
  std::optional<size_t> left_;
  size_t sent_ = 0;
};

// ---- Kinds of messages ----

MessageAttack One(v1::Reason reason, std::string bytes) { return {{std::move(bytes)}, reason}; }

MessageAttack One(v1::Reason reason, const google::protobuf::Message& message) {
  return One(reason, message.SerializeAsString());
}

std::string SeamBytes(const v1::Frame& frame) {
  v1::SeamMessage message;
  *message.mutable_frame() = frame;
  return message.SerializeAsString();
}

// Any number but `value`.
uint32_t Other(Rng* rng, uint32_t value) {
  return value + static_cast<uint32_t>(rng->Between(1, ~uint32_t{0}));
}

// What can be wrong with an opening, for a route of any length.
using ChangeOpen = std::function<void(Rng*, v1::OpenSession*)>;
std::map<std::string, std::pair<v1::Reason, ChangeOpen>> BadOpenings() {
  std::map<std::string, std::pair<v1::Reason, ChangeOpen>> kinds;
  kinds["schema_version"] = {
      v1::REASON_SCHEMA_VERSION_UNSUPPORTED,
      [](Rng* rng, v1::OpenSession* o) { o->set_schema_version(Other(rng, kSchemaVersion)); }};
  kinds["work_id"] = {v1::REASON_FIELD_OUT_OF_BOUNDS, [](Rng* rng, v1::OpenSession* o) {
                        o->set_work_id(rng->Coin() ? std::string(rng->Between(65, 200), 'w')
                                                   : std::string(rng->Between(0, 9), ' '));
                      }};
  const auto route = [&](const std::string& name, v1::Reason reason,
                         std::function<void(Rng*, v1::Route*)> change) {
    kinds[name] = {reason, [change = std::move(change)](Rng* rng, v1::OpenSession* o) {
                     change(rng, o->mutable_route());
                   }};
  };
  route("session_id", v1::REASON_ROUTE_INVALID, [](Rng* rng, v1::Route* r) {
    r->set_route_session_id(rng->Bytes(rng->Coin() ? rng->Between(0, 15) : rng->Between(17, 99)));
  });
  route("epoch", v1::REASON_ROUTE_INVALID, [](Rng*, v1::Route* r) { r->set_route_epoch(0); });
  route("fingerprint", v1::REASON_ROUTE_INVALID, [](Rng* rng, v1::Route* r) {
    r->set_recipe_fingerprint(std::string(rng->Coin() ? 0 : rng->Between(65, 999), 'f'));
  });
  route("artifact", v1::REASON_ROUTE_INVALID, [](Rng* rng, v1::Route* r) {
    r->set_artifact_sha256("not an identifier" + std::string(rng->Between(0, 99), '!'));
  });
  route("no_hops", v1::REASON_ROUTE_INVALID, [](Rng*, v1::Route* r) { r->clear_hops(); });
  route("many_hops", v1::REASON_ROUTE_INVALID, [](Rng* rng, v1::Route* r) {
    for (uint64_t i = rng->Between(64, 1000); i > 0; --i) r->add_hops();
  });
  route("too_many_hops", v1::REASON_FIELD_OUT_OF_BOUNDS, [](Rng* rng, v1::Route* r) {
    for (uint64_t i = rng->Between(2049, 3000); i > 0; --i) r->add_hops();
  });
  route("endpoint", v1::REASON_ROUTE_INVALID, [](Rng* rng, v1::Route* r) {
    r->mutable_hops(r->hops_size() - 1)->set_endpoint(std::string(rng->Between(256, 999), 'e'));
  });
  route("gap", v1::REASON_ROUTE_INVALID, [](Rng* rng, v1::Route* r) {
    v1::LayerRange* range = r->mutable_hops(r->hops_size() - 1)->mutable_range();
    range->set_begin(Other(rng, range->begin()));
  });
  route("cover", v1::REASON_ROUTE_INVALID,
        [](Rng* rng, v1::Route* r) { r->set_model_layers(Other(rng, r->model_layers())); });
  route("model", v1::REASON_RANGE_MISMATCH, [](Rng* rng, v1::Route* r) {
    const auto layers = static_cast<uint32_t>(rng->Between(9, ~uint32_t{0}));
    r->set_model_layers(layers);
    r->mutable_hops(r->hops_size() - 1)->mutable_range()->set_end(layers);
  });
  route("other_artifact", v1::REASON_ARTIFACT_MISMATCH, [](Rng* rng, v1::Route* r) {
    r->set_artifact_sha256(std::string(rng->Between(1, 64), 'a'));
  });
  route("other_recipe", v1::REASON_RECIPE_MISMATCH, [](Rng* rng, v1::Route* r) {
    r->set_recipe_fingerprint(std::string(rng->Between(1, 64), 'a'));
  });
  kinds["large_limits"] = {
      v1::REASON_FIELD_OUT_OF_BOUNDS, [](Rng* rng, v1::OpenSession* o) {
        v1::Limits* limits = o->mutable_limits();
        switch (rng->Between(0, 3)) {
          case 0:
            return limits->set_max_frame_bytes(rng->Between((64 << 20) + 1, ~uint64_t{0}));
          case 1:
            return limits->set_max_bundle_bytes(rng->Between((1 << 30) + 1, ~uint64_t{0}));
          case 2:
            return limits->set_max_step_tokens(
                static_cast<uint32_t>(rng->Between(65537, ~uint32_t{0})));
          default:
            return limits->set_max_inflight_steps(
                static_cast<uint32_t>(rng->Between(1025, ~uint32_t{0})));
        }
      }};
  kinds["small_limits"] = {v1::REASON_FIELD_OUT_OF_BOUNDS, [](Rng* rng, v1::OpenSession* o) {
                             if (rng->Coin()) {
                               o->mutable_limits()->set_max_frame_bytes(rng->Between(1, 4095));
                             } else {
                               o->mutable_limits()->set_max_bundle_bytes(rng->Between(1, 4095));
                             }
                           }};
  return kinds;
}

// A generation that must be refused while the session goes on.
using ChangeGenerate = std::function<void(Rng*, v1::Generate*)>;
std::map<std::string, std::pair<v1::Reason, ChangeGenerate>> BadGenerations() {
  std::map<std::string, std::pair<v1::Reason, ChangeGenerate>> kinds;
  const auto outside = [](Rng* rng) {
    const auto id = static_cast<int32_t>(rng->Between(kAttacked.vocabulary_size, INT32_MAX));
    return rng->Coin() ? id : -id;
  };
  kinds["no_tokens"] = {v1::REASON_FIELD_OUT_OF_BOUNDS,
                        [](Rng*, v1::Generate* g) { g->clear_token_ids(); }};
  kinds["token"] = {v1::REASON_TOKEN_OUT_OF_RANGE,
                    [=](Rng* rng, v1::Generate* g) { g->add_token_ids(outside(rng)); }};
  kinds["stop_token"] = {v1::REASON_TOKEN_OUT_OF_RANGE,
                         [=](Rng* rng, v1::Generate* g) { g->add_stop_token_ids(outside(rng)); }};
  kinds["start"] = {v1::REASON_CACHE_MISS, [](Rng* rng, v1::Generate* g) {
                      g->set_start_position(static_cast<uint32_t>(rng->Between(1, ~uint32_t{0})));
                    }};
  kinds["no_output"] = {v1::REASON_FIELD_OUT_OF_BOUNDS,
                        [](Rng*, v1::Generate* g) { g->set_max_tokens(0); }};
  kinds["context"] = {v1::REASON_CONTEXT_EXCEEDED, [](Rng* rng, v1::Generate* g) {
                        g->set_max_tokens(static_cast<uint32_t>(
                            rng->Between(kAttacked.context_tokens, ~uint32_t{0})));
                      }};
  kinds["sampling"] = {v1::REASON_SAMPLING_INVALID, [](Rng* rng, v1::Generate* g) {
                         const float bad = rng->Coin() ? std::numeric_limits<float>::infinity()
                                                       : std::numeric_limits<float>::quiet_NaN();
                         switch (rng->Between(0, 2)) {
                           case 0:
                             return g->mutable_sampling()->set_temperature(bad);
                           case 1:
                             return g->mutable_sampling()->set_top_p(bad);
                           default:
                             return g->mutable_sampling()->set_repetition_penalty(bad);
                         }
                       }};
  kinds["grammar"] = {v1::REASON_GRAMMAR_INVALID, [](Rng* rng, v1::Generate* g) {
                        // Groups that nothing closes: never a grammar.
                        std::string grammar = "root ::= ";
                        for (uint64_t i = rng->Between(1, 2000); i > 0; --i) grammar += "(\"a\"";
                        if (rng->Coin()) {
                          g->mutable_sampling()->set_grammar(grammar);
                        } else {
                          g->mutable_sampling()->set_json_schema(grammar);
                        }
                      }};
  return kinds;
}

// Messages of a seam that no stage sends to the next one once the seam is open.
v1::SeamMessage MisplacedOnSeam(Rng* rng) {
  v1::SeamMessage message;
  switch (rng->Between(0, 3)) {
    case 0:
      message.mutable_opened()->set_context_tokens(static_cast<uint32_t>(rng->Between(0, 999)));
      break;
    case 1:
      message.mutable_credit()->set_steps(static_cast<uint32_t>(rng->Between(0, 999)));
      break;
    case 2:
      message.mutable_closed()->add_receipts();
      break;
    default:
      message.mutable_error()->set_reason(v1::REASON_CANCELLED);
  }
  return message;
}

std::map<std::string, Kind> SessionFuzzTest::Kinds() const {
  std::map<std::string, Kind> kinds;
  const auto add = [&](const std::string& name, Target target,
                       std::function<MessageAttack(Rng*)> make) {
    ASSERT_TRUE(kinds.emplace(name, Kind{target, std::move(make)}).second) << name;
  };

  // Bytes that are no message, at every place where one is read.
  v1::SessionRequest new_session;
  *new_session.mutable_open() = whole_open_;
  v1::SessionRequest generate;
  generate.mutable_generate()->set_generation(1);
  generate.mutable_generate()->add_token_ids(1);
  generate.mutable_generate()->set_max_tokens(4);
  v1::SeamMessage new_seam;
  *new_seam.mutable_open()->mutable_session() = open_;
  new_seam.mutable_open()->set_hop_index(1);
  v1::ReturnRequest attach;
  attach.mutable_attach()->set_schema_version(kSchemaVersion);
  attach.mutable_attach()->set_route_session_id(bystander_->open.route().route_session_id());
  attach.mutable_attach()->set_route_epoch(kBystanderEpoch);
  v1::SeamMessage opened;
  opened.mutable_opened()->set_context_tokens(kAttacked.context_tokens);
  v1::SeamMessage credit;
  credit.mutable_credit()->set_steps(1);
  v1::ReturnEvent attached;
  attached.mutable_attached();
  v1::ReturnEvent result;
  result.mutable_result()->set_step(1);
  result.mutable_result()->mutable_cache()->set_cached_tokens(3);
  result.mutable_result()->add_tokens()->set_token_id(1);
  const auto bytes = [](const google::protobuf::Message& message) {
    return message.SerializeAsString();
  };
  const uint64_t frame = kAttacked.limits.max_frame_bytes;
  // A head takes all logits of a vocabulary from the tail.
  const uint64_t event = kAttacked.vocabulary_size * sizeof(float) + (64 << 10);
  const struct {
    const char* name;
    Target target;
    std::string good;
    uint64_t max_bytes;
  } readers[] = {
      {"new_session", Target::kNewSession, bytes(new_session), frame},
      {"new_seam", Target::kNewSeam, bytes(new_seam), frame},
      {"new_return", Target::kNewReturn, bytes(attach), frame},
      {"session", Target::kSession, bytes(generate), frame},
      {"seam_opening", Target::kSeamOpening, bytes(opened), frame},
      {"seam_answer", Target::kSeamAnswer, bytes(credit), frame},
      {"return_opening", Target::kReturnOpening, bytes(attached), event},
      {"return_answer", Target::kReturnAnswer, bytes(result), event},
  };
  for (const auto& reader : readers) {
    for (const auto& [name, ending] : BadEndings(reader.max_bytes)) {
      add(absl::StrCat(reader.name, "/", name), reader.target,
          [good = reader.good, ending = ending](Rng* rng) {
            return One(ending.reason, good + ending.make(rng));
          });
    }
    add(absl::StrCat(reader.name, "/truncated"), reader.target, [good = reader.good](Rng* rng) {
      // The body is one field: without its end it is no field.
      const std::string head = Delimited(1, good);
      return One(v1::REASON_MALFORMED_MESSAGE,
                 head.substr(0, head.size() - rng->Between(1, good.size() - 1)));
    });
    add(absl::StrCat(reader.name, "/empty"), reader.target,
        [](Rng*) { return One(v1::REASON_LIFECYCLE_VIOLATION, std::string()); });
  }
  // Nothing at all may come on an attached return stream.
  add("return/anything", Target::kReturn, [](Rng* rng) {
    return One(v1::REASON_LIFECYCLE_VIOLATION, rng->Bytes(rng->Between(0, 300)));
  });

  // Openings.
  for (const auto& [name, bad] : BadOpenings()) {
    const auto& [reason, change] = bad;
    add(absl::StrCat("new_session/", name), Target::kNewSession,
        [=, reason = reason, change = change](Rng* rng) {
          v1::SessionRequest request = new_session;
          change(rng, request.mutable_open());
          return One(reason, request);
        });
    add(absl::StrCat("new_seam/", name), Target::kNewSeam,
        [=, reason = reason, change = change](Rng* rng) {
          v1::SeamMessage message = new_seam;
          change(rng, message.mutable_open()->mutable_session());
          return One(reason, message);
        });
  }
  add("new_session/not_open", Target::kNewSession, [=](Rng* rng) {
    v1::SessionRequest request = generate;
    if (rng->Coin()) request.mutable_cancel()->set_generation(rng->Between(0, ~uint64_t{0}));
    return One(v1::REASON_LIFECYCLE_VIOLATION, request);
  });
  add("new_seam/not_open", Target::kNewSeam, [](Rng* rng) {
    return One(v1::REASON_LIFECYCLE_VIOLATION, rng->Coin()
                                                   ? SeamBytes(GoodFrames(rng)[0])
                                                   : MisplacedOnSeam(rng).SerializeAsString());
  });
  add("new_seam/hop_index", Target::kNewSeam, [=](Rng* rng) {
    v1::SeamMessage message = new_seam;
    message.mutable_open()->set_hop_index(static_cast<uint32_t>(rng->Between(2, ~uint32_t{0})));
    return One(v1::REASON_ROUTE_INVALID, message);
  });
  add("new_seam/hop_of_the_head", Target::kNewSeam, [=](Rng*) {
    v1::SeamMessage message = new_seam;
    message.mutable_open()->set_hop_index(0);
    return One(v1::REASON_ROUTE_INVALID, message);
  });
  add("new_seam/nothing", Target::kNewSeam,
      [](Rng*) { return MessageAttack{{}, v1::REASON_LIFECYCLE_VIOLATION, /*half_close=*/true}; });
  add("new_return/schema_version", Target::kNewReturn, [=](Rng* rng) {
    v1::ReturnRequest request = attach;
    request.mutable_attach()->set_schema_version(Other(rng, kSchemaVersion));
    return One(v1::REASON_SCHEMA_VERSION_UNSUPPORTED, request);
  });
  add("new_return/unknown", Target::kNewReturn, [=](Rng* rng) {
    v1::ReturnRequest request = attach;
    request.mutable_attach()->set_route_session_id(rng->Bytes(rng->Between(0, 99)));
    return One(v1::REASON_SESSION_UNKNOWN, request);
  });
  add("new_return/stale_epoch", Target::kNewReturn, [=](Rng* rng) {
    v1::ReturnRequest request = attach;
    request.mutable_attach()->set_route_epoch(rng->Between(0, kBystanderEpoch - 1));
    return One(v1::REASON_STALE_EPOCH, request);
  });
  add("new_return/second", Target::kNewReturn,
      [=](Rng*) { return One(v1::REASON_LIFECYCLE_VIOLATION, attach); });

  // An open session.
  for (const auto& [name, bad] : BadGenerations()) {
    const auto& [reason, change] = bad;
    add(absl::StrCat("session/", name), Target::kSession,
        [=, reason = reason, change = change](Rng* rng) {
          v1::SessionRequest request = generate;
          const uint64_t number = rng->Between(1, ~uint64_t{0});
          request.mutable_generate()->set_generation(number);
          change(rng, request.mutable_generate());
          MessageAttack attack = One(reason, request);
          attack.refused_generation = number;
          return attack;
        });
  }
  add("session/no_number", Target::kSession, [=](Rng*) {
    v1::SessionRequest request = generate;
    request.mutable_generate()->set_generation(0);
    return One(v1::REASON_FIELD_OUT_OF_BOUNDS, request);
  });
  add("session/open_again", Target::kSession,
      [=](Rng*) { return One(v1::REASON_LIFECYCLE_VIOLATION, new_session); });

  // An open seam.
  add("seam/misplaced", Target::kSeam, [=](Rng* rng) {
    const bool again = rng->Between(0, 4) == 0;
    return One(v1::REASON_LIFECYCLE_VIOLATION, again ? new_seam : MisplacedOnSeam(rng));
  });
  const auto messages = [](const std::vector<v1::Frame>& frames) {
    std::vector<std::string> serialized;
    for (const v1::Frame& part : frames) serialized.push_back(SeamBytes(part));
    return serialized;
  };
  const auto step = [=](Rng* rng, uint64_t number) { return messages(GoodFrames(rng, 1, number)); };
  add("seam/out_of_order", Target::kSeam, [=](Rng* rng) {
    return MessageAttack{step(rng, rng->Between(2, ~uint64_t{0})), v1::REASON_STEP_OUT_OF_ORDER};
  });
  add("seam/conflict", Target::kSeam, [=](Rng* rng) {
    MessageAttack attack{step(rng, 1), v1::REASON_STEP_CONFLICT};
    for (std::string& message : step(rng, 1)) attack.messages.push_back(std::move(message));
    return attack;
  });
  add("seam/no_cache", Target::kSeam, [=](Rng* rng) {
    std::vector<v1::Frame> frames = GoodFrames(rng, 1, 1);
    while (frames[0].start_position() == 0) frames = GoodFrames(rng, 1, 1);
    return MessageAttack{messages(frames), v1::REASON_CACHE_MISS};
  });
  add("seam/no_credit", Target::kSeam, [=](Rng* rng) {
    MessageAttack attack{{}, v1::REASON_FLOW_CONTROL_VIOLATION};
    for (uint64_t number = 1; number <= 6; ++number) {
      for (std::string& message : step(rng, number)) {
        attack.messages.push_back(std::move(message));
      }
    }
    return attack;
  });
  add("seam/no_return", Target::kSeamWithoutReturn,
      [=](Rng* rng) { return MessageAttack{step(rng, 1), v1::REASON_LIFECYCLE_VIOLATION}; });

  // What a tail answers.
  add("seam_opening/misplaced", Target::kSeamOpening, [=](Rng* rng) {
    v1::SeamMessage message;
    switch (rng->Between(0, 2)) {
      case 0:
        return One(v1::REASON_LIFECYCLE_VIOLATION, SeamBytes(GoodFrames(rng)[0]));
      case 1:
        message.mutable_closed()->add_receipts();
        return One(v1::REASON_LIFECYCLE_VIOLATION, message);
      default:
        message.mutable_credit()->set_steps(static_cast<uint32_t>(rng->Between(0, 9)));
        return One(v1::REASON_LIFECYCLE_VIOLATION, message);
    }
  });
  add("seam_opening/limits", Target::kSeamOpening, [=](Rng* rng) {
    v1::SeamMessage message = opened;
    if (rng->Coin()) {
      message.mutable_opened()->mutable_limits()->set_max_frame_bytes(rng->Between(1, 4095));
    } else {
      message.mutable_opened()->mutable_limits()->set_max_inflight_steps(
          static_cast<uint32_t>(rng->Between(1025, ~uint32_t{0})));
    }
    return One(v1::REASON_FIELD_OUT_OF_BOUNDS, message);
  });
  add("seam_opening/unknown_error", Target::kSeamOpening, [=](Rng* rng) {
    v1::SeamMessage message;
    const auto reason = static_cast<int>(rng->Between(1000, INT32_MAX));
    message.mutable_error()->set_reason(static_cast<v1::Reason>(rng->Between(0, 2) == 0 ? 0
                                                                : rng->Coin()           ? reason
                                                                                        : -reason));
    return One(v1::REASON_ENGINE_FAILURE, message);
  });
  add("seam_answer/misplaced", Target::kSeamAnswer, [=](Rng* rng) {
    v1::SeamMessage message = opened;
    if (rng->Coin()) message.mutable_closed()->add_receipts();
    if (rng->Coin()) return One(v1::REASON_LIFECYCLE_VIOLATION, SeamBytes(GoodFrames(rng)[0]));
    return One(v1::REASON_LIFECYCLE_VIOLATION, message);
  });
  add("seam_answer/credits", Target::kSeamAnswer, [=](Rng* rng) {
    v1::SeamMessage message;
    // One of four is out.
    message.mutable_credit()->set_steps(
        rng->Coin() ? 0 : static_cast<uint32_t>(rng->Between(2, ~uint32_t{0})));
    return One(v1::REASON_FLOW_CONTROL_VIOLATION, message);
  });
  add("return_opening/misplaced", Target::kReturnOpening,
      [=](Rng*) { return One(v1::REASON_LIFECYCLE_VIOLATION, result); });
  add("return_answer/misplaced", Target::kReturnAnswer,
      [=](Rng*) { return One(v1::REASON_LIFECYCLE_VIOLATION, attached); });
  add("return_answer/step", Target::kReturnAnswer, [=](Rng* rng) {
    v1::ReturnEvent message = result;
    message.mutable_result()->set_step(rng->Between(2, ~uint64_t{0}));
    return One(v1::REASON_STEP_OUT_OF_ORDER, message);
  });
  add("return_answer/mtp", Target::kReturnAnswer, [=](Rng* rng) {
    v1::ReturnEvent message = result;
    v1::MtpResult* mtp = message.mutable_result()->mutable_mtp();
    for (uint64_t i = rng->Between(0, 9); i > 0; --i) {
      mtp->add_draft_token_ids(static_cast<int32_t>(rng->Between(0, 300)));
    }
    return One(v1::REASON_RESERVED_FIELD_SET, message);
  });
  add("return_answer/tokens", Target::kReturnAnswer, [=](Rng* rng) {
    v1::ReturnEvent message = result;
    for (uint64_t i = rng->Between(1, 1000); i > 0; --i) message.mutable_result()->add_tokens();
    return One(v1::REASON_SIZE_MISMATCH, message);
  });
  add("return_answer/logits", Target::kReturnAnswer, [=](Rng* rng) {
    v1::ReturnEvent message = result;
    const uint64_t size = rng->Between(1, 9999);
    message.mutable_result()->set_logits(
        rng->Bytes(size == kAttacked.vocabulary_size * sizeof(float) ? size + 1 : size));
    return One(v1::REASON_SIZE_MISMATCH, message);
  });
  add("return_answer/cached", Target::kReturnAnswer, [=](Rng* rng) {
    v1::ReturnEvent message = result;
    if (rng->Coin()) {
      message.mutable_result()->mutable_cache()->set_cached_tokens(Other(rng, 3));
    } else {
      message.mutable_result()->clear_tokens();
    }
    return One(v1::REASON_ENGINE_OUTPUT_INVALID, message);
  });
  add("return_answer/token", Target::kReturnAnswer, [=](Rng* rng) {
    v1::ReturnEvent message = result;
    const auto id = static_cast<int32_t>(rng->Between(kAttacked.vocabulary_size, INT32_MAX));
    message.mutable_result()->mutable_tokens(0)->set_token_id(rng->Coin() ? id : -id);
    return One(v1::REASON_TOKEN_OUT_OF_RANGE, message);
  });
  return kinds;
}

// ---- Tests ----

TEST_F(SessionFuzzTest, EveryKindIsRefusedForItsReason) {
  std::map<std::string, Kind> kinds = Kinds();
  const auto frame_kinds = FrameAttacks();
  for (const auto& [name, make] : frame_kinds) {
    kinds[absl::StrCat("frame/", name)] = {Target::kSeam, [make = make](Rng* rng) {
                                             const Attack frames = make(rng);
                                             MessageAttack attack;
                                             attack.reason = frames.reason;
                                             attack.half_close = frames.finish;
                                             for (const std::string& bytes : frames.messages) {
                                               attack.messages.push_back(Delimited(3, bytes));
                                             }
                                             return attack;
                                           }};
  }
  for (const auto& [name, kind] : kinds) {
    Rng rng(1);
    ASSERT_NO_FATAL_FAILURE(Check(kind.target, kind.make(&rng))) << name;
    ASSERT_FALSE(HasFailure()) << name;
  }
  warm_ = true;
  for (const auto& [name, kind] : kinds) {
    SCOPED_TRACE(name);
    const bool is_frame = name.rfind("frame/", 0) == 0;
    // What a step that is good by itself makes of itself does not count.
    const bool computes = name.rfind("seam/", 0) == 0;
    const uint64_t computed = TokensComputed(tail_) + TokensComputed(whole_);
    Rng rng(Checksum(name));
    for (int i = 0; i < (is_frame ? kPerFrameKind : kPerMessageKind); ++i) {
      ASSERT_NO_FATAL_FAILURE(Check(kind.target, kind.make(&rng))) << i;
      ASSERT_FALSE(HasFailure()) << i;
    }
    ExpectNothingLeft();
    if (!computes) {
      EXPECT_EQ(TokensComputed(tail_) + TokensComputed(whole_), computed);
    }
    ASSERT_FALSE(HasFailure());
  }
  EXPECT_GE(sent_, 100000u);
  ExpectServes();
}

TEST_F(SessionFuzzTest, RandomCorruptionIsRefusedOrHarmless) {
  Rng rng(20240608);
  WarmUp(&rng);
  int refused = 0;
  for (int i = 0; i < kAtRandom; ++i) {
    SeamPeer peer(cluster_.get(), open_);
    ASSERT_TRUE(peer.Opened());
    ASSERT_TRUE(peer.Attach());
    const std::vector<v1::Frame> frames = GoodFrames(&rng, 1, 1);
    const size_t which = rng.Between(0, frames.size() - 1);
    size_t sent = 0;
    Begin();
    for (size_t j = 0; j < frames.size(); ++j) {
      std::string bytes = SeamBytes(frames[j]);
      if (j == which) bytes = Corrupt(std::move(bytes), &rng);
      sent += bytes.size();
      peer.seam.SendBytes(std::move(bytes));
    }
    peer.seam.stream->HalfClose();
    RunUntilQuiet();
    EXPECT_LE(PeakAllocatedBytes() - std::min(base_, PeakAllocatedBytes()),
              kAttacked.limits.max_bundle_bytes + kFixedBytes + kBytesPerReceivedByte * sent);
    // One way or another both streams have ended, and they agree.
    ASSERT_TRUE(peer.seam.closed());
    ASSERT_TRUE(peer.back.closed());
    EXPECT_EQ(peer.seam.closed_reason(), peer.back.closed_reason());
    if (peer.seam.handler->closed()->ok()) continue;
    ExpectRefused<v1::SeamMessage>(peer.seam, peer.seam.closed_reason());
    EXPECT_NE(peer.seam.closed_reason(), v1::REASON_ENGINE_FAILURE);
    ++refused;
  }
  EXPECT_GT(refused, kAtRandom * 9 / 10);
  ExpectNothingLeft();
  ExpectServes();
}

}  // namespace
}  // namespace meshnet::worker
