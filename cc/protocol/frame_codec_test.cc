#include "cc/protocol/frame_codec.h"

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "cc/common/checksum.h"
#include "cc/common/status.h"
#include "cc/shard_engine/shard_engine.h"
#include "gtest/gtest.h"

namespace meshnet {
namespace {

constexpr uint32_t kEmbd = 8;
constexpr uint32_t kVocabulary = 1000;

Limits SmallFrames() {
  Limits limits;
  limits.max_frame_bytes = 4096;
  limits.max_bundle_bytes = 1 << 20;
  return limits;
}

FrameExpectation Expectation(const Limits& limits = {}) {
  FrameExpectation expectation;
  expectation.work_id = "work-1";
  expectation.session = {std::string(16, 's'), 5};
  expectation.schema = DenseResidualSchema(kEmbd);
  expectation.applied = {0, 3};
  expectation.vocabulary_size = kVocabulary;
  expectation.context_tokens = 2048;
  expectation.limits = limits;
  return expectation;
}

WireStep MakeStep(uint64_t number, uint32_t start, uint32_t tokens) {
  WireStep step;
  step.work_id = "work-1";
  step.session = {std::string(16, 's'), 5};
  step.step = number;
  step.phase = tokens == 1 ? Phase::kDecode : Phase::kPrefill;
  step.applied = {0, 3};
  step.start_position = start;
  for (uint32_t i = 0; i < tokens; ++i) {
    step.token_ids.push_back(static_cast<int32_t>((start + i) % kVocabulary));
  }
  for (uint32_t i = 0; i < tokens * kEmbd; ++i) {
    step.residual.push_back(static_cast<float>(i) * 0.25f - static_cast<float>(number));
  }
  return step;
}

std::vector<v1::Frame> Encode(const WireStep& step, const Limits& limits = {}) {
  std::vector<v1::Frame> frames;
  const absl::Status status = EncodeStep(step, DenseResidualSchema(kEmbd), limits, &frames);
  EXPECT_TRUE(status.ok()) << status;
  return frames;
}

v1::Reason ReasonOfAdd(FrameAssembler* assembler, const v1::Frame& frame) {
  return ReasonOf(assembler->Add(frame).status());
}

void ExpectEqual(const WireStep& got, const WireStep& want) {
  EXPECT_EQ(got.work_id, want.work_id);
  EXPECT_TRUE(got.session == want.session);
  EXPECT_EQ(got.step, want.step);
  EXPECT_EQ(got.phase, want.phase);
  EXPECT_EQ(got.applied, want.applied);
  EXPECT_EQ(got.start_position, want.start_position);
  EXPECT_EQ(got.token_ids, want.token_ids);
  EXPECT_EQ(got.residual, want.residual);
  EXPECT_EQ(got.output_rows, want.output_rows);
  EXPECT_EQ(got.return_logits, want.return_logits);
  EXPECT_EQ(got.sampling.has_value(), want.sampling.has_value());
}

TEST(FrameCodecTest, DecodeStepIsOneFrame) {
  WireStep step = MakeStep(7, 40, 1);
  step.output_rows = OutputRows::kLast;
  step.return_logits = true;
  step.sampling.emplace();
  step.sampling->temperature = 0.5f;
  step.sampling->logit_bias = {{3, -std::numeric_limits<float>::infinity()}};

  const std::vector<v1::Frame> frames = Encode(step);
  ASSERT_EQ(frames.size(), 1u);
  EXPECT_EQ(frames[0].fragment().data().size(), kEmbd * 4 + 4 + 4);

  FrameAssembler assembler(Expectation());
  const auto got = assembler.Add(frames[0]);
  ASSERT_TRUE(got.ok()) << got.status();
  ASSERT_TRUE(got->has_value());
  ExpectEqual(**got, step);
  EXPECT_EQ((*got)->sampling->temperature, 0.5f);
  EXPECT_EQ((*got)->sampling->top_p, 1.0f);
  EXPECT_EQ((*got)->sampling->logit_bias, step.sampling->logit_bias);
  EXPECT_EQ(assembler.buffered_bytes(), 0u);
  EXPECT_TRUE(assembler.Finish().ok());
}

TEST(FrameCodecTest, DecodeSeamOverheadStaysBelow256Bytes) {
  WireStep step = MakeStep(1000000, 30000, 1);
  step.output_rows = OutputRows::kLast;
  const v1::Frame frame = Encode(step)[0];
  v1::SeamMessage message;
  *message.mutable_frame() = frame;
  EXPECT_LE(message.ByteSizeLong(), frame.fragment().data().size() + 256);
}

TEST(FrameCodecTest, PrefillIsCutIntoEqualFragmentsWithinTheFrameLimit) {
  const WireStep step = MakeStep(1, 0, 512);
  const std::vector<v1::Frame> frames = Encode(step, SmallFrames());
  ASSERT_EQ(frames.size(), 6u);
  FrameAssembler assembler(Expectation(SmallFrames()));
  uint64_t offset = 0;
  for (size_t i = 0; i < frames.size(); ++i) {
    v1::SeamMessage message;
    *message.mutable_frame() = frames[i];
    EXPECT_LE(message.ByteSizeLong(), 4096u);
    EXPECT_EQ(frames[i].fragment().index(), i);
    EXPECT_EQ(frames[i].fragment().count(), 6u);
    EXPECT_EQ(frames[i].fragment().offset(), offset);
    offset += frames[i].fragment().data().size();
    if (i > 0 && i + 1 < frames.size()) {
      EXPECT_EQ(frames[i].fragment().data().size(), frames[0].fragment().data().size());
      EXPECT_EQ(frames[i].tensors_size(), 0);
    }
    const auto got = assembler.Add(frames[i]);
    ASSERT_TRUE(got.ok()) << got.status();
    EXPECT_EQ(got->has_value(), i + 1 == frames.size());
    if (got->has_value()) {
      ExpectEqual(**got, step);
    } else {
      EXPECT_EQ(assembler.buffered_bytes(), 512u * (kEmbd * 4 + 8));
    }
  }
  EXPECT_EQ(offset, 512u * (kEmbd * 4 + 8));
  EXPECT_EQ(assembler.buffered_bytes(), 0u);
}

TEST(FrameCodecTest, EveryPayloadSizeAroundTheFrameLimitRoundTrips) {
  for (uint32_t tokens = 85; tokens < 110; ++tokens) {
    const WireStep step = MakeStep(1, 0, tokens);
    FrameAssembler assembler(Expectation(SmallFrames()));
    std::optional<WireStep> last;
    for (const v1::Frame& frame : Encode(step, SmallFrames())) {
      auto got = assembler.Add(frame);
      ASSERT_TRUE(got.ok()) << got.status();
      last = *std::move(got);
    }
    ASSERT_TRUE(last.has_value()) << tokens;
    ExpectEqual(*last, step);
  }
}

TEST(FrameCodecTest, EncodingIsDeterministic) {
  const WireStep step = MakeStep(3, 12, 300);
  const auto first = Encode(step, SmallFrames());
  const auto second = Encode(step, SmallFrames());
  ASSERT_EQ(first.size(), second.size());
  for (size_t i = 0; i < first.size(); ++i) {
    EXPECT_EQ(first[i].SerializeAsString(), second[i].SerializeAsString());
  }
}

TEST(FrameCodecTest, EncodeRefusesWhatDoesNotFit) {
  struct Case {
    v1::Reason reason;
    std::function<void(WireStep*, BoundarySchema*, Limits*)> change;
  };
  using S = WireStep;
  using B = BoundarySchema;
  using L = Limits;
  const std::vector<Case> cases = {
      {v1::REASON_FIELD_OUT_OF_BOUNDS, [](S* s, B*, L*) { s->work_id = ""; }},
      {v1::REASON_FIELD_OUT_OF_BOUNDS, [](S* s, B*, L*) { s->session.route_session_id = "short"; }},
      {v1::REASON_FIELD_OUT_OF_BOUNDS, [](S* s, B*, L*) { s->session.route_epoch = 0; }},
      {v1::REASON_FIELD_OUT_OF_BOUNDS, [](S* s, B*, L*) { s->step = 0; }},
      {v1::REASON_FIELD_OUT_OF_BOUNDS, [](S* s, B*, L*) { s->applied = {1, 3}; }},
      {v1::REASON_FIELD_OUT_OF_BOUNDS, [](S* s, B*, L*) { s->token_ids.clear(); }},
      {v1::REASON_FIELD_OUT_OF_BOUNDS, [](S*, B*, L* l) { l->max_step_tokens = 3; }},
      {v1::REASON_FIELD_OUT_OF_BOUNDS, [](S* s, B*, L*) { s->start_position = 0x7fffffff; }},
      {v1::REASON_FIELD_OUT_OF_BOUNDS,
       [](S* s, B*, L*) { s->output_rows = OutputRows::kAllLogits; }},
      {v1::REASON_SAMPLING_INVALID, [](S* s, B*, L*) { s->sampling.emplace(); }},
      {v1::REASON_SHAPE_MISMATCH, [](S* s, B*, L*) { s->residual.pop_back(); }},
      {v1::REASON_NON_FINITE_VALUE, [](S* s, B*, L*) { s->residual[3] = std::nanf(""); }},
      {v1::REASON_BUNDLE_TOO_LARGE, [](S*, B*, L* l) { l->max_bundle_bytes = 4 * 40 - 1; }},
      {v1::REASON_FRAME_TOO_LARGE, [](S*, B*, L* l) { l->max_frame_bytes = 1024; }},
      {v1::REASON_BOUNDARY_SCHEMA_MISMATCH,
       [](S*, B* b, L*) { b->tensors.push_back({"hyper", DType::kF32, {-1}}); }},
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    WireStep step = MakeStep(1, 0, 4);
    BoundarySchema schema = DenseResidualSchema(kEmbd);
    Limits limits;
    cases[i].change(&step, &schema, &limits);
    std::vector<v1::Frame> frames(1);
    EXPECT_EQ(ReasonOf(EncodeStep(step, schema, limits, &frames)), cases[i].reason) << i;
    EXPECT_TRUE(frames.empty());
  }
}

TEST(FrameAssemblerTest, ErrorEmptiesItAndTheNextBundlePasses) {
  FrameAssembler assembler(Expectation(SmallFrames()));
  const auto frames = Encode(MakeStep(1, 0, 300), SmallFrames());
  ASSERT_GE(frames.size(), 3u);
  ASSERT_TRUE(assembler.Add(frames[0]).ok());
  EXPECT_EQ(ReasonOfAdd(&assembler, frames[2]), v1::REASON_FRAGMENT_OUT_OF_ORDER);
  EXPECT_EQ(assembler.buffered_bytes(), 0u);
  EXPECT_TRUE(assembler.Finish().ok());
  const auto got = assembler.Add(Encode(MakeStep(2, 0, 1), SmallFrames())[0]);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_TRUE(got->has_value());
}

TEST(FrameAssemblerTest, FragmentSequenceIsStrict) {
  const auto frames = Encode(MakeStep(1, 0, 300), SmallFrames());
  const auto other = Encode(MakeStep(2, 300, 300), SmallFrames());
  ASSERT_EQ(frames.size(), 4u);
  const auto after_first = [&](const v1::Frame& second) {
    FrameAssembler assembler(Expectation(SmallFrames()));
    EXPECT_TRUE(assembler.Add(frames[0]).ok());
    return ReasonOfAdd(&assembler, second);
  };
  EXPECT_EQ(after_first(frames[0]), v1::REASON_FRAGMENT_DUPLICATE);
  EXPECT_EQ(after_first(frames[2]), v1::REASON_FRAGMENT_OUT_OF_ORDER);
  EXPECT_EQ(after_first(other[0]), v1::REASON_FRAGMENT_OUT_OF_ORDER);
  EXPECT_EQ(after_first(other[1]), v1::REASON_FRAGMENT_OUT_OF_ORDER);

  FrameAssembler assembler(Expectation(SmallFrames()));
  EXPECT_EQ(ReasonOfAdd(&assembler, frames[1]), v1::REASON_FRAGMENT_OUT_OF_ORDER);
  for (const v1::Frame& frame : frames) EXPECT_TRUE(assembler.Add(frame).ok());
  EXPECT_EQ(ReasonOfAdd(&assembler, frames[3]), v1::REASON_FRAGMENT_DUPLICATE);

  EXPECT_TRUE(assembler.Add(frames[0]).ok());
  EXPECT_EQ(ReasonOf(assembler.Finish()), v1::REASON_FRAGMENT_MISSING);
  EXPECT_TRUE(assembler.Finish().ok());
}

// Changes one thing of a good decode frame. The shared list of every reason is in tests/golden.
TEST(FrameAssemblerTest, RefusesByReason) {
  struct Case {
    v1::Reason reason;
    std::function<void(v1::Frame*)> change;
  };
  const auto reseal = [](v1::Frame* f) {
    f->mutable_fragment()->set_checksum(Checksum(f->fragment().data()));
  };
  const std::vector<Case> cases = {
      {v1::REASON_SCHEMA_VERSION_UNSUPPORTED, [](v1::Frame* f) { f->set_schema_version(2); }},
      {v1::REASON_RESERVED_FIELD_SET, [](v1::Frame* f) { f->mutable_reserved_state(); }},
      {v1::REASON_STALE_EPOCH, [](v1::Frame* f) { f->set_route_epoch(4); }},
      {v1::REASON_SESSION_UNKNOWN, [](v1::Frame* f) { f->set_route_epoch(6); }},
      {v1::REASON_UNKNOWN_ENUM_VALUE, [](v1::Frame* f) { f->set_phase(v1::Phase(9)); }},
      {v1::REASON_RANGE_MISMATCH, [](v1::Frame* f) { f->mutable_applied()->set_end(4); }},
      {v1::REASON_CONTEXT_EXCEEDED, [](v1::Frame* f) { f->set_start_position(2048); }},
      {v1::REASON_BUNDLE_TOO_LARGE,
       [](v1::Frame* f) { f->mutable_tensors(0)->set_byte_length(~uint64_t{0}); }},
      {v1::REASON_SHAPE_MISMATCH,
       [](v1::Frame* f) { f->mutable_tensors(0)->set_shape(1, kEmbd + 1); }},
      {v1::REASON_CHECKSUM_MISMATCH,
       [](v1::Frame* f) { (*f->mutable_fragment()->mutable_data())[0] ^= 1; }},
      {v1::REASON_NON_FINITE_VALUE,
       [&](v1::Frame* f) {
         f->mutable_fragment()->mutable_data()->replace(0, 4, "\x00\x00\xc0\x7f", 4);
         reseal(f);
       }},
      {v1::REASON_POSITION_MISMATCH,
       [&](v1::Frame* f) {
         (*f->mutable_fragment()->mutable_data())[kEmbd * 4] ^= 1;
         reseal(f);
       }},
      {v1::REASON_TOKEN_OUT_OF_RANGE,
       [&](v1::Frame* f) {
         f->mutable_fragment()->mutable_data()->replace(kEmbd * 4 + 4, 4, "\xff\xff\xff\xff");
         reseal(f);
       }},
  };
  for (const Case& c : cases) {
    v1::Frame frame = Encode(MakeStep(9, 17, 1))[0];
    c.change(&frame);
    FrameAssembler assembler(Expectation());
    EXPECT_EQ(ReasonOfAdd(&assembler, frame), c.reason) << ReasonName(c.reason);
    EXPECT_EQ(assembler.buffered_bytes(), 0u);
  }
}

TEST(ParseMessageTest, RefusesBeforeParsing) {
  const std::string good = Encode(MakeStep(1, 0, 1))[0].SerializeAsString();
  v1::Frame frame;
  EXPECT_TRUE(ParseMessage(good, good.size(), &frame).ok());
  EXPECT_EQ(ReasonOf(ParseMessage(good, good.size() - 1, &frame)), v1::REASON_FRAME_TOO_LARGE);
  EXPECT_EQ(
      ReasonOf(ParseMessage(absl::string_view(good).substr(0, good.size() - 3), 4096, &frame)),
      v1::REASON_MALFORMED_MESSAGE);
  // Field 19 as a varint, then the same inside `applied` (field 7).
  EXPECT_EQ(ReasonOf(ParseMessage(good + std::string("\x98\x01\x05", 3), 4096, &frame)),
            v1::REASON_UNKNOWN_FIELD);
  EXPECT_EQ(ReasonOf(ParseMessage("\x3a\x02\x18\x05", 4096, &frame)), v1::REASON_UNKNOWN_FIELD);
  // start_position (a number) as bytes.
  EXPECT_EQ(ReasonOf(ParseMessage("\x42\x01\x05", 4096, &frame)), v1::REASON_UNKNOWN_FIELD);
  // A group.
  EXPECT_EQ(ReasonOf(ParseMessage("\x43\x44", 4096, &frame)), v1::REASON_MALFORMED_MESSAGE);
  // work_id that is no UTF-8.
  EXPECT_EQ(ReasonOf(ParseMessage("\x12\x01\xff", 4096, &frame)), v1::REASON_MALFORMED_MESSAGE);
}

TEST(ParseMessageTest, RefusesMoreElementsThanAParserShouldHold) {
  std::string tensors;
  for (int i = 0; i < 2049; ++i) tensors += std::string("\x82\x01\x00", 3);
  v1::Frame frame;
  EXPECT_EQ(ReasonOf(ParseMessage(tensors, 1 << 20, &frame)), v1::REASON_FIELD_OUT_OF_BOUNDS);
  EXPECT_EQ(frame.tensors_size(), 0);
}

TEST(NegotiateLimitsTest, TakesTheSmallerOfferAndRefusesWhatIsOutOfBounds) {
  Limits ours;
  ours.max_frame_bytes = 1 << 20;
  ours.max_bundle_bytes = 8 << 20;
  ours.max_step_tokens = 512;
  ours.max_inflight_steps = 4;
  const auto defaults = NegotiateLimits({}, ours);
  ASSERT_TRUE(defaults.ok());
  EXPECT_EQ(ToProto(*defaults).SerializeAsString(), ToProto(ours).SerializeAsString());

  v1::Limits offer;
  offer.set_max_frame_bytes(4096);
  offer.set_max_bundle_bytes(16 << 20);
  offer.set_max_step_tokens(16);
  offer.set_max_inflight_steps(8);
  const auto agreed = NegotiateLimits(offer, ours);
  ASSERT_TRUE(agreed.ok()) << agreed.status();
  EXPECT_EQ(agreed->max_frame_bytes, 4096u);
  EXPECT_EQ(agreed->max_bundle_bytes, 8u << 20);
  EXPECT_EQ(agreed->max_step_tokens, 16u);
  EXPECT_EQ(agreed->max_inflight_steps, 4u);

  const auto refused = [&](const std::function<void(v1::Limits*)>& change) {
    v1::Limits bad;
    change(&bad);
    return ReasonOf(NegotiateLimits(bad, ours).status());
  };
  EXPECT_EQ(refused([](v1::Limits* l) { l->set_max_frame_bytes(4095); }),
            v1::REASON_FIELD_OUT_OF_BOUNDS);
  EXPECT_EQ(refused([](v1::Limits* l) { l->set_max_frame_bytes((64 << 20) + 1); }),
            v1::REASON_FIELD_OUT_OF_BOUNDS);
  EXPECT_EQ(refused([](v1::Limits* l) { l->set_max_bundle_bytes((1 << 30) + 1); }),
            v1::REASON_FIELD_OUT_OF_BOUNDS);
  EXPECT_EQ(refused([](v1::Limits* l) { l->set_max_bundle_bytes(1); }),
            v1::REASON_FIELD_OUT_OF_BOUNDS);
  EXPECT_EQ(refused([](v1::Limits* l) { l->set_max_step_tokens(65537); }),
            v1::REASON_FIELD_OUT_OF_BOUNDS);
  EXPECT_EQ(refused([](v1::Limits* l) { l->set_max_inflight_steps(1025); }),
            v1::REASON_FIELD_OUT_OF_BOUNDS);
}

v1::Route GoodRoute() {
  v1::Route route;
  route.set_route_session_id(std::string(16, 's'));
  route.set_route_epoch(1);
  route.set_recipe_fingerprint(std::string(64, 'a'));
  route.set_artifact_sha256(std::string(64, 'b'));
  route.set_model_layers(6);
  for (uint32_t begin = 0; begin < 6; begin += 2) {
    v1::Hop* hop = route.add_hops();
    hop->set_endpoint("127.0.0.1:1");
    *hop->mutable_range() = ToProto(LayerRange{begin, begin + 2});
  }
  return route;
}

TEST(ValidateRouteTest, WantsFullCoverageWithinBounds) {
  EXPECT_TRUE(ValidateRoute(GoodRoute()).ok());
  v1::Route relayed = GoodRoute();
  relayed.mutable_hops(1)->set_relay_peer_id(std::string(128, 'p'));
  relayed.mutable_hops(1)->set_route_token(std::string(1024, 't'));
  EXPECT_TRUE(ValidateRoute(relayed).ok());
  const std::vector<std::function<void(v1::Route*)>> changes = {
      [](v1::Route* r) { r->set_route_session_id("x"); },
      [](v1::Route* r) { r->set_route_epoch(0); },
      [](v1::Route* r) { r->set_recipe_fingerprint(""); },
      [](v1::Route* r) { r->set_artifact_sha256(std::string(65, 'a')); },
      [](v1::Route* r) { r->set_model_layers(7); },
      [](v1::Route* r) { r->set_model_layers(5); },
      [](v1::Route* r) { r->clear_hops(); },
      [](v1::Route* r) { r->mutable_hops(1)->mutable_range()->set_begin(3); },
      [](v1::Route* r) { r->mutable_hops(1)->mutable_range()->set_begin(1); },
      [](v1::Route* r) { r->mutable_hops(2)->mutable_range()->set_end(4); },
      [](v1::Route* r) { r->mutable_hops(1)->clear_endpoint(); },
      [](v1::Route* r) { r->mutable_hops(1)->set_endpoint(std::string(256, 'h')); },
      [](v1::Route* r) { r->mutable_hops(1)->set_relay_peer_id("two words"); },
      [](v1::Route* r) { r->mutable_hops(1)->set_relay_peer_id(std::string(129, 'p')); },
      [](v1::Route* r) { r->mutable_hops(1)->set_route_token(std::string(1025, 't')); },
      [](v1::Route* r) {
        r->clear_hops();
        for (uint32_t i = 0; i < 65; ++i) {
          r->add_hops()->set_endpoint("h:1");
          *r->mutable_hops(static_cast<int>(i))->mutable_range() = ToProto(LayerRange{i, i + 1});
        }
        r->set_model_layers(65);
      },
  };
  for (size_t i = 0; i < changes.size(); ++i) {
    v1::Route route = GoodRoute();
    changes[i](&route);
    EXPECT_EQ(ReasonOf(ValidateRoute(route)), v1::REASON_ROUTE_INVALID) << i;
  }
}

TEST(ValidateWorkIdTest, AcceptsItsAlphabetOnly) {
  EXPECT_TRUE(ValidateWorkId("A-z_0.9:x").ok());
  EXPECT_TRUE(ValidateWorkId(std::string(64, 'a')).ok());
  for (const std::string& bad : {std::string(), std::string(65, 'a'), std::string("a b"),
                                 std::string("a\0b", 3), std::string("\xC3\xA9")}) {
    EXPECT_EQ(ReasonOf(ValidateWorkId(bad)), v1::REASON_FIELD_OUT_OF_BOUNDS) << bad;
  }
}

TEST(SampledTokenTest, RoundTripsAndRefuses) {
  SampledToken token;
  token.token_id = 12;
  token.logprob = -0.5f;
  token.top = {{12, -0.5f}, {13, -1.5f}};
  token.end_of_generation = true;
  const auto got = FromProto(ToProto(token), kVocabulary);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->token_id, 12);
  EXPECT_EQ(got->logprob, -0.5f);
  ASSERT_EQ(got->top.size(), 2u);
  EXPECT_EQ(got->top[1].token_id, 13);
  EXPECT_EQ(got->top[1].logprob, -1.5f);
  EXPECT_TRUE(got->end_of_generation);
  EXPECT_FALSE(
      FromProto(ToProto(SampledToken{1, {}, {}, false}), kVocabulary)->logprob.has_value());

  token.token_id = static_cast<int32_t>(kVocabulary);
  EXPECT_EQ(ReasonOf(FromProto(ToProto(token), kVocabulary).status()),
            v1::REASON_TOKEN_OUT_OF_RANGE);
  token.token_id = 0;
  token.logprob = std::nanf("");
  EXPECT_EQ(ReasonOf(FromProto(ToProto(token), kVocabulary).status()), v1::REASON_NON_FINITE_VALUE);
  token.logprob = 0.0f;
  token.top.resize(21);
  EXPECT_EQ(ReasonOf(FromProto(ToProto(token), kVocabulary).status()),
            v1::REASON_FIELD_OUT_OF_BOUNDS);
}

TEST(SamplingTest, UnsetMeansOff) {
  const auto params = FromProto(v1::SamplingParams(), kVocabulary);
  ASSERT_TRUE(params.ok());
  EXPECT_EQ(params->top_p, 1.0f);
  EXPECT_EQ(params->repetition_penalty, 1.0f);
  EXPECT_EQ(params->penalty_last_n, 64u);
  EXPECT_EQ(ToProto(SamplingParams()).ByteSizeLong(), 0u);
}

TEST(CapabilityTest, CarriesWhatTheEngineKnows) {
  Capability capability;
  capability.engine = "fake";
  capability.architecture = "llama";
  capability.artifact_sha256 = "abc";
  capability.recipe = {{"a", "1"}, {"b", "2"}};
  capability.recipe_fingerprint = RecipeFingerprint(capability.recipe);
  capability.range = {2, 4};
  capability.model_layers = 4;
  capability.boundary_in = DenseResidualSchema(kEmbd);
  capability.max_step_tokens = 77;
  capability.batch_policy = BatchPolicy::kShared;
  capability.evidence = Evidence::kFixture;
  const v1::Capability proto = ToProto(capability);
  EXPECT_EQ(proto.schema_version(), 1u);
  EXPECT_EQ(proto.recipe().fields(1).value(), "2");
  EXPECT_EQ(proto.range().begin(), 2u);
  EXPECT_EQ(proto.boundary_in().tensors(0).shape(0), -1);
  EXPECT_EQ(proto.boundary_in().tensors(0).dtype(), v1::DTYPE_F32);
  EXPECT_FALSE(proto.has_boundary_out());
  EXPECT_EQ(proto.limits().max_step_tokens(), 77u);
  EXPECT_EQ(proto.batch_policy(), v1::BATCH_POLICY_SHARED);
  EXPECT_EQ(proto.evidence(), v1::EVIDENCE_FIXTURE);
}

}  // namespace
}  // namespace meshnet
