// The C++ implementation against tests/golden; Python runs the same files in golden_test.py there.
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "cc/common/status.h"
#include "cc/protocol/frame_codec.h"
#include "cc/protocol/golden.h"
#include "google/protobuf/text_format.h"
#include "gtest/gtest.h"
#include "tests/golden/golden.pb.h"

namespace meshnet {
namespace {

// Bazel runs tests where their data files lie under their names in the repository.
template <typename Message>
Message ReadGolden(const std::string& name) {
  std::ifstream file("tests/golden/" + name);
  EXPECT_TRUE(file.is_open()) << name;
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  Message message;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &message)) << name;
  return message;
}

absl::Status Feed(const std::string& bytes, uint64_t max_bytes, FrameAssembler* assembler,
                  std::optional<WireStep>* step) {
  v1::Frame frame;
  if (absl::Status status = ParseMessage(bytes, max_bytes, &frame); !status.ok()) return status;
  auto result = assembler->Add(frame);
  if (!result.ok()) return result.status();
  *step = *std::move(result);
  return absl::OkStatus();
}

TEST(GoldenTest, StepsAreEncodedByteForByteAndComeBack) {
  const auto golden = ReadGolden<golden::EncodedSteps>("frames.textproto");
  EXPECT_GE(golden.steps_size(), 10);
  for (const golden::EncodedStep& c : golden.steps()) {
    SCOPED_TRACE(c.name());
    const FrameExpectation expectation = FromGolden(c.expectation());
    const auto step = FromGolden(c.step(), expectation.vocabulary_size);
    ASSERT_TRUE(step.ok()) << step.status();
    std::vector<v1::Frame> frames;
    const absl::Status encoded = EncodeStep(*step, expectation.schema, expectation.limits, &frames);
    ASSERT_TRUE(encoded.ok()) << encoded;
    ASSERT_EQ(static_cast<int>(frames.size()), c.frames_size());

    FrameAssembler assembler(expectation);
    std::optional<WireStep> got;
    for (int i = 0; i < c.frames_size(); ++i) {
      const std::string bytes = BytesOfHex(c.frames(i));
      EXPECT_EQ(absl::BytesToHexString(frames[static_cast<size_t>(i)].SerializeAsString()),
                c.frames(i));
      const absl::Status status = Feed(bytes, expectation.limits.max_frame_bytes, &assembler, &got);
      ASSERT_TRUE(status.ok()) << status;
      EXPECT_EQ(got.has_value(), i + 1 == c.frames_size());
    }
    ASSERT_TRUE(got.has_value());
    EXPECT_EQ(ToGolden(*got).SerializeAsString(), ToGolden(*step).SerializeAsString());
    EXPECT_TRUE(assembler.Finish().ok());
  }
}

TEST(GoldenTest, MalformedFramesAreRefusedForTheirReason) {
  const auto golden = ReadGolden<golden::MalformedFrames>("malformed_frames.textproto");
  EXPECT_GE(golden.cases_size(), 60);
  for (const golden::MalformedCase& c : golden.cases()) {
    SCOPED_TRACE(c.name());
    const FrameExpectation expectation =
        FromGolden(c.has_expectation() ? c.expectation() : golden.expectation());
    FrameAssembler assembler(expectation);
    std::optional<WireStep> step;
    absl::Status status;
    for (int i = 0; i < c.frames_size(); ++i) {
      ASSERT_TRUE(status.ok()) << "frame " << i - 1 << " was refused early: " << status;
      status = Feed(BytesOfHex(c.frames(i)), expectation.limits.max_frame_bytes, &assembler, &step);
    }
    if (c.finish()) {
      ASSERT_TRUE(status.ok()) << status;
      status = assembler.Finish();
    }
    EXPECT_EQ(ReasonName(ReasonOf(status)), c.reason()) << status;
    EXPECT_FALSE(status.message().empty());
    EXPECT_EQ(assembler.buffered_bytes(), 0u);
    EXPECT_TRUE(assembler.Finish().ok());
  }
}

}  // namespace
}  // namespace meshnet
