// Malformed frames by the hundred thousand, from a seeded generator.
//
// Two thirds are made by kind and must get that kind's reason; the rest are corrupted at random and
// must be refused for any reason, or be a step within all bounds. Every allocation is counted: what
// a frame makes the receiver hold is bounded by the negotiated bundle plus a small multiple of the
// bytes that really came, whatever sizes it declares.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "cc/common/allocations.h"
#include "cc/common/checksum.h"
#include "cc/common/status.h"
#include "cc/protocol/frame_attacks.h"
#include "cc/protocol/frame_codec.h"
#include "gtest/gtest.h"

namespace meshnet {
namespace {

constexpr int kPerKind = 2000;
constexpr int kAtRandom = 40000;

// What parsing may take beside the bundle: a submessage of two bytes becomes an object of about a
// hundred, an error has its text.
constexpr size_t kBytesPerReceivedByte = 80;
constexpr size_t kFixedBytes = 8192;

const FrameExpectation kSeam = AttackedSeam();

// Feeds one message and checks what it made the receiver hold meanwhile.
absl::Status Feed(const std::string& bytes, size_t base, FrameAssembler* assembler,
                  std::optional<WireStep>* step) {
  absl::Status status;
  RestartPeak();
  {
    v1::Frame frame;
    status = ParseMessage(bytes, kSeam.limits.max_frame_bytes, &frame);
    if (status.ok()) {
      auto result = assembler->Add(frame);
      status = result.status();
      if (result.ok()) *step = *std::move(result);
    } else {
      // The assembler has not seen it; the stream ends here for its owner.
      (void)assembler->Finish();
    }
  }
  const size_t peak = PeakAllocatedBytes();
  const size_t held = peak > base ? peak - base : 0;
  const size_t allowed =
      kSeam.limits.max_bundle_bytes + kFixedBytes +
      kBytesPerReceivedByte * std::min<size_t>(bytes.size(), kSeam.limits.max_frame_bytes);
  EXPECT_LE(held, allowed);
  EXPECT_LE(assembler->buffered_bytes(), kSeam.limits.max_bundle_bytes);
  return status;
}

void ExpectUsable(Rng* rng, FrameAssembler* assembler) {
  std::optional<WireStep> step;
  for (const v1::Frame& frame : GoodFrames(rng)) {
    auto result = assembler->Add(frame);
    ASSERT_TRUE(result.ok()) << result.status();
    step = *std::move(result);
  }
  EXPECT_TRUE(step.has_value());
}

// Descriptors and their options come into being on first use.
void WarmUp() {
  v1::Frame frame;
  ASSERT_EQ(ReasonOf(ParseMessage("\x08", kSeam.limits.max_frame_bytes, &frame)),
            v1::REASON_MALFORMED_MESSAGE);
}

TEST(FrameFuzzTest, EveryKindIsRefusedForItsReason) {
  const std::map<std::string, MakeAttack> kinds = FrameAttacks();
  ASSERT_GE(kinds.size() * kPerKind + kAtRandom, 100000u);
  FrameAssembler assembler(kSeam);
  WarmUp();
  for (const auto& [name, make] : kinds) {
    SCOPED_TRACE(name);
    Rng rng(Checksum(name));
    for (int i = 0; i < kPerKind; ++i) {
      const Attack attack = make(&rng);
      const size_t base = AllocatedBytes();
      std::optional<WireStep> step;
      absl::Status status;
      for (const std::string& bytes : attack.messages) {
        ASSERT_TRUE(status.ok()) << "refused early in round " << i << ": " << status;
        step.reset();
        status = Feed(bytes, base, &assembler, &step);
      }
      if (attack.finish) status = assembler.Finish();
      ASSERT_EQ(ReasonOf(status), attack.reason) << "round " << i << ": " << status;
      ASSERT_EQ(assembler.buffered_bytes(), 0u);
      if (i % 100 == 0) ExpectUsable(&rng, &assembler);
    }
  }
}

TEST(FrameFuzzTest, RandomCorruptionIsRefusedOrHarmless) {
  Rng rng(20240607);
  FrameAssembler assembler(kSeam);
  WarmUp();
  int refused = 0;
  for (int i = 0; i < kAtRandom; ++i) {
    const std::vector<v1::Frame> frames = GoodFrames(&rng);
    const size_t which = rng.Between(0, frames.size() - 1);
    const size_t base = AllocatedBytes();
    bool ok = true;
    for (size_t j = 0; ok && j < frames.size(); ++j) {
      std::string bytes = frames[j].SerializeAsString();
      if (j == which) bytes = Corrupt(std::move(bytes), &rng);
      std::optional<WireStep> step;
      const absl::Status status = Feed(bytes, base + bytes.capacity(), &assembler, &step);
      ok = status.ok();
      if (!ok) {
        ++refused;
        ASSERT_NE(ReasonOf(status), v1::REASON_ENGINE_FAILURE) << status;
        ASSERT_EQ(assembler.buffered_bytes(), 0u);
      }
      if (!step.has_value()) continue;
      ASSERT_LE(step->start_position + step->token_ids.size(), kSeam.context_tokens);
      ASSERT_EQ(step->residual.size(), step->token_ids.size() * kSeam.schema.residual_width());
      for (const int32_t id : step->token_ids)
        ASSERT_LT(static_cast<uint32_t>(id), kSeam.vocabulary_size);
      for (const float value : step->residual) ASSERT_TRUE(std::isfinite(value));
    }
    // What corruption left unfinished.
    (void)assembler.Finish();
  }
  // Corruption that hits a step number or a seed stays unnoticed; nearly all is noticed.
  EXPECT_GT(refused, kAtRandom * 9 / 10);
}

}  // namespace
}  // namespace meshnet
